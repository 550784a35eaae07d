"""What the recorder counts, on which side, and under which name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from oomph.hardware import find_gpu
from oomph.rehearsal.recorder import Recorder, Side
from oomph.rehearsal.timeline import Category
from oomph.rehearsal.world import pretend


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    with pretend(find_gpu("h200")) as recorder:
        yield recorder


@pytest.fixture
def cpu() -> Iterator[Recorder]:
    with pretend(None) as recorder:
        yield recorder


def test_only_what_is_on_the_gpu_is_counted(gpu: Recorder) -> None:
    host = torch.empty(1024)
    assert gpu.allocated == 0
    device = host.to("cuda")
    assert gpu.allocated == 4096
    assert device.is_cuda
    assert device.device == torch.device("cuda", 0)
    assert not host.is_cuda
    back = device.cpu()
    assert gpu.allocated == 4096
    assert gpu.side_of(back) is Side.HOST
    assert gpu.side_of(device.to("cpu", torch.bfloat16)) is Side.HOST
    assert (device + 1).is_cuda
    del device
    assert gpu.allocated == 0


def test_on_the_cpu_everything_is_counted(cpu: Recorder) -> None:
    real = torch.ones(4)
    x = torch.empty(1024)
    y = torch.tensor([1.0, 2.0])
    assert cpu.allocated == 4096 + 8 + 16
    assert x.device.type == y.device.type == real.device.type == "cpu"


def test_moving_to_where_it_is_makes_no_copy(gpu: Recorder) -> None:
    x = torch.empty(1024, device="cuda")
    moved = (x.to("cuda"), x.cuda(), x.to("cuda:0", torch.float32), x.to(x), x.contiguous())
    assert gpu.allocated == 4096
    assert len(moved) == 5
    assert x.to("cuda", copy=True) is not x
    assert x.to("cuda", torch.bfloat16).is_cuda


def test_views_and_in_place_ops_take_nothing(gpu: Recorder) -> None:
    x = torch.empty(32, 32, device="cuda")
    views = (x.view(-1), x.t(), x[1:], x.expand(3, 32, 32), x.detach())
    x.add_(1).mul_(2)
    x[0] = 3
    assert gpu.allocated == 4096
    assert gpu.peak_allocated == 4096
    del x
    assert gpu.allocated == 4096, "a view keeps the storage"
    del views
    assert gpu.allocated == 0


def test_constants_from_outside_are_on_the_host(gpu: Recorder) -> None:
    x = torch.empty(4, device="cuda")
    assert (x * torch.tensor(2.0)).is_cuda
    assert torch.tensor(1.0, device="cuda").is_cuda
    assert not torch.tensor(1.0).is_cuda


def test_new_tensors_follow_the_one_they_are_made_from(gpu: Recorder) -> None:
    x = torch.empty(4, device="cuda")
    for new in (
        x.new_zeros(3),
        torch.zeros_like(x),
        torch.empty_like(x, dtype=torch.int8),
        x.new_tensor([1.0]),
        torch.arange(3, device=x.device),
        torch.zeros(2).to(x),
        nn.Linear(2, 2).to(x.device).weight,
    ):
        assert new.is_cuda
    assert not torch.zeros_like(x, device="cpu").is_cuda


def test_step_counters_are_on_the_host_but_for_fused_optimizers(gpu: Recorder) -> None:
    for fused, expected in ((False, "cpu"), (True, "cuda")):
        weight = nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = torch.optim.Adam([weight], fused=fused)
        weight.grad = torch.empty(4, device="cuda")
        before = gpu.allocated
        optimizer.step()
        assert optimizer.state[weight]["step"].device.type == expected
        assert gpu.allocated - before == 32 + (4 if fused else 0)


@pytest.mark.parametrize(("kind", "states"), [(torch.optim.SGD, 1), (torch.optim.AdamW, 2)])
def test_a_fused_optimizer_takes_no_memory_of_the_machine(
    gpu: Recorder, kind: Any, states: int
) -> None:
    weight = nn.Parameter(torch.empty(1 << 40, device="cuda"))  # more than any machine has
    weight.grad = torch.empty_like(weight)
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([weight], lr=0.1, fused=True, **more)
    before = gpu.allocated
    optimizer.step()
    optimizer.step()
    assert gpu.allocated - before == pytest.approx(states * (4 << 40))


def test_a_block_has_birth_death_op_and_module(gpu: Recorder) -> None:
    with gpu.phase("trial"):
        gpu.enter_module("layers.0")
        x = torch.empty(4, device="cuda") + 1
        gpu.leave_module()
        del x
    made, added = gpu.timeline.blocks
    assert (made.op, added.op) == ("aten.empty.memory_format", "aten.add.Tensor")
    assert made.birth < added.birth < made.death < added.death
    assert {made.module, added.module} == {"layers.0"}
    assert {made.phase, added.phase} == {"trial"}
    assert gpu.timeline.span_at(added.birth) == "trial"


def test_backward_belongs_to_the_module_of_its_forward(gpu: Recorder) -> None:
    weights = [torch.empty(8, 8, device="cuda", requires_grad=True) for _ in range(2)]
    x = torch.empty(4, 8, device="cuda")
    for name, weight in zip(("one", "two"), weights, strict=True):
        gpu.enter_module(name)
        x = x @ weight
        gpu.leave_module()
    x.sum().backward()
    blocks = [gpu.block_of(weight.grad) for weight in weights]
    assert [block.module for block in blocks if block is not None] == ["one", "two"]


def test_what_forward_leaves_behind_is_an_activation(gpu: Recorder) -> None:
    x = torch.empty(4, 4, device="cuda", requires_grad=True)
    with gpu.forward():
        loss = (x.exp() * 2).sum()
    kept = [b for b in gpu.timeline.blocks if b.category is Category.ACTIVATION]
    assert [b.op for b in kept] == ["aten.exp.default", "aten.sum.default"]
    del loss


def test_peaks_start_anew_when_they_are_reset(gpu: Recorder) -> None:
    x = torch.empty(1024, device="cuda")
    del x
    assert torch.cuda.max_memory_allocated() == 4096
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 0


def test_a_storage_that_is_resized_is_counted_at_its_new_size(gpu: Recorder) -> None:
    x = torch.empty(0, device="cuda")
    x.resize_(1024)
    assert gpu.allocated == 4096


def test_the_recorder_leaves_nothing_behind_when_tensors_die(gpu: Recorder) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to("cuda")
    model(torch.empty(2, 8, device="cuda")).sum().backward()
    del model
    left = [b for b in gpu.timeline.blocks if b.death is None]
    assert {b.category for b in left} <= {Category.WORKSPACE}
