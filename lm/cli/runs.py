"""`lm runs ls`, `show`, `rm` and `rebuild`: all runs of a user, one run on a page, its removal, and their registry.

Nothing here imports torch. `cli/runs_compare` has the other commands.
"""

import json as jsonlib
import logging
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from lm.errors import LmError, RequestError
from lm.model.estimates import describe_mfu
from lm.runs import registry
from lm.runs.facts import read_facts, run_row
from lm.runs.history import Expectation, acceptance, expectations, read_samples, time_spent
from lm.runs.metrics import BY_SOURCE, METRICS, describe_evaluation, merge_evaluations
from lm.runs.run import ROOT, Run
from lm.system.files import finite_or_none
from lm.system.process import harmless, program
from lm.system.units import format_bytes, format_count, format_duration, format_figure, plural

log = logging.getLogger(__name__)

SHOWN = 20  # runs of other folders that `ls` shows without --all
STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow", "interrupted": "yellow", "failed": "red",
          "dead": "red", "gone": "dim"}  # fmt: skip
EXPLAINED = ("stopped", "interrupted", "failed")  # statuses that have a reason worth a line


def ls(all: bool = False, tag: str | None = None, root: str = str(ROOT), json: bool = False) -> None:
    """Every run under a folder, and then the runs of other folders that the registry knows; the newest last.

    Args:
        all: Older runs of other folders too.
        tag: Only runs with this tag.
        root: Folder whose runs come first.
        json: Print one JSON list instead.
    """
    found = [run for run in collect_runs(root) if tag in (None, *(run.get("tags") or ()))]
    if json:
        print(to_json(found))
        return
    here = Path(root).resolve()
    own = [run for run in found if Path(run["path"]).parent == here]
    others = [run for run in found if run not in own]
    shown = others if all else others[-SHOWN:]
    console = Console(highlight=False, soft_wrap=True)
    if not found and tag is not None:
        console.print(f"no run has the tag {tag}")
    elif not own and tag is None:
        where = f"under {root}" if others else f"under {root} or in the registry"
        console.print(f"no runs {where}: start one with `lm fit --config tiny.yaml`")
    _print_table([*shown, *own], console)
    if len(others) > len(shown):
        console.print(f"{plural(len(others) - len(shown), 'older run')} of other folders: --all shows them")


def rm(run: str, yes: bool = False, root: str = str(ROOT)) -> None:
    """Remove a run with its checkpoints, after a question.

    Args:
        run: Name under the root or in the registry, or a path.
        yes: Do not ask.
        root: Folder of the runs.
    """
    gone = [row["path"] for row in registry.known_runs() if row["name"] == run and not Path(row["path"]).exists()]
    try:
        folder = registry.find_run(run, root)
    except RequestError:
        if not gone:
            raise
        registry.forget(gone)
        print(f"removed {', '.join(gone)} from the registry; there is no such folder any more")
        return
    path = folder.path.resolve()
    folder.refuse_if_trained()
    kept = ", ".join(step.name for step in folder.steps().values()) or "none"
    print(f"{path}: {folder.status()}, {format_bytes(folder_bytes(path))}, checkpoints: {kept}")
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError(f"there is no terminal to ask on: `lm runs rm {shlex.quote(run)} --yes` removes it")
        if input("remove it for good? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    with suppress(OSError):  # of a disk that cannot be written to, which the next line says
        folder.hold()
    dead = path.with_name(f".removed-{path.name}-{os.getpid()}")
    os.rename(path, dead)
    folder.release()  # a network's file system cannot remove a folder with a file that is open
    (dead / "run.json").unlink()  # what a kill leaves here is not a run
    shutil.rmtree(dead)
    if folder.path.is_symlink():
        folder.path.unlink()
    _forget([str(path)])
    print(f"removed {path}")


def rebuild(roots: list[str]) -> None:
    """Rebuild the registry from the run folders.

    Args:
        roots: Folders of runs to look in, besides `checkpoints` and those that the registry knows.
    """
    for root in roots:
        if not Path(root).is_dir():
            raise RequestError(f"{root} is not a folder of runs")
    known = [str(Path(row["path"]).parent) for row in registry.known_runs()]
    folders = sorted({Path(root).resolve() for root in (*roots, *known, ROOT)})
    runs = [run for folder in folders for run in Run.all(folder)]
    registry.rebuild(runs)
    print(f"{registry.place()} has {plural(len(runs), 'run')}")


def check(run: str, root: str = str(ROOT), json: bool = False) -> None:
    """Whether a run ended as its config expects: exit code 0 if it did, 1 if not.

    Args:
        run: Name under the root or in the registry, or a path.
        root: Folder of the runs.
        json: Print one JSON object instead of lines.
    """
    folder = registry.find_run(run, root)
    found, status = expectations(folder), folder.status()
    if not found:
        raise RequestError(f"run {folder.name} expects nothing: its config has no `expect: {{val/loss: [3.2, 3.5]}}`")
    if status == "running":
        raise RequestError(f"run {folder.name} is still being trained")
    judged = acceptance(found)
    passed = judged["passed"] and status == "finished"
    if json:
        print(to_json({**judged, "passed": passed, "status": status}))
    else:
        print(status, *found, sep="\n")
    if not passed:
        missed = [str(each) for each in found if not each.met] or [f"it is {status}, not finished"]
        raise LmError(f"run {folder.name} did not pass: {'; '.join(missed)}")


# ---- ls --------------------------------------------------------------------------------------------------------------


def collect_runs(root: str) -> list[dict[str, Any]]:
    """The facts of every run, read from its folder, by when it was last started or resumed.

    A run whose folder is missing is removed from the registry. Where the folder above is missing too, such as on a disk
    that is not mounted, the run has the status `gone` and the facts of the registry.
    """
    found, removed = {}, []
    for row in registry.known_runs():
        path = Path(row["path"])
        if (path / "run.json").is_file():
            found[row["path"]] = run_row(Run(path))
        elif path.parent.is_dir():
            removed.append(row["path"])
        else:
            found[row["path"]] = {**row, "status": "gone"}
    for run in Run.all(root):
        path = str(run.path.resolve())
        found[path] = found.get(path) or run_row(run)
    if removed:
        _forget(removed)
    return sorted(found.values(), key=lambda run: (run.get("entered") or 0.0, run["name"]))


def _forget(removed: list[str]) -> None:
    try:
        registry.forget(removed)
    except LmError as error:
        log.warning("%s; `lm runs ls` leaves removed runs out all the same", error)


def folder_bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*"))


def to_json(value: Any) -> str:
    """JSON in which NaN and Inf are null."""
    return jsonlib.dumps(finite_or_none(value), ensure_ascii=False, allow_nan=False)


LOSSES = ("train/loss", "val/loss", "val/bpb")
HEADINGS = ("run", "status", "step", "best loss", "loss", "tokens/s", "age")


def _print_table(found: list[dict[str, Any]], console: Console) -> None:
    """The runs of each folder, the last run's folder first; the columns of all folders are aligned."""
    folders: dict[Path, list[dict[str, Any]]] = {}
    for run in reversed(found):
        folders.setdefault(Path(run["path"]).parent, []).insert(0, run)
    rows = {run["path"]: _cells(run) for run in found}
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows.values(), strict=True)]
    widths[0] = min(widths[0], max(8, console.width - sum(widths[1:]) - 2 * len(widths)))
    for folder, runs in folders.items():
        where = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        console.print(Text(str(where), style="bold"))
        console.print(_table_line(HEADINGS, widths, "dim"))
        for run in runs:
            console.print(_table_line(rows[run["path"]], widths, STYLES.get(run["status"], "")))
            if run["status"] in EXPLAINED and run["reason"]:
                reason = Text(f"    {' '.join(harmless(run['reason']).split())}", style="dim")
                reason.truncate(console.width, overflow="ellipsis")
                console.print(reason)


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    step, last = run.get("step"), run.get("max_steps")
    steps = "" if step is None else f"{_steps(step)}/{_steps(last)}" if last else _steps(step)
    rate = run.get("tokens_per_second")
    since = "" if not run.get("entered") else format_duration(time.time() - run["entered"], parts=1)
    losses = ["" if run.get(key) is None else f"{run[key]:.4g}" for key in ("best_loss", "loss")]
    return run["name"], run["status"], steps, *losses, "" if rate is None else format_count(float(rate)), since


def _steps(number: int) -> str:
    return str(number) if number < 100_000 else format_count(number)


def _table_line(cells: tuple[str, ...], widths: list[int], style: str) -> Text:
    name, status, *rest = cells
    if len(name) > widths[0]:
        name = name[: widths[0] - 1] + "…"
    line = Text(f"  {name:<{widths[0]}}  ", style="dim" if cells is HEADINGS else "")
    line.append(f"{status:<{widths[1]}}", style=style)
    for cell, width in zip(rest, widths[2:], strict=True):
        line.append(f"  {cell:>{width}}")
    return line


# ---- show ------------------------------------------------------------------------------------------------------------

SHOWN_ALERTS = 5
SAMPLE_CHARACTERS = 200


def show(run: str, json: bool = False, root: str = str(ROOT)) -> None:
    """Show one run: progress, losses, speed, model, checkpoints, machine, cost, evaluation, alerts and samples.

    Args:
        run: Name under the root or in the registry, or a path.
        json: Print one JSON object instead.
        root: Folder of the runs.
    """
    found = describe_run(registry.find_run(run, root))
    if json:
        print(to_json(found))
    else:
        _print_page(found)


def describe_run(run: Run, metrics: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What `lm runs show --json` prints; what is not known is None or empty. `metrics` spares reading them again."""
    facts, row = read_facts(run), run_row(run)
    metrics = run.metrics() if metrics is None else metrics
    config, steps = run.settings(), run.steps()
    best, last = run.link("best"), run.link("last") or next(reversed(steps.values()), None)
    samples, each = read_samples(run), facts["flops_per_token"]
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
        "seconds": time_spent(metrics),
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
    lines = ["step {step}, {guard}: {message} ({action})".format(**alert) for alert in alerts[-SHOWN_ALERTS:]]
    return [f"{len(alerts) - len(lines)} before these"] * (len(alerts) > len(lines)) + lines


def _samples(found: dict[str, Any]) -> list[str]:
    lines = []
    for sample in found["samples"]:
        text = " ".join(str(sample.get("text", "")).split())
        prompt = str(sample.get("prompt", ""))
        text = text if text.startswith(prompt) else f"{prompt} {text}"
        text = text if len(text) <= SAMPLE_CHARACTERS else text[: SAMPLE_CHARACTERS - 1] + "…"
        lines.append(f"step {sample.get('step')}: {text}")
    return lines
