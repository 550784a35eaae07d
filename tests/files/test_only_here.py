"""No other part of oomph opens, parses or makes files by itself."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "src" / "oomph"

#: Calls that read or make a file past `oomph.files`, by attribute or name.
CALLS = {
    "json": {"load", "loads"},
    "tomllib": {"load", "loads"},
    "pickle": {"load", "loads", "Unpickler"},
    "torch": {"load"},
    "gzip": {"open"},
    "os": {"open", "mkdir", "makedirs"},
    "": {"open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "touch"},
}

#: Who does so all the same, and why no stranger's file comes there.
WITH_REASON = {
    "files/plain_json.py": "it is the parser",
    "files/plain_toml.py": "it is the parser",
    "files/reading.py": "it is what opens",
    "files/writing.py": "it is what makes",
    "cli/app.py": "/dev/null",
    "explaining/watching.py": "a logbook that is no file",
    "hardware/measuring.py": "a private folder, and /proc",
    "memory/limits.py": "/proc and /sys",
    "memory/scratch_file.py": "a file with no name",
    "hardware/prices.py": "the package's own table",
    "search/second_process.py": "pipes to a fork of this process, and /proc",
    "rehearsal/checkpoints.py": "the user's script opens them, and is run",
    "rehearsal/files.py": "the user's script opens them, and is run",
    "rehearsal/hidden.py": "the package's own table",
    "rehearsal/script.py": "the user's script, which is run",
    "runs/checkpoint_folder.py": "a private folder in it, and its names",
    "splitting/rules/registry.py": "the package's own table",
}


def calls_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        owner, name = "", ""
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        elif isinstance(node.func, ast.Name):
            name = node.func.id
        if name in CALLS.get(owner, set()) | CALLS[""] and "resources" not in ast.dump(node.func):
            found.add(f"{owner}.{name}")
    return found


def test_files_are_read_and_made_in_one_place() -> None:
    others = {
        name: calls
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()) not in WITH_REASON
        and (calls := calls_of(path))
    }
    assert others == {}


def test_no_reason_is_left_over() -> None:
    assert [name for name in WITH_REASON if not calls_of(PACKAGE / name)] == []
