"""The thread that does the host's share: how many cores it takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from oomph.memory import worker
from oomph.memory.worker import HostWorker


def threads_of(run: HostWorker) -> list[int]:
    """What torch takes for a loop: in that thread, twice, then in a new one, then here."""
    found: list[int] = []

    def note() -> None:
        torch.ones(1 << 16).mul_(2)
        found.append(torch.get_num_threads())

    try:
        run.begin(note).wait()
        run.begin(note).wait()
        other = threading.Thread(target=note)
        other.start()
        other.join()
    finally:
        run.close()
    return [*found, torch.get_num_threads()]


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "expected"), [(16, 3), (5, 3), (4, 2), (3, 1), (2, 1), (1, 1)])
def test_cores_are_left_to_those_who_launch_kernels(
    three_threads: None, monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(worker, "_cores", lambda: cores)
    assert threads_of(HostWorker()) == [expected, expected, 3, 3]


def test_cores_that_may_be_used_are_counted() -> None:
    assert worker._cores() >= 1
