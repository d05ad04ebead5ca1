"""Lightning's side of checkpoints: folders that are written in the background.

A snapshot is taken while the training waits, so the training does not wait for the disk. Links and removals go
through the same thread, in order.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from lm.checkpoint import TENSORS, read_folder, write_folder
from lm.errors import RunError
from lm.leftovers import remove

log = logging.getLogger(__name__)


class FolderCheckpointIO(CheckpointIO):
    """Saves and loads folders for Lightning's Trainer.

    Attributes:
        load_optimizer: set False where only weights are wanted (validate, test, predict).
    """

    def __init__(self) -> None:
        self.load_optimizer = True
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Snapshot now, write behind; `storage_options` is called after the write (links, pruning).

        There is one snapshot at a time: where checkpoints are due faster than the disk takes them, this waits.

        Raises:
            RunError: an earlier write failed.
        """
        self.drain()
        snapshot = {key: deepcopy(value) for key, value in checkpoint.items() if key not in TENSORS}
        for key in TENSORS:
            if key in checkpoint:
                snapshot[key] = {name: _snapshot(tensor) for name, tensor in checkpoint[key].items()}

        def work() -> None:
            write_folder(Path(path), snapshot)
            try:
                if storage_options is not None:
                    storage_options()
            except OSError as error:
                raise RunError(
                    f"the checkpoint {path} is whole, but the links and older ones beside it cannot be changed: "
                    f"{error.strerror or error}; `--ckpt_path auto` goes on from there"
                ) from error

        self._pending.append(self._writer.submit(work))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder to the CPU; the strategy moves what it needs."""
        return read_folder(Path(path), optimizer=self.load_optimizer)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a folder, after the writes before it."""
        self._pending.append(self._writer.submit(remove, Path(path)))

    def drain(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            RunError: a write failed.
        """
        for future in self._pending:
            future.exception()
        self.raise_failures()

    def raise_failures(self) -> None:
        """Raise the first failure of the writes that have ended, and forget them."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            future.result()

    def teardown(self) -> None:
        """Let the writes end; a failure that nobody waits for any more, because the run ends otherwise, is told."""
        for future in self._pending:
            if error := future.exception():
                log.error("%s", error)
        self._pending = []


def _snapshot(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that training will not write to."""
    tensor = tensor.detach()
    copy = tensor.to("cpu", copy=True) if tensor.device.type == "cpu" else tensor.cpu()
    return copy.contiguous()
