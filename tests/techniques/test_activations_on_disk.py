"""Activations on the disk: the same gradients to the bit, the same moments, no more host memory."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import CountingLink
from disk_training import Disk
from scarce_disk import ScarceDisk
from shared_link import SharedLink
from test_offload_activations import (
    EAGER,
    H200,
    REHEARSED,
    Net,
    Prepare,
    Storages,
    Wide,
    assert_same,
    fail_in_backward,
    loss_of,
    made_by_no_op,
    train,
    with_link,
    words_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import oomph
from oomph.errors import DiskDamaged, DiskFull
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.memory import evicted_to_disk as parked_on_disk
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.link import Copy, InstantLink, Link
from oomph.memory.numbered_store import NumberedStore
from oomph.rehearsal import stores as rehearsed_slots
from oomph.rehearsal.link import RehearsedLink
from oomph.rehearsal.phases import END_OF_STEP, rehearse
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.stores import RehearsedStore
from oomph.rehearsal.timeline import Timeline
from oomph.techniques.offload_activations import ActivationOffload

PIECE, BUFFERS = 700, 3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_on_disk, "PIECE", PIECE)
    monkeypatch.setattr(parked_on_disk, "BUFFERS", BUFFERS)


class Counting(CountingLink, SharedLink):
    """That the disk's threads may wait for."""


LINKS: dict[str, Callable[[], Link]] = {
    "instant": InstantLink,
    "at the last moment": Counting,
    "at once": lambda: Counting(eager=1.0),
    "by chance": lambda: Counting(eager=0.3),
}
every_link = pytest.mark.parametrize("make_link", LINKS.values(), ids=LINKS)


class OnDisk:
    """A model whose blocks' activations go to a folder."""

    def __init__(self, model: Net, folder: Path, link: Link | None = None) -> None:
        self.model = model
        self.link = link or Counting(eager=0.3)
        self.disk = Disk(self.link, folder)
        self.engine = ActivationOffload(
            self.link, model, device_type="cpu", smallest=1, disk=self.disk
        )
        for block in model.blocks:
            self.engine.wrap(block)

    def undo(self) -> None:
        self.engine.undo()
        self.link.close()


@every_link
@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_gradients_are_the_same_to_the_bit(
    prepare: Callable[[nn.Module], Any], make_link: Callable[[], Link], tmp_path: Path
) -> None:
    expected = train(Net(dropout=0.5))
    model = Net(dropout=0.5)
    for block in model.blocks:
        prepare(block)
    ours = OnDisk(model, tmp_path, make_link())
    assert_same(train(model), expected)
    ours.undo()


@every_link
@pytest.mark.parametrize("buffers", [2, 8])
def test_so_they_are_in_micro_batches_of_any_size(
    buffers: int,
    make_link: Callable[[], Link],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parked_on_disk, "BUFFERS", buffers)
    sizes = [[1, 4, 2], [3, 4]]
    expected = train(Net(dropout=0.5), sizes)
    ours = OnDisk(Net(dropout=0.5), tmp_path, make_link())
    assert_same(train(ours.model, sizes), expected)
    ours.undo()


@every_link
@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_so_they_are_of_a_block_that_runs_twice_before_its_backward(
    prepare: Callable[[nn.Module], Any], make_link: Callable[[], Link], tmp_path: Path
) -> None:
    expected = train(Net(2, rounds=2))
    model = Net(2, rounds=2)
    for block in model.blocks:
        prepare(block)
    ours = OnDisk(model, tmp_path, make_link())
    assert_same(train(model), expected)
    ours.undo()


def test_two_graphs_may_be_under_way_and_go_backward_in_any_order(tmp_path: Path) -> None:
    def gradients(model: Net) -> list[Tensor]:
        torch.manual_seed(1)
        losses = [loss_of(model, words_of(samples)) for samples in (3, 2, 4)]
        for at in (1, 0, 2):
            losses[at].backward(retain_graph=True)
        losses[1].backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    expected = gradients(Net())
    ours = OnDisk(Net(), tmp_path)
    assert_same(gradients(ours.model), expected)
    ours.undo()


def test_a_whole_model_may_be_recomputed_around_it(tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, words: Tensor) -> Tensor:
            return checkpoint(self.inner, words, use_reentrant=False)

    expected = train(Around())
    model = Around()
    ours = OnDisk(model.inner, tmp_path)
    assert_same(train(model), expected)
    ours.undo()


def test_what_two_blocks_save_leaves_once(tmp_path: Path) -> None:
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3))
    )
    link = SharedLink(eager=0.3)
    disk = Disk(link, tmp_path)
    engine = ActivationOffload(link, layers, device_type="cpu", smallest=1, disk=disk)
    for layer in layers:
        engine.wrap(layer)
    layers(torch.randn(50, 8)).sum().backward()
    assert link.bytes == {"out": 3 * 50 * 8 * 4, "in": 3 * 50 * 8 * 4}
    engine.undo()


@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_as_forward_ends_the_disk_is_told_what_backward_asks_for(
    prepare: Callable[[nn.Module], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    for block in model.blocks:
        prepare(block)
    ours = OnDisk(model, tmp_path)
    told: list[list[int]] = []
    asked: list[int] = []
    announce, get = NumberedDiskStore.announce, NumberedDiskStore.get

    def announced(self: NumberedDiskStore, slots: Sequence[int]) -> None:
        told.append(list(slots))
        announce(self, slots)

    def got(self: NumberedDiskStore, slot: int, target: Tensor) -> Copy:
        asked.append(slot)
        return get(self, slot, target)

    monkeypatch.setattr(NumberedDiskStore, "announce", announced)
    monkeypatch.setattr(NumberedDiskStore, "get", got)
    train(model, [[3]])
    assert told == [[], asked]
    told.clear()
    with torch.no_grad():
        model(words_of(3))
    assert not told
    ours.undo()


# -- where the memory is ---------------------------------------------------------------------------


def test_host_memory_is_the_buffers_and_the_disk_holds_one_step(tmp_path: Path) -> None:
    ours = OnDisk(Net(), tmp_path)
    assert isinstance(ours.link, Counting)
    for sizes in ([[4]], [[4], [4, 4]]):
        ours.link.bytes["out"] = 0
        train(ours.model, sizes)
        assert sum(ours.link.live.values()) == PIECE * BUFFERS
        room = sum(slot.nbytes for slot in ours.disk.opened[0]._disk._slots)
        assert room == ours.link.bytes["out"] / sum(map(len, sizes)) > 10 * PIECE * BUFFERS
    ours.undo()


def test_undo_gives_all_back_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Net()
    before = [(dict(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    ours = OnDisk(model, tmp_path)
    assert isinstance(ours.link, Counting)
    train(model)
    ours.disk.opened.clear()
    ours.undo()
    gc.collect()
    assert not ours.link.live
    assert not [one for one in threading.enumerate() if one.name.startswith("oomph-disk")]
    assert not list(tmp_path.iterdir())
    assert [(dict(vars(m)), len(m._forward_hooks)) for m in model.modules()] == before


class Unseen(InstantLink):
    """Its host memory is none that `Storages` counts."""

    def host_memory(self, nbytes: int) -> Tensor:
        return made_by_no_op(nbytes)


def alive_through_a_step(model: Net, made: Storages) -> list[int]:
    """Bytes of activations when each block's forward and backward begin, and at the end."""
    found = []

    def note(*_: Any) -> None:
        found.append(made.alive())

    hooks = [
        hook
        for block in model.blocks
        for hook in (
            block.register_forward_pre_hook(note),
            block.register_full_backward_pre_hook(note),
        )
    ]
    words = words_of(3)
    with made:
        loss_of(model, words).backward()
        model.zero_grad()
        note()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_memory_is_given_back_and_taken_at_the_moments_it_is_with_the_host(
    prepare: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    def alive(on_disk: bool) -> list[int]:
        model, link = Net(), Unseen()
        for block in model.blocks:
            prepare(block)
        disk = Disk(link, tmp_path) if on_disk else None
        engine = ActivationOffload(link, model, device_type="cpu", smallest=1, disk=disk)
        for block in model.blocks:
            engine.wrap(block)
        found = alive_through_a_step(model, Storages())
        engine.undo()
        return found

    assert alive(on_disk=True) == alive(on_disk=False)
    assert alive(on_disk=True)[-1] == 0


# -- what may go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_after_a_failed_backward_the_next_step_is_right(
    prepare: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    expected = train(Net())
    model = Net()
    for block in model.blocks:
        prepare(block)
    ours = OnDisk(model, tmp_path)
    train(model, [[3]])
    slots = len(ours.disk.opened[0]._disk._slots)
    model.load_state_dict(Net().state_dict())
    handle = model.blocks[1].register_forward_hook(fail_in_backward)
    for _ in range(2):
        with pytest.raises(OSError, match="in backward"):
            loss_of(model, words_of(3)).backward()
        model.zero_grad()
    handle.remove()
    assert_same(train(model), expected)
    assert len(ours.disk.opened[0]._disk._slots) == slots, "the failed steps' room is used again"
    ours.undo()


def test_after_a_failed_backward_nothing_is_left_on_the_gpu(tmp_path: Path) -> None:
    ours = OnDisk(Net(), tmp_path, Unseen())
    ours.model.blocks[1].register_forward_hook(fail_in_backward)
    with Storages() as made:
        with pytest.raises(OSError, match="in backward"):
            loss_of(ours.model, words_of(3)).backward()
        ours.model.zero_grad()
    gc.collect()
    assert made.alive() == 0
    ours.undo()


@pytest.mark.parametrize("room", [0, 1, 7])
def test_a_disk_that_is_full_in_the_first_forward_changes_nothing(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ScarceDisk(monkeypatch, room)
    ours = OnDisk(Net(), tmp_path, Unseen())
    words = words_of(3)
    with Storages() as made, pytest.raises(DiskFull):
        loss_of(ours.model, words)
    gc.collect()
    assert made.alive() == 0
    assert all(p.grad is None for p in ours.model.parameters())
    disk.grow()
    assert_same(train(ours.model), train(Net()))
    ours.undo()


def flip_all(disk: Disk) -> None:
    """As if a bit flipped in all that was written; done twice, all is well again."""
    for slot in disk.opened[0]._disk._slots:
        assert slot.last_write is not None
        slot.last_write.wait()
        slot.last_write.checksums = [value ^ 1 for value in slot.last_write.checksums]


def test_a_bit_that_flips_on_the_disk_is_an_error_and_the_next_step_is_right(
    tmp_path: Path,
) -> None:
    ours = OnDisk(Net(), tmp_path)
    loss = loss_of(ours.model, words_of(3))
    flip_all(ours.disk)
    with pytest.raises(DiskDamaged, match="other bytes came back"):
        loss.backward()
    del loss
    ours.model.zero_grad()
    assert_same(train(ours.model), train(Net()))
    ours.undo()


# -- in a rehearsal --------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Rehearsed:
    """A step, rehearsed."""

    timeline: Timeline
    alive: list[int]
    """GPU memory after each allocation and free of the step."""
    seconds: float


def rehearse_step(gpu: GPU, prepare: Prepare, *, on_disk: bool) -> Rehearsed:
    batch = torch.zeros(4096, 256), torch.zeros(4096, 1)
    job = oomph.Job(Wide, nn.MSELoss(), "sgd", batch)

    def watch(model: nn.Module, _: Any, recorder: Recorder) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            prepare(block, recorder)
        link = RehearsedLink(recorder, gpu)

        def open_store(largest: int, buffers: int) -> NumberedStore:
            return RehearsedStore(recorder, link, gpu, largest=largest, buffers=buffers)

        disk = open_store if on_disk else None
        engine = ActivationOffload(link, model, disk=disk)
        for block in model.blocks:  # type: ignore[union-attr]
            engine.wrap(block)

    timeline = rehearse(job, gpu, ("step",), watch=watch, clock=Clock.of(gpu), skip_first_step=True)
    begin, end = (mark.seconds for mark in timeline.marks if mark.name == END_OF_STEP)
    return Rehearsed(timeline=timeline, alive=list(running_sum(timeline)), seconds=end - begin)


def running_sum(timeline: Timeline) -> Iterator[int]:
    now = 0
    for _, block, is_birth in timeline.stream_of_events():
        now += block.size if is_birth else -block.size
        yield now


@pytest.fixture
def real_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_on_disk, "PIECE", 1 << 20)
    monkeypatch.setattr(parked_on_disk, "BUFFERS", 4)


@pytest.mark.usefixtures("real_pieces")
@pytest.mark.parametrize(("prepare", "saved"), REHEARSED.values(), ids=REHEARSED)
def test_a_rehearsal_finds_the_gpus_memory_as_with_the_host_and_the_rest_on_the_disk(
    prepare: Prepare, saved: int
) -> None:
    on_host = rehearse_step(H200, prepare, on_disk=False)
    found = rehearse_step(H200, prepare, on_disk=True)
    assert found.alive == on_host.alive
    assert found.timeline.disk_bytes == on_host.timeline.host_bytes == 6 * saved
    assert found.timeline.host_bytes == 4 << 20


@pytest.mark.usefixtures("real_pieces")
@pytest.mark.parametrize(("prepare", "saved"), REHEARSED.values(), ids=REHEARSED)
def test_a_step_takes_as_long_as_the_disk(
    prepare: Prepare, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsed_slots, "load_profile", lambda _: None)
    gpu = with_link(1e15)
    rates = {"DISK_READ": 1e15, "DISK_WRITE": 1e15}

    def seconds(**slow: float) -> float:
        for name, rate in {**rates, **slow}.items():
            monkeypatch.setattr(rehearsed_slots, name, rate)
        return rehearse_step(gpu, prepare, on_disk=True).seconds

    fast = seconds()
    assert fast == pytest.approx(rehearse_step(gpu, prepare, on_disk=False).seconds, rel=0.01)
    # What comes last is read when it was written, and the first ones hide behind computing.
    for slow in ({"DISK_READ": 1e9}, {"DISK_WRITE": 1e9}):
        assert 0.8 * 6 * saved / 1e9 < seconds(**slow) < fast + 1.05 * 6 * saved / 1e9
