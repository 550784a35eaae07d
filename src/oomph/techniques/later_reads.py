"""Weights that the rest of a backward still reads: stepping them inside backward has to wait.

A weight's gradient is complete when all uses that carry gradient have gone backward. Other uses,
such as `weight.detach()` in another block, may be read later: autograd has saved the weight's
memory, or a block will be recomputed. Both can be detected in advance, and the step waits. Any
other read is noticed when it happens, and from then on that weight is stepped after backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from oomph.errors import SteppedTooEarly
from oomph.techniques.forward_call import is_awaited
from oomph.techniques.users_line import users_line
from oomph.techniques.watched_tensors import Call, aliases, unwatch, watch
from oomph.torch_compat.autograd import current_graph_task_id
from oomph.torch_compat.fake_tensors import FakeTensor


class LaterReads:
    """Tells whether backward has yet to read a weight of the model; for one optimizer."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        #: How many other tensors share each weight's memory while no backward runs.
        self._usual = {leaf: aliases(leaf) for leaf in leaves}
        self._watched: list[Tensor] = []
        #: Weights that were once unexpectedly read after their step.
        self._surprising: set[Tensor] = set()

    def are_expected(self, leaf: Tensor) -> bool:
        """Whether a weight must stay unchanged for now, or for the rest of this backward."""
        if leaf in self._surprising or is_awaited(leaf):
            return True
        return aliases(leaf) > self._usual.get(leaf, 0)

    def stepped(self, leaves: Iterable[Tensor]) -> None:
        """Watch weights that were stepped, which must not be read until backward is over."""
        for leaf in leaves:
            watch(leaf, self)
            self._watched.append(leaf)

    def end(self) -> None:
        """Stop watching: backward is over, or has failed."""
        watched, self._watched = self._watched, []
        for leaf in watched:
            unwatch(leaf)
        self._usual = {leaf: aliases(leaf) for leaf in self._usual}

    def around(self, tensors: Sequence[Tensor], func: Any, call: Call) -> Call:
        """Called for a use of weights that were already stepped; raises if inside backward."""
        if current_graph_task_id() == -1:  # another forward, which comes after the step
            return _plain(tensors, call)
        self._surprising.update(tensors)
        if all(isinstance(tensor, FakeTensor) for tensor in tensors):
            return _plain(tensors, call)  # a rehearsal has no values, and its next step waits
        raise SteppedTooEarly(
            f"a weight {list(tensors[0].shape)} is used inside of backward ({users_line()}), when"
            " the optimizer had stepped it already: from now on it is stepped when backward is"
            " over; make the step again"
        )


def _plain(tensors: Iterable[Tensor], call: Call) -> Call:
    for tensor in tensors:
        unwatch(tensor)
    return call
