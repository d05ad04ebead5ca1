"""What guards do to a run: a step that is not finite changes nothing, a stop ends with 3, a rollback goes back."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from trainings import PLACES, equipment, fit, rows_by_step

from lm.data.loader import Batch
from lm.errors import RequestError
from lm.runs.run import Run
from lm.training.callbacks.alerts import Alerts
from lm.training.callbacks.guards import NotFinite, Rollback
from lm.training.config import GuardsConfig, ScheduleConfig
from lm.training.run_state import RunState
from lm.training.step import StepResult
from lm.training.step_stats import StepRecord, StepStats

pytestmark = pytest.mark.slow
KEEP_ALL = {"trainer.checkpoint_interval": 1, "trainer.keep_checkpoints": 99}


class Poison(Callback):
    """Makes a NaN in the gradient of a step, or adds to its loss; on the last rank alone.

    Args:
        gradient: steps whose gradient it is; 1 is the first.
        loss: steps whose loss it is.
        adds: what is added to that loss.
        once: on this machine, so that a training that repeats a step has it no more.
    """

    def __init__(self, gradient: list[int] = [], loss: list[int] = [], adds: float = math.inf, once: bool = False):
        self.gradient, self.loss, self.adds, self.once = gradient, loss, adds, once

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank != trainer.world_size - 1:
            return
        step = trainer.global_step + 1
        done = Path(f"poisoned-{step}-{self.adds}")
        if step in self.loss and not (self.once and done.exists()):
            if self.once:
                done.touch()
            poison_loss(pl_module, self.adds)
        weight = pl_module.decoder.norm.weight
        if step in self.gradient and not isinstance(weight, DTensor):
            handle = weight.register_hook(lambda gradient: [handle.remove(), gradient * math.nan][1])

    def on_after_backward(self, trainer, pl_module):
        weight = pl_module.decoder.norm.weight  # a shard of it, whose gradient is that rank's alone
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.global_step + 1 in self.gradient and isinstance(weight.grad, DTensor):
            weight.grad.to_local().mul_(math.nan)


def poison_loss(module, poison):
    """Add something to the losses that the next micro-batch is found to have; its gradient is left alone."""
    losses = module.losses

    def poisoned(micro_batch):
        module.losses = losses
        found = losses(micro_batch)
        return found._replace(per_token=found.per_token + poison)

    module.losses = poisoned


def poisoned(*callbacks, **steps):
    return {"trainer.callbacks": [*callbacks, equipment("test_guards.Poison", **steps)]}


def tensors(run, step, name="model.safetensors"):
    return load_file(run.path / f"step-{step:08d}" / name)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(workplace):
    """Weights, optimizer state and logged losses are those without the step, and training continues."""
    done, run = fit(workplace, "nan", **poisoned(gradient=[6], loss=[9]), **KEEP_ALL)
    for step in (6, 9):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert same(tensors(run, step - 1, name), tensors(run, step, name))
        assert not same(tensors(run, step), tensors(run, step + 1))
    alerts = [(alert["step"], alert["action"]) for alert in run.alerts() if alert["guard"] == "not-finite"]
    assert alerts == [(6, "warn"), (9, "warn")]
    assert "step 6 changed no weight" in done.stderr and "lm data show --run nan --step 6" in done.stderr
    logged = {line["step"]: line for line in run.metrics() if "optim/lr" in line}
    assert list(logged) == list(range(1, 13))
    assert "train/loss" not in logged[6] and "optim/grad_norm" not in logged[6]
    assert all(math.isfinite(value) for line in logged.values() for value in line.values())
    assert (run.path / "step-00000012").exists() and run.status() == "finished"


def test_nothing_but_nan_ends_the_run_with_a_checkpoint_of_unharmed_weights(workplace):
    """Also where a signal came after the first of them."""
    changes = {"guards.max_skipped": 3, "trainer.checkpoint_interval": 4, "trainer.keep_checkpoints": 9}
    nan, stop = list(range(5, 13)), equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=8)
    fit(workplace, "only-nan", expect=75, **poisoned(stop, gradient=nan), **changes)
    done, run = fit(workplace, "only-nan", "--ckpt_path", "auto", expect=3, **poisoned(gradient=nan), **changes)
    assert run.link("last").name == "step-00000007" and same(tensors(run, 4), tensors(run, 7))
    assert run.status() == "stopped" and "3 in a row" in run.read("run.json")["reason"]
    assert run.read("state.json")["status"] == "stopped" and "3 in a row" in run.read("state.json")["reason"]
    assert done.stderr.splitlines()[-1].startswith("lm fit: not-finite: step 7 changed no weight")


def test_not_finite_stop_ends_at_the_first(workplace):
    """Though that is the last step of the run."""
    changes = {"guards.not_finite": "stop", "trainer.max_steps": 2, "model.schedule.warmup_steps": 0}
    _, run = fit(workplace, "nan-stop", expect=3, **poisoned(loss=[2]), **changes)
    assert run.link("last").name == "step-00000002" and run.status() == "stopped"


def command_of(ended):
    """The command line that the last line of a stopped run names."""
    return re.search("; `([^`]*)` goes on from the newest checkpoint before step ", ended.stderr.splitlines()[-1])[1]


@pytest.mark.parametrize(("guard", "steps", "adds", "step", "changes"), [
    # A checkpoint of each step: that of step 7 is from the log line in question.
    ("alert", [8], 1000.0, 6, {"guards.alerts": {"loss > 100": "stop"}, **KEEP_ALL}),
    # It began in the line before; the checkpoint of the stop itself would take the place of that of step 3.
    ("not-finite", [5, 6, 7, 8], math.inf, 3, {
        "guards.max_skipped": 4, "trainer.checkpoint_interval": 3, "trainer.keep_checkpoints": 2,
        "trainer.val_interval": 99}),
])  # fmt: skip
def test_the_line_that_a_stop_prints_goes_on_from_the_checkpoint_before_it(
    workplace, guard, steps, adds, step, changes
):  # fmt: skip
    """As it is typed in a shell."""
    fault = poisoned(loss=steps, adds=adds, once=True)
    ended, run = fit(workplace, f"stop-{guard}", expect=3, **fault, **changes, **{"trainer.log_interval": 2})
    command = command_of(ended)
    assert command.endswith(f" --ckpt_path step-{step:08d}") and f"`{command}`" in run.read("run.json")["reason"]
    here = {**os.environ, "PYTHONPATH": PLACES, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, cwd=workplace, env=here, check=True)
    assert run.status() == "finished" and run.read("run.json")["stretches"][-1]["step"] == step
    lines = {line["step"]: line["train/loss"] for line in run.metrics() if "train/loss" in line}
    assert list(lines) == [2, 4, 6, 8, 10, 12] and lines[8] < lines[2]


def test_a_finding_knows_since_when():
    """The log line after the newest one without it; of several lines in a row, the first."""

    def line(step, metrics, *losses):
        steps = [StepRecord(step - len(losses) + i, loss, 1.0, True) for i, loss in enumerate(losses, start=1)]
        return trainer_at(step, 100, log_interval=2, steps=steps), metrics

    def began(guard, *lines):
        return [finding.began for each in lines for finding in guard.observe(*each)]

    alerts, resumed = Alerts({"val_loss > 4": "stop"}), Alerts({"val_loss > 4": "stop"})
    assert began(alerts, line(10, {"val/loss": 3.0}), line(12, {"train/loss": 9.0})) == []
    resumed.load_state_dict(json.loads(json.dumps(alerts.state_dict())))
    assert began(resumed, line(20, {"val/loss": 5.0}), line(30, {"val/loss": 5.0})) == [11, 11]
    loss = {"train/loss": 1.0}
    assert began(NotFinite("skip", 3), line(4, loss, 1, math.nan), line(6, loss, math.nan, math.nan)) == [4, 4]


def trainer_at(step, max_steps, log_interval=1, steps=(), **schedule):
    """What guards look at of a Trainer at a log line."""
    options = SimpleNamespace(schedule=ScheduleConfig(**schedule))
    return SimpleNamespace(
        run=Run("a"), global_step=step, max_steps=max_steps, tokens_seen=256 * step,
        options=SimpleNamespace(log_interval=log_interval), lightning_module=SimpleNamespace(options=options),
        run_state=SimpleNamespace(stats=SimpleNamespace(recent=steps, scaled=False)),
    )  # fmt: skip


def found_in(lines, guard, state=None, max_steps=12, **schedule):
    """What a guard finds in log lines of step and metrics, each with its step."""
    if state is not None:
        guard.load_state_dict(json.loads(json.dumps(state)))
    return [
        (step, finding) for step, metrics in lines
        for finding in guard.observe(trainer_at(step, max_steps, **schedule), metrics)
    ]  # fmt: skip


@pytest.mark.fault(9)
def test_a_rollback_returns_to_good_weights_and_continues_with_the_next_samples(workplace):
    """After step 8 the weights of 6 are back, with their optimizer; the steps and their samples continue.

    Step 8 is saved at once, so that a kill does not bring the bad stretch back.
    """
    changes = {"trainer.checkpoint_interval": 3, "trainer.keep_checkpoints": 9, "trainer.val_interval": 100}
    _, run = fit(workplace, "rollback", **{"guards.alerts": {"step == 8": "rollback"}}, **changes)
    assert list(run.steps()) == [3, 6, 8, 9, 12]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert same(tensors(run, 6, name), tensors(run, 8, name))
    assert not same(tensors(run, 8), tensors(run, 9))
    assert run.read("run.json")["rollbacks"] == [{"step": 8, "to": 6}]
    assert {line["step"]: line["tokens"] for line in run.metrics()} == {step: step * 256 for step in range(1, 13)}


def test_a_rollback_with_nothing_to_return_to_or_too_many_of_them_stops(workplace):
    always = {"guards.alerts": {"step > 1": "rollback"}}
    _, run = fit(workplace, "nothing", expect=3, **always)
    reason = run.read("run.json")["reason"]
    assert "has nothing to return to; there is no checkpoint from before step 2: start a new run" in reason
    late = {"guards.alerts": {"step > 6": "rollback"}, "guards.max_rollbacks": 2, "trainer.val_interval": 100}
    done, run = fit(workplace, "often", expect=3, **late, **{"trainer.checkpoint_interval": 3})
    assert "guards.max_rollbacks 2 are used up; `" in run.read("run.json")["reason"]
    assert command_of(done).endswith(" --ckpt_path step-00000008")
    assert len(run.read("run.json")["rollbacks"]) == 2 and run.read("state.json")["step"] == 9


def test_what_a_rollback_may_need_is_kept(workplace):
    """In a spike that is longer than one log line, the checkpoint of a rollback is what the next one returns to."""
    changes = {"trainer.keep_checkpoints": 1, "trainer.checkpoint_interval": 3, "trainer.val_interval": 100}
    alerts = {f"step == {step}": "rollback" for step in (7, 8, 9)}
    _, run = fit(workplace, "kept", **{"guards.alerts": alerts}, **changes)
    assert [(each["step"], each["to"]) for each in run.read("run.json")["rollbacks"]] == [(7, 6), (8, 7), (9, 8)]
    assert list(run.steps()) == [12]


@pytest.mark.fault(9)
def test_a_resume_makes_no_step_good_that_no_guard_has_seen(workplace):
    """After a signal between two log lines, and a kill inside the rollback, it returns to where it would have."""
    changes = {"trainer.keep_checkpoints": 1, "trainer.checkpoint_interval": 3, "trainer.val_interval": 100,
               "trainer.log_interval": 4, "guards.alerts": {"step == 8": "rollback"}}  # fmt: skip
    for expect, more in ((75, {"signal_name": "SIGTERM", "micro_batch": 12}),
                         (-9, {"signal_name": "SIGKILL", "save": True, "step": 8}), (0, None)):  # fmt: skip
        arguments = [] if expect == 75 else ["--ckpt_path", "auto"]
        kill = [equipment("recorder.KillAt", **more)] if more else []
        _, run = fit(workplace, "resumed", *arguments, callbacks=kill, expect=expect, **changes)
    assert run.read("run.json")["rollbacks"] == [{"step": 8, "to": 3}]


@pytest.mark.fault(8)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_agree(workplace, strategy):
    """What only the last rank finds is skipped, rolled back and stopped by all of them, and they end together; the
    samples of the step, of both ranks, are kept for a look."""
    changes = {
        **poisoned({"class_path": "recorder.Recorder"}, gradient=[3], loss=[5]),
        "trainer.devices": 2, "trainer.strategy": strategy, "data.micro_batch_size": 2,
        "guards.alerts": {"step == 7": "rollback", "step == 10": "stop"},
    }  # fmt: skip
    _, run = fit(workplace, strategy, expect=3, **KEEP_ALL, **changes)
    for step in (3, 5, 7):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert same(tensors(run, step - 1, name), tensors(run, step, name)), step
    assert not same(tensors(run, 1), tensors(run, 2)) and not same(tensors(run, 8), tensors(run, 9))
    assert run.status() == "stopped" and run.read("state.json")["step"] == 10
    kept = [entry["token_ids"] for entry in json.loads((run.path / "postmortem-00000003/tokens.json").read_text())]
    seen = [row for path in workplace.glob("trace-*.jsonl") for row in rows_by_step(path)[3]]
    assert sorted(kept) == sorted(seen) and len(seen) == 8


# ---- pieces ----------------------------------------------------------------------------------------------------------
def test_the_sums_leave_out_steps_that_were_not_applied_but_for_overflows_of_the_scaler():
    stats, batch = StepStats(), Batch(torch.zeros(1, 5, dtype=torch.uint16))
    taken = [(8.0, 1.0, False), (math.nan, 1.0, True), (12.0, math.inf, False), (16.0, math.inf, True)]
    for nats, norm, scaled in taken:
        nats, norm, targets = torch.tensor(nats), torch.tensor(norm), torch.tensor(4)
        stats.scaled = scaled
        stats.add(1, batch, StepResult(nats / targets, nats, targets, norm, nats.isfinite() & norm.isfinite(), []))
    assert stats.metrics()["train/loss"] == (8 + 16) / 8
    assert [(step.loss, step.applied) for step in stats.recent][::2] == [(2.0, True), (3.0, False)]
    assert stats.recent[3].applied is False and math.isnan(stats.metrics()["train/loss"])


@pytest.mark.parametrize("wrong", [
    {"alerts": {"los > 10": "stop"}}, {"spike": "loss"}, {"max_skipped": 0}, {"max_rollbacks": -1}, {"inject_step": 0},
])  # fmt: skip
def test_a_wrong_guard_is_refused_when_the_config_is_read(wrong):
    with pytest.raises(RequestError):
        GuardsConfig(**wrong)


def test_a_line_without_steps_does_not_make_the_steps_before_it_good():
    """An evaluation between two log lines says nothing of the steps that no guard has seen yet."""
    rollback = Rollback(3)
    kept = []
    checkpoints = SimpleNamespace(keep_for_rollback=kept.append)
    for step, metrics in ((10, {"train/loss": 1.0}), (15, {"eval/core": 0.1})):
        trainer = SimpleNamespace(global_step=step, run_state=RunState(), checkpoint_callback=checkpoints)
        rollback.on_metrics(trainer, None, metrics)
    assert kept == [10, 10]
