"""Precision that adapts on a real card: every level runs, compiled and captured, and learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from switched_on import with_on
from torch import Tensor, nn

from oomph.jobs.job import Job
from oomph.precision.controller import AdaptivePrecision
from oomph.runs.run import Run, apply
from oomph.search.planner import plan
from oomph.techniques.fp8_products import multiply_in_fp8
from oomph.techniques.number_formats import Level

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, CLASSES, SAMPLES, STEPS = 256, 32, 512, 24
needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a card with FP8",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    teacher = torch.randn(WIDTH, CLASSES, generator=numbers)
    inputs = [torch.randn(SAMPLES, WIDTH, generator=numbers) for _ in range(STEPS)]
    return [(x.cuda(), (x @ teacher).argmax(1).cuda()) for x in inputs]


def start(*, cuda_graph: bool) -> Run:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = Job(model, nn.CrossEntropyLoss(), optimizer, batches()[0], precision="fp32")
    made = plan(job, budget="4GiB", gpu=torch.cuda.get_device_name(), allow="exact")
    choices = with_on(
        dataclasses.replace(
            made.choices, micro_batch=SAMPLES // 2, compiled=True, optimizer_in_backward=False
        ),
        cuda_graph={"enabled": cuda_graph},
    )
    return apply(dataclasses.replace(made, choices=choices), job)


def train(run: Run) -> list[float]:
    return [float(run.step(batch)) for batch in batches()]


@needs_fp8
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "captured"])
def test_layers_go_down_to_the_last_level_and_the_model_still_learns(cuda_graph: bool) -> None:
    with start(cuda_graph=cuda_graph) as plain:
        wanted = train(plain)
    with start(cuda_graph=cuda_graph) as run:
        precision = run.adapt_precision(
            AdaptivePrecision(every=2, patience=1, demote_below=0.5, promote_above=0.9)
        )
        found = train(run)
        assert {precision.levels[f"blocks.{at}"] for at in range(4)} == {Level.FP8}
        assert {event.after for event in precision.events} == {Level.TF32, Level.BF16, Level.FP8}
        if cuda_graph:
            graph = run._stage.graph
            assert graph is not None and graph._captured is not None, "again, at the last levels"
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert found[-1] == pytest.approx(wanted[-1], rel=0.1)
    assert found[-1] < 0.9 * found[0]


@needs_fp8
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_products_in_fp8_are_near_those_in_bf16(compiled: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def results(run: nn.Module) -> list[Tensor]:
        linear.zero_grad()
        x.grad = None
        out = run(x)
        out.backward(torch.ones_like(out))
        assert x.grad is not None and linear.weight.grad is not None
        return [out.detach().float(), x.grad.float(), linear.weight.grad.float()]

    plain = results(linear)
    undo = multiply_in_fp8(linear)
    eighth = results(torch.compile(linear) if compiled else linear)  # type: ignore[arg-type]
    undo()
    for ours, theirs in zip(eighth, plain, strict=True):
        assert not torch.equal(ours, theirs)
        assert (ours - theirs).norm() < 0.06 * theirs.norm()
