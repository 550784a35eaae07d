"""The random state that a step may use: PyTorch's on host and device, numpy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def get_random_state(device: torch.device) -> dict[str, Any]:
    """The state of all random generators."""
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state of all generators; a device's state only on such a device."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state afterwards, whatever is drawn inside."""
    state = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)
