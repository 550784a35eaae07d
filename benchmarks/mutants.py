"""Whether tests notice small changes to the code: `python -m benchmarks.mutants`.

Each mutant is a copy of the package with one mutation. It is held against the test files that
mirror its file, and if they pass, against ever more distant ones (`affected.py`), in each file the
quickest first, until a test fails or `--seconds` of the processor's time are over. Mutants are
chosen by a seed. With `--out FILE` each result is a line of JSON; a run with the same file leaves
out what was killed, and tries again, last, what survived. At the end, the tests that failed run on
the package as it is, where each has to pass.

    python -m benchmarks.mutants [PACKAGE …] [--count 200] [--seed 1] [--seconds 60]

All runs are forks of a process that has imported torch, which Linux and macOS have. They come one
after the other: to use more cores, start more runs, each with a seed of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

from benchmarks.affected import ROOT, nearest_first
from benchmarks.mutations import Mutation, choose, find_mutations

SOURCE = ROOT / "src" / "oomph"
PACKAGES = ("search", "techniques", "engine", "runs", "rehearsal", "splitting")
#: How many test files run in one process.
_AT_ONCE = 4
#: A mutant may take so many times its seconds before it counts as one that hangs.
_PATIENCE = 6.0
#: What takes long to import, so that no mutant has to.
_IMPORTED_ONCE = (
    "hypothesis",
    "scipy.optimize",
    "torch._inductor.compile_fx",
    "transformers.modeling_utils",
)
#: By a test: how many seconds it took when it passed, as far as it ever ran here.
_KNOWN = ROOT / "build" / "test_seconds.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a mutant."""

    mutation: str
    status: str
    """`killed`, `survived`, or `untested` if no test ran."""
    by: str
    """The test that failed."""
    tests: int
    seconds: float


@dataclass(kw_only=True, eq=False)
class Ran:
    """A plugin of pytest: orders tests, ends in time, and keeps what passed and what failed."""

    known: dict[str, float]
    limit: float
    """Seconds of this process: those of a clock would depend on what else the machine does."""
    used: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Test files stay in order; in each, the quickest tests are first."""
        files = list(dict.fromkeys(item.path for item in items))
        items.sort(key=lambda item: (files.index(item.path), self.known.get(item.nodeid, 0.0)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave out what would take longer than there is time."""
        self.used = _used()
        if self.used + self.known.get(item.nodeid, 0.0) > self.limit:
            pytest.skip("there is no time")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.seconds[report.nodeid] = _used() - self.used
        if report.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = report.nodeid


def run_tests(tests: Iterable[str], package: Path, known: dict[str, float], limit: float) -> Ran:
    """Run tests of a package, given the folder it is in, until one fails or time is over."""
    tests = list(tests)
    with tempfile.TemporaryDirectory(prefix="oomph-tests-") as folder:
        out = Path(folder) / "ran.json"
        child = multiprocessing.get_context("fork").Process(
            target=_run_here, args=(tests, package, known, limit, out)
        )
        child.start()
        child.join(_PATIENCE * limit + 60)
        if child.is_alive():
            assert child.pid is not None
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
        ran = Ran(known=known, limit=limit)
        if out.exists():
            ran.used, ran.seconds, ran.failed = json.loads(out.read_text(encoding="utf-8"))
        else:
            ran.failed = f"the process of {', '.join(tests)} ended with {child.exitcode}"
        return ran


def _run_here(
    tests: list[str], package: Path, known: dict[str, float], limit: float, out: Path
) -> None:
    os.setsid()
    with (out.parent / "printed.txt").open("w", encoding="utf-8") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(package)
    sys.path.insert(0, str(package))
    ran = Ran(known=known, limit=limit)
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    ended = pytest.main([*options, *tests], plugins=[ran])
    if not ran.failed and ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        ran.failed = f"pytest ended with {ended!r}"
    out.write_text(json.dumps([_used(), ran.seconds, ran.failed]), encoding="utf-8")
    # What a broken package left running must not hold the end up.
    os._exit(0)


def try_mutation(mutation: Mutation, seconds: float) -> tuple[Result, dict[str, float]]:
    """What became of a mutant, and the seconds of the tests that passed."""
    known = _known_seconds()
    passed: dict[str, float] = {}
    used, failed = 0.0, ""
    with tempfile.TemporaryDirectory(prefix="oomph-mutant-") as folder:
        # With its compiled files, which hold for all modules but the mutated one. One that another
        # process is writing has a longer name until it is whole.
        ignored = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(SOURCE, Path(folder) / "oomph", ignore=ignored)
        file = Path(folder, "oomph", mutation.path)
        text = mutation.apply(file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
        for files in _groups(SOURCE / mutation.path):
            if failed or used >= seconds:
                break
            ran = run_tests(files, Path(folder), known, seconds - used)
            used, failed = used + ran.used, ran.failed
            # A test that only fails after others, which ran in another order here, notices nothing.
            if failed and not (alone := run_tests([failed], Path(folder), {}, seconds)).failed:
                used, failed = used + alone.used, ""
            passed.update(ran.seconds)
    status = "killed" if failed else "survived" if passed else "untested"
    tests, took = len(passed) + bool(failed), round(used, 1)
    result = Result(mutation=str(mutation), status=status, by=failed, tests=tests, seconds=took)
    return result, passed


def _groups(module: Path) -> list[Sequence[str]]:
    """The test files that may notice a change, those that run together."""
    names = [str(path.relative_to(ROOT)) for path in nearest_first(module)]
    return [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]


def _used() -> float:
    """Seconds that the processor worked for this process and for those it waited for."""
    return sum(os.times()[:4])


def _known_seconds() -> dict[str, float]:
    return json.loads(_KNOWN.read_text(encoding="utf-8")) if _KNOWN.exists() else {}


def _remember(passed: dict[str, float]) -> None:
    _KNOWN.parent.mkdir(exist_ok=True)
    part = _KNOWN.with_suffix(f".{os.getpid()}")  # a run beside this one may be reading
    part.write_text(json.dumps({**_known_seconds(), **passed}), encoding="utf-8")
    part.replace(_KNOWN)


def main(words: Iterable[str] | None = None) -> None:
    """Try the mutants that have no result yet, print what became of each, and count them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for a mutant")
    parser.add_argument("--out", type=Path, help="where results are, and are added, as JSON lines")
    options = parser.parse_args(None if words is None else list(words))
    files = [path for name in options.packages for path in sorted((SOURCE / name).rglob("*.py"))]
    mutations = [
        one
        for path in files
        for one in find_mutations(path.relative_to(SOURCE), path.read_text(encoding="utf-8"))
    ]
    chosen = choose(mutations, options.count, options.seed)
    print(f"{len(chosen)} of {len(mutations)} mutants of {len(files)} files", flush=True)
    results = _earlier(options.out)
    waiting = [one for one in chosen if str(one) not in results]
    waiting += [one for one in chosen if str(one) in results and not results[str(one)].by]
    # Compile everything once, and not in each copy.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(SOURCE)], check=True)
    torch.set_num_threads(1)
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    for one in waiting:
        result, passed = try_mutation(one, options.seconds)
        results[result.mutation] = result
        _remember(passed)
        print(f"{len(results)}/{len(chosen)} {_as_line(result)}", flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as out:
                print(json.dumps(asdict(result)), file=out)
    _print_end([results[str(one)] for one in chosen])


def _earlier(out: Path | None) -> dict[str, Result]:
    if out is None or not out.exists():
        return {}
    lines = out.read_text(encoding="utf-8").splitlines()
    return {one.mutation: one for one in (Result(**json.loads(line)) for line in lines)}


def _as_line(result: Result) -> str:
    by = f"by {result.by}" if result.by else f"{result.tests} tests pass"
    return f"{result.status:9} {result.mutation} ({result.seconds:.0f} s, {by})"


def _print_end(results: list[Result]) -> None:
    """The tests that fail on the package as it is, what survived, and how many."""
    failed = sorted({result.by for result in results if "::" in result.by})
    while failed:
        ran = run_tests(failed, SOURCE.parent, {}, 3600)
        if ran.failed:
            print(f"fails without a mutation, too: {ran.failed}", flush=True)
        failed = [one for one in failed if ran.failed and one not in (*ran.seconds, ran.failed)]
    for result in results:
        if result.status != "killed":
            print(_as_line(result))
    counts = Counter(result.status for result in results)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
