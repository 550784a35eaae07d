"""Streamed weights that the user's own optimizer steps where they are: on the host (exact).

The optimizer is shown the host's numbers in place of the model's parameters, and its state for them
is on the host as well. Gradients leave the GPU as they are made. Where several backwards add to a
gradient, what there is of it comes back and is added to as PyTorch would; after each backward the
`grad` of what the optimizer is shown is complete.

While it is applied, clip, unscale and zero over the optimizer's parameters, not the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.host.link import Link
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.step_buckets import Trained
from oomph.techniques.streamed_weights import StreamedWeights

#: Bytes of gradients that may be on their way to the host.
IN_FLIGHT = 64 << 20


class HostSteppedWeights:
    """Gives `optimizer` the host's numbers of what is streamed; the rest it steps as before."""

    def __init__(
        self,
        streamed: StreamedWeights,
        optimizer: torch.optim.Optimizer,
        link: Link,
        *,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        _check(streamed, optimizer)
        self._streamed = streamed
        self._optimizer = optimizer
        self._gradients = LeavingGradients(link, in_flight)
        groups = {p: at for at, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._trained = {
            leaf: Trained(leaf=leaf, owned=streamed.host_weight(leaf), group=groups.get(leaf, -1))
            for leaf in streamed.parameters
        }
        self._leaves = {trained.owned: leaf for leaf, trained in self._trained.items()}
        #: The backward that runs, and the gradients that it has made so far.
        self._backward = -1
        self._arrived: dict[Trained, None] = {}
        self._show({leaf: trained.owned for leaf, trained in self._trained.items()})
        for leaf in self._trained:
            self._move_state(self._trained[leaf].owned, torch.device("cpu"))
        self._undo_hand = streamed.hand_gradients(self._take)
        self._step_hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: streamed.prefetch()),
        ]

    def leaf_of(self, owned: Tensor) -> Tensor:
        """The model's parameter that a tensor of the optimizer stands for."""
        return self._leaves.get(owned, owned)

    def undo(self) -> None:
        """The optimizer has the model's parameters again; to be called before streaming ends."""
        for hook in self._step_hooks:
            hook.remove()
        self._undo_hand()
        self._gradients.close()
        for leaf, trained in self._trained.items():
            origin = self._streamed.origin(leaf)
            self._move_state(trained.owned, origin)
            gradient, trained.owned.grad = trained.owned.grad, None
            if gradient is not None and leaf.device == origin:
                leaf.grad = gradient.to(origin, copy=True)
        self._show({trained.owned: leaf for leaf, trained in self._trained.items()})
        self._trained, self._leaves = {}, {}

    # -- gradients --------------------------------------------------------------------------------

    def _take(self, leaf: nn.Parameter, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise BadInput(
                f"the gradient of a parameter {list(leaf.shape)} is sparse: use sparse=False, or"
                " leave its weights on the GPU"
            )
        self._follow_backward()
        trained = self._trained[leaf]
        with torch.no_grad():
            self._gradients.add_to(trained, gradient)
            self._gradients.send(trained, gradient, gradient.dtype)
        self._arrived[trained] = None

    def _follow_backward(self) -> None:
        """See where a backward begins, and be called when it ends."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        self._arrived.clear()  # of one that failed
        for trained in self._trained.values():
            if trained.owned.grad is None:  # it counts no more
                self._gradients.used(trained)
                if trained in self._gradients:  # it came back for nothing
                    self._gradients.take_back(trained)
        self._gradients.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._complete)

    def _complete(self) -> None:
        for trained in self._arrived:
            slot, copy = self._gradients.slot(trained)
            copy.finish()
            trained.owned.grad = slot
        self._arrived.clear()
        self._gradients.release()

    def _before_step(self) -> None:
        for leaf in self._trained:
            if leaf.grad is not None:
                raise BadInput(
                    f"a parameter {list(leaf.shape)} was unfrozen while its weights are on the"
                    " host, and would not be stepped: undo that first, and apply it again"
                )
        # Nothing may still read what the optimizer is about to write.
        self._streamed.settle()
        for leaf, trained in self._trained.items():
            if trained.owned.grad is not None:
                self._streamed.written(leaf)

    # -- the optimizer ----------------------------------------------------------------------------

    def _show(self, instead: dict[Any, Any]) -> None:
        """Have the optimizer own other tensors, with the state of those they stand for."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            group["params"][:] = [instead.get(owned, owned) for owned in group["params"]]
        for before, now in instead.items():
            if before in optimizer.state:
                optimizer.state[now] = optimizer.state.pop(before)

    def _move_state(self, owned: Tensor, device: torch.device) -> None:
        state = self._optimizer.state.get(owned, {})
        group = next((g for g in self._optimizer.param_groups if _holds(g["params"], owned)), {})
        for name, value in state.items():
            # Step counters stay, but for kernels that want them beside the weights.
            if isinstance(value, Tensor) and (value.dim() or group.get("fused")):
                state[name] = value.to(device)


def _holds(tensors: list[Tensor], wanted: Tensor) -> bool:
    return any(tensor is wanted for tensor in tensors)


def _check(streamed: StreamedWeights, optimizer: torch.optim.Optimizer) -> None:
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise BadInput(f"weights on the host cannot be stepped by a {option} optimizer")
    if any(parameter.grad is not None for parameter in streamed.parameters):
        raise BadInput("there are gradients already: step or zero them before weights leave")
