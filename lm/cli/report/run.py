"""A run as one HTML page: `lm runs export --html`.

`run.html` has the text and the tables, so they read without JavaScript, too. `page.js` draws the charts with uPlot from
the JSON at the end of the page. Nothing here imports torch.
"""

import json as jsonlib
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from markupsafe import Markup

from lm import __version__
from lm.cli.options import all_options
from lm.cli.report.curves import chart_data
from lm.cli.report.page import render, source
from lm.cli.report.public import public, public_command
from lm.cli.runs_show import checks_of, describe_run, machine_of, start_command
from lm.errors import RequestError
from lm.runs.evaluations import core_sentence, merge_evaluations
from lm.runs.history import read_samples
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import check_local_path, write_atomically
from lm.system.parsing import finite_or_none, flatten
from lm.system.units import format_bytes, format_figure, utc

OPENING = "<!doctype html>\n<!-- A run of lm -->\n"  # of every page: a file that begins otherwise is not replaced

# ---- the file --------------------------------------------------------------------------------------------------------


def write_page(run: Run, path: str) -> None:
    """Write or replace the page of a run; raise RequestError if another kind of file would be overwritten."""
    check_local_path("--html", path)
    target = Path(path).resolve()  # a symbolic link is kept
    with suppress(FileNotFoundError), open(target, encoding="utf-8", errors="replace") as file:
        if file.read(len(OPENING)) != OPENING:
            raise RequestError(f"--html {path} is there already and not the page of a run; choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(run), durable=False)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(run: Run) -> str:
    """The whole document."""
    facts = public({name: part for name, part in describe_run(run).items() if name != "samples"})
    live = facts["status"] == "running"
    data, figures = chart_data(run, run.metrics())
    torch, started = facts["versions"].get("torch"), facts["started"]
    origin = [machine_of(facts), f"torch {torch}" if torch else "", f"started {started}" if started else ""]
    return render(
        "run.html",
        kind="run",
        found=facts,
        live=live,
        written=time.time(),
        made="; ".join(filter(None, origin)),
        checks=checks_of(facts),
        metrics=METRICS,
        figures=figures,
        data=finite_or_none(data),
        evaluations=_evaluations(run),
        samples=_samples(run),
        alerts=_alerts(facts),
        postmortems=_postmortems(facts),
        model=_model(facts),
        changed=_changed(facts["config"]),
        whole_config=yaml.safe_dump(facts["config"], allow_unicode=True, sort_keys=False, width=100),
        checkpoints=_checkpoints(facts),
        provenance=_provenance(facts),
        script=Markup(f"/*\nuPlot\n{source('uPlot.LICENSE')}*/\n") + source("uPlot.iife.min.js", "page.js"),
    )


def _evaluations(run: Run) -> list[dict[str, Any]]:
    """The tables of each evaluation, the newest first."""
    every = public(run.evaluations())
    steps = sorted({one["step"] for one in every if one["step"] is not None}, reverse=True)
    evaluations = []
    for step in steps:
        merged, tasks, texts = merge_evaluations(every, step) or {}, [], []
        for name, task in merged["tasks"].items():
            interval = "{:.1%} to {:.1%}".format(*task["interval"])
            scores = f"{task['accuracy']:.1%}", interval, f"{task['baseline']:.1%}", f"{task['centered']:.3f}"
            tasks.append((name, *scores, f"{task['items']:,}", task["num_fewshot"]))
        for name, text in merged["texts"].items():
            bits = _estimate(text["bits_per_byte"], text.get("stderr"))
            loss = _estimate(text["loss"], text.get("loss_stderr"))
            texts.append((name, *bits, *loss, f"{text['tokens']:,}"))
        evaluations.append({"title": f"Step {step:,}{core_sentence(merged)}", "tasks": tasks, "texts": texts})
    return evaluations


def _estimate(mean: float | None, error: float | None) -> tuple[str, str]:
    """A mean, and its 95 % interval from its standard error; empty where they are not known."""
    interval = "" if mean is None or error is None else f"{mean - 1.96 * error:.4f} to {mean + 1.96 * error:.4f}"
    return "" if mean is None else f"{mean:.4f}", interval


def _samples(run: Run) -> dict[str, Any]:
    """The model's samples by step, newest first; if there are many steps, some spread over the whole run."""
    samples = read_samples(run)
    every = sorted({sample["step"] for sample in samples}, reverse=True)
    places = np.linspace(0, len(every) - 1, min(20, len(every)))
    steps = list(dict.fromkeys(every[round(place)] for place in places))
    by_step = {step: [(one["prompt"], str(one["text"])) for one in samples if one["step"] == step] for step in steps}
    return {
        "shown": [(f"Step {step:,}", texts) for step, texts in by_step.items()],
        "left_out": len(every) - len(steps),
    }


def _alerts(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    words = ("guard", "action", "message")
    alerts = reversed(facts["alerts"])
    return [(f"{alert['step']:,}", utc(alert["time"]), *(alert[word] for word in words)) for alert in alerts]


def _postmortems(facts: dict[str, Any]) -> list[tuple[str, str]]:
    pages = []
    for folder in map(Path, reversed(facts["post_mortems"])):
        step = folder.name.removeprefix("postmortem-").lstrip("0") or "0"
        with suppress(OSError):  # it is being written
            text = public((folder / "postmortem.md").read_text(encoding="utf-8", errors="replace"))
            pages.append((f"Post-mortem of step {step}", text))
    return pages


def _model(facts: dict[str, Any]) -> dict[str, Any]:
    decoder = facts["config"].get("model", {}).get("decoder")
    shape = {name: value for name, value in decoder.items() if value is not None} if isinstance(decoder, dict) else {}
    if facts["checkpoints"]:  # in the config it may be left to the tokenizer
        shape["vocab_size"] = Run(facts["checkpoints"][-1]["path"]).read("config.json").get("vocab_size")
    counted = {
        "parameters": None if facts["parameters"] is None else f"{facts['parameters']:,}",
        "FLOPs of training": f"{facts['flops']:.3g}" if facts["flops"] else None,
    }
    return {**counted, **shape}


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a resolved config that are not the defaults, by their names with dots."""

    def comparable(value: Any) -> Any:
        """Empty values are the same as None, and a tuple is a list, as in YAML."""
        return None if value in ([], {}, ()) else list(value) if isinstance(value, tuple) else value

    defaults = {option.name: comparable(option.default) for option in all_options("fit")}
    changed = {}
    for name, value in flatten(config).items():
        if name not in ("run", "tags", "note") and comparable(value) != defaults.get(name):
            changed[name] = jsonlib.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
    return changed


def _checkpoints(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for checkpoint in facts["checkpoints"]:
        links = ", ".join(name for name in ("best", "last") if checkpoint[name])
        size = format_bytes(checkpoint["bytes"])
        rows.append((f"{checkpoint['step']:,}", Path(checkpoint["path"]).name, size, links))
    return rows


def _provenance(facts: dict[str, Any]) -> dict[str, Any]:
    """How the run was started, on what, with which versions, and what it cost."""
    spent = (facts["budget"] or {}).get("spent_usd")
    versions = {"python": facts["python"], **facts["versions"]}
    return {
        "machine": machine_of(facts),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "started": facts["started"],
        "command": shlex.join(public_command(start_command(facts))) or None,
        "git": facts["git"],
        "config, SHA-256": facts["config_sha256"],
        "cost": None if spent is None else f"{format_figure(spent)} USD",
        "page": f"lm {__version__}; charts by uPlot, whose licence is in the source of this page",
    }
