"""Allocator settings: expandable segments reduce fragmentation of the reserved memory."""

from __future__ import annotations

import os
import re

import torch

from oomph.process.rehearsal_threads import rehearses_here
from oomph.techniques.technique import Undo
from oomph.torch_compat import cuda

#: The setting a plan may use; the planner checks it by replaying the step under it.
EXPANDABLE = "expandable_segments:True"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_allocator(settings: str) -> Undo:
    """Change the settings of PyTorch's CUDA allocator for all later allocations.

    A rehearsal changes nothing here: it passes the settings to the allocator's replay.
    """
    if not settings or rehearses_here() or not torch.cuda.is_available():
        return lambda: None
    before = _options(next((os.environ[name] for name in _VARIABLES if name in os.environ), ""))
    wanted = _options(settings)
    # On each call PyTorch resets some unnamed settings and keeps others, so name them all.
    _tell(before | wanted)
    return lambda: _tell(dict.fromkeys(wanted, "False") | before)


def _options(text: str) -> dict[str, str]:
    # A comma inside brackets separates list items, not settings.
    parts = [part for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)) if part]
    return {name: value for name, _, value in (part.partition(":") for part in parts)}


def _tell(options: dict[str, str]) -> None:
    text = ",".join(f"{name}:{value}" for name, value in options.items())
    cuda.set_allocator_settings(text)
