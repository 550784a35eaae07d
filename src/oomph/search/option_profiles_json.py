"""An audition as plain JSON, number by number, for one that another process heard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from oomph.hardware.timing.step_time import StepTime
from oomph.plans.choices import Choices
from oomph.rehearsal.link import LinkRates
from oomph.search.option_profiles import Copies, OptionProfiles
from oomph.search.solver import Chain, ChainBlock, Option


def to_plain(profiles: OptionProfiles) -> dict[str, Any]:
    """All that was heard, as JSON can have it."""
    return dataclasses.asdict(profiles)


def from_plain(values: Mapping[str, Any]) -> OptionProfiles:
    """The audition that `to_plain` gave."""
    copies, graphed = values["copies"], values["graphed"]
    return OptionProfiles(
        **{
            **values,
            "choices": Choices.from_dict(values["choices"]),
            "others": StepTime(**values["others"]),
            "step": StepTime(**values["step"]),
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
