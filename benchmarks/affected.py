"""Which tests concern a module; `python -m benchmarks.affected [BASE]` prints those of changes.

Changed are the files that differ from BASE (a commit; the last one by default) or that git does not
track yet. Nearest to a module are the test files that mirror it, then those that import it, then
those that import what imports it. `make check` runs the nearest ones and leaves what a change
reaches beyond them to `make test`.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: A module that half of all tests import is left to `make test`.
MOST = 6

_IMPORT = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+([\w.]+)(?:[ \t]+import[ \t]+(\([^)]*\)|.*))?", re.MULTILINE
)


def changed_files(base: str) -> list[str]:
    """The paths that differ from a commit, and those that are new."""
    git = ("git", "-C", str(ROOT))
    commands = (
        (*git, "diff", "--name-only", base),
        (*git, "ls-files", "--others", "--exclude-standard"),
    )
    found: list[str] = []
    for command in commands:
        found += subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return found


def affected(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files that concern these paths."""
    tests = _tests(root)
    found: set[Path] = set()
    for name in changed:
        path = root / name
        if path in tests:
            found.add(path)
        elif name.startswith("src/oomph/") and path.suffix == ".py" and path.exists():
            far = distances(path, root)
            nearest = [test for test in far if far[test] == min(far.values())]
            found.update(nearest if len(nearest) <= MOST else [])
        elif path.suffix == ".md":
            found.update(test for test in tests if test.name in ("test_docs.py", "test_readme.py"))
    return sorted(str(path.relative_to(root)) for path in found if path.exists())


def distances(module: Path, root: Path = ROOT) -> dict[Path, int]:
    """The test files that concern a module: how many imports away; 0 for those that mirror it."""
    found = dict.fromkeys(_mirrors(module, root), 0)
    importers = _importers(root)
    seen, reached, distance = {module, *found}, {module}, 0
    while reached:
        distance += 1
        reached = {user for path in reached for user in importers.get(path, ())} - seen
        seen |= reached
        found.update(dict.fromkeys(reached & _tests(root), distance))
    return found


def nearest_first(module: Path, root: Path = ROOT) -> list[Path]:
    """The same: first those that mirror it, then near ones that share many seldom words with it."""
    here = root / "tests" / module.relative_to(root / "src" / "oomph").parts[0]
    words, uses, far = _words(module), _uses_of_words(root), distances(module, root)

    def likeness(test: Path) -> float:
        shared = [math.log(len(_tests(root)) / uses[word]) ** 2 for word in words & _words(test)]
        return (2 if here in test.parents else 1) * sum(shared) / math.sqrt(len(_words(test)))

    def order(test: Path) -> tuple[bool, float, Path]:
        return far[test] > 0, -likeness(test) / far[test] if far[test] else 0.0, test

    return sorted(far, key=order)


@cache
def _tests(root: Path) -> frozenset[Path]:
    found = (root / "tests").rglob("test_*.py")
    return frozenset(path for path in found if "gpu" not in path.parts)


def _mirrors(module: Path, root: Path) -> list[Path]:
    """`tests/rehearsal/test_allocator_pool.py` mirrors `rehearsal/allocator/pool.py`, and so on."""
    *folders, stem = module.relative_to(root / "src" / "oomph").with_suffix("").parts
    if not folders:
        names = [f"test_{stem}"]
    else:
        inner = folders[1:]
        names = [f"test_{'_'.join([*inner, stem])}", f"test_{stem}", *(f"test_{n}" for n in inner)]
    folder, tests = root.joinpath("tests", *folders[:1]), _tests(root)
    for name in names:
        if folder / f"{name}.py" in tests:
            longer = [test for test in tests if test.name.startswith(f"{name}_")]
            return [folder / f"{name}.py", *sorted(t for t in longer if t.parent == folder)]
    return []


@cache
def _importers(root: Path) -> dict[Path, set[Path]]:
    """By a file of the package or a helper of tests: the files that import it."""
    source, tests = root / "src", root / "tests"
    by_name: dict[str, Path] = {path.stem: path for path in tests.rglob("*.py")}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[Path, set[Path]] = {}
    for path in by_name.values():
        for name, taken in _IMPORT.findall(path.read_text(encoding="utf-8")):
            for one in (name, *(f"{name}.{part}" for part in re.findall(r"\w+", taken))):
                if one in by_name:
                    found.setdefault(by_name[one], set()).add(path)
    return found


@cache
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall("[a-z]{3,}", path.read_text(encoding="utf-8").lower()))


@cache
def _uses_of_words(root: Path) -> Counter[str]:
    """By a word: in how many test files it is."""
    return Counter(word for test in _tests(root) for word in _words(test))


if __name__ == "__main__":
    print("\n".join(affected(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))))
