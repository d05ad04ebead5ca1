"""What a validation says: loss, perplexity and bits per byte, summed exactly over batches and ranks."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lm.model.decoder import IGNORED


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats, infinite where a float cannot hold it."""
    return math.inf if loss >= 700 else math.exp(loss)


class TokenLoss(Metric):
    """Sums of token losses that do not depend on how the tokens were divided into batches and ranks.

    Bits per byte makes models with different tokenizers comparable: the nats of tokens that stand for text, over the
    bytes of that text, over ln 2. Tokens that stand for no bytes (end of document) are left out above and below.
    """

    full_state_update = False
    higher_is_better = False
    SUMS = ("nats", "tokens", "text_nats", "text_bytes")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.SUMS:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Metric:
        # The sums follow the module's device but not its precision: `module.to(torch.bfloat16)` would ruin them.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), *args, **kwargs)

    def update(self, token_losses: Tensor, labels: Tensor, token_bytes: Tensor | None = None) -> None:
        """Add a batch; nothing here waits for the device.

        Args:
            token_losses: `(B, T)` fp32, nats.
            labels: `(B, T)`, -100 where a token does not count.
            token_bytes: `(V,)` whole numbers, the bytes of text each token stands for, 0 for special tokens; without
                it there are no bits per byte.
        """
        counted = labels != IGNORED  # (B, T)
        losses = torch.where(counted, token_losses, 0.0).double()  # (B, T)
        self.nats = self.nats + losses.sum()
        self.tokens = self.tokens + counted.sum()
        if token_bytes is not None:
            sizes = token_bytes.to(labels.device, non_blocking=True)[labels.clamp(min=0)] * counted  # (B, T)
            self.text_nats = self.text_nats + (losses * (sizes > 0)).sum()
            self.text_bytes = self.text_bytes + sizes.sum()

    def compute(self) -> dict[str, Tensor]:
        """The means so far, over all ranks.

        Returns:
            `loss` (nats a token), `perplexity` (its exponential), `bits_per_byte` and `tokens` (how many counted), as
            fp64 scalars; what nothing was counted for is NaN.
        """
        loss = self.nats / self.tokens
        return {
            "loss": loss,
            "perplexity": loss.exp(),
            "bits_per_byte": self.text_nats / self.text_bytes / math.log(2),
            "tokens": self.tokens,
        }
