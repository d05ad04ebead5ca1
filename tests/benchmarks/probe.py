"""What a device and its libraries can do, apart from any training: `python tests/benchmarks/probe.py FILE`.

Allocator settings, page-locked memory, copies, and the matrix products and attention of `pretrain-350m.yaml`, in the
ways that this project computes them or could. Each entry that fails is recorded as the text of its error, and the
others go on. The JSON file is written again after each entry. On a CPU the sizes are small.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # lm, which may not be installed
import preloaded

preloaded.set_up_allocator()  # before torch is imported, as in a training
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lm.kernels.fp8.quantization import Scaled, quantize
from lm.kernels.linear import adds_in_place
from lm.kernels.torch_private import scaled_mm
from lm.system.hardware import device_name
from lm.system.process import run_facts

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BF16 = torch.bfloat16
ROUNDS = 15 if CUDA else 2
MIB = 2**20 if CUDA else 2**10  # sizes of the CPU's entries are a thousandth
SAMPLES, LENGTH, WIDTH = (64, 1024, 1024) if CUDA else (2, 64, 128)
TOKENS = SAMPLES * LENGTH
# Columns in and out of a block's matrices; qkv is as wide with 16 and 4 heads of 64 as with 8 and 2 of 128.
LAYERS = {
    "qkv": (WIDTH, WIDTH * 3 // 2),
    "o": (WIDTH, WIDTH),
    "gate_up": (WIDTH, 8 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
HEADS = {64: (WIDTH // 64, max(1, WIDTH // 256)), 128: (WIDTH // 128, max(1, WIDTH // 512))}  # of queries, of keys


def main(output: str) -> None:
    found: dict[str, Any] = {"device": device_name(DEVICE), "seconds": {}}
    for entry in (
        versions,
        allocator,
        pinned_memory,
        launches,
        copies,
        big_product,
        products_in_place,
        products,
        attention,
    ):
        began = time.perf_counter()
        found[entry.__name__] = attempt(entry)
        found["seconds"][entry.__name__] = round(time.perf_counter() - began, 2)
        Path(output).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def attempt(call: Callable[[], Any]) -> Any:
    """The result of a call, or the first line of its error."""
    try:
        return call()
    except Exception as error:  # whatever this device or this version of torch lacks
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    """The median time of a call, on the device, after a warm-up."""
    for _ in range(2):
        call()
    synchronize()
    if not CUDA:
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:])) / 1e3


def rate(operations: float, call: Callable[[], Any]) -> float:
    """TFLOP/s of a call, to four digits."""
    return float(f"{operations / seconds(call) / 1e12:.4g}")


def random(*shape: int) -> torch.Tensor:
    """Random values: products of zeros run faster, as they take less power."""
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


# ---- entries ---------------------------------------------------------------------------------------------------------
def versions() -> dict[str, Any]:
    found = {"python": sys.version.split()[0], **run_facts()["versions"], "cuda": torch.version.cuda}
    if CUDA:
        free, total = torch.cuda.mem_get_info()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found |= {"cudnn": torch.backends.cudnn.version(), "free_bytes": free, "total_bytes": total}
        found |= {"capability": capability, "processors": torch.cuda.get_device_properties(0).multi_processor_count}
    return found


def allocator() -> dict[str, Any]:
    """The settings in force, and whether a segment that was just allocated can grow."""
    found: dict[str, Any] = {"environment": {name: os.environ[name] for name in os.environ if "ALLOC_CONF" in name}}
    if CUDA:
        kept = torch.empty(64 * MIB, device=DEVICE)
        found["expandable_segments"] = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
        found["settings"] = attempt(lambda: torch.cuda.memory._snapshot()["allocator_settings"])
        del kept
    return found


def pinned_memory() -> dict[str, float]:
    """Seconds to page-lock 1 GiB, as for the host's copy of a checkpoint, and the rate of a copy to it."""
    began = time.perf_counter()
    host = torch.empty(1024 * MIB, dtype=torch.uint8, pin_memory=CUDA)
    took = time.perf_counter() - began
    there = torch.ones(1024 * MIB, dtype=torch.uint8, device=DEVICE)
    return {"seconds": took, "copy_gb_per_second": host.nbytes / 1e9 / seconds(lambda: host.copy_(there))}


def launches() -> dict[str, float]:
    """Microseconds that the host takes for a small operation."""
    x = torch.ones(8, device=DEVICE)
    calls = 2000
    for _ in range(2):
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            x.add_(1)
        took = time.perf_counter() - began
    return {"host_us": took / calls * 1e6}


def copies() -> dict[str, float]:
    """GB/s of a large copy, bytes read and written counted."""
    source = torch.randint(2**31, (128 * MIB,), device=DEVICE)  # 1 GiB
    target = torch.empty_like(source)
    return {"gb_per_second": 2 * source.nbytes / 1e9 / seconds(lambda: target.copy_(source))}


def big_product() -> dict[str, float]:
    """TFLOP/s of a square product in bf16 on random values, at most what a training can have."""
    size = 8192 if CUDA else 256
    a, b = random(size, size), random(size, size)
    return {"size": size, "tflops": rate(2 * size**3, lambda: a @ b)}


def products_in_place() -> bool:
    """Whether bf16 products are added to an fp32 sum in one kernel."""
    return adds_in_place(BF16, DEVICE)


def products() -> dict[str, Any]:
    """TFLOP/s of the products of a block's matrices: forward, gradient of the input, gradient of the weight."""
    return {name: attempt(lambda sizes=sizes: layer_products(*sizes)) for name, sizes in LAYERS.items()}


def layer_products(columns: int, rows: int) -> dict[str, dict[str, Any]]:
    operations, fp32 = 2 * TOKENS * columns * rows, torch.float32
    x, weight, dout = random(TOKENS, columns), random(rows, columns), random(TOKENS, rows)
    total = torch.zeros(rows, columns, device=DEVICE)
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {"bf16": lambda: F.linear(x, weight)},
        "dx": {"bf16": lambda: dout @ weight},
        "dw": {
            "bf16": lambda: torch.mm(dout.t(), x, out_dtype=fp32),
            "bf16, added in place": lambda: torch.addmm(total, dout.t(), x, out_dtype=fp32, out=total),
        },
    }
    errors: dict[str, Any] = {}
    exact = dout.double().t() @ x.double()
    for scaling in ("tensorwise", "rowwise"):
        a, b = (quantize(one, scaling, transpose=True) for one in (x, weight))
        d = quantize(dout, scaling, gradient=True, transpose=True)
        pairs = {"forward": (a.matrix, b.matrix), "dx": (d.matrix, b.transpose), "dw": (d.transpose, a.transpose)}
        for (name, pair), fast in product(pairs.items(), (True, False)):
            out_dtype = fp32 if name == "dw" and scaling == "tensorwise" else BF16
            calls[name][f"{scaling}{' fast' * fast}"] = partial(fp8_product, *pair, out_dtype, fast)
        # The sum over all tokens is the longest, where fewer digits show most: also apart from those of the factors.
        exact_sum = dequantized(d.transpose) @ dequantized(a.transpose).t()
        for kind in (scaling, f"{scaling} fast"):
            call = calls["dw"][kind]
            errors[kind] = attempt(
                lambda: {"error": distance(call(), exact), "of the sum": distance(call(), exact_sum)}
            )
    rates = {
        name: {kind: attempt(lambda call=call: rate(operations, call)) for kind, call in kinds.items()}
        for name, kinds in calls.items()
    }
    return rates | {"errors of dw": errors}


def fp8_product(a: Scaled, b: Scaled, out_dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """As `kernels/fp8/linear.product`, with a choice of the accumulation for every format."""
    scales = a.scale[..., None], b.scale[None]
    return scaled_mm(a.values, b.values.t(), *scales, out_dtype=out_dtype, use_fast_accum=fast)


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def dequantized(one: Scaled) -> torch.Tensor:
    return one.values.double() * one.scale.double()[..., None]


def attention() -> dict[str, Any]:
    """TFLOP/s of attention, forward and backward, the operations of causal attention counted."""
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    return {
        f"{name}, heads of {width}": attempt(lambda: attention_rate(kernel, width))
        for (name, kernel), width in product(kernels.items(), HEADS)
    }


def attention_rate(kernel: SDPBackend, width: int) -> float:
    heads, kv_heads = HEADS[width]
    q, k, v = (
        random(SAMPLES, LENGTH, count, width).transpose(1, 2).requires_grad_() for count in (heads, kv_heads, kv_heads)
    )
    dout = torch.randn_like(q)

    def call() -> None:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(out, (q, k, v), dout)

    # Two products forward and four backward, each of 2 x width operations for half of all pairs of tokens, as MFU counts
    # them; the backward pass computes one of the forward pass's again.
    return rate(6 * SAMPLES * heads * LENGTH**2 * width, call)


if __name__ == "__main__":
    main(sys.argv[1])
