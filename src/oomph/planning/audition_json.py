"""An audition as plain JSON, number by number, for one that another process heard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from oomph.planning.audition import Audition, Copies
from oomph.planning.choices import Choices
from oomph.planning.pace import Pace
from oomph.planning.solver import Chain, ChainBlock, Option
from oomph.rehearsal.link import LinkRates


def to_plain(heard: Audition) -> dict[str, Any]:
    """All that was heard, as JSON can have it."""
    return dataclasses.asdict(heard)


def from_plain(values: Mapping[str, Any]) -> Audition:
    """The audition that `to_plain` gave."""
    copies, graphed = values["copies"], values["graphed"]
    return Audition(
        **{
            **values,
            "choices": Choices.from_dict(values["choices"]),
            "others": Pace(**values["others"]),
            "step": Pace(**values["step"]),
            "chain": _chain(values["chain"]),
            "copies": copies and Copies(**{**copies, "rates": LinkRates(**copies["rates"])}),
            "graphed": graphed and from_plain(graphed),
        }
    )


def _chain(values: Mapping[str, Any]) -> Chain:
    blocks = (
        ChainBlock(**{**block, "options": tuple(Option(**option) for option in block["options"])})
        for block in values["blocks"]
    )
    return Chain(**{**values, "blocks": tuple(blocks)})
