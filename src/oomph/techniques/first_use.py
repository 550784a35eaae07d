"""Which modules use which parameters, in which order, and a call right before each use.

A *unit* is a module before which all parameters in it must be ready: a block, or what lies outside
of the blocks. Hooks sit on units only, so that nothing inside a compiled block is disturbed.

The order is learned from the forwards before `freeze`. A parameter whose unit was not called by
then (its parent uses it by itself) is filed under no unit: it must be ready before any forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

#: Modules that hold others and are never called themselves.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True, kw_only=True)
class _Unit:
    module: nn.Module
    parameters: list[Tensor] = field(default_factory=list)


class FirstUse:
    """Calls `before` with a unit's number whenever one is about to run, once frozen."""

    def __init__(
        self, model: nn.Module, blocks: Collection[nn.Module], before: Callable[[int], None]
    ) -> None:
        self._units = _find_units(model, set(blocks))
        self._called: dict[int, None] = {}
        self._before = before
        self.is_frozen = False
        self._handles: list[RemovableHandle] = [
            # A function, not a method: a copied model copies methods' objects with it.
            unit.module.register_forward_pre_hook(lambda *_, at=at: self._enter(at))
            for at, unit in enumerate(self._units)
        ]

    def freeze(self) -> dict[Tensor, int]:
        """The unit of each parameter's first use, in the order of the forwards so far."""
        self.is_frozen = True
        first: dict[Tensor, int] = {}
        for at in self._called:
            for parameter in self._units[at].parameters:
                first.setdefault(parameter, at)
        return first

    def parameters_of(self, unit: int) -> list[Tensor]:
        """What must be ready before a unit runs."""
        return self._units[unit].parameters

    def remove(self) -> None:
        """Call nobody any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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
            parent.parameters += module.parameters(recurse=False)
            unit = parent
        else:
            unit = _Unit(module=module)
            units.append(unit)
            if module in blocks or not (module is model or _holds_any(module, blocks)):
                unit.parameters += module.parameters()
                return
            unit.parameters += module.parameters(recurse=False)
        for child in module.children():
            visit(child, unit)

    visit(model, _Unit(module=model))
    return [unit for unit in units if unit.parameters]


def _holds_any(module: nn.Module, blocks: set[nn.Module]) -> bool:
    return any(part in blocks for part in module.modules())
