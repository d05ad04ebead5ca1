"""A micro-batch's forward and backward pass as one CUDA graph, so that the host starts one thing and not thousands.

The optimizer stays outside, and so do accumulation, clipping and the schedule: `module` replays the graph where it
would have run the decoder, and Lightning goes on as ever.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WARMUP = 3  # micro-batches that run as usual first, so that every kernel is loaded and every buffer has its size


class MicroStep:
    """Runs `step(tokens)` as usual at first, then by replaying its recording.

    Gradients gather in buffers that stay where they are from the first call on: `zero_grad` clears them, nothing
    else may drop them.

    Args:
        parameters: what gets gradients.
        step: runs forward and backward pass of a micro-batch of tokens, always of one shape, and returns tensors
            that are not differentiable. It must not wait for the device.
        capture: whether there is a device that can record; otherwise every call runs as usual.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], step: Callable[[Tensor], tuple[Tensor, ...]], capture: bool
    ) -> None:
        self.gradients = []
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            self.gradients.append(parameter.grad)
        self.step = step
        self.capture = capture
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What `step` returns for these tokens; the gradients are added to the buffers."""
        self.calls += 1
        if not self.capture or self.calls <= WARMUP:
            return self.step(tokens)
        if self.graph is None:
            self._record(tokens)
        self.tokens.copy_(tokens, non_blocking=True)
        self.graph.replay()
        return tuple(result.clone() for result in self.results)

    def zero_grad(self) -> None:
        """Forget the gradients, and keep their buffers."""
        torch._foreach_zero_(self.gradients)

    def _record(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, which pin memory for the next batches, may do what they like meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = self.step(self.tokens)
