"""A step of generation: the decoder reads the newest token of each row over a cache and says what may follow.

By default it looks at the slots that are in use, and so has another shape every time. Compiled blocks and CUDA graphs
need one shape: a fixed number of slots in sight, doubled when they are full.

On a CPU, blocks compiled by inductor write a token of a model of 1.3 million parameters in about a third of the time,
which makes up for the compiling only after some ten thousand tokens; with 124 million parameters they are no faster
(`lm generate --json --compile inductor` beside `--compile none`).
"""

from typing import Literal

import torch
from torch import Tensor

from lm.errors import RequestError
from lm.model.cache import Cache
from lm.model.decoder import Decoder

Step = Literal["growing", "fixed", "recorded"]
SMALLEST = 256  # slots in sight at least, where their number is fixed
WARMUP = 2  # steps that run as usual before one is recorded, so that every kernel is loaded


def slots_for(tokens: int, step: Step) -> int:
    """How many slots a step needs in sight for so many tokens: just as many, or a power of two."""
    return tokens if step == "growing" else max(SMALLEST, 1 << (tokens - 1).bit_length())


def check_step(step: Step, device: torch.device) -> None:
    """Raise RequestError where a step is to be a CUDA graph and cannot be one."""
    kind = device.type
    if step == "recorded" and (kind != "cuda" or torch.is_autocast_enabled(kind)):
        where = "inside torch.autocast" if kind == "cuda" else f"on {kind}"
        raise RequestError(f"a step of generation cannot be a CUDA graph {where}")


class DecodeStep:
    """Reads prompts, and then token after token.

    Args:
        decoder: in evaluation mode.
        cache: with room for all that will be read; `slots_for` says how much that is.
        step: `growing`: in the shape of what was read so far; `fixed`: in a shape that stays, which a decoder's
            compiled blocks keep; `recorded`: the same, as a CUDA graph (see `check_step`).
    """

    def __init__(self, decoder: Decoder, cache: Cache, step: Step) -> None:
        self.decoder, self.cache, self.step = decoder, cache, step
        self.ones = torch.ones_like(cache.lengths)  # (B,)
        self.slots = 0  # in sight, where their number is fixed
        self.calls = 0  # since then
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Logits `(B, V)` after pieces `(B, T)`, of which `counts` `(B,)` are a row's own, in fp32."""
        # Every piece has another shape; blocks that are compiled run as they are written here.
        with torch.compiler.set_stance("force_eager"):
            return self.decoder(ids, continuation=self.cache.extend(ids.shape[1], counts)).float()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `(B, V)` after one more token a row `(B, 1)`, in fp32; a recorded step overwrites them at the next."""
        if self.step == "growing":
            return self.read(tokens, self.ones)
        self.cache.used += 1
        slots = slots_for(self.cache.used, self.step)
        if slots != self.slots:
            self.slots, self.calls, self.graph = slots, 0, None
        self.calls += 1
        if self.step == "fixed" or self.calls <= WARMUP:
            return self._fixed(tokens)
        if self.graph is None:
            self._record(tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits

    def _fixed(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, continuation=self.cache.place(1, self.ones, self.slots)).float()

    def _record(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        self.graph = torch.cuda.CUDAGraph()
        device = tokens.device  # a stream of its own: torch's for recording is of the device that recorded first
        with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
            self.logits = self._fixed(self.tokens)
