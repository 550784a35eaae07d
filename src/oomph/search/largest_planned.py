"""How large may it be, with a plan? The largest batch or sequence length that some plan fits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from oomph.errors import BadInput
from oomph.hardware import GPU
from oomph.jobs.job import Job, check_count
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.rendering import Printed
from oomph.search.attempt import Attempt, NoPlan, try_plan
from oomph.search.checker import Say
from oomph.search.limits import MOST, LimitedBy, MakeJob, Search

#: Planning takes seconds: sizes closer together than this part of the answer are not told apart.
NEAR_ENOUGH = 1 / 32


@dataclass(frozen=True, kw_only=True)
class PlannedLimit(Printed):
    """The largest batch, or whatever `what` is, that has a plan, and what stops the next one."""

    what: str
    value: int
    """The largest with a plan; where none has one, the smallest there is."""
    attempt: Attempt
    """The plan at `value`."""
    next_value: int | None
    next_attempt: Attempt | None
    """The nearest size tried above it: there is no plan, or only one that splits the batch. None
    where memory is not what ends it."""
    limited_by: LimitedBy
    reason: str
    """Why nothing larger was tried, where memory is not the reason."""
    step: int
    """From here on only its multiples were tried."""
    plans: int
    """How many sizes were planned for."""
    seconds: float

    @property
    def verdict(self) -> Literal["fits", "does_not_fit"]:
        """Whether any size has a plan."""
        return "fits" if isinstance(self.attempt, Plan) else "does_not_fit"

    def as_dict(self) -> dict[str, Any]:
        """The plan at the answer as plain JSON, and under `solve` the answer; these keys stay."""
        beyond = None
        if self.next_attempt is not None:
            plan = self.next_attempt if isinstance(self.next_attempt, Plan) else None
            refused = self.next_attempt if isinstance(self.next_attempt, NoPlan) else None
            beyond = {
                "value": self.next_value,
                "verdict": self.next_attempt.verdict,
                "micro_batch": plan.choices.micro_batch if plan else None,
                "smallest_budget": refused.smallest_budget if refused else None,
            }
        return {
            **self.attempt.as_dict(),
            "solve": {
                "what": self.what,
                "value": self.value if self.verdict == "fits" else None,
                "limited_by": self.limited_by,
                "reason": self.reason,
                "next": beyond,
                "plans": self.plans,
                "seconds": self.seconds,
            },
        }


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A size's attempt, as a search asks about it."""

    attempt: Attempt
    in_one_piece: bool
    """Whether a plan that splits the batch does not count."""

    @property
    def fits(self) -> bool:
        if isinstance(self.attempt, NoPlan):
            return False
        return not self.in_one_piece or self.attempt.choices.micro_batch is None

    @property
    def budget(self) -> int:
        return self.attempt.budget

    @property
    def smallest_budget(self) -> int | None:
        # A plan takes what it may: what it needs at least is only known where there is none.
        return self.attempt.smallest_budget if isinstance(self.attempt, NoPlan) else None


def largest_planned(
    make_job: MakeJob,
    gpu: str | GPU | None = None,
    *,
    budget: str | int | None = None,
    what: str = "batch",
    start: int = 1,
    step: int = 1,
    allow: str | Fidelity = Fidelity.ROUNDING,
    compile_blocks: bool = True,
    host: str | int | None = None,
    say: Say = lambda _: None,
) -> PlannedLimit:
    """The largest size whose job has a plan; `make_job(size)` makes it, or raises `BadInput`.

    Sizes are doubled or halved from `start` until the answer is enclosed, then the gap is closed to
    about 3 %, never below `step`. For a `batch` only plans that run it in one piece count: split
    into micro-batches, nearly any batch fits. The other arguments are as for `plan`.
    """
    if gpu is None and budget is None:
        raise BadInput("nothing limits a job on the CPU but a budget: give one, as 16GiB")
    began = time.perf_counter()

    def attempt(job: Job, size: int) -> _Tried:
        found = try_plan(
            job,
            budget=budget,
            gpu=gpu,
            allow=allow,
            compile_blocks=compile_blocks,
            host=host,
            say=lambda words: say(f"a {what} of {size:,}: {words}"),
        )
        return _Tried(attempt=found, in_one_piece=what == "batch")

    search = Search(
        make_job=make_job,
        predict=attempt,
        step=check_count("the step", step, MOST),
        near_enough=NEAR_ENOUGH,
    )
    search.run(check_count(f"the {what}", start, MOST))
    beyond = search.tried[search.next_value] if search.next_value is not None else None
    return PlannedLimit(
        what=what,
        value=search.value,
        attempt=search.tried[search.value].attempt,
        next_value=search.next_value,
        next_attempt=beyond.attempt if beyond is not None else None,
        limited_by=search.limited_by,
        reason=search.reason,
        step=step,
        plans=len(search.tried),
        seconds=time.perf_counter() - began,
    )
