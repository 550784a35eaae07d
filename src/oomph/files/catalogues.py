"""Catalogues: entries by name in a TOML file, found by any spelling of a name or an alias."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from oomph.errors import BadInput
from oomph.files.plain_toml import parse_toml


class Entry(Protocol):
    """One entry of a catalogue."""

    @property
    def name(self) -> str:
        """The name it is listed by."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that people use for it."""


E = TypeVar("E", bound=Entry)


def parse_catalogue(
    text: str, *, kind: str, tables: str, schema: int, parse: Callable[[str, Any], E]
) -> dict[str, E]:
    """Parse the text of a catalogue of this kind: the entries below `tables`, by name."""
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise BadInput(f"the {kind} catalogue is not TOML: {error}") from None
    if document.get("schema") != schema:
        raise BadInput(f"the {kind} catalogue has schema {document.get('schema')!r}, not {schema}")
    entries = document.get(tables, {})
    if not isinstance(entries, dict):
        raise BadInput(f"the {kind} catalogue has no tables under {tables}")
    return {name: parse(name, entry) for name, entry in entries.items()}


def by_spelling(entries: Iterable[E], spelling: Callable[[str], str]) -> dict[str, E]:
    """The entries by the normalized spelling of each of their names."""
    found: dict[str, E] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            other = found.setdefault(spelling(name), entry)
            assert other is entry, f"{name} is both {other.name} and {entry.name}"
    return found
