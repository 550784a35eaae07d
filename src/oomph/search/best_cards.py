"""Which card is best? One job, planned for every card of the catalogue, by speed or by cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any, Literal

from oomph.errors import BadInput
from oomph.hardware import GPU, known_gpus
from oomph.hardware.prices import Prices, example_prices
from oomph.jobs.job import Job
from oomph.plans.fidelity import Fidelity
from oomph.plans.migrations import SCHEMA_VERSION
from oomph.plans.plan import Plan
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.timeline import END_OF_STEP, Category
from oomph.rendering import Printed
from oomph.search.attempt import NoPlan, try_plan
from oomph.search.checker import Say
from oomph.units import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class CardPlan:
    """One card, the plan for it, and its price."""

    gpu: GPU
    plan: Plan | None
    why_not: str = ""
    """Why there is no plan."""
    dollars_per_hour: float | None = None

    @property
    def verdict(self) -> Literal["fits", "does_not_fit"]:
        """Whether there is a plan."""
        return "fits" if self.plan is not None else "does_not_fit"

    @property
    def items_per_second(self) -> float:
        """Tokens a second where the batch holds tokens, else samples; 0 without a plan."""
        if self.plan is None:
            return 0.0
        predicted = self.plan.predicted
        return (predicted.tokens or predicted.samples) / predicted.seconds

    @property
    def dollars_per_million(self) -> float | None:
        """What a million tokens, or samples, cost."""
        if self.dollars_per_hour is None or not self.items_per_second:
            return None
        return self.dollars_per_hour / 3600 / self.items_per_second * 1e6

    def as_dict(self) -> dict[str, Any]:
        """The card as plain JSON; what belongs to a plan is null where there is none."""
        plan = self.plan.as_dict() if self.plan is not None else {}
        return {
            "name": self.gpu.name,
            "verdict": self.verdict,
            "why_not": self.why_not,
            "memory": self.gpu.memory,
            "dollars_per_hour": self.dollars_per_hour,
            "items_per_second": self.items_per_second or None,
            "dollars_per_million": self.dollars_per_million,
            "predicted": plan.get("predicted"),
            "choices": plan.get("choices"),
        }


@dataclass(frozen=True, kw_only=True)
class BestCards(Printed):
    """A job's plans for many cards, the best first."""

    job: str
    cards: tuple[CardPlan, ...]
    """By cost where prices were given, else by speed; those without a plan come last."""
    by_cost: bool
    prices_from: str
    left_out: tuple[str, ...]
    """Cards that CUDA's rules say nothing about."""
    seconds: float

    @property
    def fitting(self) -> tuple[CardPlan, ...]:
        """The cards with a plan."""
        return tuple(card for card in self.cards if card.plan is not None)

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """What the rates and costs count."""
        plans = [card.plan for card in self.cards if card.plan is not None]
        return "tokens" if plans and plans[0].predicted.tokens else "samples"

    @property
    def fastest(self) -> CardPlan | None:
        """The card with the fastest plan."""
        return max(self.fitting, key=lambda card: card.items_per_second, default=None)

    @property
    def cheapest(self) -> CardPlan | None:
        """The card with the least cost for the work; None where none has a price."""
        priced = [card for card in self.fitting if card.dollars_per_million is not None]
        return min(priced, key=_cost, default=None)

    @property
    def verdict(self) -> Literal["fits", "does_not_fit"]:
        """Whether there is a plan for any card."""
        return "fits" if self.fitting else "does_not_fit"

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain JSON; these keys stay."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "verdict": self.verdict,
            "ranked_by": "cost" if self.by_cost else "speed",
            "unit": self.unit,
            "fastest": self.fastest.gpu.name if self.fastest is not None else None,
            "cheapest": self.cheapest.gpu.name if self.cheapest is not None else None,
            "prices_from": self.prices_from,
            "cards": [card.as_dict() for card in self.cards],
            "left_out": list(self.left_out),
            "seconds": self.seconds,
        }


def best_cards(
    job: Job,
    *,
    budget: str | int | None = None,
    allow: str | Fidelity = Fidelity.ROUNDING,
    compile_blocks: bool = True,
    host: str | int | None = None,
    prices: Prices | None = None,
    say: Say = lambda _: None,
) -> BestCards:
    """Plan the job for every NVIDIA card of the catalogue.

    With `prices` only their cards are planned for, and the cheapest comes first. With a `budget`
    plans use no more than that on any card, nor more than the card has; `host` is as for `plan`.
    Cards that surely cannot hold the job are not planned for.
    """
    began = time.perf_counter()
    limit = parse_bytes(budget) if budget is not None else math.inf
    costs = prices or example_prices()
    chosen = costs.dollars_per_hour if prices is not None else known_gpus()
    known = [gpu for name, gpu in known_gpus().items() if name in chosen]
    cuda = [gpu for gpu in known if gpu.compute_capability is not None]
    if not cuda:
        raise BadInput(f"{costs.source} names no NVIDIA card, and CUDA's rules are no other's")
    if job.optimizer is None:
        raise BadInput("a plan is for training: give the job an optimizer")
    least = _held_throughout(job, allow)
    numbers = itertools.count(1)
    cards: list[CardPlan] = []
    # Of cards that follow the same rules, the largest first: where there is no plan for one, there
    # is none for those after it.
    cuda.sort(key=lambda gpu: (gpu.compute_capability or (0, 0), gpu.memory), reverse=True)
    for _, alike in itertools.groupby(cuda, key=lambda gpu: gpu.compute_capability):
        too_little = least - 1
        for gpu in alike:
            usable = int(min(limit, gpu.memory))
            card, too_little = _plan_for(
                job,
                gpu,
                usable,
                too_little,
                allow=allow,
                compile_blocks=compile_blocks,
                host=host,
                say=_numbered(say, gpu, next(numbers), len(cuda)),
            )
            price = costs.dollars_per_hour.get(gpu.name)
            cards.append(dataclasses.replace(card, dollars_per_hour=price))
    by_cost = prices is not None
    return BestCards(
        job=job.name,
        cards=tuple(sorted(cards, key=lambda card: _rank(card, by_cost=by_cost))),
        by_cost=by_cost,
        prices_from=costs.source,
        left_out=tuple(gpu.name for gpu in known if gpu.compute_capability is None),
        seconds=time.perf_counter() - began,
    )


def _plan_for(
    job: Job,
    gpu: GPU,
    usable: int,
    too_little: int,
    *,
    allow: str | Fidelity,
    compile_blocks: bool,
    host: str | int | None,
    say: Say,
) -> tuple[CardPlan, int]:
    """The card's plan, and the most memory that is known to be too little on a card like it."""
    if job.precision in ("bf16", "bf16-mixed") and not gpu.has_bf16:
        return CardPlan(gpu=gpu, plan=None, why_not="no bf16"), too_little
    if usable <= too_little:
        why = f"needs more than {format_bytes(too_little)}"
        return CardPlan(gpu=gpu, plan=None, why_not=why), too_little
    found = try_plan(
        job, budget=usable, gpu=gpu, allow=allow, compile_blocks=compile_blocks, host=host, say=say
    )
    if isinstance(found, NoPlan):
        why = f"needs {format_bytes(found.smallest_budget)}"
        if found.host_missing:
            why = f"needs {format_bytes(found.host_missing)} more host memory"
        return CardPlan(gpu=gpu, plan=None, why_not=why), usable
    # Dozens of cards: their timelines together would take more memory than they are worth.
    return CardPlan(gpu=gpu, plan=dataclasses.replace(found, checked=None)), too_little


def _held_throughout(job: Job, allow: str | Fidelity) -> int:
    """Bytes that no plan does without: the weights and, as far as it must stay, their state."""
    timeline = rehearse(job, None, ("build", "step"), skip_first_step=True)
    between_steps = [mark.event for mark in timeline.marks if mark.name == END_OF_STEP][-1] - 1
    totals = dict.fromkeys(Category, 0)
    for block in timeline.alive_at(between_steps):
        totals[block.category] += block.size
    state = totals[Category.OPTIMIZER]
    if allow == Fidelity.LOSSY:
        state //= 4  # a byte in place of four
    return totals[Category.PARAMETER] + state


def _numbered(say: Say, gpu: GPU, number: int, total: int) -> Say:
    return lambda words: say(f"{gpu.name} ({number} of {total} cards): {words}")


def _rank(card: CardPlan, *, by_cost: bool) -> tuple[bool, float, int]:
    best = _cost(card) if by_cost else -card.items_per_second
    return card.plan is None, best, -card.gpu.memory


def _cost(card: CardPlan) -> float:
    return card.dollars_per_million if card.dollars_per_million is not None else math.inf
