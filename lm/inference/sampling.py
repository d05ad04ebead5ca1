"""How a model's next token is chosen, and where a text ends."""

import math
from dataclasses import dataclass, field

from lm.data.tokenizer import Begin
from lm.errors import require, require_at_least
from lm.system.units import Count


@dataclass(frozen=True)
class Sampling:
    """How a prompt is continued: how a token is chosen from the logits, and where a text ends.

    The filters are applied in the order of transformers: temperature, `top_k`, `top_p`.

    Args:
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Sample from this many of the most likely tokens; `null`: from all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities add up to this.
        max_new_tokens: Most new tokens per prompt.
        stop: Strings that end a text, which stops before them. They are literal: a shell writes a newline as $'\\n'.
        seed: Random seed; a new one if not given.
        ignore_eos: Continue after the token that ends a document; its name then is part of the text.
        begin: What precedes a prompt: `eos` if the prompt begins a document, or `nothing`.
    """

    temperature: float = 1.0
    top_k: Count | None = None
    top_p: float | None = None  # Holtzman et al., 2019, arXiv:1904.09751
    max_new_tokens: Count = Count(128)
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    ignore_eos: bool = False
    begin: Begin = "nothing"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        require_at_least(1, "", max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        require(0 <= self.temperature < math.inf, f"temperature {self.temperature} must not be below 0")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p {self.top_p} must lie in (0, 1]")
        require("" not in self.stop, "a stop string is empty: every text would end before it begins")
