"""A run changes its plan: to a smaller one when memory runs out, to others as memory comes, goes.

All plans of a run have the same numbers (`Choices.lasting`); what differs is how much memory they
take for how much time. So a step is the same whichever of them it is made under, but for the order
of floating-point sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oomph.errors import DoesNotFit, OomphError, OutOfMemory, StalePlan
from oomph.job import Job
from oomph.planning.plan import Plan
from oomph.planning.planner import Planner
from oomph.running.applying import Applied
from oomph.running.elastic import Elasticity, Event, Limit, Move, log
from oomph.running.ladder import Ladder, Rung
from oomph.units import format_bytes

Shapes = Sequence[tuple[int, ...]]


class Adapting:
    """The plan that is applied, those that could be, and what changed when."""

    def __init__(
        self,
        applied: Applied,
        ladder: Ladder,
        *,
        planner_for: Callable[[Job], Planner],
        elasticity: Elasticity | None,
        enforce: Callable[[int], None],
        device: torch.device,
    ) -> None:
        self.events: list[Event] = []
        self.rung = ladder.top
        self.budget = ladder.top.plan.budget
        self._applied = applied
        self._planner_for = planner_for
        self._elasticity = elasticity
        self._enforce = enforce
        self._device = device
        #: For longer and longer batches; the last ones are made when such a batch comes.
        self._ladders = [ladder]
        self._at = 0
        #: Steps since a batch last needed the present ladder.
        self._shorter = 0
        self._prepare(ladder)

    @property
    def plan(self) -> Plan:
        """The plan that is applied."""
        return self.rung.plan

    def before_step(self, step: int, batch: Any) -> None:
        """Follow the memory there is, and make sure that the plan is for batches like this one."""
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._follow_batch(step, batch, shapes)
        if self._elasticity is None:
            return
        move = self._elasticity.next_move(self._ladder, self.rung, self.budget)
        if move is not None:
            self._make(step, move)

    def retreat(self, step: int, failure: str, tried: Sequence[Rung]) -> None:
        """A step ran out of memory and was taken back: go to the next smaller plan."""
        if self._elasticity is not None:
            self._elasticity.ran_out()
        reason = failure.strip().splitlines()[0]
        needs = ", ".join(format_bytes(rung.need) for rung in tried)
        advice = (
            f"the last one said: {reason}. Nothing of the step was kept: free memory on the device"
            " and go on, or shorten the batch"
        )
        try:
            below = self._ladder.below(self.rung)
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
        self._make(step, Move(rung=below, cause=f"out of memory ({reason})", limit=limit))

    def set_budget(self, step: int, budget: int) -> None:
        """Go to the best plan within another budget, at once."""
        rung = self._ladder.within(budget)
        if rung is None:
            smallest = min(one.need for one in self._ladder.rungs)
            raise DoesNotFit(
                f"no plan of this run fits {format_bytes(budget)}: the leanest needs"
                f" {format_bytes(smallest)}; the budget is still {format_bytes(self.budget)}",
                smallest,
            )
        self.budget = budget
        self._enforce(budget)
        if rung != self.rung:
            limit = Limit(nbytes=budget, because="")
            self._make(step, Move(rung=rung, cause="the budget was set", limit=limit))

    @property
    def _ladder(self) -> Ladder:
        return self._ladders[self._at]

    def _make(self, step: int, move: Move) -> None:
        before = self.rung
        self._applied.switch(move.rung.plan.choices)
        self.rung = move.rung
        if move.rung.need < before.need:
            self._give_back()
        if self._elasticity is not None:
            self._enforce(move.limit.nbytes)
        event = Event(
            step=step,
            cause=move.cause,
            before=before.plan,
            after=move.rung.plan,
            budget=move.limit.nbytes,
        )
        self.events.append(event)
        log.info("%s", event)

    def _give_back(self) -> None:
        """What is cached and not needed is for others, and not cut into the wrong pieces."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # -- batches ----------------------------------------------------------------------------------

    def _follow_batch(self, step: int, batch: Any, shapes: Shapes) -> None:
        """Use the ladder for the shortest batches that has room for this one."""
        first = self._ladders[0].top.plan
        why_not = why_too_long(first, shapes)
        if self._elasticity is None or len(shapes) != len(first.made_for.batch):
            if why_not:
                raise StalePlan(why_not)
            return
        fitting = [
            at
            for at, ladder in enumerate(self._ladders)
            if not any(why_too_long(rung.plan, shapes) for rung in ladder.rungs)
        ]
        if not fitting:
            self._plan_longer(batch)
            fitting = [len(self._ladders) - 1]
        self._shorter = self._shorter + 1 if fitting[0] < self._at else 0
        if fitting[0] > self._at:
            self._climb(step, fitting[0], "a longer batch than was planned for")
        elif self._shorter > self._elasticity.patience:
            self._climb(step, fitting[0], f"batches have been shorter for {self._shorter} steps")

    def _climb(self, step: int, at: int, cause: str) -> None:
        ladder = self._ladders[at]
        rung = ladder.within(self.budget)
        if rung is None:
            smallest = min(one.need for one in ladder.rungs)
            raise DoesNotFit(
                f"{cause}: the leanest plan for it needs {format_bytes(smallest)}, and the budget"
                f" is {format_bytes(self.budget)}; shorten the batch or raise the budget",
                smallest,
            )
        self._at, self._shorter = at, 0
        if rung.plan.choices != self.plan.choices:
            limit = Limit(nbytes=self.budget, because="")
            self._make(step, Move(rung=rung, cause=cause, limit=limit))
        self.rung = rung

    def _plan_longer(self, batch: Any) -> None:
        """A ladder for batches like this one, with the numbers of the first plan."""
        if self._applied.choices.low_bit_state:
            raise StalePlan(
                "a batch is longer than any that was planned for, and 8-bit optimizer state does"
                " not let a run plan on its way: plan with the largest batch there will be"
            )
        planner = self._planner_for(dataclasses.replace(self._applied.job, batch=batch))
        with self._applied.taken_back():
            plan = planner.plan_like(self._ladders[0].top.plan, self.budget)
        ladder = Ladder(planner, plan)
        self._prepare(ladder)
        self._ladders.append(ladder)

    def _prepare(self, ladder: Ladder) -> None:
        """Rungs that are made from now on are made for a model that trains."""
        if self._applied.choices.low_bit_state:
            ladder.stop()  # it would not come back from being taken back as it was
        else:
            ladder.free = self._applied.taken_back


def why_too_long(plan: Plan, shapes: Shapes) -> str:
    """Why a plan is not for a batch of these shapes; empty where it is.

    More samples make more micro-batches, or are shorter, so that they hold no more in all; longer
    ones were not planned for.
    """
    planned = plan.made_for.batch
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
