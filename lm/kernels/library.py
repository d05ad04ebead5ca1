"""How an op becomes known to torch: a schema, code for the CPU and for CUDA, and shapes for tracing.

Each op has its own file: a reference in plain PyTorch, the CUDA entry, what a trace needs, the backward pass, and the
function to call.
"""

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("lm", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(schema: str, *, reference: Callable, cuda: Callable, fake: Callable) -> Callable:
    """Register an op that changes none of its inputs and returns new tensors only.

    Args:
        schema: its name and types, as torch writes them.
        reference: what it computes, in plain PyTorch; runs on a CPU.
        cuda: the same through our kernels; gets CUDA tensors.
        fake: empty tensors of the result's shapes, dtypes and strides.

    Returns:
        The op, to be called.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=TAGS)
    LIBRARY.impl(name, reference, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"lm::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lm, name).default
