"""Recompute: forget what a block saved for backward and run its forward again when it is needed.

As a whole, or but for the results of chosen ops, which are kept. Ops are named by their kind and
how often it ran before in the block: `attention#0`, `product#3`. The names are the same on every
device, in eager mode and inside a compiled block.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from oomph.techniques.technique import Undo

aten = torch.ops.aten

#: Ops whose results are worth keeping: they take long for the bytes they leave.
KINDS: dict[Any, str] = {
    **dict.fromkeys(
        (
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten.baddbmm.default,
            aten._grouped_mm.default,
        ),
        "product",
    ),
    aten.convolution.default: "convolution",
    **dict.fromkeys(
        (
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_attention_math.default,
        ),
        "attention",
    ),
}


def recompute(block: nn.Module, keep: Collection[str] = ()) -> Undo:
    """Make `block` recompute itself in backward, but for the results of the ops in `keep`."""
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        options["context_fn"] = functools.partial(_contexts, frozenset(keep))
    return replace_forward(block, functools.partial(checkpoint, forward, **options))


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Give one module another forward; undo leaves it exactly as it was."""
    own = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        if own is not None:
            module.forward = own
        else:
            module.__dict__.pop("forward", None)

    return undo


def _contexts(keep: frozenset[str]) -> Any:
    # Counted anew in each forward and in each recomputation, which both begin here.
    return create_selective_checkpoint_contexts(
        functools.partial(_policy, keep, {False: Counter(), True: Counter()})
    )


def _policy(
    keep: frozenset[str], seen: dict[bool, Counter[str]], ctx: Any, func: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    kind = KINDS.get(func)
    if kind is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    counter = seen[ctx.is_recompute]
    name = f"{kind}#{counter[kind]}"
    counter[kind] += 1
    return CheckpointPolicy.MUST_SAVE if name in keep else CheckpointPolicy.PREFER_RECOMPUTE
