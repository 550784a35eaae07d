"""Damaged files by the hundred thousand, for all loaders: `make fuzz`, `python -m benchmarks.fuzz`.

    python -m benchmarks.fuzz [--cases 100000] [--from 0] [--loaders plan,trace] [--jobs 2]
                              [--keep FOLDER]

Cases are numbered, and a number means the same damage everywhere; `--from` goes on where another
run ended. Each ends loaded or refused with an `OomphError`: a traceback, a hang, a crash or too
much memory fails, and the file that did it is kept. Loaders run in processes of their own, so that
one that dies is noticed and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.fuzz.cases import Tally, run_cases, write_case
from benchmarks.fuzz.loaders import LOADERS

#: Cases of one process; it takes some seconds to begin.
CHUNK = 8_000
#: Seconds without a new case after which a process hangs where no signal reaches it.
SILENT = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Cases of one loader, one after the other."""

    loader: str
    first: int
    count: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, show how it goes, and say how it ended; the exit code is 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--cases", type=int, default=100_000, help="over all loaders")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first case's number")
    parser.add_argument("--loaders", default=",".join(LOADERS), help="some of them")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        return _work(Work(**json.loads(options.work)))
    names = options.loaders.split(",")
    if unknown := [name for name in names if name not in LOADERS]:
        parser.error(f"there is no loader {unknown[0]!r}; there are {', '.join(LOADERS)}")
    each = -(-options.cases // len(names))
    work = [
        Work(loader=name, first=first, count=min(CHUNK, options.first + each - first))
        for first in range(options.first, options.first + each, CHUNK)
        for name in names
    ]
    tallies = {name: Tally(loader=name) for name in names}
    began = time.monotonic()
    for tally in _all(work, options.jobs):
        _add(tallies[tally.loader], tally)
        for case, problem in tally.failures:
            _keep(options.keep, tally.loader, case, problem)
    _show(list(tallies.values()), time.monotonic() - began)
    print(f"To go on where this ended: --from {options.first + each}")
    return 1 if any(tally.failures for tally in tallies.values()) else 0


def _all(work: Sequence[Work], jobs: int) -> Iterator[Tally]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("damaged files", total=sum(one.count for one in work))
        failed = 0
        for done in as_completed([pool.submit(_in_a_process, one) for one in work]):
            for tally in done.result():
                failed += len(tally.failures)
                bar.update(task, advance=tally.cases, description=f"{failed} failed")
                yield tally


def _in_a_process(work: Work) -> list[Tally]:
    """The tallies of the work; where the process dies or hangs, another one goes on behind that."""
    found = []
    while work.count > 0:
        tally, case = _run_process(work)
        found.append(tally)
        if case is None:
            break
        work = Work(loader=work.loader, first=case + 1, count=work.first + work.count - case - 1)
    return found


def _run_process(work: Work) -> tuple[Tally, int | None]:
    """What one process did, and the case that ended it."""
    with tempfile.NamedTemporaryFile(prefix="oomph-fuzz-") as now:
        command = [sys.executable, "-m", "benchmarks.fuzz", "--work", json.dumps(vars(work))]
        process = subprocess.Popen(
            [*command, "--keep", now.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        stop = threading.Event()
        watching = threading.Thread(target=_watch, args=(process, Path(now.name), stop))
        watching.start()
        out, _ = process.communicate()
        stop.set()
        watching.join()
        if process.returncode == 0:
            values = json.loads(out)
            failures = [(case, problem) for case, problem in values.pop("failures")]
            return Tally(**values, failures=failures), None
        case = int(Path(now.name).read_text() or work.first)
    how = f"the process ended with {process.returncode}"
    # What was done before it is lost with it; it counts again by being run again up to there.
    before = Work(loader=work.loader, first=work.first, count=case - work.first)
    tally = _run_process(before)[0] if before.count else Tally(loader=work.loader)
    tally.failures.append((case, how))
    return tally, case


def _watch(process: subprocess.Popen[bytes], now: Path, stop: threading.Event) -> None:
    """End a process of ours that has begun no new case for long."""
    seen, since = "", time.monotonic()
    while not stop.wait(1):
        text = now.read_text()
        if text != seen:
            seen, since = text, time.monotonic()
        elif time.monotonic() - since > SILENT:
            process.kill()


def _work(work: Work) -> int:
    """In a process of its own: run the cases, and write their tally to stdout."""
    keep = Path(sys.argv[sys.argv.index("--keep") + 1])
    with keep.open("r+b", buffering=0) as now:

        def began(case: int) -> None:
            now.seek(0)
            now.write(f"{case:012d}".encode())

        tally = run_cases(work.loader, work.first, work.count, began)
    print(json.dumps(dataclasses.asdict(tally)))
    return 0


def _add(total: Tally, more: Tally) -> None:
    total.loaded += more.loaded
    total.refused += more.refused
    total.seconds += more.seconds
    total.failures += more.failures
    if more.slowest > total.slowest:
        total.slowest, total.slowest_case = more.slowest, more.slowest_case


def _keep(folder: Path, name: str, case: int, problem: str) -> None:
    place = folder / f"{name}-{case}"
    write_case(LOADERS[name], case, place)
    (place / "what-happened.txt").write_text(problem, encoding="utf-8", errors="replace")


def _show(tallies: Sequence[Tally], seconds: float) -> None:
    table = Table(box=None)
    for name in ("loader", "cases", "loaded", "refused", "failed", "a case", "slowest"):
        table.add_column(name, justify="left" if name == "loader" else "right")
    for one in tallies:
        table.add_row(
            one.loader,
            f"{one.cases:,}",
            f"{one.loaded:,}",
            f"{one.refused:,}",
            f"{len(one.failures):,}",
            f"{1e3 * one.seconds / max(one.cases, 1):.1f} ms",
            f"{one.slowest:.2f} s (case {one.slowest_case})",
        )
    Console(width=100).print(table)
    cases, failed = sum(one.cases for one in tallies), sum(len(one.failures) for one in tallies)
    print(f"{cases:,} damaged files in {seconds:.0f} s, {failed:,} failed")


if __name__ == "__main__":
    sys.exit(main())
