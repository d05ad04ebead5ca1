"""A run as one HTML page: `lm runs export --html`.

`run.html` has the text and the tables, so they read without JavaScript, too. `page.js` draws the charts with uPlot from
the JSON at the end of the page. Nothing here imports torch.
"""

import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from lm import __version__
from lm.cli import runs_show
from lm.cli.report.curves import chart_data
from lm.cli.report.page import render, source
from lm.cli.report.public import public, public_command
from lm.errors import RequestError
from lm.runs.evaluations import core_sentence, evaluation_rows, merge_evaluations
from lm.runs.history import read_samples, spread_steps
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import check_local_path, write_atomically
from lm.system.parsing import finite_or_none
from lm.system.units import utc

MAX_SAMPLES = 20  # steps whose samples are shown
OPENING = "<!doctype html>\n<!-- A run of lm -->\n"  # of every page: a file that begins otherwise is not replaced


def write_page(run: Run, path: str) -> None:
    """Write or replace the page of a run; raise RequestError if another kind of file would be overwritten."""
    check_local_path("--html", path)
    target = Path(path).resolve()  # a symbolic link is kept
    with suppress(FileNotFoundError), open(target, encoding="utf-8", errors="replace") as file:
        if file.read(len(OPENING)) != OPENING:
            raise RequestError(f"--html {path} is there already and not the page of a run; choose another")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(run), durable=False)


def page(run: Run) -> str:
    facts = public({name: part for name, part in runs_show.describe_run(run).items() if name != "samples"})
    live = facts["status"] == "running"
    data, figures = chart_data(run.metrics())
    return render(
        "run.html",
        kind="run",
        found=facts,
        live=live,
        written=time.time(),
        checks=runs_show.checks_of(facts),
        metrics=METRICS,
        figures=figures,
        data=finite_or_none(data),
        evaluations=_evaluations(run),
        samples=_samples(run),
        alerts=_alerts(facts),
        postmortems=_postmortems(facts),
        settings=runs_show.chosen_settings(facts["config"]),
        whole_config=yaml.safe_dump(facts["config"], allow_unicode=True, sort_keys=False, width=100),
        provenance=_provenance(facts),
        script=Markup(f"/*\nuPlot\n{source('uPlot.LICENSE')}*/\n") + source("uPlot.iife.min.js", "page.js"),
    )


def _evaluations(run: Run) -> list[tuple[str, dict[str, str]]]:
    every = public(run.evaluations())
    steps = sorted({one["step"] for one in every if one["step"] is not None}, reverse=True)
    merged = [merge_evaluations(every, step) for step in steps]
    return [(f"Step {one['step']:,}{core_sentence(one)}", evaluation_rows(one)) for one in merged if one]


def _samples(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """The model's samples by step, newest first; if there are many steps, some spread over the whole run."""
    samples = read_samples(run)
    return [
        (f"Step {step:,}", [(one["prompt"], str(one["text"])) for one in samples if one["step"] == step])
        for step in reversed(spread_steps(samples, MAX_SAMPLES))
    ]


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


def _provenance(facts: dict[str, Any]) -> dict[str, Any]:
    """How the run was started, on what, with which versions, and what it cost."""
    versions = {"python": facts["python"], **facts["versions"]}
    return {
        "machine": runs_show.machine_of(facts),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "started": facts["started"],
        "command": shlex.join(public_command(runs_show.start_command(facts))) or None,
        "git": facts["git"],
        "FLOPs of training": f"{facts['flops']:.3g}" if facts["flops"] else None,
        "config, SHA-256": facts["config_sha256"],
        "cost": runs_show.cost(facts) or None,
        "checkpoints": runs_show.saved_checkpoints(facts),
        "page": f"lm {__version__}; charts by uPlot, whose licence is in the source of this page",
    }
