"""Small changes to source code, each of which a test should notice.

One mutation replaces one piece of an expression or statement: a comparison by another, a number by
the next one, `and` by `or`, a condition by its opposite, a statement by none. The text around it
stays as it is.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.Pow: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: Calls whose text or whose absence no test should care about.
_UNTESTED_CALLS = ("warning", "debug", "info", "append_note", "_log", "collect", "say")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A piece of a file and what stands there instead."""

    path: Path
    line: int
    start: int
    end: int
    """Where the piece begins and ends in the file's text, in characters."""
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The file's text with the change."""
        assert text[self.start : self.end] == self.old
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        old, new = (" ".join(one.split())[:60] for one in (self.old, self.new))
        return f"{self.path}:{self.line}: {old} → {new or 'nothing'}"


def find_mutations(path: Path, text: str) -> list[Mutation]:
    """All changes that are tried in a file, in the order of its text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        # `ast` counts columns in bytes.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node, new in _changes(ast.parse(text)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno, node.end_col_offset)
        old = text[start:end]
        found.append(Mutation(path=path, line=node.lineno, start=start, end=end, old=old, new=new))
    return sorted(found, key=lambda one: (one.start, one.end, one.new))


def choose(mutations: Sequence[Mutation], count: int, seed: int) -> list[Mutation]:
    """So many of them by chance, at most one in a line."""
    shuffled = list(mutations)
    random.Random(seed).shuffle(shuffled)
    by_line: dict[tuple[Path, int], Mutation] = {}
    for one in shuffled:
        by_line.setdefault((one.path, one.line), one)
        if len(by_line) == count:
            break
    return list(by_line.values())


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Pieces of a program and what to put in their place."""
    for node in _code(tree):
        if isinstance(node, ast.stmt):
            yield from _changes_of_statement(node)
        elif isinstance(node, ast.expr):
            yield from _changes_of_expression(node)


def _changes_of_expression(node: ast.expr) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield node, f"(({left}) {_COMPARISONS[type(node.ops[0])]} ({right}))"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(f'({ast.unparse(value)})' for value in node.values)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield node, f"(({left}) {_OPERATORS[type(node.op)]} ({right}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, str(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in _FUNCTIONS:
            yield node.func, _FUNCTIONS[node.func.id]
    elif isinstance(node, ast.IfExp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def _changes_of_statement(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.If | ast.While):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value is not None:
        if not isinstance(node.value, ast.Constant) and not _is_message(node.value):
            yield node, "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if not _is_untested(node.value):
            yield node, "pass"
    elif isinstance(node, ast.AugAssign | ast.Break | ast.Continue):
        yield node, "pass"


def _code(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that a program runs: no annotations, messages of errors or checks of itself."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef):
            waiting += [*node.body, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.ClassDef):
            waiting += node.body
        elif isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value is not None else []
        elif not _is_for_people(node):
            waiting += ast.iter_child_nodes(node)


def _is_for_people(node: ast.AST) -> bool:
    """Whether a node is a message, a check of the code itself, or an import for annotations."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr)


def _is_message(node: ast.expr) -> bool:
    """Whether an expression is nothing but text."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.BinOp) and _is_text(node))


def _is_text(node: ast.BinOp) -> bool:
    """Whether texts are joined, or types: what only people read."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant)]
    texts = any(isinstance(p, ast.JoinedStr) or isinstance(p.value, str) for p in parts)
    types = isinstance(node.op, ast.BitOr) and any(
        isinstance(part, ast.Name) and part.id in ("Tensor", "int", "float", "str", "None")
        for part in ast.walk(node)
    )
    return texts or types


def _is_untested(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    return name.endswith(_UNTESTED_CALLS)
