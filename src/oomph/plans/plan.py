"""A Plan: what to do to a job, what that is predicted to take, and what it was made for.

Plans are plain JSON. One that was cut short, edited by hand into something else, or made for
another model, card or PyTorch is refused in words and changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomph.errors import BadInput, StalePlan
from oomph.files.plain_json import BadJson, parse_json
from oomph.files.reading import read_regular
from oomph.files.schema import Count, Difference, Mismatch, Number, Positive, Seconds, read_as
from oomph.files.writing import write_whole
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.migrations import SCHEMA_VERSION, migrate_plan
from oomph.rendering import Paged
from oomph.units import format_bytes

#: Of a file; a plan for thousands of blocks has less than a MiB.
_MOST_BYTES = 64 << 20
KIND = "oomph plan"


@dataclass(frozen=True, kw_only=True)
class MadeFor:
    """What a plan is true of."""

    job: str
    parameters: Count
    weights: str
    """A digest of the names, shapes and types of all parameters, and of which are trained."""
    batch: tuple[tuple[Count, ...], ...]
    """The shapes of one global batch."""
    optimizer: str
    torch: str
    gpu: str | None
    """None is the CPU."""

    def check(self, now: MadeFor) -> None:
        """Refuse a job that is not the one the plan was made for, naming the difference."""
        if self.weights != now.weights:
            raise StalePlan(
                f"the plan is for a model of {self.parameters:,} parameters, and this one, of"
                f" {now.parameters:,}, has other weights (names, shapes, types or which are"
                " trained); plan for this one"
            )
        differences = {
            "batches of": (_say(self.batch), _say(now.batch)),
            "the optimizer": (self.optimizer, now.optimizer),
            "torch": (self.torch, now.torch),
            "the": (self.gpu or "CPU", now.gpu or "CPU"),
        }
        for what, (planned, actual) in differences.items():
            if planned != actual:
                raise StalePlan(
                    f"the plan is for {what} {planned}, and this is {actual}; plan for this one"
                )


def _say(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join("×".join(map(str, shape)) or "one number" for shape in shapes)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing a plan does, against what the user has."""

    technique: str
    before: str
    after: str
    saves: Difference
    """Bytes of peak memory that would come back without it."""
    costs: Number
    """Seconds of a step that would be won without it; negative where it makes the step faster."""
    fidelity: Fidelity

    @property
    def words(self) -> str:
        """`recompute 9 of 16 blocks`, or the technique alone where there is only yes and no."""
        if self.after in ("yes", "no"):
            return self.technique if self.after == "yes" else f"no {self.technique}"
        return f"{self.technique} {self.after}"

    def as_dict(self) -> dict[str, Any]:
        """The change as plain JSON."""
        return {**dataclasses.asdict(self), "fidelity": str(self.fidelity)}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a plan's step is predicted to take."""

    peak: Ledgers
    high: Count
    """The end of the interval: device memory it should not need more than."""
    categories_at_peak: dict[str, Count]
    seconds: Positive
    unlimited_seconds: Seconds
    """Of the fastest plan there would be with no limit on memory."""
    samples: Count
    """In a step."""
    tokens: Count
    """In a step; 0 where the batch holds none."""
    host: Count = 0
    """Bytes of host memory for what leaves the GPU."""
    disk: Count = 0
    """Bytes on the disk for what leaves the host, too."""

    @property
    def rate(self) -> str:
        """Tokens or samples a second, in words."""
        if self.tokens:
            return f"{self.tokens / self.seconds:,.0f} tokens/s"
        return f"{self.samples / self.seconds:,.1f} samples/s"


@dataclass(frozen=True, kw_only=True)
class Plan(Paged):
    """The fastest way found to run a job inside a budget."""

    made_for: MadeFor
    budget: Count
    choices: Choices
    predicted: Predicted
    fidelity: Fidelity
    """The furthest that any of its changes goes from the untouched job."""
    gap: Number
    """How much faster, at most, another choice for the blocks could be, as a part of the time."""
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    planning_seconds: Seconds
    checked: Any = field(default=None, repr=False, compare=False)
    """The `Estimate` it was checked by (rule 2); a plan that was read from a file has none."""

    @property
    def verdict(self) -> str:
        """A plan always fits; what does not fit has none."""
        return "fits"

    @property
    def summary(self) -> str:
        """Budget, speed and techniques in a line, without the job's name."""
        budget, place = format_bytes(self.budget), self.made_for.gpu or "the CPU"
        share = self.predicted.unlimited_seconds / self.predicted.seconds
        speed = f"{self.predicted.rate} predicted, {share:.0%} of unlimited".replace("%", " %")
        techniques = ", ".join(change.words for change in self.changes) or "as it is"
        return f"{budget} on {place} at {speed}: {techniques}"

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON; these keys stay."""
        return {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "made_for": dataclasses.asdict(self.made_for),
            "budget": self.budget,
            "choices": self.choices.as_dict(),
            "predicted": {
                **dataclasses.asdict(self.predicted),
                "peak": self.predicted.peak.as_dict(),
            },
            "fidelity": str(self.fidelity),
            "gap": self.gap,
            "changes": [change.as_dict() for change in self.changes],
            "notes": list(self.notes),
            "planning_seconds": self.planning_seconds,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that `as_dict` wrote, in this version or an earlier one (rule 11)."""
        if values.get("kind") != KIND:
            raise BadInput("this is no plan: `oomph plan --save FILE` writes one")
        values = migrate_plan(values)
        given = {name: values[name] for name in _STORED if name in values}
        if isinstance(given.get("choices"), Mapping):
            given["choices"] = Choices.from_dict(given["choices"])
        try:
            return read_as(cls, given)
        except Mismatch as problem:
            raise BadInput(
                f"the plan was changed into something else: {problem}; make it again"
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the plan; a file that is there already is replaced only by a whole one."""
        write_whole(path, (json.dumps(self.as_dict(), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            values = parse_json(read_regular(path, most=_MOST_BYTES))
        except OSError as error:
            raise BadInput(f"cannot read the plan {str(path)!r}: {error.strerror}") from None
        except BadJson as error:
            raise BadInput(f"{path} is no plan, or only part of one: {error}") from None
        if not isinstance(values, dict):
            raise BadInput(f"{path} is no plan: `oomph plan --save FILE` writes one")
        return cls.from_dict(values)


#: What a file says of a plan.
_STORED = tuple(one.name for one in dataclasses.fields(Plan) if one.name != "checked")
