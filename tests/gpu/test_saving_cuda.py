"""On the card: saving takes no memory there, and a resumed run has the same losses to the bit."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from switched_on import on
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.plan import Plan
from oomph.runs.loading import load_checkpoint
from oomph.runs.run import Run, apply
from oomph.search.planner import plan as make_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CLASSES, WIDTH = 4096, 512


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.to(memory_format=torch.channels_last)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.drop(self.blocks(x).tanh())
        picture = x.view(len(x), 8, -1, WIDTH)
        return self.head((picture + self.conv(picture)).view_as(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def some_batch(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(CLASSES, (8, 33), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


BATCHES = [some_batch(seed) for seed in range(6)]


def start(change: Callable[[Choices], Choices], precision: str = "bf16-mixed") -> Run:
    job, plan = _job(precision), _plan(precision)
    return apply(dataclasses.replace(plan, choices=change(plan.choices), checked=None), job)


def _job(precision: str) -> Job:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Job(model, loss_of, optimizer, BATCHES[0], precision=precision)  # type: ignore[arg-type]


@functools.cache
def _plan(precision: str) -> Plan:
    gpu = find_gpu(torch.cuda.get_device_name())
    return make_plan(_job(precision), gpu=gpu, compile_blocks=False)


WAYS: dict[str, tuple[Callable[[Choices], Choices], str]] = {
    "as planned": (lambda choices: choices, "bf16-mixed"),
    "parts in backward": (
        lambda choices: Choices(precision="fp32", micro_batch=2, optimizer_in_backward=True),
        "fp32",
    ),
    "masters, fused": (
        lambda choices: Choices(
            precision="bf16-mixed",
            weights="bf16 with fp32 masters",
            techniques=on("fused_optimizer"),
        ),
        "bf16-mixed",
    ),
    "fp16": (lambda choices: Choices(precision="fp16-mixed"), "fp16-mixed"),
    "8 bits": (lambda choices: Choices(precision="fp32", techniques=on("low_bit_state")), "fp32"),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order would be no fault of a checkpoint."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(autouse=True)
def nothing_of_other_tests_on_the_card() -> None:
    """Nor of the streams they used, each of which has a workspace of cuBLAS."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_the_same_losses_to_the_bit(way: str, tmp_path: Path) -> None:
    run = start(*WAYS[way])
    torch.manual_seed(1)
    for batch in BATCHES[:3]:
        run.step(batch)
    run.save(tmp_path)
    expected = [float(run.step(batch)) for batch in BATCHES[3:]]
    torch.manual_seed(99)
    again = start(*WAYS[way])
    notes = again.load(tmp_path).notes
    found = [float(again.step(batch)) for batch in BATCHES[3:]]
    # To the bit under the same plan: on a card that others fill, a run goes on under a smaller one.
    assert [str(event) for event in (*run.events, *again.events)] == []
    assert notes == ()
    assert found == expected


@pytest.mark.parametrize("way", ["as planned", "masters, fused"])
def test_saving_and_loading_take_no_second_copy_on_the_card(way: str, tmp_path: Path) -> None:
    run = start(*WAYS[way])
    run.step(BATCHES[0])
    largest = max(parameter.nbytes for parameter in run.model.parameters()) * 2  # fp32 masters

    def most_above_now(do: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        do()
        return torch.cuda.max_memory_allocated() - before

    assert most_above_now(lambda: run.save(tmp_path)) <= largest
    assert most_above_now(lambda: run.load(tmp_path)) <= largest


def test_a_checkpoint_of_the_card_loads_on_the_host(tmp_path: Path) -> None:
    run = start(*WAYS["masters, fused"])
    run.step(BATCHES[0])
    run.save(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.load_state_dict(checkpoint.model_state)
    optimizer.load_state_dict(checkpoint.optimizer_state)
    run.undo()
    for name, value in run.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.cpu()), name
    mine, theirs = optimizer.state_dict()["state"], run.optimizer.state_dict()["state"]
    for at, state in theirs.items():
        assert all(torch.equal(mine[at][key].cpu(), state[key].cpu()) for key in state)
        assert mine[at]["exp_avg"].stride() == state["exp_avg"].stride()
    loss_of(model, BATCHES[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_nobody_holds_leaves_no_weight_on_the_card(way: str) -> None:
    before = torch.cuda.memory_allocated()
    run = start(*WAYS[way])
    for batch in BATCHES[:2]:
        run.step(batch)
    del run
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    # PyTorch's own seeds of captured graphs may stay; the state of a matrix in 8 bits is more.
    assert torch.cuda.memory_allocated() - before < WIDTH * WIDTH


def test_evaluating_needs_no_more_than_the_plan_says() -> None:
    before = torch.cuda.memory_allocated()
    run = start(*WAYS["as planned"])
    run.step(BATCHES[0])
    run.step(BATCHES[1])
    torch.cuda.reset_peak_memory_stats()
    many = tuple(torch.cat([batch[at] for batch in BATCHES]) for at in (0, 1))
    found = run.evaluate([many], lambda output, part: output)
    most = torch.cuda.max_memory_allocated() - before
    planned = run.plan.predicted.peak.allocated
    assert most <= planned, f"{most - planned} bytes more than {run.plan.choices} should need"
    assert all(output.device.type == "cpu" for output in found.results)
    whole = run.evaluate(BATCHES)
    assert found.loss == pytest.approx(whole.loss, rel=1e-3)
