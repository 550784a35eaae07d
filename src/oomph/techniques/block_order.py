"""Learns in which order streamed blocks run, and guesses which come next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from oomph.techniques.weight_blocks import Unit


class Phase(Enum):
    """The kind of pass that a block runs in."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Moment:
    """A block in a phase; the same moment is expected to be followed by the same next one."""

    unit: Unit
    phase: Phase


class BlockOrder:
    """Which block follows which: as seen before, or else as the blocks are given."""

    def __init__(self, units: Sequence[Unit], most: int) -> None:
        self._units = units
        self._most = most
        self._follows: dict[Moment, Moment] = {}
        #: The block that ran last, or runs now.
        self.now: Moment | None = None

    def go_on(self, moment: Moment) -> None:
        """A block is about to run."""
        if self.now is not None:
            self._follows[self.now] = moment
        self.now = moment

    def forget(self) -> None:
        """Begin anew."""
        self._follows.clear()
        self.now = None

    def expected(self, moment: Moment) -> list[Unit]:
        """A block and those that will run next, as many as there is room for."""
        wanted = [moment.unit]
        following: Moment | None = moment
        # At the end of forward the same blocks come again in reverse: look a little further.
        for _ in range(2 * self._most):
            following = following and (self._follows.get(following) or self._default(following))
            if following is None or len(wanted) == self._most:
                break
            if following.unit not in wanted:
                wanted.append(following.unit)
        return wanted

    def _default(self, moment: Moment) -> Moment | None:
        """The guess for what follows an unseen moment: the next block in the given order."""
        at = self._units.index(moment.unit) + (-1 if moment.phase is Phase.BACKWARD else 1)
        if moment.phase is Phase.EVALUATION:
            at %= len(self._units)
        return Moment(self._units[at], moment.phase) if 0 <= at < len(self._units) else None

    def on_disk_after(self, unit: Unit, phase: Phase) -> list[str]:
        """The disk blocks that will run after this one, each once, as far as is known."""
        following: Moment | None = Moment(unit, phase)
        seen: dict[Moment, None] = {}
        while following is not None and following not in seen:
            seen[following] = None
            following = self._follows.get(following) or self._default(following)
        # Where forward turns into backward, the first ones are here already.
        expected = itertools.dropwhile(_is_resident, (moment.unit for moment in seen))
        paths = dict.fromkeys(one.path for one in expected if one.disk_bytes)
        return [path for path in paths if path != unit.path]


def _is_resident(unit: Unit) -> bool:
    return unit.memory is not None
