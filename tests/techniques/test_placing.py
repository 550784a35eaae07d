"""A model of the host is placed bit by bit: never whole on the GPU, never twice on the host."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.hardware import find_gpu
from oomph.memory.link import InstantLink
from oomph.rehearsal.link import RehearsedLink
from oomph.rehearsal.recorder import Recorder, Side
from oomph.rehearsal.world import pretend
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.placing import PlacedWeights, move_training

WIDTH, LAYERS = 64, 8
BLOCKS = [f"blocks.{at}" for at in range(LAYERS)]
BLOCK = 2 * WIDTH * WIDTH
"""Elements of a block."""
SLACK = 4096


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
                )
                for _ in range(LAYERS)
            )
        )
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.first(x)) + self.shift.to(x.dtype)
        return out


class Placed:
    """A model of the host whose optimizer and blocks are on the host too, all that is beside it."""

    def __init__(self, model: Net, link: Any, device: torch.device, *, masters: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.masters = MasterWeights(model, self.optimizer) if masters else None
        self.placed = PlacedWeights(model, BLOCKS, link, device=device)
        self.host = HostOptimizer(
            model,
            self.optimizer,
            link,
            HostPlacement(bucket=4 * BLOCK, keep_gradients=0, ahead=1),
            masters=self.masters,
            weights=self.placed.streamed,
            clip_norm=1.0,
            home=self.placed.home,
        )

    def step(self, batch: Tensor) -> None:
        loss = self.model(batch).float().square().mean()
        with self.host.backward():
            loss.backward()
        self.host.step()

    def undo(self) -> None:
        self.host.undo()
        self.placed.undo()
        if self.masters is not None:
            self.masters.undo()


# -- the GPU ---------------------------------------------------------------------------------------


def sides(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer) -> set[Side]:
    """Where parameters, buffers and state are."""
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = [*model.parameters(), *model.buffers(), *(v for v in state if v.dim())]
    return {recorder.side_of(tensor) for tensor in tensors}


@pytest.mark.parametrize("masters", [False, True])
def test_a_model_of_the_host_is_never_on_the_gpu_as_a_whole(masters: bool) -> None:
    gpu = find_gpu("h200")
    width = 512
    block = 2 * width * width * (2 if masters else 4)
    with pretend(gpu) as recorder:
        model = Net(width)
        recorder.adopt([*model.parameters(), *model.buffers()])
        link, device = RehearsedLink(recorder, gpu), torch.device("cuda")
        job = Placed(model, link, device, masters=masters)
        first = model.first.weight
        assert recorder.side_of(first) is Side.GPU
        assert recorder.peak_allocated < first.nbytes + (1 << 16)
        batch = torch.ones(4, width, device="cuda", dtype=first.dtype)
        job.step(batch)
        job.step(batch)
        del batch
        recorder.reset_peak()
        workspaces = recorder.allocated
        job.undo()
        # What is left of the step is completed, bucket by bucket.
        assert recorder.peak_allocated - workspaces < 2 * block
        assert sides(recorder, model, job.optimizer) == {Side.HOST}
        assert {p.dtype for p in model.parameters()} == {torch.float32}


# -- the host --------------------------------------------------------------------------------------


class Host(InstantLink):
    """Knows the most host memory there ever was: what was taken, and what a model had before."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    def follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = weakref.ref(storage), storage.nbytes()
        alive = [size for there, size in self._alive.values() if there() is not None]
        self.most = max(self.most, sum(alive))

    def host_memory(self, nbytes: int) -> Tensor:
        memory = super().host_memory(nbytes)
        self.follow(memory)
        return memory


@pytest.mark.parametrize("masters", [False, True])
def test_no_two_copies_of_a_model_are_on_the_host(masters: bool) -> None:
    host, model = Host(), Net()
    for parameter in model.parameters():
        host.follow(parameter.data)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    state = 2 * weights
    placed = Placed(model, host, torch.device("cpu"), masters=masters)
    # With masters the block's memory holds half of its bytes.
    extra = weights // 2 if masters else 0
    assert weights + state <= host.most <= weights + state + extra + 4 * BLOCK + SLACK
    placed.undo()


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("masters", [False, True])
def test_everything_is_where_it_was_with_the_numbers_it_has_now(masters: bool) -> None:
    def train(model: Net, job: Placed | None) -> torch.optim.Optimizer:
        optimizer = job.optimizer if job else torch.optim.AdamW(model.parameters(), lr=1e-2)
        kept = MasterWeights(model, optimizer) if masters and job is None else None
        dtype = torch.bfloat16 if masters else torch.float32
        for step in range(3):
            batch = torch.full((2, WIDTH), step + 1.0, dtype=dtype)
            if job is not None:
                job.step(batch)
                continue
            model(batch).float().square().mean().backward()
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(owned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if job is not None:
            job.undo()
        if kept is not None:
            kept.undo()
        return optimizer

    plain, ours = Net(), Net()
    objects = list(ours.parameters())
    theirs = train(plain, None)
    mine = train(ours, Placed(ours, InstantLink(), torch.device("cpu"), masters=masters))
    assert all(a is b for a, b in zip(ours.parameters(), objects, strict=True))
    pairs = list(zip(ours.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        state, expected = mine.state[a], theirs.state[b]
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_blocks_that_cannot_leave_leave_the_model_as_it_was() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadInput, match="no block"):
        PlacedWeights(model, ["blocks.99"], InstantLink(), device=torch.device("cpu"))
    gc.collect()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_and_its_state_go_to_the_card_and_back() -> None:
    with pretend(find_gpu("h200")):
        model = nn.Linear(4, 4)
        model.register_buffer("shift", torch.ones(4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

        def places() -> set[str]:
            state = [s["exp_avg"] for s in optimizer.state.values()]
            return {t.device.type for t in (*model.parameters(), *model.buffers(), *state)}

        undo = move_training(model, optimizer, torch.device("cuda"))
        assert places() == {"cuda"}
        assert all(s["step"].device.type == "cpu" for s in optimizer.state.values())
        undo()
        assert places() == {"cpu"}


def test_what_is_there_already_is_not_touched() -> None:
    model = nn.Linear(4, 4)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    move_training(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))()
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
