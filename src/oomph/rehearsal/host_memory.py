"""The host's memory in a rehearsal: the link's copies and the work of the host's cores share it.

A direction of the link is a lane: its copies run one after the other, each at the lane's rate. The
cores get the memory bandwidth that the lanes leave, so copies begun in the meantime delay their
work: its end is computed when it is asked for, not in advance.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

#: The fraction of the memory rate a fused AdamW reaches alone that the cores reach within a step.
#: Beside H200s it was 0.44 and 0.51 with two shares of a model of 3 B parameters in bf16, and less
#: on another of these machines: a host may be shared with unknown load, so the value is set low.
CORES_REACH = 0.4
#: The fraction that cores and copies reach together: in clipped steps of the same model the cores
#: processed 36 GB/s while the link carried 94; a fused AdamW alone processes 134.
SHARED = 0.97
#: The least that is left to the cores, as a fraction of that rate.
LEAST = 0.1


@dataclass
class Lane:
    """One direction of the link: its rate in bytes per second, and when it is busy."""

    rate: float
    _begins: list[float] = field(default_factory=list)
    _ends: list[float] = field(default_factory=list)

    @property
    def free(self) -> float:
        """When all copies queued so far are done."""
        return self._ends[-1] if self._ends else 0.0

    def carry(self, nbytes: int, earliest: float) -> float:
        """Queue a copy of `nbytes`; returns the time at which it ends."""
        begin = max(earliest, self.free)
        end = begin + nbytes / self.rate
        if self._ends and begin == self._ends[-1]:
            self._ends[-1] = end  # extends the current busy interval
        else:
            self._begins.append(begin)
            self._ends.append(end)
        return end

    def busy_until(self, moment: float) -> tuple[bool, float]:
        """Whether the lane is busy at `moment`, and until when that stays so."""
        at = bisect.bisect_right(self._begins, moment) - 1
        if at >= 0 and moment < self._ends[at]:
            return True, self._ends[at]
        return False, self._begins[at + 1] if at + 1 < len(self._begins) else float("inf")


@dataclass(eq=False)
class CoreWork:
    """Bytes that the cores are to read and write, starting no earlier than `earliest`."""

    nbytes: float
    earliest: float


class Cores:
    """The host's cores: they do one piece of work after the other, beside the lanes."""

    def __init__(self, memory: float, lanes: Sequence[Lane]) -> None:
        """`memory` is the bandwidth that the cores reach alone, in bytes per second."""
        self._memory = memory
        self._lanes = lanes
        self._waiting: list[CoreWork] = []
        #: End times of finished work; they can no longer change.
        self._ended: dict[CoreWork, float] = {}
        self._free = 0.0

    def give(self, nbytes: int, earliest: float) -> CoreWork:
        """Queue a piece of work."""
        work = CoreWork(nbytes, earliest)
        self._waiting.append(work)
        return work

    def end_of(self, work: CoreWork, now: float) -> float:
        """When the work ends, if the lanes carry only the copies queued so far."""
        if work in self._ended:
            return self._ended[work]
        for one, end in self._ends():
            if end <= now:  # no copy that is begun later changes that
                self._ended[one] = self._free = end
            if one is work:
                break
        self._waiting = [one for one in self._waiting if one not in self._ended]
        return end

    def _ends(self) -> Iterator[tuple[CoreWork, float]]:
        free = self._free
        for work in list(self._waiting):
            free = self._done(work.nbytes, max(free, work.earliest))
            yield work, free

    def _done(self, left: float, moment: float) -> float:
        """When work on `left` bytes that begins at `moment` is done."""
        while left > 0:
            states = [lane.busy_until(moment) for lane in self._lanes]
            carried = sum(
                lane.rate for lane, (busy, _) in zip(self._lanes, states, strict=True) if busy
            )
            rate = min(CORES_REACH * self._memory, SHARED * self._memory - carried)
            rate = max(rate, LEAST * self._memory)
            until = min([moment + left / rate, *(change for _, change in states)])
            left -= (until - moment) * rate
            if left < 1 or until <= moment:  # less than a byte, or than a clock tick, is rounding
                return until
            moment = until
        return moment
