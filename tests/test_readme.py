"""The README's map of the code is true to the disk."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "oomph"


def tree_paths() -> set[Path]:
    """Every path of the README's annotated tree."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^```tree\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    paths: set[Path] = set()
    parents: list[Path] = [ROOT]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = parents[depth] / line.split()[0]
        parents[depth + 1 :] = [path]
        paths.add(path)
    return paths


def test_every_path_of_the_tree_exists() -> None:
    paths = tree_paths()
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not path.exists()] == []


def test_every_module_of_the_package_is_in_the_tree() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    packages = [path.parent for path in PACKAGE.rglob("__init__.py")]
    missing = {*modules, *packages, *PACKAGE.rglob("*.toml")} - tree_paths()
    assert sorted(str(path.relative_to(ROOT)) for path in missing) == []


def test_the_public_package_is_explained_by_its_own_init() -> None:
    assert PACKAGE / "__init__.py" in tree_paths()
