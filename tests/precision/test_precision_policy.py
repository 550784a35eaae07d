"""Layers go down where it looks safe, up where it is not, and do not flap; every decision depends
on what was measured alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from oomph.errors import BadInput, WrongCheckpoint
from oomph.precision.policy import Measure, Move, Places, Policy, Thresholds

LAYERS = [f"layers.{at}" for at in range(8)]
LIMITS = Thresholds(demote_below=0.1, promote_above=0.3, patience=2, wait=4)


def policy(start: int = 0, lowest: int = 1, thresholds: Thresholds = LIMITS) -> Policy:
    return Policy(thresholds, dict.fromkeys(LAYERS, lowest), dict.fromkeys(LAYERS, start))


def harm_of(**harms: float) -> Measure:
    """Each lowered layer adds its harm for each level; names are numbers of layers."""
    own = {f"layers.{name[1:]}": harm for name, harm in harms.items()}

    def measure(places: Places) -> float:
        return sum(place * own.get(path, 0.001) for path, place in places.items())

    return measure


def probe(one: Policy, measure: Measure, times: int) -> list[Move]:
    return [move for _ in range(times) for move in one.probe(measure)]


def test_one_goes_down_first_and_only_after_it_looked_safe_often_enough() -> None:
    one = policy()
    assert probe(one, harm_of(), 1) == []
    (move,) = probe(one, harm_of(), 1)
    assert (move.layer, move.before, move.after) == ("layers.0", 0, 1)


def test_groups_double_while_all_goes_well() -> None:
    one = policy()
    moved = [len(one.probe(harm_of())) for _ in range(8)]
    assert moved == [0, 1, 0, 2, 0, 4, 0, 1]
    assert set(one.places.values()) == {1}


def test_one_sensitive_layer_stays_while_the_others_go_down() -> None:
    one = policy()
    probe(one, harm_of(l5=0.2), 30)
    assert one.places == {path: int(path != "layers.5") for path in LAYERS}


def test_a_doubt_in_between_starts_the_patience_anew() -> None:
    one = policy()
    answers = [0.0, 0.01, 0.0, 0.2]  # now, as tried; now, as tried
    assert probe(one, lambda places: answers.pop(0), 2) == []
    assert not answers
    assert probe(one, harm_of(), 1) == []


def test_between_the_thresholds_nothing_moves_and_nothing_is_tried() -> None:
    one, measured = policy(start=1, lowest=2), []

    def measure(places: Places) -> float:
        measured.append(places)
        return 0.2

    assert probe(one, measure, 5) == []
    assert len(measured) == 5


@pytest.mark.parametrize("culprit", LAYERS)
def test_the_layer_that_makes_a_model_diverge_goes_up_and_no_other(culprit: str) -> None:
    one, measured = policy(start=1), []

    def measure(places: Places) -> float:
        measured.append(places)
        return 0.5 if places[culprit] else 0.01

    (move,) = one.probe(measure)
    assert (move.layer, move.before, move.after) == (culprit, 1, 0)
    assert "0.5 > 0.3" in move.why
    assert len(measured) == 1 + 2 * 3  # eight layers are halved three times


def test_where_no_layer_is_the_cause_by_itself_all_go_up() -> None:
    one = policy(start=1)
    moves = one.probe(lambda places: 0.06 * sum(places.values()))
    assert [move.layer for move in moves] == LAYERS


def test_a_layer_goes_up_level_by_level_until_all_is_calm() -> None:
    one, measure = policy(start=3, lowest=3), harm_of(l2=0.2)
    restless = []
    for _ in range(3):
        one.probe(measure)
        restless.append(one.restless)
    assert restless == [True, True, False]
    assert one.places["layers.2"] == 1


def test_what_went_up_is_not_tried_again_at_once_and_later_ever_more_rarely() -> None:
    one, tried = policy(start=1), []

    def measure(places: Places) -> float:
        tried.append(places["layers.3"])
        return 0.5 if places["layers.3"] else 0.01

    one.probe(measure)
    gaps, last = [], 0
    for at in range(1, 200):
        tried.clear()
        one.probe(measure)
        if any(tried):
            gaps.append(at - last)
            last = at
    assert gaps[:4] == [4, 8, 16, 32]


def noisy(seed: int) -> Callable[[Places], float]:
    """A divergence around both thresholds, whatever is done."""
    numbers = random.Random(seed)
    return lambda places: numbers.uniform(0.0, 0.4)


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_the_thresholds_does_not_make_layers_flap(seed: int) -> None:
    thresholds = Thresholds(demote_below=0.1, promote_above=0.3, patience=1, wait=4)
    one = policy(thresholds=thresholds)
    measure = noisy(seed)
    early, late = len(probe(one, measure, 300)), len(probe(one, measure, 300))
    # Four probes of ten would move something, if nobody waited.
    assert late < 30
    assert late <= early


def test_a_step_that_was_not_finite_raises_what_made_it_so() -> None:
    one = policy(start=1)
    moves = one.recover(lambda places: not places["layers.6"], "the loss is nan")
    assert [(move.layer, move.why) for move in moves] == [("layers.6", "the loss is nan")]


def test_where_nothing_can_be_found_all_that_is_lowered_goes_up() -> None:
    one = policy(start=1)
    assert len(one.recover(lambda places: True, "the loss is nan")) == len(LAYERS)
    assert one.recover(lambda places: True, "the loss is nan") == []


def test_saved_and_loaded_it_decides_as_before() -> None:
    one = policy()
    measure = noisy(3)
    probe(one, measure, 40)
    other = policy()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict()
    assert probe(one, noisy(4), 60) == probe(other, noisy(4), 60)


def test_the_state_of_other_layers_is_refused() -> None:
    one = Policy(LIMITS, {"a": 1}, {"a": 0})
    with pytest.raises(WrongCheckpoint, match=r"other layers.* a"):
        one.load_state_dict(Policy(LIMITS, {"b": 1}, {"b": 0}).state_dict())
    assert one.places == {"a": 0}


@pytest.mark.parametrize(
    ("below", "above"), [(0.3, 0.1), (0.1, 0.1), (0.0, 0.1), (0.1, float("inf"))]
)
def test_thresholds_that_contradict_each_other_are_refused(below: float, above: float) -> None:
    with pytest.raises(BadInput, match="demote_below"):
        Thresholds(demote_below=below, promote_above=above, patience=1, wait=1)


@pytest.mark.parametrize("name", ["patience", "wait"])
def test_no_patience_at_all_is_refused(name: str) -> None:
    settings = {"patience": 1, "wait": 1, name: 0}
    with pytest.raises(BadInput, match=name):
        Thresholds(demote_below=0.1, promote_above=0.2, **settings)
