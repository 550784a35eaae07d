"""`with oomph.watch(): …`: explains out-of-memory errors and re-raises them.

The original error is raised, with a note. While a program runs normally, only a few numbers per
step are recorded (see `Logbook`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from oomph.errors import BadInput, OomphError
from oomph.explaining.alive import look_around
from oomph.explaining.causes import Evidence, find_causes
from oomph.explaining.failure import (
    forget_locals,
    frames_of,
    is_out_of_memory,
    locate,
    size_asked_for,
)
from oomph.explaining.logbook import Logbook
from oomph.explaining.meters import Meter, Refusal, find_meter
from oomph.explaining.oom_report import OomReport, check_report_path, write_report
from oomph.explaining.remedies import Remedy, find_remedies
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.jobs.job import Job

_NOTE = "oomph: "
_FIT = "oomph.fit(model, optimizer, loss, batch)"

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Watch:
    """The result of `oomph.watch()`: a context manager or a decorator."""

    def __init__(
        self,
        *,
        report: str | Path | None,
        job: Job | None,
        meter: Meter | None,
        next_command: str,
    ) -> None:
        self._path = check_report_path(report) if report is not None else None
        self._job = job
        self._meter = meter
        self._next_command = next_command
        self._logbook: Logbook | None = None
        self._open: contextlib.ExitStack | None = None
        self.report: OomReport | None = None
        """Why memory ran out, if it did."""
        self.report_path: Path | None = None

    def __call__(self, function: _Function) -> _Function:
        """As a decorator: each call is watched separately."""
        return _watched(function, self._again)

    def __enter__(self) -> Watch:
        if self._open is not None:
            raise BadInput("this watch is in use already; make another one inside it")
        with contextlib.ExitStack() as stack:
            if self._meter is not None:
                # Refusals before any module is called must be recorded, too.
                self._meter.is_ready()
                self._logbook = Logbook(self._meter)
                stack.enter_context(self._logbook.open())
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        if error is None or not is_out_of_memory(error) or _has_note(error):
            return
        try:
            self._explain(error, traceback)
        except Exception as problem:  # the user's error must be raised, whatever happens to ours
            error.add_note(f"{_NOTE}could not explain it: {type(problem).__name__}: {problem}")

    def _explain(self, error: BaseException, traceback: TracebackType | None) -> None:
        if self._meter is None or self._logbook is None or not self._meter.is_ready():
            error.add_note(f"{_NOTE}no GPU is in use whose memory could be read")
            return
        evidence = _gather(self._meter, self._logbook, error, traceback)
        causes = find_causes(evidence)
        command = self._next_command.replace("{gpu}", self._meter.gpu or "NAME", 1)
        remedies = find_remedies(causes[0], evidence, command)
        if self._job is not None:
            remedies = (*remedies[:-1], _plan(self._job, self._meter, evidence))
        self.report = OomReport(
            device=self._meter.device,
            gpu=self._meter.gpu,
            torch=torch.__version__,
            program=shlex.join(sys.argv),
            causes=causes,
            remedies=remedies,
            evidence=evidence,
        )
        lines = [self.report.headline, self.report.alive, *map(say_remedy, remedies)]
        try:
            self.report_path = write_report(self.report, self._path)
            lines.append(f"the report is in {self.report_path}; oomph explain reads it")
        except OSError as problem:
            lines.append(f"the report could not be written: {problem.strerror}")
        for line in lines:
            print(f"{_NOTE}{line}", file=sys.stderr)
        error.add_note(f"{_NOTE}{lines[0]}")

    def _again(self) -> Watch:
        return Watch(
            report=self._path,
            job=self._job,
            meter=self._meter,
            next_command=self._next_command,
        )


@overload
def watch(function: _Function) -> _Function: ...
@overload
def watch(
    *,
    report: str | Path | None = None,
    job: Job | None = None,
    meter: Meter | None = None,
    next_command: str = _FIT,
) -> Watch: ...
def watch(
    function: Any = None,
    *,
    report: str | Path | None = None,
    job: Job | None = None,
    meter: Meter | None = None,
    next_command: str = _FIT,
) -> Any:
    """Explain an out-of-memory error of the code inside, as a context manager or decorator.

    The cause is printed in one line, and a report is written to `report`, or else to a private file
    whose path is printed. With `job`, a plan that would fit is also searched for and named. `meter`
    is the source of the device's numbers: by default the CUDA device in use. `next_command` is what
    the report suggests to run next; {gpu} in it is replaced by the GPU's name.
    """
    chosen = meter if meter is not None else find_meter()
    made = Watch(report=report, job=job, meter=chosen, next_command=next_command)
    return made if function is None else made(function)


def say_remedy(remedy: Remedy) -> str:
    """Format as `try X: would save 1.2 GiB (predicted), enough; because …`."""
    effect = ""
    if remedy.saves is not None:
        verdict = "enough for this request" if remedy.enough else "not enough by itself"
        effect = f" would save {format_bytes(remedy.saves)} (predicted), {verdict};"
    return f"try {remedy.do}:{effect} {remedy.why}"


def _gather(
    meter: Meter, logbook: Logbook, error: BaseException, traceback: TracebackType | None
) -> Evidence:
    """Collect evidence while the traceback still holds it; the result holds no tensor."""
    # Other kinds of errors did not come from the allocator; its last refusal is an old one.
    refusal = meter.refusal if isinstance(error, torch.OutOfMemoryError) else None
    # A device first used inside the watch records no refusals before the first module call.
    refusal = refusal or Refusal(asked=size_asked_for(error), reading=meter.read())
    frames = frames_of(traceback)
    try:
        return Evidence(
            asked=refusal.asked,
            reading=refusal.reading,
            failure=locate(traceback, logbook),
            steps=logbook.steps,
            notes=tuple(logbook.notes),
            eval_notes=tuple(logbook.eval_notes),
            call_notes=tuple(logbook.call_notes),
            most_calls=logbook.most_calls,
            inputs=logbook.inputs,
            largest_before=logbook.largest_before,
            alive=look_around(meter, frames, refusal),
        )
    finally:
        forget_locals(frames)


def _plan(job: Job, meter: Meter, evidence: Evidence) -> Remedy:
    """A plan that would fit the available memory."""
    from oomph.search.attempt import NoPlan, try_plan

    budget = evidence.reading.limit + (evidence.reading.hidden if meter.gpu is not None else 0)
    try:
        attempt = try_plan(job, budget=budget, gpu=meter.gpu)
    except OomphError as problem:
        return Remedy(do=_FIT, saves=None, enough=None, why=f"no plan was made: {problem}")
    if isinstance(attempt, NoPlan):
        return Remedy(do="a larger GPU", saves=None, enough=None, why=attempt.reason)
    return Remedy(
        do=f"{_FIT[:-1]}, budget={budget})",
        saves=None,
        enough=True,
        why=f"a plan fits: {attempt.summary}",
    )


def _watched(function: _Function, make: Callable[[], Watch]) -> _Function:
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise BadInput(
            f"{function.__name__} runs after its call has returned: put `with oomph.watch():`"
            " inside"
        )

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with make():
            return function(*args, **kwargs)

    return watched  # type: ignore[return-value]


def _has_note(error: BaseException) -> bool:
    """Whether a nested watch has already explained it."""
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))
