"""Real seconds of blocks in the place of the clock's, where a card is there to time them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oomph.planning.audition import Audition
from oomph.planning.block_timer import BlockTimer, Times
from oomph.planning.choices import KEEP, RECOMPUTE, Choices, Weights
from oomph.planning.pace import ratio
from oomph.planning.survey import Survey

Setting = tuple[int | None, Weights]


def setting_of(choices: Choices) -> Setting:
    """Choices whose blocks take the same seconds, option by option."""
    return choices.micro_batch, choices.weights


@dataclass(kw_only=True)
class RealClock:
    """What was timed so far, by the setting that it is of."""

    timer: BlockTimer | None
    _timed: dict[Setting, tuple[Times, Audition]] = field(default_factory=dict)
    """Real seconds of blocks, and what was told of the way to run them that they are of."""

    def knows(self, choices: Choices) -> bool:
        """Whether the blocks of these were timed themselves."""
        return setting_of(choices) in self._timed

    def time(self, choices: Choices, told: Audition, found: Survey) -> None:
        """Time the ways to run blocks that may win.

        `told` is what the clock says of them, with the step after backward: no block is timed with
        a step inside.
        """
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
        self._timed[setting_of(choices)] = real, told

    def correct(self, told: Audition, whole: int) -> Audition:
        """What was told, by the real seconds of its own size of parts, or of the nearest.

        `whole` is the size of a batch in one part.
        """
        if not self._timed:
            return told
        size = told.choices.micro_batch or whole

        def distance(setting: Setting) -> tuple[bool, float]:
            return setting != setting_of(told.choices), abs(math.log((setting[0] or whole) / size))

        nearest = min(self._timed, key=distance)
        real, timed = self._timed[nearest]
        if nearest == setting_of(told.choices):
            return told.timed(_beside_steps(real, told, timed))
        return told.timed(_share(real, told, timed))


def _beside_steps(real: Times, told: Audition, timed: Audition) -> Times:
    """Real seconds, with those of the clock for optimizer steps inside backward where it has any.

    What is told of a block holds them then, and what was timed does not.
    """
    if not told.choices.optimizer_in_backward:
        return real
    plain = _paces(timed)
    return {
        key: real[key] + (pace - plain[key])
        for key, pace in _paces(told).items()
        if key in real and key in plain
    }


def _share(real: Times, told: Audition, timed: Audition) -> Times:
    """Real seconds, for an audition of micro-batches of another size by the clock's proportion."""
    clock = _paces(timed)
    return {
        key: real[key].scaled(ratio([(pace, clock[key])]))
        for key, pace in _paces(told).items()
        if key in real and key in clock
    }


def _paces(told: Audition) -> Times:
    return {
        (block.name, option.name): option.pace
        for block in told.chain.blocks
        for option in block.options
    }
