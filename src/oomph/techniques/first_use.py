"""Which modules use which parameters, in which order, and a call right before each use.

A *unit* is a module whose parameters must all be ready before it runs: a block, or a module outside
of the blocks. Only units have hooks, so that nothing inside a compiled block is disturbed.

The order is learned from the forwards before `freeze`. If a parameter's unit was not called by then
(its parent uses the parameter directly), it has no unit and must be ready before any forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.techniques.batch_calls import unwatched
from oomph.torch_compat.modules import own_parameters

#: Modules that hold others and are never called themselves.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True, kw_only=True)
class _Unit:
    module: nn.Module
    parameters: list[Tensor] = field(default_factory=list)


class FirstUse:
    """Once frozen, calls `before` with a unit's number whenever that unit is about to run."""

    def __init__(
        self, model: nn.Module, blocks: Collection[nn.Module], before: Callable[[int], None]
    ) -> None:
        self._units = _find_units(model, set(blocks))
        self._called: dict[int, None] = {}
        self._before = before
        self.is_frozen = False
        self._handles: list[RemovableHandle] = [
            # A function, not a method: copying the model would copy a bound method's object too.
            unit.module.register_forward_pre_hook(lambda *_, at=at: self._enter(at))
            for at, unit in enumerate(self._units)
        ]

    def freeze(self) -> dict[Tensor, int]:
        """End learning; returns the unit of each parameter's first use, in forward order."""
        self.is_frozen = True
        first: dict[Tensor, int] = {}
        for at in self._called:
            for parameter in self._units[at].parameters:
                first.setdefault(parameter, at)
        return first

    def parameters_of(self, unit: int) -> list[Tensor]:
        """The parameters that must be ready before a unit runs."""
        return self._units[unit].parameters

    def module_of(self, unit: int) -> nn.Module:
        """A unit's module."""
        return self._units[unit].module

    def remove(self) -> None:
        """Remove the hooks: `before` is not called any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @unwatched()
    def _enter(self, at: int) -> None:
        if self.is_frozen:
            self._before(at)
        else:
            self._called.setdefault(at)


def _find_units(model: nn.Module, blocks: set[nn.Module]) -> list[_Unit]:
    units: list[_Unit] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, parent: _Unit) -> None:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, _CONTAINERS):
            parent.parameters += own_parameters(module)
            unit = parent
        else:
            unit = _Unit(module=module)
            units.append(unit)
            if module in blocks or not (module is model or _holds_any(module, blocks)):
                unit.parameters += module.parameters()
                return
            unit.parameters += own_parameters(module)
        for child in module.children():
            visit(child, unit)

    visit(model, _Unit(module=model))
    return [unit for unit in units if unit.parameters]


def _holds_any(module: nn.Module, blocks: set[nn.Module]) -> bool:
    return any(part in blocks for part in module.modules())
