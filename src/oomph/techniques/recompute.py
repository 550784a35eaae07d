"""Recompute: drop what a block saves for backward, and run its forward again when it is needed.

Everything is recomputed, or all but the results of chosen ops, which are kept. An op is named by
its kind and the number of earlier ops of that kind in the block: `attention#0`, `product#3`. The
names are the same on every device, in eager mode and inside a compiled block.

The second run of a forward starts from the same state as the first, whatever the forward writes to,
and its own writes are dropped (`ForwardCall`): buffers, counters, lists and generators are those
of one forward. Now and then both runs are compared op by op (`SameAgain`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from oomph.techniques.batch_calls import unwatched
from oomph.techniques.forward_call import ForwardCall, Repeated, not_repeatable
from oomph.techniques.kept_results import KeptResults
from oomph.techniques.surroundings import is_transformed
from oomph.techniques.technique import Undo

aten = torch.ops.aten

#: Ops whose results are worth keeping: they take long relative to the bytes of their results.
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


def recompute(
    block: nn.Module, keep: Collection[str] = (), *, compiled: bool = False, name: str = ""
) -> Undo:
    """Make `block` recompute itself in backward, except the results of the ops in `keep`.

    `compiled` says that it will be compiled: its graphs write to buffers only once in any case, and
    cannot run inside our contexts. `name` is used in error messages.
    """
    forward = block.forward
    if not compiled:
        return replace_forward(block, Recomputed(block, forward, frozenset(keep), name))
    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        options["context_fn"] = functools.partial(_selecting, frozenset(keep))
    return replace_forward(block, functools.partial(checkpoint, forward, **options))


class Recomputed:
    """The forward of a block that is recomputed."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], keep: frozenset[str], name: str
    ) -> None:
        self._block = Repeated(block, forward, name or type(block).__name__)
        self._keep = keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; inside `torch.func` plainly, because our saving hooks would not run."""
        if not torch.is_grad_enabled() or is_transformed():
            return self._block.forward(*args, **kwargs)
        # Our own bookkeeping calls are not the model's: modes that watch those must not see them.
        with unwatched() as watching:
            call = ForwardCall(self._block, args, kwargs, watching)
            kept = KeptResults(self._keep, KINDS, self._block.error) if self._keep else None
            first = _Nested(call.watched, kept.first if kept else _nothing, call.compared)
            again = _CallInGraph(call, kept)
            leaves = call.take_leaves()
            contexts = functools.partial(_pair, first, again)
            return checkpoint(again.run, *leaves, use_reentrant=False, context_fn=contexts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Give a copied block its own plain forward; the records of calls are not copied."""
        copied: Callable[..., Any] = copy.deepcopy(self._block.forward, memo)
        return copied


class _CallInGraph:
    """A call's second run, as autograd's graph holds it: the context and the function to run.

    A module may hold a tensor of this graph, such as a loss that nobody adds up. The graph must not
    hold the module in turn once its step is over: Python's collector does not see that cycle.
    """

    def __init__(self, call: ForwardCall, kept: KeptResults | None) -> None:
        self._call: ForwardCall | None = call
        self._context = _Nested(call.again, kept.again if kept else _nothing, call.compared)
        self._block = weakref.ref(call.block.block)
        self._name = call.block.name
        _in_graphs.add(self)

    def run(self, *leaves: Any) -> Any:
        """Run the forward of the block."""
        if self._call is None:
            raise not_repeatable(self._name, "the step that it ran in is over")
        return self._call.run(*leaves)

    def __enter__(self) -> None:
        if self._call is None:
            raise not_repeatable(self._name, "the step that it ran in is over")
        self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

    def is_of(self, blocks: Container[Any]) -> bool:
        """Whether the call is that of one of these blocks."""
        return self._block() in blocks

    def forget(self) -> None:
        """Drop what the call holds."""
        self._call = None
        self._context = _Nested()


#: The calls that a graph holds.
_in_graphs: weakref.WeakSet[_CallInGraph] = weakref.WeakSet()


@contextlib.contextmanager
def calls_end_with(model: nn.Module) -> Iterator[None]:
    """Afterwards, no graph that this model's recomputed blocks made inside goes backward again."""
    try:
        yield
    finally:
        left = list(_in_graphs)
        blocks = set(model.modules()) if left else set()
        for call in left:
            if call.is_of(blocks):
                call.forget()


def _pair(first: _Nested, again: _CallInGraph) -> tuple[Any, Any]:
    return first, again


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Replace one module's forward; undo restores it exactly.

    Inside compiled blocks, pass a plain function bound as a method: a `functools.partial` is a
    different object in each block, so PyTorch would compile each block again.
    """
    own = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        if own is not None:
            module.forward = own
        else:
            module.__dict__.pop("forward", None)

    return undo


_Make = Callable[[], AbstractContextManager[Any]]
_nothing: _Make = contextlib.nullcontext


class _Nested:
    """Combines contexts into one that can be entered again, for backward through a retained graph.

    The contexts are created when this is entered, the outermost first.
    """

    def __init__(self, *contexts: _Make) -> None:
        self._contexts = contexts
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for make in self._contexts:
                stack.enter_context(make())
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


def _selecting(keep: frozenset[str]) -> tuple[Any, Any]:
    """The compiler's equivalent of `KeptResults`, which works only once for each graph."""
    # Each forward and its recomputation count from zero, because both start here.
    return create_selective_checkpoint_contexts(  # type: ignore[no-any-return]
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
