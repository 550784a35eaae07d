"""How large may it be? The largest batch or sequence length that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from oomph.errors import BadInput
from oomph.hardware import GPU
from oomph.jobs.job import Job, check_count
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate, Verdict, estimate
from oomph.rehearsal.phases import PHASES
from oomph.rendering import Printed

#: Where a search ends that memory does not end.
MOST = 1_000_000
#: `smallest_budget` is known to 1 %: interpolation between two of them is not better than that.
PRECISION = 0.01
#: Two sizes can round up to the same memory, and their line then leads nowhere.
LARGEST_STRIDE = 32

MakeJob = Callable[[int], Job]
LimitedBy = Literal["memory", "model", "search"]


@dataclass(frozen=True, kw_only=True)
class Limit(Printed):
    """The largest batch, or whatever `what` is, that fits, and what stops the next one."""

    what: str
    value: int
    """The largest that fits; where none does, the smallest there is."""
    estimate: Estimate
    """The job at `value`."""
    next_value: int | None
    next_estimate: Estimate | None
    """The job one size up, which does not fit or is inconclusive; None where memory is not what
    ends it."""
    limited_by: LimitedBy
    reason: str
    """Why nothing larger was tried, where memory is not the reason."""
    step: int
    """From here on only its multiples were tried."""
    rehearsals: int
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """`fits`, or the verdict on the smallest where not even that one does."""
        return self.estimate.verdict

    @property
    def fits(self) -> bool:
        """Whether any size fits."""
        return self.estimate.fits

    def as_dict(self) -> dict[str, Any]:
        """The estimate at the answer as plain JSON, and under `solve` the answer; keys stay."""
        beyond = None
        if self.next_estimate is not None:
            shown = self.next_estimate.as_dict()
            kept = {name: shown[name] for name in ("verdict", "peak", "interval")}
            beyond = {"value": self.next_value, **kept}
        return {
            **self.estimate.as_dict(),
            "seconds": self.seconds,
            "solve": {
                "what": self.what,
                "value": self.value if self.fits else None,
                "limited_by": self.limited_by,
                "reason": self.reason,
                "next": beyond,
                "rehearsals": self.rehearsals,
            },
        }


def largest(
    make_job: MakeJob,
    gpu: str | GPU | None = None,
    *,
    budget: str | int | None = None,
    what: str = "batch",
    start: int = 1,
    step: int = 1,
    phases: Sequence[str] = PHASES,
    allocator: str | AllocatorSettings = "",
) -> Limit:
    """The largest size whose job fits; `make_job(size)` makes it, or raises `BadInput`.

    Memory grows with the size, nearly along a line, so a few rehearsals lead to the answer. It and
    the size after it are always rehearsed themselves. The search begins at `start`; below `step` it
    knows every whole number, from there on the multiples of `step`. Inconclusive is not a fit.
    """
    if gpu is None and budget is None:
        raise BadInput("nothing limits a job on the CPU but a budget: give one, as 16GiB")
    began = time.perf_counter()

    def predict(job: Job, size: int) -> Estimate:
        return estimate(job, gpu=gpu, budget=budget, phases=phases, allocator=allocator)

    search = Search(make_job=make_job, predict=predict, step=check_count("the step", step, MOST))
    search.run(check_count(f"the {what}", start, MOST))
    return Limit(
        what=what,
        value=search.value,
        estimate=search.tried[search.value],
        next_value=search.next_value,
        next_estimate=search.tried[search.next_value] if search.next_value is not None else None,
        limited_by=search.limited_by,
        reason=search.reason,
        step=step,
        rehearsals=len(search.tried),
        seconds=time.perf_counter() - began,
    )


class Tried(Protocol):
    """What a search has to know of a size it tried."""

    @property
    def fits(self) -> bool: ...

    @property
    def budget(self) -> int | None: ...

    @property
    def smallest_budget(self) -> int | None:
        """What it needs; None where it is not known, and the search bisects."""


T = TypeVar("T", bound=Tried)


@dataclass(kw_only=True)
class Search(Generic[T]):
    """Sizes tried so far, and where to try next."""

    make_job: MakeJob
    predict: Callable[[Job, int], T]
    """Given a job and its size."""
    step: int
    near_enough: float = 0.0
    """Ends the search where no more than this part of the answer is left untried above it."""
    tried: dict[int, T] = field(default_factory=dict)
    least: int = 1
    most: int = MOST
    refusal: str = ""
    """Why the job cannot be larger than `most`, in the words of whoever refused."""
    streak: int = 0
    """How many of the last sizes in a row went the same way."""

    @property
    def fitting(self) -> int | None:
        """The largest size that is known to fit."""
        return max((size for size, tried in self.tried.items() if tried.fits), default=None)

    @property
    def too_large(self) -> int | None:
        """The smallest size above it that is known not to."""
        low = self.fitting or 0
        return min((size for size in self.tried if size > low), default=None)

    @property
    def value(self) -> int:
        """The answer: the largest that fits; where none does, the smallest there is."""
        return self.least if self.fitting is None else self.fitting

    @property
    def next_value(self) -> int | None:
        """The size above the answer that does not fit."""
        return self.too_large if self.fitting is not None else None

    @property
    def limited_by(self) -> LimitedBy:
        """What ended it."""
        if self.fitting is None or self.too_large is not None:
            return "memory"
        return "model" if self.refusal else "search"

    @property
    def reason(self) -> str:
        """Why nothing larger was tried, where memory is not the reason."""
        if self.limited_by == "memory":
            return ""
        return self.refusal or f"the search ends at {MOST:,}"

    def run(self, start: int) -> None:
        """Try sizes from `start` on until the answer is known."""
        self.begin(start)
        while (size := self.next_size()) is not None:
            self.try_out(size)

    def begin(self, start: int) -> None:
        """Try the first size: on a multiple of the step unless only `start` itself is taken."""
        try:
            self.try_out(start if start < self.step else start // self.step * self.step)
        except BadInput:
            self.try_out(start)

    def try_out(self, size: int) -> None:
        """Rehearse this size, or learn that the model does not take it."""
        try:
            job = self.make_job(size)
        except BadInput as error:
            # Refused at once, or between two sizes that are taken: that is no end to find.
            if not self.tried or min(self.tried) < size < max(self.tried):
                raise
            self._find_bound(size, error)
            return
        last = next(reversed(self.tried.values()), None)
        self.tried[size] = self.predict(job, size)
        same_way = last is not None and last.fits == self.tried[size].fits
        self.streak = self.streak + 1 if same_way else 0

    def _find_bound(self, refused: int, error: BadInput) -> None:
        """The last size that is taken, by bisection; making a job costs no rehearsal."""
        upwards = refused > max(self.tried)
        accepted = max(self.tried) if upwards else min(self.tried)
        while abs(refused - accepted) > 1:
            middle = (accepted + refused) // 2
            try:
                self.make_job(middle)
                accepted = middle
            except BadInput as nearer:
                refused, error = middle, nearer
        if upwards:
            self.most, self.refusal = accepted, str(error)
        else:
            self.least = accepted

    def next_size(self) -> int | None:
        """The size to try next, or None when the answer and the size after it are known."""
        low, high = self.fitting, self.too_large
        first = self._above(low) if low is not None else self.least
        last = self._below(high) if high is not None else self.most
        if low == self.most or high == self.least or first > last:
            return None
        if low is not None and high is not None and high - low <= self.near_enough * low:
            return None
        guess = self._guess(low, high)
        on_grid = guess if guess < self.step else guess // self.step * self.step
        return min(max(on_grid, first), last)

    def _above(self, size: int) -> int:
        following = size + 1 if size < self.step else (size // self.step + 1) * self.step
        return min(following, self.most)

    def _below(self, size: int) -> int:
        preceding = size - 1 if size <= self.step else (size - 1) // self.step * self.step
        return max(preceding, self.least)

    def _guess(self, low: int | None, high: int | None) -> int:
        """Where a line through two estimates meets the budget, or a little beyond to enclose it."""
        root = self._root(low, high)
        if root is None:
            if low is not None and high is not None:
                return (low + high) // 2
            return 2 * low if low is not None else (high or 0) // 2
        reach = max(math.ceil(PRECISION * root), self.step if root > self.step else 1)
        if low is None:
            return min(root, (high or 0) - reach)
        if high is None:
            return min(max(root, low + reach), low * LARGEST_STRIDE)
        # A line between the ends of a curve errs to one side again and again: then reach further.
        reach <<= self.streak
        if high - low <= 2 * reach:
            return (low + high) // 2
        return min(max(root, low + reach), high - reach)

    def _root(self, low: int | None, high: int | None) -> int | None:
        """The size that needs the budget, by the line through the two nearest whose need is known;
        None where fewer are."""
        needs = {size: tried.smallest_budget for size, tried in self.tried.items()}
        known = sorted((size, need) for size, need in needs.items() if need is not None)
        if len(known) < 2:
            return None
        below = [pair for pair in known if low is not None and pair[0] <= low]
        above = known[len(below) :]
        nearest = [*below[-1:], *above[:1]] if below and above else above[:2] or below[-2:]
        (one, need), (other, larger_need) = nearest
        budget = self.tried[one].budget
        assert budget is not None
        if larger_need <= need:
            return MOST if high is None else self.least
        root: float = one + (other - one) * (budget - need) / (larger_need - need)
        return int(min(max(root, 0), MOST))
