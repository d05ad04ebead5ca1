"""A tree of plain values as JSON and back: what a checkpoint holds beside its big tensors, without pickling."""

import base64
import math
from typing import Any

import torch
from torch import Tensor


def encode(value: Any) -> Any:
    """A tree of dicts, lists, tuples, numbers, strings and small tensors as what JSON can hold.

    Raises:
        TypeError: something else is in it.
    """
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        dtype = str(data.dtype).removeprefix("torch.")
        return {"__tensor__": [dtype, list(data.shape), base64.b64encode(raw).decode()]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"__items__": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        dtype, shape, raw = value["__tensor__"]
        flat = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=torch.uint8) if raw else torch.empty(0)
        return flat.view(getattr(torch, dtype)).reshape(shape) if raw else flat.to(getattr(torch, dtype)).reshape(shape)
    if "__items__" in value:
        return {decode(key): decode(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(decode(item) for item in value["__tuple__"])
    if "__float__" in value:
        return float(value["__float__"])
    return {key: decode(item) for key, item in value.items()}
