"""Handles copying, pickling and saving a whole model that has a plan applied.

A copy is made with the weights as they are when all steps are complete. A pickle would include the
plan, with hooks, files and streams of this process: it is refused, with advice on what to do
instead.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from oomph.errors import BadInput
from oomph.techniques.technique import Undo

#: The method that Python calls on an object to copy or pickle it.
_ASKED = "__reduce_ex__"


def watch_copies(model: nn.Module, settle: Callable[[], None]) -> Undo:
    """From now on, complete pending work before the model is copied, and refuse to pickle it."""
    vars(model)[_ASKED] = _Asked(model, settle)
    return lambda: vars(model).pop(_ASKED)


class _Asked:
    """Replaces the method of the model's class."""

    def __init__(self, model: nn.Module, settle: Callable[[], None] | None) -> None:
        self._model = model
        self._settle = settle

    def __call__(self, protocol: Any) -> Any:
        who = sys._getframe(1).f_code
        if who not in (copy.deepcopy.__code__, copy.copy.__code__):
            raise BadInput(
                f"a plan is applied to this {type(self._model).__name__}, which cannot be pickled"
                " with it: save its state_dict(), use run.save, or undo the run first"
            )
        if self._settle is not None:
            self._settle()
        return type(self._model).__reduce_ex__(self._model, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Asked:
        """A copy has no pending work; it has the plan's forwards, and cannot be pickled either."""
        return _Asked(memo.get(id(self._model), self._model), None)
