"""Test equipment: launches of emulated kernels in a program of its own, which ThreadSanitizer watches.

`checked_main.h` says what that program finds.
"""

import os
import shutil
import struct
import subprocess
from functools import cache
from pathlib import Path

import torch
from emulation.emulator import FLAGS, compile_kernels
from torch import Tensor

MAIN = Path(__file__).parent / "checked_main.h"
CHECKED = (*(flag for flag in FLAGS if flag != "-shared"), "-g", "-fsanitize=thread", "-rdynamic")
# Where addresses are spread too far for ThreadSanitizer it cannot start.
RUN = ["setarch", "-R"] if shutil.which("setarch") else []


class Raced(AssertionError):
    """What ThreadSanitizer or an unreadable page found."""


class CheckedProgram:
    """As `emulator.Program`, but every launch is a process of its own, which is checked. Raises `Raced`."""

    def __init__(self, source: Path, defines: dict[str, object]) -> None:
        self.program = compile_kernels(source, defines, CHECKED, MAIN)

    def __call__(self, name: str, blocks: int, threads: int, *arguments: Tensor | int | float | None) -> None:
        buffers = _buffers([one for one in arguments if isinstance(one, Tensor)])  # as (n,) bytes, by their storage
        shared = _shared_variables(self.program)
        launch = [f"emulated_{name}".encode().ljust(64, b"\0"), _words(blocks, threads, 0, len(shared))]
        launch += [_words(*variable) for variable in shared] + [_words(len(buffers))]
        for content in buffers.values():
            launch += [_words(len(content), content.data_ptr() % 16), content.numpy().tobytes()]
        launch.append(_words(len(arguments)))
        for argument in arguments:
            if isinstance(argument, Tensor):
                storage = argument.untyped_storage().data_ptr()
                place = argument.data_ptr() - buffers[storage].data_ptr()
                launch.append(_words(list(buffers).index(storage), place))
            elif isinstance(argument, float):
                launch.append(_words(-1) + struct.pack("<fi", argument, 0))
            else:
                launch.append(_words(-1, argument or 0))
        ended = subprocess.run([*RUN, str(self.program)], input=b"".join(launch), capture_output=True,
                               env={**os.environ, "TSAN_OPTIONS": "atexit_sleep_ms=0"})  # fmt: skip
        if ended.returncode or ended.stderr:
            raise Raced(f"{name}: exit code {ended.returncode}\n{ended.stderr.decode()[:3000]}")
        after = torch.frombuffer(bytearray(ended.stdout), dtype=torch.uint8).split(list(map(len, buffers.values())))
        for content, changed in zip(buffers.values(), after, strict=True):
            content.copy_(changed)


def _buffers(tensors: list[Tensor]) -> dict[int, Tensor]:
    """The bytes that tensors lie in, from the first to the last, of each storage."""
    found = {}
    for storage in {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values():
        ends = []
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() == storage.data_ptr():
                begin = tensor.storage_offset()
                last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                ends += [begin * tensor.element_size(), (last + 1) * tensor.element_size()]
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)[min(ends) : max(ends)]
    return found


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *map(int, values))


@cache
def _shared_variables(program: Path) -> list[tuple[int, int]]:
    """The variables in shared memory, which are static in functions here: place from `launch_state`, and size."""
    listed = subprocess.run(["nm", "-S", str(program)], check=True, capture_output=True, text=True).stdout
    found = [line.split() for line in listed.splitlines() if len(line.split()) == 4]
    places = {name: (int(place, 16), int(size, 16)) for place, size, kind, name in found if kind in "bBdDuV"}
    origin = next(place for name, (place, _) in places.items() if name.endswith("launch_stateE"))
    kept = [name for name in places if name.startswith("_ZZ") and "emulation" not in name]
    return [(places[name][0] - origin, places[name][1]) for name in kept]
