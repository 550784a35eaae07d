"""Gaps in attention's biases: closed while somebody wants it, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from switched_on import on
from torch import Tensor
from torch.nn import functional as F

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.cuda import attention
from oomph.rehearsal.cuda.attention import Kernel, choose_kernel
from oomph.rehearsal.phases import rehearse
from oomph.techniques.attention_rows import close_gaps, closes_gaps, gaps_left, gaps_noticed

PLAIN = F.scaled_dot_product_attention
HEADS, LENGTH = 3, 5


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is PLAIN


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What attention itself is given."""
    seen: list[Any] = []

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        return PLAIN(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return seen


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    shape = (2, HEADS, LENGTH, 4)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def with_gaps() -> Tensor:
    """A bias as it is looked up: by query, key and head."""
    torch.manual_seed(1)
    return torch.randn(LENGTH, LENGTH, HEADS, dtype=torch.float64).permute(2, 0, 1).unsqueeze(0)


def results(bias: Tensor) -> list[Tensor]:
    leaves = [*operands(), bias.detach().clone(memory_format=torch.preserve_format)]
    leaves[-1].requires_grad_()
    out = F.scaled_dot_product_attention(*leaves)
    out.backward(torch.ones_like(out))
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_result_and_all_gradients_are_the_same() -> None:
    expected = results(with_gaps())
    undo = close_gaps()
    found = results(with_gaps())
    undo()
    assert len(found) == 5
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by place"])
def test_attention_is_given_rows(given: list[Any], by_name: bool) -> None:
    bias = with_gaps()
    undo = close_gaps()
    if by_name:
        F.scaled_dot_product_attention(*operands(), attn_mask=bias, scale=2.0)
    else:
        F.scaled_dot_product_attention(*operands(), bias, scale=2.0)
    undo()
    [(args, kwargs)] = given
    mask = kwargs["attn_mask"] if by_name else args[3]
    assert mask.is_contiguous()
    assert torch.equal(mask, bias)
    assert kwargs["scale"] == 2.0


def test_what_is_repeated_is_copied_once(given: list[Any]) -> None:
    bias = with_gaps().expand(2, -1, -1, -1)
    undo = close_gaps()
    F.scaled_dot_product_attention(*operands(), bias)
    undo()
    mask = given[0][0][3]
    assert mask.stride() == (0, LENGTH * LENGTH, LENGTH, 1)
    assert torch.equal(mask, bias)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64),
        torch.ones(LENGTH, 1, dtype=torch.bool).expand(-1, LENGTH),  # one number, repeated
        torch.ones(LENGTH, 2, dtype=torch.bool)[:, :1],
    ],
    ids=["none", "rows", "repeated", "one key"],
)
def test_all_else_goes_through_as_it_is(given: list[Any], mask: Tensor | None) -> None:
    undo = close_gaps()
    F.scaled_dot_product_attention(*operands(), mask)
    undo()
    assert given[0][0][3] is mask


def test_gaps_are_closed_until_the_last_one_has_enough_in_any_order() -> None:
    first, second = close_gaps(), close_gaps()
    first()
    first()
    assert closes_gaps()
    second()
    assert not closes_gaps()


def test_whoever_replaces_it_as_well_is_left_alone() -> None:
    undo = close_gaps()
    ours = F.scaled_dot_product_attention

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        return ours(*args, **kwargs)

    F.scaled_dot_product_attention = theirs
    try:
        undo()
        assert F.scaled_dot_product_attention is theirs
        again = close_gaps()
        results(with_gaps())
        again()
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = PLAIN


def test_gaps_are_noticed_and_nothing_else_is() -> None:
    noticed: list[int] = []
    with gaps_noticed(lambda: noticed.append(1)):
        F.scaled_dot_product_attention(*operands(), with_gaps().contiguous())
        assert not noticed
        results(with_gaps())
    assert noticed == [1]


def test_what_is_closed_elsewhere_is_open_inside_and_closed_again_outside() -> None:
    undo = close_gaps()
    with gaps_left():
        assert not closes_gaps()
        close_gaps()
        assert closes_gaps()
    assert closes_gaps()
    undo()


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Embedding(64, 8)
        self.out = torch.nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(64, device=x.device)
        bias = self.bias((at[:, None] - at).abs()).permute(2, 0, 1).unsqueeze(0)
        heads = self.out(x).unflatten(-1, (8, 64)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, bias)


def rehearsed(kernels: list[Kernel], *, rows: bool) -> list[Kernel]:
    """The kernels of one step."""
    model = Attending()
    job = Job(
        model,
        lambda model, batch: model(batch).sum(),
        torch.optim.SGD(model.parameters()),
        torch.ones(4, 64, 512),
    )
    choices = Choices(precision="bf16-mixed", techniques=on("attention_rows") if rows else {})
    kernels.clear()
    rehearse(job, find_gpu("h200"), ("build", "first step"), choices=choices)
    return list(kernels)


def test_a_rehearsal_runs_the_fused_kernel_and_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels: list[Kernel] = []

    def choose(*args: Any) -> Kernel:
        kernels.append(choose_kernel(*args))
        return kernels[-1]

    monkeypatch.setattr(attention, "choose_kernel", choose)
    assert rehearsed(kernels, rows=False) == [Kernel.MATH]
    assert rehearsed(kernels, rows=True) == [Kernel.EFFICIENT]
    undo = close_gaps()  # a run of the user's goes on beside the rehearsal
    assert rehearsed(kernels, rows=False) == [Kernel.MATH]
    assert closes_gaps()
    undo()
