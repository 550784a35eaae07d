"""Optimizers, as people choose, write and wrap them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .pieces import Rows, momentum, regression, rows
from .training import Training, way

#: Why a step that looks at all parameters, or does more than PyTorch's own, is not divided.
UNDIVIDED = r"steps each parameter by itself|once for each step|its parameters|own optimizers"
WHOLE_STEP = dict.fromkeys(
    ("in_backward", "host_optimizer", "host_cores", "leaving_gradients", "disk_state"), UNDIVIDED
) | dict.fromkeys(("weights_away", "weights_on_disk"), UNDIVIDED)
#: Why a step that PyTorch has no fused kernel for is not fused.
UNFUSED = {"fused_optimizer": "fused"}


def _with(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Training:
    model = Rows()
    return regression(model, make(model.parameters()))


@way()
def sgd_with_everything() -> Training:
    """Momentum by Nesterov, and weight decay."""
    return _with(lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1, nesterov=True))


@way()
def maximised() -> Training:
    """A reward that is to grow, with momentum that is dampened."""
    model = Rows()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, dampening=0.3, maximize=True)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return -(model(batch[0]) - batch[1]).square().mean()

    return Training(model=model, loss=loss, optimizer=optimizer, batches=rows())


@way()
def adam_with_amsgrad() -> Training:
    """The greatest second moment so far divides."""
    return _with(lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.01))


@way()
def adamw_for_each() -> Training:
    """Steps of lists of tensors."""
    return _with(lambda p: torch.optim.AdamW(p, 1e-2, foreach=True, weight_decay=0.1))


@way()
def adamw_fused_by_its_user() -> Training:
    """A fused step that no plan asked for."""
    return _with(lambda p: torch.optim.AdamW(p, 1e-2, fused=True, weight_decay=0.1))


@way()
def rate_as_a_tensor() -> Training:
    """A learning rate that is a tensor, which the loop writes to."""
    rate = torch.tensor(1e-2, dtype=torch.float64)
    model = Rows()
    training = regression(model, torch.optim.Adam(model.parameters(), rate, foreach=False))
    training.after_step = lambda: rate.mul_(0.7)
    return training


@way(refusals=UNFUSED)
def adafactor() -> Training:
    """Second moments by rows and columns; each tensor's update is clipped by its own norm."""
    return _with(lambda p: torch.optim.Adafactor(p, 1e-1))


@way(refusals=UNFUSED)
def rmsprop_centred() -> Training:
    """With momentum, and the gradient's mean taken off."""
    return _with(lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.5))


@way()
def adagrad_that_decays() -> Training:
    """A rate that falls by the count of steps that the optimizer keeps itself."""
    return _with(
        lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.3, initial_accumulator_value=0.1)
    )


@way(refusals=UNFUSED)
def nadam_decoupled() -> Training:
    """A momentum that follows a schedule of its own."""
    return _with(lambda p: torch.optim.NAdam(p, 1e-2, decoupled_weight_decay=True))


@way(refusals=UNFUSED)
def radam_at_its_start() -> Training:
    """Which formula it takes depends on the number of the step."""
    return _with(lambda p: torch.optim.RAdam(p, 1e-2, betas=(0.9, 0.7)))


@way(refusals=UNFUSED)
def averaged_sgd() -> Training:
    """Averages of the weights are part of the state."""
    return _with(lambda p: torch.optim.ASGD(p, 1e-2, t0=1))


@way(refusals=UNFUSED)
def rprop() -> Training:
    """Only the gradient's sign counts, and whether it changed."""
    return _with(lambda p: torch.optim.Rprop(p, 1e-3))


@way()
def several_groups() -> Training:
    """No decay for norms and biases, other rates for the head, a group that is almost frozen."""
    model = Rows()
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if p.dim() < 2 and "head" not in name]
    head = [p for name, p in named.items() if "head" in name]
    others = [p for name, p in named.items() if p.dim() > 1 and "head" not in name]
    groups: list[dict[str, Any]] = [
        {"params": others, "weight_decay": 0.2},
        {"params": plain, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"params": head, "lr": 1e-4, "maximize": False},
    ]
    return regression(model, torch.optim.AdamW(groups, 1e-2))


@way()
def a_group_for_each_parameter() -> Training:
    """Rates that fall from layer to layer, as fine-tuning has them, and named parameters."""
    model = Rows()
    groups = [
        {"params": [(name, p)], "lr": 0.05 * 0.9**at}
        for at, (name, p) in enumerate(model.named_parameters())
    ]
    return regression(model, torch.optim.SGD(groups, 0.05, momentum=0.9))


class _Lion(torch.optim.Optimizer):
    """An optimizer of a paper, as its users paste it."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The sign of a mixture of momentum and gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_((0.9 * kept + 0.1 * parameter.grad).sign_(), alpha=-group["lr"])
                kept.lerp_(parameter.grad, 0.01)


@way(refusals=WHOLE_STEP | UNFUSED)
def an_optimizer_of_ones_own() -> Training:
    """Nobody knows of it whether a parameter is stepped by itself."""
    return _with(lambda p: _Lion(p, 1e-3))


class _Global(torch.optim.Optimizer):
    """Keeps what is of no single parameter in its state, by words."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step whose rate falls by a count, with the norm of all gradients followed."""
        state: Any = self.state
        state["steps"] = state["steps"] + 1 if "steps" in state else 1
        followed = state["all"].setdefault("norm", torch.zeros((), dtype=torch.float64))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    followed.lerp_(parameter.grad.norm(), 0.1)
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["steps"])


@way(refusals=WHOLE_STEP | UNFUSED)
def a_state_by_words() -> Training:
    """PyTorch saves and loads such a state as it does any other."""
    return _with(lambda p: _Global(p, 0.05))


class _TrustRatio(torch.optim.SGD):
    """All updates share one factor: the norm of all weights beside that of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Scale all gradients by it, then step."""
        owned = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = [
            torch.stack([one.norm() for one in ones]).norm()
            for ones in (owned, [p.grad for p in owned])
        ]
        for one in owned:
            one.grad.mul_(norms[0] / (norms[1] + 1e-6))
        super().step(closure)


@way(refusals=WHOLE_STEP | UNFUSED)
def a_step_over_all_parameters() -> Training:
    """A subclass whose step depends on all gradients at once, as LAMB's and LARS' kin."""
    return _with(lambda p: _TrustRatio(p, 1e-2, momentum=0.5))


@way(refusals=WHOLE_STEP | UNFUSED)
def a_step_that_keeps_a_log() -> Training:
    """A subclass that clips, lists the norms it found, and lowers the rate by their number."""
    norms: list[float] = []

    class Logging(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            owned = [parameter for group in self.param_groups for parameter in group["params"]]
            norms.append(float(torch.nn.utils.clip_grad_norm_(owned, 0.3)))
            self.param_groups[0]["lr"] = 0.05 / len(norms)
            super().step(closure)

    training = _with(lambda p: Logging(p, 0.05, momentum=0.5))
    training.state = lambda: torch.tensor(norms, dtype=torch.float64)
    return training


@way(refusals=WHOLE_STEP)
def a_wrapped_step() -> Training:
    """`optimizer.step` of the instance clips, steps, decays and counts, with several groups."""
    model = Rows()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.02}], 0.05)
    step, counted = optimizer.step, [0]

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        out = step(*args, **kwargs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.999)
        counted[0] += 1
        return out

    optimizer.step = wrapped  # type: ignore[method-assign]
    training = regression(model, optimizer)
    training.state = lambda: counted[0]
    return training


@way(refusals=WHOLE_STEP)
def hooks_around_the_step() -> Training:
    """A hook before the step clips by value; one after it keeps an average of the weights."""
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    average = [p.detach().clone() for p in model.parameters()]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)

    @torch.no_grad()
    def follow(*_: Any) -> None:
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter, 0.2)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(follow)
    training = regression(model, optimizer)
    training.state = lambda: average
    return training


class _Lookahead(torch.optim.Optimizer):
    """Every second step, weights go half the way back to where they were two steps before."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The inner optimizer's, and now and then a look back."""
        self.inner.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            owned = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, owned, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


@way(refusals=WHOLE_STEP | UNFUSED)
def an_optimizer_around_another() -> Training:
    """Lookahead, with its inner optimizer's state out of sight."""
    model = Rows()
    inner = torch.optim.Adam(model.parameters(), 1e-2)
    training = regression(model, _Lookahead(inner))
    training.state = lambda: [inner.state_dict()["state"]]
    return training


@way()
def an_optimizer_that_trained_before() -> Training:
    """Its state is there already when the run begins."""
    model = Rows()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, y in rows(sizes=(3, 4)):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return regression(model, optimizer)


@way(refusals=dict.fromkeys(("micro_batch", "one_by_one"), "another number of samples"))
def weights_that_get_no_gradient() -> Training:
    """A part of the model is never used, one for some sizes alone: decay must skip it there."""

    class Sometimes(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(8, 8).double()
            self.adapter = nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out + self.adapter(x) if len(x) % 2 else out

    model = Sometimes()
    return regression(model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5))


# -- schedules -------------------------------------------------------------------------------------


def _scheduled(make: Callable[[Any], Any], optimizer: Any = None) -> Training:
    model = Rows()
    optimizer = optimizer(model.parameters()) if optimizer is not None else momentum(model)
    training = regression(model, optimizer)
    scheduler = make(optimizer)
    training.after_step = scheduler.step
    training.state = lambda: scheduler.state_dict()["_last_lr"]
    return training


@way()
def one_cycle() -> Training:
    """A schedule that moves the momentum, too."""
    return _scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8))


@way()
def one_cycle_of_adam() -> Training:
    """The same with Adam, whose betas it moves."""
    return _scheduled(
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=8),
        lambda p: torch.optim.AdamW(p, 1e-3),
    )


@way()
def warmed_up_and_restarted() -> Training:
    """Two schedules behind each other."""

    def make(optimizer: Any) -> Any:
        schedules = torch.optim.lr_scheduler
        return schedules.SequentialLR(
            optimizer,
            [
                schedules.LinearLR(optimizer, 0.1, total_iters=2),
                schedules.CosineAnnealingWarmRestarts(optimizer, 2),
            ],
            milestones=[2],
        )

    return _scheduled(make)


@way()
def rate_zero_at_first() -> Training:
    """A warm-up by a lambda that begins with no rate at all."""
    return _scheduled(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 4))


@way()
def frozen_and_thawed_between_steps() -> Training:
    """Blocks train from the second step on; the head does not from the third."""
    model = Rows()
    training = regression(model, torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=0.1))
    steps = [0]

    def change() -> None:
        steps[0] += 1
        model.head.requires_grad_(steps[0] % 2 == 0)

    training.after_step = change
    return training
