"""What a config does not ask for is not imported: a fit trains, stops and resumes where these modules are missing."""

import sys
from functools import partial

import pytest
from trainings import equipment, fit, make_workplace

from lm.training.callbacks.run_folder import RunFolder
from lm.training.callbacks.standard import standard_callbacks
from lm.training.config import (
    BudgetConfig,
    EvaluationConfig,
    GuardsConfig,
    RunOptions,
    SamplesConfig,
    ThroughputConfig,
    TrainerConfig,
    sections_of_callbacks,
)

CALLBACKS = "lm.training.callbacks."
MISSING = (
    *(CALLBACKS + name for name in (
        "alerts", "budget", "call_thread", "events", "postmortem", "predictions", "samples",
        "throughput_floor",
    )),
    "lm.training.alerts", "lm.training.out_of_memory", "lm.training.plain_run_state", "lm.runs.expectations",
    "lm.runs.postmortem", "lm.data.rare", "lm.training.launcher", "lm.training.distributed",
    "lm.training.optimizer_by_class", "lm.training.muon", "lm.cli.plan", "lm.cli.hours", "lm.cli.scale", "lm.cli.bench_step",
    "lm.cli.ladder", "lm.data.mixture", "lm.data.reshuffle", "lm.data.cache",
    "lm.model.builtin", "lm.model.custom", "lm.model.fused", "lm.model.compile", "lm.model.low_precision", "lm.system.hub",
    "lm.evaluation.benchmark", "lm.evaluation.tasks", "lm.evaluation.prompts", "lm.evaluation.scoring", CALLBACKS + "evaluation",
)  # fmt: skip
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
from lm.__main__ import main
main()
"""


@pytest.mark.slow
def test_a_plain_fit_trains_stops_and_resumes_without_them(tmp_path):
    (make_workplace(tmp_path) / "without.py").write_text(PROGRAM)
    fresh = {"FRESH": "1"}  # in a process that has imported nothing before; see `trainings.start`
    plain = partial(fit, tmp_path, "small", program=["without.py"], environment=fresh, **{"guards.spike": None})
    stop = equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=9)
    stopped, run = plain(callbacks=[stop], expect=75)
    assert run.status() == "interrupted" and max(run.steps()) < 12, stopped.stderr
    resumed, run = plain("--ckpt_path", "auto")
    assert run.status() == "finished" and max(run.steps()) == 12, resumed.stderr


def callbacks(options=RunOptions(), sections={}, **trainer):
    folder = RunFolder(None, "a", "", options=options)
    return standard_callbacks(TrainerConfig(max_steps=1, **trainer), folder, sections_of_callbacks(sections))


def guards(**options):
    return {"guards": GuardsConfig(**options)}


@pytest.mark.parametrize(("file", "asks_for_it"), [
    ("alerts", lambda: callbacks(sections=guards(alerts={"loss > 10": "warn"}))),
    ("alerts", callbacks),  # a spike is looked for unless the config says not to
    ("budget", lambda: callbacks(sections=guards(budget=BudgetConfig(max_hours=1)))),
    ("throughput_floor", lambda: callbacks(sections=guards(throughput=ThroughputConfig(floor=1)))),
    ("postmortem", lambda: callbacks(sections=guards(inject_step=1))),
    ("events", lambda: callbacks(RunOptions(on_event=["true"]))),
    ("samples", lambda: callbacks(sections={"samples": SamplesConfig(prompts=["a"])})),
    ("evaluation", lambda: callbacks(sections={"evaluation": EvaluationConfig(tasks=["embedded:sotu"])})),
])  # fmt: skip
def test_an_option_imports_its_file_and_no_other_does(monkeypatch, file, asks_for_it):
    monkeypatch.setitem(sys.modules, CALLBACKS + file, None)
    callbacks(sections=guards(spike=None))
    with pytest.raises(ImportError, match=f"{CALLBACKS}{file} halted"):
        asks_for_it()


@pytest.mark.parametrize(("module", "make"), [
    ("lm.training.alerts", lambda: GuardsConfig(alerts={"loss > 10": "warn"}, spike=None)),
    ("lm.runs.expectations", lambda: RunOptions(expect={"val/loss": [1, 2]})),
])  # fmt: skip
def test_an_option_that_is_checked_by_another_file_imports_it(monkeypatch, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    GuardsConfig(spike=None), RunOptions()
    with pytest.raises(ImportError, match=f"{module} halted"):
        make()
