"""Step each parameter inside backward, once its gradient is complete, and free the gradient.

The gradients of all parameters then never live at once. The user's own optimizer makes each step;
for its duration it is shown one parameter group that holds only what is stepped. So its state, its
hyper-parameters and its schedulers are those of the untouched job, and so are the numbers (exact).
Small parameters wait for each other and step together: for each step the host takes as long as for
many kernels.

A parameter steps when the last micro-batch's backward brings its gradient, so whoever runs the
steps says which backward is the last: `with in_backward.armed(): loss.backward()`.

Backward reads weights while others are already stepped. Where it still needs the old value of one
that was stepped (a use of `weight.detach()`, say), autograd notices and raises; but not inside a
recomputed block, which would read the new value.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput
from oomph.techniques.partial_steps import is_follower, part_of_a_step, tell_followers

#: Classes whose step of one parameter looks at no other parameter.
PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

#: Gradients that wait for each other are so many bytes, at most, and this part of all of them.
TOGETHER, PART = 32 << 20, 1 / 32


class Masters(Protocol):
    """Who keeps other tensors in the optimizer than the model's parameters; see `MasterWeights`.

    It puts the gradient of an owned tensor in place before the hooks of this file run, and its own
    hooks on the optimizer's step look only at the parameters the optimizer is shown.
    """

    def leaf_of(self, owned: Tensor) -> Tensor:
        """The model's parameter whose backward brings the gradient of this tensor."""


class OptimizerInBackward:
    """Makes `optimizer` step inside armed backwards; see `armed`.

    `clip_norm` and `scaler` are what the job uses: both need all gradients before the first step,
    so a job that has one is refused.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        masters: Masters | None = None,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if clip_norm is not None:
            raise BadInput(
                "clipping by the norm of all gradients needs them all before the first step, and "
                "stepping inside backward frees each: do without one or the other"
            )
        if scaler is not None and scaler.is_enabled():
            raise BadInput(
                "a GradScaler looks at all gradients before it lets the optimizer step, and "
                "stepping inside backward frees each: use bf16, which needs no scaler"
            )
        check_per_parameter(optimizer, "stepping inside backward")
        self._optimizer = optimizer
        self._masters = masters
        self._check_step_hooks()
        #: Whether the last armed step broke off after some parameters had been stepped: weights
        #: and optimizer state are then partly those of the next step.
        self.dirty = False
        #: Told of each parameter right before it is stepped, so that its step can be taken back.
        self.before_step: Callable[[Tensor], None] | None = None
        self._armed = False
        self._scale: Tensor | None = None
        #: What has its gradient and is stepped with what comes next.
        self._waiting: list[Tensor] = []
        #: What was stepped or waits for it.
        self._came: set[Tensor] = set()
        #: By owned tensor: its group, as the optimizer has them when a region is armed.
        self._groups: dict[Tensor, dict[str, Any]] = {}
        #: Each device has its own backward thread, and the optimizer is shown one group at a time.
        self._lock = threading.Lock()
        #: By leaf: the tensor that the optimizer steps for it.
        self._owned: dict[Tensor, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        #: Bytes of gradients that are worth a step.
        self._together = 0.0
        for owned in _parameters(optimizer):
            leaf = masters.leaf_of(owned) if masters is not None else owned
            if leaf.requires_grad:
                self._owned[leaf] = owned
                self._together += owned.nbytes * PART
                hook = leaf.register_post_accumulate_grad_hook(weakly(self._arrived))
                self._handles.append(hook)

    @contextlib.contextmanager
    def armed(self, scale: Tensor | None = None) -> Iterator[None]:
        """The backward inside makes the step: exactly one for each parameter that has a gradient.

        Each gradient is multiplied by `scale` first. A gradient that is left from earlier
        micro-batches, because this backward did not reach its parameter, is stepped at the end.

        If backward fails inside, its error passes; parameters that were stepped by then stay
        stepped, the others keep their gradients, and `dirty` says whether there are any.
        """
        if self._armed:
            raise BadInput("stepping inside backward is armed already: arm one backward at a time")
        self._check_step_hooks()
        self._groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        self._armed, self._scale, self.dirty = True, scale, False
        try:
            yield
            left = [owned for owned in self._groups if owned not in self._came]
            for owned in left:
                self._came_in(owned)
            self._step()
            # What schedulers look at; it says nothing about how many parameters had a gradient.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            tell_followers(self._optimizer)
        except BaseException:
            self.dirty = len(self._came) > len(self._waiting)
            raise
        finally:
            self._armed, self._scale = False, None
            self._groups, self._waiting, self._came = {}, [], set()

    def undo(self) -> None:
        """Backward only makes gradients again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._owned.clear()

    def _arrived(self, leaf: Tensor) -> None:
        if self._armed:
            self._came_in(self._owned[leaf])

    def _came_in(self, owned: Tensor) -> None:
        if owned.grad is None:
            return  # as the plain optimizer: somebody took the gradient away
        with self._lock:
            self._check_new(owned)
            self._came.add(owned)
            self._waiting.append(owned)
            waiting = sum(_gradient_bytes(one) for one in self._waiting)
            if waiting >= min(self._together, TOGETHER):
                self._step()

    @torch.no_grad()
    def _step(self) -> None:
        """Step what waits, one group of parameters after the other."""
        while self._waiting:
            group = self._groups[self._waiting[0]]
            together = [one for one in self._waiting if self._groups[one] is group]
            # Before the step: one that fails halfway has changed something, too.
            self._waiting = [one for one in self._waiting if self._groups[one] is not group]
            for owned in together:
                if self.before_step is not None:
                    self.before_step(owned)
                if self._scale is not None and owned.grad is not None:
                    owned.grad.mul_(self._scale)
            with part_of_a_step(), shown_only(self._optimizer, group, together):
                self._optimizer.step()
            for owned in together:
                owned.grad = None

    def _check_new(self, owned: Tensor) -> None:
        shape = list(owned.shape)
        if owned not in self._groups:
            raise BadInput(
                f"a parameter {shape} is no longer in the optimizer: undo stepping inside backward "
                "before the optimizer's parameters are replaced, and apply it again afterwards"
            )
        if owned in self._came:
            raise BadInput(
                f"a parameter {shape} got a second gradient after its step was due: arm one"
                " backward only, and use checkpoint(…, use_reentrant=False) for weights used more"
                " than once"
            )

    def _check_step_hooks(self) -> None:
        if foreign_step_hooks(self._optimizer, self._masters):
            raise BadInput(
                "the optimizer's step has hooks, which would run once for each parameter "
                "inside backward: remove them, or do not step inside backward"
            )


def foreign_step_hooks(optimizer: torch.optim.Optimizer, masters: Masters | None) -> list[Any]:
    """What else is called before and after each step of the optimizer."""
    hooks: Iterable[Any] = (
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    )
    foreign = [hook for hook in hooks if not is_follower(hook)]
    return [h for h in foreign if masters is None or getattr(h, "__self__", None) is not masters]


@contextlib.contextmanager
def shown_only(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Iterable[Tensor]
) -> Iterator[None]:
    """While active, the optimizer has these parameters of one group and no others."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": list(parameters)}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The method as a tensor's hook that does not keep its object alive.

    Python cannot see who holds what through a tensor's hooks: a circle there is never freed.
    """
    reference = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    return hook


def check_per_parameter(optimizer: torch.optim.Optimizer, technique: str) -> None:
    """Refuse an optimizer that may not step each parameter by itself."""
    if not runs_step_of(optimizer, PER_PARAMETER):
        known = ", ".join(cls.__name__ for cls in PER_PARAMETER)
        raise BadInput(
            f"{technique} needs an optimizer that steps each parameter by itself, which nobody "
            f"can tell of {type(optimizer).__name__}: use one of torch.optim's {known}"
        )


def runs_step_of(
    optimizer: torch.optim.Optimizer, classes: Iterable[type[torch.optim.Optimizer]]
) -> bool:
    """Whether the optimizer is of one of these classes, and steps as that class does."""
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, cls) and step is inspect.unwrap(cls.step) for cls in classes)


def _gradient_bytes(owned: Tensor) -> int:
    return owned.grad.nbytes if owned.grad is not None else 0


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
