"""The random streams a step may draw from: PyTorch's on host and device, numpy's, Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Where all streams are."""
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put all streams there; a device's stream only on such a device."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever draws inside, the streams go on as if nobody had."""
    state = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)
