"""A Plan: what to do to a job, what that is predicted to take, and what it was made for.

Plans are plain JSON. One that was cut short, edited by hand into something else, or made for
another model, card or PyTorch is refused in words and changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oomph.errors import BadInput, StalePlan
from oomph.estimation import Estimate, Ledgers
from oomph.planning.choices import Choices
from oomph.techniques.technique import Fidelity

SCHEMA_VERSION = 1
KIND = "oomph plan"


@dataclass(frozen=True, kw_only=True)
class MadeFor:
    """What a plan is true of."""

    job: str
    parameters: int
    weights: str
    """A digest of the names, shapes and types of all parameters, and of which are trained."""
    batch: tuple[tuple[int, ...], ...]
    """The shapes of one global batch."""
    optimizer: str
    torch: str
    gpu: str | None
    """None is the CPU."""

    @classmethod
    def of(
        cls, name: str, model: nn.Module, batch: Any, optimizer: Any, gpu: str | None
    ) -> MadeFor:
        """What a model with this batch and optimizer is, on this machine's PyTorch."""
        digest = hashlib.sha256()
        for path, parameter in model.named_parameters():
            kind = tuple(parameter.shape), parameter.dtype, parameter.requires_grad
            digest.update(f"{path}{kind}".encode())
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        return cls(
            job=name,
            parameters=sum(p.numel() for p in model.parameters()),
            weights=digest.hexdigest()[:16],
            batch=tuple(shapes),
            optimizer=type(optimizer).__name__,
            torch=torch_version(),
            gpu=gpu,
        )

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


def torch_version() -> str:
    """PyTorch's version as far as memory depends on it: 2.11."""
    return ".".join(torch.__version__.split(".")[:2])


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing a plan does, against what the user has."""

    technique: str
    before: str
    after: str
    saves: int
    """Bytes of peak memory that would come back without it."""
    costs: float
    """Seconds of a step that would be won without it; negative where it makes the step faster."""
    fidelity: Fidelity

    def as_dict(self) -> dict[str, Any]:
        """The change as plain JSON."""
        return {**dataclasses.asdict(self), "fidelity": str(self.fidelity)}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a plan's step is predicted to take."""

    peak: Ledgers
    high: int
    """The end of the interval: device memory it should not need more than."""
    categories_at_peak: dict[str, int]
    seconds: float
    unlimited_seconds: float
    """Of the fastest plan there would be with no limit on memory."""
    samples: int
    """In a step."""
    tokens: int
    """In a step; 0 where the batch holds none."""
    host: int = 0
    """Bytes of host memory for what leaves the GPU."""
    disk: int = 0
    """Bytes on the disk for what leaves the host, too."""

    @property
    def rate(self) -> str:
        """Tokens or samples a second, in words."""
        if self.tokens:
            return f"{self.tokens / self.seconds:,.0f} tokens/s"
        return f"{self.samples / self.seconds:,.1f} samples/s"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest way found to run a job inside a budget."""

    made_for: MadeFor
    budget: int
    choices: Choices
    predicted: Predicted
    fidelity: Fidelity
    """The furthest that any of its changes goes from the untouched job."""
    gap: float
    """How much faster, at most, another choice for the blocks could be, as a part of the time."""
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    planning_seconds: float
    checked: Estimate | None = field(default=None, repr=False, compare=False)
    """The rehearsal it was checked by (rule 2); a plan that was read from a file has none."""

    @property
    def verdict(self) -> str:
        """A plan always fits; what does not fit has none."""
        return "fits"

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
        """The plan that `as_dict` wrote."""
        if values.get("kind") != KIND:
            raise BadInput("this is no plan: `oomph plan --save FILE` writes one")
        if values.get("schema_version") != SCHEMA_VERSION:
            raise StalePlan(
                f"the plan has schema {values.get('schema_version')!r}, and this oomph reads"
                f" {SCHEMA_VERSION}; make it again"
            )
        try:
            made_for = dict(values["made_for"])
            made_for["batch"] = tuple(tuple(map(int, shape)) for shape in made_for["batch"])
            predicted = dict(values["predicted"])
            predicted["peak"] = _read(Ledgers, predicted["peak"])
            return cls(
                made_for=_read(MadeFor, made_for),
                budget=int(values["budget"]),
                choices=Choices.from_dict(values["choices"]),
                predicted=_read(Predicted, predicted),
                fidelity=Fidelity(values["fidelity"]),
                gap=float(values["gap"]),
                changes=tuple(
                    _read(Change, {**change, "fidelity": Fidelity(change["fidelity"])})
                    for change in values["changes"]
                ),
                notes=tuple(values["notes"]),
                planning_seconds=float(values["planning_seconds"]),
            )
        except KeyError as error:
            raise BadInput(f"the plan lacks {error}; make it again") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"the plan was changed into something else: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the plan; a file that is there already is replaced only by a whole one."""
        target = Path(path)
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"cannot read the plan {path}: {error.strerror}") from None
        except ValueError as error:
            raise BadInput(f"{path} is no plan, or only part of one: {error}") from None
        if not isinstance(values, dict):
            raise BadInput(f"{path} is no plan: `oomph plan --save FILE` writes one")
        return cls.from_dict(values)

    def save_html(self, path: str | Path) -> None:
        """Write a report as one HTML file that needs nothing else."""
        from oomph.reporting.page.document import save_page
        from oomph.reporting.page.sources import page_of_plan

        save_page(page_of_plan(self), path)

    def __str__(self) -> str:
        from oomph.reporting.plans import describe_plan
        from oomph.reporting.text import render_report

        return render_report(describe_plan(self))


_Data = TypeVar("_Data")
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "str | None": (str, type(None)),
    "dict[str, int]": (dict,),
}


def _read(cls: type[_Data], values: Mapping[str, Any]) -> _Data:
    """A dataclass from JSON, whose numbers are numbers and whose words are words."""
    for one in dataclasses.fields(cls):  # type: ignore[arg-type]
        kinds = _KINDS.get(str(one.type))
        value = values[one.name]
        if kinds is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise TypeError(f"{one.name} cannot be {value!r}")
    return cls(**values)
