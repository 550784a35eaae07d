"""Measures how long the device waited for data, batch by batch."""

from __future__ import annotations

import time
from collections import deque

import torch


class HostWaiting:
    """Host seconds; without a GPU, the host is the device."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = 0.0

    def begin(self) -> None:
        """A batch was requested."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """The batch is there."""
        self._seconds.append(time.perf_counter() - self._began)

    def seconds(self) -> tuple[float, ...]:
        """Seconds for each batch so far."""
        return tuple(self._seconds)


class CudaWaiting:
    """Seconds in which the computing stream was idle, waiting for a batch.

    They are measured between an event after the last queued work and one after the batch: if the
    GPU is still busy when the batch arrives they coincide, however long the host waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._began: torch.cuda.Event | None = None

    def begin(self) -> None:
        """A batch was requested."""
        self._began = self._record()

    def end(self) -> None:
        """The computing stream was made to wait for it."""
        assert self._began is not None
        self._open.append((self._began, self._record()))
        while self._open and self._open[0][1].query():
            self._close_oldest()

    def seconds(self) -> tuple[float, ...]:
        """Seconds for each batch so far; waits until the last one is on the device."""
        if self._open:
            self._open[-1][1].synchronize()
        while self._open:
            self._close_oldest()
        return tuple(self._seconds)

    def _close_oldest(self) -> None:
        began, ended = self._open.popleft()
        self._seconds.append(began.elapsed_time(ended) / 1000)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def make_waiting(device: torch.device) -> HostWaiting | CudaWaiting:
    """The timer for this device."""
    return CudaWaiting(device) if device.type == "cuda" else HostWaiting()
