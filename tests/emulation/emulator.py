"""Test equipment: our kernels on a CPU, compiled by g++ through `cuda_on_cpu.h`.

`emulated` is a fixture that puts this in the place of `lm.kernels.runtime`, so that an op's CUDA entry (its grid, its
constants, its arguments) runs as it is, on CPU tensors.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from lm.kernels import runtime

HEADER = Path(__file__).parent / "cuda_on_cpu.h"
# The same bits on every processor.
FLAGS = (
    "-std=c++17 -O1 -w -shared -fPIC -fno-strict-aliasing -fno-gnu-unique -fvisibility=hidden -ffp-contract=off"
).split()
CACHE = Path(tempfile.gettempdir()) / f"lm-emulated-kernels-{os.getuid()}"
KERNEL = re.compile(r'extern "C" __global__ void\s*(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(')


class Program:
    """The kernels of one source, called as `launch.Program` is, on CPU tensors.

    Args:
        source: a `.cu` file.
        defines: its constants.
        reversed: run the last warp of a block first.
    """

    def __init__(self, source: Path, defines: dict[str, object], reversed: bool) -> None:
        self.library = ctypes.CDLL(str(compile_kernels(source, defines)))
        self.reversed = reversed

    def __call__(self, name: str, blocks: int, threads: int, *arguments: Tensor | int | float | None) -> None:
        values = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_contiguous() or argument.stride(-1) == 1, "a kernel takes rows of neighbours"
                values.append(ctypes.c_void_p(argument.data_ptr()))
            elif isinstance(argument, int):
                values.append(ctypes.c_longlong(argument))
            else:
                values.append(ctypes.c_void_p(0) if argument is None else ctypes.c_float(argument))
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        kernel = getattr(self.library, f"emulated_{name}")
        kernel.restype = ctypes.c_char_p
        error = kernel(blocks, threads, int(self.reversed), len(values), addresses)
        if error:
            raise RuntimeError(f"{name}: {error.decode()}")


def compile_kernels(
    source: Path, defines: dict[str, object], flags: Sequence[str] = FLAGS, main: Path | None = None
) -> Path:
    """The shared object of a source, or with `main` a program, compiled once for all tests.

    The prelude is the one beside the source, if there is one.
    """
    constants = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    text, folders = source.read_text(), (source.parent, runtime.SOURCES)
    whole = f'#include "{HEADER.name}"\n{constants}#define EMULATED\n#include "{source}"\n'
    whole += "".join(f"EMULATE({name})\n" for name in KERNEL.findall(text)) + (f'#include "{main}"\n' if main else "")
    prelude = next(path for folder in folders if (path := folder / runtime.PRELUDE).exists())
    parts = (whole, text, *(path.read_text() for path in (prelude, HEADER, *([main] if main else []))), repr(flags))
    path = CACHE / f"{source.stem}-{digest(*parts)}.so"
    if not path.exists():
        header = precompiled(tuple(flags))
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            (Path(folder) / "unit.cpp").write_text(whole)
            places = [f"-I{place}" for place in (header, *folders)]
            subprocess.run(["g++", *flags, *places, "-o", f"{folder}/unit.so", f"{folder}/unit.cpp"], check=True)
            os.replace(f"{folder}/unit.so", path)
    return path


@cache
def precompiled(flags: tuple[str, ...]) -> Path:
    """A folder with the header and what g++ made of it, without which a kernel takes twice as long to compile."""
    path = CACHE / f"header-{digest(HEADER.read_text(), repr(flags))}"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            header = shutil.copy(HEADER, folder)
            subprocess.run(["g++", *flags, "-x", "c++-header", "-o", f"{header}.gch", header], check=True)
            with suppress(OSError):  # another process was first
                os.rename(folder, path)
                os.mkdir(folder)  # which is removed now
    return path


def digest(*parts: str) -> str:
    return hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def emulated(request, monkeypatch):
    """The kernels run here, with the warps of a block in this order, as on a GPU of three multiprocessors."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the emulation with")

    def program(name, device, **defines):
        return Program(runtime.SOURCES / f"{name}.cu", defines, request.param)

    monkeypatch.setattr(runtime, "program", program)
    monkeypatch.setattr(runtime, "multiprocessors", lambda device: 3)
    return request.param
