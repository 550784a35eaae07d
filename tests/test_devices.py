"""Every tensor that oomph makes says where: a user's default device is for the user's own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/oomph"
FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones"}
FACTORIES |= {"rand", "randint", "randn", "randperm", "tensor", "zeros"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_a_new_tensor_says_where_it_is(path: Path) -> None:
    silent = [
        f"line {node.lineno}: torch.{node.func.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert not silent
