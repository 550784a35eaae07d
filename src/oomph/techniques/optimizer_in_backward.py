"""Step each parameter inside backward, once its gradient is complete, and free the gradient.

The gradients of all parameters then never exist at once. The user's own optimizer makes each step;
during the step it has one parameter group that holds only the stepped parameters. So its state,
hyper-parameters and schedulers are those of the untouched job, and so are the results (exact).
Small parameters wait for each other and step together, because one step costs the host as much time
as many kernel launches.

A parameter steps when the last micro-batch's backward produces its gradient, so the caller says
which backward is the last: `with in_backward.armed(): loss.backward()`.

Backward still reads some weights while others are already stepped. A weight that it will read
again, for example because another block used its `weight.detach()`, is stepped after that read
(`LaterReads`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput
from oomph.techniques.host_tensors import bytes_of
from oomph.techniques.later_reads import LaterReads
from oomph.techniques.optimizer_steps import Masters, check_per_parameter
from oomph.techniques.partial_steps import part_of_a_step, tell_followers
from oomph.torch_compat.optimizers import mark_stepped

#: Gradients that wait for each other have at most this many bytes, and this share of all bytes.
TOGETHER, PART = 32 << 20, 1 / 32


class OptimizerInBackward:
    """Makes `optimizer` step inside armed backwards; see `armed`.

    `clip_norm` and `scaler` are the job's: both need all gradients before the first step, so a job
    that has one is refused.
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
        self._optimizer = optimizer
        self._masters = masters
        self._check_step()
        #: Whether the last armed step failed after some parameters had been stepped: weights and
        #: optimizer state are then partly those of the next step.
        self.dirty = False
        #: Called with each parameter right before it is stepped, so that its step can be undone.
        self.before_step: Callable[[Tensor], None] | None = None
        self._armed = False
        self._scale: Tensor | None = None
        #: Parameters that have their gradients and wait to be stepped together.
        self._waiting: list[Tensor] = []
        #: Parameters that were stepped or wait for their step.
        self._came: set[Tensor] = set()
        #: The group of each owned tensor, read from the optimizer when a region is armed.
        self._groups: dict[Tensor, dict[str, Any]] = {}
        #: Each device has its own backward thread, but the optimizer steps one group at a time.
        self._lock = threading.Lock()
        #: The tensor that the optimizer steps for each leaf.
        self._owned: dict[Tensor, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        #: Bytes of waiting gradients from which a step is worthwhile.
        self._together = 0.0
        self._later = LaterReads([])
        for owned in _parameters(optimizer):
            leaf = self._leaf(owned)
            if leaf.requires_grad:
                self._owned[leaf] = owned
                self._together += owned.nbytes * PART
                hook = leaf.register_post_accumulate_grad_hook(weakly(self._arrived))
                self._handles.append(hook)
        self._later = LaterReads(self._owned)

    @contextlib.contextmanager
    def armed(self, scale: Tensor | None = None) -> Iterator[None]:
        """Let the backward inside step each parameter that has a gradient exactly once.

        Each gradient is multiplied by `scale` first. If a gradient is left from earlier
        micro-batches because this backward did not reach its parameter, it is stepped at the end.

        If backward fails inside, its error is raised on; parameters that were stepped by then stay
        stepped, the others keep their gradients, and `dirty` says whether any were stepped.
        """
        if self._armed:
            raise BadInput("stepping inside backward is armed already: arm one backward at a time")
        self._check_step()
        self._groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        self._armed, self._scale, self.dirty = True, scale, False
        try:
            yield
            left = [owned for owned in self._groups if owned not in self._came]
            for owned in left:
                self._came_in(owned)
            self._step(self._waiting)
            # Schedulers look at this; it does not depend on how many parameters had a gradient.
            mark_stepped(self._optimizer)
            tell_followers(self._optimizer)
        except BaseException:
            self.dirty = len(self._came) > len(self._waiting)
            raise
        finally:
            self._later.end()
            self._armed, self._scale = False, None
            self._groups, self._waiting, self._came = {}, [], set()

    def undo(self) -> None:
        """Let backward only compute gradients again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._owned.clear()

    def _arrived(self, leaf: Tensor) -> None:
        if self._armed:
            self._came_in(self._owned[leaf])

    def _came_in(self, owned: Tensor) -> None:
        if owned.grad is None:
            return  # other code removed the gradient; the plain optimizer would skip it, too
        with self._lock:
            self._check_new(owned)
            if owned in self._came:
                return  # it still waits, and its gradient is the sum of both
            self._came.add(owned)
            self._waiting.append(owned)
            waiting = sum(_gradient_bytes(one) for one in self._waiting)
            if waiting >= min(self._together, TOGETHER):
                later = self._later.are_expected
                due = [one for one in self._waiting if not later(self._leaf(one))]
                self._step(due)
                self._later.stepped(map(self._leaf, due))

    def _leaf(self, owned: Tensor) -> Tensor:
        return self._masters.leaf_of(owned) if self._masters is not None else owned

    @torch.no_grad()
    def _step(self, due: list[Tensor]) -> None:
        """Step these waiting parameters, one group after the other."""
        while due:
            group = self._groups[due[0]]
            together = [one for one in due if self._groups[one] is group]
            due = [one for one in due if self._groups[one] is not group]
            # Before the step, because a step that fails halfway has changed something, too.
            stepped = set(together)
            self._waiting = [one for one in self._waiting if one not in stepped]
            for owned in together:
                if self.before_step is not None:
                    self.before_step(owned)
                if self._scale is not None and owned.grad is not None:
                    owned.grad.mul_(self._scale)
            with part_of_a_step(), shown_only(self._optimizer, group, together):
                self._optimizer.step()
            for owned in together:
                owned.grad = None

    def _check_step(self) -> None:
        check_per_parameter(self._optimizer, "stepping inside backward", self._masters)

    def _check_new(self, owned: Tensor) -> None:
        shape = list(owned.shape)
        if owned not in self._groups:
            raise BadInput(
                f"a parameter {shape} is no longer in the optimizer: undo stepping inside backward "
                "before the optimizer's parameters are replaced, and apply it again afterwards"
            )
        if owned in self._came and all(owned is not one for one in self._waiting):
            raise BadInput(
                f"a parameter {shape} got a second gradient after its step was due: arm one"
                " backward only, and use checkpoint(…, use_reentrant=False) for weights used more"
                " than once"
            )


@contextlib.contextmanager
def shown_only(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: Iterable[Tensor]
) -> Iterator[None]:
    """While active, the optimizer has only these parameters of one group."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": list(parameters)}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Make a method a tensor hook that does not keep the method's object alive.

    Python's garbage collector cannot see references through a tensor's hooks, so a cycle there is
    never freed.
    """
    reference = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    return hook


def _gradient_bytes(owned: Tensor) -> int:
    return bytes_of(owned.grad) if owned.grad is not None else 0


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
