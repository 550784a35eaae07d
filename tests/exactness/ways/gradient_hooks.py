"""Hooks on gradients, as people add them to clip, to freeze, to scale and to look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

from .pieces import WORDS, Block, Rows, Tokens, momentum, rows, seeded, texts
from .training import Training, way

#: Why a hook that may read weights is refused beside those that are away, and a module's in parts.
READS = "may read weights"
PARTS = "backward hook"


def _rows(hook: Callable[[nn.Module], Any] | None = None) -> Training:
    model = Rows()
    if hook is not None:
        hook(model)
    return Training(model=model, loss=nn.MSELoss(), optimizer=momentum(model, 0.5), batches=rows())


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


@way()
def clamped_gradients() -> Training:
    """Each parameter's gradient is clamped: the commonest hook of all."""

    def hook(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(_clamp)

    return _rows(hook)


@way(refusals={"weights_away": READS, "weights_on_disk": READS})
def normalised_after_accumulation() -> Training:
    """Each gradient is normalised in place when it was added up."""

    def normalise(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm() + 1e-3).mul_(0.1)

    def hook(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(normalise)

    return _rows(hook)


@way()
def noise_on_gradients() -> Training:
    """Each gradient gets noise of one generator: who is called first draws first."""
    stream = seeded(5)

    def disturb(gradient: Tensor) -> Tensor:
        noise = torch.zeros_like(gradient).normal_(0, 0.01, generator=stream)
        return gradient + noise

    def hook(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(disturb)

    training = _rows(hook)
    training.state = stream.get_state
    return training


@way()
def looked_at_gradients() -> Training:
    """The norms of gradients are written down, as loggers do, and of some of them together."""
    seen: list[Any] = []

    def look(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: seen.append(gradient.norm()))
        blocks = [p for name, p in model.named_parameters() if name.startswith("blocks.")]
        register_multi_grad_hook(
            blocks, lambda all_: seen.append([one.norm() for one in all_ if one is not None])
        )

    training = _rows(look)
    # In which order is nobody's promise.
    training.state = lambda: sorted(_numbers(seen))
    return training


def _numbers(seen: list[Any]) -> list[float]:
    flat = [one for entry in seen for one in (entry if isinstance(entry, list) else [entry])]
    return [round(float(one), 9) for one in flat]


@way()
def tied_weights_with_a_hook() -> Training:
    """A weight that is used twice gets one gradient, and its hook one call."""
    calls: list[int] = []

    class Tied(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight

    def clip(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * (0.01 / (gradient.norm() + 0.01))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"])
        return F.cross_entropy(logits.reshape(-1, WORDS), batch["labels"].reshape(-1))

    model = Tied()
    model.embed.weight.register_hook(clip)
    training = Training(model=model, loss=loss, optimizer=momentum(model, 0.5), batches=texts())
    training.state = lambda: len(calls)
    return training


@way(refusals={"weights_away": READS, "weights_on_disk": READS})
def hooks_added_on_the_way() -> Training:
    """The hooks come after the first step, one of each kind; later one of them goes."""
    training = _rows()
    handles: list[Any] = []

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(parameter.grad.abs().amax().clamp(max=0.5))

    def add() -> None:
        if not handles:
            for parameter in training.model.parameters():
                handles.append(parameter.register_hook(_clamp))
                handles.append(parameter.register_post_accumulate_grad_hook(scale))
        else:
            handles[-1].remove()

    training.after_step = add
    return training


@way(
    refusals={"weights_away": READS, "weights_on_disk": READS},
)
def decay_in_a_hook() -> Training:
    """A hook that adds the weight itself, by its sign, to what it clamps."""

    def hook(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(
                lambda gradient, of=parameter: _clamp(gradient) + 1e-3 * of.detach().sign()
            )

    return _rows(hook)


@way(refusals={"micro_batch": PARTS, "one_by_one": PARTS})
def clipped_by_a_module() -> Training:
    """A module's full backward hook divides what comes by its norm."""

    def clip(module: nn.Module, given: Any, came: Any) -> Any:
        return tuple(None if one is None else one / (1 + one.norm()) for one in given)

    def hook(model: nn.Module) -> None:
        for block in model.modules():
            if isinstance(block, Block):
                block.register_full_backward_hook(clip)

    return _rows(hook)
