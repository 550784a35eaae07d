"""Who waits where and who steps: raised for as long as that makes a step faster."""

from __future__ import annotations

import dataclasses
import math

import pytest

from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.search.changes import _differences, say_place
from oomph.search.refining import PARTS, SHARES, SHARES_BETWEEN, Tried, refine

GRADIENTS = 800
DEFERRED = Choices(optimizer_on="host", gradient_room=0)
INSIDE = Choices(optimizer_on="host")


class Machine:
    """A step is fastest with these shares and rooms; more room than there is does not fit."""

    def __init__(self, *, share: float = 0.0, room: int = 0, most: int = GRADIENTS) -> None:
        self.share, self.room, self.most = share, room, most
        self.tried: list[Choices] = []

    def __call__(self, choices: Choices) -> Tried | None:
        self.tried.append(choices)
        room = choices.gradient_room or 0
        if room > self.most:
            return None
        return Tried(choices=choices, seconds=self.seconds(choices.host_share, room))

    def seconds(self, share: float, room: int) -> float:
        return 10 + 2 * abs(share - self.share) + 2 * abs(room - self.room) / GRADIENTS

    def refine(self, choices: Choices, *, host_steps: bool = True) -> Choices:
        start = Tried(choices=choices, seconds=self.seconds(0.0, 0))
        return refine(start, self, gradients=GRADIENTS, first=1.0, host_steps=host_steps).choices


@pytest.mark.parametrize("tenths", range(10))
def test_the_host_gets_the_share_that_is_fastest(tenths: int) -> None:
    share = tenths / 10
    machine = Machine(share=share)
    assert machine.refine(INSIDE).host_share == share
    assert len(machine.tried) <= len(SHARES_BETWEEN) + 1 + math.ceil(share / SHARES[0])


def test_a_host_that_was_never_measured_steps_nothing() -> None:
    machine = Machine(share=0.3)
    assert machine.refine(INSIDE, host_steps=False) == INSIDE
    assert not machine.tried


@pytest.mark.parametrize(
    ("cleans", "seems", "share"), [(True, 10.4, 0.4), (True, 11, 0), (False, 10.05, 0)]
)
def test_a_first_share_that_has_the_allocator_clean_up_is_not_the_last_tried(
    cleans: bool, seems: float, share: float
) -> None:
    def attempt(choices: Choices) -> Tried:
        seconds = {0.0: 10.0, 0.2: seems, 0.4: 9.0}.get(choices.host_share, 10.0)
        return Tried(choices=choices, seconds=seconds, cleans=cleans and choices.host_share == 0.2)

    start = Tried(choices=INSIDE, seconds=10.0)
    found = refine(start, attempt, gradients=GRADIENTS, first=1.0, host_steps=True)
    assert found.choices.host_share == share


def test_the_last_weights_that_stayed_leave_again_where_the_host_could_step_then() -> None:
    away = tuple(f"layer {at}" for at in range(8))

    def attempt(choices: Choices) -> Tried | None:
        staying = 8 - len(choices.weights_away)
        if staying + 5 * choices.host_share > 4:
            return None
        return Tried(choices=choices, seconds=10 - staying / 10 - 3 * choices.host_share)

    start = Tried(choices=dataclasses.replace(INSIDE, weights_away=away), seconds=10.0)
    found = refine(start, attempt, gradients=GRADIENTS, first=1.0, host_steps=True).choices
    assert (found.weights_away, found.host_share) == (away[3:], 0.2)


@pytest.mark.parametrize("part", [0.0, *PARTS])
def test_as_many_gradients_wait_as_make_it_fastest(part: float) -> None:
    room = int(part * GRADIENTS)
    assert Machine(room=room).refine(DEFERRED).gradient_room == room


def test_gradients_wait_where_there_is_room_for_them() -> None:
    machine = Machine(room=GRADIENTS, most=260)
    assert machine.refine(DEFERRED).gradient_room == 250, "a step of 100, and half of one"


def test_gradients_that_are_used_at_once_wait_for_nobody() -> None:
    machine = Machine(room=GRADIENTS)
    assert machine.refine(INSIDE, host_steps=False).gradient_room is None
    assert not machine.tried


def test_weights_stay_where_there_is_room_those_that_come_first_first() -> None:
    paths = tuple(f"blocks.{at}" for at in range(12))
    all_away = dataclasses.replace(INSIDE, weights_away=paths)

    def attempt(choices: Choices) -> Tried | None:
        away = len(choices.weights_away)
        return None if away < 7 else Tried(choices=choices, seconds=1 + away / 10)

    start = Tried(choices=all_away, seconds=2.2)
    found = refine(start, attempt, gradients=GRADIENTS, first=1.0, host_steps=False)
    assert found.choices.weights_away == paths[5:]


@pytest.mark.parametrize("fastest", [1, 2, 5, 8])
def test_as_much_state_comes_early_as_makes_it_fastest(fastest: int) -> None:
    ahead = DEFERRED.state_ahead

    def attempt(choices: Choices) -> Tried:
        off = abs(max(choices.state_early / ahead, 1) - fastest)
        return Tried(choices=choices, seconds=10 + off)

    start = Tried(choices=DEFERRED, seconds=attempt(DEFERRED).seconds)
    found = refine(start, attempt, gradients=GRADIENTS, first=1.0, host_steps=False)
    assert found.choices.state_early == (fastest * ahead if fastest > 1 else 0)


def test_what_the_host_steps_leaves_room_for_more_that_comes_early() -> None:
    def attempt(choices: Choices) -> Tried | None:
        has_room = choices.host_share >= 0.2 or not choices.state_early
        seconds = 10 - 5 * min(choices.host_share, 0.2) - choices.state_early / 10
        return Tried(choices=choices, seconds=seconds) if has_room else None

    start = Tried(choices=DEFERRED, seconds=10.0)
    found = refine(start, attempt, gradients=GRADIENTS, first=1.0, host_steps=True)
    assert (found.choices.host_share, found.choices.state_early) == (0.2, 8 * DEFERRED.state_ahead)


@pytest.mark.parametrize("fastest", [4096, 2048, 1024])
def test_the_loss_has_as_few_rows_at_a_time_as_make_it_fastest(fastest: int) -> None:
    def attempt(choices: Choices) -> Tried:
        assert choices.loss_chunk
        seconds = 10 + abs(choices.loss_chunk - fastest) / 1024
        return Tried(choices=choices, seconds=seconds, cleans=True)

    start = dataclasses.replace(INSIDE, head="lm_head", loss_chunk=4096)
    best = refine(attempt(start), attempt, gradients=GRADIENTS, first=1.0, host_steps=False)
    assert best.choices.loss_chunk == fastest


def test_a_loss_for_which_there_is_room_stays_as_it_is() -> None:
    start = Tried(choices=dataclasses.replace(INSIDE, head="lm_head", loss_chunk=4096), seconds=1.0)
    machine = Machine()
    refine(start, machine, gradients=GRADIENTS, first=1.0, host_steps=False)
    assert not machine.tried


def test_steps_inside_backward_need_nothing_early() -> None:
    machine = Machine()
    assert machine.refine(INSIDE, host_steps=False).state_early == 0
    assert not machine.tried


def test_what_was_changed_to_make_room_stays() -> None:
    """Each step goes on from what fitted, not from where it began."""

    def attempt(choices: Choices) -> Tried | None:
        leaner = dataclasses.replace(choices, blocks={"blocks.0": "recompute"})
        return Tried(choices=leaner, seconds=1 - choices.host_share)

    start = Tried(choices=INSIDE, seconds=1.0)
    found = refine(start, attempt, gradients=GRADIENTS, first=1.0, host_steps=True)
    assert found.choices == dataclasses.replace(
        INSIDE, host_share=0.9, blocks={"blocks.0": "recompute"}
    )


def test_the_report_says_who_steps_and_who_waits() -> None:
    refined = dataclasses.replace(DEFERRED, host_share=0.3, gradient_room=1 << 30)
    assert say_place(refined) == (
        "state on the host, 30% stepped there, gradients too beyond 1.00 GiB"
    )
    assert say_place(DEFERRED) == "state on the host, gradients too"


def test_what_the_host_steps_is_rounded_otherwise() -> None:
    def fidelity(choices: Choices) -> Fidelity:
        return next(d.fidelity for d in _differences(choices) if d.technique == "optimizer")

    assert fidelity(dataclasses.replace(DEFERRED, host_share=0.3)) is Fidelity.ROUNDING
    assert fidelity(DEFERRED) is Fidelity.EXACT


@pytest.mark.parametrize("room", [0.0, 0.211, 0.273, 0.375, 0.5, 0.875])
def test_as_much_state_stays_as_has_room(room: float) -> None:
    """The first tensor has a little more than 21 % of all."""

    def attempt(choices: Choices) -> Tried | None:
        if choices.gpu_share > room:
            return None
        return Tried(choices=choices, seconds=2 - choices.gpu_share)

    start = Tried(choices=INSIDE, seconds=2.0)
    found = refine(start, attempt, gradients=1, first=0.21005, host_steps=False)
    assert found.choices.gpu_share == room


@pytest.mark.parametrize("fastest", [0.0, 0.273, 0.375, 0.5])
def test_no_more_state_stays_than_makes_it_faster(fastest: float) -> None:
    def attempt(choices: Choices) -> Tried:
        return Tried(choices=choices, seconds=1 + 5 * abs(choices.gpu_share - fastest))

    found = refine(attempt(INSIDE), attempt, gradients=1, first=0.21005, host_steps=False)
    assert found.choices.gpu_share == fastest


def test_the_host_steps_no_more_than_what_leaves() -> None:
    def attempt(choices: Choices) -> Tried:
        return Tried(choices=choices, seconds=5 - choices.gpu_share - choices.host_share)

    found = refine(attempt(INSIDE), attempt, gradients=1, first=0.4375, host_steps=True)
    assert found.choices.gpu_share == 0.875
    assert found.choices.host_share == 0.1


def test_what_is_foreseen_is_what_is_tried_where_nothing_is_worth_it() -> None:
    machine, foreseen = Machine(), list[list[Choices]]()
    refine(
        Tried(choices=DEFERRED, seconds=machine.seconds(0.0, 0)),
        machine,
        gradients=GRADIENTS,
        first=1.0,
        host_steps=True,
        foresee=lambda choices: foreseen.append(list(choices)),
    )
    assert machine.tried == foreseen[0]


def test_where_the_allocator_cleans_up_a_smaller_loss_is_foreseen_to_help() -> None:
    start = Choices(optimizer_on="host", head="head", loss_chunk=64)
    tried, foreseen = list[Choices](), list[list[Choices]]()

    def attempt(choices: Choices) -> Tried:
        tried.append(choices)
        cleans = choices.loss_chunk == 64
        return Tried(choices=choices, seconds=12.0 if cleans else 10.0, cleans=cleans)

    refine(
        Tried(choices=start, seconds=12.0, cleans=True),
        attempt,
        gradients=GRADIENTS,
        first=1.0,
        host_steps=True,
        foresee=lambda choices: foreseen.append(list(choices)),
    )
    assert tried == foreseen[0]
    assert [choices.loss_chunk for choices in tried] == [32, 32, 32]


def test_after_a_move_that_was_worth_it_others_are_foreseen() -> None:
    machine, foreseen = Machine(share=0.2), list[list[Choices]]()
    refine(
        Tried(choices=INSIDE, seconds=machine.seconds(0.0, 0)),
        machine,
        gradients=GRADIENTS,
        first=1.0,
        host_steps=True,
        foresee=lambda choices: foreseen.append(list(choices)),
    )
    assert machine.tried == [choices[0] for choices in foreseen]
