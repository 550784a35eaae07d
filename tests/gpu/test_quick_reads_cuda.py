"""Numbers are read past the copies that are under way, and are the same numbers."""

from __future__ import annotations

import pytest
import torch
from late_link import CUDA
from torch import Tensor

from oomph.engine.quick_reads import quick_reads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: Takes long enough to copy to the host that the card has not done it when the next line runs.
LONG = 4 << 30


@pytest.fixture
def copies() -> torch.cuda.Event:
    """Copies to the host under way; the event tells when they are done."""
    source = torch.empty(64 << 20, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source, device="cpu", pin_memory=True)
    torch.cuda.synchronize()
    beside = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(beside):
        for _ in range(LONG // source.nbytes):
            target.copy_(source, non_blocking=True)
    source.record_stream(beside)
    return beside.record_event()


def question() -> Tensor:
    return (torch.arange(1000, device=CUDA) >= 0).all()


@pytest.mark.usefixtures("_warm")
def test_a_plain_read_waits_for_the_copies(copies: torch.cuda.Event) -> None:
    assert bool(question())
    assert copies.query()


@pytest.mark.usefixtures("_warm")
def test_a_quick_read_does_not(copies: torch.cuda.Event) -> None:
    with quick_reads(CUDA):
        answer = bool(question())
    assert not copies.query()
    assert answer is True


@pytest.fixture
def _warm() -> None:
    """Kernels are loaded by their first launch, which waits for the whole card."""
    with quick_reads(CUDA):
        bool(question())


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(True),
        torch.tensor(False),
        torch.tensor(200, dtype=torch.uint8),
        torch.tensor(-7, dtype=torch.int8),
        torch.tensor(-(2**40), dtype=torch.int64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(-0.1, dtype=torch.float64),
        torch.tensor([[3.25]]),
        torch.tensor(float("inf"), dtype=torch.float16),
        torch.tensor(1 + 2j),
    ],
    ids=lambda number: str(number.dtype),
)
def test_every_way_of_reading_says_the_same(number: Tensor) -> None:
    there = number.to(CUDA).requires_grad_(number.is_floating_point())
    with quick_reads(CUDA):
        assert there.item() == number.item()
        assert there.tolist() == number.tolist()
        assert bool(there) is bool(number)
        if not number.is_complex() and number.isfinite():
            assert int(there) == int(number)
            assert float(there) == float(number)


def test_what_is_not_a_number_is_read_so() -> None:
    with quick_reads(CUDA):
        assert torch.tensor(float("nan"), device=CUDA).isnan().item()
        assert torch.isnan(torch.tensor(torch.tensor(float("nan"), device=CUDA).item()))


def test_many_numbers_and_those_of_the_host_are_read_as_ever() -> None:
    with quick_reads(CUDA):
        assert torch.arange(5, device=CUDA).tolist() == [0, 1, 2, 3, 4]
        assert torch.tensor(4).item() == 4
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(torch.ones(2, device=CUDA))


def test_a_compiled_block_that_reads_gives_the_same() -> None:
    def block(x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()

    compiled = torch.compile(block, backend="aot_eager")
    for sign in (1, -1):
        x = sign * torch.ones(4, device=CUDA)
        with quick_reads(CUDA):
            assert torch.equal(compiled(x), block(x))


def test_afterwards_tensors_read_as_before() -> None:
    before = {name: getattr(Tensor, name) for name in ("item", "__bool__", "__int__")}
    with quick_reads(CUDA):
        assert Tensor.item is not before["item"]
    assert {name: getattr(Tensor, name) for name in before} == before
