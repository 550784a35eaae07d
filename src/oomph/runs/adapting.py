"""Changes a run's plan: to a smaller one when memory runs out, to others as memory changes.

All plans of a run produce the same numbers, as they share `Choices.fixed_part`; they trade memory
for time differently. So a step gives the same result under any of them, except for the order of
floating-point sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from oomph.engine.applying import Applied
from oomph.errors import DoesNotFit, OomphError, OutOfMemory, StalePlan
from oomph.jobs.job import Job
from oomph.plans.plan import Plan
from oomph.runs.elastic import Elasticity, Event, Limit, Move, log
from oomph.runs.fallback_plans import Fallback, FallbackPlans
from oomph.search.planner import Planner
from oomph.techniques.technique import staying
from oomph.torch_compat.pytree import tree_leaves
from oomph.units import format_bytes

Shapes = Sequence[tuple[int, ...]]


class Adapting:
    """The applied plan, the fallback plans, and a record of every change."""

    def __init__(
        self,
        applied: Applied,
        fallbacks: FallbackPlans,
        *,
        planner_for: Callable[[Job], Planner],
        elasticity: Elasticity | None,
        enforce: Callable[[int], None],
        device: torch.device,
    ) -> None:
        self.events: list[Event] = []
        self.fallback = fallbacks.top
        self.budget = fallbacks.top.plan.budget
        self._applied = applied
        self._planner_for = planner_for
        self._elasticity = elasticity
        self._enforce = enforce
        self._device = device
        #: Fallback plans by batch length, ascending; those for longer batches are made when such a
        #: batch comes.
        self._fallbacks_by_plan = [fallbacks]
        self._at = 0
        #: Steps since a batch last needed the current fallback plans.
        self._shorter = 0
        self._prepare(fallbacks)

    @property
    def plan(self) -> Plan:
        """The plan that is applied."""
        return self.fallback.plan

    def before_step(self, step: int, batch: Any) -> None:
        """Follow the available memory, and make sure that the plan fits batches like this one."""
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._follow_batch(step, batch, shapes)
        if self._elasticity is None:
            return
        move = self._elasticity.next_move(self._fallbacks, self.fallback, self.budget)
        if move is not None:
            self._make(step, move)

    def retreat(self, step: int, failure: str, tried: Sequence[Fallback]) -> None:
        """A step ran out of memory and was rolled back: switch to the next smaller plan."""
        if self._elasticity is not None:
            self._elasticity.ran_out()
        reason = failure.strip().splitlines()[0]
        needs = ", ".join(format_bytes(fallback.need) for fallback in tried)
        advice = (
            f"the last one said: {reason}. Nothing of the step was kept: free memory on the device"
            " and go on, or shorten the batch"
        )
        try:
            below = self._fallbacks.below(self.fallback)
        except OomphError as error:
            raise OutOfMemory(
                f"a step ran out of memory, and no smaller plan can be made: {error}; {advice}"
            ) from error
        if below is None:
            raise OutOfMemory(
                f"a step ran out of memory under all {len(tried)} plans that were left, which"
                f" should need {needs}: {advice}"
            )
        limit = Limit(nbytes=self.budget, because="")
        self._make(step, Move(fallback=below, cause=f"out of memory ({reason})", limit=limit))

    def set_budget(self, step: int, budget: int) -> None:
        """Switch at once to the best plan within another budget."""
        fallback = self._fallbacks.within(budget)
        if fallback is None:
            smallest = min(one.need for one in self._fallbacks.steps_down)
            raise DoesNotFit(
                f"no plan of this run fits {format_bytes(budget)}: the leanest needs"
                f" {format_bytes(smallest)}; the budget is still {format_bytes(self.budget)}",
                smallest,
            )
        self.budget = budget
        self._enforce(budget)
        if fallback != self.fallback:
            limit = Limit(nbytes=budget, because="")
            self._make(step, Move(fallback=fallback, cause="the budget was set", limit=limit))

    @property
    def _fallbacks(self) -> FallbackPlans:
        return self._fallbacks_by_plan[self._at]

    def _make(self, step: int, move: Move) -> None:
        before = self.fallback
        self._applied.switch(move.fallback.plan.choices)
        self.fallback = move.fallback
        if move.fallback.need < before.need:
            self._give_back()
        if self._elasticity is not None:
            self._enforce(move.limit.nbytes)
        event = Event(
            step=step,
            cause=move.cause,
            before=before.plan,
            after=move.fallback.plan,
            budget=move.limit.nbytes,
        )
        self.events.append(event)
        log.info("%s", event)

    def _give_back(self) -> None:
        """Release unneeded cached memory, for other processes and against fragmentation."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # -- batches ----------------------------------------------------------------------------------

    def _follow_batch(self, step: int, batch: Any, shapes: Shapes) -> None:
        """Use the fallback plans for the shortest batches that are long enough for this one."""
        first = self._fallbacks_by_plan[0].top.plan
        why_not = why_too_long(first, shapes)
        if self._elasticity is None or len(shapes) != len(first.made_for.batch):
            if why_not:
                raise StalePlan(why_not)
            return
        fitting = [
            at
            for at, fallbacks in enumerate(self._fallbacks_by_plan)
            if not any(why_too_long(fallback.plan, shapes) for fallback in fallbacks.steps_down)
        ]
        if not fitting:
            self._plan_longer(batch)
            fitting = [len(self._fallbacks_by_plan) - 1]
        self._shorter = self._shorter + 1 if fitting[0] < self._at else 0
        if fitting[0] > self._at:
            self._climb(step, fitting[0], "a longer batch than was planned for")
        elif self._shorter > self._elasticity.patience:
            self._climb(step, fitting[0], f"batches have been shorter for {self._shorter} steps")

    def _climb(self, step: int, at: int, cause: str) -> None:
        fallbacks = self._fallbacks_by_plan[at]
        fallback = fallbacks.within(self.budget)
        if fallback is None:
            smallest = min(one.need for one in fallbacks.steps_down)
            raise DoesNotFit(
                f"{cause}: the leanest plan for it needs {format_bytes(smallest)}, and the budget"
                f" is {format_bytes(self.budget)}; shorten the batch or raise the budget",
                smallest,
            )
        self._at, self._shorter = at, 0
        if fallback.plan.choices != self.plan.choices:
            limit = Limit(nbytes=self.budget, because="")
            self._make(step, Move(fallback=fallback, cause=cause, limit=limit))
        self.fallback = fallback

    def _plan_longer(self, batch: Any) -> None:
        """Make fallback plans for batches like this one, with the numbers of the first plan."""
        if stays := staying(self._applied.choices):
            raise StalePlan(
                f"a batch is longer than any that was planned for, and {stays[0]} does not let a"
                " run plan on its way: plan with the largest batch there will be"
            )
        planner = self._planner_for(dataclasses.replace(self._applied.job, batch=batch))
        with self._applied.taken_back():
            plan = planner.plan_like(self._fallbacks_by_plan[0].top.plan, self.budget)
        fallbacks = FallbackPlans(planner, plan)
        self._prepare(fallbacks)
        self._fallbacks_by_plan.append(fallbacks)

    def _prepare(self, fallbacks: FallbackPlans) -> None:
        """Let fallback plans be made from now on for a model that is in training."""
        if staying(self._applied.choices):
            fallbacks.stop()  # undoing and reapplying the plan would not restore it exactly
        else:
            fallbacks.free = self._applied.taken_back


def _has_room_for_each(planned: Shapes, shapes: Shapes) -> bool:
    """Whether each tensor has one of its own in the plan that is as large in every dimension."""
    largest_first = [sorted(each, key=math.prod, reverse=True) for each in (shapes, planned)]
    if all(map(_is_inside, *largest_first)):
        return True  # as a rule, without looking at all pairs
    pairs = csr_array([[_is_inside(now, then) for then in planned] for now in shapes])
    return bool((maximum_bipartite_matching(pairs, perm_type="column") >= 0).all())


def _is_inside(now: tuple[int, ...], then: tuple[int, ...]) -> bool:
    return len(now) == len(then) and all(a <= b for a, b in zip(now, then, strict=True))


def why_too_long(plan: Plan, shapes: Shapes) -> str:
    """Why a plan is not for a batch of these shapes; empty if it is.

    More samples are fine if they make more micro-batches, or are shorter and so no more data in
    all; longer samples were not planned for.
    """
    planned = plan.made_for.batch
    if len(shapes) < len(planned) and _has_room_for_each(planned, shapes):
        return ""  # a shorter list of samples
    if len(shapes) != len(planned):
        return (
            f"the plan is for batches of {len(planned)} tensors, and this one has {len(shapes)};"
            " plan with a batch like those there will be"
        )
    no_more = sum(map(math.prod, shapes)) <= sum(map(math.prod, planned))
    first = 0 if plan.choices.micro_batch is None and not no_more else 1
    for now, then in zip(shapes, planned, strict=True):
        longer = (a > b for a, b in zip(now[first:], then[first:], strict=False))
        if len(now) != len(then) or any(longer):
            return (
                f"the plan is for batches of up to {then}, and this one is {now}; plan with the"
                " largest batch there will be"
            )
    return ""
