"""Memory-elastic: how much memory a run may use now, and what it did about it.

A run shrinks at once when there is less memory, and grows back when there has been more for a
while. It looks between steps: at its own budget, at what the user's function or file says, at what
other processes leave of the card, and at whether the allocator has trouble.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from oomph.errors import BadInput
from oomph.gpus import GPU
from oomph.planning.choices import KEEP, RECOMPUTE
from oomph.planning.plan import Plan
from oomph.rehearsal.hidden import device_overhead
from oomph.running.ladder import Ladder, Rung
from oomph.units import format_bytes, parse_bytes

log = logging.getLogger("oomph")

#: Steps in a row in which the allocator gives cached memory back before that counts as trouble.
RETRIES_IN_A_ROW = 8
#: Running out again this soon after growing, in patiences, makes the next growing wait longer.
TOO_SOON = 4
#: How often that wait is doubled at most.
MOST_DOUBLINGS = 6

Ask = Callable[[], str | int | None]


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a run follows the memory there is."""

    ask: Ask | str | Path | None = None
    """A function that is called before each step, or a file that is looked at: the memory that the
    run may use now, as 12GiB. None, or no such file, leaves it to the budget."""
    patience: int = 16
    """Steps for which more memory must have been there before the run uses it."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise BadInput(f"patience is at least one step, not {self.patience}")


@dataclass(frozen=True, kw_only=True)
class Event:
    """A run went from one plan to another."""

    step: int
    """Steps that were done before."""
    cause: str
    before: Plan
    after: Plan
    budget: int
    """What the run may use of the device, as far as it knew."""

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
    """What plans of one run differ in."""
    choices, hows = plan.choices, plan.choices.blocks.values()
    return {
        "micro-batch": str(choices.micro_batch or "whole"),
        "blocks recomputed": str(len(choices.recomputed)),
        "of which in part": str(sum(how not in (KEEP, RECOMPUTE) for how in hows)),
        "rows of logits": str(choices.loss_chunk or "all"),
        "optimizer": "in backward" if choices.optimizer_in_backward else "after it",
        "allocator": choices.allocator or "as it is",
        "batches of": " and ".join("×".join(map(str, shape)) for shape in plan.made_for.batch),
    }


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The memory that a run may use now, and who says so."""

    nbytes: int
    because: str


@dataclass(frozen=True, kw_only=True)
class Move:
    """The rung to step onto, and why."""

    rung: Rung
    cause: str
    limit: Limit


class Elasticity:
    """Looks at the memory before each step, and says when to change the plan."""

    def __init__(self, elastic: Elastic, device: torch.device, gpu: GPU | None) -> None:
        self.patience = elastic.patience
        self._device = device
        self._gpu = gpu
        ask = elastic.ask
        self._ask: Ask | None = _File(Path(ask)).read if isinstance(ask, (str, Path)) else ask
        #: Steps for which there has been room for a faster rung.
        self._calm = 0
        #: Steps since the run grew; it has not yet.
        self._grown: int | None = None
        self._doublings = 0
        self._retries = self._count_retries()
        self._retried = 0

    def next_move(self, ladder: Ladder, present: Rung, budget: int) -> Move | None:
        """What to do before the next step; None is to go on."""
        limit = self._limit(budget)
        self._watch_retries(present)
        if self._grown is not None:
            self._grown += 1
        if present.need > limit.nbytes:
            self._calm = 0
            lean = min(ladder.rungs, key=lambda one: one.need)
            rung = ladder.within(limit.nbytes) or lean
            return Move(rung=rung, cause=limit.because, limit=limit) if rung != present else None
        if self._retried >= RETRIES_IN_A_ROW:
            self._retried = self._calm = 0
            below = ladder.below(present)
            cause = f"the allocator had to clean up in {RETRIES_IN_A_ROW} steps in a row"
            return Move(rung=below, cause=cause, limit=limit) if below is not None else None
        return self._grow(ladder, present, limit)

    def ran_out(self) -> None:
        """A step ran out of memory: where the run has just grown, it waits longer the next time."""
        soon = self._grown is not None and self._grown < TOO_SOON * self._wait
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS) if soon else 0
        self._calm = 0
        self._grown = None

    @property
    def _wait(self) -> int:
        return self.patience << self._doublings

    def _grow(self, ladder: Ladder, present: Rung, limit: Limit) -> Move | None:
        best = ladder.within(limit.nbytes)
        if best is None or best.plan.predicted.seconds >= present.plan.predicted.seconds:
            self._calm = 0
            return None
        self._calm += 1
        if self._calm <= self._wait:
            return None
        cause = f"there has been room for a faster plan for {self._calm} steps"
        self._calm = self._grown = 0
        return Move(rung=best, cause=cause, limit=limit)

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
        """What other processes leave of the card, this one's own part included."""
        free, _ = torch.cuda.mem_get_info(self._device)
        own = torch.cuda.memory_reserved(self._device) + device_overhead(self._gpu).expected
        return free + own

    def _watch_retries(self, present: Rung) -> None:
        """Steps in a row that had more retries than the plan's check showed."""
        before, self._retries = self._retries, self._count_retries()
        more = self._retries - before > present.retries
        self._retried = self._retried + 1 if more else 0

    def _count_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(counts.get("num_alloc_retries", 0))


class _File:
    """A file that may hold a budget; it is read when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._said: int | None = None

    def read(self) -> int | None:
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_size
            if seen != self._seen:
                self._said = self._parse(self._path.read_text(encoding="utf-8"))
                self._seen = seen
        except OSError:  # it is not there, or is being replaced
            self._seen = self._said = None
        return self._said

    def _parse(self, text: str) -> int | None:
        """A file that makes no sense changes nothing: whoever writes it may not be done."""
        if not text.strip():
            return None
        try:
            return parse_bytes(text.strip())
        except BadInput as error:
            log.warning("%s is not followed: %s", self._path, error)
            return self._said
