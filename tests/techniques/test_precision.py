"""Precision: which region autocast opens, with and without its copies, and flags put back."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from oomph.techniques.autocast import autocast, make_scaler, use_tf32


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)]
)
def test_a_mixed_precision_multiplies_in_half(precision: str, dtype: torch.dtype) -> None:
    with autocast(precision, "cpu"):
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype is dtype


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_other_precisions_have_no_region(precision: str) -> None:
    assert isinstance(autocast(precision, "cpu"), contextlib.nullcontext)


def test_only_fp16_needs_a_scaler() -> None:
    assert make_scaler("fp16-mixed", "cpu") is not None
    assert all(make_scaler(other, "cpu") is None for other in ("fp32", "bf16-mixed", "bf16"))


def use_a_weight(times: int, *, cast_cache: bool) -> tuple[int, Tensor, Tensor]:
    """How many half-precision copies of it there are, what comes out, and its gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    copies: set[int] = set()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bfloat16 and tensor.shape == (4, 4):
            copies.add(tensor.untyped_storage().data_ptr())
            kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast("bf16-mixed", "cpu", cast_cache=cast_cache),
    ):
        out = torch.ones(2, 4, requires_grad=True)
        for _ in range(times):
            out = layer(out)
    out.sum().backward()
    assert layer.weight.grad is not None
    return len(copies), out, layer.weight.grad


def test_without_its_cache_autocast_gives_the_same_numbers_to_the_bit() -> None:
    kept, dropped = (use_a_weight(1, cast_cache=cache) for cache in (True, False))
    torch.testing.assert_close(dropped, kept, rtol=0, atol=0)


def test_of_a_weight_that_is_used_twice_gradients_are_then_added_in_fp32() -> None:
    one_copy, out, in_half = use_a_weight(2, cast_cache=True)
    two_copies, same_out, in_full = use_a_weight(2, cast_cache=False)
    assert (one_copy, two_copies) == (1, 2)
    assert torch.equal(same_out, out)
    assert torch.equal(in_half.bfloat16().float(), in_half)
    torch.testing.assert_close(in_full.bfloat16().float(), in_half, rtol=2**-7, atol=0)
    assert not torch.equal(in_full, in_half)


def test_tf32_is_switched_on_and_put_back() -> None:
    def flags() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = flags()
    undo = use_tf32()
    assert flags() == ("high", True)
    undo()
    assert flags() == before
