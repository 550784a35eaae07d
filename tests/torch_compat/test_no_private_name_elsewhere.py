"""Private names of PyTorch are used in `oomph.torch_compat` alone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listed_names import NAMES
from torch import nn
from torch.utils.data import DataLoader

from oomph.torch_compat.operators import OPS

PACKAGE = Path(__file__).parent.parent.parent / "src" / "oomph"
COMPAT = PACKAGE / "torch_compat"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def private_attributes() -> frozenset[str]:
    """Private attributes of what PyTorch's classes make, as they are in this version."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight])
    loader = DataLoader([1])
    things: list[Any] = [
        weight,
        weight.data,
        weight.exp().grad_fn,
        weight.untyped_storage(),
        nn.Linear(1, 1),
        nn.LSTM(1, 1),
        nn.MultiheadAttention(1, 1),
        torch.compile(nn.Linear(1, 1)),
        torch.fx.symbolic_trace(nn.Linear(1, 1)),
        optimizer,
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.amp.GradScaler("cpu"),
        torch.Generator(),
        torch.ops.aten.add.Tensor,
        torch.autograd.Function,
        torch.TypedStorage,
        torch.overrides.TorchFunctionMode,
        torch.utils._python_dispatch.TorchDispatchMode,
        torch._subclasses.FakeTensor,
        torch._subclasses.FakeTensorMode,
        torch.cuda.Stream,
        torch.cuda.Event,
        torch.cuda.CUDAGraph,
        loader,
        iter(loader),
    ]
    found = {name for thing in things for name in dir(thing)}
    listed = {part for name in NAMES for part in name.path.split(".")[1:]}
    return frozenset(filter(is_private, found | listed))


class Finder(ast.NodeVisitor):
    """Finds the private names of PyTorch in a file."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []
        self._torchs: set[str] = set()  # names that stand for something of torch
        self._own = {name for node in ast.walk(tree) for name in _defined(node)}
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._torchs.add(alias.asname or "torch")
                self._note(node, alias.name, is_private(alias.name))
                self._note(node, alias.name, any(map(is_private, alias.name.split("."))))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = (node.module or "").split(".")
        if node.level or parts[0] != "torch":
            return
        for alias in node.names:
            self._torchs.add(alias.asname or alias.name)
            names = [*parts, alias.name]
            self._note(node, ".".join(names), any(map(is_private, names)))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = _chain(node)
        root, *names = chain or ("", node.attr)
        if root == "aten" or chain[:3] == ["torch", "ops", "aten"]:
            op = next(filter(is_private, names), None)
            self._note(node, f"aten.{op}", op is not None and op not in OPS)
            return
        if root in self._torchs:
            self._note(node, ".".join(chain), any(map(is_private, names)))
            return
        is_torchs = node.attr in private_attributes() and node.attr not in self._own
        self._note(node, f"….{node.attr}", is_torchs)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if not isinstance(text, str) or text in self._own:
            return
        listed = any(text in name.path.split(".") for name in NAMES)
        # Ops are told apart by their names, which some methods of tensors share.
        is_attribute = text in private_attributes() and (
            listed or not hasattr(torch.ops.aten, text)
        )
        is_path = re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", text) is not None
        self._note(node, repr(text), is_attribute or is_path)

    def _note(self, node: ast.expr | ast.stmt, name: str, is_found: bool) -> None:
        if is_found and (node.lineno, name) not in self.found:
            self.found.append((node.lineno, name))


def _chain(node: ast.expr) -> list[str]:
    """`a.b.c` as its three names; none where it begins with something else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return [*before, node.attr] if before else []
    return []


def _defined(node: ast.AST) -> Iterator[str]:
    """What a class or a file defines under a name of its own."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    ):
        yield node.attr


def found_in(source: str) -> list[str]:
    return [name for _, name in Finder(ast.parse(source)).found]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import TensorBase",
        "from torch import _foreach_copy_",
        "from torch.optim.optimizer import _get_scalar_dtype",
        "import torch\ntorch._C._current_autograd_node()",
        "import torch\ntorch.utils._pytree.tree_map(f, x)",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
        "from torch.nn.modules import module as every\nevery._global_forward_hooks",
        "x = tensor._version",
        "for m in model.modules(): m._forward_hooks.clear()",
        "optimizer._opt_called = True",
        "storages[0].untyped_storage()._cdata",
        "scheduler._step_count",
        'getattr(module, "_compiled_call_impl", None)',
        'modules = ["torch.utils._triton"]',
        "aten._no_such_op.default",
        "import torch\ntorch.ops.aten._no_such_op",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert len(found_in(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.functional.linear(x, w)",
        "import torch\ntorch.ops.aten._to_copy.default",
        "aten._log_softmax.default",
        "class A:\n def __init__(self): self._version = 1\n def f(self, a): return a._version",
        'f"{name}_scale"',
        '"`torch._C` is private"',
        'rule("_euclidean_dist")',
        "x.__class__.__name__",
        "from oomph.torch_compat.pytree import tree_map",
    ],
)
def test_other_names_are_not(source: str) -> None:
    assert found_in(source) == []


def test_private_names_of_torch_are_used_in_torch_compat_alone() -> None:
    found = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if COMPAT not in file.parents
        for line, name in Finder(ast.parse(file.read_text(encoding="utf-8"))).found
    ]
    assert found == [], "take these from oomph.torch_compat (see CONTRIBUTING):\n" + "\n".join(
        found
    )


def test_torch_compat_imports_nothing_else_of_oomph() -> None:
    imported = {
        (file.name, module)
        for file in COMPAT.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for module in _imports(node)
        if module.split(".")[0] == "oomph" and not module.startswith("oomph.torch_compat")
    }
    assert imported == set()


def test_every_private_name_in_torch_compat_is_listed() -> None:
    said = " ".join(f"{name.path} {name.used_for}" for name in NAMES)
    listed = set(re.findall(r"\b_\w+", said))
    missing = [
        f"{file.name}: {part}"
        for file in sorted(COMPAT.glob("*.py"))
        for _, name in Finder(ast.parse(file.read_text(encoding="utf-8"))).found
        for part in filter(is_private, re.findall(r"\b_\w+", name))
        if part not in listed
    ]
    assert missing == []


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
