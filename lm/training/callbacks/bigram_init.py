"""Initial weights that know which token follows which: a factorization of bigram counts of the training data.

A new model spends its first steps on how often each token follows each other one. Counts and one factorization give its
embedding and output matrix as much in seconds, and similar rows to tokens that are used alike. In memory, for a moment:
(vocabulary, vocabulary) int64 and fp32.
"""

import logging
import math
import time
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.model.decoder import IGNORED
from lm.system.units import format_count, format_duration
from lm.training.callback import Callback
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)

MAX_TOKENS = 2**24  # of the data, that are counted
SMOOTHING = 100.0  # pairs that each token is taken to have begun before, with all tokens in their usual shares
USUAL = 0.9  # part of the tokens whose rows of the embedding keep their lengths


class BigramInit(Callback):
    """Sets embedding and output matrix of a new model from the first tokens of its run."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def on_model_built(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if not self.enabled or trainer.state.fn != "fit" or not pl_module.run_state.new_weights:
            return
        if not pl_module.builtin or pl_module.config.tie_word_embeddings:
            log.info(
                "trainer.bigram_init is left out: it is for the built-in decoder, with an output matrix of its own"
            )
            return
        began, data, decoder = time.monotonic(), trainer.datamodule, cast(Any, pl_module.decoder)
        epoch = int(data.shards["train"].index.windows(data.seq_len).sum())
        samples = min(epoch, trainer.max_steps * data.global_batch, MAX_TOKENS // data.seq_len)
        batch, _ = data.read_samples(0, samples)
        counts = count_bigrams(batch.input_ids, batch.labels, decoder.config.vocab_size)
        device, width = decoder.embed_tokens.weight.device, decoder.config.hidden_size
        with torch.no_grad():
            for layer, weight in zip((decoder.embed_tokens, decoder.lm_head), factorize(counts.to(device), width)):
                layer.weight.copy_(weight)
        duration = format_duration(time.monotonic() - began)
        log.info("embedding and output: from bigrams of %s tokens, in %s", format_count(batch.labels.numel()), duration)


def count_bigrams(input_ids: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """How often each token (first index) has each label (second index), without ignored ones: (V, V) int64."""
    pairs = (input_ids * vocab_size + labels)[labels != IGNORED]
    return torch.bincount(pairs, minlength=vocab_size**2).view(vocab_size, vocab_size)


def factorize(counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Embedding and output matrix (V, D) whose logits, of rows by RMSNorm, are about the log of bigram probabilities.

    All but two columns factorize the pointwise mutual information of a token and the next one (Levy and Goldberg, 2014,
    "Neural Word Embedding as Implicit Matrix Factorization"), whose error counts in proportion to the tokens' shares.
    One column has the logs of the shares, which every token predicts. One fills the rows of the embedding up to a root
    mean square of 1, so that RMSNorm keeps their lengths. A random rotation makes all columns alike.
    """
    before, after = (
        counts.sum(1, keepdim=True) + 1.0,
        counts.sum(0) + 1.0,
    )  # how often a token is in a pair: (V, 1), (V,)
    shares = after / after.sum()
    information = (counts + SMOOTHING * shares).div_(before + SMOOTHING).div_(shares).log_()  # (V, V), mostly near 0
    rank = min(width - 2, len(counts))
    left, values, right = torch.svd_lowrank(information.mul_(before.sqrt()).mul_(after.sqrt()), q=rank, niter=2)
    rows, columns = left * values.sqrt() / before.sqrt(), right * values.sqrt() / after.sqrt()[:, None]  # (V, rank)

    longest = math.sqrt(width - 1)
    scale = longest / rows.norm(dim=1).quantile(USUAL)
    rows, columns = rows * scale, columns / scale
    rows = rows * (longest / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    filling = (longest**2 - rows.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    logs = shares.log() - shares.log().mean()
    unused = (0, width - 2 - rank)
    embedding = torch.cat([filling, torch.ones_like(filling), F.pad(rows, unused)], dim=1)
    output = torch.cat([torch.zeros_like(filling), logs[:, None], F.pad(columns, unused)], dim=1)
    rotation = torch.linalg.qr(torch.randn(width, width, device=counts.device)).Q
    return embedding @ rotation, output @ rotation
