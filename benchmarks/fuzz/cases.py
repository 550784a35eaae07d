"""Cases, one after the other: each ends loaded or refused, in time and in bounds, or it failed."""

from __future__ import annotations

import contextlib
import logging
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.loaders import LOADERS, Loader
from oomph.errors import OomphError

#: A case may take so many seconds of this process's time, and so many bytes more than before it.
MOST_SECONDS = 5.0
MOST_MEMORY = 1 << 30


class TookTooLong(BaseException):
    """No error of the loader's own, so that nothing in it takes it for one."""


@dataclass(kw_only=True)
class Tally:
    """How the cases of one loader ended."""

    loader: str
    loaded: int = 0
    refused: int = 0
    slowest: float = 0.0
    slowest_case: int = -1
    seconds: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Cases, and what happened."""

    @property
    def cases(self) -> int:
        """All of them."""
        return self.loaded + self.refused + len(self.failures)


def run_cases(
    name: str, first: int, count: int, began: Callable[[int], object] = lambda _: None
) -> Tally:
    """Cases of one loader, by their numbers; `began` is told of each."""
    loader, tally = LOADERS[name], Tally(loader=name)
    with tempfile.TemporaryDirectory(prefix="oomph-fuzz-") as place, _interrupted():
        for case in range(first, first + count):
            began(case)
            folder = Path(place, "case")
            write_case(loader, case, folder)
            start, before = time.process_time(), _most_memory()
            problem = _run(loader, folder, tally)
            took = time.process_time() - start
            if not problem and _most_memory() - before > MOST_MEMORY:
                problem = "it took more than a GiB of memory"
            if problem:
                tally.failures.append((case, problem))
            tally.seconds += took
            if took > tally.slowest:
                tally.slowest, tally.slowest_case = took, case
            shutil.rmtree(folder)
    return tally


def write_case(loader: Loader, case: int, folder: Path) -> None:
    """The damaged files of a case."""
    rng = random.Random(f"{loader.name} {case}")
    for name, content in loader.damaged(rng).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _run(loader: Loader, folder: Path, tally: Tally) -> str:
    """What went wrong; empty where nothing did."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        loader.use(folder)
        tally.loaded += 1
    except OomphError as error:
        problem = _is_bad(str(error))
        tally.refused += not problem
        return problem
    except (Exception, TookTooLong) as error:
        lines = "".join(traceback.format_exception(error, limit=-6))
        return f"{type(error).__name__}: {str(error)[:200]}\n{lines[-3000:]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return ""


def _is_bad(words: str) -> str:
    """A refusal says something, in words that a terminal can show."""
    if not words.strip() or len(words) > 5_000:
        return f"a refusal of {len(words)} characters"
    try:
        words.encode()
    except UnicodeEncodeError:
        return f"a refusal that cannot be printed: {words!r}"
    return ""


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    """In silence, too: some files are answered with a warning each."""

    def too_long(*_: Any) -> None:
        raise TookTooLong(f"more than {MOST_SECONDS:g} s")

    before, silenced = signal.signal(signal.SIGVTALRM, too_long), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(silenced)
        signal.signal(signal.SIGVTALRM, before)


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
