"""A quick fake is the fake tensor that PyTorch would make."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomph.rehearsal.quick_fakes import quick_fake

aten = torch.ops.aten
CPU = {"device": torch.device("cpu")}

VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten._unsafe_view.default, ([-1],)),
    (aten.alias.default, ()),
    (aten.as_strided.default, ((5,), (2,), 3)),
    (aten.detach.default, ()),
    (aten.expand.default, ([2, 4, 6],)),
    (aten.permute.default, ([1, 0],)),
    (aten.select.int, (0, 2)),
    (aten.slice.Tensor, (1, 2, 5)),
    (aten.t.default, ()),
    (aten.transpose.int, (0, 1)),
    (aten.unsqueeze.default, (1,)),
    (aten.view.default, ([-1],)),
    (aten.view.dtype, (torch.int32,)),
]
NEW: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.empty.memory_format, ([3, 2],), CPU),
    (aten.empty_strided.default, ([3, 2], [1, 3]), {"dtype": torch.bfloat16, **CPU}),
    (aten.zeros.default, ([],), {"dtype": torch.float64, **CPU}),
    (aten.full.default, ([3], 0.5), {"dtype": torch.bfloat16, **CPU}),
]
COPIES: list[tuple[Any, dict[str, Any]]] = [
    (aten._to_copy.default, {"dtype": torch.float16}),
    (aten._to_copy.default, {"memory_format": torch.contiguous_format, **CPU}),
    (aten.clone.default, {}),
    (aten.clone.default, {"memory_format": torch.contiguous_format}),
    (aten.empty_like.default, {}),
    (aten.zeros_like.default, {"dtype": torch.int64, **CPU}),
]
LAYOUTS: list[Callable[[], Tensor]] = [
    lambda: torch.empty(4, 6),
    lambda: torch.empty(4, 6).t(),
    lambda: torch.empty(4, 6)[:, 1:3],
    lambda: torch.empty(1, 4, 1),
    lambda: torch.empty(4, 6).unsqueeze(1).transpose(0, 2),
    lambda: torch.empty(4, 1).expand(4, 6),
    lambda: torch.empty(0, 3),
    lambda: torch.empty(()),
]
TENSORS = [
    *LAYOUTS,
    lambda: torch.empty(6),
    lambda: torch.empty(4, 6, dtype=torch.bfloat16),
    lambda: torch.empty(4, 6, dtype=torch.int64),
    lambda: torch.empty(3, 4, 6),
]
NUMBERS: list[Callable[[], Any]] = [lambda: 2, lambda: 0.5, lambda: 1j]
#: Ops that compute elements from those at the same place, and what their second operand can be.
POINTWISE: list[tuple[Any, list[Callable[[], Any] | None]]] = [
    (aten.add.Tensor, [*TENSORS, *NUMBERS]),
    (aten.mul.Scalar, [*NUMBERS]),
    (aten.mul.Tensor, [*TENSORS, *NUMBERS]),
    (aten.neg.default, [None]),
    (aten.pow.Tensor_Scalar, [*NUMBERS]),
    (aten.rsqrt.default, [None]),
    (aten.silu.default, [None]),
]


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as active:
        yield active


def seen(tensor: Tensor) -> tuple[Any, ...]:
    assert isinstance(tensor, FakeTensor)
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.fake_device,
        tensor.requires_grad,
        tensor.untyped_storage().nbytes(),
    )


@pytest.mark.parametrize(("func", "rest"), VIEWS, ids=lambda value: str(value))
def test_a_view_shows_the_same_memory_in_the_same_way(
    mode: FakeTensorMode, func: Any, rest: tuple[Any, ...]
) -> None:
    tensor = torch.empty(4, 6)
    quick = quick_fake(func, (tensor, *rest), {})
    assert seen(quick) == seen(func(tensor, *rest))
    assert quick.untyped_storage()._cdata == tensor.untyped_storage()._cdata


@pytest.mark.parametrize(("func", "args", "kwargs"), NEW, ids=lambda value: str(value))
def test_a_new_tensor_is_the_one_that_was_asked_for(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert seen(quick_fake(func, args, kwargs)) == seen(func(*args, **kwargs))


@pytest.mark.parametrize(("func", "kwargs"), COPIES, ids=lambda value: str(value))
def test_a_copy_has_memory_of_its_own(
    mode: FakeTensorMode, func: Any, kwargs: dict[str, Any]
) -> None:
    for make in LAYOUTS:
        tensor = make()
        quick = quick_fake(func, (tensor,), kwargs)
        assert seen(quick) == seen(func(tensor, **kwargs))
        assert quick.untyped_storage()._cdata != tensor.untyped_storage()._cdata


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_it_has_all_that_a_fake_tensor_has(mode: FakeTensorMode) -> None:
    tensor = torch.empty(4, 6)
    for _ in range(2):  # made by PyTorch, then by what was learned from that
        quick = quick_fake(aten.neg.default, (tensor,), {})
        assert vars(quick) == vars(aten.neg.default(tensor))
        assert copy.deepcopy(quick).shape == (4, 6)


@pytest.mark.parametrize(("func", "others"), POINTWISE, ids=lambda value: str(value)[:20])
def test_computed_it_is_what_pytorch_computes_or_left_to_it(
    mode: FakeTensorMode, func: Any, others: list[Callable[[], Any] | None]
) -> None:
    quick_ones = 0
    for first, other in itertools.product(TENSORS, others):
        args = (first(), other()) if other is not None else (first(),)
        quick = quick_fake(func, args, {})
        if quick is not NotImplemented:
            quick_ones += 1
            assert seen(quick) == seen(func(*args))
    assert quick_ones


def test_a_number_whose_type_is_not_named_is_left_to_pytorch(mode: FakeTensorMode) -> None:
    assert quick_fake(aten.full.default, ([3], 1), CPU) is NotImplemented


def test_a_product_of_matrices_is_the_one_pytorch_makes(mode: FakeTensorMode) -> None:
    one, other = torch.empty(6, 4).t(), torch.empty(6, 5)
    assert seen(quick_fake(aten.mm.default, (one, other), {})) == seen(one.mm(other))


@pytest.mark.parametrize(
    "other", [torch.float32, torch.bfloat16, torch.int64], ids=lambda dtype: str(dtype)
)
def test_matrices_that_do_not_fit_are_left_to_pytorch(
    mode: FakeTensorMode, other: torch.dtype
) -> None:
    pair = torch.empty(4, 6), torch.empty(4, 5, dtype=other)
    assert quick_fake(aten.mm.default, pair, {}) is NotImplemented


@pytest.mark.parametrize("func", [aten.add_.Tensor, aten.copy_.default, aten.mul_.Tensor], ids=str)
def test_what_is_written_to_is_given_back(mode: FakeTensorMode, func: Any) -> None:
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), ((4, 6), ())):
        tensor, other = torch.empty(4, 6), torch.empty(shape, dtype=dtype)
        assert quick_fake(func, (tensor, other), {}) is tensor
        assert func(tensor, other) is tensor


def test_writing_what_does_not_fit_is_left_to_pytorch(mode: FakeTensorMode) -> None:
    whole, floats = torch.empty(4, dtype=torch.int64), torch.empty(4)
    assert quick_fake(aten.add_.Tensor, (whole, floats), {}) is NotImplemented
    assert quick_fake(aten.copy_.default, (floats, torch.empty(3)), {}) is NotImplemented
    assert quick_fake(aten.mul_.Tensor, (floats, 2.0), {}) is NotImplemented


def test_an_optimizer_that_writes_to_lists_gives_nothing_back(mode: FakeTensorMode) -> None:
    lists = [[torch.empty(3)] for _ in range(4)]
    args = (*lists, [], [torch.empty(())])
    assert quick_fake(aten._fused_adamw_.default, args, {}) is None
    known = (*lists, [], [torch.tensor(3.0)])
    assert quick_fake(aten._fused_adamw_.default, known, {}) is NotImplemented


def test_counters_that_are_fake_need_not_be_counted(mode: FakeTensorMode) -> None:
    assert quick_fake(aten._foreach_add_.Scalar, ([torch.empty(())], 1), {}) is None


def test_what_is_known_of_a_constant_is_left_to_pytorch(mode: FakeTensorMode) -> None:
    constant = torch.tensor(3.0)
    assert isinstance(constant, FakeTensor)
    assert constant.constant is not None
    assert quick_fake(aten.detach.default, (constant,), {}) is NotImplemented
    assert quick_fake(aten._to_copy.default, (constant,), {}) is NotImplemented
    assert quick_fake(aten._foreach_add_.Scalar, ([constant], 1), {}) is NotImplemented


def test_other_ops_are_left_to_pytorch(mode: FakeTensorMode) -> None:
    assert quick_fake(aten.sin.default, (torch.empty(2),), {}) is NotImplemented


def test_real_tensors_are_left_to_pytorch() -> None:
    real = torch.ones(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert quick_fake(aten.detach.default, (real,), {}) is NotImplemented


def test_without_a_fake_mode_nothing_is_faked() -> None:
    assert quick_fake(aten.empty.memory_format, ([2],), CPU) is NotImplemented
