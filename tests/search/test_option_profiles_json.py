"""What another process heard is here what it was there."""

from __future__ import annotations

import dataclasses
import json

import pytest

from oomph.hardware.timing.step_time import StepTime
from oomph.plans.choices import Choices
from oomph.rehearsal.link import LinkRates
from oomph.search.option_profiles import Copies, OptionProfiles
from oomph.search.option_profiles_json import from_plain, to_plain
from oomph.search.solver import Chain, ChainBlock, Option

OPTIONS = (
    Option(name="keep", saved=3, forward=5, backward=7, seconds=0.1, launching=0.2),
    Option(name="recompute, offloaded", saved=-1, forward=5, backward=9, seconds=1 / 3, moved=11),
)
HEARD = OptionProfiles(
    choices=Choices(
        optimizer_on="host", weights_away=("a", "b"), blocks={"a": "keep", "b": "recompute"}
    ),
    chain=Chain(
        blocks=(ChainBlock(name="a", options=OPTIONS, forward_base=13, backward_base=17),),
        loss_base=19,
        floor=23,
    ),
    parts=2,
    others=StepTime(0.7, 1 / 7),
    step=StepTime(1e-9, 2e-9),
    loss_is_chunked=True,
    fixed_part=29,
)
COPIES = Copies(part=0.1, step=0.2, window=0.3, late=0.4, rates=LinkRates(5e9 / 3, 6e9))


@pytest.mark.parametrize(
    "profiles",
    [
        HEARD,
        dataclasses.replace(HEARD, copies=COPIES),
        dataclasses.replace(HEARD, graphed=dataclasses.replace(HEARD, parts=1)),
    ],
    ids=["alone", "with copies", "with a graph"],
)
def test_nothing_changes_on_the_way(profiles: OptionProfiles) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(profiles)))) == profiles
