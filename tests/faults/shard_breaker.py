"""Test equipment that a config names: breaks or hangs shards while they are being trained on."""

import os
from pathlib import Path

from lightning.pytorch import Callback


class BreakShards(Callback):
    """When the training begins an optimizer step, breaks all shards of a folder; those in memory are not touched.

    Args:
        step: 0 is the first of the run.
        how: `flip` a byte in the middle of each, `cut` them in halves, `delete` them, or `hang`: a read never returns.
        folder: theirs.
        rank: which rank does it.
    """

    def __init__(self, step: int, how: str, folder: str, rank: int = 0) -> None:
        self.step, self.how, self.folder, self.rank = step, how, Path(folder), rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            for path in self.folder.glob("*.parquet"):
                break_shard(path, self.how)


def break_shard(path: Path, how: str) -> None:
    """Break one shard; as a new file, so that hard links to the old one are left whole."""
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip":
        content[first_page_byte(content)] ^= 0x10
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "hang":
        os.mkfifo(path)  # opening it waits for somebody who writes to it


def first_page_byte(content: bytes) -> int:
    """A byte well inside the pages of a small shard: they stand before the footer, whose length is at the end."""
    footer = int.from_bytes(content[-8:-4], "little")
    return (len(content) - 8 - footer) // 2
