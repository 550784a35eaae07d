"""What each change of a plan is worth, rehearsed in both processes.

Prices are begun with before the plan itself is checked: as a rule it passes, and whoever is idle
meanwhile could as well have them ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from oomph.errors import CannotRehearse
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import MASTERS, Choices
from oomph.search.changes import Price, price
from oomph.search.process_questions import PRICE, Question, question
from oomph.search.second_process import SecondProcess

#: A check beside a rehearsal of the step alone: it has all phases, and the replays.
A_CHECK = 2.5


@dataclass(kw_only=True)
class Pricing:
    """Prices choices here and in the second process, about as long in each."""

    job: Job
    gpu: GPU | None
    clock: Clock
    second: SecondProcess
    _beside: list[Question] = field(default_factory=list)
    """What the second process was asked."""

    def begin_beside_a_check(self, checked: Choices, wanted: Sequence[Choices]) -> None:
        """Have some of these priced while `checked` is, whatever else was asked for by now."""
        self._share(wanted, A_CHECK * _cost(checked))

    def price_all(self, wanted: Sequence[Choices]) -> list[Price]:
        """The price of each."""
        if not self._beside:
            self._share(wanted, 0)
        asked, self._beside = self._beside, []
        prices = [None if question(PRICE, one) in asked else self._price(one) for one in wanted]
        return [
            self._told(one) if price is None else price
            for one, price in zip(wanted, prices, strict=True)
        ]

    def _told(self, choices: Choices) -> Price:
        answer = self.second.answer(question(PRICE, choices))
        return (answer[0], answer[1]) if answer is not None else self._price(choices)

    def _share(self, wanted: Sequence[Choices], here: float) -> None:
        """Ask for half of the work; so much of it is done here in any case."""
        self._beside, beside = [], 0
        for one in sorted(wanted, key=_cost, reverse=True):
            if here <= beside:
                here += _cost(one)
            else:
                beside += _cost(one)
                self._beside.append(question(PRICE, one))
        self.second.ask(self._beside, instead=True)

    def _price(self, choices: Choices) -> Price:
        """Its price; where blocks cannot be compiled with what is left, that of eager ones."""
        try:
            return price(self.job, self.gpu, self.clock, choices)
        except CannotRehearse:
            if not choices.compiled:
                raise
        eager = dataclasses.replace(choices, compiled=False, compiled_others=())
        return price(self.job, self.gpu, self.clock, eager)


def _cost(choices: Choices) -> int:
    """How long a rehearsal of a step takes beside others, about."""
    one_by_one = 2 if choices.compiled else 6
    copies = 2 if choices.optimizer_on == "host" else 0
    # Plans of any size have masters, as a rule; blocks with other weights are traced anew.
    traced = 2 if choices.weights != MASTERS else 0
    return one_by_one + copies + traced
