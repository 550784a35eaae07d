"""A small model trained with its optimizer on the host, and plainly: what tests of both share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.memory.link import Link
from oomph.memory.numbered_store import OpenStore
from oomph.techniques import streamed_step
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.host_tensors import gpu_like
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.streamed_weights import StreamedWeights

WORDS, WIDTH = 24, 16

#: Small enough to cut the embedding, and to have several buckets.
SMALL = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Tied weights, a frozen parameter, one that is used in some steps only, one of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, sometimes: bool) -> Tensor:
        x = self.embed(tokens) * self.gain
        x = x + self.frozen.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        if sometimes:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and what is no matrix without decay; frozen ones are there, too."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=1e-2)


@dataclass(kw_only=True)
class Recipe:
    """How both are trained."""

    make_optimizer: MakeOptimizer = adamw
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    clip_norm: float | None = None
    parts: int = 1
    masters: bool = False
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    scaler: Callable[[], torch.amp.GradScaler] | None = None
    around_forward: Callable[[], Any] | None = None
    prepare: Callable[[Net], None] | None = None
    """What is done to the model before all else."""


@dataclass(kw_only=True)
class Training:
    """A model in training; `host` is None where it is trained plainly."""

    recipe: Recipe
    model: Net = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    masters: MasterWeights | None = field(init=False, default=None)
    host: HostOptimizer | None = None
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.model = make_net(dtype=recipe.dtype).to(recipe.device)
        if recipe.prepare is not None:
            recipe.prepare(self.model)
        self.optimizer = recipe.make_optimizer(self.model)
        if recipe.masters:
            self.masters = MasterWeights(self.model, self.optimizer)
        self.scheduler = recipe.schedule(self.optimizer) if recipe.schedule else None
        self.scaler = recipe.scaler() if recipe.scaler else None
        self.generator = torch.Generator().manual_seed(1)

    def go_to_host(
        self,
        link: Link,
        *,
        weights: StreamedWeights | None = None,
        blocks: Sequence[nn.Module] | None = None,
        disk: OpenStore | None = None,
        **placement: Any,
    ) -> HostOptimizer:
        self.host = HostOptimizer(
            self.model,
            self.optimizer,
            link,
            HostPlacement(**{"bucket": SMALL, **placement}),
            blocks=blocks,
            masters=self.masters,
            weights=weights,
            clip_norm=self.recipe.clip_norm,
            scaler=self.scaler,
            disk=disk,
        )
        return self.host

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            self.step(len(self.losses))
        if self.host is not None:
            self.host.settle()
        return self

    def step(self, number: int) -> None:
        tokens = torch.randint(0, WORDS, (4, 6), generator=self.generator).to(self.recipe.device)
        total = 0.0
        parts = list(tokens.chunk(self.recipe.parts))
        for at, part in enumerate(parts):
            # In the last part it may be missing where an earlier one had it.
            sometimes = number % 3 == 1 and at == 0
            with self.recipe.around_forward() if self.recipe.around_forward else nullcontext():
                logits = self.model(part[:, :-1], sometimes)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
            loss = loss / len(parts)
            total += float(loss.detach())
            scaled = self.scaler.scale(loss) if self.scaler is not None else loss
            if self.host is None:
                scaled.backward()
            else:
                with self.host.backward(last=at == len(parts) - 1):
                    scaled.backward()
        self.losses.append(total)
        if self.host is None:
            self._plain_step()
        else:
            self.host.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def _plain_step(self) -> None:
        optimizer, scaler = self.optimizer, self.scaler
        if self.recipe.clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(owned, self.recipe.clip_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def go_on_from(self, other: Training) -> None:
        """Load what another training has learned, and have the batches and losses that it has."""
        self.model.load_state_dict(other.model.state_dict())
        if self.masters is not None and other.masters is not None:
            pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
            for mine, theirs in pairs:
                if self.masters.master_of(mine) is not mine:
                    self.masters.write(mine, other.masters.master_of(theirs))
        saved = other.optimizer.state_dict()
        # A plain optimizer takes tensors as they are: both would count steps in one of them.
        self.optimizer.load_state_dict(copy.deepcopy(saved) if self.host is None else saved)
        self.generator.set_state(other.generator.get_state())
        self.losses[:] = other.losses

    def weights(self) -> dict[str, Tensor]:
        found = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
        if self.masters is not None:
            for name, p in self.model.named_parameters():
                found[f"master of {name}"] = self.masters.master_of(p).detach().cpu().clone()
        return found

    def state(self) -> dict[str, Any]:
        saved = copy.deepcopy(self.optimizer.state_dict()["state"])
        return {
            f"{at} {name}": value.cpu() if isinstance(value, Tensor) else value
            for at, state in saved.items()
            for name, value in state.items()
        }


def step_once(
    loss: Tensor,
    optimizer: torch.optim.Optimizer,
    host: HostOptimizer | None,
    clip_norm: float | None = None,
) -> None:
    """A step of any model: plainly, or by the optimizer on the host, which clips by itself."""
    if host is not None:
        with host.backward():
            loss.backward()
        host.step()
        return
    loss.backward()
    if clip_norm is not None:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(owned, clip_norm)
    optimizer.step()
    optimizer.zero_grad()


def plain(recipe: Recipe, steps: int) -> Training:
    return Training(recipe=recipe).run(steps)


def same_bits(one: Training, other: Training) -> None:
    """Losses, weights, masters and state have the same bits."""
    assert one.losses == other.losses, f"{one.losses} and {other.losses}"
    for ours, theirs in ((one.weights(), other.weights()), (one.state(), other.state())):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if isinstance(value, Tensor):
                assert value.dtype == theirs[name].dtype, name
                assert torch.equal(value, theirs[name]), name
            else:
                assert value == theirs[name], name


def nearly(one: Training, other: Training, tolerance: float = 1e-6) -> None:
    """Losses and weights differ by no more than this part of them."""
    for ours, theirs in zip(one.losses, other.losses, strict=True):
        assert abs(ours - theirs) <= tolerance * abs(theirs)
    theirs_by_name = other.weights()
    for name, value in one.weights().items():
        difference = (value - theirs_by_name[name]).norm()
        assert difference <= tolerance * theirs_by_name[name].norm(), name


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 5)


def overflowing() -> torch.amp.GradScaler:
    """A scale that the first gradients are too large for, and later ones at times."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)


@contextmanager
def same_batch_again(training: Training) -> Iterator[None]:
    """The step after this one has the batch of the one inside, which fails."""
    state = training.generator.get_state()
    yield
    training.generator.set_state(state)


@contextmanager
def little_room(monkeypatch: pytest.MonkeyPatch, tensors: int) -> Iterator[None]:
    """Memory runs out when so many tensors have come to the GPU to be stepped."""

    def scarce(tensor: Tensor, *args: Any) -> Tensor:
        nonlocal tensors
        tensors -= 1
        if tensors < 0:
            raise torch.OutOfMemoryError("no room")
        return gpu_like(tensor, *args)

    with monkeypatch.context() as patch:
        patch.setattr(streamed_step, "gpu_like", scarce)
        yield


def fail_once(model: Net) -> None:
    """The next backward fails in the middle."""

    def fail(gradient: Tensor) -> None:
        handle.remove()
        raise RuntimeError("in the middle of backward")

    handle = model.blocks[1].up.weight.register_hook(fail)
