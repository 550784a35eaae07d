"""A weight is off the GPU for one run at a time: notes on parameters that say for which."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from oomph.errors import BadInput

#: Attributes of a parameter: a weak reference to what has its values, and the number of optimizers
#: on the host that step it.
AWAY = "_oomph_away"
_STEPPED = "_oomph_stepped_on_host"


def note_stepped_on_host(
    parameters: Iterable[Tensor], weights: object | None
) -> Callable[[], None]:
    """Note that a host optimizer steps these parameters, so that no other run offloads them.

    Refused if another run has offloaded them; `weights` are this run's own. Returns a function that
    removes the note.
    """
    noted = list(parameters)
    for parameter in noted:
        away = parameter.__dict__.get(AWAY)
        if away is not None and away() is not weights:
            raise BadInput(_SHARED)
    for parameter in noted:
        parameter.__dict__[_STEPPED] = parameter.__dict__.get(_STEPPED, 0) + 1

    def end() -> None:
        for parameter in noted:
            left = parameter.__dict__.pop(_STEPPED, 1) - 1
            if left:
                parameter.__dict__[_STEPPED] = left
        noted.clear()

    return end


_SHARED = (
    "another run has this model's weights as well, and one of the two would have them off the GPU:"
    " undo it first, or plan both without weights away"
)


def refuse_others(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse weights that belong to another run as well."""
    if any(AWAY in p.__dict__ or _STEPPED in p.__dict__ for p in parameters):
        raise BadInput(_SHARED)
