"""A second process answers beside this one, and what it does not answer stays to be done here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oomph.search import second_process
from oomph.search.second_process import SecondProcess, may_fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to fork with")

Begin = Callable[[Callable[[Any], Any]], SecondProcess]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    monkeypatch.setattr(second_process, "may_fork", lambda: True)
    begun: list[SecondProcess] = []

    def begin(work: Callable[[Any], Any]) -> SecondProcess:
        begun.append(SecondProcess(work))
        return begun[-1]

    yield begin
    for second in begun:
        second.close()


def test_it_answers_what_it_was_asked_in_another_process(begin: Begin) -> None:
    second = begin(lambda question: [question, os.getpid()])
    second.ask([["twice", 1], ["twice", 2]])
    assert second.answer(["twice", 2])[0] == ["twice", 2]
    question, process = second.answer(["twice", 1])
    assert question == ["twice", 1]
    assert process != os.getpid()


def test_numbers_come_as_they_are(begin: Begin) -> None:
    second = begin(lambda number: number / 3)
    second.ask([0.1])
    assert second.answer(0.1) == 0.1 / 3


def test_what_is_answered_already_is_not_worked_out_again(begin: Begin) -> None:
    second = begin(lambda question: [question, time.monotonic()])
    second.ask(["one"])
    first = second.answer("one")
    second.ask(["one", "two"])
    assert second.answer("two")[0] == "two"
    assert second.answer("one") == first


def test_nobody_answers_what_was_not_asked(begin: Begin) -> None:
    second = begin(lambda question: question)
    assert second.answer("anything") is None
    second.ask(["one"])
    assert second.answer("another") is None


def test_while_it_is_busy_it_takes_no_questions(begin: Begin) -> None:
    second = begin(lambda seconds: (time.sleep(seconds), seconds)[1])
    second.ask([0.2])
    second.ask([0.1])
    assert second.answer(0.1) is None
    assert second.answer(0.2) == 0.2
    second.ask([0.1])
    assert second.answer(0.1) == 0.1


def test_one_that_stands_still_is_not_waited_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_process, "PATIENCE", 0.1)
    second = begin(lambda seconds: (time.sleep(seconds), seconds)[1])
    second.ask([0.0])
    assert second.answer(0.0) == 0.0
    second.ask([3600])
    assert second.answer(3600) is None
    second.ask([0.5])
    assert second.answer(0.5) is None, "what stood still once would do so again"


def test_one_that_computes_is_waited_for(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_process, "PATIENCE", 0.5)
    second = begin(_compute_for)
    second.ask([1.2])
    assert second.answer(1.2) == 1.2


def _compute_for(seconds: float) -> float:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


def test_asked_instead_it_gives_up_what_is_none_of_it(begin: Begin) -> None:
    second = begin(lambda seconds: (time.sleep(seconds), seconds)[1])
    second.ask([0.0])
    assert second.answer(0.0) == 0.0
    second.ask([3600, 0.1])
    second.ask([0.1], instead=True)
    assert second.answer(0.1) == 0.1
    assert second.answer(3600) is None
    second.ask([0.2])
    busy = second._child
    second.ask([0.3, 0.2], instead=True)
    assert second._child is busy, "it is busy with one of them"
    assert second.answer(0.2) == 0.2
    assert second.answer(0.0) == 0.0, "what was answered before is not forgotten"


def test_it_comes_to_one_question_after_the_other(begin: Begin) -> None:
    second = begin(time.sleep)
    second.ask([3600, 3601])
    assert second.comes_to_later(3601)
    assert not second.comes_to_later(3600)
    assert not second.comes_to_later("what it was not asked")


def test_an_answer_that_has_come_makes_the_next_question_the_one_it_is_busy_with(
    begin: Begin,
) -> None:
    second = begin(lambda seconds: [time.sleep(seconds)])
    second.ask([0, 3600, 3601])
    until = time.monotonic() + 60
    while second.comes_to_later(3600):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert second.comes_to_later(3601)


def test_answers_larger_than_a_pipe_come_whole(begin: Begin) -> None:
    second = begin(lambda size: "x" * size)
    second.ask([300_000, 200_000])
    assert second.answer(200_000) == "x" * 200_000
    assert second.answer(300_000) == "x" * 300_000


def fail(question: Any) -> Any:
    raise ValueError("this cannot be")


@pytest.mark.parametrize("work", [fail, lambda _: os._exit(3)], ids=["it fails", "it ends"])
def test_after_a_failure_it_is_not_asked_again(begin: Begin, work: Callable[[Any], Any]) -> None:
    second = begin(lambda question: question if question == "easy" else work(question))
    second.ask(["easy", "hard", "later"])
    assert second.answer("hard") is None
    assert second.answer("easy") == "easy"
    second.ask(["easier"])
    assert second.answer("easier") is None


def test_closed_it_forgets_and_can_begin_anew_with_what_is_so_by_then(begin: Begin) -> None:
    state = {"is": "old"}
    second = begin(lambda _: state["is"])
    second.ask(["what"])
    assert second.answer("what") == "old"
    state["is"] = "new"
    second.close()
    assert second.answer("what") is None
    second.ask(["what"])
    assert second.answer("what") == "new"


def test_closing_does_not_wait_for_an_answer(begin: Begin) -> None:
    second = begin(lambda _: time.sleep(3600))
    second.ask(["never"])
    child = second._child
    assert child is not None
    second.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child._pid, 0)


def test_beside_other_threads_nothing_is_forked() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not may_fork()
        second = SecondProcess(lambda question: question)
        second.ask(["anything"])
        assert second.answer("anything") is None
    finally:
        done.set()
        thread.join()


def test_with_a_card_in_use_or_a_single_core_nothing_is_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(second_process.sys, "platform", "linux")
    monkeypatch.setattr(second_process.threading, "active_count", lambda: 1)
    monkeypatch.setattr(second_process.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert may_fork()
    monkeypatch.setattr(second_process.os, "sched_getaffinity", lambda _: {0})
    assert not may_fork()
    monkeypatch.setattr(second_process.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(second_process.torch.cuda, "is_initialized", lambda: True)
    assert not may_fork()
