"""What handlers of signals raise waits until a place where it can be raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from oomph.process.interrupts import Interrupts


class Alarm(Exception):
    """What a user's handler raises."""


@pytest.fixture
def called() -> Iterator[list[int]]:
    """A handler that raises after it noted that it was called."""
    calls: list[int] = []

    def handler(number: int, _: Any) -> None:
        calls.append(number)
        raise Alarm(len(calls))

    before = signal.signal(signal.SIGUSR1, handler)
    yield calls
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_is_called_at_once_and_its_exception_waits(called: list[int]) -> None:
    interrupts = Interrupts()
    reached = []
    with pytest.raises(Alarm), interrupts.held():
        signal.raise_signal(signal.SIGUSR1)
        reached.append(list(called))
        interrupts.let_through()
        reached.append([])
    assert reached == [[signal.SIGUSR1]]
    with pytest.raises(Alarm):
        signal.raise_signal(signal.SIGUSR1)


def test_what_waits_is_raised_at_the_end(called: list[int]) -> None:
    interrupts = Interrupts()
    reached = []
    with pytest.raises(Alarm) as raised, interrupts.held():
        with interrupts.held():
            signal.raise_signal(signal.SIGUSR1)
        reached.append("the end of an inner one is not the end")
        interrupts.add_note("as it was")
    assert reached
    assert raised.value.__notes__ == ["as it was"]
    interrupts.let_through()


def test_ctrl_c_is_not_lost_beside_an_error(called: list[int]) -> None:
    interrupts = Interrupts()
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("in the loss")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_that_was_set_meanwhile_stays(called: list[int]) -> None:
    def other(*_: Any) -> None:
        """Somebody's."""

    with Interrupts().held():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_another_thread_holds_nothing_back_and_raises_nothing(called: list[int]) -> None:
    interrupts = Interrupts()
    found: list[Any] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGUSR1)
        with Interrupts().held():
            found.append(signal.getsignal(signal.SIGUSR1) is before)
        interrupts.let_through()
        found.append("went on")

    with pytest.raises(Alarm), interrupts.held():
        signal.raise_signal(signal.SIGUSR1)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [True, "went on"]
