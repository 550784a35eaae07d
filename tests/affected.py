"""Which test files concern what has changed: `python tests/affected.py [BASE]` prints their paths.

Changed are the files that differ from BASE (a commit; the last one by default) or that git does not
track yet. A changed module concerns the test file that mirrors it, and where there is none, the
test files that import it. What a change reaches beyond that is left to `make test`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: A module that half of all tests import is left to `make test`.
MOST = 6


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
    tests = sorted(path for path in (root / "tests").rglob("test_*.py") if "gpu" not in path.parts)
    found: set[Path] = set()
    for name in changed:
        path = root / name
        if path in tests:
            found.add(path)
        elif name.startswith("src/oomph/") and path.suffix == ".py":
            found.update(_tests_of(path.relative_to(root / "src"), tests, root))
        elif path.suffix == ".md":
            found.update(test for test in tests if test.name in ("test_docs.py", "test_readme.py"))
    return sorted(str(path.relative_to(root)) for path in found if path.exists())


def _tests_of(module: Path, tests: list[Path], root: Path) -> list[Path]:
    mirror = root / "tests" / Path(*module.parts[1:-1]) / f"test_{module.name}"
    if mirror in tests:
        return [mirror]
    name = ".".join(module.with_suffix("").parts)
    using = [test for test in tests if f"from {name} import" in test.read_text(encoding="utf-8")]
    return using if len(using) <= MOST else []


if __name__ == "__main__":
    print("\n".join(affected(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))))
