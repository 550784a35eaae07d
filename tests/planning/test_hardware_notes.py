"""What is said about sizes that Tensor Cores do not like."""

from __future__ import annotations

import pytest
from torch import nn

from oomph.gpus import find_gpu
from oomph.planning.hardware_notes import size_notes


def odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 64), nn.Linear(64, 50257))


def test_the_largest_layer_with_an_odd_size_is_named_with_the_next_friendly_size() -> None:
    (note,) = size_notes(odd_model(), "bf16-mixed", find_gpu("h200"))
    assert note.startswith("2 has a size of 50,257")
    assert "50,264" in note
    assert "2 more sizes" in note


def test_friendly_sizes_are_not_mentioned() -> None:
    assert size_notes(nn.Linear(64, 128), "bf16-mixed", find_gpu("h200")) == []


@pytest.mark.parametrize(
    ("precision", "gpu"), [("fp32", "h200"), ("fp16-mixed", "p100-16gb"), ("bf16-mixed", None)]
)
def test_only_half_precision_on_tensor_cores_is_told(precision: str, gpu: str | None) -> None:
    card = find_gpu(gpu) if gpu is not None else None
    assert size_notes(odd_model(), precision, card) == []
