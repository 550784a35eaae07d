"""Meters of a card that is not there: which of them hear of a request that was refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from oomph.explaining import meters
from oomph.explaining.meters import CudaMeter

FREE, TOTAL = 3, 10


@pytest.fixture(autouse=True)
def observers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[..., None]]]:
    """What is attached to the allocator of two cards of which the second one is in use."""
    attached: list[Callable[..., None]] = []
    name = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, name, attached.append, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, TOTAL))
    count = {"all": {"current": 1, "peak": 1}}
    stats = {"allocated_bytes": count, "reserved_bytes": count}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    gc.collect()
    monkeypatch.setattr(meters, "_meters", type(meters._meters)())
    meters._observe.cache_clear()
    yield attached
    meters._observe.cache_clear()


def test_every_meter_of_the_device_hears_of_each_refusal(
    observers: list[Callable[..., None]],
) -> None:
    outer, inner, idle = CudaMeter(), CudaMeter(), CudaMeter()
    assert outer.is_ready() and inner.is_ready()
    (tell,) = observers
    tell(1, 7, TOTAL, FREE)
    assert [meter.refusal.asked for meter in (outer, inner)] == [7, 7]
    # The inner one is over; the outer one goes on.
    assert outer.is_ready()
    tell(1, 8, TOTAL, FREE)
    assert outer.refusal.asked == 8
    assert outer.refusal.reading.limit == TOTAL
    assert idle.refusal is None


def test_another_devices_refusals_are_not_its_own(observers: list[Callable[..., None]]) -> None:
    meter = CudaMeter()
    meter.is_ready()
    (tell,) = observers
    tell(0, 7, TOTAL, FREE)
    assert meter.refusal is None


def test_a_meter_that_nobody_holds_is_forgotten(observers: list[Callable[..., None]]) -> None:
    meter = CudaMeter()
    meter.is_ready()
    del meter
    gc.collect()
    assert not meters._meters
    CudaMeter().is_ready()
    assert len(observers) == 1
