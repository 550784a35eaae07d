"""Values that can be known without a GPU, and what is assumed where they cannot.

Masks, lengths and flags decide shapes and branches, and they are small: they are computed for real
beside the fake tensors, as long as everything they come from is known. The rest (losses, routing,
sampled tokens) is answered with a stated placeholder, or refused where a branch or a shape would
hang on it.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from oomph.errors import CannotRehearse
from oomph.rehearsal.storages import storage_key, storage_key_inside, tensors_in, written_by

aten = torch.ops.aten

#: Values of larger tensors are not followed: they decide no branch, and would cost real memory.
MOST_ELEMENTS = 1 << 20
#: Floats are followed where masks and loss scales need it; weights are never known.
MOST_FLOATS = 1 << 16
#: A truth asked for this often on one line is that of an endless loop; numbers, an optimizer may
#: read once per weight.
MOST_TRUTHS = 1_000
MOST_NUMBERS = 100_000

#: Truth of a boolean nobody can know: numbers are finite, and a mask hides nothing.
_ASSUMED_TRUTH = {aten.isnan.default: False, aten.isinf.default: False, aten.isfinite.default: True}
_ASSUMED_TRUTH |= dict.fromkeys((aten.all.default, aten.all.dim), True)
_ASSUMED_TRUTH |= dict.fromkeys((aten.any.default, aten.any.dim), False)

#: Ops whose output shape hangs on values, and the most rows they can give.
_WORST_CASE: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.nonzero.default: lambda tensor: (tensor.numel(), tensor.dim()),
    aten.masked_select.default: lambda tensor, mask: (max(tensor.numel(), mask.numel()),),
}


class KnownValues:
    """Real contents of small storages, kept beside their fake tensors."""

    def __init__(self) -> None:
        self._contents: dict[int, torch.UntypedStorage] = {}
        #: Which op made a boolean scalar whose value is not known.
        self._origin: dict[int, Any] = {}
        #: What was assumed, in words, and how often.
        self.assumed: Counter[str] = Counter()

    def know(self, fake: Tensor, real: Tensor, *, is_new: bool = False) -> None:
        """The contents of `fake` are those of `real`, whose memory nobody else has if it is new."""
        if not _small(real):
            return
        storage = real.untyped_storage()
        same = real.stride() == fake.stride() and real.storage_offset() == fake.storage_offset()
        if same and storage.nbytes() > MOST_ELEMENTS * 8:
            return  # a small part of something large
        if not (same and is_new):
            with _disable_current_modes():
                if same:
                    # All of it: other views of the storage may follow.
                    storage = storage.cpu().clone()
                else:
                    copy = torch.empty_strided(real.shape, fake.stride(), dtype=real.dtype)
                    storage = copy.copy_(real).untyped_storage()
        self._contents[storage_key(fake)] = storage

    def forget(self, key: int) -> None:
        """The storage died, or something unknown was written to it."""
        self._contents.pop(key, None)
        self._origin.pop(key, None)

    def of(self, tensor: Tensor) -> Tensor | None:
        """The real tensor, or None where it is not known."""
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.cpu() if _small(tensor) else None
        if tensor.constant is not None:
            return tensor.constant
        storage = self._contents.get(storage_key(tensor))
        if storage is None:
            return None
        with _disable_current_modes():
            return torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether `of` gives more than None."""
        if not isinstance(tensor, FakeTensor):
            return _small(tensor)
        return tensor.constant is not None or storage_key(tensor) in self._contents

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an op that reads values, or NotImplemented for all others."""
        if not _reads_values(func) or (func is aten.index.Tensor and not _has_mask(args[1])):
            return NotImplemented
        if func in _SCALARS:
            return self._scalar(args[0])
        if func is aten.equal.default:
            return self._equal(*args)
        if func in _CTC_LOSSES:
            return self._ctc_loss(*args[:4])
        real = self._compute(func, args, kwargs)
        if real is not None:
            return tree_map(self._fake, real)
        if func is aten.index.Tensor and (selected := self._masked(*args)) is not None:
            return selected
        return self._bounded(func, args)

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Compute the real result beside the fake one, where everything it needs is known."""
        outputs = list(tensors_in(out))
        mutates = func._schema.is_mutable
        if (
            not outputs
            or not all(map(_small, outputs))
            or torch.Tag.nondeterministic_seeded in func.tags
        ):
            if mutates:
                self._forget_written(func, args, kwargs)
            return
        if not mutates and all(storage_key_inside(t) in self._contents for t in outputs):
            return  # a view of something known
        real = self._compute(func, args, kwargs)
        if real is None:
            real = self._decided(func, args, outputs[0])
        if real is None:
            if mutates:
                self._forget_written(func, args, kwargs)
            if outputs[0].dtype is torch.bool and outputs[0].numel() == 1:
                self._origin[storage_key(outputs[0])] = func
            return
        if not mutates:
            for fake, value in zip(outputs, tensors_in(real), strict=True):
                self.know(fake, value, is_new=_makes_new(func))

    def notes(self) -> list[str]:
        """What was assumed, in words."""
        return [
            f"{note} ({count} times)" if count > 1 else note for note, count in self.assumed.items()
        ]

    # -- reading ----------------------------------------------------------------------------------

    def _scalar(self, tensor: Tensor) -> Any:
        real = self.of(tensor)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        where = _line_of_the_user()
        if tensor.dtype is torch.bool:
            origin = self._origin.get(storage_key(tensor))
            if origin in _ASSUMED_TRUTH:
                return self.assume(_ASSUMED_TRUTH[origin], f"{_name(origin)}()", where)
            if origin in _COMPARISONS:
                return self.assume(False, f"a comparison ({_name(origin)})", where)
            raise CannotRehearse(
                f"{where} branches on a value that only real data can tell; rehearse with a real "
                "sample batch, or take the branch out of the step"
            )
        if tensor.is_floating_point():
            return self.assume(1.0, "a number read from a tensor", where)
        return self.assume(1, "a whole number read from a tensor", where)

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        real_one, real_other = self.of(one), self.of(other)
        if real_one is not None and real_other is not None:
            with _disable_current_modes():
                return torch.equal(real_one, real_other)
        return bool(self.assume(one.shape == other.shape, "equal()", _line_of_the_user()))

    def assume(self, value: Any, what: str, where: str = "") -> Any:
        """Use `value` for something nobody can know, and say so."""
        where = where or _line_of_the_user()
        note = f"{what} at {where} was taken to be {value}"
        self.assumed[note] += 1
        if self.assumed[note] > (MOST_TRUTHS if isinstance(value, bool) else MOST_NUMBERS):
            raise CannotRehearse(f"{where} seems to wait for a value that only real data can tell")
        return value

    def _bounded(self, func: Any, args: Sequence[Any]) -> Any:
        where = _line_of_the_user()
        shape = _WORST_CASE.get(func)
        if shape is None:
            raise CannotRehearse(
                f"{_name(func)} at {where} makes a tensor whose size only real data can tell; "
                "rehearse with a real sample batch"
            )
        rows = shape(*args)
        self.assumed[f"{_name(func)} at {where} was taken to select everything: {rows}"] += 1
        dtype = torch.int64 if func is aten.nonzero.default else args[0].dtype
        return torch.empty(rows, dtype=dtype)

    def _masked(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
        """What one mask that is known selects of something that is not."""
        given = [(at, index) for at, index in enumerate(indices) if index is not None]
        at, mask = given[0]
        known = self.of(mask)
        if len(given) > 1 or known is None:
            return None
        with _disable_current_modes():
            count = int(known.count_nonzero())
        shape = (*tensor.shape[:at], count, *tensor.shape[at + mask.dim() :])
        # The mask becomes indices first, which are there until the result is.
        places = torch.empty((count, mask.dim()), dtype=torch.int64)
        selected = torch.empty(shape, dtype=tensor.dtype)
        del places
        return selected

    def _ctc_loss(
        self, log_probs: Tensor, targets: Tensor, _: Any, target_lengths: Any
    ) -> tuple[Tensor, Tensor]:
        """The losses, and the table they come from, as wide as the longest target."""
        if isinstance(target_lengths, Tensor):
            real = self.of(target_lengths)
            with _disable_current_modes():
                target_lengths = real.reshape(-1).tolist() if real is not None else None
        longest = max(target_lengths or (targets.shape[-1],))
        if target_lengths is None:
            where = _line_of_the_user()
            self.assumed[f"the targets of ctc_loss at {where} were taken to be {longest} long"] += 1
        batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
        table = batch, log_probs.shape[0], 2 * longest + 1
        return log_probs.new_empty(batch), log_probs.new_empty(table)

    # -- computing --------------------------------------------------------------------------------

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The op's real result, or None if an input is unknown; writes in place as the op does."""
        if not all(self._is_known(tensor) for tensor in tensors_in((args, kwargs))):
            return None
        real_args = self._real(args)
        real_kwargs = {name: self._real(value) for name, value in kwargs.items()}
        try:
            with _disable_current_modes():
                return func(*real_args, **real_kwargs)
        except Exception:
            return None  # an op only a GPU has: its value stays unknown

    def _real(self, value: Any) -> Any:
        """An argument with real tensors for fake ones."""
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, (list, tuple)):
            return [self._real(item) for item in value]
        return value

    def _decided(self, func: Any, args: Sequence[Any], out: Tensor) -> Tensor | None:
        """A result that one known operand decides: true or anything is true.

        This is how a text generation with a length limit ends, although its tokens are not known.
        """
        deciding = _DECIDING.get(func)
        if deciding is None or out.dtype.is_floating_point:
            return None
        for value in args[:2]:
            real = self.of(value) if isinstance(value, Tensor) else None
            with _disable_current_modes():
                if real is not None and real.numel() and bool((real == deciding).all()):
                    return torch.full(out.shape, deciding, dtype=out.dtype)
        return None

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self.know(fake, value)
        return fake

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if func in _KEEPS_VALUES:
            return
        for tensor in written_by(func, args, kwargs):
            self.forget(storage_key(tensor))


_COMPARISONS = {
    getattr(getattr(aten, name), overload)
    for name in ("lt", "le", "gt", "ge", "ne", "eq")
    for overload in ("Scalar", "Tensor")
}
_SCALARS = {aten._local_scalar_dense.default, aten.item.default}
_CTC_LOSSES = {aten._ctc_loss.default, aten._ctc_loss.Tensor}
#: Ops that show their argument's memory although their schema does not say so.
_SILENT_VIEWS = {aten._unsafe_view.default, aten.lift.default}
#: The operand that decides the result of an op alone.
_DECIDING: dict[Any, int] = {
    aten.bitwise_or.Tensor: 1,
    aten.logical_or.default: 1,
    aten.bitwise_and.Tensor: 0,
    aten.logical_and.default: 0,
    aten.mul.Tensor: 0,
}
#: The loss scaler's check writes "an infinity was found"; gradients are taken to be finite.
_KEEPS_VALUES = {aten._amp_foreach_non_finite_check_and_unscale_.default}


@functools.cache
def _reads_values(func: Any) -> bool:
    """Whether the result, or its shape, hangs on values."""
    return (
        func in _SCALARS
        or func is aten.equal.default
        or func in _CTC_LOSSES
        or func in _WORST_CASE
        or torch.Tag.dynamic_output_shape in func.tags
    )


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether no result shows an argument's memory."""
    says_so = all(result.alias_info is None for result in func._schema.returns)
    return says_so and func not in _SILENT_VIEWS


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _small(tensor: Tensor) -> bool:
    most = MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else MOST_ELEMENTS
    return tensor.numel() <= most


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").partition(".")[0]


def _line_of_the_user() -> str:
    """The innermost line of Python that belongs neither to torch nor to oomph.

    An optimizer is called by oomph's own step; what it reads is said to be read by torch.
    """
    torchs = ""
    frame = sys._getframe(1)
    while frame is not None:
        file, line = Path(frame.f_code.co_filename), frame.f_lineno
        if file.is_relative_to(_TORCH):
            if not torchs and file.name not in _MACHINERY:
                torchs = f"torch/{file.relative_to(_TORCH)}:{line}"
        elif file.is_relative_to(_OOMPH / "running"):
            return torchs
        elif not file.is_relative_to(_OOMPH) and not file.name.startswith("<"):
            return f"{file.name}:{line}"
        frame = frame.f_back  # type: ignore[assignment]
    return torchs or "an unknown line"


_TORCH = Path(torch.__file__).parent
_OOMPH = Path(__file__).parent.parent
#: Files of torch that any call may pass through.
_MACHINERY = {
    "_compile.py",
    "eval_frame.py",
    "_ops.py",
    "overrides.py",
    "_python_dispatch.py",
    "_contextlib.py",
}
