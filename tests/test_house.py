"""No function is longer than 80 lines, and no class has more than 15 public methods.

How complex a function may be is ruff's to check (`C901`), and which package imports which is
import-linter's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "oomph"

MOST_LINES = 80
MOST_METHODS = 15

#: Classes with more methods, and why.
LARGER = {
    "rehearsal/recorder.py Recorder": "every hook of a rehearsal reports to it",
    "runs/run.py Run": "what users call: step, evaluate, save, load, undo and what a run tells",
    "techniques/host_state.py HostState": "to come apart with the optimizer that it serves",
    "techniques/streamed_weights.py StreamedWeights": "to come apart",
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """Every function and class of the package, by its file and its name with those around it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        waiting: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text(encoding="utf-8")))]
        while waiting:
            around, node = waiting.pop()
            for child in ast.iter_child_nodes(node):
                name = around
                if isinstance(child, (*Definition.__args__, ast.ClassDef)):
                    name = f"{around}.{child.name}".lstrip(".")
                    yield f"{path.relative_to(PACKAGE).as_posix()} {name}", child
                waiting.append((name, child))


def test_functions_are_short() -> None:
    longer = {
        name
        for name, node in definitions()
        if isinstance(node, Definition) and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    }
    assert longer == set()


def test_classes_have_few_public_methods() -> None:
    larger = {
        name
        for name, node in definitions()
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(one, Definition) and one.name[0] != "_" for one in node.body)
        > MOST_METHODS
    }
    assert larger == set(LARGER)
