"""Compile each block by itself: it is compiled once for its class and composes with recompute.

Inside a compiled block recompute becomes part of its backward graph, which then holds only what
backward really needs of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo


def compile_block(block: nn.Module) -> Undo:
    """Compile the block's forward as it is now, recompute included."""
    # Fallback: dropout inside draws the numbers it would have drawn eagerly.
    options: dict[str, Any] | None = (
        {"fallback_random": True} if draws_random_numbers(block) else None
    )
    compiled = torch.compile(block.forward, dynamic=False, options=options)
    return replace_forward(block, compiled)


def draws_random_numbers(block: nn.Module) -> bool:
    """Whether a dropout in it is active."""
    return any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        for module in block.modules()
    )
