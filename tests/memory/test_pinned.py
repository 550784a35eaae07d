"""Pinned host memory: what is pinned, for how long, and what happens where the driver refuses."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from oomph.memory import pinned
from oomph.memory.pinned import PinnedMemory

OUT_OF_MEMORY = 2


class Driver:
    """Notes what it is asked to pin, as far as it allows that."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.asked = 0
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.asked += 1
        assert nbytes, "a card says that nothing at all is an invalid argument"
        assert flags == 0
        if not self.error:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry for each refusal that was kept from the next kernel."""
    found: list[bool] = []
    monkeypatch.setattr(pinned, "_forget_error", lambda: found.append(True))
    return found


def test_memory_is_pinned_for_as_long_as_somebody_has_it(driver: Driver) -> None:
    memory = PinnedMemory()
    one, other = memory.take(5000), memory.take(3)
    assert driver.pinned == {one.data_ptr(): 5000, other.data_ptr(): 3}
    assert (one.numel(), other.numel()) == (5000, 3)
    part = one[100:]
    del one
    gc.collect()
    assert len(driver.pinned) == 2, "a part of it is in use"
    del part
    gc.collect()
    assert list(driver.pinned.values()) == [3]
    memory.close()
    assert driver.pinned == {}
    other.fill_(7)


def test_no_bytes_are_not_pinned(driver: Driver) -> None:
    assert PinnedMemory().take(0).numel() == 0
    assert not driver.asked


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    driver: Driver, forgotten: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    memory = PinnedMemory()
    before = memory.take(100)
    driver.error = OUT_OF_MEMORY
    with caplog.at_level(logging.WARNING, logger="oomph"):
        refused, later = memory.take(200), memory.take(300)
    assert [one.numel() for one in (before, refused, later)] == [100, 200, 300]
    assert driver.asked == 2, "who was refused does not ask again"
    assert forgotten == [True]
    (said,) = caplog.messages
    assert "refuses to pin 200 bytes" in said and "ulimit -l" in said
    memory.close()
    assert driver.pinned == {}
