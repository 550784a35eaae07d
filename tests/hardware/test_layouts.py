"""Which images have channels last, and which convolutions convert those that have not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oomph.hardware.timing.layouts import has_channels_last, is_converted, is_converted_for_weight

LAST = torch.channels_last


def half(*shape: int, last: bool = False) -> Tensor:
    made = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return made.contiguous(memory_format=LAST) if last else made


def test_the_layout_is_read_off_strides_as_pytorch_does() -> None:
    assert has_channels_last(half(2, 8, 4, 4, last=True))
    assert not has_channels_last(half(2, 8, 4, 4))
    assert not has_channels_last(half(8, 8, 1, 1)), "both at once is PyTorch's own"
    assert not has_channels_last(half(2, 8, 4)) and not has_channels_last(half(8))


@pytest.mark.parametrize(
    ("images", "weight", "stride", "groups", "converted"),
    [
        pytest.param(half(2, 64, 28, 28), half(64, 64, 3, 3), 1, 1, True, id="3 × 3"),
        pytest.param(half(2, 64, 28, 28), half(64, 64, 1, 1), 1, 1, False, id="a product"),
        pytest.param(half(2, 64, 28, 28), half(64, 64, 1, 1), 2, 1, True, id="with steps"),
        pytest.param(half(2, 64, 7, 7), half(64, 64, 1, 1), 1, 1, True, id="small"),
        pytest.param(half(2, 3, 28, 28), half(64, 3, 1, 1), 1, 1, True, id="odd channels"),
        pytest.param(half(2, 1, 28, 28), half(64, 1, 3, 3), 1, 1, False, id="one channel"),
        pytest.param(half(2, 64, 28, 28), half(64, 1, 3, 3), 1, 64, False, id="by channels"),
        pytest.param(half(2, 64, 28, 28, last=True), half(64, 64, 3, 3), 1, 1, False, id="last"),
    ],
)
def test_convolutions_convert_but_for_products_and_channels_last(
    images: Tensor, weight: Tensor, stride: int, groups: int, converted: bool
) -> None:
    assert is_converted(images, weight, [stride, stride], groups) is converted


def test_for_a_products_weight_images_are_converted_where_that_takes_less() -> None:
    small, large = half(128, 1024, 14, 14), half(128, 64, 56, 56)
    assert is_converted_for_weight(small, half(512, 1024, 1, 1), half(128, 512, 14, 14))
    assert not is_converted_for_weight(large, half(64, 64, 1, 1), half(128, 64, 56, 56))
