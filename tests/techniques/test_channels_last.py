"""Channels last: the same numbers, another layout inside, and nothing left of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from switched_on import on
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oomph.engine.applying import apply_choices
from oomph.engine.step import train_step
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.techniques.channels_last import channels_last, takes_images

LAST = torch.channels_last


def is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


class Net(nn.Module):
    """Convolutions of many kinds, with what stands between them in nets."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 24, 1),
            nn.GroupNorm(4, 24),
            nn.GELU(),
            nn.ConvTranspose2d(24, 16, 2, 2),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).flatten(1))
        return logits


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 8, 8, generator=made, dtype=torch.float64), torch.arange(4)


def trained(choices: Choices, steps: int = 3) -> tuple[list[Tensor], nn.Module]:
    """The losses of some steps, and the model after them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job(model, nn.CrossEntropyLoss(), optimizer, batch())
    stage, undo = apply_choices(choices, job, model, optimizer, device_type="cpu")
    losses = [train_step(stage, batch()) for _ in range(steps)]
    undo()
    return losses, model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    images, labels = batch()
    nn.functional.cross_entropy(model(images), labels).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_losses_and_weights_are_those_of_the_untouched_job(how: str) -> None:
    losses, model = trained(Choices(techniques=on("channels_last"), blocks={"body": how}))
    plain_losses, plain = trained(Choices())
    torch.testing.assert_close(losses, plain_losses, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-10, atol=1e-12)


def test_gradients_are_those_of_the_untouched_job_in_its_layout() -> None:
    model = net()
    plain = gradients(model)
    for convolution in filter(takes_images, model.modules()):
        channels_last(convolution)
    last = gradients(model)
    torch.testing.assert_close(last, plain, rtol=1e-10, atol=1e-12)
    for name, gradient in last.items():
        # Where a side is 1, steps along it mean nothing.
        steps = [s for s, size in zip(gradient.stride(), gradient.shape, strict=True) if size > 1]
        own = [s for s, size in zip(plain[name].stride(), gradient.shape, strict=True) if size > 1]
        assert steps == own


def layouts(model: Net) -> list[bool]:
    seen: list[bool] = []
    hooks = [
        layer.register_forward_hook(lambda *call: seen.append(is_last(call[2])))
        for layer in list(model.body)[:-1]
    ]
    model(batch()[0])
    for hook in hooks:
        hook.remove()
    return seen


def test_only_the_first_convolution_copies_and_weights_stay() -> None:
    model = net()
    strides = [p.stride() for p in model.parameters()]
    assert not any(layouts(model))
    undos = [channels_last(one) for one in filter(takes_images, model.modules())]
    assert len(undos) == 4
    assert all(layouts(model))
    assert [p.stride() for p in model.parameters()] == strides
    images = batch()[0].contiguous(memory_format=LAST)
    given: list[int] = []
    convolution = nn.Conv2d(3, 4, 1).double()
    forward = type(convolution)._conv_forward

    def watch(input: Tensor, *rest: Any) -> Tensor:
        given.append(input.data_ptr())
        return forward(convolution, input, *rest)

    convolution._conv_forward = watch  # type: ignore[method-assign]
    channels_last(convolution)
    convolution(images)
    assert given == [images.data_ptr()]


def test_undone_nothing_is_left() -> None:
    model = net()
    convolution = model.body[0]
    before = set(vars(convolution))
    undo = channels_last(convolution)
    assert "forward" in vars(convolution)
    undo()
    undo()
    assert set(vars(convolution)) == before
    assert not any(layouts(model))


def test_one_image_without_a_batch_is_left_alone() -> None:
    convolution = nn.Conv2d(3, 4, 3)
    image = torch.randn(3, 8, 8)
    plain = convolution(image)
    channels_last(convolution)
    assert torch.equal(convolution(image), plain)


def test_a_transposed_convolution_keeps_its_own_arguments() -> None:
    convolution = nn.ConvTranspose2d(4, 4, 3, stride=2)
    channels_last(convolution)
    assert convolution(torch.randn(1, 4, 3, 3), output_size=[8, 8]).shape == (1, 4, 8, 8)


class Scaled(nn.Conv2d):
    """A convolution that computes in its own way."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, 2 * self.weight, self.bias)


class Named(nn.Conv2d):
    """One that only has another name."""


def test_only_convolutions_that_compute_as_pytorchs_own_are_taken() -> None:
    taken = [nn.Conv2d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1), Named(1, 1, 1)]
    left = [nn.Conv1d(1, 1, 1), nn.Conv3d(1, 1, 1), Scaled(1, 1, 1), nn.Linear(1, 1)]
    assert all(map(takes_images, taken))
    assert not any(map(takes_images, left))
    channels_last(taken[0])
    assert not takes_images(taken[0])


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_block_gives_the_same(recomputed: bool) -> None:
    torch._dynamo.reset()
    body = net().body[:8]
    for convolution in filter(takes_images, body.modules()):
        channels_last(convolution)
    images = batch()[0]
    eager = body(images)
    run = torch.compile(body, backend="aot_eager", dynamic=False, fullgraph=True)
    if recomputed:
        run = torch.compile(
            lambda x: checkpoint(body, x, use_reentrant=False), backend="aot_eager", dynamic=False
        )
    compiled = run(images)
    torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)
    assert is_last(compiled)
    compiled.sum().backward()
    torch._dynamo.reset()
