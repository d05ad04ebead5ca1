"""Saves and loads checkpoints for Lightning's Trainer; a thread writes them while the training continues.

    save_checkpoint     copies all tensors into host memory; the training waits for this
    the thread          writes the copies to the disk, then moves links and removes old checkpoints

`training/checkpoint_content` is what they hold, `runs/checkpoint` the folder on the disk; `callbacks/checkpoints`
decides when one is saved.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from lm.runs.checkpoint import TENSORS, read_folder, write_folder
from lm.system.files import remove_folder

log = logging.getLogger(__name__)

Place = tuple[str, str | int]  # of a tensor in a checkpoint, such as ("state_dict", "model.norm.weight")


class HostCopy(Tensor):
    """Marks a tensor that a strategy has gathered into host memory: `save_checkpoint` does not copy it again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor without the mark, as the copies of a subclass are not defined otherwise."""
        return self.as_subclass(Tensor).clone()


class FolderCheckpointIO(CheckpointIO):
    """Copies the tensors of a checkpoint, and writes its folder in the background."""

    def __init__(self) -> None:
        self.load_optimizer = True  # set False where only weights are wanted (validate, test, predict)
        self.verified: Path | None = None  # the checkpoint whose files have just been compared with their digests
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._task: Future[None] | None = None  # what the thread has been given to do, one task at a time
        self._host_memory: dict[Place, Tensor] = {}  # for copies; reused by the next checkpoint

    # ---- Lightning's interface ----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Copy the tensors now and write them in the background, after the previous write, which raises if it failed.

        `storage_options`, Lightning's name for what a CheckpointIO defines, is called once the folder is written.
        """
        with self.copying():
            content = {key: deepcopy(value) for key, value in checkpoint.items() if key not in TENSORS}
            for key in TENSORS:
                if key in checkpoint:
                    content[key] = {name: self._copy((key, name), tensor) for name, tensor in checkpoint[key].items()}

        def write() -> None:
            write_folder(Path(path), content)
            if storage_options is not None:
                storage_options()

        self._task = self._writer.submit(write)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder to the CPU; the strategy moves what it needs."""
        return read_folder(Path(path), self.load_optimizer, verify=Path(path) != self.verified)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self.drain()
        remove_folder(Path(path))

    def teardown(self) -> None:
        """Wait for the write; log its failure, since the run ends anyway."""
        try:
            self.drain()
        except Exception as error:
            log.error("%s", error)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until everything is on the disk; raise the failure of the write."""
        task, self._task = self._task, None
        if task is not None:
            task.result()

    def raise_failures(self) -> None:
        """Raise the failure of a write that has ended."""
        if self._task is not None and self._task.done():
            self.drain()

    # ---- copies in host memory ----------------------------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[Callable[[Place, Tensor], Tensor]]:
        """Yield `copy_to_host(place, tensor)`; its copies can be read after the block.

        It reuses the memory of the checkpoint before, whose write is waited for first. From a GPU the copies are
        asynchronous, into page-locked memory: several times faster than one-by-one copies into newly allocated memory.
        """
        self.drain()
        yield self._copy_to_host
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _copy(self, place: Place, tensor: Tensor) -> Tensor:
        """A contiguous tensor in host memory that training will not write to."""
        if tensor.device.type == "cuda":
            return self._copy_to_host(place, tensor)
        return tensor.detach().to("cpu", copy=not isinstance(tensor, HostCopy)).contiguous()

    def _copy_to_host(self, place: Place, tensor: Tensor) -> Tensor:
        memory = self._host_memory.get(place)
        if memory is None or (memory.shape, memory.dtype) != (tensor.shape, tensor.dtype):
            try:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            except RuntimeError:  # the system has too little memory to lock
                memory = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._host_memory[place] = memory
        return memory.copy_(tensor.detach(), non_blocking=True).as_subclass(HostCopy)
