"""Weights that are read and written outside of their module, between steps and inside of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from .pieces import WIDTH, Block, Rows, momentum, numbers, rows
from .training import Training, way

#: Steps that clip are only begun where the optimizer is on the host.
CLIPS = {"in_backward": "clipping by the norm"}


def _training(model: nn.Module | None = None, loss: Any = None, **options: Any) -> Training:
    model = model or Rows()
    return Training(
        model=model,
        loss=loss or nn.MSELoss(),
        optimizer=momentum(model),
        batches=rows(),
        options=options,
    )


def _after_each_step(look: Callable[[nn.Module], Any], **options: Any) -> Training:
    """A training whose loop looks at the model after each step, and keeps what it saw."""
    training = _training(**options)
    seen: list[Any] = []
    training.after_step = lambda: seen.append(look(training.model))
    training.state = lambda: list(seen)
    return training


@way(refusals=CLIPS)
def average_of_weights() -> Training:
    """An EMA written by hand, as most are: of the parameters, in place."""
    training = _training(clip_norm=1.0)
    average = [p.detach().clone() for p in training.model.parameters()]

    def follow() -> None:
        with torch.no_grad():
            for mean, p in zip(average, training.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    training.after_step = follow
    training.state = lambda: average
    return training


@way(refusals=CLIPS)
def averaged_model() -> Training:
    """PyTorch's own average, made before the run."""
    training = _training(clip_norm=1.0)
    averaged = AveragedModel(training.model)
    training.after_step = lambda: averaged.update_parameters(training.model)
    training.state = averaged.state_dict
    return training


@way(refusals=CLIPS)
def looked_at_between_steps() -> Training:
    """Norms, a vector of all parameters, a state dict and a copy of the model."""

    def look(model: nn.Module) -> Any:
        state = copy.deepcopy(model.state_dict())
        return {
            "norms": [torch.tensor(p.norm().item()) for p in model.parameters()],
            "vector": nn.utils.parameters_to_vector(model.parameters()).detach().clone(),
            "lists": torch.tensor([p.tolist()[0] for p in model.parameters() if p.dim() == 1]),
            "state": state,
            "sums": [p.data.sum() for p in model.parameters()],
        }

    return _after_each_step(look, clip_norm=1.0)


@way(refusals=CLIPS)
def called_between_steps() -> Training:
    """Evaluated without the run, by calling the model, a part of it and its layers' weights."""
    x = numbers(3, WIDTH, seed=77)

    @torch.no_grad()
    def look(model: nn.Module) -> Any:
        assert isinstance(model, Rows)
        by_hand = F.linear(model.hidden(x), model.head.weight, model.head.bias)
        return [model(x), model.blocks[1](x), by_hand, F.linear(x, model.blocks[0].up.weight)]

    return _after_each_step(look, clip_norm=1.0)


@way(refusals=CLIPS)
def weights_written_in_place() -> Training:
    """Decay by hand, and rows that are made anew."""

    @torch.no_grad()
    def write(model: nn.Module) -> None:
        for p in model.parameters():
            p.mul_(0.99)
        assert isinstance(model, Rows)
        model.blocks[0].up.weight[0] = 0.1
        model.blocks[1].down.bias.zero_()
        nn.init.constant_(model.blocks[1].norm.weight, 0.9)

    return _after_each_step(write, clip_norm=1.0)


@way()
def weights_clipped_through_data() -> Training:
    """A critic's weights are clipped after each step, as in WGAN."""

    def clip(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    return _after_each_step(clip)


@way()
def weights_replaced_through_data() -> Training:
    """Vectors of all parameters, changed and put back, as evolution does."""

    def replace(model: nn.Module) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(0.98 * vector, model.parameters())

    return _after_each_step(replace)


@way()
def weights_tied_on_the_way() -> Training:
    """After the first step a layer gets the weight of another block's."""
    training = _training()

    def tie() -> None:
        assert isinstance(training.model, Rows)
        one, other = training.model.blocks
        other.up.weight = one.up.weight

    training.after_step = tie
    return training


@way(refusals=CLIPS)
def state_loaded_between_steps() -> Training:
    """Every second step goes back halfway to where the training began."""
    training = _training(clip_norm=1.0)
    first = copy.deepcopy(training.model.state_dict())
    steps = {"made": 0}

    def load() -> None:
        steps["made"] += 1
        if steps["made"] % 2 == 0:
            now = training.model.state_dict()
            training.model.load_state_dict({k: (now[k] + first[k]) / 2 for k in now})

    training.after_step = load
    return training


@way(refusals=CLIPS)
def aliases_of_weights() -> Training:
    """A loop that took hold of the parameters' memory once, and reads and writes it."""
    training = _training(clip_norm=1.0)
    held: list[Tensor] = []
    seen: list[Tensor] = []

    def look() -> None:
        if not held:
            held.extend(p.detach() for p in training.model.parameters())
        seen.append(torch.stack([one.sum() for one in held]))
        held[-1].mul_(0.9)
        held[4].add_(0.01)

    training.after_step = look
    training.state = lambda: seen
    return training


@way(refusals=CLIPS)
def optimizer_looked_at() -> Training:
    """Momenta read and damped between steps, and a rate that changes."""
    training = _training(clip_norm=1.0)
    seen: list[Tensor] = []

    def look() -> None:
        for p in training.model.parameters():
            buffer = training.optimizer.state[p]["momentum_buffer"]
            seen.append(buffer.norm())
            buffer.mul_(0.5)
        training.optimizer.param_groups[0]["lr"] *= 0.9

    training.after_step = look
    training.state = lambda: seen
    return training


@way()
def orthogonal_weights() -> Training:
    """A penalty on products of weights with themselves, through views of them."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        apart = torch.zeros((), dtype=torch.float64)
        for p in model.parameters():
            if p.dim() == 2:
                gram = p.t() @ p
                apart = apart + (gram - torch.eye(len(gram)).double()).square().mean()
        return F.mse_loss(model(batch[0]), batch[1]) + 0.1 * apart

    return _training(loss=loss)


@way()
def anchored_weights() -> Training:
    """A penalty on the way from where the weights began, computed before the model is called."""
    model = Rows()
    first = [p.detach().clone() for p in model.parameters()]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        apart = [(p - p0).square().sum() for p, p0 in zip(model.parameters(), first, strict=True)]
        return torch.stack(apart).sum() + F.mse_loss(model(batch[0]), batch[1])

    return _training(model, loss)


class _ReadsAnother(Block):
    """A block that reads a weight of another, which trains it or not."""

    other: list[nn.Linear]
    detaches = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        weight = self.other[0].weight
        if self.detaches:
            weight = weight.detach()
        return x + 0.1 * F.linear(x, weight[:WIDTH])


class _Reading(_ReadsAnother):
    detaches = False


class _ReadingDetached(_ReadsAnother):
    detaches = True


def _reading(block: type[_ReadsAnother]) -> Training:
    """Each block reads a weight of the other one."""
    model = Rows(block)
    one, other = model.blocks
    one.other, other.other = [other.up], [one.up]
    return _training(model)


@way()
def weights_of_another_block() -> Training:
    """Shared by code, not by a module."""
    return _reading(_Reading)


@way()
def detached_weights_of_another_block() -> Training:
    """As a teacher inside the model, which this block does not train."""
    return _reading(_ReadingDetached)


class _NormLimited(nn.Linear):
    """A layer that keeps its weights small itself, as EEGNet's."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class _LimitedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = _NormLimited(WIDTH, 3 * WIDTH)


@way(
    refusals={
        **dict.fromkeys(("recompute", "recompute_in_part", "fit"), "recomputed"),
        **dict.fromkeys(("weights_away", "weights_on_disk"), "writes to its own weights"),
        **dict.fromkeys(("micro_batch", "one_by_one"), "must not be split"),
    }
)
def weights_limited_in_forward() -> Training:
    """`weight.data` is replaced in each forward."""
    return _training(Rows(_LimitedBlock))
