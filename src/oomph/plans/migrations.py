"""Plans of earlier versions, as the current one writes them: plain data in, plain data out.

One function for each step from a version to the next; a plan of the first goes through all of them
(rule 11). What a step does not find it leaves alone, so that a plan which was cut short is refused
by those who read it, in their words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oomph.errors import StalePlan
from oomph.quoting import brief

#: The version that plans are written in.
SCHEMA_VERSION = 2

Values = dict[str, Any]


def migrate_plan(values: Mapping[str, Any]) -> Values:
    """A plan's values in the current version; `StalePlan` for a version that is none of ours."""
    version = values.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        newer = type(version) is int and version > SCHEMA_VERSION
        advice = "install a newer oomph, or make it again" if newer else "make it again"
        raise StalePlan(
            f"the plan has schema {brief(version)}, and this oomph reads 1 to {SCHEMA_VERSION};"
            f" {advice}"
        )
    migrated = dict(values)
    for step in _STEPS[version - 1 :]:
        migrated = step(migrated)
    return {**migrated, "schema_version": SCHEMA_VERSION}


def _from_1(plan: Values) -> Values:
    choices = plan.get("choices")
    if not isinstance(choices, Mapping):
        return plan
    return {**plan, "choices": choices_from_1(choices)}


#: By field of version 1: the technique, and its setting.
_SETTINGS_OF_FIELDS_1: Mapping[str, tuple[str, str]] = {
    "attention_rows": ("attention_rows", "enabled"),
    "channels_last": ("channels_last", "enabled"),
    "fp8": ("fp8_products", "enabled"),
    "low_bit_state": ("low_bit_state", "enabled"),
}


def choices_from_1(choices: Mapping[str, Any]) -> Values:
    """Choices of version 1, where every technique was a field, as those of version 2.

    Some techniques have settings of their own since then; one that is off is not named.
    """
    found: Values = {}
    techniques: Values = {}
    for field, value in choices.items():
        if field not in _SETTINGS_OF_FIELDS_1:
            found[field] = value
            continue
        technique, setting = _SETTINGS_OF_FIELDS_1[field]
        if value is not False:
            techniques.setdefault(technique, {})[setting] = value
    if techniques:
        found["techniques"] = techniques
    return found


_STEPS: tuple[Callable[[Values], Values], ...] = (_from_1,)
