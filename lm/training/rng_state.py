"""The random number generators of a rank, which dropout and a user's code draw from."""

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    name, key, *rest = np.random.get_state()
    state = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, key.tolist(), *rest)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put this rank's random number generators where a checkpoint left them."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:  # a checkpoint of an earlier version has torch's alone
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
