"""A quick fake is the fake tensor that PyTorch would make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomph.rehearsal.quick_fakes import quick_fake

aten = torch.ops.aten
CPU = {"device": torch.device("cpu")}

VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
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
]
COPIES: list[tuple[Any, dict[str, Any]]] = [
    (aten._to_copy.default, {"dtype": torch.float16}),
    (aten._to_copy.default, {"memory_format": torch.contiguous_format, **CPU}),
    (aten.empty_like.default, {}),
    (aten.zeros_like.default, {"dtype": torch.int64, **CPU}),
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
    tensor = torch.empty(4, 6).t()
    quick = quick_fake(func, (tensor,), kwargs)
    assert seen(quick) == seen(func(tensor, **kwargs))
    assert quick.untyped_storage()._cdata != tensor.untyped_storage()._cdata


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
