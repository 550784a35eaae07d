"""What kernels over images take on a GPU beyond their results, in both layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.layouts import has_channels_last
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.timeline import Block
from oomph.rehearsal.world import pretend

H200 = find_gpu("h200")
LAST = torch.channels_last
BF16 = torch.bfloat16


def taken(recorder: Recorder, op: str, run: Callable[[], object]) -> list[Block]:
    """The blocks of an op that are gone while its results are still there."""
    start = len(recorder.timeline.blocks)
    results = run()
    made = [block for block in recorder.timeline.blocks[start:] if op in block.op]
    gone = [block for block in made if block.death is not None]
    del results
    return gone


def images(channels: int, size: int, *, last: bool, batch: int = 8) -> Tensor:
    made = torch.empty(batch, channels, size, size, dtype=BF16, device="cuda")
    return made.contiguous(memory_format=LAST) if last else made


def convolution(out: int, kernel: int) -> nn.Conv2d:
    return nn.Conv2d(64, out, kernel, padding=kernel // 2, bias=False, dtype=BF16, device="cuda")


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels last"])
def test_a_convolution_converts_images_or_copies_its_weight(last: bool) -> None:
    with pretend(H200) as recorder:
        layer, x = convolution(32, 3), images(64, 16, last=last)
        weight, moved = layer.weight.nbytes, 8 * (64 + 32) * 16 * 16 * 2
        (burst,) = taken(recorder, "aten.convolution", lambda: layer(x))
        assert has_channels_last(layer(x)) is last
    assert burst.size == (weight if last else moved + weight + 16)


def test_a_weight_of_one_pixel_has_both_layouts() -> None:
    with pretend(H200) as recorder:
        layer, x = convolution(32, 1), images(64, 16, last=True)
        assert not taken(recorder, "aten.convolution", lambda: layer(x))


def test_a_plain_gradient_is_copied_to_the_layout_of_the_images() -> None:
    with pretend(H200) as recorder:
        layer, x = convolution(32, 1), images(64, 16, last=True)
        out = layer(x)
        for gradient in (images(32, 16, last=True), images(32, 16, last=False)):
            backward = functools.partial(torch.autograd.grad, retain_graph=True)
            run = functools.partial(backward, out, layer.weight, gradient)
            scratch = taken(recorder, "convolution_backward", run)
            copied = [block for block in scratch if block.size == gradient.nbytes]
            assert len(copied) == gradient.is_contiguous()


def test_a_weights_gradient_is_given_to_it_in_its_own_layout() -> None:
    with pretend(H200):
        layer = convolution(32, 3)
        layer(images(64, 16, last=True)).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.is_contiguous()


def test_batch_norm_sums_in_parts_with_channels_last() -> None:
    with pretend(H200) as recorder:
        norm = nn.BatchNorm2d(64, device="cuda")
        plain = taken(recorder, "batch_norm", lambda: norm(images(64, 56, last=False)))
        last = taken(recorder, "batch_norm", lambda: norm(images(64, 56, last=True)))
        small = taken(recorder, "batch_norm", lambda: norm(images(64, 4, last=True)))
    # 25,088 pixels in groups of 256, four numbers of each channel; a counter for 32 channels.
    assert [block.size for block in last] == [4 * 64 * 98 * 4, 2 * 4]
    assert plain == small == []


def test_group_norm_gives_up_channels_last_on_a_gpu() -> None:
    with pretend(H200) as recorder:
        norm, x = nn.GroupNorm(4, 64, device="cuda"), images(64, 16, last=True).requires_grad_()
        scratch = taken(recorder, "native_group_norm", lambda: norm(x))
        assert x.nbytes in [block.size for block in scratch], "it is copied first"
        out = norm(x)
        assert not has_channels_last(out)
        (gradient,) = torch.autograd.grad(out, x, images(64, 16, last=True))
        assert not has_channels_last(gradient)
