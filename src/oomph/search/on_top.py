"""Techniques that are rehearsed on top of a plan: those that nobody taught the search more about.

A technique whose effect no profile of blocks foresees is simply tried: the whole step is rehearsed
with it, and it stays if the step is faster, or fits where it did not. Where it leaves memory that
the plan lacked, the blocks are solved again with more room, and that is rehearsed as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from oomph.errors import BadInput, CannotRehearse
from oomph.hardware.timing.clock import Clock
from oomph.plans.choices import Choices
from oomph.rehearsal.step_cost import step_cost
from oomph.search.candidates import Candidate
from oomph.search.checker import Checker, Found
from oomph.search.option_profiles import count_parts
from oomph.search.space import SearchSpace
from oomph.techniques.technique import Technique, Tried

#: Settings of one technique that are rehearsed, at most.
MOST_OPTIONS = 2
#: More room than any job needs.
_ANY = 1 << 60
#: What a technique leaves of a step's seconds, at most, to be worth having.
WORTH_IT = 0.999


@dataclass(frozen=True, kw_only=True)
class OnTop:
    """Tries techniques on top of candidates that were checked."""

    space: SearchSpace
    checker: Checker
    clock: Clock
    solve: Callable[[Candidate, int], Candidate | None]
    """The fastest way to run the candidate's blocks in so much room."""
    host: int | None
    """Host memory that a plan may take; None where there is no limit."""

    def improve(self, best: Candidate) -> Candidate:
        """The candidate, which fits, with every technique that makes it faster."""
        for technique in self._untried(best.choices):
            for choices in self._options(technique, best.choices):
                faster = self._faster(best, choices)
                if faster is not None:
                    best = faster
                    break
        return best

    def make_fit(self, lean: Candidate) -> Found | None:
        """The candidate, which does not fit, with the first technique with which it does."""
        for technique in self._untried(lean.choices):
            for choices in self._options(technique, lean.choices):
                found = self._check(lean, choices, lean)
                if found is not None and self._fits(found):
                    return found
        return None

    def _untried(self, choices: Choices) -> list[Technique[Any]]:
        suited = self.space.suited(Tried.ON_TOP)
        return [one for one in suited if one.name not in choices.techniques]

    def _options(self, technique: Technique[Any], choices: Choices) -> Iterator[Choices]:
        for option in self.space.options(technique, choices)[:MOST_OPTIONS]:
            try:
                yield choices.using(technique.name, option)
            except BadInput:
                continue  # these choices exclude it

    def _faster(self, best: Candidate, choices: Choices) -> Candidate | None:
        found = self._check(best, choices, best)
        if found is None:
            return None
        tried = [found]
        free = self.checker.limit(choices.leaves) - found[0].smallest_budget
        # What it leaves may be enough for the fastest blocks of all; else for somewhat faster ones.
        for room in (_ANY, best.solution.peak + free) if free > 0 else ():
            roomy = self.solve(found[1], room)
            if roomy is None or roomy.choices.blocks == choices.blocks:
                break
            again = self._check(roomy, roomy.choices, best)
            tried += [again] if again is not None else []
            if again is not None and self._fits(again):
                break
        limit = WORTH_IT * _seconds(best)
        faster = [one for verdict, one in filter(self._fits, tried) if _seconds(one) < limit]
        return min(faster, key=_seconds, default=None)

    def _check(self, candidate: Candidate, choices: Choices, before: Candidate) -> Found | None:
        """Its check, and what it takes by what it takes more than the one `before` it."""
        wanted = dataclasses.replace(candidate, choices=choices, rehearsed=None)
        try:
            verdict, found = self.checker.check(wanted)
        except CannotRehearse:
            return None
        if found.rehearsed is None:
            more = self._step_seconds(found) - self._step_seconds(before)
            found = dataclasses.replace(found, rehearsed=_seconds(before) + more)
        return verdict, found

    def _fits(self, found: Found) -> bool:
        verdict, _ = found
        return verdict.fits and (self.host is None or verdict.host <= self.host)

    def _step_seconds(self, candidate: Candidate) -> float:
        timeline = self.checker.estimate_of(candidate).timeline
        parts = count_parts(self.space.job, candidate.choices.micro_batch)
        return step_cost(timeline, parts).seconds(self.clock)


def _seconds(candidate: Candidate) -> float:
    """Of a step, by the rehearsal of it where there was one."""
    if candidate.rehearsed is not None:
        return candidate.rehearsed
    return candidate.profiles.seconds(candidate.solution)
