"""Lazy logits: a tensor that knows its shape and dtype, and how to compute itself.

A head with a chunked loss returns lazy logits. What model code does to them on the way to the loss
is deferred: it is applied to the head's small input. `cross_entropy` then runs over chunks of rows
(`softmax_grad`). Any other use computes the logits, once, and goes on with an ordinary tensor.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from oomph.errors import BadInput, OomphError
from oomph.techniques.softmax_grad import LossOptions, chunked_cross_entropy, wide_dtype
from oomph.torch_compat.dispatch import is_traceable_wrapper_subclass
from oomph.torch_compat.function_modes import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    parse_to,
)
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_map
from oomph.torch_compat.tensors import TensorBase, make_wrapper_subclass, version_of


class StaleLogits(OomphError):
    """Lazy logits are used after the tensors they are computed from have changed."""


class Chunking:
    """The chunk size of a head's loss, and counts of what became of its logits."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        #: Losses computed in chunks.
        self.chunked = 0
        #: Times that logits were computed whole, because something else was done to them.
        self.materialised = 0


def lazy_logits(
    chunking: Chunking, input: Tensor, weight: Tensor, bias: Tensor | None
) -> LazyLogits | None:
    """The result of `F.linear(input, weight, bias)`, computed lazily; None if it should run now."""
    dtype = _dtype_of_logits(input, weight, bias)
    if dtype is None:
        return None
    call = _Call(chunking, dtype, (input, weight, bias))
    return _defer(_Recipe(call=call, rows=input, weight=weight, bias=bias, dtype=dtype))


def _dtype_of_logits(input: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype of `F.linear`'s result; None if `F.linear` should run now."""
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or isinstance(input, LazyLogits)
        or any(is_traceable_wrapper_subclass(tensor) for tensor in tensors)
        or any(tensor.device != input.device for tensor in tensors)
        or input.device.type == "meta"
        or input.dim() < 2
        or input.shape[-1] != weight.shape[1]
    ):
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and dtypes <= _AUTOCAST_CASTS:
        return torch.get_autocast_dtype(kind)
    return dtypes.pop() if len(dtypes) == 1 and input.is_floating_point() else None


_HALF = {torch.bfloat16, torch.float16}
_AUTOCAST_CASTS = {*_HALF, torch.float32}


# -- what lazy logits are made of ------------------------------------------------------------------


class _Call:
    """One call of a head, shared by all lazy logits that come from it."""

    def __init__(
        self, chunking: Chunking, dtype: torch.dtype, inputs: tuple[Tensor | None, ...]
    ) -> None:
        self.chunking = chunking
        #: The dtype the head computes in.
        self.dtype = dtype
        self.has_chunked_loss = False
        #: All lazy logits made from it, in order.
        self.members: list[weakref.ref[LazyLogits]] = []
        self._inputs = inputs
        self._versions = self._count_writes()

    def _count_writes(self) -> list[int]:
        return [
            0 if tensor is None or tensor.is_inference() else version_of(tensor)
            for tensor in self._inputs
        ]

    def watch(self, tensor: Tensor) -> None:
        """Check a tensor for writes as if it were one of the head's weights."""
        self.check_fresh()
        self._inputs = (*self._inputs, tensor)
        self._versions = self._count_writes()

    def check_fresh(self) -> None:
        """Fail if the head's input or weights were written to since the call."""
        if self._count_writes() != self._versions:
            raise StaleLogits(
                "these logits were put off, and the head's input or weights have changed since: "
                "read logits before the optimizer's step, or run without a chunked loss"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Recipe:
    """How to compute lazy logits: `scale * (linear(rows, weight, bias) + added)` in `dtype`."""

    call: _Call
    rows: Tensor
    """The head's input, reshaped and sliced as the logits were."""
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    added: Tensor | None = None
    """An untrained value for each class, in the dtype of the sum."""
    scale: float = 1.0
    classes_second: bool = False
    """Whether the classes are the second of three dimensions, as `cross_entropy` takes them."""
    source: LazyLogits | None = None
    """The lazy logits these were made from."""
    replay: Callable[[Tensor], Tensor] | None = None
    """Computes these logits from the computed source."""

    @property
    def shape(self) -> torch.Size:
        *leading, _ = self.rows.shape
        classes = self.weight.shape[0]
        if self.classes_second:
            return torch.Size((leading[0], classes, leading[1]))
        return torch.Size((*leading, classes))

    def compute(self) -> Tensor:
        """The logits as the plain head computes them."""
        self.call.chunking.materialised += 1
        return self.compute_rows()

    def compute_rows(self) -> Tensor:
        """`compute` without counting it, for use on some of the rows."""
        self.call.check_fresh()
        dtype = self.call.dtype
        bias = self.bias.to(dtype) if self.bias is not None else None
        with torch.autocast(self.rows.device.type, enabled=False):
            logits = F.linear(self.rows.to(dtype), self.weight.to(dtype), bias)
        return logits if self.added is None else logits.to(self.added.dtype) + self.added

    def detached(self) -> _Recipe:
        bias = self.bias.detach() if self.bias is not None else None
        return replace(self, rows=self.rows.detach(), weight=self.weight.detach(), bias=bias)


def _defer(recipe: _Recipe) -> LazyLogits:
    if not torch.is_grad_enabled():
        recipe = recipe.detached()  # gradients enabled later must not flow back through it
    lazy: LazyLogits = _Deferred.apply(recipe.rows, recipe.weight, recipe.bias, recipe)
    return lazy


class _Deferred(torch.autograd.Function):
    """Gives lazy logits their place in the autograd graph.

    A chunked loss bypasses it; it serves code that hands lazy logits to autograd itself, such as a
    custom autograd function or a module's backward hook.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe
    ) -> LazyLogits:
        ctx.recipe = recipe
        return LazyLogits(recipe)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        recipe: _Recipe = ctx.recipe
        recipe.call.check_fresh()
        rows, weight, dtype = recipe.rows, recipe.weight, recipe.call.dtype
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if recipe.classes_second:
            gradient = gradient.transpose(1, 2)
        gradient = (gradient * recipe.scale).to(dtype).reshape(-1, len(weight))
        flat = rows.reshape(-1, rows.shape[-1])
        with torch.autocast(rows.device.type, enabled=False):
            return (
                (gradient @ weight.to(dtype)).to(rows.dtype).view_as(rows) if needs_rows else None,
                (gradient.t() @ flat.to(dtype)).to(weight.dtype) if needs_weight else None,
                gradient.sum(0).to(recipe.bias.dtype)
                if recipe.bias is not None and needs_bias
                else None,
                None,
            )


# -- the tensor ------------------------------------------------------------------------------------


class LazyLogits(Tensor):
    """Logits that are computed when they are used, and never if only a chunked loss uses them."""

    _recipe: _Recipe
    _plain: Tensor | None

    @staticmethod
    def __new__(cls, recipe: _Recipe) -> LazyLogits:
        """An empty shell of the logits' shape and dtype."""
        with DisableTorchFunction():
            # For a rehearsed tensor, this is the device autograd sees: the fake CPU.
            device = TensorBase.device.__get__(recipe.rows)
        lazy: LazyLogits = make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=device
        )
        lazy._recipe = recipe
        lazy._plain = None
        recipe.call.members.append(weakref.ref(lazy))
        return lazy

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Defer what can be deferred; answer the rest from the shell, or with the real logits."""
        kwargs = kwargs or {}
        lazy, *rest = args or (None,)
        if func in _GRADIENT_HOOKS:
            _check_gradient(lazy)
        if isinstance(lazy, LazyLogits) and lazy._is_lazy():
            if func in _KNOWN_BY_THE_SHELL:
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            answer = _answer(func, lazy, rest, kwargs)
            if isinstance(answer, _Recipe):

                def replay(computed: Tensor) -> Tensor:
                    return func(computed, *rest, **kwargs)  # type: ignore[no-any-return]

                return _defer(replace(answer, source=lazy, replay=replay))
            if answer is not NotImplemented:
                return answer
        return func(*tree_map(_materialised, args), **tree_map(_materialised, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op below autograd on the computed values; autograd itself handles the graph."""
        if schema_of(func).is_mutable and isinstance(args[0], LazyLogits):
            raise NotImplementedError(f"{func} cannot write into lazy logits below autograd")

        def values(value: Any) -> Any:
            return value._values() if isinstance(value, LazyLogits) else value

        return func(*tree_map(values, args), **tree_map(values, kwargs or {}))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.to`; a method, to hide the shell from a rehearsal's rules for moves."""
        copies = kwargs.get("copy", False)
        others = {name: value for name, value in kwargs.items() if name != "copy"}
        if sum(isinstance(value, bool) for value in args) > 1:  # non_blocking and copy, unnamed
            return self.materialise().to(*args, **kwargs)
        device, dtype, _, memory_format = parse_to(*args, **others)
        if memory_format is not None or not _is_here(device, self.device):
            return self.materialise().to(*args, **kwargs)
        moved: Tensor = LazyLogits.__torch_function__(
            Tensor.to, (LazyLogits,), (self, dtype or self.dtype), {"copy": copies}
        )
        return moved

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.cpu`, of the real logits."""
        return self.materialise().cpu(*args, **kwargs)

    def on_host(self) -> Tensor:
        """The logits on the host, computed and moved in chunks; `self` stays lazy.

        Only one chunk is on the device at a time; the scale is applied on the host.
        """
        if not self._is_lazy():
            return self.materialise().detach().cpu()
        recipe = self._recipe.detached()
        *leading, width = recipe.rows.shape
        rows, tokens = recipe.rows.reshape(-1, width), recipe.call.chunking.tokens
        host = torch.empty(len(rows), len(recipe.weight), dtype=recipe.dtype, device="cpu")
        for start in range(0, len(rows), tokens):
            chunk = replace(recipe, rows=rows[start : start + tokens])
            host[start : start + tokens] = chunk.compute_rows().cpu()
        if recipe.scale != 1.0:
            host *= recipe.scale
        logits = host.view(*leading, len(recipe.weight))
        return logits.transpose(1, 2) if recipe.classes_second else logits

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.cuda`, of the real logits."""
        return self.materialise().cuda(*args, **kwargs)

    def materialise(self) -> Tensor:
        """The real logits, computed at the first call; an ordinary tensor from then on."""
        if self._plain is None:
            # All members at once, so that later writes to logits show in views but not in copies.
            for member in self._recipe.call.members:
                lazy = member()
                if lazy is not None and lazy._plain is None:
                    lazy._plain = lazy._compute()
        assert self._plain is not None
        return self._plain

    def _compute(self) -> Tensor:
        recipe = self._recipe
        with DisableTorchFunctionSubclass():
            requires_grad = self.requires_grad
        # With the grad mode of their creation: the code that uses them may have disabled gradients.
        with torch.set_grad_enabled(requires_grad):
            if not self._has_own_history():
                with DisableTorchFunctionSubclass():
                    return self.clone()
            if recipe.source is not None and recipe.replay is not None:
                return recipe.replay(recipe.source.materialise())
            return recipe.compute()

    def _is_lazy(self) -> bool:
        return self._plain is None and self._has_own_history()

    def _has_own_history(self) -> bool:
        """Whether the shell still has the `grad_fn` it was made with.

        An autograd function that returns lazy logits replaces it.
        """
        with DisableTorchFunctionSubclass():
            node = self.grad_fn
        return node is None or getattr(node, "recipe", None) is self._recipe

    def _values(self) -> Tensor:
        recipe = self._recipe
        logits = recipe.compute().to(recipe.dtype) * recipe.scale
        return logits.transpose(1, 2) if recipe.classes_second else logits


def _is_here(device: torch.device | None, here: torch.device) -> bool:
    return device is None or (device.type == here.type and device.index in (None, here.index))


def _materialised(value: Any) -> Any:
    return value.materialise() if isinstance(value, LazyLogits) else value


# -- what can be deferred --------------------------------------------------------------------------


def _answer(func: Any, lazy: LazyLogits, args: Any, kwargs: dict[str, Any]) -> Any:
    """The recipe for `func`'s result, the result itself, or NotImplemented."""
    handler = _HANDLERS.get(func)
    if handler is None:
        return NotImplemented
    try:
        bound = inspect.signature(handler).bind(lazy, *args, **kwargs)
    except TypeError:
        return NotImplemented  # another overload of the function
    return handler(*bound.args, **bound.kwargs)


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    recipe = lazy._recipe
    rows, call = recipe.rows, recipe.call
    *leading, width = rows.shape
    if (
        not (len(leading) == 1 or recipe.classes_second)
        or list(target.shape) != leading
        or target.dtype is not torch.int64
        or target.device != rows.device
        or not target.numel()
        or weight is not None
        or size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum")
        or label_smoothing
    ):
        return NotImplemented
    call.check_fresh()
    options = LossOptions(
        compute_dtype=call.dtype,
        tokens=call.chunking.tokens,
        ignore_index=ignore_index,
        mean=reduction == "mean",
        scale=recipe.scale,
    )
    loss = chunked_cross_entropy(
        rows.reshape(-1, width),
        recipe.weight,
        recipe.bias,
        target.reshape(-1),
        options,
        recipe.added,
    )
    call.chunking.chunked += 1
    call.has_chunked_loss = True
    # Autocast computes losses in fp32; without it, they have the logits' dtype.
    in_autocast = torch.is_autocast_enabled(rows.device.type)
    return loss.to(wide_dtype(recipe.dtype) if in_autocast else recipe.dtype)


def _reshape(lazy: LazyLogits, *shape: Any) -> Any:
    recipe = lazy._recipe
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    if recipe.classes_second or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    *leading, width = recipe.rows.shape
    classes = len(recipe.weight)
    if sizes and sizes[-1] == -1 and -1 not in sizes[:-1]:
        sizes[-1] = classes
    known = [size for size in sizes[:-1] if size != -1]
    fits = math.prod(known) == math.prod(leading) or len(known) == len(sizes) - 2
    if not sizes or sizes[-1] != classes or not fits:
        return NotImplemented
    return replace(recipe, rows=recipe.rows.reshape(*sizes[:-1], width))


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = lazy._recipe.rows.dim() - 1
    if lazy._recipe.classes_second or end_dim in (last, -1):
        return NotImplemented
    return replace(lazy._recipe, rows=lazy._recipe.rows.flatten(start_dim, end_dim))


def _squeeze(lazy: LazyLogits, dim: int) -> Any:
    last = lazy._recipe.rows.dim() - 1
    if lazy._recipe.classes_second or not isinstance(dim, int) or dim in (last, -1):
        return NotImplemented
    return replace(lazy._recipe, rows=lazy._recipe.rows.squeeze(dim))


def _unsqueeze(lazy: LazyLogits, dim: int) -> Any:
    if lazy._recipe.classes_second or dim in (lazy._recipe.rows.dim(), -1):
        return NotImplemented
    return replace(lazy._recipe, rows=lazy._recipe.rows.unsqueeze(dim))


def _index(lazy: LazyLogits, index: Any) -> Any:
    recipe = lazy._recipe
    entries = index if isinstance(index, tuple) else (index,)
    if recipe.classes_second or not entries or not all(map(_is_simple, entries)):
        return NotImplemented
    *before, last = entries
    dimensions, used = recipe.rows.dim(), sum(map(_dimensions_used, entries))
    keeps_classes = isinstance(last, slice) and last == slice(None)
    if not keeps_classes and (any(entry is Ellipsis for entry in before) or used == dimensions):
        return NotImplemented
    return replace(recipe, rows=recipe.rows[index])


def _is_simple(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return not isinstance(entry, LazyLogits)
    return entry is None or entry is Ellipsis or type(entry) in (int, slice)


def _dimensions_used(entry: Any) -> int:
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 0 if entry is None or entry is Ellipsis else 1


def _transpose(lazy: LazyLogits, dim0: int, dim1: int) -> Any:
    if len(lazy._recipe.shape) != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
        return NotImplemented
    return _swap_classes(lazy)


def _permute(lazy: LazyLogits, *dims: Any) -> Any:
    order = dims[0] if len(dims) == 1 else dims
    if len(lazy._recipe.shape) != 3 or [dim % 3 for dim in order] != [0, 2, 1]:
        return NotImplemented
    return _swap_classes(lazy)


def _swap_classes(lazy: LazyLogits) -> _Recipe:
    return replace(lazy._recipe, classes_second=not lazy._recipe.classes_second)


def _add(lazy: LazyLogits, other: Any) -> Any:
    """Add a value for each class, as BART and similar models do from a buffer."""
    recipe = lazy._recipe
    if (
        not isinstance(other, Tensor)
        or isinstance(other, LazyLogits)
        or other.requires_grad
        or not other.is_floating_point()
        or other.device != recipe.rows.device
        or other.numel() != len(recipe.weight)
        or other.dim() not in range(1, len(recipe.shape) + 1)
        or other.shape[-1] != len(recipe.weight)
        or recipe.classes_second
        or recipe.added is not None
        or recipe.scale != 1.0
    ):
        return NotImplemented
    dtype = torch.promote_types(recipe.dtype, other.dtype)
    if dtype not in (recipe.dtype, torch.float32):
        return NotImplemented
    recipe.call.watch(other)
    return replace(recipe, added=other.reshape(-1).to(dtype), dtype=dtype)


def _multiply(lazy: LazyLogits, other: Any) -> Any:
    if not _is_number(other):
        return NotImplemented
    return replace(lazy._recipe, scale=lazy._recipe.scale * other)


def _divide(lazy: LazyLogits, other: Any) -> Any:
    return _multiply(lazy, 1 / other) if _is_number(other) and other != 0 else NotImplemented


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _copy(lazy: LazyLogits) -> Any:
    return replace(lazy._recipe)


def _float(lazy: LazyLogits) -> Any:
    return _cast(lazy, torch.float32)


def _cast(lazy: LazyLogits, dtype: Any) -> Any:
    """Cast to the same dtype or to fp32 only: other casts round, or are wider than fp32."""
    here = lazy._recipe.dtype
    if dtype is here or (dtype is torch.float32 and here in _HALF):
        return replace(lazy._recipe, dtype=dtype)
    return NotImplemented


def _to(lazy: LazyLogits, dtype: Any, *, copy: bool = False) -> Any:
    return _cast(lazy, dtype)


def _check_gradient(lazy: Any) -> None:
    if isinstance(lazy, LazyLogits) and lazy._recipe.call.has_chunked_loss:
        raise BadInput(
            "a chunked loss computes no gradient of the logits: ask for it before the loss is "
            "computed, or run without a chunked loss"
        )


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.squeeze: _squeeze,
    torch.squeeze: _squeeze,
    Tensor.unsqueeze: _unsqueeze,
    torch.unsqueeze: _unsqueeze,
    Tensor.__getitem__: _index,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.add: _add,
    torch.add: _add,
    Tensor.mul: _multiply,
    torch.mul: _multiply,
    Tensor.div: _divide,
    torch.div: _divide,
    Tensor.contiguous: _copy,
    Tensor.clone: _copy,
    torch.clone: _copy,
    Tensor.float: _float,
    Tensor.type: _cast,
    Tensor.to: _to,
    # In a rehearsal the shell's own device may differ from the one it stands for.
    _getter("device"): lambda lazy: lazy._recipe.rows.device,
    _getter("is_cuda"): lambda lazy: lazy._recipe.rows.device.type == "cuda",
    _getter("is_cpu"): lambda lazy: lazy._recipe.rows.device.type == "cpu",
}

_GRADIENT_HOOKS = {Tensor.register_hook, Tensor.retain_grad}

_KNOWN_BY_THE_SHELL = {
    *map(_getter, ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "grad_fn", "layout")),
    *map(_getter, ("itemsize", "nbytes", "is_sparse", "is_quantized", "is_nested")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
