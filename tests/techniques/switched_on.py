"""Settings of techniques that have nothing to set but whether they are on."""

from __future__ import annotations

import dataclasses

from oomph.plans.choices import Choices
from oomph.plans.techniques import Settings, read_settings


def on(*names: str) -> dict[str, Settings]:
    """As `Choices(techniques=…)` takes them."""
    return {name: read_settings(name, {"enabled": True}) for name in names}


def with_on(choices: Choices, *names: str) -> Choices:
    """The same, with these techniques on."""
    return dataclasses.replace(choices, techniques={**choices.techniques, **on(*names)})
