"""Keep the model's weights in half precision and fp32 masters of them in the optimizer (rounding).

Under autocast, every step casts each fp32 weight to a half-precision copy, and layers that keep
fp32 weights produce fp32 results. Here the model has half-precision weights only; the optimizer
steps fp32 masters, whose gradients are summed in fp32, and each step rounds the masters into the
model.

While it is applied, the masters have the gradients and are the weights to save: clip, unscale and
zero over the optimizer's parameters, not the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput
from oomph.techniques.optimizer_in_backward import weakly
from oomph.techniques.optimizer_steps import check_per_parameter
from oomph.torch_compat.modules import NormBase
from oomph.torch_compat.tensors import version_of

_TECHNIQUE = "keeping master weights"


@dataclass(slots=True, kw_only=True)
class _Pair:
    """A parameter of the model and its master."""

    parameter: nn.Parameter
    master: Tensor
    hook: RemovableHandle
    #: The parameter's version after our last write; a different one means that other code wrote it.
    version: int


class AwayWeights(Protocol):
    """Weights of the model that are offloaded to the host; see `StreamedWeights`."""

    def holds(self, parameter: Tensor) -> bool:
        """Whether the values of a parameter are on the host."""

    def write(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Give a parameter new values."""


class KeptMasters(Protocol):
    """Masters whose values are not in the optimizer's own tensors; see `HostMasters`."""

    def numbers(self, owned: Tensor) -> Tensor:
        """The values of a master."""

    def write(self, owned: Tensor, numbers: Tensor) -> None:
        """Give a master new values."""


class MasterWeights:
    """Converts the model's fp32 parameters that the optimizer owns to `dtype`.

    The parameters stay the same objects, each master takes over its parameter's former storage, and
    the optimizer's groups and state refer to the masters. Buffers and frozen parameters stay as
    they are, and so do a BatchNorm's: its kernels want them as precise as its running statistics.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_per_parameter(optimizer, _TECHNIQUE)
        self._optimizer = optimizer
        #: Set by the host optimizer where it steps offloaded weights.
        self.away: AwayWeights | None = None
        #: Set by the host optimizer where it keeps the masters elsewhere.
        self.kept: KeptMasters | None = None
        self._pairs: dict[Tensor, _Pair] = {}  # by parameter
        self._by_master: dict[Tensor, _Pair] = {}
        self._step_hook = optimizer.register_step_post_hook(self._after_step)
        places = {
            parameter: (group["params"], at)
            for group in optimizer.param_groups
            for at, parameter in enumerate(group["params"])
        }
        try:
            for parameter in _fp32_parameters(model):
                if parameter in places:
                    self._split(parameter, *places[parameter], dtype)
        except BaseException:
            self.undo()
            raise

    def leaf_of(self, owned: Tensor) -> Tensor:
        """The model's parameter that a tensor of the optimizer stands for."""
        pair = self._by_master.get(owned)
        return pair.parameter if pair is not None else owned

    def master_of(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer steps for a model parameter: its master, if it has one."""
        pair = self._pairs.get(parameter)
        return pair.master if pair is not None else parameter

    @torch.no_grad()
    def write(self, parameter: Tensor, numbers: Tensor) -> None:
        """Give a parameter's master new values, and round them into the parameter."""
        pair = self._pairs[parameter]
        if self.kept is not None:
            self.kept.write(pair.master, numbers)
        else:
            pair.master.copy_(numbers)
        self._round(pair, numbers.to(pair.master.dtype))

    @torch.no_grad()
    def refresh(self, owned: Tensor) -> None:
        """Round a master into the model, after it was written to outside a step."""
        pair = self._by_master.get(owned)
        if pair is not None:
            self._round(pair, self.kept.numbers(owned) if self.kept is not None else owned)

    def note_rounded(self, owned: Tensor) -> None:
        """Note that other code stepped a master and rounded it into the model."""
        pair = self._by_master.get(owned)
        if pair is not None:
            pair.version = version_of(pair.parameter)

    def check_step(self) -> None:
        """Refuse code added to the optimizer's step: it would look for gradients elsewhere."""
        check_per_parameter(self._optimizer, _TECHNIQUE, self)

    def undo(self) -> None:
        """Make the masters the parameters of the model and of the optimizer again."""
        self._step_hook.remove()
        for group in self._optimizer.param_groups:
            group["params"][:] = [self.leaf_of(owned) for owned in group["params"]]
        for pair in self._pairs.values():
            pair.hook.remove()
            pair.parameter.data = pair.master
            pair.parameter.grad = pair.master.grad
            _rename_state(self._optimizer, pair.master, pair.parameter)
        self._pairs.clear()
        self._by_master.clear()

    def _round(self, pair: _Pair, numbers: Tensor) -> None:
        if self.away is not None and self.away.holds(pair.parameter):
            self.away.write(pair.parameter, numbers)
        else:
            # Not through .data: autograd must notice if backward still needs the old value.
            pair.parameter.copy_(numbers)
        pair.version = version_of(pair.parameter)

    def _split(
        self, parameter: nn.Parameter, owned: list[Tensor], at: int, dtype: torch.dtype
    ) -> None:
        master = parameter.data
        rounded = master.to(dtype)  # the only operation here that can run out of memory
        master.grad, parameter.grad = parameter.grad, None
        parameter.data = rounded
        owned[at] = master
        _rename_state(self._optimizer, parameter, master)
        self._pairs[parameter] = self._by_master[master] = _Pair(
            parameter=parameter,
            master=master,
            hook=parameter.register_post_accumulate_grad_hook(weakly(self._move_gradient)),
            version=version_of(parameter),
        )

    def _move_gradient(self, parameter: Tensor) -> None:
        pair = self._pairs[parameter]
        if version_of(parameter) != pair.version:
            raise BadInput(
                f"a parameter {list(parameter.shape)} was written to, and its master weight does "
                "not know: undo the master weights, change the model, then apply them again"
            )
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if pair.master.grad is None:
            pair.master.grad = gradient.to(torch.float32)
        else:
            pair.master.grad.add_(gradient)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Round the stepped masters; the optimizer's groups may hold only a few of them now."""
        for group in optimizer.param_groups:
            for owned in group["params"]:
                if owned.grad is not None:
                    self.refresh(owned)


def _fp32_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and may be rounded, each once."""
    norms = (m for m in model.modules() if isinstance(m, NormBase))
    precise = {parameter for norm in norms for parameter in norm.parameters()}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.dtype is torch.float32 and parameter.requires_grad and parameter not in precise
    ]


def _rename_state(optimizer: torch.optim.Optimizer, before: Tensor, now: Tensor) -> None:
    if before in optimizer.state:
        optimizer.state[now] = optimizer.state.pop(before)
