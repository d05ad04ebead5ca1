"""One of two ranks dies or hangs: the other ends soon and says so, and the run resumes bit for bit."""

import os
import signal
import time

import pytest
from trainings import RECORDER, equipment, lm, losses, processes_of, start, write_config

from lm.runs.run import Run

pytestmark = pytest.mark.fault(18)
TWO = {
    "trainer.devices": 2, "trainer.strategy": "ddp", "data.micro_batch_size": 2, "trainer.checkpoint_interval": 2,
    "trainer.val_interval": 100,
}  # fmt: skip
TIMEOUT = 10  # seconds that ranks wait for one another


def config(folder, name, *callbacks, **changes):
    return str(write_config(folder, name, **{**TWO, "trainer.callbacks": [RECORDER, *callbacks], **changes}))


def losses_of_ranks(folder) -> list[dict]:
    """Of each rank; the traces are removed."""
    names = sorted(path.name for path in folder.glob("trace-*.jsonl"))
    found = [losses(folder, name) for name in names]
    for name in names:
        (folder / name).unlink()
    return found


def test_a_rank_that_is_killed_or_hangs_ends_the_other_and_the_run_resumes(workplace):
    """SIGKILL to rank one, SIGSTOP to rank one, SIGKILL to rank zero: bounded, named, nobody left, all losses equal."""
    lm(workplace, "fit", "--config", config(workplace, "straight"))
    expected = losses_of_ranks(workplace)
    run = Run(workplace / "checkpoints" / "relay")
    for name, rank, step, code, said in (
        ("SIGKILL", 1, 3, 1, "local rank 1 was killed by SIGKILL"),
        ("SIGSTOP", 1, 5, 1, "did not answer in time, so it hangs"),
        ("SIGKILL", 0, 9, -signal.SIGKILL, ""),
    ):
        send = equipment("recorder.KillAt", signal_name=name, hook="on_train_batch_start", step=step, rank=rank)
        deaf = [equipment("interruptions.Sleep", rank=1, step=step)] if rank == 0 else []  # it hears of nothing
        path = config(workplace, "relay", send, *deaf, **{"trainer.rank_timeout": TIMEOUT})
        process = start(workplace, "fit", "--config", path, "--ckpt_path", "auto")
        err = process.communicate(timeout=180)[1]
        ended = time.time()
        assert process.returncode == code and said in err.splitlines()[-1], err
        last = max(os.path.getmtime(path) for path in workplace.glob("trace-*.jsonl"))
        assert ended - last < (TIMEOUT if name == "SIGSTOP" else 0) + 30
        assert not processes_of(workplace, patience=20), "a rank outlived the other"
        assert run.status() == ("dead" if rank == 0 else "failed") and "Traceback" not in err
        if rank == 1:
            assert said in run.read("run.json")["reason"] and "--ckpt_path auto` resumes it" in err
    lm(workplace, "fit", "--config", config(workplace, "relay"), "--ckpt_path", "auto")
    assert losses_of_ranks(workplace) == expected and [*map(len, expected)] == [24, 24] and run.status() == "finished"
    assert list(run.steps())[-1] == 12 and not (workplace / "checkpoints" / "relay-2").exists()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_write_that_fails_while_the_next_checkpoint_is_gathered_ends_both_ranks(workplace, strategy):
    """Rank zero hears of it in the middle of an exchange, which the other one waits in; with Muon, under DDP too."""
    path = config(
        workplace, "unwritten", equipment("at_step.FailingWrite", step=2, seconds=2.0),
        **{"trainer.checkpoint_interval": 1, "trainer.strategy": strategy, "model.optimizer.name": "muon"},
    )  # fmt: skip
    said = lm(workplace, "fit", "--config", path, expect=1, timeout=100).stderr
    assert said.splitlines()[-1].startswith("lm fit: could not write the checkpoint") and "Traceback" not in said
    assert "step 3/12" in said and "step 4/12" not in said
    assert not processes_of(workplace, patience=20)
    assert Run(workplace / "checkpoints" / "unwritten").status() == "failed"
