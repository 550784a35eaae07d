"""A small model that trains on the card under chosen plans, and all that its steps change."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten_with_path

from oomph.hardware import find_gpu
from oomph.jobs.description import describe_job
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Plan, Predicted
from oomph.runs.fallback_plans import Fallback
from oomph.runs.run import Run, apply
from oomph.units import GIB

WIDTH, DEPTH, SAMPLES = 1024, 4, 4096


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
                for _ in range(DEPTH)
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.norm(self.blocks(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@functools.cache
def a_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randn(SAMPLES, WIDTH, generator=generator),
    )


def start(choices: Choices, *smaller: Choices) -> Run:
    """A run under these choices that has the smaller ones to fall back on, and no others."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = _plan_with(choices, model, optimizer)
    run = apply(plan, Job(model, loss_of, optimizer, a_batch(0)))
    ladder = run._adapting._fallbacks_by_plan[0]
    ladder.stop()
    for at, other in enumerate(smaller):
        fallback = Fallback(
            plan=dataclasses.replace(plan, choices=other), need=1000 - at, retries=0
        )
        ladder.steps_down.append(fallback)
    return run


def _plan_with(choices: Choices, model: nn.Module, optimizer: torch.optim.Optimizer) -> Plan:
    """A plan that nobody searched for; what it predicts means nothing."""
    gpu = find_gpu(torch.cuda.get_device_name()).name
    return Plan(
        made_for=describe_job("net", model, a_batch(0), optimizer, gpu),
        budget=8 * GIB,
        choices=choices,
        predicted=Predicted(
            peak=Ledgers(allocated=3 * GIB, reserved=3 * GIB, device=4 * GIB),
            high=4 * GIB,
            categories_at_peak={},
            seconds=0.5,
            unlimited_seconds=0.4,
            samples=SAMPLES,
            tokens=SAMPLES,
        ),
        fidelity=Fidelity.EXACT,
        gap=0.0,
        changes=(),
        notes=(),
        planning_seconds=0.0,
    )


def state_of(run: Run) -> dict[str, Any]:
    """All that a step changes, by name, as copies on the host: they take nothing of the card."""
    scaler = run._stage.scaler
    owned = [p for group in run.optimizer.param_groups for p in group["params"]]
    values = {
        "weights": dict(run.model.named_parameters()),
        "buffers": dict(run.model.named_buffers()),
        "owned": owned,
        "optimizer state": [dict(run.optimizer.state.get(p, {})) for p in owned],
        "scaler": scaler and [scaler._scale, scaler._growth_tracker],
        "gradients": [p.grad for p in (*run.model.parameters(), *owned)],
        "random on the host": torch.get_rng_state(),
        "random on the card": torch.cuda.get_rng_state(),
    }
    leaves, _ = tree_flatten_with_path(values)
    return {"".join(map(str, path)): _on_host(leaf) for path, leaf in leaves}


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What is not as before, in words; nothing where all is, to the bit."""
    found = [f"{name} is there in one of them only" for name in now.keys() ^ before.keys()]
    for name in now.keys() & before.keys():
        one, other = now[name], before[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            same = type(one) is type(other) and one == other
            what = f"{one!r} after {other!r}"
        else:
            same = one.dtype is other.dtype and torch.equal(one, other)
            what = f"{tuple(one.shape)} {one.dtype} after {tuple(other.shape)} {other.dtype}"
            if one.shape == other.shape and one.is_floating_point():
                what += f", by up to {float((one.double() - other.double()).abs().max())}"
        if not same:
            found.append(f"{name}: {what}")
    return sorted(found)
