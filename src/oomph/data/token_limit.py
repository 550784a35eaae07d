"""Finds the most tokens per batch for which the longest batch is predicted to fit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oomph.data.batch_shapes import in_shape
from oomph.data.lengths import Lengths, check_lengths
from oomph.data.prefetch_memory import prefetched_bytes
from oomph.errors import BadInput, DoesNotFit
from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job, check_count, make_batch
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate, estimate
from oomph.rehearsal.phases import PHASES
from oomph.search.limits import MOST, Limit, Search
from oomph.units import format_bytes, parse_bytes

#: Makes a job with a batch of the given number of samples and length.
MakeShape = Callable[[int, int], Job]


def tokens_that_fit(
    job: Job | MakeShape,
    lengths: Lengths,
    *,
    gpu: str | GPU | None = None,
    budget: str | int | None = None,
    longest: int | None = None,
    multiple: int = 1,
    prefetch: int = 0,
    phases: Sequence[str] = PHASES,
    allocator: str | AllocatorSettings = "",
) -> Limit:
    """The most tokens for `TokenBatches(lengths, tokens=…)` with which every batch fits.

    The answer, its `value`, is a whole number of the longest samples, so that their batch is the
    largest in length and in tokens. That batch is rehearsed, and so is one of the shortest samples.
    `job` makes a job of so many samples of such a length, or is one whose batch can be stretched.
    `prefetch` more batches are on the device meanwhile. If not even one of the longest samples
    fits, this raises `DoesNotFit`, which names it and the length that does.

    Batches of many shapes fragment PyTorch's memory; with the `allocator` setting
    `expandable_segments:True`, here and in the run, they hardly do.
    """
    began = time.perf_counter()
    question = _Question.ask(job, gpu, budget, prefetch, phases, allocator)
    check_count("the multiple", multiple)
    known = check_lengths(lengths, longest=longest or MOST, too_long="truncate").lengths
    padded = -(-known // multiple) * multiple
    most, least, count = int(padded.max()), int(padded.min()), len(padded)

    def make_job(rows: int) -> Job:
        if rows > count:
            raise BadInput(f"there are only {count:,} samples")
        return question.make_shape(rows, most)

    rehearsals = 0

    def predict(job: Job) -> Estimate:
        nonlocal rehearsals
        rehearsals += 1
        return question.predict(job)

    search = Search(make_job=make_job, predict=lambda job, _: predict(job), step=1)
    search.run(1)
    while search.fitting is not None and least < most:
        # More and shorter samples have as many tokens, but may each add some memory: only the
        # answer is checked for that, and if they do not fit, a smaller one is searched for below.
        rows = search.fitting
        others = predict(question.make_shape(min(rows * most // least, count), least))
        search.tried[rows] = max(search.tried[rows], others, key=_tightness)
        if others.fits:
            break
        while (size := search.next_size()) is not None:
            search.try_out(size)
    answer, beyond = search.tried[search.value], search.next_value
    if not answer.fits:
        raise question.refusal(int(known.argmax()), most, multiple, answer)
    return Limit(
        what="number of tokens",
        value=search.value * most,
        estimate=answer,
        next_value=beyond * most if beyond is not None else None,
        next_estimate=search.tried[beyond] if beyond is not None else None,
        limited_by=search.limited_by,
        reason=search.reason,
        step=most,
        rehearsals=rehearsals,
        seconds=time.perf_counter() - began,
    )


def _tightness(one: Estimate) -> tuple[bool, int]:
    """What does not fit comes last, whatever it needs, since that is known only to 1 %."""
    return not one.fits, one.smallest_budget


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What every shape is rehearsed with."""

    make_shape: MakeShape
    card: GPU | None
    budget: int
    prefetch: int
    phases: Sequence[str]
    allocator: str | AllocatorSettings

    @staticmethod
    def ask(
        job: Job | MakeShape,
        gpu: str | GPU | None,
        budget: str | int | None,
        prefetch: int,
        phases: Sequence[str],
        allocator: str | AllocatorSettings,
    ) -> _Question:
        card = find_gpu(gpu) if isinstance(gpu, str) else gpu
        if card is None and budget is None:
            raise BadInput("nothing limits a job on the CPU but a budget: give one, as 16GiB")
        make_shape: MakeShape = functools.partial(in_shape, job) if isinstance(job, Job) else job
        total = parse_bytes(budget) if budget is not None else card.memory if card else 0
        return _Question(
            make_shape=make_shape,
            card=card,
            budget=total,
            prefetch=prefetch,
            phases=phases,
            allocator=allocator,
        )

    def predict(self, job: Job) -> Estimate:
        ahead = prefetched_bytes(make_batch(job), self.prefetch)
        left = max(self.budget - ahead, 1)
        return estimate(
            job, gpu=self.card, budget=left, phases=self.phases, allocator=self.allocator
        )

    def refusal(self, index: int, length: int, multiple: int, found: Estimate) -> DoesNotFit:
        """The error that says which sample is too long, and how long one may be."""
        words = (
            f"not even one sample of {length:,} tokens, as sample {index}, fits"
            f" {format_bytes(self.budget)}: it needs {format_bytes(found.smallest_budget)}"
        )
        search = Search(
            make_job=lambda size: self.make_shape(1, size),
            predict=lambda job, _: self.predict(job),
            step=multiple,
        )
        search.tried[length] = found
        while (size := search.next_size()) is not None:
            search.try_out(size)
        if search.fitting is None:
            return DoesNotFit(f"{words}, and no shorter one fits either", found.smallest_budget)
        return DoesNotFit(
            f"{words}. One of {search.fitting:,} tokens fits: TokenBatches(…,"
            f' longest={search.fitting}, too_long="truncate") cuts longer ones, "skip" leaves them'
            " out",
            found.smallest_budget,
        )
