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
from lm.system.files import folder_bytes
from lm.system.parsing import flatten, to_json
from lm.system.process import harmless, program
from lm.system.units import format_bytes, format_count, format_duration, format_figure

STYLES = {
    "running": "green",
    "finished": "cyan",
    **dict.fromkeys(("stopped", "interrupted"), "yellow"),
    **dict.fromkeys(("failed", "dead"), "red"),
    "gone": "dim",
}
LOSSES = ("train/loss", "val/loss", "val/bpb")
SPEEDS = ("perf/tokens_per_second", "perf/mfu", "perf/mfu_full_attention", "perf/gpu_load")
CURVES = (*LOSSES, "optim/grad_norm", *SPEEDS)
# Facts of the run that are shown as they are.
FACTS = (
    *("max_tokens", "eta_seconds", "phase", "time", "pid", "note", "branch", "acceptance", "device", "world_size"),
    *("python", "versions", "git", "command", "budget"),
)
SETTINGS = (  # shown on the page
    *("model.decoder.num_hidden_layers", "model.decoder.hidden_size", "model.decoder.num_attention_heads"),
    *("model.optimizer.name", "model.optimizer.class_path", "model.optimizer.lr", "model.schedule.name"),
    *("data.path", "data.seq_len", "data.global_batch_tokens", "trainer.precision", "seed_everything"),
)
SAMPLE_CHARACTERS = 200


def show(run: str, json: bool = False, root: str = str(ROOT)) -> None:
    """Show one run: progress, losses, speed, settings, checkpoints, machine, cost, evaluation, alerts and samples.

    Args:
        run: Name under the root or in the registry, or a path.
        json: Print one JSON object instead.
        root: Folder of the runs.
    """
    described = describe_run(find_run(run, root))
    if json:
        print(to_json(described))
    else:
        _print_page(described)


def describe_run(run: Run) -> dict[str, Any]:
    """What `lm runs show --json` prints; what is not known is None or empty."""
    facts, row = read_facts(run), run_row(run)
    metrics, config, steps = run.metrics(), run.settings(), run.steps()
    best, last = run.link("best"), run.link("last") or next(reversed(steps.values()), None)
    samples, flops_per_token = read_samples(run), facts["flops_per_token"]
    first_sample = (facts["stretches"] or [{}])[0].get("sample", 0)
    curves = {name: summarize(metrics, name) for name in CURVES}
    return {
        **row,
        **{name: facts[name] for name in FACTS},
        "branches": find_branches(run),
        "parameters": count_parameters(last / "model.safetensors") if last else None,
        "config": config,
        "curves": {name: curve for name, curve in curves.items() if curve},
        "sources": {source: last_values(metrics, source) for source in (facts["mixture"] or {}).get("sources", [])},
        "checkpoints": [
            {"step": step, "path": str(path), "bytes": folder_bytes(path), "best": path == best, "last": path == last}
            for step, path in steps.items()
        ],
        "seconds": time_spent(metrics, tokens=first_sample * (config.get("data", {}).get("seq_len") or 0)),
        "flops": None if None in (flops_per_token, facts["tokens"]) else flops_per_token * facts["tokens"],
        "alerts": run.alerts(),
        "post_mortems": sorted(str(path) for path in run.path.glob("postmortem-*") if path.is_dir()),
        "evaluation": merge_evaluations(run.evaluations()),
        "samples": [sample for sample in samples if sample["step"] == samples[-1]["step"]],
        "next": next_command(run, row["status"]),
    }


def find_branches(run: Run) -> list[list[Any]]:
    """The names of the runs beside a run that are branches of it, with the steps at which they begin."""
    origins = [(other.name, other.read("run.json").get("branch")) for other in Run.all(run.path.parent)]
    return [[name, origin["step"]] for name, origin in origins if origin and origin["path"] == str(run.path.resolve())]


def last_values(metrics: list[dict[str, Any]], source: str) -> dict[str, float]:
    """The last value of each metric that a source of a mixture has."""
    values: dict[str, float] = {}
    for line in metrics:
        values |= {name: line[f"{name}/{source}"] for name in BY_SOURCE if f"{name}/{source}" in line}
    return values


def summarize(metrics: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The first and the last value of a metric, its extremes with their steps, its median and its mean."""
    points = [(line[name], line["step"]) for line in metrics if name in line]
    if not points:
        return None
    finite = [(value, step) for value, step in points if value == value] or points
    chosen = {"first": points[0], "last": points[-1], "lowest": min(finite), "highest": max(finite)}
    summary = {name: value for name, (value, _) in chosen.items()}
    summary |= {f"{name}_step": step for name, (_, step) in chosen.items()}
    values = [value for value, _ in finite]
    return summary | {"median": statistics.median(values), "mean": statistics.fmean(values)}


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


def _print_page(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    title = Text(facts["name"], style="bold")
    title.append(f"  {facts['status']}", style=STYLES.get(facts["status"], ""))
    if facts["reason"]:
        title.append(f": {harmless(facts['reason'])}")
    console.print(title)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = {
        "where": [facts["path"]],
        "about": _about(facts),
        "progress": _progress(facts),
        "losses": _losses(facts),
        "speed": _speed(facts),
        "time": _time(facts),
        "settings": _settings(facts),
        "checkpoints": [saved_checkpoints(facts)],
        "machine": [machine_of(facts), f"python {facts['python']}, {versions}"],
        "started as": [shlex.join(start_command(facts)), f"git {facts['git']}" if facts["git"] else ""],
        "cost": [cost(facts)],
        "evaluation": describe_evaluation(facts["evaluation"]),
        "alerts": _alerts(facts["alerts"]),
        "samples": _samples(facts),
        "post-mortems": [Path(path).name for path in facts["post_mortems"]],
    }
    width = max(map(len, parts))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=width)
    grid.add_column(overflow="fold")
    for name, lines in parts.items():
        for number, line in enumerate(line for line in lines if line):
            grid.add_row(name if not number else "", Text(harmless(line)))
    console.print(grid)
    command = Text("next".ljust(width + 2), style="dim").append(facts["next"], style="not dim")
    console.print(command, soft_wrap=True)  # in one piece, to be copied


def checks_of(facts: dict[str, Any]) -> list[Expectation]:
    """What a run was expected to end with, and did."""
    checks = (facts["acceptance"] or {}).get("checks", [])
    return [Expectation(each["metric"], each["low"], each["high"], each["value"]) for each in checks]


def chosen_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Those of `SETTINGS` that a config has, by their names with dots."""
    flat = flatten(config)
    if flat.get("model.optimizer.class_path"):  # which counts, and not the name
        flat["model.optimizer.name"] = None
    return {name: flat[name] for name in SETTINGS if flat.get(name) is not None}


def start_command(facts: dict[str, Any]) -> list[str]:
    """The command that started a run; `python -m lm` is written as `lm`, and a script by its name."""
    command = list(map(str, facts["command"]))
    return ["lm", *command[1:]] if command[:1] == ["__main__.py"] else command


def machine_of(facts: dict[str, Any]) -> str:
    devices = f"{facts['world_size'] or 1} x {facts['device'] or 'unknown device'}"
    return devices + (f" on {facts['host']}" if facts["host"] else "")


def _about(facts: dict[str, Any]) -> list[str]:
    branched, origin = "", facts["branch"]
    if origin:
        changes = [f"{key} {old} -> {new}" for key, (old, new) in origin["changes"].items()]
        branched = f"branch of {origin['run']} at step {origin['step']:,}: {', '.join(changes) or 'nothing changed'}"
    branches = ", ".join(f"{name} at step {step:,}" for name, step in facts["branches"])
    tags = f"tags: {', '.join(facts['tags'])}" if facts["tags"] else ""
    lines = [branched, f"branches: {branches}" if branches else "", facts["note"] or "", tags]
    return lines + [str(check) for check in checks_of(facts)]


def _progress(facts: dict[str, Any]) -> list[str]:
    if facts["step"] is None:
        return ["no step yet"]
    last = facts["max_steps"]
    total = f" of {last:,} ({facts['step'] / last:.0%})" if last else ""
    tokens = "" if facts["tokens"] is None else f", {format_count(facts['tokens'])} tokens"
    remaining = f", {format_duration(facts['eta_seconds'])} to go" if facts["eta_seconds"] else ""
    entered = f", last started {format_duration(time.time() - facts['entered'])} ago" if facts["entered"] else ""
    started = f"started {facts['started']}{entered}" if facts["started"] else ""
    return [f"step {facts['step']:,}{total}{tokens}{remaining}", started]


def _losses(facts: dict[str, Any]) -> list[str]:
    lines = []
    for name in LOSSES:
        if curve := facts["curves"].get(name):
            lines.append(
                f"{METRICS[name].label:<24}  from {curve['first']:.4f} to {curve['last']:.4f}, "
                f"lowest {curve['lowest']:.4f} at step {curve['lowest_step']:,}"
            )
    for source, last in facts["sources"].items():
        losses = [f"{METRICS[name].label} {last[name]:.4f}" for name in LOSSES if name in last]
        losses += [f"after {last['data/epochs']:.3g} epochs"] if "data/epochs" in last else []
        lines.append(f"{source:<24}  {', '.join(losses) or 'no sample since the log line before'}")
    return lines


def _speed(facts: dict[str, Any]) -> list[str]:
    if not (speed := facts["curves"].get("perf/tokens_per_second")):
        return []
    lines = [f"{format_count(speed['last'])} tokens/s, median {format_count(speed['median'])}"]
    mfu, full = facts["curves"].get("perf/mfu"), facts["curves"].get("perf/mfu_full_attention")
    if mfu and full:
        lines.append(f"median MFU: {describe_mfu(mfu['median'], full['median'])}")
    return lines


def _time(facts: dict[str, Any]) -> list[str]:
    seconds, load = facts["seconds"], facts["curves"].get("perf/gpu_load")
    waiting = seconds["waiting for data"]
    training = waiting + seconds["computing"]
    lines = []
    if training:
        lines.append(
            f"{format_duration(training)} of training over all sessions, {waiting / training:.1%} of it waiting for "
            f"data; {format_duration(seconds['pauses'])} of pauses: validations, checkpoints, stops"
        )
    if facts["flops"]:
        lines.append(f"{facts['flops']:.3g} FLOPs")
    return [*lines, f"mean GPU load {load['mean']:.0f}%" if load else ""]


def _settings(facts: dict[str, Any]) -> list[str]:
    total = "" if facts["parameters"] is None else f"{format_count(facts['parameters'])} parameters"
    return [total, ", ".join(f"{name} {value}" for name, value in chosen_settings(facts["config"]).items())]


def saved_checkpoints(facts: dict[str, Any]) -> str:
    parts = []
    for one in facts["checkpoints"]:
        about = [*(mark for mark in ("best", "last") if one[mark]), format_bytes(one["bytes"])]
        parts.append(f"step {one['step']:,} ({', '.join(about)})")
    return ", ".join(parts) or "none yet"


def cost(facts: dict[str, Any]) -> str:
    budget, names = facts["budget"] or {}, ("spent_usd", "cap_usd", "rate_usd_per_hr", "projected_total_usd")
    return ", ".join(f"{name} {format_figure(budget[name])}" for name in names if budget.get(name) is not None)


def _alerts(alerts: list[dict[str, Any]]) -> list[str]:
    newest = ["step {step}, {guard}: {message} ({action})".format(**alert) for alert in alerts[-5:]]
    older = len(alerts) - len(newest)
    return [f"{older} before these", *newest] if older else newest


def _samples(facts: dict[str, Any]) -> list[str]:
    lines = []
    for sample in facts["samples"]:
        text = " ".join(f"{sample['prompt']} {sample['text']}".split())
        text = text if len(text) <= SAMPLE_CHARACTERS else text[: SAMPLE_CHARACTERS - 1] + "…"
        lines.append(f"step {sample['step']}: {text}")
    return lines
