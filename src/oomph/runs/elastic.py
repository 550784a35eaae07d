"""Memory-elastic runs: how much memory a run may use now, and when to change its plan.

A run shrinks at once when there is less memory, and grows back when there has been more for a
while. Between steps it checks its own budget, the user's function or file, what other processes
leave of the GPU's memory, and whether the allocator has trouble.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from oomph.errors import BadInput
from oomph.files.reading import read_regular
from oomph.hardware import GPU
from oomph.plans.choices import KEEP, RECOMPUTE
from oomph.plans.plan import Plan
from oomph.rehearsal.hidden import device_overhead
from oomph.runs.fallback_plans import Fallback, FallbackPlans
from oomph.techniques.technique import techniques
from oomph.units import format_bytes, parse_bytes

log = logging.getLogger("oomph")

#: Consecutive steps with allocator retries (releasing cached memory) that count as trouble.
RETRIES_IN_A_ROW = 8
#: Running out of memory within this many patiences after growing delays the next growing more.
TOO_SOON = 4
#: Largest size of a file that says how much memory a run may use.
_MOST_SAID = 4096
#: How often the wait before growing is doubled at most.
MOST_DOUBLINGS = 6

Ask = Callable[[], str | int | None]


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a run follows the available memory."""

    ask: Ask | str | Path | None = None
    """A function called, or a file checked, before each step; it says how much memory the run may
    use now, as 12GiB. If it says None, or the file is missing, the budget applies."""
    patience: int = 16
    """Steps for which more memory must have been available before the run uses it."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise BadInput(f"patience is at least one step, not {self.patience}")


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of plan in a run."""

    step: int
    """Steps completed before it."""
    cause: str
    before: Plan
    after: Plan
    budget: int
    """Device memory that the run may use, as far as it knew."""

    def __str__(self) -> str:
        before, after = _in_words(self.before), _in_words(self.after)
        changes = [
            f"{name} {before[name]} → {after[name]}"
            for name in before
            if before[name] != after[name]
        ]
        return (
            f"after step {self.step}, {self.cause}: {'; '.join(changes) or 'the same'},"
            f" within {format_bytes(self.budget)}"
        )


def _in_words(plan: Plan) -> dict[str, str]:
    """The properties in which the plans of one run may differ."""
    choices, hows = plan.choices, plan.choices.blocks.values()
    switched = [one for one in techniques() if one.can_be_switched]
    return {
        "micro-batch": str(choices.micro_batch or "whole"),
        "blocks recomputed": str(len(choices.recomputed)),
        "of which in part": str(sum(how not in (KEEP, RECOMPUTE) for how in hows)),
        "rows of logits": str(choices.loss_chunk or "all"),
        "optimizer": "in backward" if choices.optimizer_in_backward else "after it",
        **{one.title: one.say(choices.settings(one)) for one in switched},
        "batches of": " and ".join("×".join(map(str, shape)) for shape in plan.made_for.batch),
    }


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The memory that a run may use now, and what limits it."""

    nbytes: int
    because: str


@dataclass(frozen=True, kw_only=True)
class Move:
    """The fallback plan to switch to, and why."""

    fallback: Fallback
    cause: str
    limit: Limit


class Elasticity:
    """Checks the memory before each step and decides when to change the plan."""

    def __init__(self, elastic: Elastic, device: torch.device, gpu: GPU | None) -> None:
        self.patience = elastic.patience
        self._device = device
        self._gpu = gpu
        ask = elastic.ask
        self._ask: Ask | None = _File(Path(ask)).read if isinstance(ask, (str, Path)) else ask
        #: Consecutive steps with room for a faster fallback plan.
        self._calm = 0
        #: Steps since the run last grew; None if it has not.
        self._grown: int | None = None
        self._doublings = 0
        self._retries = self._count_retries()
        self._retried = 0

    def next_move(self, fallbacks: FallbackPlans, present: Fallback, budget: int) -> Move | None:
        """The change to make before the next step, or None."""
        limit = self._limit(budget)
        self._watch_retries(present)
        if self._grown is not None:
            self._grown += 1
        if present.need > limit.nbytes:
            self._calm = 0
            lean = min(fallbacks.steps_down, key=lambda one: one.need)
            fallback = fallbacks.within(limit.nbytes) or lean
            return (
                Move(fallback=fallback, cause=limit.because, limit=limit)
                if fallback != present
                else None
            )
        if self._retried >= RETRIES_IN_A_ROW:
            self._retried = self._calm = 0
            below = fallbacks.below(present)
            cause = f"the allocator had to clean up in {RETRIES_IN_A_ROW} steps in a row"
            return Move(fallback=below, cause=cause, limit=limit) if below is not None else None
        return self._grow(fallbacks, present, limit)

    def ran_out(self) -> None:
        """Note that a step ran out of memory: soon after growing, the next growing waits longer."""
        soon = self._grown is not None and self._grown < TOO_SOON * self._wait
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS) if soon else 0
        self._calm = 0
        self._grown = None

    @property
    def _wait(self) -> int:
        return self.patience << self._doublings

    def _grow(self, fallbacks: FallbackPlans, present: Fallback, limit: Limit) -> Move | None:
        best = fallbacks.within(limit.nbytes)
        if best is None or best.plan.predicted.seconds >= present.plan.predicted.seconds:
            self._calm = 0
            return None
        self._calm += 1
        if self._calm <= self._wait:
            return None
        cause = f"there has been room for a faster plan for {self._calm} steps"
        self._calm = self._grown = 0
        return Move(fallback=best, cause=cause, limit=limit)

    def _limit(self, budget: int) -> Limit:
        limits = [Limit(nbytes=budget, because="the budget is smaller than the plan's need")]
        asked = self._ask() if self._ask is not None else None
        if asked is not None:
            limits.append(Limit(nbytes=parse_bytes(asked), because="less memory was asked for"))
        if self._device.type == "cuda":
            left = Limit(nbytes=self._left(), because="others took memory of the card")
            limits.append(left)
        return min(limits, key=lambda one: one.nbytes)

    def _left(self) -> int:
        """GPU memory not used by other processes, including this one's own part."""
        free, _ = torch.cuda.mem_get_info(self._device)
        own = torch.cuda.memory_reserved(self._device) + device_overhead(self._gpu).expected
        return free + own

    def _watch_retries(self, present: Fallback) -> None:
        """Count consecutive steps with more allocator retries than the plan's check predicted."""
        before, self._retries = self._retries, self._count_retries()
        more = self._retries - before > present.retries
        self._retried = self._retried + 1 if more else 0

    def _count_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(counts.get("num_alloc_retries", 0))


class _File:
    """A file that may hold a budget; it is read again whenever it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._said: int | None = None

    def read(self) -> int | None:
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_size
            if seen != self._seen:
                text = read_regular(self._path, most=_MOST_SAID).decode("utf-8", "replace")
                self._said, self._seen = self._parse(text), seen
        except (OSError, ValueError):  # it is missing, being replaced, or not a file
            self._seen = self._said = None
        return self._said

    def _parse(self, text: str) -> int | None:
        """Parse the text; invalid text changes nothing, as it may be half written."""
        if not text.strip():
            return None
        try:
            return parse_bytes(text.strip())
        except BadInput as error:
            log.warning("%s is not followed: %s", self._path, error)
            return self._said
