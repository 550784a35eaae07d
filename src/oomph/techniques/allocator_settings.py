"""Allocator settings: expandable segments leave less reserved memory that nothing can use."""

from __future__ import annotations

import os

import torch

from oomph.techniques.technique import Undo

#: What a plan may set; each is checked by replaying the step under it.
EXPANDABLE = "expandable_segments:True"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_allocator(settings: str) -> Undo:
    """Change PyTorch's allocator for what is allocated from now on, on a machine with CUDA."""
    if not settings or not torch.cuda.is_available():
        return lambda: None
    before = next((os.environ[name] for name in _VARIABLES if name in os.environ), "")
    torch.cuda.memory._set_allocator_settings(settings)
    undone = before or ",".join(f"{part.split(':')[0]}:False" for part in settings.split(","))
    return lambda: torch.cuda.memory._set_allocator_settings(undone)
