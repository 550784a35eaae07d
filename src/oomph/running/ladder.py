"""A ladder: plans of one job for smaller and smaller budgets, all with the same numbers.

Each rung was checked by a rehearsal of its own (rule 2), so a run can step onto it at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from oomph.errors import DoesNotFit
from oomph.planning.plan import Plan
from oomph.planning.planner import Planner

#: The budget of a rung, as a part of what the rung above it needs.
STEP = 0.8
#: A rung that needs hardly less than the one above it is none: this part of it, at least.
WORTH = 0.02
#: A plan this close to what there would be without a limit is not looked to be bettered.
FAST_ENOUGH = 1.001

#: While active, the job's model can be rehearsed.
Free = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A plan that was checked."""

    plan: Plan
    need: int
    """Device memory with which it surely runs."""
    retries: int
    """Times a step has the allocator give cached memory back, as it was predicted."""

    @classmethod
    def of(cls, plan: Plan) -> Rung:
        """The plan with what its check showed; one that was read from a file showed less."""
        if plan.checked is None:
            return cls(plan=plan, need=min(plan.budget, plan.predicted.high), retries=0)
        return cls(
            plan=plan,
            need=min(plan.budget, plan.checked.smallest_budget),
            retries=plan.checked.allocator_retries,
        )


class Ladder:
    """Rungs from the first plan down, made ahead or when they are first needed, and kept."""

    def __init__(self, planner: Planner, first: Plan, free: Free = contextlib.nullcontext) -> None:
        self.rungs = [Rung.of(first)]
        self._planner = planner
        #: The largest budget that was planned for.
        self._planned = first.budget
        #: Whether there is nothing below the last rung.
        self._complete = False
        self.free = free

    @property
    def top(self) -> Rung:
        """The one that needs the most."""
        return self.rungs[0]

    def make_all(self) -> None:
        """Make all rungs there can be, down to the leanest."""
        while not self._complete:
            self._make_next()

    def stop(self) -> None:
        """Make no more rungs."""
        self._complete, self._planned = True, 1 << 63

    def below(self, rung: Rung) -> Rung | None:
        """The next rung that needs less; None where there is none."""
        while True:
            less = [one for one in self.rungs if one.need < rung.need]
            if less or self._complete:
                return max(less, key=lambda one: one.need, default=None)
            self._make_next()

    def within(self, budget: int) -> Rung | None:
        """The fastest rung that needs no more than this; None where there is none."""
        top = self.top.plan.predicted
        if budget > self._planned and top.seconds > top.unlimited_seconds * FAST_ENOUGH:
            self._add(budget)
            self._planned = budget
        while True:
            fitting = [one for one in self.rungs if one.need <= budget]
            if fitting or self._complete:
                return min(fitting, key=lambda one: one.plan.predicted.seconds, default=None)
            self._make_next()

    def _make_next(self) -> None:
        last = self.rungs[-1]
        try:
            self._add(int(last.need * STEP))
        except DoesNotFit as error:
            self._complete = True
            if error.smallest < last.need * (1 - WORTH):
                self._add(error.smallest)

    def _add(self, budget: int) -> None:
        with self.free():
            plan = self._planner.plan_like(self.top.plan, budget)
        rung = Rung.of(plan)
        self.rungs = sorted([*self.rungs, rung], key=lambda one: -one.need)
