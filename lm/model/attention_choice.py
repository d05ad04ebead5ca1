"""Which of the libraries' attention kernels is the fastest for a model on its device, found by measuring.

Forward and backward pass of a layer are timed for a moment with every kernel that runs. The times are kept by device,
versions and shape, so that a resumed run uses the same kernels.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from importlib.metadata import distributions
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from lm.errors import RequestError, RunError, first_line
from lm.kernels.runtime import cache_folder, write_cached
from lm.model.attention import AttentionMask, attend, backends, enter_kernels, kernel_order
from lm.model.config import Attention, DecoderConfig
from lm.model.decoder import Decoder

log = logging.getLogger(__name__)
FLASH = {"flash": None, "flash3": "FA3", "flash4": "FA4"}  # torch's names of versions that are wheels of their own
ROUNDS, RUNS = 5, 10  # of a kernel that is timed, and of each round


class Choice(NamedTuple):
    """The kernels of a model's layers."""

    causal: str  # of layers that attend to all tokens before: one of `Attention`
    sequences: str  # of layers with windows or documents: a version of flash attention

    @property
    def backend(self) -> SDPBackend:
        return _backend(self.causal)

    def apply(self, decoder: Decoder) -> None:
        """Make a decoder use these kernels; sets this process's version of flash attention."""
        enter_kernels(decoder, self.backend)
        _use_flash(FLASH[self.sequences])


class Shape(NamedTuple):
    """A micro-batch, as attention sees it."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer, narrower than `length`
    documents: bool  # rows are divided into documents; a document a row is what is measured

    @classmethod
    def of(cls, config: DecoderConfig, shape: tuple[int, int], documents: bool) -> "Shape":
        """The shape of a decoder's micro-batch `(B, T)`."""
        windows = tuple(window if window is not None and window < shape[1] else None for window in config.windows)
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        return cls(*shape, *heads, windows, documents)

    @property
    def sequences(self) -> list[int | None]:
        """The windows of the layers that use flash attention over sequences."""
        return [window for window in self.windows if self.documents or window is not None]


def choose_attention(name: Attention, device: torch.device, dtype: torch.dtype, shape: Shape) -> Choice | None:
    """The kernels for a model, measured unless they are named; None on other devices than CUDA's, and in fp32."""
    if device.type != "cuda" or dtype == torch.float32:
        if name != "auto":
            raise RequestError(f"model.attention {name} needs a CUDA device and half precision: use auto")
        return None
    if name == "auto":
        times = measured(device, dtype, shape)
        if not times:
            return None
        choice = fastest(times, shape)
        log.info("attention: ms of a layer forward and backward: %s",
                 ", ".join(f"{kernel} {value:.3g}" for kernel, value in times.items()))  # fmt: skip
    else:
        choice = Choice(name, name if name in FLASH else "flash")
        _, failures = measure(device, dtype, shape, [name])
        if failures:
            raise RequestError(f"model.attention {name} does not run here ({failures[name]}): use auto")
    return choice


def fastest(times: dict[str, float], shape: Shape) -> Choice:
    """The kernels that take the least time for all layers together, by the times of `measure`."""
    causal = len(shape.windows) - len(shape.sequences)

    def total(choice: Choice) -> float:
        kernels = [f"{choice.sequences} {window}" for window in shape.sequences] + [choice.causal] * causal
        return sum(times.get(kernel, float("inf")) for kernel in kernels)

    others = [name for name in times if " " not in name and name not in FLASH]
    return min((Choice(name, version) for version in FLASH for name in (version, *others)), key=total)


def measured(device: torch.device, dtype: torch.dtype, shape: Shape) -> dict[str, float]:
    """What `measure` gives for every kernel of a device, from the cache or measured now."""
    # torch knows the names of flash attention's other versions also where their wheels are not installed.
    wheels = sorted((wheel.name, wheel.version) for wheel in distributions() if "flash" in str(wheel.name).lower())
    versions = torch.__version__, torch.backends.cudnn.version(), list_flash_attention_impls(), wheels
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = repr((name, versions, str(dtype), shape))
    path = cache_folder() / f"attention-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        times, _ = measure(device, dtype, shape, candidates(device))
    write_cached(path, json.dumps(times).encode())
    return times


def candidates(device: torch.device) -> list[str]:
    """The kernels that give right results on a device. Which are installed is found out by trying them."""
    if device.type != "cuda":
        return ["flash", "math"]
    known = backends(torch.cuda.get_device_capability(device), masked=False)[:-1]
    names = [backend.name.removesuffix("_ATTENTION").lower() for backend in known]
    return names + [name for name, version in FLASH.items() if version in list_flash_attention_impls()]


def measure(
    device: torch.device, dtype: torch.dtype, shape: Shape, names: list[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of a layer's forward and backward pass, and for every kernel that does not run, why.

    A causal layer is under the kernel's name; one with windows or documents under the version of flash attention and
    the window, such as `flash 512`, or `flash None`.
    """
    times, failures = {}, {}
    before = current_flash_attention_impl()
    own = torch.Generator(device).manual_seed(0)  # training draws the same numbers whether this was measured or read
    q, k, v = (torch.randn(shape.batch, shape.length, heads, shape.head_dim, device=device, dtype=dtype, generator=own,
                           requires_grad=True) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))  # fmt: skip
    offsets = torch.arange(0, shape.batch * shape.length + 1, shape.length, dtype=torch.int32, device=device)

    def milliseconds(mask: AttentionMask) -> float:
        def run() -> None:
            out = attend(q, k, v, mask)
            torch.autograd.grad(out, (q, k, v), out)

        for _ in range(2):  # libraries choose and load their code
            run()
        return least_milliseconds(run, device)

    for name in names:
        try:
            _use_flash(FLASH.get(name))
            if len(shape.sequences) < len(shape.windows):
                with kernel_order([_backend(name)]):
                    times[name] = milliseconds(AttentionMask(None, None, None))
            for window in dict.fromkeys(shape.sequences if name in FLASH else ()):
                times[f"{name} {window}"] = milliseconds(AttentionMask(window, offsets, None))
        except (RuntimeError, RunError) as error:  # not for these inputs, or not installed
            failures[name] = first_line(error)
    _use_flash(before)
    return times, failures


def least_milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """The time of a run in the fastest of several rounds, by the device's clock where it has one.

    All rounds are queued before anything waits, so that from the second on the device never waits for the host, unless
    the host takes longer for a run than the device does.
    """
    marks = [_mark(device)]
    for _ in range(ROUNDS):
        for _ in range(RUNS):
            run()
        marks.append(_mark(device))
    if device.type != "cuda":
        return min(end - start for start, end in pairwise(marks)) / RUNS * 1e3
    marks[-1].synchronize()
    return min(start.elapsed_time(end) for start, end in pairwise(marks)) / RUNS


def _mark(device: torch.device) -> Any:
    """A moment of the host's clock, or one in a GPU's queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _backend(name: str) -> SDPBackend:
    name = "flash" if name in FLASH else name
    return SDPBackend.MATH if name == "math" else getattr(SDPBackend, f"{name.upper()}_ATTENTION")


def _use_flash(version: str | None) -> None:
    """Make torch's flash attention the version of this name, one of torch's names; None: the one that torch brings."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    if version is not None:
        try:
            activate_flash_attention_impl(version)
        except (ImportError, RuntimeError, ValueError) as error:  # ValueError: torch does not know the name
            raise RunError(f"flash attention {version}: {first_line(error)}: install its wheel") from error
