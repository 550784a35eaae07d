"""Streamed weights on a real card: same numbers whatever is late. Skipped where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from late_link import CUDA, PLACES, LateLink, poison
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.jobs.job import Job
from oomph.memory.cuda_link import CudaLink
from oomph.memory.disk_store import NumberedDiskStore
from oomph.runs.inference import apply_inference, plan_inference
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.disk_weights import OnDisk
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.recompute import recompute
from oomph.techniques.streamed_weights import StreamedWeights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, SAMPLES, LAYERS = 256, 64, 5
BLOCKS = [f"blocks.{at}" for at in range(LAYERS)]
CLIP = 0.5


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 2 * width))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.silu(self.up(self.norm(x))) * self.scale
        return torch.tanh(x + self.dropout(self.down(wide)) + self.seen)


class Net(nn.Module):
    """Two blocks share a weight."""

    def __init__(self, dropout: float = 0.2, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(LAYERS))
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is computed in one order, and blocks that left leave nonsense behind."""
    drop = StreamedWeights._drop

    def drop_poisoned(streamed: StreamedWeights, unit: Any) -> None:
        memory = unit.memory
        drop(streamed, unit)
        if memory is not None:
            poison(memory)

    monkeypatch.setattr(StreamedWeights, "_drop", drop_poisoned)
    torch.backends.cuda.matmul.allow_tf32 = False
    gc.collect()
    torch.cuda.empty_cache()
    yield


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Plain:
    """A model that is trained on the card."""

    def __init__(self, model: Net) -> None:
        self.model = model
        self._optimizer = adamw(model)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def settle(self) -> None:
        pass


class Streaming:
    """The same with every weight streamed; no gradient waits on the card."""

    def __init__(self, model: Net, link: LateLink, ahead: int = 1) -> None:
        self.model = model
        self._link = link
        self._streamed = StreamedWeights(model, ["first", *BLOCKS, "head"], link, ahead=ahead)
        self._host = HostOptimizer(
            model,
            adamw(model),
            link,
            HostPlacement(bucket=256 << 10, keep_gradients=0),
            weights=self._streamed,
            clip_norm=CLIP,
        )

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._host.backward(last=last)

    def step(self) -> None:
        self._host.step()

    def settle(self) -> None:
        self._host.settle()

    def undo(self) -> None:
        self._host.undo()
        self._streamed.undo()
        self._link.close()


def train(training: Plain | Streaming, *, parts: int, autocast: bool, steps: int = 3) -> list[Any]:
    """Losses of some steps, and the weights after them, on the host."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        for part in range(parts):
            x = torch.randn(SAMPLES, WIDTH, device=CUDA)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
                loss = F.mse_loss(training.model(x).float(), torch.ones(SAMPLES, 1, device=CUDA))
            with training.backward(last=part == parts - 1):
                (loss / parts).backward()
            losses.append(loss.detach())
        training.step()
    training.settle()
    return [t.cpu() for t in (*losses, *training.model.state_dict().values())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


HOWS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "kept": (lambda _: None, {"parts": 1, "autocast": False}),
    "in micro-batches": (lambda _: None, {"parts": 3, "autocast": False}),
    "recomputed": (recompute, {"parts": 2, "autocast": False}),
    "autocast": (lambda _: None, {"parts": 2, "autocast": True}),
}


@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_training_is_the_same_to_the_bit_whatever_is_late(how: str, late: Collection[str]) -> None:
    prepare, options = HOWS[how]
    expected = train(Plain(Net().to(CUDA)), **options)
    assert_same(train(Plain(Net().to(CUDA)), **options), expected)  # else this would say nothing
    model, link = Net().to(CUDA), LateLink(late)
    for block in model.blocks:
        prepare(block)
    streaming = Streaming(model, link)
    assert_same(train(streaming, **options), expected)
    streaming.undo()
    del streaming
    gc.collect()
    assert not any(memory() is not None for memory in link.memory)
    assert {p.device for p in model.parameters()} == {CUDA}
    assert_same(
        [t.cpu() for t in model.state_dict().values()], expected[-len(model.state_dict()) :]
    )


@pytest.mark.parametrize("ahead", [0, 2])
def test_any_number_of_blocks_may_come_ahead(ahead: int) -> None:
    options = HOWS["in micro-batches"][1]
    expected = train(Plain(Net().to(CUDA)), **options)
    streaming = Streaming(Net().to(CUDA), LateLink(PLACES), ahead)
    assert_same(train(streaming, **options), expected)
    streaming.undo()


@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_blocks_are_the_same_to_the_bit(recomputed: bool) -> None:
    def compiled(model: Net) -> Net:
        for block in model.blocks:
            if recomputed:
                recompute(block, compiled=True)
            compile_block(block)
        return model

    options = {"parts": 2, "autocast": False}
    expected = train(Plain(compiled(Net(dropout=0.0).to(CUDA))), **options)
    for late in ((), PLACES):
        streaming = Streaming(compiled(Net(dropout=0.0).to(CUDA)), LateLink(late))
        assert_same(train(streaming, **options), expected)
        streaming.undo()


@pytest.mark.parametrize("late", [(), PLACES], ids=str)
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_forwards_one_after_the_other_are_the_same(
    no_grad: Callable[[], Any], late: Collection[str]
) -> None:
    model = Net().to(CUDA).eval()
    x = torch.randn(SAMPLES, WIDTH, device=CUDA)
    with no_grad():
        expected = model(x)
        link = LateLink(late)
        streamed = StreamedWeights(model, BLOCKS, link)
        for _ in range(4):
            assert torch.equal(model(x), expected)
    streamed.undo()
    link.close()
    with no_grad():
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("late", [(), *((place,) for place in PLACES), PLACES], ids=str)
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_forwards_from_the_disk_are_the_same_whatever_is_late(
    no_grad: Callable[[], Any], late: Collection[str], tmp_path: Path
) -> None:
    model = Net().to(CUDA).eval()
    x = torch.randn(SAMPLES, WIDTH, device=CUDA)
    link = LateLink(late)

    def open_store(largest: int, buffers: int) -> NumberedDiskStore:
        return NumberedDiskStore(link, tmp_path, largest=largest, buffers=buffers)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with no_grad():
        expected = model(x)
        on_disk = OnDisk(blocks=BLOCKS, open_store=open_store)
        streamed = StreamedWeights(model, BLOCKS, link, on_disk=on_disk)
        for _ in range(4):
            assert torch.equal(model(x), expected)
    state = model.state_dict()
    assert all(torch.equal(state[name].to(CUDA), value) for name, value in before.items())
    streamed.undo()
    link.close()
    assert {p.device for p in model.parameters()} == {CUDA}
    with no_grad():
        assert torch.equal(model(x), expected)


def test_a_failed_backward_leaves_everything_usable() -> None:
    options = HOWS["kept"][1]
    expected = train(Plain(Net().to(CUDA)), **options)
    streaming = Streaming(Net().to(CUDA), LateLink(PLACES))

    def fail(*_: Any) -> None:
        raise OSError("in backward")

    handle = streaming.model.blocks[1].up.register_full_backward_hook(fail)
    loss = streaming.model(torch.randn(2, WIDTH, device=CUDA)).sum()
    with pytest.raises(OSError, match="in backward"), streaming.backward(last=True):
        loss.backward()
    handle.remove()
    assert_same(train(streaming, **options), expected)
    streaming.undo()


def test_the_card_holds_two_blocks_and_the_gradients_that_leave() -> None:
    width = 2048
    block = 4 * (4 * width * width + 5 * width)
    in_flight = 64 << 20
    model = Net(dropout=0.0, width=width).to(CUDA)
    before = torch.cuda.memory_allocated()
    link = CudaLink(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamed = StreamedWeights(model, BLOCKS, link)
    # All that the card has of a step are gradients on their way out.
    placement = HostPlacement(host_share=1.0, bucket=in_flight // 2, ahead=2)
    host = HostOptimizer(model, optimizer, link, placement, weights=streamed, clip_norm=CLIP)
    rest = torch.cuda.memory_allocated()
    assert before - rest > (LAYERS - 1) * block
    x = torch.randn(8, width, device=CUDA)
    loss = model(x).sum()
    with host.backward():
        loss.backward()  # libraries take their workspaces
    host.abandon()
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = model(x).sum()
    slack = 16 << 20  # of what the allocator does not split off, too
    assert torch.cuda.max_memory_allocated() - kept < 2 * block + slack
    with host.backward():
        loss.backward()
    assert torch.cuda.max_memory_allocated() - kept < 2 * block + in_flight + block + slack
    host.abandon()
    host.undo()
    streamed.undo()
    link.close()


@contextlib.contextmanager
def memory_back() -> Iterator[None]:
    gc.collect()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_model_of_the_host_runs_on_the_card_as_planned() -> None:
    model = Net(width=2048).eval()
    batch = torch.randn(4, 2048)
    expected = Net(width=2048).to(CUDA).eval()(batch.to(CUDA)).detach().cpu()
    job = Job(model, None, None, batch)
    whole = plan_inference(job, gpu=torch.cuda.get_device_name(CUDA))
    assert whole.streamed == ()
    budget = whole.estimate.smallest_budget - (64 << 20)
    plan = plan_inference(job, gpu=torch.cuda.get_device_name(CUDA), budget=budget)
    assert plan.streamed
    with memory_back():
        with apply_inference(plan, job) as run:
            for _ in range(3):
                assert torch.equal(run(batch).cpu(), expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        del run


def test_a_model_of_the_host_runs_on_the_card_with_blocks_on_the_disk(tmp_path: Path) -> None:
    model = Net(width=2048).eval()
    batch = torch.randn(4, 2048)
    expected = Net(width=2048).to(CUDA).eval()(batch.to(CUDA)).detach().cpu()
    job = Job(model, None, None, batch)
    card = torch.cuda.get_device_name(CUDA)
    whole = plan_inference(job, gpu=card)
    budget = whole.estimate.smallest_budget - (64 << 20)
    plan = plan_inference(job, gpu=card, budget=budget)
    # No host is too small for this model: as if one were, with more blocks than buffers.
    plan = dataclasses.replace(plan, streamed=tuple(BLOCKS), on_disk=tuple(BLOCKS))
    with memory_back():
        with apply_inference(plan, job, disk=tmp_path) as run:
            for _ in range(3):
                assert torch.equal(run(batch).cpu(), expected)
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        del run
    assert torch.equal(Net(width=2048).blocks[4].up.weight, model.blocks[4].up.weight)


def test_a_model_of_a_checkpoint_runs_on_the_card_from_host_and_disk(tmp_path: Path) -> None:
    plain = Net(width=2048)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    del state["blocks.3.up.weight"]  # that of the first block
    save_file(state, tmp_path / "model.safetensors")
    batch = torch.randn(4, 2048)
    expected = plain.to(CUDA).eval()(batch.to(CUDA)).detach().cpu()
    del plain, state
    job = Job(functools.partial(Net, width=2048), None, None, batch)
    plan = plan_inference(job, gpu=torch.cuda.get_device_name(CUDA))
    plan = dataclasses.replace(plan, streamed=tuple(BLOCKS), on_disk=tuple(BLOCKS[1:]))
    with memory_back():
        run = apply_inference(plan, job, disk=tmp_path, checkpoint=tmp_path)
        for _ in range(3):
            assert torch.equal(run(batch).cpu(), expected)
        assert run.model.first.weight.device == CUDA
        run.undo()
        assert all(parameter.is_meta for parameter in run.model.parameters())
