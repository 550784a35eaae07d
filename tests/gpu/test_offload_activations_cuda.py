"""Activation offload on a real card: same numbers whatever is late. Skipped where there is none."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from late_link import CUDA, PLACES, LateLink
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.memory import evicted_to_disk as parked_on_disk
from oomph.memory.cuda_link import CudaLink
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.numbered_store import NumberedStore
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.offload_activations import ActivationOffload
from oomph.techniques.recompute import recompute

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, LENGTH, SAMPLES = 64, 128, 32


class Block(nn.Module):
    """Views of one memory, transposed ones, masks and indices, in ops whose sums have one order."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gates = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout((q @ k.transpose(1, 2) / 8).softmax(-1) @ v)
        left, right = self.gates(x).chunk(2, dim=-1)
        gated = torch.where(left > 0, left * right, right.tanh())
        largest = x.gather(-1, x.argsort(-1)[..., : WIDTH // 2]).repeat(1, 1, 2)
        return torch.tanh(x + self.down(gated) + largest)


class Net(nn.Module):
    def __init__(self, blocks: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Everything is computed in one order; nothing of another test is in memory."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gc.collect()
    torch.cuda.empty_cache()
    yield


def loss_of(model: nn.Module, samples: int) -> Tensor:
    x = torch.randn(samples, LENGTH, WIDTH, device=CUDA)
    return F.mse_loss(model(x), torch.ones(samples, LENGTH, 1, device=CUDA))


def train(
    model: nn.Module, sizes: Sequence[int] = (SAMPLES, SAMPLES // 2, SAMPLES)
) -> list[Tensor]:
    """The gradients of steps with batches of these sizes, and the weights after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for samples in sizes:
        loss_of(model, samples).backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@functools.cache
def plainly() -> list[Tensor]:
    """What training gives without any offload, which is the same each time."""
    expected = train(Net().to(CUDA))
    assert_same(train(Net().to(CUDA)), expected)  # else comparing with it would say nothing
    return expected


HOWS: dict[str, Callable[[nn.Module], Any]] = {
    "kept": lambda block: None,
    "recomputed": recompute,
    "recomputed in part": lambda block: recompute(block, ["product#0"]),
}


def offloaded(
    model: Net,
    link: CudaLink,
    prepare: Callable[[nn.Module], Any],
    folder: Path | None = None,
    smallest: int = 1,
) -> Any:
    """With a folder, to its disk."""

    def open_store(largest: int, buffers: int) -> NumberedStore:
        assert folder is not None
        return NumberedDiskStore(link, folder, largest=largest, buffers=buffers)

    for block in model.blocks:
        prepare(block)
    disk = open_store if folder is not None else None
    engine = ActivationOffload(link, model, smallest=smallest, disk=disk)
    for block in model.blocks:
        engine.wrap(block)
    return engine


@pytest.fixture
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they are used many times."""
    monkeypatch.setattr(parked_on_disk, "PIECE", 3 << 18)
    monkeypatch.setattr(parked_on_disk, "BUFFERS", 3)


@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize("prepare", HOWS.values(), ids=HOWS)
def test_gradients_are_the_same_to_the_bit_whatever_is_late(
    prepare: Callable[[nn.Module], Any], late: Collection[str]
) -> None:
    model, link = Net().to(CUDA), LateLink(late)
    engine = offloaded(model, link, prepare)
    assert_same(train(model), plainly())
    engine.undo()
    link.close()
    assert not any(memory() is not None for memory in link.memory)


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize("prepare", HOWS.values(), ids=HOWS)
def test_so_they_are_where_activations_wait_on_the_disk(
    prepare: Callable[[nn.Module], Any], late: Collection[str], tmp_path: Path
) -> None:
    model, link = Net().to(CUDA), LateLink(late)
    engine = offloaded(model, link, prepare, tmp_path)
    assert_same(train(model), plainly())
    engine.undo()
    link.close()
    assert not any(memory() is not None for memory in link.memory)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_of_compiled_blocks_are_the_same_to_the_bit(recomputed: bool) -> None:
    def compiled(block: nn.Module) -> None:
        if recomputed:
            recompute(block, compiled=True)
        compile_block(block)

    blocks = 2  # that run after one another, and no more to compile
    plain = Net(blocks, dropout=0.0).to(CUDA)
    for block in plain.blocks:
        compiled(block)
    expected = train(plain, [SAMPLES, SAMPLES])
    for late in ((), PLACES):
        model, link = Net(blocks, dropout=0.0).to(CUDA), LateLink(late)
        engine = offloaded(model, link, compiled)
        assert_same(train(model, [SAMPLES, SAMPLES]), expected)
        assert link.memory, "something left"
        engine.undo()
        link.close()


def fail_in_backward(_: nn.Module, __: Any, output: Tensor) -> None:
    """As a hook: fails when the module's backward begins."""

    def fail(_: Tensor) -> None:
        raise OSError("in backward")

    output.register_hook(fail)


@pytest.mark.usefixtures("few_buffers")
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("prepare", HOWS.values(), ids=HOWS)
def test_after_a_failed_backward_the_card_is_as_before_and_the_next_step_right(
    prepare: Callable[[nn.Module], Any], on_disk: bool, tmp_path: Path
) -> None:
    model, link = Net().to(CUDA), LateLink(PLACES)
    engine = offloaded(model, link, prepare, tmp_path if on_disk else None)
    train(model, [SAMPLES])
    model.load_state_dict(Net().state_dict())
    torch.cuda.synchronize()
    link.forget_nonsense()
    before = torch.cuda.memory_allocated()
    handle = model.blocks[1].register_forward_hook(fail_in_backward)
    with pytest.raises(OSError, match="in backward"):
        loss_of(model, SAMPLES).backward()
    handle.remove()
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    link.forget_nonsense()
    assert torch.cuda.memory_allocated() == before
    assert_same(train(model), plainly())
    engine.undo()
    link.close()


def memory_of_a_step(model: nn.Module) -> tuple[int, int]:
    """Bytes after forward, and the peak of the whole step, beside what was there before.

    As they were asked for: what is allocated also counts what the allocator does not split off, up
    to 1 MiB of each block, and how much that is depends on what was freed before.
    """
    train(model, [SAMPLES])  # workspaces are there from now on
    gc.collect()  # else a model that was measured before may go while this one is
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model, SAMPLES)
    after = requested("current")
    loss.backward()
    model.zero_grad()
    return after - before, requested("peak") - before


def requested(which: str) -> int:
    return int(torch.cuda.memory_stats(CUDA)[f"requested_bytes.all.{which}"])


@pytest.mark.parametrize("prepare", HOWS.values(), ids=HOWS)
def test_what_left_is_not_on_the_card(prepare: Callable[[nn.Module], Any]) -> None:
    blocks = 8
    plain = Net(blocks).to(CUDA)
    for block in plain.blocks:
        prepare(block)
    whole, whole_peak = memory_of_a_step(plain)
    model, link = Net(blocks).to(CUDA), CudaLink(CUDA)
    for block in model.blocks:
        prepare(block)
    engine = ActivationOffload(link, model)
    for block in model.blocks:
        engine.wrap(block)
    rest, rest_peak = memory_of_a_step(model)
    moved = [
        sum(nbytes for nbytes in engine.sizes(block) if nbytes >= 1 << 18) for block in model.blocks
    ]
    # A block's output is saved by its tanh and again as the next block's input: it leaves once.
    # That of the last one is saved by the head, too, and does not leave.
    output = SAMPLES * LENGTH * WIDTH * 4
    shared = blocks * output if prepare is HOWS["kept"] else 0
    assert whole - rest == pytest.approx(sum(moved) - shared, rel=0.01)
    # One block runs backward while another comes back.
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert whole_peak - rest_peak > sum(moved[2:]) - shared - gradients - 2 * output
    engine.undo()
    link.close()


@pytest.mark.parametrize("prepare", HOWS.values(), ids=HOWS)
def test_the_card_has_the_same_memory_whether_it_left_for_the_host_or_the_disk(
    prepare: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    found = []
    for folder in (None, tmp_path):
        model, link = Net(8).to(CUDA), CudaLink(CUDA)
        engine = offloaded(model, link, prepare, folder, smallest=1 << 18)
        found.append(memory_of_a_step(model))
        engine.undo()
        link.close()
    assert found[0] == found[1]
