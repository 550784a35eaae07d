"""Fallback plans: plans of one job for smaller and smaller budgets, all with the same numbers.

Each was checked by its own rehearsal (rule 2), so a run can switch to it at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from oomph.errors import DoesNotFit
from oomph.plans.plan import Plan
from oomph.search.planner import Planner

#: The budget of a fallback plan, as a share of what the next larger one needs.
STEP = 0.8
#: A fallback plan must need less than the next larger one by at least this share.
WORTH = 0.02
#: A plan this close to the speed without a limit is not worth improving.
FAST_ENOUGH = 1.001

#: While active, the job's model can be rehearsed.
Free = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A plan that was checked."""

    plan: Plan
    need: int
    """Device memory with which it is certain to run."""
    retries: int
    """Predicted number of allocator retries (releasing cached memory) per step."""

    @classmethod
    def of(cls, plan: Plan) -> Fallback:
        """The plan with the results of its check; a plan read from a file carries fewer."""
        if plan.checked is None:
            return cls(plan=plan, need=min(plan.budget, plan.predicted.high), retries=0)
        return cls(
            plan=plan,
            need=min(plan.budget, plan.checked.smallest_budget),
            retries=plan.checked.allocator_retries,
        )


class FallbackPlans:
    """The first plan and smaller ones, made ahead or when first needed, and kept."""

    def __init__(self, planner: Planner, first: Plan, free: Free = contextlib.nullcontext) -> None:
        self.steps_down = [Fallback.of(first)]
        self._planner = planner
        #: The largest budget that was planned for.
        self._planned = first.budget
        #: Whether no smaller plan can be made.
        self._complete = False
        self.free = free

    @property
    def top(self) -> Fallback:
        """The plan that needs the most memory."""
        return self.steps_down[0]

    def make_all(self) -> None:
        """Make all fallback plans, down to the leanest."""
        while not self._complete:
            self._make_next()

    def stop(self) -> None:
        """Make no more fallback plans."""
        self._complete, self._planned = True, 1 << 63

    def below(self, fallback: Fallback) -> Fallback | None:
        """The next plan that needs less; None if there is none."""
        while True:
            less = [one for one in self.steps_down if one.need < fallback.need]
            if less or self._complete:
                return max(less, key=lambda one: one.need, default=None)
            self._make_next()

    def within(self, budget: int) -> Fallback | None:
        """The fastest plan that needs no more than this; None if there is none."""
        top = self.top.plan.predicted
        if budget > self._planned and top.seconds > top.unlimited_seconds * FAST_ENOUGH:
            self._add(budget)
            self._planned = budget
        while True:
            fitting = [one for one in self.steps_down if one.need <= budget]
            if fitting or self._complete:
                return min(fitting, key=lambda one: one.plan.predicted.seconds, default=None)
            self._make_next()

    def _make_next(self) -> None:
        last = self.steps_down[-1]
        try:
            self._add(int(last.need * STEP))
        except DoesNotFit as error:
            self._complete = True
            if error.smallest < last.need * (1 - WORTH):
                self._add(error.smallest)

    def _add(self, budget: int) -> None:
        with self.free():
            plan = self._planner.plan_like(self.top.plan, budget)
        fallback = Fallback.of(plan)
        self.steps_down = sorted([*self.steps_down, fallback], key=lambda one: -one.need)
