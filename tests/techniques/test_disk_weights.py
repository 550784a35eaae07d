"""Weights in training on the disk: the bits of the plain job, or an error that says why."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_link import CountingLink
from disk_training import Disk
from host_training import (
    SMALL,
    Net,
    Training,
    fail_once,
    little_room,
    nearly,
    plain,
    same_batch_again,
    same_bits,
    step_once,
)
from scarce_disk import ScarceDisk
from shared_link import SharedLink
from test_streamed_weights import poisoned  # noqa: F401 - every test here uses it
from test_weights_away import BLOCKS, RECIPES
from torch import Tensor, nn

from oomph.errors import BadInput, DiskDamaged, DiskFull, HostMemoryFull
from oomph.memory import limits
from oomph.memory.disk import DiskStore
from oomph.memory.limits import HostLimits
from oomph.memory.link import InstantLink, Link
from oomph.memory.scratch_file import ScratchFile
from oomph.techniques import disk_state
from oomph.techniques import disk_weights as cold_weights
from oomph.techniques.disk_weights import BUFFERS_OF_PIECES, OnDisk
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.optimizer_twin import is_elementwise
from oomph.techniques.step_buckets import cuts_of
from oomph.techniques.streamed_weights import StreamedWeights

STEPS = 5
TINY = HostLimits(memory=100, memory_limit="a small machine", lockable=None)


@pytest.fixture(autouse=True)
def _every_parameter_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_weights, "LEAST", 0)
    monkeypatch.setattr(disk_state, "LEAST", 0)


@functools.cache
def plainly(name: str, steps: int = STEPS) -> Training:
    return plain(RECIPES[name], steps)


class OnTheDisk(Training):
    """A training whose blocks have their weights on the disk: at once, if it is given a folder."""

    def __init__(
        self, name: str, folder: Path | None = None, link: Link | None = None, **how: Any
    ) -> None:
        super().__init__(recipe=RECIPES[name])
        if folder is not None:
            self.leave(folder, link, **how)

    def leave(
        self,
        folder: Path,
        link: Link | None = None,
        *,
        blocks: Sequence[str] = BLOCKS,
        cold: Sequence[str] | None = None,
        coming: int = 1,
        bucket: int = SMALL,
        buffers: int = 100,
        **placement: Any,
    ) -> None:
        self.link = link or SharedLink()
        self.disk = Disk(self.link, folder, most=buffers)
        self.streamed = StreamedWeights(
            self.model,
            blocks,
            self.link,
            ahead=coming,
            on_disk=OnDisk(
                blocks=blocks if cold is None else cold,
                open_store=self.disk,
                cut=functools.partial(self.cut, bucket=bucket),
            ),
        )
        placement = {"keep_gradients": 3000, **placement}
        self.go_to_host(
            self.link, weights=self.streamed, disk=self.disk, bucket=bucket, **placement
        )

    def cut(self, parameter: nn.Parameter, bucket: int) -> tuple[range, ...]:
        owned = self.masters.master_of(parameter) if self.masters is not None else parameter
        may_cut = is_elementwise(self.optimizer)
        return cuts_of(parameter, owned.element_size(), bucket, may_cut=may_cut)

    def undone(self) -> Training:
        assert self.host is not None
        self.host.undo()
        self.host = None
        self.streamed.undo()
        return self


def trained(name: str, folder: Path, link: Link | None = None, **how: Any) -> Training:
    training = OnTheDisk(name, folder, link, **how)
    training.run(STEPS)
    return training.undone()


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_steps_have_the_plain_bits(name: str, tmp_path: Path) -> None:
    same_bits(trained(name, tmp_path), plainly(name))


LINKS: dict[str, Callable[[], Link]] = {
    "instant": InstantLink,
    "by chance": lambda: SharedLink(eager=0.3, seed=1),
    "otherwise by chance": lambda: SharedLink(eager=0.6, seed=2),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("buffers", [2, 100])
@pytest.mark.parametrize(
    "name", ["plain", "clipped", "tied, in parts, clipped", "recomputed", "masters, in parts"]
)
def test_whenever_copies_happen(name: str, buffers: int, link: str, tmp_path: Path) -> None:
    same_bits(trained(name, tmp_path, LINKS[link](), buffers=buffers), plainly(name))


@pytest.mark.parametrize(
    "name", ["plain", "tied, in parts, clipped", "masters", "masters, clipped"]
)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_state_and_masters_may_be_there_too(name: str, share: float, tmp_path: Path) -> None:
    same_bits(trained(name, tmp_path, disk_share=share), plainly(name))


@pytest.mark.parametrize("name", ["tied", "clipped", "masters, clipped"])
@pytest.mark.parametrize("keep", [None, 0])
@pytest.mark.parametrize("bucket", [64, 10**9])
@pytest.mark.parametrize("coming", [0, 2])
def test_sizes_change_nothing(
    name: str, keep: int | None, bucket: int, coming: int, tmp_path: Path
) -> None:
    how = {"keep_gradients": keep, "bucket": bucket, "coming": coming, "ahead": 1}
    same_bits(trained(name, tmp_path, **how), plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
@pytest.mark.parametrize("cold", [("blocks.1",), ("blocks.0", "blocks.2"), ()], ids=str)
def test_some_blocks_may_stay_in_memory(name: str, cold: Sequence[str], tmp_path: Path) -> None:
    same_bits(trained(name, tmp_path, cold=cold), plainly(name))


@pytest.mark.parametrize("least", [200, 10**9])
def test_small_parameters_stay_in_memory(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_weights, "LEAST", least)
    training = OnTheDisk("clipped", tmp_path)
    small = {p for p in training.streamed.parameters if not training.streamed.cuts(p)}
    assert small == {p for p in training.streamed.parameters if p.nbytes < least}
    training.run(STEPS)
    same_bits(training.undone(), plainly("clipped"))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
def test_state_of_some_may_stay_on_the_gpu(name: str, tmp_path: Path) -> None:
    same_bits(trained(name, tmp_path, gpu_share=0.4, disk_share=0.3), plainly(name))


def test_the_hosts_cores_step_only_what_is_in_memory(tmp_path: Path) -> None:
    training = OnTheDisk("clipped", tmp_path, cold=("blocks.1", "blocks.2"), host_share=0.5)
    training.run(STEPS)
    assert training.host is not None
    by_cores = training.host._order.host_stepped
    assert by_cores and not any(one.cuts for one in by_cores)
    nearly(training.undone(), plainly("clipped"))


@pytest.mark.parametrize("fused", [False, True])
def test_weights_of_another_layout_keep_it(fused: bool, tmp_path: Path) -> None:
    def train(on_disk: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Flatten()
        )
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        link, host, streamed = SharedLink(), None, None
        if on_disk:
            cold = OnDisk(
                blocks=("0", "1"),
                open_store=Disk(link, tmp_path),
                cut=lambda parameter: cuts_of(parameter, 4, 64),
            )
            streamed = StreamedWeights(model, ["0", "1"], link, on_disk=cold)
            placement = HostPlacement(bucket=64, keep_gradients=100)
            host = HostOptimizer(model, optimizer, link, placement, weights=streamed, clip_norm=1.0)
        for step in range(4):
            loss = model(torch.full((2, 3, 6, 6), float(step))).square().sum()
            step_once(loss, optimizer, host, clip_norm=1.0)
        if host is not None and streamed is not None:
            host.undo()
            streamed.undo()
        return model

    for ours, theirs in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_an_evaluation_between_steps_sees_the_new_weights(tmp_path: Path) -> None:
    tokens = torch.arange(6).view(1, 6)
    theirs = plain(RECIPES["clipped"], 2)
    ours = OnTheDisk("clipped", tmp_path)
    ours.step(0)
    ours.step(1)
    with torch.no_grad():
        assert torch.equal(ours.model(tokens, True), theirs.model(tokens, True))
    ours.run(STEPS - 2)
    same_bits(ours.undone(), plainly("clipped"))


# -- what comes from the disk ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("plain", 3 + 1),  # forward; for backward the last two are here; they are stepped there
        ("masters", 3 + 1),
        ("clipped", 3 + 1),  # what is stepped is there for forward
        ("masters, clipped", 1),  # masters are stepped: weights come for backward only
    ],
)
def test_a_step_reads_no_more_than_it_must(
    name: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = OnTheDisk(name, tmp_path, InstantLink(), keep_gradients=None)
    pieces = sum(len(training.streamed.cuts(p)) for p in training.streamed.parameters)
    training.step(0)
    training.step(1)
    gets: list[int] = []
    (store,) = training.disk.opened
    get = store.get
    with monkeypatch.context() as patch:
        patch.setattr(store, "get", lambda slot, to: (gets.append(slot), get(slot, to))[1])
        training.step(2)
    # Of those that backward had last, some may be stepped before they are gone.
    most = blocks * pieces // len(BLOCKS)
    assert most - pieces // len(BLOCKS) < len(gets) <= most
    training.run(0)
    training.undone()


def test_only_the_ring_takes_host_memory(tmp_path: Path) -> None:
    class Small(CountingLink, SharedLink):
        pass

    def taken(cold: Sequence[str]) -> int:
        link = Small()
        training = OnTheDisk("masters", tmp_path, link, cold=cold, disk_share=1.0, bucket=256)
        training.run(2)
        held = sum(link.live.values())
        training.undone()
        gc.collect()
        assert link.live == {}
        return held

    weights = sum(p.numel() * 2 for name in BLOCKS for p in Net().get_submodule(name).parameters())
    # Pieces are of the size of a bucket of masters.
    ring = BUFFERS_OF_PIECES * 256 // 2
    assert taken(()) - taken(BLOCKS) > weights - ring - 1000


# -- looked at, saved, loaded, undone --------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped", "tied"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_undone_in_mid_training_it_goes_on_plainly(name: str, share: float, tmp_path: Path) -> None:
    training = OnTheDisk(name)
    training.run(2)
    training.leave(tmp_path, disk_share=share)
    training.step(2)
    training.step(3)
    training.undone()
    assert list(tmp_path.iterdir()) == []
    assert not any("__deepcopy__" in vars(p) for p in training.model.parameters())
    same_bits(training.run(STEPS - 4), plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
def test_state_dicts_are_the_plain_ones(name: str, tmp_path: Path) -> None:
    ours = OnTheDisk(name, tmp_path)
    ours.run(3)
    theirs = Training(recipe=RECIPES[name])
    theirs.go_on_from(ours)
    ours.run(2)
    same_bits(theirs.run(2), ours.undone())


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
def test_plain_state_dicts_can_be_loaded(name: str, tmp_path: Path) -> None:
    theirs = plain(RECIPES[name], 3)
    ours = OnTheDisk(name, tmp_path)
    ours.run(1)
    ours.go_on_from(theirs)
    ours.run(3)
    same_bits(ours.undone(), theirs.run(3))


def test_a_part_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    ours = OnTheDisk("clipped", tmp_path)
    ours.run(3)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.model.blocks[1].load_state_dict({"up.weight": torch.zeros(3, 3)}, strict=False)
    ours.run(STEPS - 3)
    same_bits(ours.undone(), plainly("clipped"))


def test_a_copied_model_is_whole(tmp_path: Path) -> None:
    training = OnTheDisk("clipped", tmp_path)
    training.run(1)
    twin = copy.deepcopy(training.model)
    training.undone()
    for name, value in training.model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)


def test_a_state_dict_may_have_stand_ins_that_are_read_one_by_one(tmp_path: Path) -> None:
    ours, theirs = OnTheDisk("plain", tmp_path), plain(RECIPES["plain"], 2)
    ours.run(2)
    assert ours.host is not None
    with ours.host.state_left_on_disk():
        state = ours.model.state_dict()
    cold = {name: value for name, value in state.items() if name.startswith("blocks")}
    assert all(value.isnan().all() for value in cold.values())
    assert sum(value.untyped_storage().nbytes() for value in cold.values()) <= 8 * len(cold)
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.host.numbers(state[name]), value), name
    ours.undone()


def test_a_host_too_small_says_so_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = OnTheDisk("plain", tmp_path)
    ours.run(3)
    assert ours.host is not None
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_limits", lambda *_: TINY)
        with pytest.raises(HostMemoryFull, match=r"weights of blocks\.0 from the disk"):
            ours.model.state_dict()
        with pytest.raises(HostMemoryFull, match="undoing what is on the disk"):
            ours.host.check_undo()
    ours.run(STEPS - 3)
    same_bits(ours.undone(), plainly("plain"))


# -- what may go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 3])
def test_a_full_disk_is_noticed_before_anything_changes(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = OnTheDisk("clipped")
    training.run(2)
    before = {name: value.data_ptr() for name, value in training.model.state_dict().items()}
    with monkeypatch.context() as patch:
        ScarceDisk(patch, slots)
        with pytest.raises(DiskFull):
            training.leave(tmp_path)
    assert {n: v.data_ptr() for n, v in training.model.state_dict().items()} == before
    assert list(tmp_path.iterdir()) == []
    same_bits(training.run(STEPS - 2), plainly("clipped"))


@pytest.mark.parametrize("writes", [0, 3, 15])
def test_a_disk_that_fails_while_weights_leave_gets_none(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = ScratchFile.write, 0

    def fail(*args: Any) -> None:
        nonlocal written
        written += 1
        if written > writes:
            raise OSError(5, "Input/output error")
        write(*args)

    training = OnTheDisk("clipped")
    training.run(2)
    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "write", fail)
        with pytest.raises(DiskDamaged, match="cannot be written"):
            training.leave(tmp_path, bucket=256)
    assert list(tmp_path.iterdir()) == []
    same_bits(training.run(STEPS - 2), plainly("clipped"))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
def test_a_bit_that_flips_on_the_disk_is_an_error_and_never_a_number(
    name: str, tmp_path: Path
) -> None:
    training = OnTheDisk(name, tmp_path, InstantLink(), buffers=2)
    training.run(2)
    slots = training.disk.opened[0]._disk._slots
    for slot in slots:
        assert slot.last_write is not None
        slot.last_write.checksums = [value ^ 1 for value in slot.last_write.checksums]
    with pytest.raises(DiskDamaged, match="other bytes came back"):
        for _ in range(2):  # a buffer may hold what was written
            training.run(1)
    assert all(loss == loss for loss in training.losses)
    for slot in slots:
        if slot.last_write is not None:
            slot.last_write.checksums = [value ^ 1 for value in slot.last_write.checksums]


def test_what_was_damaged_can_be_loaded_anew(tmp_path: Path) -> None:
    theirs = plain(RECIPES["plain"], 2)
    training = OnTheDisk("plain", tmp_path, InstantLink(), buffers=2)
    training.run(2)
    for slot in training.disk.opened[0]._disk._slots:
        assert slot.last_write is not None
        slot.last_write.checksums = [value ^ 1 for value in slot.last_write.checksums]
    with pytest.raises(DiskDamaged):
        training.model.state_dict()
    training.go_on_from(theirs)
    training.run(STEPS - 2)
    same_bits(training.undone(), plainly("plain"))


def test_a_write_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = OnTheDisk("plain", tmp_path, InstantLink())
    training.run(1)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ScratchFile, "write", fail)
        with pytest.raises(DiskDamaged, match="cannot be written"):
            training.run(1)


@pytest.mark.parametrize("name", ["clipped", "in parts, clipped", "masters, clipped"])
def test_a_failed_backward_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    training = OnTheDisk(name, tmp_path)
    for step in range(STEPS):
        if step == 3:
            fail_once(training.model)
            with same_batch_again(training), pytest.raises(RuntimeError, match="in the middle"):
                training.step(step)
            assert training.host is not None
            assert not training.host.dirty
            assert not training.streamed._residents
        training.step(step)
    training.run(0)
    same_bits(training.undone(), plainly(name))


@pytest.mark.parametrize("name", ["plain", "masters"])
def test_a_step_that_broke_off_says_so_and_can_be_undone(name: str, tmp_path: Path) -> None:
    training = OnTheDisk(name, tmp_path)
    training.step(0)
    fail_once(training.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        training.step(1)
    assert training.host is not None
    assert training.host.dirty
    with pytest.raises(BadInput, match="broke off halfway"):
        training.step(1)
    training.undone()
    assert list(tmp_path.iterdir()) == []
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


@pytest.mark.parametrize("name", ["clipped", "masters, clipped"])
def test_no_memory_in_mid_forward_can_be_made_good(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = OnTheDisk(name, tmp_path)
    for step in range(3):
        training.step(step)
    with (
        same_batch_again(training),
        little_room(monkeypatch, 40),
        pytest.raises(torch.OutOfMemoryError),
    ):
        training.step(3)
    assert training.host is not None
    training.host.abandon()
    training.host.settle()
    for step in range(3, STEPS):
        training.step(step)
    training.run(0)
    same_bits(training.undone(), plainly(name))


def test_weights_that_are_only_read_are_not_trained(tmp_path: Path) -> None:
    training, link = Training(recipe=RECIPES["plain"]), SharedLink()
    only_read = OnDisk(blocks=BLOCKS, open_store=Disk(link, tmp_path))
    streamed = StreamedWeights(training.model, BLOCKS, link, on_disk=only_read)
    with pytest.raises(BadInput, match="only read cannot be trained"):
        training.go_to_host(link, weights=streamed)
    streamed.undo()


def test_a_closed_disk_is_given_back(tmp_path: Path) -> None:
    training = OnTheDisk("plain", tmp_path)
    training.run(2)
    training.undone()
    store: DiskStore = training.disk.opened[0]._disk
    with pytest.raises(AssertionError, match="closed"):
        store.write(0, torch.zeros(1, dtype=torch.uint8))


def test_reading_weights_does_not_change_them(tmp_path: Path) -> None:
    training = OnTheDisk("clipped", tmp_path)
    for step in range(STEPS):
        training.step(step)
        assert training.host is not None
        training.host.settle()
        once, again = (dict(training.model.state_dict()) for _ in range(2))
        assert all(torch.equal(once[name], again[name]) for name in once)
        assert not any(isinstance(value, Tensor) and value.isnan().any() for value in once.values())
    training.run(0)
    same_bits(training.undone(), plainly("clipped"))
