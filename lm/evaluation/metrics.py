"""Metrics of validations: loss, perplexity and bits per byte."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lm.kernels.torch_private import KeepsPrecision
from lm.model.decoder import IGNORED


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats, infinite if it exceeds a float."""
    return math.inf if loss >= 700 else math.exp(loss)


class TokenLoss(KeepsPrecision, Metric):
    """Sums of token losses, independent of how the tokens are divided into batches and ranks.

    Bits per byte are comparable between models with different tokenizers: the nats of tokens that stand for text, over
    the bytes of this text, over ln 2. Tokens without bytes (end of document) are excluded from both sums.

    The sums move to the device of the surrounding module but keep fp64.
    """

    full_state_update = False
    higher_is_better = False
    SUMS = ("nats", "tokens", "text_nats", "text_bytes")

    def __init__(self, sources: int | None = None, **kwargs: Any) -> None:
        """With `sources`, keep separate sums for that many sources: `compute` then returns vectors `(sources,)`."""
        super().__init__(**kwargs)
        for name in self.SUMS:
            zeros = torch.zeros(() if sources is None else sources, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, token_losses: Tensor, labels: Tensor, token_bytes: Tensor, sources: Tensor | None = None) -> None:
        """Add a batch; without a device synchronization.

        Args:
            token_losses: `(B, T)` fp32, nats.
            labels: `(B, T)`, -100 where a token does not count.
            token_bytes: `(V,)` fp64, bytes of text per token, 0 for special tokens; `(sources, V)` if sources are kept
                separate.
            sources: `(B,)`, the source of each row, if sources are kept separate.
        """

        def add(sums: Tensor, values: Tensor) -> Tensor:
            return sums + values.sum() if sources is None else sums.index_add(0, sources, values.sum(1))

        counted = labels != IGNORED  # (B, T)
        losses = torch.where(counted, token_losses, 0.0).double()  # (B, T)
        self.nats = add(self.nats, losses)
        self.tokens = add(self.tokens, counted.double())
        ids = labels.clamp(min=0)
        sizes = (token_bytes[ids] if sources is None else token_bytes[sources[:, None], ids]) * counted  # (B, T)
        self.text_nats = add(self.text_nats, losses * (sizes > 0))
        self.text_bytes = add(self.text_bytes, sizes)

    def compute(self) -> dict[str, Tensor]:
        """The means so far over all ranks, in fp64, and the number of counted tokens; NaN without any."""
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "bits_per_byte": self.text_nats / self.text_bytes / math.log(2),
            "tokens": self.tokens,
        }


def loss_metrics(
    result: Mapping[str, Tensor], prefix: str, sources: Sequence[str] = (), shares: Tensor | None = None
) -> dict[str, Tensor]:
    """The results of `TokenLoss.compute` by metric name: `val/loss`, `val/bpb` and `val/perplexity`.

    For a mixture they are means over the sources, weighted by their `shares` of the training `(sources,)`, and the
    metrics of each source are added, such as `val/loss/books`.
    """
    metrics = {f"{prefix}/{short}": result[name] for name, short in {"loss": "loss", "bits_per_byte": "bpb"}.items()}
    if shares is not None:
        # (sources,) each, even if torchmetrics has reduced a single one to a scalar
        of_sources = {name: values.view(-1) for name, values in metrics.items()}
        measured = result["tokens"].view(-1) > 0
        shares = torch.where(measured, shares, 0)
        shares = shares if shares.any() else measured.double()  # no source trained on now has a validation
        metrics = {name: (values.nan_to_num() * shares).sum() / shares.sum() for name, values in of_sources.items()}
        for name, values in of_sources.items():
            metrics |= {f"{name}/{source}": value for source, value in zip(sources, values) if not value.isnan()}
    return metrics | {f"{prefix}/perplexity": metrics[f"{prefix}/loss"].exp()}
