"""The host's memory: who copies takes from who computes."""

from __future__ import annotations

import pytest

from oomph.rehearsal.host_memory import CORES_REACH, LEAST, SHARED, Cores, Lane

MEMORY = 100.0
ALONE = CORES_REACH * MEMORY


def test_copies_of_a_lane_come_one_after_the_other() -> None:
    lane = Lane(10.0)
    assert lane.carry(20, earliest=1.0) == 3.0
    assert lane.carry(10, earliest=0.0) == 4.0
    assert lane.carry(10, earliest=6.0) == 7.0
    assert lane.busy_until(0.5) == (False, 1.0)
    assert lane.busy_until(2.0) == (True, 4.0)
    assert lane.busy_until(4.0) == (False, 6.0)
    assert lane.busy_until(7.0) == (False, float("inf"))


def test_cores_by_themselves_reach_what_they_can() -> None:
    cores = Cores(MEMORY, [Lane(10.0)])
    work = cores.give(100, earliest=1.0)
    assert cores.end_of(work, now=0.0) == pytest.approx(1.0 + 100 / ALONE)


def test_works_come_one_after_the_other() -> None:
    cores = Cores(MEMORY, [])
    first, second, late = (cores.give(100, earliest) for earliest in (0.0, 0.0, 9.0))
    assert cores.end_of(second, now=0.0) == pytest.approx(200 / ALONE)
    assert cores.end_of(first, now=0.0) == pytest.approx(100 / ALONE)
    assert cores.end_of(late, now=0.0) == pytest.approx(9.0 + 100 / ALONE)


def test_copies_leave_the_cores_less_for_as_long_as_they_go() -> None:
    lanes = Lane(40.0), Lane(40.0)
    cores = Cores(MEMORY, lanes)
    work = cores.give(100, earliest=0.0)
    for lane in lanes:
        lane.carry(40, earliest=0.0)  # for a second
    beside = SHARED * MEMORY - 80
    assert cores.end_of(work, now=0.0) == pytest.approx(1.0 + (100 - beside) / ALONE)


def test_something_is_always_left_to_the_cores() -> None:
    lane = Lane(10 * MEMORY)
    cores = Cores(MEMORY, [lane])
    work = cores.give(10, earliest=0.0)
    lane.carry(1_000_000, earliest=0.0)
    assert cores.end_of(work, now=0.0) == pytest.approx(10 / (LEAST * MEMORY))


def test_what_is_done_is_not_changed_by_copies_that_are_begun_later() -> None:
    lane = Lane(90.0)
    cores = Cores(MEMORY, [lane])
    first, second = cores.give(100, earliest=0.0), cores.give(100, earliest=0.0)
    done = cores.end_of(first, now=3.0)
    lane.carry(900, earliest=3.0)
    assert cores.end_of(first, now=3.0) == done
    assert cores.end_of(second, now=3.0) > 200 / ALONE


def test_work_that_a_clock_is_too_coarse_for_ends() -> None:
    cores = Cores(memory=1e12, lanes=[])
    work = cores.give(100, earliest=1e9)
    assert cores.end_of(work, now=0.0) == 1e9
