"""A probe tells how far layers are from fp32, and leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import Batch, Block, Net, batches
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.engine.step import Stage
from oomph.jobs.job import Job
from oomph.precision import probe as probe_module
from oomph.precision.layers import find_layers
from oomph.precision.probe import Divergence, Probe
from oomph.techniques.attention_rows import close_gaps
from oomph.techniques.layer_precision import LayerPrecision
from oomph.techniques.number_formats import Level

CPU = torch.device("cpu")


def stage_of(model: nn.Module, batch: Batch) -> Stage:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = Job(model, nn.CrossEntropyLoss(), optimizer, batch)
    return Stage(job=job, model=model, optimizer=optimizer, device_type="cpu")


@contextlib.contextmanager
def lowered(model: nn.Module, *paths: str, level: Level = Level.BF16) -> Any:
    with contextlib.ExitStack() as undos:
        for path in paths:
            undos.callback(LayerPrecision(model.get_submodule(path), "cpu").apply(level))
        yield


def diverge(model: nn.Module, *paths: str, level: Level = Level.BF16) -> Divergence:
    batch = batches(1)[0]
    layers = find_layers(model, [], (Level.FP32, Level.BF16))
    probe = Probe(stage_of(model, batch), CPU, layers)
    reference = probe.run_in_fp32(batch, contextlib.nullcontext())
    return probe.compare(probe.run(batch, lowered(model, *paths, level=level)), reference)


def test_nothing_lowered_is_nothing_apart() -> None:
    found = diverge(Net())
    assert found.worst == 0.0
    assert all(layer.cosine == pytest.approx(1.0, abs=1e-12) for layer in found.layers.values())


def test_it_is_the_distance_of_the_gradients_that_the_untouched_job_would_have() -> None:
    model, (x, y) = Net(), batches(1)[0]
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(x), y).backward()
    low = copy.deepcopy(model)
    with lowered(low, "head"):
        F.cross_entropy(low(x), y).backward()
    one = torch.cat([p.grad.flatten() for p in low.blocks[0].up.parameters()])
    other = torch.cat([p.grad.flatten() for p in reference.blocks[0].up.parameters()])
    found = diverge(model, "head").layers["blocks.0.up"]
    assert found.relative == pytest.approx(float((one - other).norm() / other.norm()), rel=1e-4)
    assert 0.0 < found.relative < 0.05


def test_eight_bits_are_farther_than_sixteen() -> None:
    bf16, fp8 = (
        diverge(Net(), "blocks.1.up", level=level).worst for level in (Level.BF16, Level.FP8)
    )
    assert 0 < 2 * bf16 < fp8


def test_what_is_not_finite_is_infinitely_far() -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * math.inf if torch.is_autocast_enabled("cpu") else out

    model = Net()
    model.blocks[1] = Broken()
    assert diverge(model, "blocks.1").worst == math.inf
    assert diverge(model, "blocks.0").worst < 0.1


def test_dropout_draws_no_other_mask_for_it_draws_none() -> None:
    assert diverge(Net(dropout=0.5), "blocks.1.up").worst < 0.1


@pytest.mark.parametrize("rows", [False, True], ids=["plain", "biases in rows"])
def test_functional_dropout_in_attention_is_off_too(rows: bool) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.mix = nn.Linear(16, 16)
            self.head = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.mix(x).view(1, 1, -1, 16)
            x = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).view_as(x)
            return self.head(F.dropout(x, 0.5))

    model = Attends()
    batch = batches(1)[0]
    probe = Probe(stage_of(model, batch), CPU, find_layers(model, [], (Level.FP32, Level.BF16)))
    losses = set()
    undo = close_gaps() if rows else None
    for seed in range(3):
        torch.manual_seed(seed)
        losses.add(probe.run(batch, contextlib.nullcontext()).loss)
    if undo is not None:
        undo()
    assert len(losses) == 1


class Normed(nn.Module):
    """Draws random numbers, has running statistics, and a buffer that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        noise = torch.randn_like(x) * float(np.random.rand())
        out: Tensor = self.head(self.norm(self.first(x + noise)))
        return out


def test_all_is_as_before_and_every_run_finds_the_same() -> None:
    model, batch = Normed(), batches(1)[0]
    stage = stage_of(model, batch)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = copy.deepcopy(model.state_dict())
    streams = torch.get_rng_state(), np.random.get_state()[2]
    probe = Probe(stage, CPU, find_layers(model, [], (Level.FP32, Level.BF16)))
    losses = {probe.run(batch, contextlib.nullcontext()).loss for _ in range(3)}
    assert len(losses) == 1
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert np.random.get_state()[2] == streams[1]
    assert not stage.optimizer.state
    assert torch.equal(model.first.weight.grad, torch.ones_like(model.first.weight))
    assert all(p.grad is None for p in model.head.parameters())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_of_a_large_gradient_a_sample_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = diverge(Net(), "blocks.1.up")
    monkeypatch.setattr(probe_module, "SAMPLE", 64)
    sampled = diverge(Net(), "blocks.1.up")
    pairs = [(whole.layers[path].relative, sampled.layers[path].relative) for path in whole.layers]
    assert all(0.5 < some / all_of_it < 2 for all_of_it, some in pairs if all_of_it)
    assert any(some != all_of_it for all_of_it, some in pairs)


def test_a_layer_that_the_loss_does_not_reach_is_not_apart() -> None:
    model = Net()
    model.unused = nn.Linear(4, 4)
    assert diverge(model, "blocks.1.up").layers["unused"].relative == 0.0
