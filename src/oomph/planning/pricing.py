"""What each change of a plan is worth, rehearsed in both processes.

Prices are begun with before the plan itself is checked: as a rule it passes, and whoever is idle
meanwhile could as well have them ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from oomph.gpus import GPU
from oomph.job import Job
from oomph.planning.changes import Price, price
from oomph.planning.choices import Choices
from oomph.planning.questions import PRICE, question
from oomph.planning.second_process import SecondProcess
from oomph.timing.clock import Clock

#: A check beside a rehearsal of the step alone: it has all phases, and the replays.
A_CHECK = 2


@dataclass(kw_only=True)
class Pricing:
    """Prices choices here and in the second process, about as long in each."""

    job: Job
    gpu: GPU | None
    clock: Clock
    second: SecondProcess
    _beside: list[Choices] = field(default_factory=list)
    """Those that the second process was asked for."""

    def begin_beside_a_check(self, checked: Choices, wanted: Sequence[Choices]) -> None:
        """Have some of these priced while `checked` is, whatever else was asked for by now."""
        self._share(list(map(_plain, wanted)), A_CHECK * _effort(checked))

    def price_all(self, wanted: Sequence[Choices]) -> list[Price]:
        """The price of each."""
        wanted = list(map(_plain, wanted))
        if not self._beside:
            self._share(wanted, 0)
        prices = {str(one): self._price(one) for one in wanted if one not in self._beside}
        for one in self._beside:
            told = self.second.answer(question(PRICE, one))
            prices[str(one)] = (told[0], told[1]) if told is not None else self._price(one)
        self._beside = []
        return [prices[str(one)] for one in wanted]

    def _share(self, wanted: Sequence[Choices], here: int) -> None:
        """Ask for half of the work; so much of it is done here in any case."""
        self._beside, beside = [], 0
        for one in sorted(wanted, key=_effort, reverse=True):
            if here < beside:
                here += _effort(one)
            else:
                beside += _effort(one)
                self._beside.append(one)
        self.second.ask([question(PRICE, one) for one in self._beside], now=True)

    def _price(self, choices: Choices) -> Price:
        return price(self.job, self.gpu, self.clock, choices)


def _plain(choices: Choices) -> Choices:
    """How the allocator caches is no tensor's business, and the check may still change it."""
    return dataclasses.replace(choices, allocator="")


def _effort(choices: Choices) -> int:
    """How long a rehearsal of a step takes beside others, about: most of it are ops one by one."""
    return (1 if choices.compiled else 3) + (3 if choices.optimizer_on == "host" else 0)
