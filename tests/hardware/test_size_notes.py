"""What is said about sizes that Tensor Cores do not like."""

from __future__ import annotations

import pytest
from torch import nn

from oomph.hardware import find_gpu
from oomph.hardware.size_notes import odd_sizes, size_notes


def odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 64), nn.Linear(64, 50257))


def test_the_largest_layer_with_an_odd_size_is_named_with_the_next_friendly_size() -> None:
    (note,) = size_notes(odd_sizes(odd_model(), "bf16-mixed", find_gpu("h200")))
    assert note.startswith("2 has a size of 50,257")
    assert "50,264" in note
    assert "2 more sizes" in note


def test_friendly_sizes_are_not_mentioned() -> None:
    assert odd_sizes(nn.Linear(64, 128), "bf16-mixed", find_gpu("h200")) == []
    assert size_notes([]) == []


def test_a_head_that_is_padded_is_not_mentioned_but_for_its_input() -> None:
    h200 = find_gpu("h200")
    (note,) = size_notes(odd_sizes(odd_model(), "bf16-mixed", h200), padded_head="2")
    assert "50,257" not in note and "1 more sizes" in note
    odd_input = nn.Sequential(nn.Linear(30, 50257))
    (note,) = size_notes(odd_sizes(odd_input, "bf16-mixed", h200), padded_head="0")
    assert note.startswith("0 has a size of 30:")


@pytest.mark.parametrize(
    ("precision", "gpu"), [("fp32", "h200"), ("fp16-mixed", "p100-16gb"), ("bf16-mixed", None)]
)
def test_only_half_precision_on_tensor_cores_is_told(precision: str, gpu: str | None) -> None:
    card = find_gpu(gpu) if gpu is not None else None
    assert odd_sizes(odd_model(), precision, card) == []
