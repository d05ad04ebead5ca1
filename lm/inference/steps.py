"""The ways in which generation computes a step, all with the `prefill` and `advance` of `kv_cache.CachedDecoder`.

`GraphedDecoder` replays its steps as a CUDA graph. `UncachedModel` computes all tokens of the rows at every step, for
models that have no cache.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lm.inference.kv_cache import CachedDecoder
from lm.model.build import config_of
from lm.model.decoder import Decoder

Step = Literal["dynamic", "cuda_graph"]
MIN_SLOTS = 256  # of a step that is replayed
WARMUP = 2  # steps before a graph is captured, so that all kernels are loaded


class UncachedModel:
    """A custom model, which computes whole rows at every step."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.model, self.config = model, config_of(model)
        device = next(model.parameters()).device
        self.rows = [torch.zeros(0, dtype=torch.long, device=device)] * rows  # (t,) ids each, without padding
        self.ones = torch.ones(rows, dtype=torch.long, device=device)

    @torch.no_grad()
    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        longest = self.config.max_position_embeddings  # rows that have ended continue to grow
        new = [row[:count] for row, count in zip(ids, counts.tolist(), strict=True)]
        self.rows = [torch.cat(parts)[-longest:] for parts in zip(self.rows, new, strict=True)]
        padded = nn.utils.rnn.pad_sequence(self.rows, batch_first=True)  # (B, T)
        last = torch.tensor([len(row) - 1 for row in self.rows], device=ids.device)
        with torch.compiler.set_stance("force_eager"):
            logits = self.model(padded)[torch.arange(len(padded), device=ids.device), last]  # (B, V), V may be padded
        return logits[:, : self.config.vocab_size].float()

    def advance(self, tokens: Tensor) -> Tensor:
        return self.prefill(tokens, self.ones)


class GraphedDecoder(CachedDecoder):
    """Replays its steps as a CUDA graph.

    The shapes in a graph are fixed: a step attends to a fixed number of slots, and is captured anew when these are
    full and their number is doubled.
    """

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        super().__init__(decoder, rows, fixed_slots(slots))
        self.slots = 0  # of the newest step
        self.steps = 0  # with this many slots
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        """As `CachedDecoder.advance`; the next step may overwrite the logits."""
        self.used += 1
        slots = fixed_slots(self.used)
        if slots != self.slots:
            self.slots, self.steps, self.graph = slots, 0, None
        self.steps += 1
        if self.steps <= WARMUP:
            return self.compute(tokens, self.ones, slots)
        if self.graph is None:
            self.graph, self.tokens = torch.cuda.CUDAGraph(), tokens.clone()
            device = tokens.device  # torch's own stream for captures is on the device of the first one
            with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
                self.logits = self.compute(self.tokens, self.ones, slots)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits


def fixed_slots(tokens: int) -> int:
    """Number of slots for this many tokens: a power of two."""
    return max(MIN_SLOTS, 1 << (tokens - 1).bit_length())


def make_stepper(model: nn.Module, rows: int, slots: int, step: Step) -> CachedDecoder | UncachedModel:
    """What computes steps of this kind for a model; rows have at most `slots` tokens, with their padding."""
    if not isinstance(model, Decoder):
        return UncachedModel(model, rows)
    kind = GraphedDecoder if step == "cuda_graph" else CachedDecoder
    return kind(model, rows, slots)
