"""Statistics of validations and benchmarks: loss, perplexity, bits per byte, standard errors and 95 % intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lm.kernels.torch_private import KeepsPrecision
from lm.model.decoder import IGNORED

# ---- statistics ------------------------------------------------------------------------------------------------------

Z = 1.959963984540054  # a normal variable is within Z standard deviations of its mean in 95 % of cases


class Interval(NamedTuple):
    """The 95 % confidence interval of a number."""

    low: float
    high: float


def wilson(right: int, total: int) -> Interval:
    """Interval of a proportion (Wilson, 1927, "Probable inference, the law of succession, and statistical inference").

    It stays inside [0, 1] and has a width even if all or none are right, unlike share +- Z x standard error.
    """
    share, spread = right / total, Z**2 / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    # Rounding would give not exactly 0 or 1.
    return Interval(middle - half if right else 0.0, middle + half if right < total else 1.0)


def standard_error(right: int, total: int) -> float:
    """Standard error of a proportion: sample standard deviation / sqrt(`total`); infinite for a single item."""
    share = right / total
    return math.sqrt(share * (1 - share) / (total - 1)) if total > 1 else math.inf


def centered(share: float, baseline: float) -> float:
    """Rescale an accuracy so that guessing (`baseline`) gives 0, and all right gives 1.

    Li et al., 2024, "DataComp-LM" (arXiv:2406.11794), section 3.5.
    """
    return (share - baseline) / (1 - baseline)


def mean_interval(values: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """The interval of the mean of independent estimates, computed from their intervals.

    On each side, squared distances are added (Zou and Donner, 2008, "Construction of confidence limits about effect
    measures: a general approach"), so the result is asymmetric if they are.
    """
    count, mean = len(values), sum(values) / len(values)
    below = math.sqrt(sum((value - interval.low) ** 2 for value, interval in zip(values, intervals, strict=True)))
    above = math.sqrt(sum((interval.high - value) ** 2 for value, interval in zip(values, intervals, strict=True)))
    return Interval(mean - below / count, mean + above / count)


def ratio_error(above: np.ndarray, below: np.ndarray) -> float:
    """The standard error of `above.sum() / below.sum()`, `(n,)` each, with pairs sampled together, such as documents.

    The linear approximation of a ratio (Cochran, 1977, "Sampling techniques", section 6.4); NaN for fewer than two.
    """
    count = len(above)
    if count < 2:
        return math.nan
    left = above - above.sum() / below.sum() * below  # (n,) residuals from the ratio
    return float(math.sqrt(count / (count - 1) * np.square(left).sum()) / below.sum())


# ---- metrics ---------------------------------------------------------------------------------------------------------


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

    def update(
        self, token_losses: Tensor, labels: Tensor, token_bytes: Tensor | None = None, sources: Tensor | None = None
    ) -> None:
        """Add a batch; without a device synchronization.

        Args:
            token_losses: `(B, T)` fp32, nats.
            labels: `(B, T)`, -100 where a token does not count.
            token_bytes: `(V,)` fp64, bytes of text per token, 0 for special tokens; `(sources, V)`
                if sources are kept separate. Without it there are no bits per byte.
            sources: `(B,)`, the source of each row, if sources are kept separate.
        """

        def add(sums: Tensor, values: Tensor) -> Tensor:
            """Add the values `(B, T)` to the sums."""
            return sums + values.sum() if sources is None else sums.index_add(0, sources, values.sum(1))

        counted = labels != IGNORED  # (B, T)
        losses = torch.where(counted, token_losses, 0.0).double()  # (B, T)
        self.nats = add(self.nats, losses)
        self.tokens = add(self.tokens, counted.double())
        if token_bytes is not None:
            ids, token_bytes = labels.clamp(min=0), token_bytes.to(labels.device, non_blocking=True)
            sizes = (token_bytes[ids] if sources is None else token_bytes[sources[:, None], ids]) * counted  # (B, T)
            self.text_nats = add(self.text_nats, losses * (sizes > 0))
            self.text_bytes = add(self.text_bytes, sizes)

    def compute(self) -> dict[str, Tensor]:
        """The means so far over all ranks, in fp64, and the number of counted tokens; NaN without any."""
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "perplexity": loss.exp(),
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
        each, measured = {name: values.view(-1) for name, values in metrics.items()}, result["tokens"].view(-1) > 0
        shares = torch.where(measured, shares, 0)
        shares = shares if shares.any() else measured.double()  # no source trained on now has a validation
        metrics = {name: (values.nan_to_num() * shares).sum() / shares.sum() for name, values in each.items()}
        metrics |= {
            f"{name}/{source}": value
            for name, values in each.items() for source, value in zip(sources, values) if not value.isnan()
        }  # fmt: skip
    return metrics | {f"{prefix}/perplexity": metrics[f"{prefix}/loss"].exp()}
