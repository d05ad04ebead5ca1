"""Initial weights that know which token follows which: embedding and output matrix learn it before the first step.

A new model spends its first hundred steps on how often each token follows each other one, of which the data has the
counts. Two matrices learn them for the price of a few steps, since each pair of tokens is one term of the loss,
however often it occurs.
"""

import logging
import time

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR

from lm.model.decoder import IGNORED
from lm.system.units import format_count, format_duration, plural
from lm.training.callback import Callback
from lm.training.module import LanguageModule

log = logging.getLogger(__name__)

MAX_TOKENS = 2**24  # of the data, that are counted
CHUNK = 2**24  # logits at once
EMBEDDING_LR, OUTPUT_LR = 0.1, 6.4  # of the embedding; of the output, divided by the width


class BigramStart(Callback):
    """Fits embedding and output matrix of a new model to the bigrams of the first tokens of its run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_model_built(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.state.fn != "fit" or not pl_module.run_state.new_weights:
            return
        began, data, decoder = time.monotonic(), trainer.datamodule, pl_module.decoder
        epoch = int(data.shards["train"].index.windows(data.seq_len).sum())
        samples = min(epoch, trainer.max_steps * data.global_batch, MAX_TOKENS // data.seq_len)
        batch, _ = data.read_samples(0, samples)
        pairs, counts = count_bigrams(batch.input_ids, batch.labels, decoder.config.vocab_size)
        loss = fit_bigrams(decoder.embed_tokens.weight, decoder.lm_head.weight, pairs, counts, self.steps)
        tokens, duration = format_count(samples * data.seq_len), format_duration(time.monotonic() - began)
        steps = plural(self.steps, "step")
        log.info("bigrams of %s tokens, in %s and %s: loss of the new weights %.4f", tokens, steps, duration, loss)


def count_bigrams(input_ids: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The pairs of a token and its label, as `token * vocab_size + label` in order, and how often each occurs: (n,)."""
    pairs = input_ids * vocab_size + labels
    return torch.unique(pairs[labels != IGNORED], return_counts=True)


@torch.enable_grad()
def fit_bigrams(embedding: Tensor, output: Tensor, pairs: Tensor, counts: Tensor, steps: int) -> float:
    """Train two matrices (V, D), in place, to predict each token from the one before it; returns the loss in nats.

    The logits are those of a decoder whose blocks are the identity: RMSNorm, then the output matrix. `pairs` and
    `counts` are those of `count_bigrams`. Adam, whose rates fall to a twentieth, on all pairs in every step. At the
    end each row of the embedding has a root mean square of 1.
    """
    vocab_size, width = embedding.shape
    device, rows = embedding.device, max(1, CHUNK // vocab_size)  # rows of the embedding at once
    first, second, shares = pairs // vocab_size, (pairs % vocab_size).to(device), (counts / counts.sum()).to(device)
    edges = torch.searchsorted(first, torch.arange(0, vocab_size + rows, rows)).tolist()
    first = first.to(device)
    inputs, outputs = (matrix.detach().float().clone().requires_grad_() for matrix in (embedding, output))
    optimizer = torch.optim.Adam(
        [{"params": [inputs], "lr": EMBEDDING_LR}, {"params": [outputs], "lr": OUTPUT_LR / width}], betas=(0.5, 0.95)
    )
    schedule = LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        loss = 0.0
        for begin, (start, end) in zip(range(0, vocab_size, rows), zip(edges, edges[1:])):
            hidden = F.rms_norm(inputs[begin : begin + rows], (width,))  # (R, D)
            targets = hidden.new_zeros(len(hidden), vocab_size)  # (R, V), which sum to 1 over all rows
            targets[first[start:end] - begin, second[start:end]] = shares[start:end]
            part = -(targets * F.log_softmax(hidden @ outputs.T, dim=-1)).sum()
            part.backward()
            loss += part.item()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        embedding.copy_(F.rms_norm(inputs, (width,)))
        output.copy_(outputs)
    return loss
