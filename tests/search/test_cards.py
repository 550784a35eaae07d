"""One job on every card: what a plain estimate would say of each, from few rehearsals."""

from __future__ import annotations

import dataclasses

import pytest

import oomph
from oomph.rehearsal.phases import rehearse
from oomph.search import cards

PHASES = ("build", "first step")
SMALL = oomph.job_from_name("gpt2", batch=16, seq=512)


@pytest.fixture(scope="module")
def survey() -> oomph.CardSurvey:
    return oomph.survey_cards(SMALL, phases=PHASES)


@pytest.mark.parametrize("name", ["t4", "rtx-3060", "h200"])
def test_a_plain_estimate_agrees_and_needs_no_more(survey, name) -> None:
    (card,) = (card for card in survey.cards if card.gpu.name == name)
    plain = oomph.estimate(SMALL, name, phases=PHASES)
    assert card.verdict == plain.verdict
    assert plain.peak.device <= card.estimate.peak.device <= 1.02 * plain.peak.device


def test_some_cards_hold_it_and_the_smallest_comes_first(survey) -> None:
    assert 0 < len(survey.fitting) < len(survey.cards)
    memory = [card.gpu.memory for card in survey.cards]
    assert memory == sorted(memory)
    assert survey.verdict == "fits"


def test_every_card_is_judged_or_left_out(survey) -> None:
    judged = {card.gpu.name for card in survey.cards}
    assert judged | set(survey.left_out) == oomph.known_gpus().keys()
    assert "mi300x" in survey.left_out
    assert "left out, because CUDA's rules are not theirs: " in str(survey)


def test_the_first_line_is_the_answer(survey) -> None:
    first, *rest = str(survey).splitlines()
    tables = rest[rest.index("") :]
    smallest = survey.fitting[0].gpu.name
    count, total = len(survey.fitting), len(survey.cards)
    assert first.startswith(f"fits: on {count} of {total} cards; the smallest is {smallest}: gpt2 ")
    assert max(map(len, tables)) <= 80


def test_the_json_has_the_keys_that_stay(survey) -> None:
    answer = survey.as_dict()
    assert answer.keys() >= {"schema_version", "job", "verdict", "cards", "left_out", "seconds"}
    for card in answer["cards"]:
        assert card.keys() == {"name", "verdict", "memory", "peak", "interval"}
        assert card["interval"]["device"]["low"] <= card["peak"]["device"]


def test_bf16_is_not_judged_before_ampere_and_a_capability_is_rehearsed_once(monkeypatch) -> None:
    rehearsed = []

    def counted(job: oomph.Job, gpu: oomph.GPU, phases: tuple[str, ...]) -> oomph.Timeline:
        rehearsed.append(gpu)
        return rehearse(job, gpu, phases)

    monkeypatch.setattr(cards, "rehearse", counted)
    job = dataclasses.replace(SMALL, precision="bf16-mixed")
    survey = oomph.survey_cards(job, phases=("build", "eval"))
    verdicts = {card.gpu.name: card.verdict for card in survey.cards}
    assert verdicts["t4"] == verdicts["v100-32gb"] == "no_bf16"
    assert verdicts["a30"] == "fits"
    assert "no bf16" in next(line for line in str(survey).splitlines() if " t4 " in line)
    capabilities = [gpu.compute_capability for gpu in rehearsed]
    assert len(capabilities) == len(set(capabilities)) == survey.rehearsals
    assert min(capabilities) == (8, 0)
    t4 = next(card for card in survey.as_dict()["cards"] if card["name"] == "t4")
    assert t4["peak"] is t4["interval"] is None


def test_a_budget_holds_on_every_card() -> None:
    survey = oomph.survey_cards(SMALL, budget="300MiB", phases=("build",))
    assert survey.fitting == ()
    assert survey.verdict == "does_not_fit"
    assert str(survey).startswith("does not fit: on none of ")
    assert "The smallest budget it would run in: " in str(survey)
