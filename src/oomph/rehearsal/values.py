"""Tensor values that can be known without a GPU, and what is assumed for the others.

Masks, lengths and flags decide shapes and branches, and they are small: they are computed for real
beside the fake tensors, as long as all their inputs are known. Reads of other values (losses,
routing, sampled tokens) get a placeholder, stated in a note, or are refused if a branch or a shape
depends on them.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.errors import CannotRehearse
from oomph.rehearsal.packed_sequences import pack
from oomph.rehearsal.storages import storage_key, storage_key_inside, tensors_in
from oomph.techniques.tensor_writes import written_by
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_map

aten = torch.ops.aten

#: Values of larger tensors are not tracked: they decide no branch, and would cost real memory.
MOST_ELEMENTS = 1 << 20
#: Floats are tracked where masks and loss scales need it; weights are never known.
MOST_FLOATS = 1 << 16
#: Reading a boolean this often on one line means an endless loop; an optimizer may read numbers
#: once per weight.
MOST_TRUTHS = 1_000
MOST_NUMBERS = 100_000

#: Assumed results of unknown booleans: numbers are finite, a mask hides nothing, and arguments of
#: distributions are valid.
_ASSUMED_TRUTH = {aten.isnan.default: False, aten.isinf.default: False, aten.isfinite.default: True}
_ASSUMED_TRUTH |= dict.fromkeys((aten.all.default, aten.all.dim, aten._is_all_true.default), True)
_ASSUMED_TRUTH |= dict.fromkeys((aten.any.default, aten.any.dim, aten._is_any_true.default), False)

#: Ops whose output shape depends on values, and the largest shape that each can give.
_WORST_CASE: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.nonzero.default: lambda tensor: (tensor.numel(), tensor.dim()),
    aten.masked_select.default: lambda tensor, mask: (max(tensor.numel(), mask.numel()),),
}
#: The same for other libraries' ops, by name: these libraries may not be installed.
_WORST_CASE_ELSEWHERE: dict[str, Callable[..., tuple[int, ...]]] = {
    "torchvision.nms": lambda boxes, *_: (len(boxes),),
}


class KnownValues:
    """Real contents of small storages, kept beside their fake tensors."""

    def __init__(self) -> None:
        self._contents: dict[int, torch.UntypedStorage] = {}
        #: Storages of real tensors that unknown values were written to: theirs no longer count.
        self._overwritten: set[int] = set()
        #: By storage: the op that made a boolean scalar of unknown value.
        self._origin: dict[int, Any] = {}
        #: Storages that hold only numbers drawn at random, and the largest number that can be
        #: drawn.
        self._largest: dict[int, float] = {}
        #: The assumptions made, as text, and how often each was made.
        self.assumed: Counter[str] = Counter()
        #: Ops, with their lines, that were taken to select everything because the true count is
        #: unknowable.
        self.selects_unknown: dict[str, None] = {}
        #: Whether masks select one entry fewer than they do. Comparing such a forward with a normal
        #: one shows where Python counts the selected entries.
        self.picks_fewer = False

    def know(self, fake: Tensor, real: Tensor, *, is_new: bool = False) -> None:
        """Record that `fake` contains `real`; if that is new, nothing else shares its memory."""
        if not _small(real):
            return
        storage = real.untyped_storage()
        same = real.stride() == fake.stride() and real.storage_offset() == fake.storage_offset()
        same = same and _has_memory(storage)
        if same and storage.nbytes() > MOST_ELEMENTS * 8:
            return  # a small part of something large
        if not (same and is_new):
            with disable_current_modes():
                if same:
                    # Keep the whole storage: other views of it may follow.
                    storage = storage.cpu().clone()
                else:
                    copy = torch.empty_strided(
                        real.shape, fake.stride(), dtype=real.dtype, device="cpu"
                    )
                    storage = copy.copy_(real).untyped_storage()
        self._contents[storage_key(fake)] = storage

    def forget(self, key: int) -> None:
        """Drop what is known: the storage died, or unknown values were written to it."""
        self._contents.pop(key, None)
        self._overwritten.discard(key)
        self._origin.pop(key, None)
        self._largest.pop(key, None)

    def of(self, tensor: Tensor) -> Tensor | None:
        """The real tensor, or None if its values are not known."""
        if not self._is_known(tensor):
            return None
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            return tensor.constant
        storage = self._contents.get(storage_key(tensor))
        if storage is None:
            with disable_current_modes():
                return tensor.cpu()
        with disable_current_modes():
            return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                storage, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether `of` would return a tensor."""
        key = storage_key(tensor)
        if isinstance(tensor, FakeTensor):
            return tensor.constant is not None or key in self._contents
        return key in self._contents or (_small(tensor) and key not in self._overwritten)

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an op that reads values, or NotImplemented for all other ops."""
        if not _reads_values(func) or (func is aten.index.Tensor and not _has_mask(args[1])):
            return NotImplemented
        if func in _SCALARS:
            return self._scalar(args[0])
        if func is aten.equal.default:
            return self._equal(*args)
        if func in _CTC_LOSSES:
            return self._ctc_loss(*args[:4])
        if func is aten._pack_padded_sequence.default:
            return self._pack(*args)
        real = self._compute(func, args, kwargs)
        if real is not None and self.picks_fewer and func in _SELECTS:
            with disable_current_modes():
                real = real[: max(len(real) - 1, 0)].clone()
        if real is not None:
            return tree_map(self._fake, real)
        if func is aten.index.Tensor:
            return self._masked(*args)
        if func is aten.bincount.default and _minlength(args, kwargs):
            return self._counts(_minlength(args, kwargs), args, kwargs)
        return self._bounded(func, args)

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Compute the real result beside the fake one if all inputs are known."""
        outputs = list(tensors_in(out))
        mutates = schema_of(func).is_mutable
        if (
            not outputs
            or not all(map(_small, outputs))
            or torch.Tag.nondeterministic_seeded in func.tags
        ):
            if mutates:
                self._forget_written(func, args, kwargs)
            if outputs and (bounds := bounds_of_draws(func, args, kwargs)) is not None:
                largest = _largest_between(*bounds, outputs[0].dtype)
                self._largest[storage_key(outputs[0])] = largest
            return
        if not mutates and all(storage_key_inside(t) in self._contents for t in outputs):
            return  # a view of a known storage
        real = self._compute(func, args, kwargs)
        if real is None:
            real = self._decided(func, args, outputs[0])
        if real is None:
            if mutates:
                self._forget_written(func, args, kwargs)
            if outputs[0].dtype is torch.bool and outputs[0].numel() == 1:
                self._origin[storage_key(outputs[0])] = func
                if (answer := self._compared_draw(func, args)) is not None:
                    self._largest[storage_key(outputs[0])] = answer
            return
        for fake, value in zip(outputs, tensors_in(real), strict=True):
            if not mutates:
                self.know(fake, value, is_new=_makes_new(func))
            elif storage_key(fake) not in self._contents:
                # What stands for a tensor of the user's own shares the copy that was written to.
                self._contents[storage_key(fake)] = value.untyped_storage()

    def notes(self) -> list[str]:
        """The assumptions made, as text."""
        return [
            f"{note} ({count} times)" if count > 1 else note for note, count in self.assumed.items()
        ]

    # -- reading ----------------------------------------------------------------------------------

    def _scalar(self, tensor: Tensor) -> Any:
        real = self.of(tensor)
        if real is not None:
            with disable_current_modes():
                return real.item()
        where = _line_of_the_user()
        if tensor.dtype is torch.bool:
            origin = self._origin.get(storage_key(tensor))
            if origin in _ASSUMED_TRUTH:
                return self.assume(_ASSUMED_TRUTH[origin], f"{_name(origin)}()", where)
            if (answer := self._largest.get(storage_key(tensor))) is not None:
                return self.assume(bool(answer), "a comparison of a number drawn at random", where)
            if origin in _COMPARISONS:
                return self.assume(False, f"a comparison ({_name(origin)})", where)
            raise CannotRehearse(
                f"{where} branches on a value that only real data can tell; rehearse with a real "
                "sample batch, or take the branch out of the step"
            )
        if (largest := self._largest.get(storage_key(tensor))) is not None:
            # Sizes drawn at random, as augmentations do, are taken to be as large as they can get.
            number = largest if tensor.is_floating_point() else int(largest)
            return self.assume(number, "a number drawn at random", where)
        if tensor.is_floating_point():
            return self.assume(1.0, "a number read from a tensor", where)
        return self.assume(1, "a whole number read from a tensor", where)

    def _compared_draw(self, func: Any, args: Sequence[Any]) -> bool | None:
        """How a comparison ends if what is drawn is the largest that can be; None if unknown."""
        if func not in _COMPARISONS:
            return None
        numbers = [self._number(one) for one in args[:2]]
        if None in numbers:
            return None
        return bool(getattr(operator, func.overloadpacket.__name__)(*numbers))

    def _number(self, value: Any) -> float | None:
        if not isinstance(value, Tensor):
            return float(value)
        if (largest := self._largest.get(storage_key(value))) is not None:
            return largest
        real = self.of(value) if value.numel() == 1 else None
        with disable_current_modes():
            return float(real.item()) if real is not None else None

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        real_one, real_other = self.of(one), self.of(other)
        if real_one is not None and real_other is not None:
            with disable_current_modes():
                return torch.equal(real_one, real_other)
        return bool(self.assume(one.shape == other.shape, "equal()", _line_of_the_user()))

    def assume(self, value: Any, what: str, where: str = "") -> Any:
        """Use `value` for something that cannot be known, and note the assumption."""
        where = where or _line_of_the_user()
        note = f"{what} at {where} was taken to be {value}"
        self.assumed[note] += 1
        if self.assumed[note] > (MOST_TRUTHS if isinstance(value, bool) else MOST_NUMBERS):
            raise CannotRehearse(f"{where} seems to wait for a value that only real data can tell")
        return value

    def _bounded(self, func: Any, args: Sequence[Any]) -> Any:
        where = _line_of_the_user()
        shape = _WORST_CASE.get(func) or _WORST_CASE_ELSEWHERE.get(_full_name(func))
        if shape is None:
            raise CannotRehearse(
                f"{_name(func)} at {where} makes a tensor whose size only real data can tell; "
                "rehearse with a real sample batch"
            )
        rows = shape(*args)
        if self.picks_fewer:
            rows = (max(rows[0] - 1, 0), *rows[1:])
        self.selects_unknown[f"{_name(func)} at {where}"] = None
        self.assumed[f"{_name(func)} at {where} was taken to select everything: {rows}"] += 1
        dtype = args[0].dtype if func is aten.masked_select.default else torch.int64
        return torch.empty(rows, dtype=dtype, device="cpu")

    def _counts(self, bins: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """What `bincount` makes of unknown numbers: whoever names how many bins there are knows."""
        where = _line_of_the_user()
        self.assumed[f"bincount at {where} was taken to find no number above {bins - 1}"] += 1
        weights = args[1] if len(args) > 1 else kwargs.get("weights")
        dtype = torch.int64
        if weights is not None:
            dtype = weights.dtype if weights.is_floating_point() else torch.float64
        return torch.empty(bins, dtype=dtype, device="cpu")

    def _masked(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        """The part of a tensor that masks select; an unknown mask is taken to select everything."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in _MASKS:
                found.append(index)
                continue
            # As in PyTorch, the mask becomes indices first; they live until the result exists.
            places = torch.empty((self._count(index), index.dim()), dtype=torch.int64, device="cpu")
            found += places.unbind(1)
        selected: Tensor = aten.index.Tensor(tensor, found)
        return selected

    def _count(self, mask: Tensor) -> int:
        """How many entries a mask selects."""
        known = self.of(mask)
        if known is None:
            where = _line_of_the_user()
            self.selects_unknown[f"index at {where}"] = None
            self.assumed[f"index at {where} was taken to select everything"] += 1
            count = mask.numel()
        else:
            with disable_current_modes():
                count = int(known.count_nonzero())
        return max(count - self.picks_fewer, 0)

    def _ctc_loss(
        self, log_probs: Tensor, targets: Tensor, _: Any, target_lengths: Any
    ) -> tuple[Tensor, Tensor]:
        """The losses, and the table they are computed from, as wide as the longest target."""
        if isinstance(target_lengths, Tensor):
            real = self.of(target_lengths)
            with disable_current_modes():
                target_lengths = real.reshape(-1).tolist() if real is not None else None
        longest = max(target_lengths or (targets.shape[-1],))
        if target_lengths is None:
            where = _line_of_the_user()
            self.assumed[f"the targets of ctc_loss at {where} were taken to be {longest} long"] += 1
        batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
        table = batch, log_probs.shape[0], 2 * longest + 1
        return log_probs.new_empty(batch), log_probs.new_empty(table)

    def _pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """The rows of a packed sequence, as many as the lengths add up to."""
        real = self.of(lengths)
        if real is None:
            count, longest = input.shape[:2] if batch_first else (input.shape[1], input.shape[0])
            where = _line_of_the_user()
            self.assumed[f"sequences packed at {where} were all taken to be {longest} long"] += 1
            return pack(input, [longest] * count)
        with disable_current_modes():
            known: list[int] = real.tolist()
        return pack(input, known)

    # -- computing --------------------------------------------------------------------------------

    def _compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The op's real result, or None if an input is unknown; writes in place as the op does."""
        if not all(self._is_known(tensor) for tensor in tensors_in((args, kwargs))):
            return None
        if not self._write_to_copies(func, args, kwargs):
            return None
        real_args = self._real(args)
        real_kwargs = {name: self._real(value) for name, value in kwargs.items()}
        try:
            with disable_current_modes():
                return func(*real_args, **real_kwargs)
        except Exception:
            return None  # an op only a GPU has: its value stays unknown

    def _write_to_copies(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Have an op write to copies of the user's own tensors; False if one is too large for that.

        A loss is not copied for a rehearsal: it may hold a teacher, a queue, or a counter.
        """
        for tensor in written_by(func, args, kwargs):
            if isinstance(tensor, FakeTensor) or storage_key(tensor) in self._contents:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() > MOST_ELEMENTS * 8:
                return False
            with disable_current_modes():
                self._contents[storage_key(tensor)] = storage.cpu().clone()
        return True

    def _real(self, value: Any) -> Any:
        """The argument with real tensors in place of fake ones."""
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, (list, tuple)):
            return [self._real(item) for item in value]
        return value

    def _decided(self, func: Any, args: Sequence[Any], out: Tensor) -> Tensor | None:
        """A result that one known operand decides, as in "true or anything".

        This lets a text generation with a length limit end, although its tokens are not known.
        """
        deciding = _DECIDING.get(func)
        if deciding is None or out.dtype.is_floating_point:
            return None
        for value in args[:2]:
            real = self.of(value) if isinstance(value, Tensor) else None
            with disable_current_modes():
                if real is not None and real.numel() and bool((real == deciding).all()):
                    return torch.full(out.shape, deciding, dtype=out.dtype, device="cpu")
        return None

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        self.know(fake, value)
        return fake

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if func in _KEEPS_VALUES:
            return
        for tensor in written_by(func, args, kwargs):
            self.forget(storage_key(tensor))
            if not isinstance(tensor, FakeTensor):
                self._overwritten.add(storage_key(tensor))


_MASKS = (torch.bool, torch.uint8)
#: Ops that return the entries a mask selects.
_SELECTS = {aten.nonzero.default, aten.masked_select.default, aten.index.Tensor}
_COMPARISONS = {
    getattr(getattr(aten, name), overload)
    for name in ("lt", "le", "gt", "ge", "ne", "eq")
    for overload in ("Scalar", "Tensor")
}
_SCALARS = {aten._local_scalar_dense.default, aten.item.default}
#: Ops that draw random numbers, and the bounds they draw between; the upper one is exclusive.
_BOUNDS_OF_DRAWS: dict[str, Callable[..., tuple[float, float]]] = {
    "rand": lambda *_, **__: (0, 1),
    "rand.generator": lambda *_, **__: (0, 1),
    "rand_like": lambda *_, **__: (0, 1),
    "rand_like.generator": lambda *_, **__: (0, 1),
    "uniform_": lambda _, low=0.0, high=1.0, *__, **___: (low, high),
    "uniform": lambda _, low=0.0, high=1.0, *__, **___: (low, high),
    "randint": lambda high, *_, **__: (0, high),
    "randint.generator": lambda high, *_, **__: (0, high),
    "randint.low": lambda low, high, *_, **__: (low, high),
    "randint.low_generator": lambda low, high, *_, **__: (low, high),
    "randint_like": lambda _, high, *__, **___: (0, high),
    "randint_like.low_dtype": lambda _, low, high, *__, **___: (low, high),
    "random_.to": lambda _, high, *__, **___: (0, high),
    "random_.from": lambda _, low, high, *__, **___: (low, high),
    "randperm": lambda count, *_, **__: (0, count),
    "randperm.generator": lambda count, *_, **__: (0, count),
}


def bounds_of_draws(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[float, float] | None:
    """The smallest number that an op may draw, and what none reaches; None if that is unknown."""
    bounds = _BOUNDS_OF_DRAWS.get(_full_name(func))
    return bounds(*args, **(kwargs or {})) if bounds is not None else None


_CTC_LOSSES = {aten._ctc_loss.default, aten._ctc_loss.Tensor}
#: Ops that view their argument's memory although their schema does not say so.
_SILENT_VIEWS = {aten._unsafe_view.default, aten.lift.default}
#: By op: the operand value that decides the result alone.
_DECIDING: dict[Any, int] = {
    aten.bitwise_or.Tensor: 1,
    aten.logical_or.default: 1,
    aten.bitwise_and.Tensor: 0,
    aten.logical_and.default: 0,
    aten.mul.Tensor: 0,
}
#: The loss scaler's check writes "an infinity was found"; gradients are assumed finite.
_KEEPS_VALUES = {aten._amp_foreach_non_finite_check_and_unscale_.default}


@functools.cache
def _reads_values(func: Any) -> bool:
    """Whether the op's result, or its shape, depends on values."""
    return (
        func in _SCALARS
        or func is aten.equal.default
        or func in _CTC_LOSSES
        or func is aten._pack_padded_sequence.default
        or func in _WORST_CASE
        or _full_name(func) in _WORST_CASE_ELSEWHERE
        or torch.Tag.dynamic_output_shape in func.tags
    )


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether no result shares an argument's memory."""
    says_so = all(result.alias_info is None for result in schema_of(func).returns)
    return says_so and func not in _SILENT_VIEWS


def _minlength(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many bins a call of `bincount` asks for at least."""
    bins: int = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    return bins


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in indices)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is anything behind it: forward-mode derivatives that are zero have nothing."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return False
    return True


def _small(tensor: Tensor) -> bool:
    if tensor.device.type == "meta" and not isinstance(tensor, FakeTensor):
        return False
    most = MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else MOST_ELEMENTS
    return tensor.numel() <= most


def _largest_between(low: float, high: float, dtype: torch.dtype) -> float:
    """The largest number of this type that is below `high`, and not below `low`."""
    if not dtype.is_floating_point:
        return max(high - 1, low)
    with disable_current_modes():
        bounds = torch.tensor([high, low], dtype=dtype, device="cpu")
        return float(torch.nextafter(*bounds))


def _full_name(func: Any) -> str:
    """The op's name with a non-default overload and, for ops of other libraries, the library."""
    return str(func).removeprefix("aten.").removesuffix(".default")


def _name(func: Any) -> str:
    return _full_name(func).removeprefix("torchvision.").partition(".")[0]


def _line_of_the_user() -> str:
    """The innermost line of Python that belongs neither to torch nor to oomph.

    Where oomph's own step calls an optimizer, the line inside torch that reads the value is named.
    """
    torchs = ""
    frame = sys._getframe(1)
    while frame is not None:
        file, line = Path(frame.f_code.co_filename), frame.f_lineno
        if file.is_relative_to(_TORCH):
            if not torchs and file.name not in _MACHINERY:
                torchs = f"torch/{file.relative_to(_TORCH)}:{line}"
        elif file.is_relative_to(_OOMPH / "engine"):
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
