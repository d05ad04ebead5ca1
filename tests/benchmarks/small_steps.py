"""What a step of few tokens costs: nanoGPT's, a plain loop around our decoder, and `training/step` with both optimizers.

    python tests/benchmarks/small_steps.py --nanogpt PATH [--compiled]

The sizes are those of `configs/shakespeare.yaml`: 768 tokens, 128 wide. All contenders live in this process, on one
thread, and take turns; times are CPU milliseconds of a step, and ratios are medians over the turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from peer_models import Training, build

from lm.data.loader import Batch
from lm.model.config import DecoderConfig, matrix_rows
from lm.model.decoder import Losses
from lm.training.config import OptimizerConfig
from lm.training.optim import build_optimizer
from lm.training.step import optimizer_step

CONFIG = DecoderConfig(
    vocab_size=66, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=336,
    max_position_embeddings=64, tie_word_embeddings=False, qk_norm=True, zero_init_residual=True,
)  # fmt: skip
ROWS, LENGTH = 12, 64
DEVICE = torch.device("cpu")
TURNS, STEPS = 11, 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare CPU time of a step of 768 tokens.")
    parser.add_argument("--nanogpt", required=True, help="a checkout of karpathy/nanoGPT")
    parser.add_argument("--compiled", action="store_true", help="by inductor, each side")
    options = parser.parse_args()
    sys.path.insert(0, options.nanogpt)
    torch.set_num_threads(1)
    rows = torch.randint(0, 66, (ROWS, LENGTH + 1))
    contenders = {
        "nanogpt": nanogpt(rows, "+inductor" * options.compiled),
        "a plain loop, adamw": plain_loop(rows, "inductor" if options.compiled else "none"),
        **{f"training/step, {name}": ours(rows, name, "inductor" if options.compiled else "none")
           for name in ("adamw", "muon")},
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, TURNS):
        for name, step in contenders.items():
            began = time.process_time()
            for _ in range(STEPS):
                step()
            if turn >= 0:  # the first warms up
                times[name].append((time.process_time() - began) / STEPS)
    for name, seconds in times.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds, times["nanogpt"], strict=True))
        print(f"{name:24} {1000 * statistics.median(seconds):7.1f} ms   {ratio:.2f} of nanoGPT's")


def nanogpt(rows: torch.Tensor, compiled: str) -> Callable[[], object]:
    """A step as its `train.py` takes one on a CPU."""
    contender = build(f"nanogpt{compiled}", CONFIG, LENGTH, DEVICE)
    optimizer = contender.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")

    def step() -> None:
        contender.loss(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(contender.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_loop(rows: torch.Tensor, compile: str) -> Callable[[], object]:
    """Our decoder in the loop that all contenders of `peers.py` have."""
    batches = rows[None, :, :-1].contiguous(), rows[None, :, 1:].contiguous()
    return Training(build(f"lm:{compile}", CONFIG, LENGTH, DEVICE), batches, None).step


def ours(rows: torch.Tensor, optimizer_name: str, compile: str) -> Callable[[], object]:
    """Our decoder, our optimizer and our step."""
    model = build(f"lm:{compile}", CONFIG, LENGTH, DEVICE).model
    optimizer = build_optimizer(model, OptimizerConfig(name=optimizer_name, lr=1e-3), matrix_rows(CONFIG))

    def compute_losses(batch: Batch) -> Losses:
        return model(batch.input_ids, labels=batch.labels)

    def step() -> None:
        optimizer_step(Batch(rows), compute_losses, optimizer, micro_batch_size=ROWS, lr_factor=1.0, max_norm=1.0)
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
