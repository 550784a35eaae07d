"""The second run of a recomputed forward is compared with the first, op by op."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import NotRepeatable
from oomph.techniques.recompute import recompute


class Hidden:
    """Holds what cannot be seen from outside: memory of C."""

    def __init__(self) -> None:
        self._calls = ctypes.c_int(0)
        self._table = ctypes.py_object(None)

    @property
    def calls(self) -> int:
        return self._calls.value

    @calls.setter
    def calls(self, calls: int) -> None:
        self._calls.value = calls

    @property
    def table(self) -> Tensor | None:
        return self._table.value  # type: ignore[no-any-return]

    @table.setter
    def table(self, table: Tensor | None) -> None:
        self._table.value = table

    def __deepcopy__(self, memo: object) -> Hidden:
        return Hidden()


class Block(nn.Module):
    """Two layers, between which a subclass does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.calls += 1
        return self.two(self.between(self.one(x).tanh()))  # type: ignore[no-any-return]

    def between(self, h: Tensor) -> Tensor:
        return h


class FillsATable(Block):
    """The first call makes a table; the ops that make it are also among those that use it."""

    def between(self, h: Tensor) -> Tensor:
        if self.hidden.table is None:
            angles = torch.arange(6.0) * 0.3
            self.hidden.table = torch.cat([angles[:3].cos(), angles[3:].sin()])
        return (h * self.hidden.table).cos()


class FillsATableFirst(FillsATable):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.between(torch.cat([x, x[:, :2]], 1))[:, :4])


class ScalesTheFirstCall(Block):
    def between(self, h: Tensor) -> Tensor:
        return h * 0.5 if self.hidden.calls == 1 else h


class AddsInTheSecondCall(Block):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.5 if self.hidden.calls == 2 else h


class ScalesByItsCalls(Block):
    def between(self, h: Tensor) -> Tensor:
        return h * float(self.hidden.calls)


class TakesAnotherOrder(Block):
    def between(self, h: Tensor) -> Tensor:
        return h.exp().sin() if self.hidden.calls == 1 else h.sin().exp()


def gradients(block: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(5, 4, requires_grad=True)
    out = block(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize("make", [FillsATable, FillsATableFirst])
def test_a_table_that_the_first_run_fills_needs_not_be_filled_again(
    make: Callable[[], Block],
) -> None:
    block = make()
    plain = copy.deepcopy(block)
    recompute(block)
    for _ in range(3):
        assert all(map(torch.equal, gradients(block), gradients(plain)))
        block.zero_grad(), plain.zero_grad()


class Alternates(Block):
    """Each even call leaves out an op, so that the third run would hide what the second did."""

    def between(self, h: Tensor) -> Tensor:
        return h * 0.5 if self.hidden.calls % 2 else h


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (ScalesTheFirstCall, "it does not run aten.mul.Tensor, which it ran before"),
        (AddsInTheSecondCall, "it runs aten.add.Tensor where it ran aten.addmm.default"),
        (ScalesByItsCalls, "aten.mul.Tensor gives other numbers when it runs again"),
        (TakesAnotherOrder, "it does not run aten.exp.default, which it ran before"),
        (Alternates, "it does not run aten.mul.Tensor, which it ran before"),
    ],
)
def test_a_forward_that_computes_something_else_is_refused(
    make: Callable[[], Block], why: str
) -> None:
    block = make()
    recompute(block, name="blocks.3")
    with pytest.raises(NotRepeatable, match=rf"blocks\.3 cannot be recomputed: {why}"):
        gradients(block)
