"""`oomph.compare(a, b)`: where memory changed between two runs, versions or plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from oomph.errors import BadInput
from oomph.explaining.explanation import Explanation, explain, explain_values
from oomph.rendering import Printed
from oomph.units import format_bytes, parse_bytes

SCHEMA_VERSION = 1
#: The first of these ledgers that both have is decisive.
_DECIDES = ("device", "reserved", "allocated")


class HasDict(Protocol):
    """An estimate, a plan, a report: anything with plain JSON."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One amount on both sides, in bytes."""

    name: str
    before: int
    after: int

    @property
    def change(self) -> int:
        """Bytes that `after` has more than `before`."""
        return self.after - self.before

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "name": self.name,
            "before": self.before,
            "after": self.after,
            "change": self.change,
        }


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """How much more memory is not yet a regression."""

    text: str
    part: float | None
    """As a share of what there was before."""
    size: int | None
    """In bytes."""

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Parse `2%` or `512MiB`."""
        stripped = text.strip()
        if stripped.endswith("%"):
            try:
                part = float(stripped[:-1]) / 100
            except ValueError:
                part = -1.0
            if not 0 <= part < 1e6:
                raise BadInput(f"a threshold is written as 2% or 512MiB, not {text!r}")
            return cls(text=stripped, part=part, size=None)
        size = 0 if stripped == "0" else parse_bytes(stripped)
        return cls(text=stripped, part=None, size=size)

    def is_exceeded(self, difference: Difference) -> bool:
        """Whether memory grew by more than is allowed."""
        if self.part is not None:
            return difference.change > self.part * difference.before
        assert self.size is not None
        return difference.change > self.size


@dataclass(frozen=True, kw_only=True)
class Comparison(Printed):
    """Two files side by side; each list has the largest changes first."""

    before: Explanation
    after: Explanation
    ledgers: tuple[Difference, ...]
    categories: tuple[Difference, ...]
    modules: tuple[Difference, ...]
    sites: tuple[Difference, ...]
    threshold: Threshold | None
    notes: tuple[str, ...]

    @property
    def decisive(self) -> Difference:
        """The decisive ledger: device, or else reserved, or else allocated."""
        found = {difference.name: difference for difference in self.ledgers}
        return next(found[name] for name in _DECIDES if name in found)

    @property
    def regressed(self) -> bool:
        """Whether memory grew above the threshold."""
        return self.threshold is not None and self.threshold.is_exceeded(self.decisive)

    @property
    def headline(self) -> str:
        """The answer in one line."""
        found = self.decisive
        percent = f" ({found.change / found.before:+.1%})" if found.before else ""
        change = (
            format_bytes(found.change) if found.change < 0 else f"+{format_bytes(found.change)}"
        )
        words = f"{found.name} {format_bytes(found.before)} → {format_bytes(found.after)}, {change}"
        largest = self._largest_part(found.change)
        most = ""
        if largest is not None:
            sign = "+" if largest.change > 0 else ""
            most = f"; the largest part is {largest.name} ({sign}{format_bytes(largest.change)})"
        return f"{words}{percent}{most}"

    def _largest_part(self, change: int) -> Difference | None:
        """The largest part of a change, if it has the same sign and is not negligible."""
        for differences in (self.categories, self.modules, self.sites):
            if differences and abs(change) < 10 * differences[0].change * (1 if change > 0 else -1):
                return differences[0]
        return None

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON; these keys stay."""
        return {
            "kind": "oomph comparison",
            "schema_version": SCHEMA_VERSION,
            "headline": self.headline,
            "regressed": self.regressed,
            "threshold": self.threshold.text if self.threshold is not None else None,
            "decides": self.decisive.name,
            "before": _side(self.before),
            "after": _side(self.after),
            "ledgers": [one.as_dict() for one in self.ledgers],
            "categories": [one.as_dict() for one in self.categories],
            "modules": [one.as_dict() for one in self.modules],
            "sites": [one.as_dict() for one in self.sites],
            "notes": list(self.notes),
        }


def compare(
    before: str | Path | HasDict,
    after: str | Path | HasDict,
    *,
    fail_above: str | None = None,
) -> Comparison:
    """Compare two files that `explain` reads, or two results, by ledger, category and module."""
    threshold = Threshold.parse(fail_above) if fail_above is not None else None
    one, other = _read(before, "the first"), _read(after, "the second")
    shared = [name for name in _DECIDES if name in one.ledgers and name in other.ledgers]
    if not shared:
        raise BadInput(
            f"{one.source} has {', '.join(one.ledgers)} and {other.source} has"
            f" {', '.join(other.ledgers)}: there is nothing to compare"
        )
    return Comparison(
        before=one,
        after=other,
        ledgers=tuple(
            Difference(name=name, before=one.ledgers[name], after=other.ledgers[name])
            for name in shared
        ),
        categories=_differences(one.categories, other.categories),
        modules=_differences(one.modules, other.modules),
        sites=_differences(one.sites, other.sites),
        threshold=threshold,
        notes=tuple(_notes(one, other)),
    )


def _read(given: str | Path | HasDict, which: str) -> Explanation:
    if isinstance(given, (str, Path)):
        return explain(given)
    if isinstance(given, Explanation):
        return given
    return explain_values(given.as_dict(), f"{which} {type(given).__name__}")


def _differences(before: dict[str, int], after: dict[str, int]) -> tuple[Difference, ...]:
    """Differences, the largest change first; none if one side lacks the amounts."""
    if not before or not after:
        return ()
    names = dict.fromkeys((*before, *after))
    found = (
        Difference(name=name, before=before.get(name, 0), after=after.get(name, 0))
        for name in names
    )
    return tuple(sorted(found, key=lambda one: -abs(one.change)))


def _notes(before: Explanation, after: Explanation) -> list[str]:
    notes = []
    if before.kind != after.kind:
        notes.append(f"two kinds are compared: {before.kind} and {after.kind}")
    if before.predicted != after.predicted:
        which = "first" if before.predicted else "second"
        notes.append(f"the {which} was predicted, and the other measured")
    for name in ("gpu", "torch", "job"):
        one, other = _said(before, name), _said(after, name)
        if one and other and one != other:
            notes.append(f"{name}: {one} → {other}")
    return notes


def _said(side: Explanation, name: str) -> str:
    """What a file says about its job or machine; empty if it says nothing."""
    made_for = side.details.get("made_for")
    inner = made_for.get(name) if isinstance(made_for, dict) else None
    found = side.details.get(name) or inner
    return found if isinstance(found, str) else ""


def _side(explanation: Explanation) -> dict[str, Any]:
    return {
        "source": explanation.source,
        "of": explanation.kind,
        "predicted": explanation.predicted,
        "headline": explanation.headline,
    }
