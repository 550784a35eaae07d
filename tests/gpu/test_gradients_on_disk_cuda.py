"""Gradients on the disk behind a card: the plain bits, whatever is late. Needs a GPU."""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from host_training import Training, fail_once, same_batch_again, same_bits
from late_link import CUDA, PLACES, LateLink
from switched_on import with_on
from test_host_optimizer_cuda import RECIPES, STEPS, nearly_as_a_whole, plainly
from torch import Tensor, nn

from oomph.engine.applying import Applied
from oomph.engine.step import train_step
from oomph.jobs.job import Job
from oomph.memory.cuda_link import CudaLink
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.numbered_store import NumberedStore
from oomph.plans.choices import Choices, Outside
from oomph.techniques import disk_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "LEAST", 0)


def on_disk(name: str, link: CudaLink, folder: Path, buffers: int = 100, **how: Any) -> Training:
    def open_store(largest: int, wanted: int) -> NumberedStore:
        return NumberedDiskStore(link, folder, largest=largest, buffers=min(wanted, buffers))

    training = Training(recipe=RECIPES[name])
    how = {"keep_gradients": 2000, "gradients_to_disk": True, **how}
    training.go_to_host(link, disk=open_store, **how)
    return training


def undone(training: Training) -> Training:
    assert training.host is not None
    training.host.undo()
    return training


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize("name", ["clipped", "in parts, clipped", "masters, clipped", "scaled"])
def test_steps_have_the_plain_bits_whatever_is_late(
    name: str, late: Collection[str], links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(late))
    same_bits(undone(on_disk(name, links[0], tmp_path).run(STEPS)), plainly(name))


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("buffers", [2, 100])
def test_beside_state_on_the_disk_through_few_buffers_or_many(
    name: str, buffers: int, links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(PLACES))
    trained = on_disk(name, links[0], tmp_path, buffers, keep_gradients=0, disk_share=0.6)
    same_bits(undone(trained.run(STEPS)), plainly(name))


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("name", ["clipped", "in parts, clipped"])
def test_beside_steps_of_the_host(name: str, links: list[CudaLink], tmp_path: Path) -> None:
    links.append(LateLink(PLACES))
    trained = on_disk(name, links[0], tmp_path, host_share=0.5).run(STEPS)
    nearly_as_a_whole(undone(trained), plainly(name))


@pytest.mark.usefixtures("_every_parameter_is_large_enough")
@pytest.mark.parametrize("name", ["clipped", "in parts, clipped"])
def test_a_failed_backward_leaves_nothing_behind(
    name: str, links: list[CudaLink], tmp_path: Path
) -> None:
    links.append(LateLink(PLACES))
    trained = on_disk(name, links[0], tmp_path).run(2)
    fail_once(trained.model)
    with same_batch_again(trained), pytest.raises(RuntimeError, match="in the middle"):
        trained.step(2)
    same_bits(undone(trained.run(STEPS - 2)), plainly(name))


# -- memory ----------------------------------------------------------------------------------------

WIDTH, LAYERS = 1024, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_card_holds_no_more_than_with_gradients_on_the_host(
    micro_batch: int | None, tmp_path: Path
) -> None:
    batch = torch.ones(16, WIDTH, device=CUDA), torch.ones(16, WIDTH, device=CUDA)

    def trained(on: Outside) -> tuple[int, list[Tensor]]:
        """The most there was on the card, and what was learned."""
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        job = Job(model, nn.MSELoss(), optimizer, batch, clip_norm=1.0)
        choices = Choices(
            blocks={str(at): "keep" for at in range(LAYERS)},
            micro_batch=micro_batch,
            optimizer_on="host",
            gradient_room=0,
            gradients_on=on,
        )
        choices = with_on(choices, "fused_optimizer")
        gc.collect()
        before = torch.cuda.memory_allocated()
        applied = Applied(choices, job, model, optimizer, device_type="cuda", disk=tmp_path)
        torch.cuda.reset_peak_memory_stats()
        losses = [train_step(applied.stage, batch) for _ in range(4)]
        applied.stage.settle()
        most = torch.cuda.max_memory_allocated() - before
        applied.undo()
        assert not list(tmp_path.iterdir())
        found = [loss for loss in losses if loss is not None]
        return most, [*found, *(parameter.detach().cpu() for parameter in model.parameters())]

    trained("host")  # takes what lasts, as workspaces
    (host, expected), (disk, found) = trained("host"), trained("disk")
    assert disk <= host
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
