"""FP8 products: near the plain ones, for every operand, and only where there are kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.plans.choices import Choices
from oomph.techniques.fp8_products import FP8Products, can_multiply_in_fp8, multiply_in_fp8
from oomph.techniques.technique import SearchContext


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16)


def results(linear: nn.Linear, x: Tensor) -> list[Tensor]:
    given = x.clone().requires_grad_()
    out = linear(given)
    torch.manual_seed(2)
    out.backward(torch.randn_like(out))
    found = [out.detach(), given.grad, linear.weight.grad]
    if linear.bias is not None:
        found.append(linear.bias.grad)
    linear.zero_grad()
    return [one.float() for one in found if one is not None]


def error(one: Tensor, other: Tensor) -> float:
    return float(((one - other).norm() / other.norm()).detach())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_result_and_gradients_are_near_the_plain_ones(bias: bool) -> None:
    linear = layer(bias)
    x = torch.randn(2, 32, 64, dtype=torch.bfloat16)
    plain = results(linear, x)
    undo = multiply_in_fp8(linear)
    rounded = results(linear, x)
    errors = [error(one, other) for one, other in zip(rounded, plain, strict=True)]
    # Eight bits: some percent each, but for the bias, which is not multiplied.
    assert all(error < 0.1 for error in errors)
    assert all(error > 0.005 for error in errors[:3])
    undo()
    torch.testing.assert_close(results(linear, x), plain, rtol=0, atol=0)


@pytest.mark.parametrize("factor", [1e-6, 1e6], ids=["tiny", "huge"])
def test_scales_follow_the_numbers(factor: float) -> None:
    linear = layer(bias=False)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    multiply_in_fp8(linear)
    usual, scaled = linear(x).float(), linear(x * factor).float()
    assert error(scaled / factor, usual) < 0.05


def test_zeros_give_zeros() -> None:
    linear = layer(bias=False)
    multiply_in_fp8(linear)
    assert results(linear, torch.zeros(32, 64, dtype=torch.bfloat16))[0].abs().max() == 0


def test_under_autocast_fp32_weights_are_multiplied_in_fp8() -> None:
    linear = layer().float()
    x = torch.randn(32, 64)
    plain = linear(x)
    multiply_in_fp8(linear)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x)
    assert out.dtype is torch.bfloat16
    assert 0.005 < error(out.float(), plain) < 0.1


def test_rows_without_a_kernel_are_multiplied_as_ever() -> None:
    linear = layer()
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    plain = results(linear, x)
    multiply_in_fp8(linear)
    torch.testing.assert_close(results(linear, x), plain, rtol=0, atol=0)


def test_a_compiled_block_gives_the_same() -> None:
    torch._dynamo.reset()
    linear = layer()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    multiply_in_fp8(linear)
    eager = linear(x)
    compiled = torch.compile(linear, backend="aot_eager", dynamic=False)(x)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    torch._dynamo.reset()


def test_only_plain_linear_layers_of_fitting_sizes_are_taken() -> None:
    assert can_multiply_in_fp8(nn.Linear(32, 16))
    assert not can_multiply_in_fp8(nn.Linear(32, 17))
    assert not can_multiply_in_fp8(nn.Conv1d(16, 16, 1))
    assert not can_multiply_in_fp8(nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16))


@pytest.mark.parametrize(
    ("card", "choices", "reason"),
    [
        ("h200", {}, ""),
        ("h200", {"precision": "bf16"}, ""),
        ("a100-80gb", {}, "the card does not multiply in FP8"),
        (None, {}, "the card does not multiply in FP8"),
        ("h200", {"compiled": False}, "only compiled blocks are faster for it"),
        ("h200", {"precision": "fp32"}, "products are rounded from bf16 alone"),
        ("h200", {"precision": "fp16-mixed"}, "products are rounded from bf16 alone"),
    ],
)
def test_it_is_for_compiled_blocks_in_bf16_on_cards_that_have_it(
    card: str | None, choices: dict[str, Any], reason: str
) -> None:
    planned = Choices(**{"precision": "bf16-mixed", "compiled": True, **choices})
    context = SearchContext(gpu=find_gpu(card) if card else None, choices=planned)
    assert FP8Products().why_not(context) == reason
