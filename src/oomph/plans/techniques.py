"""What plans know of techniques: their names, their settings, and how a plan speaks of them.

Plans stand below the techniques and need no torch. A technique registers itself when its module is
loaded; who loads those that come with oomph is set from above. Nothing is loaded before a plan
names a technique, or somebody asks which there are.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from oomph.errors import BadInput, StalePlan
from oomph.files.schema import Mismatch, read_as
from oomph.plans.fidelity import Fidelity
from oomph.quoting import brief

if TYPE_CHECKING:
    from oomph.plans.choices import Choices

_NAME = re.compile("[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one technique is told: a subclass has its fields, whose defaults mean off."""

    @property
    def are_off(self) -> bool:
        """Whether the technique does nothing."""
        return self == type(self)()

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain JSON; these keys stay."""
        return dataclasses.asdict(self)


S = TypeVar("S", bound=Settings)


class Target(StrEnum):
    """What a technique changes: a plan's diff lists those together that change the same."""

    OPTIMIZER = "optimizer"
    PRECISION = "precision"
    MODEL = "model"
    LAUNCHES = "launches"
    PROCESS = "process"
    """How PyTorch works in the whole process: such a technique is applied before all others."""


class TechniqueInfo(ABC, Generic[S]):
    """What a plan must know of a technique to hold it, to check it and to say it."""

    name: ClassVar[str]
    """As plans store it; it stays."""
    title: ClassVar[str]
    """As a plan's diff calls it."""
    settings: type[S]
    words: ClassVar[tuple[str, str]] = ("no", "yes")
    """How off and on are said where there is no more to say."""
    changes: ClassVar[Target] = Target.MODEL
    """What it changes for as long as it is applied."""
    belongs_with: ClassVar[tuple[str, ...]] = ()
    """Techniques, or fields of `Choices`, without which it makes no sense: where these are left
    out to price them, it is left out as well."""
    can_be_switched: ClassVar[bool] = False
    """Whether it may come and go while a run goes on: it changes how numbers are computed, and not
    what they are made of."""
    rests_on_all: ClassVar[bool] = False
    """Whether what it made is good for nothing once anything else has changed: one that can be
    switched is then applied last, and applied again after any switch."""
    launches_at_once: ClassVar[bool] = False
    """Whether the kernels of a micro-batch are launched all at once, as one."""
    concerns_tensors: ClassVar[bool] = True
    """Whether it changes which tensors there are, or when; without, it is not worth rehearsing."""
    alters_forward: ClassVar[bool] = False
    """Whether the model's own code takes other paths with it: what others can do to the model is
    then found out with it, and it is priced in the job as it is, by itself."""
    runs_in_foreign_loops: ClassVar[bool] = False
    """Whether a training loop that is not oomph's may use it, as that of a Trainer."""

    def say(self, settings: S) -> str:
        """The settings in the words of the plan's diff, also where they are off."""
        return self.words[not settings.are_off]

    @abstractmethod
    def fidelity(self, settings: S, precision: str) -> Fidelity:
        """How far results are from the untouched job's with these settings, when they are on."""

    def check(self, settings: S, choices: Choices) -> None:
        """Refuse what it cannot be combined with, by `BadInput`."""

    def training_arguments(
        self, settings: S, choices: Choices, now: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Arguments of transformers that do the same, given those there are now; None where no
        argument does, which is then said in the words of `elsewhere`."""
        return None

    def typed(self, settings: S) -> str:
        """The settings as people type them where there is no plan; empty if they cannot."""
        return ""

    def elsewhere(self, settings: S) -> str:
        """What it does, and what comes near it, for a tool that has no argument for it."""
        return f"{self.title} {self.say(settings)}"


Info = TypeVar("Info", bound=type[TechniqueInfo[Any]])

_registered: dict[str, TechniqueInfo[Any]] = {}


def _nothing_to_load() -> None:
    """Until `load_with` was called."""


_load: Callable[[], object] = _nothing_to_load


def load_with(load: Callable[[], object]) -> None:
    """Set what loads the techniques that come with oomph."""
    global _load
    _load = load


def register(technique: Info) -> Info:
    """Make a technique known, as a decorator of its class: plans may hold it from now on."""
    made = technique()
    if not _NAME.fullmatch(made.name):
        raise BadInput(f"{made.name!r} names no technique: small letters, digits and _ do")
    known = _registered.get(made.name)
    # A module that is loaded once more brings the same class again.
    if known is not None and _home(type(known)) != _home(technique):
        raise BadInput(f"there is a technique {made.name!r} already: {_home(type(known))}")
    _registered[made.name] = made
    return technique


def unregister(name: str) -> None:
    """Forget a technique; plans that name it are refused from now on."""
    _registered.pop(name, None)


def all_techniques() -> list[TechniqueInfo[Any]]:
    """Every technique that is registered, by name: the order does not depend on who came first."""
    _load()
    return [_registered[name] for name in sorted(_registered)]


def technique_named(name: str) -> TechniqueInfo[Any]:
    """The technique of this name, or `StalePlan`."""
    if name not in _registered:
        _load()
    if name not in _registered:
        raise StalePlan(
            f"the plan uses the technique {brief(name)}, which this oomph does not have: the plan"
            " is of a later version, or the module that registers the technique is not imported"
        )
    return _registered[name]


def read_settings(name: str, values: Any) -> Settings:
    """The settings of a technique from plain JSON; what is not named there has its default."""
    try:
        settings: Settings = read_as(technique_named(name).settings, values)
    except Mismatch as problem:
        raise BadInput(f"the plan's settings of {name} do not fit: {problem}") from None
    return settings


def _home(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
