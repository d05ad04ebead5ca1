"""Compiled kernels on their way to a device: loaded once, then started on torch's stream in a few microseconds.

`nvrtc` compiles them; each op's file (`rms_norm`, `swiglu`, ...) says with what grid and arguments they start.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from lm.errors import RunError
from lm.kernels import nvrtc

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}  # as the sources call them


class Program:
    """The kernels of one source, loaded on a device.

    Args:
        code: machine code.
        device: index of the GPU.
    """

    def __init__(self, code: bytes, device: int) -> None:
        from cuda.bindings import driver

        self._driver, self._device = driver, device
        self._functions: dict[str, Any] = {}
        torch.cuda.init()
        with torch.cuda.device(device):
            self._enter()
            self._module = self._done("cuModuleLoadData", driver.cuModuleLoadData(code))

    def __call__(self, name: str, blocks: int, threads: int, *arguments: Tensor | int | float | None) -> None:
        """Start a kernel on torch's current stream.

        Args:
            name: of the kernel.
            blocks: in the grid, which has one dimension; none: nothing is started.
            threads: of a block.
            arguments: in the kernel's order: a tensor or None is a pointer there, an int `i64`, a float `float`.

        Raises:
            RunError: the driver refuses.
        """
        if not blocks:
            return
        if torch.cuda.current_device() != self._device:  # its context must be the one of this thread
            with torch.cuda.device(self._device):
                return self(name, blocks, threads, *arguments)
        function = self._functions.get(name) or self._find(name)
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments)
        kinds = tuple(ctypes.c_longlong if isinstance(a, int) else ctypes.c_float if isinstance(a, float)
                      else ctypes.c_void_p for a in arguments)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        start = self._driver.cuLaunchKernel
        (result,) = start(function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)
        if result == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread that torch has not used a GPU in yet
            self._enter()
            (result,) = start(function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)
        self._done(f"starting {name}", (result,))

    def _enter(self) -> None:
        """Make the device's context, which is torch's too, the one of this thread."""
        driver = self._driver
        device = self._done("cuDeviceGet", driver.cuDeviceGet(self._device))
        context = self._done("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
        self._done("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))

    def _find(self, name: str) -> Any:
        found = self._driver.cuModuleGetFunction(self._module, name.encode())
        return self._functions.setdefault(name, self._done(f"finding {name}", found))

    def _done(self, what: str, result: tuple) -> Any:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            raise RunError(f"CUDA driver: {what}: {result[0].name}")
        return result[1] if len(result) > 1 else None


def program(name: str, device: torch.device, **defines: object) -> Program:
    """A source's kernels for these constants on this device, compiled and loaded at the first call.

    Args:
        name: of a file in `csrc/`, without its ending.
        device: where the tensors are.
        defines: preprocessor constants.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _program(name, index, tuple(defines.items()))


@functools.cache
def _program(name: str, device: int, defines: tuple[tuple[str, object], ...]) -> Program:
    major, minor = torch.cuda.get_device_capability(device)
    return Program(nvrtc.cubin(name, f"sm_{major}{minor}", **dict(defines)), device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has: a grid of a few blocks each keeps all of it busy."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def vector(width: int, *tensors: Tensor | None) -> int:
    """How many neighbours a kernel may load at once: 16 bytes of them, or 1 where a row does not start at 16 bytes.

    Args:
        width: elements of a row.
        tensors: all whose rows are loaded so, of one dtype or wider ones.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    count = 16 // min(tensor.element_size() for tensor in given)
    aligned = width % count == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in given)
    return count if aligned else 1
