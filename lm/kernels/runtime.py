"""Compiles CUDA sources with NVRTC, caches them on disk, launches kernels on torch's stream and registers ops.

NVRTC comes with torch and needs no nvcc, headers or GPU. A compiled file holds one source for one architecture
and one set of constants. Processes may share the cache: a file appears in it complete, by a rename.
"""

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.errors import RunError

SOURCES = Path(__file__).parent / "csrc"
PRELUDE = "prelude.cuh"
FLAGS = ("--std=c++17", "--ptxas-options=--verbose")
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}  # names in the sources
LIBRARY = torch.library.Library("lm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


# ---- compilation -----------------------------------------------------------------------------------------------------


def available() -> bool:
    """Whether CUDA sources can be compiled here."""
    try:
        from cuda.bindings import nvrtc

        return nvrtc.nvrtcVersion()[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    except (ImportError, RuntimeError, OSError):
        return False


def cubin(name: str, arch: str, **defines: object) -> bytes:
    """The machine code of `csrc/<name>.cu` for an architecture such as "sm_90", from the cache or compiled now.

    `defines` are preprocessor constants.
    """
    path = cache_folder() / f"{name}-{arch}-{_cache_key(name, arch, defines)[:24]}.cubin"
    try:
        digest, code = path.read_bytes().split(b"\n", 1)
        if digest == hashlib.sha256(code).hexdigest().encode():
            return code
    except (OSError, ValueError):  # absent, or damaged
        pass
    code, _ = compile_source(name, arch, **defines)
    with suppress(OSError):  # the cache cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")  # no tempfile: others may read it
        temporary.write_bytes(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
        os.replace(temporary, path)
    return code


def compile_source(name: str, arch: str, **defines: object) -> tuple[bytes, str]:
    """`cubin` without the cache: the machine code, and a log with each kernel's registers and spilled bytes."""
    from cuda.bindings import nvrtc

    def checked(result: tuple) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RunError(f"NVRTC failed on {name}.cu for {arch}: {result[0].name}")
        return result[1] if len(result) > 1 else None

    # Constants are put in front of the source, not passed as options: NVRTC's own header uses names like T.
    constants = "".join(f"#define {key} {value}\n" for key, value in defines.items()) + "#line 1\n"
    source = constants.encode() + (SOURCES / f"{name}.cu").read_bytes()
    prelude = (SOURCES / PRELUDE).read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 1, [prelude], [PRELUDE.encode()]))
    try:
        options = [f"--gpu-architecture={arch}", *FLAGS]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").strip("\0\n ")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RunError(f"{name}.cu does not compile for {arch} ({result.name}): {text}")
        code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), text


def cache_folder() -> Path:
    """Folder of compiled kernels: `LM_KERNEL_CACHE`, or the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LM_KERNEL_CACHE") or Path(cache) / "lm" / "kernels")


def _cache_key(name: str, arch: str, defines: dict[str, object]) -> str:
    """A digest of everything that the machine code depends on."""
    from cuda.bindings import nvrtc

    digest = hashlib.sha256(repr((arch, FLAGS, sorted(defines.items()), nvrtc.nvrtcVersion()[1:])).encode())
    for file in (f"{name}.cu", PRELUDE):
        digest.update((SOURCES / file).read_bytes())
    return digest.hexdigest()


# ---- launch ----------------------------------------------------------------------------------------------------------


class Program:
    """The kernels of one source, loaded on the GPU of index `device`. A launch takes a few microseconds."""

    def __init__(self, code: bytes, device: int) -> None:
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        self._functions: dict[str, Any] = {}
        torch.cuda.init()
        with torch.cuda.device(device):
            self._enter_context()
            self._module = self._checked("cuModuleLoadData", driver.cuModuleLoadData(code))

    def __call__(self, name: str, blocks: int, threads: int, *arguments: Tensor | int | float | None) -> None:
        """Launch a kernel on torch's current stream, with `blocks` blocks (0: no launch) of `threads` threads.

        In the kernel a tensor or None is a pointer, an int `i64`, and a float `float`.
        """
        if not blocks:
            return
        if torch.cuda.current_device() != self._device:  # its context must be current in this thread
            with torch.cuda.device(self._device):
                return self(name, blocks, threads, *arguments)
        if name not in self._functions:
            handle = self._driver.cuModuleGetFunction(self._module, name.encode())
            self._functions[name] = self._checked(f"finding {name}", handle)
        function = self._functions[name]
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments)
        kinds = tuple(
            ctypes.c_longlong if isinstance(a, int) else ctypes.c_float if isinstance(a, float) else ctypes.c_void_p
            for a in arguments
        )
        stream = torch.cuda.current_stream(self._device).cuda_stream
        launch = self._driver.cuLaunchKernel
        (result,) = launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)
        if result == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # torch has not used a GPU in this thread yet
            self._enter_context()
            (result,) = launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)
        self._checked(f"starting {name}", (result,))

    def _enter_context(self) -> None:
        """Make the device's primary context, which torch uses too, current in this thread."""
        driver = self._driver
        device = self._checked("cuDeviceGet", driver.cuDeviceGet(self._device))
        context = self._checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
        self._checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))

    def _checked(self, action: str, result: tuple) -> Any:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RunError(f"CUDA driver: {action}: {result[0].name}")
        return result[1] if len(result) > 1 else None


def program(name: str, device: torch.device, **defines: object) -> Program:
    """The kernels of a source for these constants (see `cubin`), compiled and loaded at the first call."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _program(name, index, tuple(defines.items()))


@functools.cache
def _program(name: str, device: int, defines: tuple[tuple[str, object], ...]) -> Program:
    major, minor = torch.cuda.get_device_capability(device)
    return Program(cubin(name, f"sm_{major}{minor}", **dict(defines)), device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a device; a few blocks for each keep it busy."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def vector(width: int, *tensors: Tensor | None) -> int:
    """Number of elements that a kernel may load at once: 16 bytes, or 1 element if rows are not aligned to 16 bytes.

    `tensors` have rows of `width` elements that are loaded in vectors; the smallest dtype counts.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    count = 16 // min(tensor.element_size() for tensor in present)
    aligned = width % count == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in present)
    return count if aligned else 1


def warps(pieces: int, held: int) -> int:
    """Number of warps for a row of `pieces` vectors, so that a lane holds about `held` of them."""
    count = 1
    while count < 32 and pieces > count * 32 * held:
        count *= 2
    return count


# ---- registration ----------------------------------------------------------------------------------------------------


def define(schema: str, *, cpu: Callable, cuda: Callable, fake: Callable) -> Callable:
    """Register an op that does not change its inputs and returns only new tensors.

    `cpu` is plain PyTorch, `cuda` uses our kernels; `fake` makes empty tensors of the result's shapes, dtypes and
    strides, for tracing.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=TAGS)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"lm::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lm, name).default
