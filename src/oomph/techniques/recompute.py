"""Recompute: forget what a block saved for backward and run its forward again when it is needed.

As a whole, or but for the results of chosen ops, which are kept. Ops are named by their kind and
how often it ran before in the block: `attention#0`, `product#3`. The names are the same on every
device, in eager mode and inside a compiled block.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
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


def recompute(block: nn.Module, keep: Collection[str] = (), *, compiled: bool = False) -> Undo:
    """Make `block` recompute itself in backward, but for the results of the ops in `keep`.

    `compiled` says that it will be compiled: its graphs write to buffers once in any case, and
    would not take a context of ours.
    """
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    counting = [] if compiled else [m for m in block.modules() if _counts_statistics(m)]
    if keep or counting:
        options["context_fn"] = functools.partial(_contexts, frozenset(keep), counting)
    return replace_forward(block, functools.partial(checkpoint, forward, **options))


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Give one module another forward; undo leaves it exactly as it was.

    Inside compiled blocks give a method of a plain function: a `functools.partial` is another
    object in each block, for which PyTorch would compile each one anew.
    """
    own = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        if own is not None:
            module.forward = own
        else:
            module.__dict__.pop("forward", None)

    return undo


def _contexts(keep: frozenset[str], counting: Sequence[nn.Module]) -> Any:
    """What forward runs in, and what recomputation runs in."""
    first: Any = contextlib.nullcontext()
    again: Any = contextlib.nullcontext()
    if keep:
        # Counted anew in each forward and in each recomputation, which both begin here.
        first, again = create_selective_checkpoint_contexts(
            functools.partial(_policy, keep, {False: Counter(), True: Counter()})
        )
    return first, _with_statistics_aside(again, counting) if counting else again


def _counts_statistics(module: nn.Module) -> bool:
    """Whether a forward in training changes what the module knows of its inputs."""
    norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return norm and bool(module.track_running_stats)


@contextlib.contextmanager
def _with_statistics_aside(around: Any, counting: Sequence[nn.Module]) -> Iterator[None]:
    """While active, running statistics are updated in copies: forward updated them already."""
    kept = [dict(module._buffers) for module in counting]
    for module in counting:
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.clone() if buffer is not None else None
    try:
        with around:
            yield
    finally:
        for module, buffers in zip(counting, kept, strict=True):
            module._buffers.update(buffers)


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
