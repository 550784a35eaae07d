"""Settings of techniques by name, for choices that a test makes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomph.plans.choices import Choices
from oomph.plans.techniques import Settings, read_settings, technique_named


def on(*names: str, **told: Mapping[str, Any]) -> dict[str, Settings]:
    """As `Choices(techniques=…)` takes them: those that are only enabled, and those told more."""
    every = {**{name: {"enabled": True} for name in names}, **told}
    return {name: read_settings(name, values) for name, values in every.items()}


def with_on(choices: Choices, *names: str, **told: Mapping[str, Any]) -> Choices:
    """The same, with these techniques on."""
    for name, settings in on(*names, **told).items():
        choices = choices.using(name, settings)
    return choices


def allocator_conf(choices: Choices) -> str:
    """What the allocator is told."""
    told: str = choices.settings(technique_named("cuda_allocator")).as_dict()["conf"]
    return told
