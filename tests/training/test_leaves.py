"""What a config does not ask for is not imported: a fit trains, stops and resumes where these modules are missing."""

from functools import partial

import pytest
from trainings import equipment, fit, make_workplace

CALLBACKS = "lm.training.callbacks."
MISSING = (
    *(CALLBACKS + name for name in (
        "alerts", "bigram_init", "budget", "call_thread", "events", "postmortem", "predictions", "samples",
        "spike_injection", "throughput_floor",
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
