"""What only a CUDA device can say: `pytest -m gpu`. Everything here is skipped without one."""

import pytest
import torch
from trainings import lm, losses, make_workplace, trace, write_config

from lm.data.batch import Batch
from lm.runs import Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_tokens_widen_on_the_device_as_on_the_host():
    tokens = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(64, 1024)
    there = Batch(tokens).pin_memory().to("cuda", non_blocking=True)
    assert torch.equal(there.input_ids.cpu(), Batch(tokens).input_ids)
    assert torch.equal(there.labels.cpu(), Batch(tokens).labels)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_every_precision_learns_clips_and_goes_on_exactly(tmp_path, precision):
    """Stopped after step 6 and gone on with: the losses of a run that was never stopped, to the bit."""
    folder = make_workplace(tmp_path)
    changes = {"trainer.accelerator": "gpu", "trainer.devices": 1, "trainer.precision": precision}
    lm(folder, "fit", "--config", str(write_config(folder, "straight", **changes)))
    straight = losses(folder)
    metrics = Run(folder / "checkpoints" / "straight").metrics()
    assert metrics[-1]["val/loss"] < 3.4 and all(entry.get("optim/grad_norm", 0) < 100 for entry in metrics)
    (folder / "trace.jsonl").unlink()
    kill = {"class_path": "recorder.KillAt", "init_args": dict(signal_name="SIGTERM", micro_batch=11)}
    callbacks = [{"class_path": "recorder.Recorder"}]
    killed = write_config(folder, "stopped", **changes, **{"trainer.callbacks": [*callbacks, kill]})
    lm(folder, "fit", "--config", str(killed), expect=75)
    lm(folder, "fit", "--config", str(write_config(folder, "stopped", **changes)), "--ckpt_path", "auto")
    assert losses(folder) == straight and len(trace(folder)) == 24
