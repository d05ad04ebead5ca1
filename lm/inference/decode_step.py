"""One step of generation: the logits of each row's next token.

`inference/generation` chooses tokens by them. `DecodeStep` runs a decoder over a `Cache` of the keys and values that
were computed before; `UncachedStep` runs any other model.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from lm.errors import RequestError
from lm.model.attention import AttentionMask, Past
from lm.model.config import DecoderConfig
from lm.model.custom import config_of
from lm.model.decoder import Continuation, Decoder, Rotary, rotary_table

Step = Literal["dynamic", "static", "cuda_graph"]
SMALLEST = 256  # slots of a static step, at least
WARMUP = 2  # steps before one is captured, so that every kernel is loaded


class Cache:
    """Keys and values of every layer, for rows of unequal length.

    A token's slot is its position, so a mask follows from positions alone. Shorter rows are padded at the end: padding
    takes slots that the row's own tokens do not attend to, and the next tokens overwrite them. There are `slots` for
    the most tokens of a row, with its padding.
    """

    def __init__(self, config: DecoderConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.windows = config.windows
        self.table = rotary_table(slots, config.head_dim, config.rope_theta, device)
        shape = (len(self.windows), 2, rows, slots, config.num_key_value_heads, config.head_dim)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)  # keys, then values
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,), tokens of each row

    def extend(self, length: int, counts: Tensor, slots: int) -> Continuation:
        """Reserve slots for the next T tokens, of which `counts` `(B,)`, at least one, are a row's own.

        S `slots` are attended to: at least those in use, the new ones included. The decoder must then be called once
        with the result. The shapes do not depend on the number of tokens so far, so the step can be compiled or
        captured as a graph.
        """
        device = self.lengths.device
        positions = self.lengths[:, None] + torch.arange(length, device=device)  # (B, T)
        self.lengths += counts
        distance = positions[:, :, None] - torch.arange(slots, device=device)  # (B, T, S), from a slot to a token
        dense = {None: (distance >= 0)[:, None]}  # (B, 1, T, S)
        for window in set(self.windows) - {None}:
            dense[window] = dense[None] & (distance < window)[:, None]
        masks = [
            AttentionMask(window, None, dense[window], Past(keys, values, positions))
            for window, (keys, values) in zip(self.windows, self.layers, strict=True)
        ]
        return Continuation(Rotary(*self.table, positions.int()), masks, counts - 1)


def slots_for(tokens: int, step: Step) -> int:
    """How many slots a step attends to for this many tokens: the same number, or a power of two."""
    return tokens if step == "dynamic" else max(SMALLEST, 1 << (tokens - 1).bit_length())


def check_step(step: Step, device: torch.device) -> None:
    """Raise RequestError where a step is to be a CUDA graph and cannot be one."""
    kind = device.type
    if step == "cuda_graph" and (kind != "cuda" or torch.is_autocast_enabled(kind)):
        where = "inside torch.autocast" if kind == "cuda" else f"on {kind}"
        raise RequestError(f"a step of generation cannot be a CUDA graph {where}")


class DecodeStep:
    """Runs a decoder, in evaluation mode, on prompts, and then on one new token of each row at a time.

    Args:
        tokens: the most of a row, with its padding.
        step: `dynamic`: a step attends to the slots in use, so its shape changes at every step; `static`: to a fixed
            number of slots, doubled when they are full, so that compiled blocks are compiled once; `cuda_graph`: the
            same, captured (see `check_step`).
    """

    def __init__(self, decoder: Decoder, rows: int, tokens: int, step: Step) -> None:
        weight = next(decoder.parameters())
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        self.decoder, self.step = decoder, step
        self.cache = Cache(decoder.config, rows, slots_for(tokens, step), weight.device, dtype)
        self.ones = torch.ones_like(self.cache.lengths)  # (B,)
        self.used = 0  # slots that may hold something, the same for all rows
        self.slots = 0  # of the newest static step
        self.calls = 0  # static steps with this many slots
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Logits `(B, V)` in fp32 after more tokens `(B, T)`, of which `counts` `(B,)` are a row's own.

        Every call has another shape, so compiled blocks run uncompiled.
        """
        self.used += ids.shape[1]
        with torch.compiler.set_stance("force_eager"):
            return self.decoder(ids, continuation=self.cache.extend(ids.shape[1], counts, self.used)).float()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `(B, V)` after one more token of each row `(B, 1)`, in fp32; the next step may overwrite them."""
        if self.step == "dynamic":
            return self.read(tokens, self.ones)
        self.used += 1
        slots = slots_for(self.used, self.step)
        if slots != self.slots:
            self.slots, self.calls, self.graph = slots, 0, None
        self.calls += 1
        if self.step == "static" or self.calls <= WARMUP:
            return self._static(tokens)
        if self.graph is None:
            self._capture(tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits

    def _static(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, continuation=self.cache.extend(1, self.ones, self.slots)).float()

    def _capture(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        self.graph = torch.cuda.CUDAGraph()
        device = tokens.device  # its own stream: torch's stream for capturing is on the device that captured first
        with torch.cuda.device(device), torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
            self.logits = self._static(self.tokens)


class UncachedStep:
    """As `DecodeStep`, for a custom model, which has no cache: every step reads the whole rows."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.rows: list[Tensor] = []  # of (t,) ids each, without padding

    @torch.no_grad()
    def read(self, ids: Tensor, counts: Tensor) -> Tensor:
        self.rows = [row[:count] for row, count in zip(ids, counts.tolist())]
        return self._logits()

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        longest = config_of(self.decoder).max_position_embeddings  # a row that has ended is still there
        self.rows = [torch.cat((row, token))[-longest:] for row, token in zip(self.rows, tokens)]
        return self._logits()

    def _logits(self) -> Tensor:
        ids = nn.utils.rnn.pad_sequence(self.rows, batch_first=True)  # (B, T)
        last = torch.tensor([len(row) - 1 for row in self.rows], device=ids.device)
        with torch.compiler.set_stance("force_eager"):
            return self.decoder(ids)[torch.arange(len(ids), device=ids.device), last].float()
