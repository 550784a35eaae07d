"""Recomputed blocks give the same numbers to the bit, save less, and can be given back."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.techniques.recompute import KINDS, recompute, replace_forward

ATTENTION = {op for op, kind in KINDS.items() if kind == "attention"}


class Block(nn.Module):
    """Attention and a product on each side of it, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8)
        self.after = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        heads = self.before(x).unsqueeze(1)
        attended = F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        return x + scale * self.dropout(self.after(attended.tanh()))


class Counted(TorchDispatchMode):
    """How often each op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ATTENTION:
            self.kinds["attention"] += 1
        elif func is torch.ops.aten.addmm.default:  # a Linear's forward; backward has mm
            self.kinds["product"] += 1
        return func(*args, **(kwargs or {}))


def gradients(block: nn.Module, calls: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8, requires_grad=True)
    out = x
    for _ in range(calls):
        out = block(out, scale=0.5)
    out.square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return found  # type: ignore[return-value]


HOWS: dict[str, tuple[str, ...]] = {
    "whole": (),
    "but for attention": ("attention#0",),
    "but for all": ("product#0", "attention#0", "product#1"),
}


@pytest.mark.parametrize("keep", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("calls", [1, 2])
def test_outputs_and_gradients_are_the_same_to_the_bit(
    keep: tuple[str, ...], dropout: float, calls: int
) -> None:
    plain = gradients(Block(dropout), calls)
    block = Block(dropout)
    recompute(block, keep)
    torch.testing.assert_close(gradients(block, calls), plain, rtol=0, atol=0)
    assert block.calls == calls


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        ((), {"product": 1, "attention": 1}),
        (("attention#0",), {"product": 1}),
        (("product#0",), {"attention": 1}),
        (("product#0", "attention#0"), {}),
    ],
)
def test_only_what_was_not_kept_runs_again(keep: tuple[str, ...], again: dict[str, int]) -> None:
    """The last product is not needed in backward, so recomputing stops before it."""
    block = Block()
    recompute(block, keep)
    out = block(torch.randn(2, 5, 8))
    with Counted() as counted:
        out.sum().backward()
    assert counted.kinds == again


def test_less_is_saved_for_backward() -> None:
    def saved(block: Block) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(16, 32, 8)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x)
        return sum(sizes.values())

    plain, block = Block(), Block()
    recompute(block)
    assert saved(block) < saved(plain) / 2


def test_undo_leaves_the_block_exactly_as_it_was() -> None:
    block = Block()
    before = dict(vars(block))
    undo = recompute(block)
    assert "forward" in vars(block)
    undo()
    undo()
    assert vars(block) == before
    gradients(block)
    assert block.calls == 1


def test_a_forward_that_somebody_else_put_there_is_recomputed_and_put_back() -> None:
    block = Block()

    def twice(x: Tensor, **options: Any) -> Tensor:
        return 2 * Block.forward(block, x, **options)

    block.forward = twice  # type: ignore[method-assign]
    expected = gradients(block)
    undo = recompute(block)
    torch.testing.assert_close(gradients(block), expected, rtol=0, atol=0)
    assert block.calls == 2
    undo()
    assert block.forward is twice


def test_replaced_forwards_are_taken_back_in_turn() -> None:
    block = Block()
    first = replace_forward(block, lambda x: x + 1)
    second = replace_forward(block, lambda x: x + 2)
    x = torch.zeros(1)
    assert block(x) == 2
    second()
    assert block(x) == 1
    first()
    assert "forward" not in vars(block)


def test_hooks_on_the_block_itself_run_once() -> None:
    block = Block()
    seen: list[int] = []
    block.register_forward_hook(lambda *_: seen.append(1))
    recompute(block)
    gradients(block)
    assert seen == [1]


@pytest.mark.parametrize("keep", [(), ("convolution#0",)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_updated_once(keep: Sequence[str], momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 2, 3)
    )
    block = copy.deepcopy(plain)
    undo = recompute(block, keep)
    for _ in range(3):
        images = torch.randn(2, 3, 8, 8)
        for one in (plain, block):
            one(images).sum().backward()
    undo()
    theirs, ours = plain.state_dict(), block.state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert int(block[1].num_batches_tracked) == 3
    grads = [(a.grad, b.grad) for a, b in zip(plain.parameters(), block.parameters(), strict=True)]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in grads)


class Guarded(nn.Module):
    """Catches the errors of what it computes, in one of the usual ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        is_done = True
        try:
            y = self.down(hidden).exp()
        except Exception as error:
            if self.way == "renamed":
                raise ValueError("the last layer failed") from error
            if self.way == "hidden":
                raise ValueError("the last layer failed") from None
            if self.way == "another way at once":
                return x + (hidden @ self.down.weight.T + self.down.bias).exp()
            is_done = False
        return x + (y if is_done else F.linear(hidden, self.down.weight, self.down.bias).exp())


@pytest.mark.parametrize(
    "way", ["renamed", "hidden", "another way at once", "another way", "not at all"]
)
def test_a_block_that_catches_errors_does_not_catch_the_end_of_its_recomputation(way: str) -> None:
    def run(block: nn.Module) -> list[Tensor]:
        x = torch.linspace(-1, 1, 16).view(2, 8).requires_grad_()
        block(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]

    expected, block = run(Guarded(way)), Guarded(way)
    recompute(block)
    assert all(map(torch.equal, run(block), expected))


class Fails(nn.Linear):
    """Fails when it runs again."""

    error: type[BaseException]

    def forward(self, x: Tensor) -> Tensor:
        again = any("unpack" in frame.name for frame in traceback.extract_stack())
        if again and issubclass(self.error, Exception):
            raise self.error("no second time")
        try:
            return super().forward(x).exp()
        except Exception:
            raise self.error from None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_of_a_recomputation_itself_are_raised_as_they_are(
    error: type[BaseException],
) -> None:
    block = Fails(8, 8)
    block.error = error
    recompute(block)
    out = block(torch.ones(2, 8, requires_grad=True)).sum()
    with pytest.raises(error):
        out.backward()
