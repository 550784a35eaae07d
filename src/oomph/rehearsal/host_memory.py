"""The host's memory in a rehearsal: copies of the link and work of the host's cores share it.

A direction of the link is a lane: its copies come one after the other, each at the lane's rate. The
cores read and write what memory the lanes leave to them at the time, so when their work is done is
known only with the copies that were begun meanwhile: it is asked for, not foretold.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

#: The part of what memory gives to a fused AdamW by itself that the cores reach in a step. Beside
#: H200s it was 0.44 and 0.51 with two shares of a model of 3 B parameters in bf16, and less on
#: another of these machines: who shares a host is not known, so a low one is counted on.
CORES_REACH = 0.4
#: The part of it that cores and copies reach together: in clipped steps of the same model the cores
#: went through 36 GB/s while the link carried 94, and by itself a fused AdamW goes through 134.
SHARED = 0.97
#: What is left to the cores at least, as a part of it.
LEAST = 0.1


@dataclass
class Lane:
    """Copies of one direction: bytes per second, and when there were, or will be, any."""

    rate: float
    _begins: list[float] = field(default_factory=list)
    _ends: list[float] = field(default_factory=list)

    @property
    def free(self) -> float:
        """When all that it was given is done."""
        return self._ends[-1] if self._ends else 0.0

    def carry(self, nbytes: int, earliest: float) -> float:
        """Give it bytes; when they are there."""
        begin = max(earliest, self.free)
        end = begin + nbytes / self.rate
        if self._ends and begin == self._ends[-1]:
            self._ends[-1] = end  # a stretch goes on
        else:
            self._begins.append(begin)
            self._ends.append(end)
        return end

    def busy_until(self, moment: float) -> tuple[bool, float]:
        """Whether it carries anything at a moment, and until when that stays so."""
        at = bisect.bisect_right(self._begins, moment) - 1
        if at >= 0 and moment < self._ends[at]:
            return True, self._ends[at]
        return False, self._begins[at + 1] if at + 1 < len(self._begins) else float("inf")


@dataclass(eq=False)
class CoreWork:
    """Bytes that the cores are to read and write, not before a moment."""

    nbytes: float
    earliest: float


class Cores:
    """The host's cores: they do one work after the other, beside the lanes."""

    def __init__(self, memory: float, lanes: Sequence[Lane]) -> None:
        """`memory` is what they reach by themselves, in bytes per second."""
        self._memory = memory
        self._lanes = lanes
        self._waiting: list[CoreWork] = []
        #: When the works that are done with for good were done.
        self._ended: dict[CoreWork, float] = {}
        self._free = 0.0

    def give(self, nbytes: int, earliest: float) -> CoreWork:
        """Queue a work."""
        work = CoreWork(nbytes, earliest)
        self._waiting.append(work)
        return work

    def end_of(self, work: CoreWork, now: float) -> float:
        """When it is done, if the lanes carry nothing but what they were given so far."""
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
        """When so many bytes are done that are begun at a moment."""
        while left > 0:
            states = [lane.busy_until(moment) for lane in self._lanes]
            carried = sum(
                lane.rate for lane, (busy, _) in zip(self._lanes, states, strict=True) if busy
            )
            rate = min(CORES_REACH * self._memory, SHARED * self._memory - carried)
            rate = max(rate, LEAST * self._memory)
            until = min([moment + left / rate, *(change for _, change in states)])
            left -= (until - moment) * rate
            if left < 1:  # less than a byte is rounding
                return until
            moment = until
        return moment
