"""Allocator settings: expandable segments leave less reserved memory that nothing can use."""

from __future__ import annotations

import os
import re

import torch

from oomph.techniques.technique import Undo

#: What a plan may set; each is checked by replaying the step under it.
EXPANDABLE = "expandable_segments:True"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_allocator(settings: str) -> Undo:
    """Change PyTorch's allocator for what is allocated from now on, on a machine with CUDA."""
    if not settings or not torch.cuda.is_available():
        return lambda: None
    before = _options(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))
    wanted = _options(settings)
    # Each time, PyTorch forgets some settings that are not named, and keeps others: name them all.
    _tell(before | wanted)
    return lambda: _tell(dict.fromkeys(wanted, "False") | before)


def _options(text: str) -> dict[str, str]:
    # A comma inside brackets belongs to the list.
    parts = [part for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)) if part]
    return {name: value for name, _, value in (part.partition(":") for part in parts)}


def _tell(options: dict[str, str]) -> None:
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(text)
