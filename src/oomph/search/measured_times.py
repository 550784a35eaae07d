"""Measured block times in place of predicted ones, if there is a GPU to time them on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oomph.hardware.timing.step_time import ratio
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, Weights
from oomph.search.block_timer import BlockTimer, Times
from oomph.search.option_profiles import OptionProfiles
from oomph.search.survey import Survey

Setting = tuple[int | None, Weights]


def setting_of(choices: Choices) -> Setting:
    """What determines how long each block option takes."""
    return choices.micro_batch, choices.weights


@dataclass(kw_only=True)
class RealClock:
    """Measured times so far, by setting."""

    timer: BlockTimer | None
    _timed: dict[Setting, tuple[Times, OptionProfiles]] = field(default_factory=dict)
    """Measured times of blocks, and the predicted profiles they belong to."""

    def knows(self, choices: Choices) -> bool:
        """Whether the blocks of these choices were timed themselves."""
        return setting_of(choices) in self._timed

    def time(self, choices: Choices, predicted: OptionProfiles, found: Survey) -> None:
        """Time the block options that may win.

        `predicted` holds their predicted profiles with the optimizer stepping after backward: no
        block is timed with a step inside.
        """
        assert self.timer is not None
        # One block stands for its class, preferably not one at an end of the chain.
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
        self._timed[setting_of(choices)] = real, predicted

    def correct(self, predicted: OptionProfiles, whole: int) -> OptionProfiles:
        """Correct predicted profiles by the times measured for the same or the nearest part size.

        `whole` is the size of a batch in one part.
        """
        if not self._timed:
            return predicted
        size = predicted.choices.micro_batch or whole

        def distance(setting: Setting) -> tuple[bool, float]:
            return setting != setting_of(predicted.choices), abs(
                math.log((setting[0] or whole) / size)
            )

        nearest = min(self._timed, key=distance)
        real, timed = self._timed[nearest]
        if nearest == setting_of(predicted.choices):
            return predicted.timed(_beside_steps(real, predicted, timed))
        return predicted.timed(_share(real, predicted, timed))


def _beside_steps(real: Times, predicted: OptionProfiles, timed: OptionProfiles) -> Times:
    """Measured times, plus predicted time for optimizer steps inside backward.

    Predicted block times include those steps then, and measured ones do not.
    """
    if not predicted.choices.optimizer_in_backward:
        return real
    plain = _step_times(timed)
    return {
        key: real[key] + (step_time - plain[key])
        for key, step_time in _step_times(predicted).items()
        if key in real and key in plain
    }


def _share(real: Times, predicted: OptionProfiles, timed: OptionProfiles) -> Times:
    """Measured times, scaled by prediction to micro-batches of another size."""
    clock = _step_times(timed)
    return {
        key: real[key].scaled(ratio([(step_time, clock[key])]))
        for key, step_time in _step_times(predicted).items()
        if key in real and key in clock
    }


def _step_times(predicted: OptionProfiles) -> Times:
    return {
        (block.name, option.name): option.step_time
        for block in predicted.chain.blocks
        for option in block.options
    }
