"""The check that every plan passes: the whole job, rehearsed and judged under the budget (rule 2).

A quick check rehearses the step alone. It shows which of many choices is worth a full check.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oomph.errors import CannotRehearse
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate, judge, surely_fits
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.step_cost import step_cost
from oomph.rehearsal.timeline import Timeline
from oomph.search.candidates import Candidate, Verdict, merit_of
from oomph.search.option_profiles import count_parts
from oomph.search.process_questions import CHECK, QUICK_CHECK, question
from oomph.search.second_process import SecondProcess
from oomph.techniques.allocator_settings import EXPANDABLE

#: The share of the room for tensors to keep free when offloading: memory being copied is freed only
#: when the copy is done; with nothing to spare the allocator would empty its cache for it.
COPY_MARGIN = 0.05
#: Phases of a quick check, without the first step: about half of a full check.
QUICK_PHASES = ("build", "step")

#: How many of the likely next choices the second process is asked for.
FORESEEN = 2

Say = Callable[[str], None]
Found = tuple[Verdict, Candidate]
#: Examines a candidate, given the choices that are likely to come next.
LookInto = Callable[[Candidate, Sequence[Choices]], Found]


@dataclass(kw_only=True)
class Checker:
    """Judges choices under one budget, here or in the second process."""

    job: Job
    gpu: GPU | None
    clock: Clock
    budget: int
    second: SecondProcess
    say: Say
    _checked: dict[str, Estimate] = field(default_factory=dict)
    """By choices: results of checks made in this process."""
    _quick_checked: dict[str, Verdict] = field(default_factory=dict)
    """By question: results of quick checks made in this process."""

    @property
    def hidden(self) -> int:
        """Upper bound on device memory that no tensor accounts for."""
        return device_overhead(self.gpu).high if self.gpu is not None else 0

    def limit(self, leaves: bool) -> int:
        """The most that a plan may need when rehearsed; below the budget if the plan offloads."""
        spare = COPY_MARGIN * (self.budget - self.hidden) if leaves else 0.0
        return self.budget - int(max(spare, 0.0))

    def budget_for(self, need: int, leaves: bool) -> int:
        """The budget whose limit is what a plan needs."""
        spare = COPY_MARGIN * (need - self.hidden) / (1 - COPY_MARGIN) if leaves else 0.0
        return need + math.ceil(spare)

    def look_into(self, candidate: Candidate, likely: Sequence[Choices]) -> Found:
        """Check a candidate, in the second process if asked; `likely` are the next choices."""
        return self._answer_about(candidate, CHECK, likely) or self.check(candidate)

    def quick_check(self, candidate: Candidate, likely: Sequence[Choices]) -> Found:
        """The same for the step alone: quicker, but no proof."""
        # While the second process is busy, examine here what it would come to only later.
        for choices in likely[:1]:
            if self.second.comes_to_later(question(QUICK_CHECK, choices)):
                self._quick_check(choices)
        if str(question(QUICK_CHECK, candidate.choices)) not in self._quick_checked:
            answer = self._answer_about(candidate, QUICK_CHECK, likely)
            if answer is not None:
                return answer
        verdict = self._quick_check(candidate.choices)
        return verdict, verdict.passed_on(candidate)

    def _quick_check(self, choices: Choices) -> Verdict:
        key = str(question(QUICK_CHECK, choices))
        if key not in self._quick_checked:
            self.say("trying a plan by rehearsing its step")
            self._quick_checked[key] = self._examine(choices, QUICK_PHASES)[1]
        return self._quick_checked[key]

    def check(self, candidate: Candidate) -> Found:
        """Rehearse the whole job with the candidate's choices and judge it under the budget."""
        self.say("checking a plan by rehearsing it")
        estimate, verdict = self._examine(candidate.choices, PHASES)
        candidate = verdict.passed_on(candidate)
        self._checked[str(candidate.choices)] = estimate
        return verdict, candidate

    def was_checked(self, candidate: Candidate) -> bool:
        """Whether these choices were checked in this process."""
        return str(candidate.choices) in self._checked

    def estimate_of(self, candidate: Candidate) -> Estimate:
        """The estimate of the candidate's check, which is made in this process if need be."""
        if not self.was_checked(candidate):
            self.check(candidate)
        return self._checked[str(candidate.choices)]

    def confirmed(self, candidate: Candidate) -> tuple[Estimate, Candidate]:
        """The candidate with its check from this process, which the second one's cannot replace."""
        estimate = self.estimate_of(candidate)
        if not estimate.fits:
            raise CannotRehearse(
                "two rehearsals of one plan took different memory: the model or its loss does not"
                " do the same in every step"
            )
        return estimate, candidate

    def answer(self, what: str, choices: Choices) -> Verdict:
        """The second process's answer to a check or quick check."""
        return self._examine(choices, QUICK_PHASES if what == QUICK_CHECK else PHASES)[1]

    def _answer_about(
        self, candidate: Candidate, what: str, likely: Sequence[Choices]
    ) -> Found | None:
        """The second process's verdict; also asks it for the choices likely to come next.

        Those begin with the next one if this candidate is examined here, otherwise with the one
        after it.
        """
        answer = self.second.answer(question(what, candidate.choices))
        coming = likely[:FORESEEN] if answer is None else likely[1 : FORESEEN + 1]
        self.second.ask([question(what, choices) for choices in coming], instead=True)
        if answer is None:
            return None
        verdict = Verdict(*answer)
        return verdict, verdict.passed_on(candidate)

    def _examine(self, choices: Choices, phases: Sequence[str]) -> tuple[Estimate, Verdict]:
        timeline = rehearse(
            self.job,
            self.gpu,
            phases,
            choices=choices,
            clock=self.clock,
            skip_first_step=phases is QUICK_PHASES,
        )
        rehearsed = None
        if choices.leaves:
            parts = count_parts(self.job, choices.micro_batch)
            rehearsed = step_cost(timeline, parts).seconds(self.clock)
        estimate, allocator = self._judge_best(timeline, self.limit(choices.leaves), phases)
        return estimate, Verdict.of(estimate, rehearsed, allocator)

    def _judge_best(
        self, timeline: Timeline, limit: int, phases: Sequence[str]
    ) -> tuple[Estimate, str]:
        """Judge by default and by expandable allocator segments, and keep the better."""
        if self.gpu is None:
            return self._judge(timeline, "", limit, phases), ""
        plain, expandable = AllocatorSettings.parse(""), None
        if not surely_fits(timeline, gpu=self.gpu, budget=limit, settings=plain):
            expandable = self._judge(timeline, EXPANDABLE, limit, phases)
            if expandable.fits:  # better than not fitting, whatever else the defaults need
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
