"""Whether tests notice small changes to the code: `python -m benchmarks.mutants`.

First the tests of the packages run once, and it is kept which test runs which line (`--map FILE`).
Then each mutant, a copy of the package with one mutation, is held against the tests that run its
line, those in the file that mirrors it first, then the quickest, until one fails. Mutants are
chosen by a seed; what survives is printed with its place.

    python -m benchmarks.mutants [PACKAGE …] [--count 200] [--seed 1] [--seconds 60] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutations import Mutation, choose, find_mutations

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "oomph"
PACKAGES = ("search", "techniques", "engine", "runs", "rehearsal", "splitting")
#: A mutant that hangs is noticed.
_PATIENCE = 4.0
_FAILED, _NO_TESTS = 1, 5


@dataclass(frozen=True, kw_only=True)
class TestMap:
    """Which tests run which lines, and how long each takes."""

    seconds: dict[str, float]
    """By the test's id; of tests that pass."""
    lines: dict[str, dict[str, list[str]]]
    """By a file's path under `src/oomph` and a line: the tests."""

    def tests_of(self, mutation: Mutation, seconds: float) -> list[str]:
        """The tests that are to notice it, as many as take so many seconds."""
        name = mutation.path.as_posix()
        lines = self.lines.get(name, {})
        # What runs when a module is imported is in no test's lines.
        found = lines.get(str(mutation.line)) or sorted({t for ts in lines.values() for t in ts})
        mirror = f"tests/{name.removesuffix('.py')}".replace(
            mutation.path.stem, f"test_{mutation.path.stem}"
        )
        found.sort(key=lambda test: (not test.startswith(mirror), self.seconds[test]))
        chosen: list[str] = []
        taken = 0.0
        for test in found:
            if chosen and taken + self.seconds[test] > seconds:
                continue
            chosen.append(test)
            taken += self.seconds[test]
        return chosen


class _Recorder:
    """A plugin of pytest: tells coverage which test runs, and keeps how it went."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


def make_map(packages: Iterable[str], path: Path) -> None:
    """Run the tests of these packages and keep which lines each of them runs."""
    import coverage

    measured = coverage.Coverage(data_file=None, source=[str(SOURCE)])
    recorder = _Recorder(measured)
    measured.start()
    folders = [f"tests/{package}" for package in packages]
    pytest.main(["-q", "-p", "no:cacheprovider", *folders], plugins=[recorder])
    measured.stop()
    data = measured.get_data()
    passed = {t: s for t, s in recorder.seconds.items() if t not in recorder.failed}
    lines = {
        Path(file).relative_to(SOURCE).as_posix(): {
            str(line): [test for test in tests if test in passed]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    path.write_text(json.dumps({"seconds": passed, "lines": lines}), encoding="utf-8")


def _read_map(path: Path) -> TestMap:
    return TestMap(**json.loads(path.read_text(encoding="utf-8")))


def _try(mutation: Mutation, tests: list[str], seconds: float) -> str:
    """What became of a mutant: killed, survived, untested."""
    if not tests:
        return "untested"
    with tempfile.TemporaryDirectory(prefix="oomph-mutant-") as folder:
        copy = Path(folder) / "oomph"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / mutation.path
        text = mutation.apply(file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
        asked = Path(folder) / "tests.txt"
        asked.write_text("\n".join(tests), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(
                [*command, f"@{asked}"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                timeout=60 + _PATIENCE * seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "killed"
    assert ended.returncode != _NO_TESTS, ended.stdout.decode()[-1000:]
    return "survived" if ended.returncode == 0 else "killed"


def main(words: Iterable[str] | None = None) -> None:
    """Make the map where there is none, try the mutants, print what survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of tests for a mutant")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutants.json")
    parser.add_argument("--out", type=Path, help="where results are added as JSON lines")
    options = parser.parse_args(None if words is None else list(words))
    if not options.map.exists():
        options.map.parent.mkdir(parents=True, exist_ok=True)
        make_map(options.packages, options.map)
    tests = _read_map(options.map)
    files = [path for name in options.packages for path in sorted((SOURCE / name).rglob("*.py"))]
    mutations = [
        one
        for path in files
        for one in find_mutations(path.relative_to(SOURCE), path.read_text(encoding="utf-8"))
    ]
    chosen = choose(mutations, options.count, options.seed)
    print(f"{len(chosen)} of {len(mutations)} mutants of {len(files)} files", flush=True)
    counts: dict[str, int] = {}

    def one(mutation: Mutation) -> tuple[Mutation, str, float]:
        began = time.monotonic()
        asked = tests.tests_of(mutation, options.seconds)
        return mutation, _try(mutation, asked, options.seconds), time.monotonic() - began

    with ThreadPoolExecutor(options.jobs) as pool:
        for at, (mutation, status, took) in enumerate(pool.map(one, chosen)):
            counts[status] = counts.get(status, 0) + 1
            print(f"{at + 1}/{len(chosen)} {status:9} {mutation} ({took:.0f} s)", flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as out:
                    print(json.dumps({"mutation": str(mutation), "status": status}), file=out)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
