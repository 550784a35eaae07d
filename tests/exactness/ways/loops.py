"""Loops: what is done between steps, and beside them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .losses import WHOLE
from .pieces import Block, Rows, momentum, numbers, regression, rows
from .training import Training, way

#: Why stepping inside backward does not know the norm of all gradients.
NORM = {"in_backward": "norm of all gradients"}


@way(refusals=NORM)
def clipped_by_the_norm() -> Training:
    """The norm of all gradients, which is far above what is allowed."""
    return regression(Rows(), clip_norm=0.05)


@way(refusals=NORM)
def clipped_sometimes() -> Training:
    """A limit that some steps reach, with groups and an adaptive optimizer."""
    model = Rows()
    head = list(model.head.parameters())
    others = [p for name, p in model.named_parameters() if "head" not in name]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": head, "lr": 3e-2}]
    return regression(model, torch.optim.AdamW(groups, 1e-2), clip_norm=0.7)


@way()
def evaluated_between_steps() -> Training:
    """After each step the model evaluates, without gradients, and trains again."""
    model = Rows()
    training = regression(model)
    seen: list[float] = []

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            seen.append(round(float(F.mse_loss(model(rows()[0][0]), rows()[0][1])), 9))
        model.train()

    training.after_step = evaluate
    training.state = lambda: seen
    return training


@way()
def evaluated_in_inference_mode() -> Training:
    """The same in inference mode, whose tensors autograd never takes."""
    model = Rows()
    training = regression(model)
    seen: list[float] = []

    def evaluate() -> None:
        with torch.inference_mode():
            seen.append(round(float(model(rows()[0][0]).square().mean()), 9))

    training.after_step = evaluate
    training.state = lambda: seen
    return training


@way()
def looked_at_with_gradients() -> Training:
    """Between steps somebody takes gradients by the input: a saliency map."""
    model = Rows()
    training = regression(model)
    seen: list[float] = []

    def look() -> None:
        x = rows()[0][0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x)
        seen.append(round(float(slope.abs().sum()), 8))

    training.after_step = look
    training.state = lambda: seen
    return training


@way()
def gradients_left_by_others() -> Training:
    """Gradients that were there before the run begin from nothing, as its words say."""
    model = Rows()
    training = regression(model)
    for x, y in rows(sizes=(2,)):
        F.mse_loss(model(x), y).backward()
    training.optimizer.zero_grad()
    return training


@way()
def rates_changed_by_hand() -> Training:
    """The loop divides the learning rate, and sets the decay of one group."""
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    training = regression(model, optimizer)

    def change() -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2
            group["betas"] = (0.8, 0.95)
            group["weight_decay"] += 0.1

    training.after_step = change
    return training


@way()
def copied_between_steps() -> Training:
    """A deep copy of the weights is kept after each step, as early stopping has it."""
    model = Rows()
    training = regression(model)
    best: list[dict[str, Any]] = []

    def keep() -> None:
        best.append(copy.deepcopy({name: p.detach() for name, p in model.named_parameters()}))

    training.after_step = keep
    training.state = lambda: best
    return training


@way()
def counted_by_hooks() -> Training:
    """Forward hooks and pre-hooks of modules change what goes in and out."""
    model = Rows()
    calls = [0]

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 0.9,), kwargs

    def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + 0.1

    for block in model.blocks:
        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)
    model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0]))
    return regression(model)


@way(refusals=WHOLE)
def a_hook_on_what_blocks_give() -> Training:
    """A tensor hook, registered in forward, scales the gradient of a block's result."""

    class Scaling(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda grad: grad * 0.7)
            return out

    return regression(Rows(Scaling))


@way()
def a_gradient_kept_for_a_look() -> Training:
    """`retain_grad` on what the loss is made of."""
    kept: list[Tensor] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        out.retain_grad()
        return F.mse_loss(out, batch[1])

    training = regression(Rows(), loss=loss)
    training.state = lambda: kept
    return training


@way(refusals=WHOLE | {"fit": "backward"})
def two_backwards_in_the_loss() -> Training:
    """The loss asks for gradients by its own logits first, keeping the graph."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model.hidden(batch[0])
        out = model.head(hidden)
        first = F.mse_loss(out, batch[1])
        (slope,) = torch.autograd.grad(first, hidden, retain_graph=True)
        return first + (slope.detach() * hidden).sum()

    return regression(Rows(), loss=loss)


@way()
def a_weight_that_follows_the_epoch() -> Training:
    """The loop sets a coefficient on the model, which the loss reads as a number."""
    model = Rows()
    model.coefficient = 0.0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        return F.mse_loss(out, batch[1]) + model.coefficient * out.square().mean()

    training = regression(model, loss=loss)

    def anneal() -> None:
        model.coefficient += 0.25

    training.after_step = anneal
    return training


@way()
def a_temperature_as_a_tensor() -> Training:
    """The same as a tensor outside of the model, which the loop writes to."""
    temperature = torch.ones((), dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]) / temperature, batch[1])

    training = regression(Rows(), loss=loss)
    training.after_step = lambda: temperature.add_(0.5)
    return training


@way()
def in_accumulation_by_the_user() -> Training:
    """The job says itself that its batch goes in parts of three."""
    return regression(Rows(), micro_batch=3)


@way()
def under_checkpoints_by_the_user() -> Training:
    """The job says itself that all its blocks are recomputed."""
    return regression(Rows(), checkpointing="full")


@way()
def a_buffer_written_by_the_loop() -> Training:
    """The loop writes to a buffer that the forward reads: an annealed noise level."""

    class Level(Rows):
        level: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.level)

    model = Level()
    training = regression(model)
    training.after_step = lambda: model.level.mul_(0.8)
    return training


@way()
def a_stream_of_its_own_per_step() -> Training:
    """The loop seeds everything anew after each step."""

    class Noisy(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.noise)

    model = Noisy()
    model.noise = numbers(1, 8, seed=1)
    training = regression(model, momentum(model))

    def seed() -> None:
        torch.manual_seed(int(torch.randint(1000, ())))
        model.noise = torch.randn(1, 8, dtype=torch.float64)

    training.after_step = seed
    return training
