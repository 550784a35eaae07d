"""A technique: one way to need less memory, or to be faster in the same; one file each.

A technique is a class that is registered (`@register`) and says all there is to know of it: its
settings, when it applies, which settings a search tries, how it is applied and taken back, how true
results stay, and how it is said. Nothing outside its file names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

from oomph.errors import BadInput
from oomph.hardware import GPU
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import S, Settings, TechniqueInfo, all_techniques, technique_named

if TYPE_CHECKING:
    from oomph.techniques.cuda_graph import Capture, GraphedParts

#: Takes a technique back; calling it again does nothing.
Undo = Callable[[], None]


class Tried(StrEnum):
    """How a search looks into a technique."""

    ALWAYS = "always"
    """It is taken wherever it applies, with its first option: it costs nothing."""
    AS_VARIANT = "as variant"
    """Each option is a variant of the job, profiled beside those without."""
    AS_ONE_LAUNCH = "as one launch"
    """Its first option is another solution beside each without it: a micro-batch is one launch."""
    ON_TOP = "on top"
    """Options are rehearsed on top of the best plan without, and kept if that is faster or fits."""


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """What a search asks about."""

    gpu: GPU | None
    """None is the CPU."""
    choices: Choices
    """What is chosen so far, to which the technique would be added."""


class StepSettings(Protocol):
    """What a technique may set of the step; see `oomph.engine.step.Stage`."""

    cast_cache: bool
    graph: GraphedParts | None
    scaler: torch.amp.GradScaler | None


@dataclass(frozen=True, kw_only=True)
class ApplyContext:
    """What a technique is applied to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device_type: str
    choices: Choices
    """All that is applied, for what the technique has to know of others."""
    stage: StepSettings | None = None
    """What runs the step; None where the model is only looked at."""
    capture: Capture | None = None
    """Captures what a micro-batch launches; a rehearsal has its own."""

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of the model, as the plan names them."""
        return [find_module(self.model, path) for path in self.choices.blocks]


class Inspection:
    """Looks at a job while one forward of it is rehearsed; this one has nothing to look for."""

    @property
    def why_not(self) -> str:
        """Why the model, or its optimizer, cannot have the technique; empty where it can."""
        return ""

    @property
    def left_alone(self) -> str:
        """Why blocks stay as they are unless the job has the technique; empty if they may not."""
        return ""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Entered around the rehearsal."""
        return contextlib.nullcontext()

    def built(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Model and optimizer are there, on fake tensors; the forward comes next."""


class Technique(TechniqueInfo[S]):
    """One way to need less memory, or to be faster in the same."""

    tried: ClassVar[Tried] = Tried.ON_TOP
    """How a search looks into it."""
    decides_precision: ClassVar[bool] = False
    """Whether it says in which number format layers multiply: adapting precision then cannot."""

    comes_back: ClassVar[bool] = True
    """Whether a run that takes it back and applies it again goes on with the same numbers."""
    advice: ClassVar[str] = ""
    """Said where no plan fits and only its fidelity is not allowed: what it would do."""

    def inspect(self, job: Job) -> Inspection:
        """What looks whether the job's model can have it."""
        return Inspection()

    def why_not(self, context: SearchContext) -> str:
        """Why it does nothing for such a job on such a card, in words; empty where it may.

        Fidelity is no reason here: a search leaves out what its user does not allow.
        """
        return ""

    def options(self, context: SearchContext) -> Sequence[S]:
        """Settings that a search tries, the most promising first.

        By default those that are on, where they say nothing but whether they are.
        """
        fields = dataclasses.fields(self.settings)
        switches = {field.name: True for field in fields if field.default is False}
        return [self.settings(**switches)] if len(switches) == len(fields) else ()

    @abstractmethod
    def apply(self, settings: S, context: ApplyContext) -> Undo:
        """Change model or optimizer in place; refuse by `BadInput`, with nothing changed."""

    def around_rehearsal(self) -> AbstractContextManager[None]:
        """Entered around every rehearsal: keeps what it changes in the process out of it."""
        return contextlib.nullcontext()

    def process_state(self) -> Hashable:
        """What it has changed in the process now, as far as a compiled block depends on it."""
        return None


def apply_techniques(context: ApplyContext) -> Undo:
    """Apply the techniques of the context's choices that last as long as a run, by name."""
    with contextlib.ExitStack() as undos:
        for technique, settings in techniques_of(context.choices.without_switchable):
            undos.callback(technique.apply(settings, context))
        return undos.pop_all().close


def find_module(model: nn.Module, path: str) -> nn.Module:
    """The submodule at `path`, which a plan names."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise BadInput(f"the plan names {path}, which {type(model).__name__} has not") from None


def techniques() -> list[Technique[Any]]:
    """Every technique that is registered, by name."""
    return [whole_technique(one.name) for one in all_techniques()]


def techniques_of(choices: Choices) -> Iterator[tuple[Technique[Any], Settings]]:
    """The techniques that are on, with their settings, by name."""
    for name, settings in choices.techniques.items():
        yield whole_technique(name), settings


def in_one_launch(context: SearchContext) -> Choices | None:
    """The choices with a technique that makes a micro-batch one launch; None where none applies."""
    for technique in techniques():
        if technique.tried is Tried.AS_ONE_LAUNCH and not technique.why_not(context):
            for option in technique.options(context)[:1]:
                return context.choices.using(technique.name, option)
    return None


def altering_forward(choices: Choices) -> Choices:
    """Only the techniques with which the model's own code takes other paths."""
    on = {one.name: settings for one, settings in techniques_of(choices) if one.alters_forward}
    return Choices(techniques=on)


def staying(choices: Choices) -> list[str]:
    """What must not be taken back and applied again while a run goes on, in words."""
    return [one.elsewhere(told) for one, told in techniques_of(choices) if not one.comes_back]


def allowed_options(
    technique: Technique[S], context: SearchContext, allow: Fidelity
) -> Sequence[S]:
    """The options that a user who accepts no less than `allow` may have; none if it does not
    apply."""
    if technique.why_not(context):
        return ()
    return [
        option
        for option in technique.options(context)
        if allow.allows(technique.fidelity(option, context.choices.precision))
    ]


def whole_technique(name: str) -> Technique[Any]:
    """The technique of this name, with all there is to it."""
    found = technique_named(name)
    assert isinstance(found, Technique)  # whatever registers itself is one
    return found
