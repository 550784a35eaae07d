"""The check that every plan passes: the whole job, rehearsed and judged under the budget (rule 2).

A glance is quicker: the step alone. It tells which of many choices is worth a check.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oomph.errors import CannotRehearse
from oomph.estimation import Estimate, judge, surely_fits
from oomph.gpus import GPU
from oomph.job import Job
from oomph.planning.audition import count_parts
from oomph.planning.candidates import Candidate, Verdict, merit_of
from oomph.planning.choices import Choices
from oomph.planning.effort import step_effort
from oomph.planning.questions import CHECK, GLANCE, question
from oomph.planning.second_process import SecondProcess
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.timeline import Timeline
from oomph.techniques.allocator_settings import EXPANDABLE
from oomph.timing.clock import Clock

#: The part of the room for tensors that stays free where something leaves the GPU: what is on its
#: way is freed when copies are done; with nothing to spare the allocator empties its cache for it.
COPY_MARGIN = 0.05
#: What a glance rehearses, the first step left out: about half of a check.
AT_A_GLANCE = ("build", "step")

#: How many of the choices that are likely to come the second process is asked for.
FORESEEN = 2

Say = Callable[[str], None]
Found = tuple[Verdict, Candidate]
#: Examines a candidate; these choices are likely to come next.
LookInto = Callable[[Candidate, Sequence[Choices]], Found]


@dataclass(kw_only=True)
class Checker:
    """Judges choices under one budget, here or by the second process."""

    job: Job
    gpu: GPU | None
    clock: Clock
    budget: int
    second: SecondProcess
    say: Say
    _checked: dict[str, Estimate] = field(default_factory=dict)
    """By choices: what checks made here found."""
    _glanced: dict[str, Verdict] = field(default_factory=dict)
    """By what was asked: what glances made here found."""

    @property
    def hidden(self) -> int:
        """Device memory that no tensor shows, at most."""
        return device_overhead(self.gpu).high if self.gpu is not None else 0

    def limit(self, leaves: bool) -> int:
        """What of the budget a plan may need, as rehearsed; less where something leaves the GPU."""
        spare = COPY_MARGIN * (self.budget - self.hidden) if leaves else 0.0
        return self.budget - int(max(spare, 0.0))

    def budget_for(self, need: int, leaves: bool) -> int:
        """The budget whose limit is what a plan needs."""
        spare = COPY_MARGIN * (need - self.hidden) / (1 - COPY_MARGIN) if leaves else 0.0
        return need + math.ceil(spare)

    def look_into(self, candidate: Candidate, likely: Sequence[Choices]) -> Found:
        """Its check, by the second process where that was asked; `likely` are those to come."""
        return self._told_of(candidate, CHECK, likely) or self.check(candidate)

    def glance_at(self, candidate: Candidate, likely: Sequence[Choices]) -> Found:
        """The same of the step alone, which is quicker and no proof."""
        # What the second process would come to only when all is waited for is looked at meanwhile.
        for choices in likely[:1]:
            if self.second.comes_to_later(question(GLANCE, choices)):
                self._glance(choices)
        if str(question(GLANCE, candidate.choices)) not in self._glanced:
            told = self._told_of(candidate, GLANCE, likely)
            if told is not None:
                return told
        verdict = self._glance(candidate.choices)
        return verdict, verdict.passed_on(candidate)

    def _glance(self, choices: Choices) -> Verdict:
        key = str(question(GLANCE, choices))
        if key not in self._glanced:
            self.say("trying a plan by rehearsing its step")
            self._glanced[key] = self._examine(choices, AT_A_GLANCE)[1]
        return self._glanced[key]

    def check(self, candidate: Candidate) -> Found:
        """Rehearse the whole job with the candidate's choices and judge it under the budget."""
        self.say("checking a plan by rehearsing it")
        estimate, verdict = self._examine(candidate.choices, PHASES)
        candidate = verdict.passed_on(candidate)
        self._checked[str(candidate.choices)] = estimate
        return verdict, candidate

    def was_checked(self, candidate: Candidate) -> bool:
        """Whether that was done here, with what it is now."""
        return str(candidate.choices) in self._checked

    def confirmed(self, candidate: Candidate) -> tuple[Estimate, Candidate]:
        """With its check made here, which nobody else's word replaces."""
        if not self.was_checked(candidate):
            self.check(candidate)
        estimate = self._checked[str(candidate.choices)]
        if not estimate.fits:
            raise CannotRehearse(
                "two rehearsals of one plan took different memory: the model or its loss does not"
                " do the same in every step"
            )
        return estimate, candidate

    def answer(self, what: str, choices: Choices) -> Verdict:
        """What the second process says, asked for a check or a glance."""
        return self._examine(choices, AT_A_GLANCE if what == GLANCE else PHASES)[1]

    def _told_of(self, candidate: Candidate, what: str, likely: Sequence[Choices]) -> Found | None:
        """What the second process found; it is asked for what is likely to come meanwhile.

        That is the next where this one is examined here, and else what comes behind the next.
        """
        told = self.second.answer(question(what, candidate.choices))
        coming = likely[:FORESEEN] if told is None else likely[1 : FORESEEN + 1]
        self.second.ask([question(what, choices) for choices in coming], instead=True)
        if told is None:
            return None
        verdict = Verdict(*told)
        return verdict, verdict.passed_on(candidate)

    def _examine(self, choices: Choices, phases: Sequence[str]) -> tuple[Estimate, Verdict]:
        timeline = rehearse(
            self.job,
            self.gpu,
            phases,
            choices=choices,
            clock=self.clock,
            skip_first_step=phases is AT_A_GLANCE,
        )
        rehearsed = None
        if choices.leaves:
            parts = count_parts(self.job, choices.micro_batch)
            rehearsed = step_effort(timeline, parts).seconds(self.clock)
        estimate, allocator = self._judge_best(timeline, self.limit(choices.leaves), phases)
        return estimate, Verdict.of(estimate, rehearsed, allocator)

    def _judge_best(
        self, timeline: Timeline, limit: int, phases: Sequence[str]
    ) -> tuple[Estimate, str]:
        """By the settings of the allocator that are better, and these."""
        if self.gpu is None:
            return self._judge(timeline, "", limit, phases), ""
        plain, expandable = AllocatorSettings.parse(""), None
        if not surely_fits(timeline, gpu=self.gpu, budget=limit, settings=plain):
            expandable = self._judge(timeline, EXPANDABLE, limit, phases)
            if expandable.fits:  # which is better than not to, whatever else the defaults need
                return expandable, EXPANDABLE
        estimate = self._judge(timeline, "", limit, phases)
        if not (estimate.fits and not estimate.step_retries):
            expandable = expandable or self._judge(timeline, EXPANDABLE, limit, phases)
            if merit_of(expandable) > merit_of(estimate):
                return expandable, EXPANDABLE
        return estimate, ""

    def _judge(
        self, timeline: Timeline, settings: str, limit: int, phases: Sequence[str]
    ) -> Estimate:
        estimate = judge(
            timeline,
            job=self.job.name,
            gpu=self.gpu,
            budget=limit,
            settings=AllocatorSettings.parse(settings),
            phases=phases,
            seconds=0.0,
        )
        return dataclasses.replace(estimate, budget=self.budget)
