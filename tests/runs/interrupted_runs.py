"""Runs whose steps are broken off, under each of the techniques that a step is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from small_plans import plan_with
from switched_on import on
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, offloaded, saving
from oomph.runs.run import Run, apply

WIDTH = 6
BLOCKS = ("blocks.0", "blocks.1")

#: By name: what a plan does.
CHOICES = {
    "recompute": Choices(blocks=dict.fromkeys(BLOCKS, RECOMPUTE)),
    "recompute_in_part": Choices(blocks=dict.fromkeys(BLOCKS, saving(("product#0",)))),
    "micro_batch": Choices(blocks=dict.fromkeys(BLOCKS, KEEP), micro_batch=2),
    "fused_optimizer": Choices(
        blocks=dict.fromkeys(BLOCKS, KEEP), techniques=on("fused_optimizer")
    ),
    "in_backward": Choices(blocks=dict.fromkeys(BLOCKS, KEEP), optimizer_in_backward=True),
    "host_optimizer": Choices(blocks=dict.fromkeys(BLOCKS, KEEP), optimizer_on="host"),
    "host_cores": Choices(blocks=dict.fromkeys(BLOCKS, KEEP), optimizer_on="host", host_share=1.0),
    "disk_state": Choices(blocks=dict.fromkeys(BLOCKS, KEEP), optimizer_on="host", disk_share=1.0),
    "leaving_gradients": Choices(
        blocks=dict.fromkeys(BLOCKS, KEEP), optimizer_on="host", gradient_room=0
    ),
    "weights_away": Choices(
        blocks=dict.fromkeys(BLOCKS, KEEP), optimizer_on="host", weights_away=BLOCKS
    ),
    "offload": Choices(blocks=dict.fromkeys(BLOCKS, offloaded(KEEP))),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Counting(Net):
    """Has a running mean, which a batch in parts would move otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x)


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out: Tensor = model(batch[0])
    return (out - batch[1]).square().mean()


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run before its first step, and batches for it."""

    run: Run
    batches: list[tuple[Tensor, Tensor]]

    @classmethod
    def with_choices(cls, name: str, **options: Any) -> Started:
        """One of `CHOICES`; `options` are those of the job."""
        torch.manual_seed(0)
        model = Net() if name == "micro_batch" else Counting()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(3)]
        plan = plan_with(CHOICES[name], model, optimizer, batches[0])
        job = Job(model, square_loss, optimizer, batches[0], name="net", **options)
        run = apply(plan, job)
        torch.manual_seed(1)
        return cls(run=run, batches=batches)


class Nth(TorchDispatchMode):
    """Does something before the n-th operation inside, and counts all of them."""

    def __init__(self, at: int, what: Callable[[], None]) -> None:
        super().__init__()
        self.count = 0
        self._at, self._what = at, what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self._at:
            self._what()
        return func(*args, **(kwargs or {}))


def state_of(run: Run) -> dict[str, Any]:
    """All that a step may change, and whether it left gradients."""
    model, optimizer = run.model, run.optimizer.state_dict()
    optimizer["state"] = dict(sorted(optimizer["state"].items()))
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer,
        "random": torch.get_rng_state(),
        "gradients": [parameter.grad is not None for parameter in model.parameters()],
    }
