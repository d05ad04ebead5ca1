"""The logits of each row's next token: a decoder with the keys and values of the tokens so far.

`prefill` takes prompts, `advance` one more token of each row. `KVCache` is the plain way; `StaticKVCache` keeps the
shapes of its steps, for compiled blocks, and `GraphedKVCache` replays these steps as a CUDA graph. `NoCache` computes
whole rows anew, for models that have no cache.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lm.errors import RequestError
from lm.model.attention import AttentionMask, Past
from lm.model.decoder import Continuation, Decoder, Rotary, config_of, rotary_table

Step = Literal["dynamic", "static", "cuda_graph"]
MIN_SLOTS = 256  # of a static step
WARMUP = 2  # steps before a graph is captured, so that all kernels are loaded


class KVCache:
    """A decoder in evaluation mode, and the keys and values of every layer, for rows of unequal length.

    A token's slot is its position, so masks depend only on positions. Shorter rows are padded at the end: padding
    takes slots that the row's own tokens do not attend to, and the next tokens overwrite them.

    Args:
        slots: for the longest row, with its padding.
    """

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        config, weight = decoder.config, next(decoder.parameters())
        device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        self.decoder = decoder
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device, config.rope_scaling)
        shape = (config.num_hidden_layers, 2, rows, slots, int(config.num_key_value_heads), int(config.head_dim))
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # of each layer the keys, then the values
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row
        self.ones = torch.ones_like(self.lengths)
        self.used = 0  # slots in use, padding included; the same number for all rows

    @torch.no_grad()
    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Logits `(B, V)` in fp32 after more tokens `(B, T)`, of which `counts` `(B,)`, 1 or more, are not padding.

        Every call has a new shape, so compiled blocks run uncompiled.
        """
        self.used += ids.shape[1]
        with torch.compiler.set_stance("force_eager"):
            return self.compute(ids, counts, self.used)

    def advance(self, tokens: Tensor) -> Tensor:
        """Logits `(B, V)` in fp32 after one more token of each row `(B, 1)`."""
        return self.prefill(tokens, self.ones)

    def compute(self, ids: Tensor, counts: Tensor, slots: int) -> Tensor:
        """`prefill`, where the first S = `slots` are attended to: at least those in use, with the new ones.

        The shapes do not depend on the number of tokens so far, so this can be compiled or captured as a graph.
        """
        length, device = ids.shape[1], ids.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        distance = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), of each slot from each token
        dense: dict[int | None, Tensor] = {None: (distance >= 0)[:, None]}  # (B, 1, T, S)
        windows = self.decoder.windows
        for window in filter(None, set(windows)):
            dense[window] = dense[None] & (distance < window)[:, None]
        masks = [
            AttentionMask(window, None, dense[window], Past(keys, values, positions))
            for window, (keys, values) in zip(windows, self.layers, strict=True)
        ]
        continuation = Continuation(Rotary(*self.table, positions.int()), masks, counts - 1)
        return self.decoder(ids, continuation=continuation).float()


class StaticKVCache(KVCache):
    """Attends to a fixed number of slots, doubled when they are full, so that compiled blocks are compiled once."""

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        super().__init__(decoder, rows, static_slots(slots))

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        self.used += 1
        return self.compute(tokens, self.ones, static_slots(self.used))


def static_slots(tokens: int) -> int:
    """Number of slots for this many tokens: a power of two."""
    return max(MIN_SLOTS, 1 << (tokens - 1).bit_length())


class GraphedKVCache:
    """Replays the steps of a `StaticKVCache` as a CUDA graph, captured anew when the slots are doubled."""

    def __init__(self, cache: StaticKVCache) -> None:
        self.cache, self.prefill = cache, cache.prefill
        self.slots = 0  # of the newest step
        self.steps = 0  # with this many slots
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def advance(self, tokens: Tensor) -> Tensor:
        """As `KVCache.advance`; the next step may overwrite the logits."""
        cache = self.cache
        cache.used += 1
        slots = static_slots(cache.used)
        if slots != self.slots:
            self.slots, self.steps, self.graph = slots, 0, None
        self.steps += 1
        if self.steps <= WARMUP:
            return cache.compute(tokens, cache.ones, slots)
        if self.graph is None:
            self.graph, self.tokens = torch.cuda.CUDAGraph(), tokens.clone()
            device = tokens.device  # torch's own stream for captures is on the device of the first one
            with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
                self.logits = cache.compute(self.tokens, cache.ones, slots)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits


class NoCache:
    """Like `KVCache`, for a custom model: every step computes whole rows."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, config_of(model)
        self.rows: list[Tensor] = []  # (t,) ids each, without padding

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        self.rows = [row[:count] for row, count in zip(ids, counts.tolist())]
        return self._logits()

    def advance(self, tokens: Tensor) -> Tensor:
        longest = self.config.max_position_embeddings  # rows that have ended continue to grow
        self.rows = [torch.cat((row, token))[-longest:] for row, token in zip(self.rows, tokens)]
        return self._logits()

    @torch.no_grad()
    def _logits(self) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(self.rows, batch_first=True)  # (B, T)
        last = torch.tensor([len(row) - 1 for row in self.rows], device=ids.device)
        with torch.compiler.set_stance("force_eager"):
            logits = self.model(ids)[torch.arange(len(ids), device=ids.device), last]  # (B, V), V may be padded
        return logits[:, : self.config.vocab_size].float()


def make_cache(model: nn.Module, rows: int, slots: int, step: Step) -> KVCache | GraphedKVCache | NoCache:
    """The cache for a model and a kind of step."""
    if not isinstance(model, Decoder):
        return NoCache(model)
    if step == "dynamic":
        return KVCache(model, rows, slots)
    static = StaticKVCache(model, rows, slots)
    return static if step == "static" else GraphedKVCache(static)


def check_step(step: Step, device: torch.device) -> None:
    """Raise RequestError if a CUDA graph is requested but not possible."""
    kind = device.type
    if step == "cuda_graph" and (kind != "cuda" or torch.is_autocast_enabled(kind)):
        where = "inside torch.autocast" if kind == "cuda" else f"on {kind}"
        raise RequestError(f"a step of generation cannot be a CUDA graph {where}")
