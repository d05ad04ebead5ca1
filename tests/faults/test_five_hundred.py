"""Five hundred checkpoints in one process: memory, file handles, threads and disk stay what they were."""

import os
import statistics
import time
from pathlib import Path

import pytest
from trainings import start, write_config

from lm.runs.run import Run

pytestmark = pytest.mark.slow

EVERY_STEP = {
    "trainer.max_steps": 500, "trainer.checkpoint_interval": 1, "trainer.val_interval": 100, "trainer.log_interval": 25,
    "trainer.callbacks": [], "data.micro_batch_size": 8, "data.val_tokens": 256, "model.decoder.num_hidden_layers": 1,
    "model.decoder.dropout": 0.0,
}  # fmt: skip


def bytes_in(folder: Path) -> int:
    """Bytes of all checkpoints, whole or not, as they are at this moment."""
    sizes = []
    for path in folder.glob("*step-*/*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # it was removed meanwhile
            continue
    return sum(sizes)


def measure(pid: int, run: Run) -> tuple[int, dict[str, float]] | None:
    """The newest checkpoint and what the process and the disk hold; None where the process has just ended."""
    process = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
        steps = run.steps()
        newest = max(steps, default=0)
        return newest, {
            "memory (MiB)": int(status["VmRSS"].split()[0]) / 1024,
            "threads": int(status["Threads"]),
            "file handles": len(os.listdir(process / "fd")),
            "folders": len(list(run.path.glob("*step-*"))),
            "disk (MiB)": bytes_in(run.path) / 2**20,
            "checkpoint (MiB)": sum(path.stat().st_size for path in steps[newest].iterdir()) / 2**20,
        }
    except (KeyError, FileNotFoundError, ProcessLookupError):
        return None


def test_nothing_grows_from_the_hundredth_to_the_five_hundredth_checkpoint(workplace):
    process = start(workplace, "fit", "--config", str(write_config(workplace, "often", **EVERY_STEP)), fresh=True)
    run = Run(workplace / "checkpoints" / "often")
    seen = []
    while process.poll() is None:
        if sample := measure(process.pid, run):
            seen.append(sample)
        time.sleep(0.03)
    assert process.returncode == 0, process.communicate()[1]
    process.communicate()
    assert list(run.steps())[-1] == 500 and len(run.steps()) <= 2
    early, late = ([found for step, found in seen if low <= step < low + 100] for low in (100, 400))
    assert len(early) >= 5 and len(late) >= 5  # a busy machine gives few
    assert {path.resolve() for path in run.path.glob("*step-*")} == {path.resolve() for path in run.steps().values()}
    # A busy machine removes the old checkpoint a little later, so that one more may be there in the meantime.
    one = statistics.median(found["checkpoint (MiB)"] for found in late)
    print()
    for name, most in (("memory (MiB)", 4), ("threads", 0), ("file handles", 1), ("folders", 1), ("disk (MiB)", one),
                       ("checkpoint (MiB)", 0.01)):  # fmt: skip
        before, after = (statistics.median(found[name] for found in part) for part in (early, late))
        print(f"{name}: {before:.1f} at checkpoints 100 to 199, {after:.1f} at 400 to 499")
        assert after <= before + most, name
        assert max(found[name] for found in late) <= max(found[name] for found in early) + max(most, 2), name
