"""Compiled blocks: the numbers of eager ones, one compilation per kind of block, and undo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from oomph.techniques.channels_last import channels_last
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.fp8_products import multiply_in_fp8
from oomph.techniques.recompute import recompute


class Block(nn.Module):
    """Two products, with a dropout that is a module and one that is a function."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).tanh(), self.dropout.p, self.training)
        return x + self.dropout(self.second(hidden))


class Compiler:
    """Stands in for the real one, which needs a C++ compiler: traces, and runs the ops eagerly."""

    def __init__(self) -> None:
        self.backend = CompileCounterWithBackend("aot_eager")
        self.options: list[Any] = []
        self._compile = torch.compile

    def __call__(self, forward: Any, *, dynamic: bool, options: Any) -> Any:
        self.options.append(options)
        return self._compile(forward, dynamic=dynamic, backend=self.backend)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    torch._dynamo.reset()
    stand_in = Compiler()
    monkeypatch.setattr(torch, "compile", stand_in)
    yield stand_in
    torch._dynamo.reset()


def chain(length: int, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(length)))


def gradients(model: nn.Module, rows: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, 8, requires_grad=True)
    out = model(x)
    out.square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found  # type: ignore[return-value]


KEEPS: list[tuple[str, ...] | None] = [None, (), ("product#0",)]


@pytest.mark.parametrize("keep", KEEPS, ids=["kept", "recomputed", "recomputed in part"])
def test_numbers_are_those_of_the_eager_block_with_dropout(
    compiler: Compiler, keep: tuple[str, ...] | None
) -> None:
    expected = gradients(chain(2, 0.5))
    model = chain(2, 0.5)
    for block in model:
        if keep is not None:
            recompute(block, keep, compiled=True)
        compile_block(block)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)
    assert compiler.backend.frame_count == 1


def test_dropout_draws_what_it_would_draw_eagerly(compiler: Compiler) -> None:
    """Wherever it is called: not every dropout is a module."""
    compile_block(Block())
    assert compiler.options == [{"fallback_random": True}]


def test_blocks_of_one_kind_are_compiled_once(compiler: Compiler) -> None:
    model = chain(5)
    for block in model:
        compile_block(block)
    gradients(model)
    assert compiler.backend.frame_count == 1


def test_so_are_blocks_with_convolutions_that_have_channels_last(compiler: Compiler) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)) for _ in range(5))
    )
    for block in model:
        for convolution in block:
            channels_last(convolution)
        compile_block(block)
    images = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    model(images.requires_grad_())
    assert compiler.backend.frame_count == 1


def test_and_blocks_that_multiply_in_fp8(compiler: Compiler) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(5))).bfloat16()
    for block in model:
        multiply_in_fp8(block[0])
        compile_block(block)
    model(torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True))
    assert compiler.backend.frame_count == 1


def test_many_ways_to_recompute_are_all_compiled(compiler: Compiler) -> None:
    """PyTorch gives up on a piece of code it has compiled 8 times; recompute is one for all."""
    model = chain(5)
    ways: list[tuple[str, ...]] = [(), ("product#0",), ("product#1",), ("product#0", "product#1")]
    for block, keep in zip(model, [*ways, ("product#0", "product#2")], strict=True):
        recompute(block, keep, compiled=True)
        compile_block(block)
    for rows in (4, 3):
        gradients(model, rows)
    assert compiler.backend.frame_count == 10


def test_undo_gives_back_the_forward_and_pytorchs_settings(compiler: Compiler) -> None:
    model = chain(2)
    limit = torch._dynamo.config.recompile_limit
    before = [dict(vars(block)) for block in model]
    undos = [compile_block(block) for block in model]
    assert all("forward" in vars(block) for block in model)
    for undo in reversed(undos):
        undo()
    assert [vars(block) for block in model] == before
    assert torch._dynamo.config.recompile_limit == limit
    gradients(model)
    assert compiler.backend.frame_count == 0


def test_the_real_compiler_knows_the_options() -> None:
    """It refuses those it does not know, before it compiles anything."""
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(Block().forward, options={"fallback_randoms": True})
    compile_block(Block())()
