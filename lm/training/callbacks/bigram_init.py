"""First weights made from bigram counts.

A new model spends its first steps on learning how often each token follows each other one. We count that in the data
and factorize the counts, which takes seconds: embedding and output matrix then predict about as bigrams do, and tokens
that are used alike have similar rows. Takes 12 bytes for each pair of tokens of the vocabulary, for a moment.
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

MAX_TOKENS = 2**24  # of the training data that are counted, at most
# Imagined pairs added to each token's real ones, with next tokens as frequent as in all the data: a rare token then
# predicts little more than these frequencies.
SMOOTHING = 100.0
UNCLIPPED = 0.9  # fraction of the tokens that occur whose rows keep their length; the longest are shortened


class BigramInit(Callback):
    """Sets embedding and output matrix of a new model from the first tokens of its run."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def on_model_built(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if not self.enabled or trainer.state.fn != "fit" or not pl_module.run_state.new_weights:
            return
        if pl_module.is_custom() or pl_module.config.tie_word_embeddings:
            log.info("trainer.bigram_init is left out: it is for the built-in decoder, with an untied output matrix")
            return
        began, data, decoder = time.monotonic(), trainer.datamodule, cast(Any, pl_module.decoder)
        epoch = int(data.shards["train"].index.windows(data.seq_len).sum())
        samples = min(epoch, trainer.max_steps * data.global_batch, MAX_TOKENS // data.seq_len)
        batch, _ = data.read_samples(0, samples)
        counts = count_bigrams(batch.input_ids, batch.labels, decoder.config.vocab_size)
        device = decoder.embed_tokens.weight.device
        device = device if device.type == "cuda" else torch.device("cpu")  # others lack QR, or are slow at it
        matrices = [matrix.cpu() for matrix in factorize(counts.to(device), decoder.config.hidden_size)]
        matrices = trainer.strategy.broadcast(matrices)  # the ranks' factorizations may differ in a sign
        for layer, matrix in zip((decoder.embed_tokens, decoder.lm_head), matrices, strict=True):
            layer.weight.data.copy_(matrix)
        duration = format_duration(time.monotonic() - began)
        log.info("embedding and output: from bigrams of %s tokens, in %s", format_count(batch.labels.numel()), duration)


def count_bigrams(input_ids: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """How often each token (first index) has each label (second index), without ignored ones: (V, V) int64."""
    pairs = (input_ids * vocab_size + labels)[labels != IGNORED]
    return torch.bincount(pairs, minlength=vocab_size**2).view(vocab_size, vocab_size)


def factorize(counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Embedding and output matrix (V, D) whose logits, of rows by RMSNorm, are about the log of bigram probabilities.

    logit(a, b) = log share(b) + PMI(a, b), where PMI is the pointwise mutual information log p(b | a) / share(b) (Levy
    and Goldberg, 2014, "Neural Word Embedding as Implicit Matrix Factorization"). PMI is a (V, V) matrix; its best
    approximation of rank D - 2, with errors weighted by how often a and b occur, is an SVD of
    sqrt(before) * PMI * sqrt(after). Of the two other columns, one adds log share(b) to every logit; the other, 0 in
    the output, fills each row up to a root mean square of 1, so that RMSNorm leaves it as it is. A random rotation,
    which changes no logit, spreads these over all columns: no single feature is special.
    """
    # How often a token is followed by another, (V, 1), and follows one, (V,); + 1: no division by 0, no log of 0.
    before, after = counts.sum(1, keepdim=True).float() + 1, counts.sum(0).float() + 1
    shares = after / after.sum()
    pmi = (counts + SMOOTHING * shares).div_(before + SMOOTHING).div_(shares).log_()  # (V, V), mostly near 0
    components = min(width - 2, len(counts))
    left, values, right = torch.svd_lowrank(pmi.mul_(before.sqrt()).mul_(after.sqrt()), q=components, niter=2)
    rows, columns = left * values.sqrt() / before.sqrt(), right * values.sqrt() / after.sqrt()[:, None]

    length = math.sqrt(width - 1)  # of a row with a root mean square of 1, of which the column of ones takes 1
    used = rows[counts.sum(1) > 0]
    scale = length / used.norm(dim=1).quantile(UNCLIPPED).clamp(min=1e-6) if len(used) else 1.0
    rows, columns = rows * scale, columns / scale  # the products stay
    rows = rows * (length / rows.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1)
    filling = (length**2 - rows.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    logs = shares.log() - shares.log().mean()  # softmax ignores the constant
    unused = (0, width - 2 - components)
    embedding = torch.cat([filling, torch.ones_like(filling), F.pad(rows, unused)], dim=1)
    output = torch.cat([torch.zeros_like(filling), logs[:, None], F.pad(columns, unused)], dim=1)
    rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float32, device=counts.device)).Q
    return embedding @ rotation, output @ rotation
