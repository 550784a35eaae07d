"""Processes that share a card, with no card."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import OUT_OF_HOST_MEMORY, Seat, SharedCard, Task


def run(tasks: list[Task], **options: Any) -> None:
    settings = {"at_once": 4, "patience": 30.0, "deadline": time.monotonic() + 30, "room": 10}
    SharedCard(**{**settings, **options}).run(tasks)


def task(work: Any, *, needs: int = 1, profiles: list[Any] | None = None) -> Task:
    answer: list[Any] = [] if profiles is None else profiles
    return Task(needs=needs, work=work, hear=answer.append, end=answer.append)


def test_what_a_process_tells_is_heard_in_order_and_then_its_end() -> None:
    profiles: list[Any] = []

    def work(seat: Seat) -> None:
        seat.tell(1)
        seat.tell({"two": 2})

    run([task(work, profiles=profiles)])
    assert profiles == [1, {"two": 2}, {}]


def test_nobody_else_gets_on_while_one_is_alone(tmp_path: Path) -> None:
    count = tmp_path / "count"

    def busy(seat: Seat) -> None:
        for number in range(300):
            count.write_text(str(number))
            time.sleep(0.01)

    profiles: list[Any] = []

    def timed(seat: Seat) -> None:
        while not count.exists():
            time.sleep(0.01)
        with seat.alone():
            time.sleep(0.2)  # a stop is not there at once
            before = count.read_text()
            time.sleep(0.5)
            seat.tell(count.read_text() == before)
        time.sleep(0.3)
        seat.tell(count.read_text() == before)

    run([task(busy), task(timed, profiles=profiles)])
    assert profiles == [True, False, {}]


def test_the_last_that_was_started_is_ended_before_the_host_is_out_of_memory() -> None:
    profiles: list[Any] = []
    run([task(lambda seat: time.sleep(30), profiles=profiles)], host_reserve=1 << 60)
    assert profiles == [{"status": OUT_OF_HOST_MEMORY}]


def test_two_that_want_to_be_alone_are_so_one_after_the_other() -> None:
    spans: list[Any] = []

    def work(seat: Seat) -> None:
        with seat.alone():
            began = time.monotonic()
            time.sleep(0.2)
            seat.tell((began, time.monotonic()))

    run([task(work, profiles=spans), task(work, profiles=spans)])
    first, second = sorted(span for span in spans if span)
    assert first[1] <= second[0]


def test_who_dies_alone_lets_the_others_go_on() -> None:
    profiles: list[Any] = []

    def dies(seat: Seat) -> None:
        with seat.alone():
            os._exit(7)

    def works(seat: Seat) -> None:
        time.sleep(0.5)
        seat.tell("done")

    run([task(works, profiles=profiles), task(dies, profiles=profiles)])
    assert profiles[1:] == ["done", {}]
    assert profiles[0]["status"] == "failed"
    assert "7" in profiles[0]["error"]


def test_no_more_run_at_once_than_there_is_room_for() -> None:
    spans: list[Any] = []

    def work(seat: Seat) -> None:
        began = time.monotonic()
        time.sleep(0.3)
        seat.tell((began, time.monotonic()))

    run([task(work, needs=6, profiles=spans), task(work, needs=6, profiles=spans)])
    first, second = sorted(span for span in spans if span)
    assert first[1] <= second[0]


def test_a_task_may_bring_another() -> None:
    profiles: list[Any] = []
    tasks: list[Task] = []
    again = task(lambda seat: seat.tell("second"), profiles=profiles)
    tasks.append(
        Task(
            needs=1,
            work=lambda seat: seat.tell("first"),
            hear=lambda answer: tasks.append(again),
            end=profiles.append,
        )
    )
    run(tasks)
    assert "second" in profiles


def test_who_is_too_slow_is_ended_and_the_time_limit_ends_all() -> None:
    profiles: list[Any] = []
    run([task(lambda seat: time.sleep(60), profiles=profiles)], patience=0.3)
    assert profiles == [{"status": "timed out"}]
    run([task(lambda seat: time.sleep(60), profiles=profiles)], deadline=time.monotonic() + 0.3)
    assert profiles == [{"status": "timed out"}]
