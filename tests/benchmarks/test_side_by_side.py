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


def task(work: Any, *, needs: int = 1, heard: list[Any] | None = None) -> Task:
    told: list[Any] = [] if heard is None else heard
    return Task(needs=needs, work=work, hear=told.append, end=told.append)


def test_what_a_process_tells_is_heard_in_order_and_then_its_end() -> None:
    heard: list[Any] = []

    def work(seat: Seat) -> None:
        seat.tell(1)
        seat.tell({"two": 2})

    run([task(work, heard=heard)])
    assert heard == [1, {"two": 2}, {}]


def test_nobody_else_gets_on_while_one_is_alone(tmp_path: Path) -> None:
    count = tmp_path / "count"

    def busy(seat: Seat) -> None:
        for number in range(300):
            count.write_text(str(number))
            time.sleep(0.01)

    heard: list[Any] = []

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

    run([task(busy), task(timed, heard=heard)])
    assert heard == [True, False, {}]


def test_the_last_that_was_started_is_ended_before_the_host_is_out_of_memory() -> None:
    heard: list[Any] = []
    run([task(lambda seat: time.sleep(30), heard=heard)], host_reserve=1 << 60)
    assert heard == [{"status": OUT_OF_HOST_MEMORY}]


def test_two_that_want_to_be_alone_are_so_one_after_the_other() -> None:
    spans: list[Any] = []

    def work(seat: Seat) -> None:
        with seat.alone():
            began = time.monotonic()
            time.sleep(0.2)
            seat.tell((began, time.monotonic()))

    run([task(work, heard=spans), task(work, heard=spans)])
    first, second = sorted(span for span in spans if span)
    assert first[1] <= second[0]


def test_who_dies_alone_lets_the_others_go_on() -> None:
    heard: list[Any] = []

    def dies(seat: Seat) -> None:
        with seat.alone():
            os._exit(7)

    def works(seat: Seat) -> None:
        time.sleep(0.5)
        seat.tell("done")

    run([task(works, heard=heard), task(dies, heard=heard)])
    assert heard[1:] == ["done", {}]
    assert heard[0]["status"] == "failed"
    assert "7" in heard[0]["error"]


def test_no_more_run_at_once_than_there_is_room_for() -> None:
    spans: list[Any] = []

    def work(seat: Seat) -> None:
        began = time.monotonic()
        time.sleep(0.3)
        seat.tell((began, time.monotonic()))

    run([task(work, needs=6, heard=spans), task(work, needs=6, heard=spans)])
    first, second = sorted(span for span in spans if span)
    assert first[1] <= second[0]


def test_a_task_may_bring_another() -> None:
    heard: list[Any] = []
    tasks: list[Task] = []
    again = task(lambda seat: seat.tell("second"), heard=heard)
    tasks.append(
        Task(
            needs=1,
            work=lambda seat: seat.tell("first"),
            hear=lambda told: tasks.append(again),
            end=heard.append,
        )
    )
    run(tasks)
    assert "second" in heard


def test_who_is_too_slow_is_ended_and_the_time_limit_ends_all() -> None:
    heard: list[Any] = []
    run([task(lambda seat: time.sleep(60), heard=heard)], patience=0.3)
    assert heard == [{"status": "timed out"}]
    run([task(lambda seat: time.sleep(60), heard=heard)], deadline=time.monotonic() + 0.3)
    assert heard == [{"status": "timed out"}]
