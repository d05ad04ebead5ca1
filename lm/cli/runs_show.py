"""`lm runs show`: one run on a page of the terminal, or as one object of JSON. Nothing here imports torch."""

import math
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from lm.model.estimates import describe_mfu
from lm.runs.evaluations import describe_evaluation, merge_evaluations
from lm.runs.expectations import Expectation
from lm.runs.facts import read_facts, run_row
from lm.runs.find import find_run
from lm.runs.history import read_samples, time_spent
from lm.runs.metrics import BY_SOURCE, METRICS
from lm.runs.run import ROOT, Run
from lm.system.output_folder import folder_bytes
from lm.system.parsing import to_json
from lm.system.process import harmless, program
from lm.system.units import format_bytes, format_count, format_duration, format_figure, plural

STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "interrupted": "yellow", "failed": "red",
          "dead": "red", "gone": "dim"}  # fmt: skip
LOSSES = ("train/loss", "val/loss", "val/bpb")
SAMPLE_CHARACTERS = 200


def show(run: str, json: bool = False, root: str = str(ROOT)) -> None:
    """Show one run: progress, losses, speed, model, checkpoints, machine, cost, evaluation, alerts and samples.

    Args:
        run: Name under the root or in the registry, or a path.
        json: Print one JSON object instead.
        root: Folder of the runs.
    """
    found = describe_run(find_run(run, root))
    if json:
        print(to_json(found))
    else:
        _print_page(found)


def describe_run(run: Run) -> dict[str, Any]:
    """What `lm runs show --json` prints; what is not known is None or empty."""
    facts, row = read_facts(run), run_row(run)
    metrics, config, steps = run.metrics(), run.settings(), run.steps()
    best, last = run.link("best"), run.link("last") or next(reversed(steps.values()), None)
    samples, each, begin = read_samples(run), facts["flops_per_token"], (facts["stretches"] or [{}])[0]
    return {
        **row,
        **{name: facts[name] for name in (
            "max_tokens", "eta_seconds", "phase", "time", "pid", "note", "branch", "acceptance", "device",
            "world_size", "python", "versions", "git", "command", "budget",
        )},
        "branches": [[other.name, origin["step"]] for other in Run.all(run.path.parent)
                     if (origin := other.read("run.json").get("branch")) and origin["path"] == str(run.path.resolve())],
        "parameters": count_parameters(last / "model.safetensors") if last else None,
        "config": config,
        "curves": {name: curve for name in (*LOSSES, "optim/grad_norm", "perf/tokens_per_second", "perf/mfu",
                                            "perf/mfu_full_attention", "perf/gpu_load")
                   if (curve := summarize(metrics, name))},
        "sources": {source: {name: curve["last"] for name in BY_SOURCE
                             if (curve := summarize(metrics, f"{name}/{source}"))}
                    for source in (facts["mixture"] or {}).get("sources", [])},
        "checkpoints": [
            {"step": step, "path": str(path), "bytes": folder_bytes(path), "best": path == best, "last": path == last}
            for step, path in steps.items()
        ],
        "seconds": time_spent(metrics, tokens=begin.get("sample", 0) * (config.get("data", {}).get("seq_len") or 0)),
        "flops": None if None in (each, facts["tokens"]) else each * facts["tokens"],
        "alerts": run.alerts(),
        "post_mortems": sorted(str(path) for path in run.path.glob("postmortem-*") if path.is_dir()),
        "evaluation": merge_evaluations(run.evaluations()),
        "samples": [sample for sample in samples if sample["step"] == samples[-1]["step"]],
        "next": next_command(run, row["status"]),
    }  # fmt: skip


def summarize(metrics: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The first and the last value of a metric, its extremes with their steps, its median and its mean."""
    points = [(line[name], line["step"]) for line in metrics if name in line]
    if not points:
        return None
    finite = [(value, step) for value, step in points if value == value] or points
    (lowest, lowest_at), (highest, highest_at) = min(finite), max(finite)
    return {
        "first": points[0][0], "first_step": points[0][1], "last": points[-1][0], "last_step": points[-1][1],
        "lowest": lowest, "lowest_step": lowest_at, "highest": highest, "highest_step": highest_at,
        "median": statistics.median(value for value, _ in finite),
        "mean": statistics.fmean(value for value, _ in finite),
    }  # fmt: skip


def count_parameters(file: Path) -> int | None:
    """Numbers in a safetensors file, from its header; None if it is damaged."""
    try:
        with safe_open(file, framework="numpy") as weights:
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())
    except (OSError, SafetensorError):
        return None


def next_command(run: Run, status: str) -> str:
    """The command to type next: watch a run that is running, validate one that has finished, resume any other."""
    if status == "running":
        return f"{program()} monitor {shlex.quote(run.name)}"
    if status == "finished":
        return run.validate_command()
    return run.resume_command()


def _print_page(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    title = Text(found["name"], style="bold")
    title.append(f"  {found['status']}", style=STYLES.get(found["status"], ""))
    if found["reason"]:
        title.append(f": {harmless(found['reason'])}")
    console.print(title)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = {
        "where": [found["path"]], "about": _about(found), "progress": _progress(found), "losses": _losses(found),
        "speed": _speed(found), "time": _time(found),
        "model": _model(found), "training": _training(found["config"]), "checkpoints": _checkpoints(found),
        "machine": [machine_of(found), f"python {found['python']}, {versions}"],
        "started as": [shlex.join(start_command(found)), f"git {found['git']}" if found["git"] else ""],
        "cost": _cost(found["budget"]),
        "evaluation": describe_evaluation(found["evaluation"]), "alerts": _alerts(found["alerts"]),
        "samples": _samples(found),
        "post-mortems": [Path(path).name for path in found["post_mortems"]],
    }  # fmt: skip
    width = max(map(len, parts))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=width)
    grid.add_column(overflow="fold")
    for name, lines in parts.items():
        for number, line in enumerate(line for line in lines if line):
            grid.add_row(name if not number else "", Text(harmless(line)))
    console.print(grid)
    command = Text("next".ljust(width + 2), style="dim").append(found["next"], style="not dim")
    console.print(command, soft_wrap=True)  # in one piece, to be copied


def checks_of(found: dict[str, Any]) -> list[Expectation]:
    """What a run was expected to end with, and did."""
    checks = (found["acceptance"] or {}).get("checks", [])
    return [Expectation(each["metric"], each["low"], each["high"], each["value"]) for each in checks]


def start_command(found: dict[str, Any]) -> list[str]:
    """The command that started a run; `python -m lm` is written as `lm`, and a script by its name."""
    command = list(map(str, found["command"]))
    return ["lm", *command[1:]] if command[:1] == ["__main__.py"] else command


def machine_of(found: dict[str, Any]) -> str:
    devices = f"{found['world_size'] or 1} x {found['device'] or 'unknown device'}"
    return devices + (f" on {found['host']}" if found["host"] else "")


def _about(found: dict[str, Any]) -> list[str]:
    branched, origin = "", found["branch"]
    if origin:
        changes = [f"{key} {old} -> {new}" for key, (old, new) in origin["changes"].items()]
        branched = f"branch of {origin['run']} at step {origin['step']:,}: {', '.join(changes) or 'nothing changed'}"
    branches = ", ".join(f"{name} at step {step:,}" for name, step in found["branches"])
    tags = f"tags: {', '.join(found['tags'])}" if found["tags"] else ""
    return [branched, f"branches: {branches}" if branches else "", found["note"] or "", tags,
            *map(str, checks_of(found))]  # fmt: skip


def _progress(found: dict[str, Any]) -> list[str]:
    if found["step"] is None:
        return ["no step yet"]
    last = found["max_steps"]
    of = f" of {last:,} ({found['step'] / last:.0%})" if last else ""
    tokens = "" if found["tokens"] is None else f", {format_count(found['tokens'])} tokens"
    left = f", {format_duration(found['eta_seconds'])} to go" if found["eta_seconds"] else ""
    entered = f", last started {format_duration(time.time() - found['entered'])} ago" if found["entered"] else ""
    return [
        f"step {found['step']:,}{of}{tokens}{left}",
        f"started {found['started']}{entered}" if found["started"] else "",
    ]


def _losses(found: dict[str, Any]) -> list[str]:
    lines = []
    for name in LOSSES:
        if curve := found["curves"].get(name):
            lines.append(
                f"{METRICS[name].label:<24}  from {curve['first']:.4f} to {curve['last']:.4f}, "
                f"lowest {curve['lowest']:.4f} at step {curve['lowest_step']:,}"
            )
    for source, last in found["sources"].items():
        losses = [f"{METRICS[name].label} {last[name]:.4f}" for name in LOSSES if name in last]
        losses += [f"after {last['data/epochs']:.3g} epochs"] if "data/epochs" in last else []
        lines.append(f"{source:<24}  {', '.join(losses) or 'no sample since the log line before'}")
    return lines


def _speed(found: dict[str, Any]) -> list[str]:
    if not (speed := found["curves"].get("perf/tokens_per_second")):
        return []
    lines = [f"{format_count(speed['last'])} tokens/s, median {format_count(speed['median'])}"]
    mfu, full = found["curves"].get("perf/mfu"), found["curves"].get("perf/mfu_full_attention")
    if mfu and full:
        lines.append(f"median MFU: {describe_mfu(mfu['median'], full['median'])}")
    return lines


def _time(found: dict[str, Any]) -> list[str]:
    seconds, load = found["seconds"], found["curves"].get("perf/gpu_load")
    waiting = seconds["waiting for data"]
    training = waiting + seconds["computing"]
    lines = []
    if training:
        lines.append(
            f"{format_duration(training)} of training over all sessions, {waiting / training:.1%} of it waiting for "
            f"data; {format_duration(seconds['pauses'])} of pauses: validations, checkpoints, stops"
        )
    if found["flops"]:
        lines.append(f"{found['flops']:.3g} operations")
    return [*lines, f"mean GPU load {load['mean']:.0f}%" if load else ""]


def _model(found: dict[str, Any]) -> list[str]:
    decoder = found["config"].get("model", {}).get("decoder", {})
    total = "" if found["parameters"] is None else f"{format_count(found['parameters'])} parameters, "
    heads = decoder.get("num_attention_heads")
    if not decoder:
        return [total.rstrip(", ")]
    return [
        f"{total}{plural(decoder.get('num_hidden_layers') or 0, 'layer')} of {decoder.get('hidden_size')}, "
        f"{plural(heads or 0, 'head')} ({decoder.get('num_key_value_heads') or heads} for keys and values), "
        f"context {decoder.get('max_position_embeddings')}"
    ]


def _training(config: dict[str, Any]) -> list[str]:
    model, data, trainer = (config.get(name) or {} for name in ("model", "data", "trainer"))
    optimizer, schedule = model.get("optimizer") or {}, model.get("schedule") or {}
    if not optimizer:
        return []
    mixture = ", ".join(f"{source['name']} ({source.get('weight', 1):g} of {source.get('path') or source.get('train')})"
                        for source in data.get("sources") or [])  # fmt: skip
    tokens, rows = data.get("global_batch_tokens"), data.get("micro_batch_size") or 0
    step = f"{tokens:,} tokens a step in rows" if tokens else f"{plural(rows, 'row')} a step and device"
    return [
        f"{optimizer.get('class_path') or optimizer.get('name')}, lr {optimizer.get('lr')}, "
        f"{schedule.get('name')} schedule, "
        f"{step} of {data.get('seq_len')} tokens, {trainer.get('precision')}, "
        f"seed {config.get('seed_everything')}",
        f"data {data.get('path') or data.get('train') or mixture}",
    ]


def _checkpoints(found: dict[str, Any]) -> list[str]:
    parts = []
    for one in found["checkpoints"]:
        about = [*(mark for mark in ("best", "last") if one[mark]), format_bytes(one["bytes"])]
        parts.append(f"step {one['step']:,} ({', '.join(about)})")
    return [", ".join(parts) or "none yet"]


def _cost(budget: dict[str, Any] | None) -> list[str]:
    if not budget:
        return []
    texts = {"spent_usd": "{} USD spent", "cap_usd": "of {}", "rate_usd_per_hr": "at {} an hour",
             "projected_total_usd": "{} in the end"}  # fmt: skip
    known = {key: text for key, text in texts.items() if budget.get(key) is not None}
    return [", ".join(text.format(format_figure(budget[key])) for key, text in known.items())]


def _alerts(alerts: list[dict[str, Any]]) -> list[str]:
    lines = ["step {step}, {guard}: {message} ({action})".format(**alert) for alert in alerts[-5:]]
    return [f"{len(alerts) - len(lines)} before these"] * (len(alerts) > len(lines)) + lines


def _samples(found: dict[str, Any]) -> list[str]:
    lines = []
    for sample in found["samples"]:
        text = " ".join(f"{sample['prompt']} {sample['text']}".split())
        text = text if len(text) <= SAMPLE_CHARACTERS else text[: SAMPLE_CHARACTERS - 1] + "…"
        lines.append(f"step {sample['step']}: {text}")
    return lines
