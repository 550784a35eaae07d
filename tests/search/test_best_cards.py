"""Plans for many cards: ranked by speed or cost, without those that surely cannot hold the job."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import oomph
from oomph.hardware import GPU, known_gpus
from oomph.hardware.prices import Prices
from oomph.plans.plan import Plan
from oomph.search import best_cards as module
from oomph.search.attempt import Attempt, NoPlan
from oomph.search.best_cards import best_cards
from oomph.search.planner import plan as make_plan
from oomph.units import GIB

TOKENS = torch.ones(2, 8, dtype=torch.int64)


def job(width: int = 8, **options: object) -> oomph.Job:
    return oomph.Job(
        lambda: nn.Sequential(nn.Embedding(16, width), nn.Linear(width, 16)),
        lambda model, tokens: model(tokens).sum(),
        "adamw",
        TOKENS,
        name="tokens",
        **options,
    )


class Planner:
    """In place of planning: needs `need`, and is as fast as the card's memory."""

    def __init__(self, need: int) -> None:
        self.plan: Plan = make_plan(job(), budget="64MiB")
        self.need = need
        self.asked: list[str] = []

    def __call__(self, job: oomph.Job, *, gpu: GPU, budget: int, **_: object) -> Attempt:
        self.asked.append(gpu.name)
        if budget < self.need:
            return NoPlan(
                job=job.name,
                gpu=gpu.name,
                budget=budget,
                smallest_budget=self.need,
                reason="no",
                seconds=0.0,
            )
        seconds = 1e12 / gpu.memory_bandwidth
        predicted = dataclasses.replace(self.plan.predicted, seconds=seconds)
        return dataclasses.replace(self.plan, budget=budget, predicted=predicted)


@pytest.fixture
def planner(monkeypatch) -> Planner:
    planner = Planner(need=40 * GIB)
    monkeypatch.setattr(module, "try_plan", planner)
    return planner


def test_every_card_is_ranked_by_speed(planner) -> None:
    best = best_cards(job())
    names = {card.gpu.name for card in best.cards}
    assert names | set(best.left_out) == known_gpus().keys()
    assert {card.gpu.memory >= 40 * GIB for card in best.fitting} == {True}
    rates = [card.items_per_second for card in best.fitting]
    assert rates == sorted(rates, reverse=True)
    assert best.fastest is best.cards[0]
    assert best.unit == "tokens"
    assert best.cards[-1].plan is None


def test_cards_that_cannot_hold_it_after_a_larger_one_could_not_are_not_planned_for(
    planner,
) -> None:
    best = best_cards(job())
    fitting = {card.gpu.name for card in best.fitting}
    capabilities = {gpu.compute_capability for gpu in known_gpus().values()} - {None}
    assert len(planner.asked) <= len(fitting) + len(capabilities)
    assert fitting <= set(planner.asked)
    t4 = next(card for card in best.cards if card.gpu.name == "t4")
    assert t4.why_not.startswith("needs ")


def test_cards_smaller_than_weights_and_state_are_not_planned_for(planner) -> None:
    wide = job(width=2**27)  # 16 GiB of weights, 32 GiB of state
    best = best_cards(wide)
    assert all(known_gpus()[name].memory > 48 * GIB for name in planner.asked)
    a40 = next(card for card in best.cards if card.gpu.name == "a40")
    assert a40.why_not == "needs more than 48.00 GiB"
    best_cards(wide, allow="lossy")
    assert "a40" in planner.asked


def test_with_prices_their_cards_are_ranked_by_cost(planner) -> None:
    prices = Prices(source="mine", dollars_per_hour={"h200": 36.0, "l40s": 0.36, "t4": 0.01})
    best = best_cards(job(), prices=prices)
    assert [card.gpu.name for card in best.cards] == ["l40s", "h200", "t4"]
    assert best.cheapest.gpu.name == "l40s"
    assert best.fastest.gpu.name == "h200"
    bandwidth = known_gpus()["h200"].memory_bandwidth
    # 16 tokens take 1e12 / bandwidth seconds, and a second costs a cent.
    assert best.cards[1].dollars_per_million == pytest.approx(0.01 * 1e18 / bandwidth / 16)
    assert str(best).startswith("fits: tokens on 2 of 3 cards; the cheapest is l40s, $")


def test_without_prices_the_examples_are_shown_with_their_date(planner) -> None:
    best = best_cards(job())
    assert best.as_dict()["ranked_by"] == "speed"
    assert "prices are examples of 20" in str(best)
    unpriced = [card for card in best.fitting if card.dollars_per_hour is None]
    assert unpriced
    assert unpriced[0].dollars_per_million is None


def test_a_budget_holds_on_every_card(planner) -> None:
    best = best_cards(job(), budget="39GiB")
    assert best.verdict == "does_not_fit"
    assert best.fastest is best.cheapest is None
    assert str(best).startswith("does not fit: tokens on none of ")
    assert best.as_dict()["cards"][0]["predicted"] is None


def test_bf16_is_not_planned_before_ampere(planner) -> None:
    planner.need = GIB
    best = best_cards(job(precision="bf16-mixed"))
    without = {card.gpu.name for card in best.cards if card.why_not == "no bf16"}
    assert {"t4", "v100-32gb"} <= without
    assert "a30" not in without


def test_the_json_has_the_keys_that_stay(planner) -> None:
    answer = best_cards(job()).as_dict()
    assert answer.keys() == {
        *("schema_version", "job", "verdict", "ranked_by", "unit", "fastest", "cheapest"),
        *("prices_from", "cards", "left_out", "seconds"),
    }
    assert answer["cards"][0].keys() == {
        *("name", "verdict", "why_not", "memory", "dollars_per_hour", "items_per_second"),
        *("dollars_per_million", "predicted", "choices"),
    }


def test_prices_of_no_nvidia_card_are_refused() -> None:
    with pytest.raises(oomph.BadInput, match="names no NVIDIA card"):
        best_cards(job(), prices=Prices(source="mine", dollars_per_hour={"mi300x": 2.0}))


def test_progress_counts_the_cards() -> None:
    said: list[str] = []
    prices = Prices(source="mine", dollars_per_hour={"h200": 3.0, "t4": 1.0})
    best_cards(job(), prices=prices, compile_blocks=False, say=said.append)
    assert said[0].startswith("h200 (1 of 2 cards): ")
    assert said[-1].startswith("t4 (2 of 2 cards): ")
