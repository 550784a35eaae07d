"""Real seconds of blocks in the place of the clock's, where a card is there to time them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oomph.planning.audition import Audition
from oomph.planning.block_timer import BlockTimer, Times
from oomph.planning.choices import KEEP, RECOMPUTE, Choices, Weights
from oomph.planning.survey import Survey

Pace = tuple[int | None, Weights]


def pace_of(choices: Choices) -> Pace:
    """Choices whose blocks take the same seconds, option by option."""
    return choices.micro_batch, choices.weights


@dataclass(kw_only=True)
class RealClock:
    """What was timed so far, by the pace that it is of."""

    timer: BlockTimer | None
    _timed: dict[Pace, tuple[Times, Audition]] = field(default_factory=dict)
    """Real seconds of blocks, and what was told of the way to run them that they are of."""

    def knows(self, choices: Choices) -> bool:
        """Whether the blocks of these were timed themselves."""
        return pace_of(choices) in self._timed

    def time(self, choices: Choices, told: Audition, found: Survey) -> None:
        """Time the ways to run blocks that may win; `told` is what the clock says of them."""
        assert self.timer is not None
        # One block stands for its class, not one at an end of the chain where there is another.
        inner_first = [*found.blocks[1:-1], *found.blocks]
        stands_for = {block.kind: block.path for block in reversed(inner_first)}
        kinds = {block.path: block.kind for block in found.blocks}
        menus: dict[str, list[str]] = {path: [KEEP, RECOMPUTE] for path in stands_for.values()}
        for path, how in choices.blocks.items():
            menus[stands_for[kinds[path]]].append(how)
        times = self.timer.time(choices, menus)
        real = {
            (path, how): seconds
            for path, kind in kinds.items()
            for (timed, how), seconds in times.items()
            if timed == stands_for[kind]
        }
        self._timed[pace_of(choices)] = real, told

    def correct(self, told: Audition, whole: int) -> Audition:
        """What was told, by the real seconds of its own size of parts, or of the nearest.

        `whole` is the size of a batch in one part.
        """
        if not self._timed:
            return told
        size = told.choices.micro_batch or whole

        def distance(pace: Pace) -> tuple[bool, float]:
            return pace != pace_of(told.choices), abs(math.log((pace[0] or whole) / size))

        nearest = min(self._timed, key=distance)
        real, timed = self._timed[nearest]
        is_own = nearest == pace_of(told.choices)
        return told.timed(real if is_own else _share(real, told, timed))


def _share(real: Times, heard: Audition, best: Audition) -> Times:
    """Real seconds, for an audition of micro-batches of another size by the clock's proportion."""
    clock = {
        (block.name, option.name): option.seconds
        for block in best.chain.blocks
        for option in block.options
    }
    return {
        (block.name, option.name): real[key] * option.seconds / clock[key]
        for block in heard.chain.blocks
        for option in block.options
        if (key := (block.name, option.name)) in real and clock.get(key)
    }
