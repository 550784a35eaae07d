"""Tries some numbers of worker processes to feed a step, and keeps the fastest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from oomph.data.prefetch import Prefetcher
from oomph.errors import BadInput
from oomph.jobs.job import check_count
from oomph.process.random_state import random_state_kept

#: Opens a loader with the given numbers of workers and of batches that each loads ahead.
MakeLoader = Callable[[int, int], Iterable[Any]]
Clock = Callable[[], float]

#: Batches that fill queues and warm up; they are not timed.
WARM_UP = 2
#: A device counts as fed if it waits for less than this share of a step.
FED = 0.01
#: Smaller differences than this share of a step are noise.
FASTER = 0.02
PREFETCH = 2


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """A setting and its measurements; seconds are per step."""

    workers: int
    prefetch: int
    """Batches that each worker loads ahead."""
    seconds: float
    waited: float
    """Seconds of the step spent waiting for data."""

    @property
    def fed(self) -> bool:
        """Whether the device hardly waits."""
        return self.waited <= FED * self.seconds

    def __str__(self) -> str:
        part = self.waited / self.seconds if self.seconds else 0.0
        return (
            f"{self.workers} workers, {self.prefetch} batches ahead each:"
            f" {self.seconds * 1000:.2f} ms a step, of which {part:.1%} for data"
        )


@dataclass(frozen=True, kw_only=True)
class TunedWorkers:
    """The fewest workers that are as fast as any, and all settings that were tried."""

    best: Feeding
    tried: tuple[Feeding, ...]
    out_of_time: bool
    """Whether there was more to try."""


def tune_workers(
    make_loader: MakeLoader,
    step: Callable[[Any], Any],
    *,
    device: str | torch.device = "cpu",
    depth: int = 2,
    steps: int = 16,
    seconds: float = 60.0,
    most: int | None = None,
) -> TunedWorkers:
    """Run some real steps with more and more workers until the device hardly waits for data.

    `make_loader(workers, prefetch)` opens a new loader each time. `step(batch)` is the step to
    feed. It has its usual effects, so a training step trains; random state is restored. `most` is
    the most workers to try, by default all cores but one. Tuning ends after about so many
    `seconds`, even if there is more to try.
    """
    target = torch.device(device)
    check_count("the steps to measure", steps)
    most = _cores() - 1 if most is None else most
    deadline = time.perf_counter() + seconds

    def measure(workers: int, prefetch: int) -> Feeding:
        with Prefetcher(make_loader(workers, prefetch), target, depth) as batches:
            return _measure(workers, prefetch, batches, step, steps, deadline)

    with random_state_kept(target):
        return climb(measure, most=most, out_of_time=lambda: time.perf_counter() > deadline)


def climb(
    measure: Callable[[int, int], Feeding], *, most: int, out_of_time: Callable[[], bool]
) -> TunedWorkers:
    """Try settings from the cheapest up while more is faster and the device still waits."""
    tried: list[Feeding] = []
    late = False
    for workers, prefetch in _settings(most, tried):
        if tried and out_of_time():
            late = True
            break
        tried.append(measure(workers, prefetch))
    fastest = min(one.seconds for one in tried)
    best = next(one for one in tried if one.seconds <= fastest * (1 + FASTER))
    return TunedWorkers(best=best, tried=tuple(tried), out_of_time=late)


def _settings(most: int, tried: list[Feeding]) -> Iterator[tuple[int, int]]:
    """The settings to try, given the results of those before."""
    workers, slower = 0, 0
    while workers <= most and slower < 2:
        yield workers, PREFETCH
        if tried[-1].fed:
            return
        before = min((one.seconds for one in tried[:-1]), default=float("inf"))
        slower = slower + 1 if tried[-1].seconds > before * (1 - FASTER) else 0
        workers = 2 * workers or 1
        if workers > most > tried[-1].workers:
            workers = most
    fastest = min(tried, key=lambda one: one.seconds)
    if fastest.workers:  # batches with varying loading times need a longer queue
        yield fastest.workers, 2 * PREFETCH


def _measure(
    workers: int,
    prefetch: int,
    batches: Prefetcher,
    step: Callable[[Any], Any],
    steps: int,
    deadline: float,
) -> Feeding:
    done, began = 0, time.perf_counter()
    for batch in batches:
        step(batch)
        done += 1
        if done == WARM_UP:
            _settle(batches.device)
            began = time.perf_counter()
        if done == WARM_UP + steps or (done > WARM_UP and time.perf_counter() > deadline):
            break
    if not done:
        raise BadInput("the loader gives no batches: there is nothing to tune it by")
    if done <= WARM_UP:
        raise BadInput(
            f"a loader of {done} batches is too short to tune: it takes more than {WARM_UP}"
        )
    _settle(batches.device)
    counted = done - WARM_UP
    return Feeding(
        workers=workers,
        prefetch=prefetch,
        seconds=(time.perf_counter() - began) / counted,
        waited=sum(batches.waited[WARM_UP:]) / counted,
    )


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
