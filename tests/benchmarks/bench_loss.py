"""The loss in chunks of tokens against torch's own `linear_cross_entropy` (2.13) and the plain two lines.

    python tests/benchmarks/bench_loss.py

On a CPU with one thread: CPU seconds of both passes, the least of five, in turns; and how far value and gradients are
from those of float64.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.kernels.cross_entropy import linear_cross_entropy
from lm.training.trainer import keep_freed_memory

SIZES = ((4_096, 128, 4_096, torch.float32), (2_048, 512, 32_768, torch.float32), (2_048, 512, 32_768, torch.bfloat16))


def of_torch(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    chunked = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight.to(x.dtype), labels, reduction="sum", options=chunked)


WAYS = {
    "ours": lambda x, weight, labels: linear_cross_entropy(x, weight, labels)[0],
    "torch, in chunks": of_torch,
    "plain": lambda x, weight, labels: F.cross_entropy((x @ weight.to(x.dtype).t()).float(), labels, reduction="sum"),
}


def run(way: str, x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    total = WAYS[way](x, weight, labels)
    total.backward()
    return total.detach(), x.grad, weight.grad


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    for tokens, width, vocab, dtype in SIZES:
        x, labels = torch.randn(tokens, width).to(dtype), torch.randint(vocab, (tokens,))
        weight = 0.05 * torch.randn(vocab, width)
        exact = run("plain", x[:256].double(), weight.double(), labels[:256])
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(5):
            for way, values in seconds.items():
                start = time.process_time()
                run(way, x, weight, labels)
                values.append(time.process_time() - start)
        for way, values in seconds.items():
            pairs = zip(run(way, x[:256], weight, labels[:256]), exact, strict=True)
            errors = ", ".join(f"{(a.double() - b).norm() / b.norm():.1e}" for a, b in pairs)
            print(f"{tokens} x {width}, {vocab}, {dtype}: {way:<16} {min(values):.3f} s, off by {errors}", flush=True)


if __name__ == "__main__":
    main()
