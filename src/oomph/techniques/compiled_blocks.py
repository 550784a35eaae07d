"""Compile each block by itself: once per class of block, and compatible with recompute.

Inside a compiled block, recompute becomes part of the backward graph, which then recomputes only
what backward really needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomph.techniques.batch_calls import unwatched
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo
from oomph.torch_compat import compiler

#: How often a piece of code is compiled before PyTorch falls back to eager. All recomputed blocks
#: share one, which is recompiled for each variant of recompute, class of block and shape.
COMPILED = 64

#: Makes dropout inside draw the same random numbers as in eager mode.
FALLBACK_RANDOM: dict[str, Any] = {"fallback_random": True}


def compile_block(block: nn.Module) -> Undo:
    """Compile the block's current forward, including recompute."""
    compiled = torch.compile(block.forward, dynamic=False, options=FALLBACK_RANDOM)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with unwatched():
            return compiled(*args, **kwargs)

    put_back = replace_forward(block, forward)
    config = compiler.settings()
    limit, config.recompile_limit = config.recompile_limit, max(config.recompile_limit, COMPILED)

    def undo() -> None:
        put_back()
        config.recompile_limit = limit

    return undo
