"""Weights and optimizer on a real card's host: the plain bits, whatever is late. Needs a GPU."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from host_training import Net, Recipe, Training, plain, same_bits
from late_link import CUDA, PLACES, LateLink
from switched_on import with_on
from test_host_optimizer_cuda import fused, nearly_as_a_whole
from test_streamed_weights_cuda import exact  # noqa: F401 - every test here uses it
from torch import Tensor, nn

from oomph.engine.applying import Applied
from oomph.engine.step import train_step
from oomph.jobs.job import Job
from oomph.memory.cuda_link import CudaLink
from oomph.memory.disk_store import NumberedDiskStore
from oomph.plans.choices import Choices, Outside
from oomph.techniques import disk_state
from oomph.techniques import disk_weights as cold_weights
from oomph.techniques.disk_weights import OnDisk
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.placing import PlacedWeights
from oomph.techniques.recompute import recompute
from oomph.techniques.step_buckets import cuts_of
from oomph.techniques.streamed_weights import StreamedWeights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
STEPS = 4


def tie(net: Net) -> None:
    net.blocks[2].up.weight = net.blocks[0].up.weight


def recompute_tied(net: Net) -> None:
    tie(net)
    for block in net.blocks:
        recompute(block)


def recipe(**how: Any) -> Recipe:
    return Recipe(device="cuda", make_optimizer=fused, **how)


RECIPES = {
    "plain": recipe(),
    "tied, in parts": recipe(prepare=tie, parts=2),
    "clipped": recipe(clip_norm=0.3),
    "recomputed": recipe(prepare=recompute_tied),
    "masters": recipe(masters=True),
    "masters, in parts, clipped": recipe(
        masters=True, prepare=recompute_tied, parts=2, clip_norm=0.3
    ),
    "scaled": recipe(
        scaler=lambda: torch.amp.GradScaler("cuda", init_scale=2.0**126, growth_interval=2)
    ),
}


@functools.cache
def plainly(name: str) -> Training:
    return plain(RECIPES[name], STEPS)


def away(name: str, link: CudaLink, **placement: Any) -> tuple[Training, StreamedWeights]:
    training = Training(recipe=RECIPES[name])
    streamed = StreamedWeights(training.model, BLOCKS, link)
    how = {"keep_gradients": 2000, "bucket": 8192, **placement}
    training.go_to_host(link, weights=streamed, **how)
    return training, streamed


@pytest.mark.parametrize("late", [(), PLACES], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_steps_have_the_plain_bits(name: str, late: Collection[str], links: list[CudaLink]) -> None:
    links.append(LateLink(late))
    same_bits(away(name, links[0])[0].run(STEPS), plainly(name))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["plain", "masters, in parts, clipped"])
def test_steps_have_the_plain_bits_whatever_is_late(
    name: str, place: str, links: list[CudaLink]
) -> None:
    links.append(LateLink((place,)))
    same_bits(away(name, links[0], bucket=2048)[0].run(STEPS), plainly(name))


@pytest.mark.parametrize("late", [(), PLACES], ids=str)
@pytest.mark.parametrize("name", ["clipped", "masters"])
def test_the_host_steps_what_is_there_already(
    name: str, late: Collection[str], links: list[CudaLink]
) -> None:
    links.append(LateLink(late))
    trained, _ = away(name, links[0], host_share=0.6)
    tolerance = 1e-3 if trained.masters else 1e-6
    nearly_as_a_whole(trained.run(STEPS), plainly(name), tolerance)


@pytest.mark.parametrize("name", ["plain", "clipped", "masters"])
def test_undone_in_mid_training_it_goes_on_plainly(name: str, links: list[CudaLink]) -> None:
    link = LateLink(PLACES)
    links.append(link)
    training, streamed = away(name, link)
    for step in range(2):
        training.step(step)
    assert training.host is not None
    training.host.undo()
    streamed.undo()
    training.host = None
    gc.collect()
    assert not any(memory() is not None for memory in link.memory)
    assert {p.device for p in training.model.parameters()} == {CUDA}
    same_bits(training.run(STEPS - 2), plainly(name))


@pytest.mark.parametrize("name", ["clipped", "masters"])
def test_a_model_of_the_host_trains_on_the_card_and_goes_back(
    name: str, links: list[CudaLink]
) -> None:
    links.append(LateLink(PLACES))
    training = Training(recipe=dataclasses.replace(RECIPES[name], device="cpu"))
    placed = PlacedWeights(training.model, BLOCKS, links[0], device=CUDA)
    host = HostOptimizer(
        training.model,
        training.optimizer,
        links[0],
        HostPlacement(bucket=2048),
        masters=training.masters,
        weights=placed.streamed,
        clip_norm=training.recipe.clip_norm,
        home=placed.home,
    )
    assert training.model.embed.weight.device == CUDA
    training.host, training.recipe.device = host, "cuda"
    training.run(STEPS)
    host.undo()
    placed.undo()
    links.pop().close()
    training.host = None
    assert {p.device.type for p in training.model.parameters()} == {"cpu"}
    states = [v for s in training.optimizer.state.values() for v in s.values()]
    assert {value.device.type for value in states} == {"cpu"}
    same_bits(training, plainly(name))


# -- on the disk -----------------------------------------------------------------------------------


def cold(
    name: str, link: CudaLink, folder: Path, bucket: int = 2048, **placement: Any
) -> tuple[Training, StreamedWeights]:
    """A training whose blocks have their weights on the disk, however small they are."""
    training = Training(recipe=RECIPES[name])
    masters = training.masters

    def open_store(largest: int, buffers: int) -> NumberedDiskStore:
        return NumberedDiskStore(link, folder, largest=largest, buffers=buffers)

    def cut(parameter: nn.Parameter) -> tuple[range, ...]:
        owned = masters.master_of(parameter) if masters is not None else parameter
        return cuts_of(parameter, owned.element_size(), bucket)

    on_disk = OnDisk(blocks=BLOCKS, open_store=open_store, cut=cut)
    streamed = StreamedWeights(training.model, BLOCKS, link, on_disk=on_disk)
    how = {"keep_gradients": 2000, "bucket": bucket, "disk": open_store, **placement}
    training.go_to_host(link, weights=streamed, **how)
    return training, streamed


@pytest.fixture
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_weights, "LEAST", 0)
    monkeypatch.setattr(disk_state, "LEAST", 0)


def undone(training: Training, streamed: StreamedWeights) -> Training:
    assert training.host is not None
    training.host.undo()
    streamed.undo()
    training.host = None
    return training


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("late", [(), PLACES], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_weights_on_the_disk_have_the_plain_bits(
    name: str, late: Collection[str], links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(late))
    training, streamed = cold(name, links[0], tmp_path)
    same_bits(undone(training.run(STEPS), streamed), plainly(name))


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["plain", "masters, in parts, clipped"])
def test_with_state_and_masters_there_too_whatever_is_late(
    name: str, place: str, links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink((place,)))
    training, streamed = cold(name, links[0], tmp_path, disk_share=0.7)
    same_bits(undone(training.run(STEPS), streamed), plainly(name))


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("name", ["plain", "clipped", "masters"])
def test_weights_on_the_disk_are_saved_loaded_and_brought_back(
    name: str, links: list[CudaLink], tmp_path: Path
) -> None:
    link = LateLink(PLACES)
    links.append(link)
    training, streamed = cold(name, link, tmp_path)
    training.run(1)
    training.go_on_from(plain(RECIPES[name], 2))
    training.run(1)
    saved = training.weights()
    undone(training, streamed)
    assert {p.device for p in training.model.parameters()} == {CUDA}
    for key, value in training.weights().items():
        assert torch.equal(saved[key], value), key
    gc.collect()
    assert not any(memory() is not None for memory in link.memory)
    assert list(tmp_path.iterdir()) == []
    same_bits(training.run(STEPS - 3), plainly(name))


# -- memory ----------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 12
BLOCK = 8 * WIDTH * WIDTH
"""Elements of a block's matrices."""
WORKSPACES = 80 << 20
"""Bytes that cuBLAS keeps."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("on", ["host", "disk"])
def test_the_card_holds_two_blocks_and_a_few_buckets(
    on: Outside, masters: bool, clip_norm: float | None, tmp_path: Path
) -> None:
    paths = tuple(str(at) for at in range(LAYERS))
    choices = Choices(
        blocks=dict.fromkeys(paths, "keep"),
        optimizer_on="host",
        weights_away=paths,
        weights_away_on=on,
        gradient_room=0,
        weights="bf16 with fp32 masters" if masters else "own",
        precision="bf16-mixed" if masters else "fp32",
    )
    choices = with_on(choices, "fused_optimizer")
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.ones(16, WIDTH, device=CUDA), torch.ones(16, WIDTH, device=CUDA)
    job = Job(
        model, nn.MSELoss(), optimizer, batch, clip_norm=clip_norm, precision=choices.precision
    )
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    applied = Applied(choices, job, model, optimizer, device_type="cuda", disk=tmp_path)
    assert torch.cuda.max_memory_allocated() - before < BLOCK
    for _ in range(3):
        train_step(applied.stage, batch)
    applied.stage.settle()
    weight = 2 if masters else 4
    bucket = LAYERS * BLOCK * weight // 64
    # Of ten buckets: state, what is stepped, its gradient, and what it is rounded to.
    most = 2 * BLOCK * weight + 45 * bucket
    assert most < LAYERS * BLOCK * weight  # else this would say nothing
    assert torch.cuda.max_memory_allocated() - before < most + WORKSPACES
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    applied.undo()
    assert torch.cuda.max_memory_allocated() - held < BLOCK
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in model.parameters())
