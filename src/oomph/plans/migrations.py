"""Plans of earlier versions, as the current one writes them: plain data in, plain data out.

One function for each step from a version to the next; a plan of the first goes through all of them
(rule 11). What a step does not find it leaves alone, so that a plan which was cut short is refused
by those who read it, in their words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from oomph.errors import StalePlan
from oomph.quoting import brief

#: The version that plans are written in.
SCHEMA_VERSION = 3

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


def migrate_choices(choices: Mapping[str, Any], version: int) -> Values:
    """A plan's choices of this version, as those of the current one."""
    migrated = dict(choices)
    for step in _STEPS_OF_CHOICES[version - 1 :]:
        migrated = step(migrated)
    return migrated


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """Where a field of the choices has gone, which became a setting of a technique."""

    technique: str
    setting: str
    off: Any = False
    """What the field says where the technique is off, which is then not named."""
    is_opposite: bool = False
    """Whether the setting says no where the field says yes."""


_MOVED_1: Mapping[str, _Moved] = {
    "attention_rows": _Moved(technique="attention_rows", setting="enabled"),
    "channels_last": _Moved(technique="channels_last", setting="enabled"),
    "fp8": _Moved(technique="fp8_products", setting="enabled"),
    "low_bit_state": _Moved(technique="low_bit_state", setting="enabled"),
}
_MOVED_2: Mapping[str, _Moved] = {
    "allocator": _Moved(technique="cuda_allocator", setting="conf", off=""),
    "cast_cache": _Moved(technique="cast_cache", setting="dropped", off=True, is_opposite=True),
    "generation_cache": _Moved(
        technique="generation_cache", setting="dropped", off=True, is_opposite=True
    ),
    "cuda_graph": _Moved(technique="cuda_graph", setting="enabled"),
    "fused_optimizer": _Moved(technique="fused_optimizer", setting="enabled"),
}


def _move(moved: Mapping[str, _Moved], choices: Values) -> Values:
    """The same choices, with these fields as settings of techniques."""
    found = {name: value for name, value in choices.items() if name not in moved}
    techniques: Values = {}
    for name, to in moved.items():
        value = choices.get(name, to.off)
        if type(value) is type(to.off) and value == to.off:
            continue
        if to.is_opposite and isinstance(value, bool):
            value = not value
        techniques.setdefault(to.technique, {})[to.setting] = value
    so_far = choices.get("techniques", {})
    if techniques and isinstance(so_far, Mapping):
        found["techniques"] = {**so_far, **techniques}
    return found


#: One for each step from a version to the next.
_STEPS_OF_CHOICES: tuple[Callable[[Values], Values], ...] = (
    partial(_move, _MOVED_1),
    partial(_move, _MOVED_2),
)


def _with_choices(step: Callable[[Values], Values], plan: Values) -> Values:
    """A step of a plan in which the choices alone are others."""
    choices = plan.get("choices")
    return {**plan, "choices": step(dict(choices))} if isinstance(choices, Mapping) else plan


#: One for each step from a version to the next.
_STEPS: tuple[Callable[[Values], Values], ...] = tuple(
    partial(_with_choices, step) for step in _STEPS_OF_CHOICES
)
