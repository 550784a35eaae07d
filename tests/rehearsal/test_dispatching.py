"""Replaced kernels: PyTorch's tracer sees them while they last, and only then."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.dispatching import replaced_kernels
from oomph.rehearsal.phases import rehearse


class Block(nn.Module):
    """What a rehearsal replaces: a product and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.product(x).tanh(), 0.5)


def rehearse_compiled() -> list[tuple[int, int, int | None]]:
    """The memory of a rehearsed step with a compiled block: sizes, births and deaths."""
    job = Job(
        lambda: nn.Sequential(Block()), nn.MSELoss(), "sgd", (torch.ones(4, 8), torch.ones(4, 8))
    )
    choices = Choices(blocks={"0": "keep"}, compiled=True)
    timeline = rehearse(job, find_gpu("h200"), choices=choices)
    return [(block.size, block.birth, block.death) for block in timeline.blocks]


def gradient(block: nn.Module) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    block(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_block_compiled_after_a_rehearsal_has_its_gradients() -> None:
    torch._dynamo.reset()
    rehearse_compiled()
    block = Block()
    compiled = torch.compile(block, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(gradient(compiled), gradient(block), rtol=0, atol=0)
    torch._dynamo.reset()


def test_a_block_compiled_before_a_rehearsal_changes_nothing_in_it() -> None:
    expected = rehearse_compiled()
    torch._dynamo.reset()
    gradient(torch.compile(Block(), backend="aot_eager", dynamic=False))
    assert rehearse_compiled() == expected
    torch._dynamo.reset()


def test_afterwards_the_kernel_is_the_old_one() -> None:
    x = torch.ones(2)
    with replaced_kernels() as replace:
        replace("tanh", lambda x: x + 41, "CPU")
        assert torch.tanh(x).tolist() == [42, 42]
    assert torch.tanh(x).tolist() == torch.ones(2).double().tanh().float().tolist()


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "quantile": lambda x: torch.quantile(x, x.new_tensor([0.5])),
    "linalg_inv": torch.linalg.inv,
    "exp": torch.exp,
    "softmax.int": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (2,)),
    "linear": lambda x: F.linear(x, x),
    "dropout": lambda x: F.dropout(x, 0.5),
    "tanh": torch.tanh,
}
#: Of each kind: cast on the CPU alone and passed on, passed on by the CPU, taken apart by PyTorch's
#: tracer, taken apart in C++, with a kernel for the CPU.
REPLACED = [
    ("cat", "AutocastCPU"),
    ("stack", "AutocastCPU"),
    ("exp", "AutocastCPU"),
    ("softmax.int", "AutocastCPU"),
    ("layer_norm", "AutocastCPU"),
    ("linear", "AutogradCPU"),
    ("dropout", "AutogradCPU"),
    ("softmax.int", "CPU"),
    ("tanh", "CPU"),
]


class Ran(TorchDispatchMode):
    """Writes down which ops run in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def run_op(
    name: str, *, traced: bool, autocast: bool = True, inference: bool = False
) -> tuple[list[str], list[Any]]:
    """What runs for an op, and its result; `traced` as PyTorch's tracer would have it."""
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        x = torch.eye(2, requires_grad=not inference)
        with (
            Ran() as ran,
            enable_python_dispatcher() if traced else contextlib.nullcontext(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            result = OPS[name](x)
    return ran.ops, result.tolist()


@pytest.mark.parametrize("traced", [False, True], ids=["run", "traced"])
@pytest.mark.parametrize("name", ["cat", "stack", "quantile", "linalg_inv"])
def test_autocast_that_does_nothing_leads_to_the_next_kernel(name: str, traced: bool) -> None:
    expected = run_op(name, traced=traced, autocast=False)
    with replaced_kernels() as replace:
        replace(name, None, "AutocastCPU")
        assert run_op(name, traced=traced) == expected


@pytest.mark.parametrize("traced", [False, True], ids=["run", "traced"])
@pytest.mark.parametrize(("name", "key"), REPLACED)
def test_another_thread_runs_and_traces_what_it_would(name: str, key: str, traced: bool) -> None:
    look = functools.partial(run_op, name, traced=traced, inference=key == "CPU")
    expected = look()
    with ThreadPoolExecutor(1) as pool:
        with replaced_kernels() as replace:
            replace(name, lambda *_, **__: torch.zeros(2), key)
            assert pool.submit(look).result() == expected
            assert look() != expected
            with replaced_kernels() as again:  # inside of the other
                again(name, lambda *_, **__: torch.zeros(2), key)
                assert pool.submit(look).result() == expected
            assert pool.submit(look).result() == expected
        assert pool.submit(look).result() == expected
    assert look() == expected


@pytest.mark.parametrize(("name", "key"), REPLACED)
def test_a_replacement_inside_of_another_ends_with_it(name: str, key: str) -> None:
    def found() -> Any:
        return run_op(name, traced=False, inference=key == "CPU")[1]

    with replaced_kernels() as replace:
        replace(name, lambda *_, **__: torch.ones(1), key)
        with replaced_kernels() as again:
            again(name, lambda *_, **__: torch.zeros(1), key)
            assert found() == [0]
        assert found() == [1]
