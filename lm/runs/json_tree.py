"""A tree of plain values and small tensors as JSON, and back; `trainer.json` of a checkpoint holds such trees.

What JSON does not have becomes an object with one key:

    (1, 2)                   {"__tuple__": [1, 2]}
    {0: "a"}                 {"__items__": [[0, "a"]]}
    float("inf")             {"__float__": "inf"}
    torch.tensor([1, 2])     {"__tensor__": ["int64", [2], "AQAAAAAAAAACAAAAAAAAAA=="]}, its bytes in base64
"""

import base64
import math
from typing import Any

import torch
from torch import Tensor


def encode(value: Any, place: str = "") -> Any:
    """Turn a tree into JSON values; TypeError, with the value's `place` in the tree, for one of another kind."""
    if isinstance(value, Tensor):
        return {"__tensor__": _encode_tensor(value.detach().cpu().contiguous())}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item, f"{place}[{key!r}]") for key, item in value.items()}
        return {"__items__": [[encode(key, place), encode(item, f"{place}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, place) for item in value]}
    if isinstance(value, list):
        return [encode(item, place) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {place or 'a value'} of the type {type(value).__name__}")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return _decode_tensor(*value["__tensor__"])
    if "__items__" in value:
        return {decode(key): decode(item) for key, item in value["__items__"]}
    if "__tuple__" in value:
        return tuple(decode(item) for item in value["__tuple__"])
    if "__float__" in value:
        return float(value["__float__"])
    return {key: decode(item) for key, item in value.items()}


def _encode_tensor(tensor: Tensor) -> list[Any]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), base64.b64encode(data).decode()]


def _decode_tensor(dtype: str, shape: list[int], data: str) -> Tensor:
    if not data:
        return torch.empty(0, dtype=getattr(torch, dtype)).reshape(shape)
    flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)
