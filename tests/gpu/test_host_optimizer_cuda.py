"""An optimizer on the host of a real card: the plain bits, whatever is late. Needs a GPU."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Collection
from typing import Any

import pytest
import torch
from host_training import Recipe, Training, adamw, nearly, plain, same_bits, two_groups
from late_link import CUDA, PLACES, LateLink
from torch import nn

from oomph.memory.cuda_link import CudaLink
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS = 5


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)


RECIPES = {
    "plain": Recipe(device="cuda", make_optimizer=fused),
    "clipped": Recipe(device="cuda", make_optimizer=fused, clip_norm=0.3),
    "foreach, clipped": Recipe(device="cuda", make_optimizer=adamw, clip_norm=0.3),
    "in parts, clipped": Recipe(device="cuda", make_optimizer=fused, clip_norm=0.3, parts=2),
    "bf16, clipped": Recipe(
        device="cuda", make_optimizer=fused, clip_norm=0.3, dtype=torch.bfloat16
    ),
    "masters": Recipe(device="cuda", make_optimizer=fused, masters=True),
    "masters, clipped": Recipe(device="cuda", make_optimizer=fused, clip_norm=0.3, masters=True),
    "momentum": Recipe(
        device="cuda",
        make_optimizer=lambda model: torch.optim.SGD(two_groups(model), lr=1e-2, momentum=0.9),
    ),
    "scaled": Recipe(
        device="cuda",
        make_optimizer=adamw,
        scaler=lambda: torch.amp.GradScaler("cuda", init_scale=2.0**126, growth_interval=2),
    ),
    "fp64": Recipe(device="cuda", make_optimizer=fused, dtype=torch.float64),
    "fp64, in parts, clipped": Recipe(
        device="cuda", make_optimizer=fused, dtype=torch.float64, clip_norm=0.3, parts=2
    ),
}


@functools.cache
def plainly(name: str) -> Training:
    return plain(RECIPES[name], STEPS)


def on_host(name: str, link: CudaLink, **placement: Any) -> Training:
    training = Training(recipe=RECIPES[name])
    training.go_to_host(link, **placement)
    return training.run(STEPS)


@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize("name", ["plain", "clipped", "in parts, clipped", "masters, clipped"])
def test_streamed_steps_have_the_plain_bits_whatever_is_late(
    name: str, late: Collection[str], links: list[CudaLink]
) -> None:
    links.append(LateLink(late))
    same_bits(on_host(name, links[0], keep_gradients=2000), plainly(name))


@pytest.mark.parametrize("name", RECIPES)
def test_streamed_steps_have_the_plain_bits(name: str, links: list[CudaLink]) -> None:
    links.append(LateLink())
    same_bits(on_host(name, links[0], keep_gradients=2000), plainly(name))


@pytest.mark.parametrize("late", [(), PLACES], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_state_that_stays_changes_no_bit(
    name: str, late: Collection[str], links: list[CudaLink]
) -> None:
    links.append(LateLink(late))
    same_bits(on_host(name, links[0], keep_gradients=2000, gpu_share=0.5), plainly(name))


def nearly_as_a_whole(one: Training, other: Training, tolerance: float = 1e-6) -> None:
    """Losses differ by no more than this part of them, and so do all weights together.

    Host and card round differently. A bias that began at nothing is made of updates alone, and
    Adam's are of one size however small the gradient: by itself it may differ by more.
    """
    for ours, theirs in zip(one.losses, other.losses, strict=True):
        assert abs(ours - theirs) <= tolerance * abs(theirs)
    ours_all, theirs_all = (
        torch.cat([weight.double().flatten() for weight in training.weights().values()])
        for training in (one, other)
    )
    difference = float((ours_all - theirs_all).norm() / theirs_all.norm())
    assert difference <= tolerance


@pytest.mark.parametrize("late", [(), PLACES], ids=str)
@pytest.mark.parametrize("name", ["plain", "clipped", "in parts, clipped"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_steps_of_the_host_are_nearly_the_plain_ones(
    share: float, name: str, late: Collection[str], links: list[CudaLink]
) -> None:
    links.append(LateLink(late))
    trained = on_host(name, links[0], host_share=share, keep_gradients=1000)
    nearly_as_a_whole(trained, plainly(name))


@pytest.mark.parametrize("name", ["fp64", "fp64, in parts, clipped"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_where_nothing_is_rounded_each_weight_of_the_host_is_the_plain_one(
    share: float, name: str, links: list[CudaLink]
) -> None:
    """The maths is the same: what is left of it in fp64 is far below any other eps or count."""
    links.append(LateLink(PLACES))
    trained = on_host(name, links[0], host_share=share, keep_gradients=2000)
    nearly(trained, plainly(name), tolerance=1e-12)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("name", ["clipped", "masters, clipped"])
def test_undo_leaves_plain_tensors_on_the_card(
    name: str, share: float, links: list[CudaLink]
) -> None:
    links.append(LateLink(PLACES))
    training = Training(recipe=RECIPES[name])
    host = training.go_to_host(links[0], host_share=share)
    for step in range(3):
        training.step(step)
    host.undo()
    links.pop().close()
    training.host = None
    assert not [t for t in threading.enumerate() if t.name.startswith("oomph-host")]
    for state in training.optimizer.state.values():
        assert {value.device.type for value in state.values()} == {"cuda"}
    training.run(STEPS - 3)
    if share:
        nearly_as_a_whole(training, plainly(name), tolerance=1e-3 if training.masters else 1e-6)
    else:
        same_bits(training, plainly(name))


def test_a_state_dict_goes_both_ways(links: list[CudaLink]) -> None:
    links.append(LateLink())
    ours, theirs = Training(recipe=RECIPES["clipped"]), plain(RECIPES["clipped"], 2)
    ours.go_to_host(links[0])
    ours.go_on_from(theirs)
    same_bits(ours.run(2), theirs.run(2))
    theirs.go_on_from(ours)
    same_bits(ours.run(1), theirs.run(1))


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_state_takes_no_memory_of_the_card_between_steps(
    clip_norm: float | None, links: list[CudaLink]
) -> None:
    links.append(CudaLink(CUDA))
    gc.collect()  # circles of earlier tests hold their models
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    host = HostOptimizer(
        model, optimizer, links[0], HostPlacement(bucket=4 << 20), clip_norm=clip_norm
    )
    batch = torch.ones(64, 1024, device="cuda")
    for _ in range(3):
        with host.backward():
            model(batch).square().mean().backward()
        host.step()
    host.settle()
    torch.cuda.synchronize()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    workspaces = 80 << 20
    assert torch.cuda.memory_allocated() - before < weights + batch.nbytes + workspaces
    assert {s["exp_avg"].device.type for s in optimizer.state.values()} == {"cpu"}
    host.undo()
