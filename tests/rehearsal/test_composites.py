"""Ops that CUDA composes of other kernels than the CPU does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.hardware import find_gpu
from oomph.rehearsal.world import pretend


def made_by_linear(x: Tensor, *bias: Tensor) -> list[str]:
    """The ops that take memory in a linear layer of 8 to 4 numbers."""
    with pretend(find_gpu("h200")) as recorder:
        weight = torch.empty(4, 8, device="cuda")
        given = x.to("cuda").as_strided(x.shape, x.stride())
        on_card = [one.to("cuda") for one in bias]
        first = len(recorder.timeline.blocks)
        out = F.linear(given, weight, *on_card)
        assert out.shape == (*x.shape[:-1], 4)
        made = recorder.timeline.blocks[first:]
        return [block.op for block in made if block.category != "workspace"]


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 3, 1, 8)])
def test_a_bias_is_added_by_the_product_itself(shape: tuple[int, ...]) -> None:
    assert made_by_linear(torch.ones(shape), torch.ones(4)) == ["aten.addmm.default"]


def test_so_it_is_to_the_rows_of_a_matrix_that_lies_the_other_way() -> None:
    assert made_by_linear(torch.ones(8, 6).t(), torch.ones(4)) == ["aten.addmm.default"]


def test_without_a_bias_there_is_a_product_alone() -> None:
    assert made_by_linear(torch.ones(2, 3, 8)) == ["aten.mm.default"]


def test_a_bias_of_more_dimensions_is_added_afterwards_and_in_place() -> None:
    assert made_by_linear(torch.ones(2, 3, 8), torch.ones(3, 4)) == ["aten.mm.default"]
