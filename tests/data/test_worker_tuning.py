"""Tuning workers: the fewest that are as fast as any, within the time there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oomph.data.worker_tuning import Feeding, TunedWorkers, climb, tune_workers
from oomph.errors import BadInput


def simulated(seconds_of: Callable[[int, int], float], step: float = 0.1) -> TunedWorkers:
    """Tune a loader that takes so long for a batch, for a step that takes `step`."""
    return climb(measuring(seconds_of, step), most=8, out_of_time=lambda: False)


def measuring(
    seconds_of: Callable[[int, int], float], step: float
) -> Callable[[int, int], Feeding]:
    def measure(workers: int, prefetch: int) -> Feeding:
        seconds = max(step, seconds_of(workers, prefetch))
        return Feeding(
            workers=workers, prefetch=prefetch, seconds=seconds, waited=max(0.0, seconds - step)
        )

    return measure


def test_a_fast_loader_needs_no_workers() -> None:
    tuned = simulated(lambda workers, prefetch: 0.01)
    assert tuned.best.workers == 0
    assert len(tuned.tried) == 1


def test_workers_are_added_until_the_device_is_fed() -> None:
    tuned = simulated(lambda workers, prefetch: 0.35 / (workers or 1))
    assert [one.workers for one in tuned.tried] == [0, 1, 2, 4]
    assert tuned.best.workers == 4
    assert tuned.best.fed


def test_more_workers_than_help_are_not_kept() -> None:
    tuned = simulated(lambda workers, prefetch: 1 / min(workers or 1, 2))
    assert tuned.best.workers == 2
    assert max(one.workers for one in tuned.tried) == 8


def test_a_longer_queue_is_tried_where_workers_do_not_do() -> None:
    tuned = simulated(lambda workers, prefetch: 1.0 if not workers else 0.8 / prefetch)
    assert tuned.tried[-1].prefetch == 4
    assert tuned.best.prefetch == 4


def test_no_more_workers_are_tried_than_there_may_be() -> None:
    measure = measuring(lambda workers, prefetch: 9 / (workers + 1), 0.1)
    tuned = climb(measure, most=3, out_of_time=lambda: False)
    assert [one.workers for one in tuned.tried] == [0, 1, 2, 3, 3]
    tuned = climb(measure, most=0, out_of_time=lambda: False)
    assert [one.workers for one in tuned.tried] == [0]


def test_it_ends_when_time_is_over_and_says_so() -> None:
    measure = measuring(lambda workers, prefetch: 9 / (workers + 1), 0.1)
    tuned = climb(measure, most=8, out_of_time=lambda: True)
    assert [one.workers for one in tuned.tried] == [0]
    assert tuned.out_of_time


def test_real_steps_are_fed_and_random_streams_put_back() -> None:
    before = torch.get_rng_state()
    seen = []

    def step(batch: torch.Tensor) -> None:
        torch.rand(1)
        seen.append(int(batch))

    opened = []

    def make_loader(workers: int, prefetch: int) -> list[torch.Tensor]:
        opened.append((workers, prefetch))
        return [torch.tensor(n) for n in range(40)]

    tuned = tune_workers(make_loader, step, steps=5, most=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(opened) == len(tuned.tried)
    assert seen == list(range(7)) * len(opened)
    assert "ms a step" in str(tuned.best)


@pytest.mark.parametrize("count", [0, 2])
def test_a_loader_that_is_too_short_is_refused(count: int) -> None:
    with pytest.raises(BadInput, match=r"no batches|too short"):
        tune_workers(lambda workers, prefetch: [torch.zeros(1)] * count, lambda batch: None)
