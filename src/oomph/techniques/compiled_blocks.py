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

#: How often code is compiled before PyTorch runs it eagerly. All recomputed blocks share a piece of
#: code, which is compiled anew for each way to recompute, each class of block and each shape.
COMPILED = 64

#: Dropout inside draws the numbers it would have drawn eagerly.
FALLBACK_RANDOM: dict[str, Any] = {"fallback_random": True}


def compile_block(block: nn.Module) -> Undo:
    """Compile the block's forward as it is now, recompute included."""
    compiled = torch.compile(block.forward, dynamic=False, options=FALLBACK_RANDOM)
    put_back = replace_forward(block, compiled)
    config = torch._dynamo.config
    limit, config.recompile_limit = config.recompile_limit, max(config.recompile_limit, COMPILED)

    def undo() -> None:
        put_back()
        config.recompile_limit = limit

    return undo
