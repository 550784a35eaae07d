"""Weights and optimizer on the host together train as the plain job does: to the bit."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from deferred_link import CountingLink, DeferredLink, NobodyWaits
from host_training import (
    Net,
    Recipe,
    Training,
    fail_once,
    little_room,
    nearly,
    overflowing,
    plain,
    same_batch_again,
    same_bits,
    step_once,
    two_groups,
    warm_up,
)
from test_streamed_weights import (
    compiled_eagerly,
    poisoned,  # noqa: F401 - every test here uses it
)
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.memory.link import Copy, InstantLink, Link
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.offload_activations import ActivationOffload
from oomph.techniques.recompute import recompute
from oomph.techniques.streamed_weights import StreamedWeights

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
STEPS = 5
"""A step that uses every parameter comes back."""


def tie(net: Net) -> None:
    """Two blocks share a matrix, two others a vector."""
    net.blocks[2].up.weight = net.blocks[0].up.weight
    net.blocks[1].norm.weight = net.blocks[0].norm.weight


def freeze(net: Net) -> None:
    net.blocks[1].requires_grad_(False)
    net.blocks[2].down.weight.requires_grad_(False)


def recompute_all(net: Net) -> None:
    for block in net.blocks:
        recompute(block)


def recompute_tied(net: Net) -> None:
    tie(net)
    recompute_all(net)


def autocast() -> Any:
    # Streamed weights do without its cache, with which gradients are summed in another order.
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(two_groups(model), lr=1e-2, momentum=0.9)


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)


RECIPES = {
    "plain": Recipe(),
    "clipped": Recipe(clip_norm=0.3),
    "in parts": Recipe(parts=2),
    "in parts, clipped": Recipe(parts=2, clip_norm=0.3),
    "scheduled": Recipe(schedule=warm_up),
    "scheduled, clipped": Recipe(schedule=warm_up, clip_norm=0.3),
    "tied": Recipe(prepare=tie),
    "tied, in parts, clipped": Recipe(prepare=tie, parts=2, clip_norm=0.3),
    "frozen": Recipe(prepare=freeze),
    "frozen, clipped": Recipe(prepare=freeze, clip_norm=0.3),
    "recomputed": Recipe(prepare=recompute_all),
    "recomputed, tied, in parts": Recipe(prepare=recompute_tied, parts=2),
    "recomputed, clipped": Recipe(prepare=recompute_all, clip_norm=0.3),
    "masters": Recipe(masters=True),
    "masters, clipped": Recipe(masters=True, clip_norm=0.3),
    "masters, in parts": Recipe(masters=True, parts=2),
    "masters, tied, in parts, clipped": Recipe(
        masters=True, prepare=recompute_tied, parts=2, clip_norm=0.3
    ),
    "autocast": Recipe(around_forward=autocast),
    "autocast, recomputed, clipped": Recipe(
        around_forward=autocast, prepare=recompute_all, clip_norm=0.3
    ),
    "bf16, clipped": Recipe(dtype=torch.bfloat16, clip_norm=0.3),
    "scaled": Recipe(scaler=overflowing),
    "scaled, clipped": Recipe(scaler=overflowing, clip_norm=0.3, parts=2),
    "momentum": Recipe(make_optimizer=momentum),
    "whole matrices": Recipe(make_optimizer=muon),
}

LINKS: dict[str, Callable[[], Link]] = {
    "instant": InstantLink,
    "by chance": lambda: DeferredLink(eager=0.3, seed=1),
    "otherwise by chance": lambda: DeferredLink(eager=0.6, seed=2),
}


@functools.cache
def plainly(name: str, steps: int = STEPS) -> Training:
    return plain(RECIPES[name], steps)


def away(
    name: str, link: Link, *, blocks: Sequence[str] = BLOCKS, coming: int = 1, **placement: Any
) -> tuple[Training, StreamedWeights]:
    """A training whose blocks are on the host, and its optimizer too."""
    training = Training(recipe=RECIPES[name])
    streamed = StreamedWeights(training.model, blocks, link, ahead=coming)
    training.go_to_host(link, weights=streamed, **placement)
    return training, streamed


def trained(name: str, link: Link, steps: int = STEPS, **how: Any) -> Training:
    return away(name, link, **how)[0].run(steps)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_steps_on_the_gpu_have_the_plain_bits(name: str) -> None:
    same_bits(trained(name, DeferredLink(), keep_gradients=3000), plainly(name))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    "name", ["plain", "tied, in parts, clipped", "recomputed", "masters, in parts"]
)
def test_whenever_copies_happen(name: str, link: str) -> None:
    same_bits(trained(name, LINKS[link](), keep_gradients=3000), plainly(name))


@pytest.mark.parametrize("name", ["tied", "tied, in parts, clipped", "masters, clipped"])
@pytest.mark.parametrize("keep", [None, 0])
@pytest.mark.parametrize("bucket", [64, 10**9])
@pytest.mark.parametrize("coming", [0, 2])
def test_sizes_change_nothing(name: str, keep: int | None, bucket: int, coming: int) -> None:
    link = DeferredLink()
    how = {"keep_gradients": keep, "bucket": bucket, "coming": coming, "ahead": 1}
    same_bits(trained(name, link, **how), plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
@pytest.mark.parametrize("blocks", [("blocks.1",), ("blocks.0", "blocks.2", "sometimes", "norm")])
def test_any_blocks_may_be_away(name: str, blocks: tuple[str, ...]) -> None:
    same_bits(trained(name, DeferredLink(), blocks=blocks), plainly(name))


@pytest.mark.parametrize("name", ["plain", "tied, in parts, clipped", "masters, clipped"])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("link", LINKS)
def test_steps_of_the_host_are_nearly_the_plain_ones(name: str, share: float, link: str) -> None:
    done = trained(name, LINKS[link](), host_share=share, keep_gradients=2000)
    nearly(done, plainly(name), tolerance=1e-3 if done.masters else 1e-6)


@pytest.mark.parametrize("name", ["plain", "clipped"])
def test_activations_are_offloaded_beside_weights(name: str) -> None:
    link = DeferredLink(eager=0.3)
    training, _ = away(name, link)
    offload = ActivationOffload(link, training.model, device_type="cpu", smallest=0)
    for block in training.model.blocks:
        offload.wrap(block)
    same_bits(training.run(STEPS), plainly(name))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_compiled_blocks_give_the_same_bits(
    recomputes: bool, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(net: Net) -> None:
        for block in net.blocks:
            if recomputes:
                recompute(block, compiled=True)
            compile_block(block)

    with compiled_eagerly(monkeypatch) as graphs:
        recipe = Recipe(prepare=prepare, clip_norm=clip_norm)
        expected = plain(recipe, STEPS)
        assert graphs
        training, link = Training(recipe=recipe), DeferredLink(eager=0.3)
        streamed = StreamedWeights(training.model, BLOCKS, link)
        training.go_to_host(link, weights=streamed)
        same_bits(training.run(STEPS), expected)


# -- when blocks come ------------------------------------------------------------------------------


class BlockLink(CountingLink, NobodyWaits):
    """Counts the blocks that come."""

    fetches = 0

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        self.fetches += source.dtype is torch.uint8
        return super().to_gpu(source, target, after)


@pytest.mark.parametrize(
    "name",
    ["plain", "in parts", "clipped", "masters, clipped", "recomputed", "recomputed, clipped"],
)
@pytest.mark.parametrize("bucket", [1024, 1500, 10**9])
def test_no_block_comes_in_vain(name: str, bucket: int) -> None:
    link = BlockLink(eager=0.5)
    training, _ = away(name, link, bucket=bucket)
    for step in range(2):
        training.step(step)
    for step in range(2, STEPS):
        link.fetches = 0
        training.step(step)
        parts = RECIPES[name].parts
        # Each block for forward; for backward the last two are still here; of the next part also.
        expected = 4 * parts - (parts - 1) * 2
        if RECIPES[name].clip_norm is not None:
            expected -= 3  # those are stepped when their forward comes, and are here for that
        assert link.fetches == expected, step


@pytest.mark.parametrize("name", ["plain", "clipped", "in parts, clipped", "masters, clipped"])
def test_the_host_never_waits_for_steps_of_the_gpu(name: str) -> None:
    link = BlockLink()
    training, _ = away(name, link, keep_gradients=2000)
    link.stepping = True
    for step in range(STEPS):
        training.step(step)
    link.stepping = False
    training.run(0)
    same_bits(training, plainly(name))


def test_a_block_that_the_host_still_steps_is_not_waited_for_by_the_one_before() -> None:
    link = DeferredLink()
    training, streamed = away("clipped", link, host_share=1.0)
    training.step(0)
    last = streamed._units[2]
    coming: list[bool] = []
    training.model.blocks[1].register_forward_hook(lambda *_: coming.append(last.memory is None))
    training.step(1)
    assert coming == [True]
    nearly(training.run(STEPS - 2), plainly("clipped"))


@pytest.mark.parametrize("name", ["clipped", "masters, clipped"])
def test_a_step_is_made_when_its_block_comes(name: str) -> None:
    training, streamed = away(name, DeferredLink(), bucket=256)
    training.step(0)
    weight = training.model.blocks[2].down.weight
    before = streamed._versions[weight]
    seen: list[bool] = []
    for block in training.model.blocks:
        block.register_forward_hook(lambda *_: seen.append(streamed._versions[weight] > before))
    training.step(1)
    assert seen == [False, False, True]
    same_bits(training.run(STEPS - 2), plainly(name))


@pytest.mark.parametrize("name", ["clipped", "masters, clipped"])
def test_what_the_gpu_has_just_stepped_does_not_come_from_the_host(name: str) -> None:
    link = CountingLink()
    training, streamed = away(name, link, bucket=256, keep_gradients=None)
    for step in range(2):
        training.step(step)
    unit, came = streamed._units[1], []
    training.model.blocks[1].register_forward_hook(lambda *_: came.append(list(unit.copies)))
    training.step(2)
    # In forward nothing of it; in the backward of the step before all of it came.
    assert came == [[]]
    same_bits(training.run(STEPS - 3), plainly(name))


def test_blocks_of_the_step_may_be_others_than_those_that_are_away() -> None:
    """What is named as a block there is inside of a block here."""
    training, link = Training(recipe=RECIPES["clipped"]), DeferredLink()
    streamed = StreamedWeights(training.model, BLOCKS, link)
    training.go_to_host(link, weights=streamed, blocks=[training.model.norm])
    same_bits(training.run(STEPS), plainly("clipped"))


def test_an_evaluation_between_steps_sees_the_new_weights() -> None:
    tokens = torch.arange(6).view(1, 6)
    theirs = plain(RECIPES["clipped"], 2)
    training, _ = away("clipped", DeferredLink())
    for step in range(2):
        training.step(step)
    with torch.no_grad():
        assert torch.equal(training.model(tokens, True), theirs.model(tokens, True))
    training.step(2)
    same_bits(training.run(STEPS - 3), plainly("clipped"))


class Resident(InstantLink):
    """Knows how many bytes of weights are on the GPU at once."""

    def __init__(self) -> None:
        self.most = 0
        self._there: dict[int, tuple[weakref.ref[Any], int]] = {}

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        storage = target.untyped_storage()
        self._there[storage._cdata] = weakref.ref(storage), storage.nbytes()
        alive = (size for there, size in self._there.values() if there() is not None)
        self.most = max(self.most, sum(alive))
        return super().to_gpu(source, target)


@pytest.mark.parametrize("name", ["plain", "clipped", "recomputed", "masters, clipped"])
def test_the_gpu_holds_two_blocks_and_a_few_buckets(name: str) -> None:
    link = Resident()
    training, streamed = away(name, link, keep_gradients=0, bucket=512, ahead=1)
    training.run(STEPS)
    block = max(unit.nbytes for unit in streamed._units)
    # Of a bucket come what is stepped, two states and a gradient; of buckets, one is stepped, two
    # come that are complete, and one that backward completes next.
    assert 2 * block <= link.most <= 2 * block + 4 * 4 * 512
    assert all(parameter.grad is None for parameter in training.model.parameters())


# -- from and to the plain optimizer ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped", "tied", "momentum"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_undone_in_mid_training_it_goes_on_plainly(name: str, share: float) -> None:
    link = BlockLink()
    training = plain(RECIPES[name], 2)
    streamed = StreamedWeights(training.model, BLOCKS, link)
    host = training.go_to_host(link, weights=streamed, host_share=share, keep_gradients=0)
    for step in range(2, 4):
        training.step(step)
    assert sum(link.live.values()) > 10000
    host.undo()
    streamed.undo()
    link.close()
    training.host = None
    gc.collect()
    assert link.live == {}
    training.run(STEPS - 4)
    if share:
        nearly(training, plainly(name), tolerance=1e-3 if training.masters else 1e-6)
    else:
        same_bits(training, plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
def test_state_dicts_are_the_plain_ones(name: str) -> None:
    ours, _ = away(name, DeferredLink())
    for step in range(3):
        ours.step(step)
    assert ours.host is not None
    ours.host.settle()
    theirs = Training(recipe=RECIPES[name])
    theirs.go_on_from(ours)
    same_bits(theirs.run(2), ours.run(2))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped"])
def test_plain_state_dicts_can_be_loaded(name: str) -> None:
    theirs = plain(RECIPES[name], 3)
    ours, _ = away(name, DeferredLink())
    ours.step(0)
    assert ours.host is not None
    ours.host.settle()
    ours.go_on_from(theirs)
    same_bits(ours.run(3), theirs.run(3))


def test_a_copied_model_is_whole() -> None:
    training, _ = away("clipped", DeferredLink())
    training.step(0)
    assert training.host is not None
    training.host.settle()
    twin = copy.deepcopy(training.model)
    for name, value in training.model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loads", [False, True])
def test_weights_of_another_layout_keep_it(fused: bool, loads: bool) -> None:
    """Channels-last weights, their state and their gradients lie alike on the host."""

    def train(link: Link | None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Flatten()
        )
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        streamed = StreamedWeights(model, ["0", "1"], link) if link is not None else None
        host = None
        if link is not None:
            placement = HostPlacement(bucket=64, keep_gradients=100)
            host = HostOptimizer(model, optimizer, link, placement, weights=streamed, clip_norm=1.0)
        for step in range(4):
            loss = model(torch.full((2, 3, 6, 6), float(step))).square().sum()
            step_once(loss, optimizer, host, clip_norm=1.0)
            if host is not None and loads and step == 1:
                saved = copy.deepcopy(optimizer.state_dict())
                for state in saved["state"].values():  # as if read from a file
                    state.update({name: value.contiguous() for name, value in state.items()})
                optimizer.load_state_dict(saved)
        if host is not None and streamed is not None:
            host.undo()
            streamed.undo()
            strides = {
                p.stride() == optimizer.state[p]["exp_avg"].stride() for p in model.parameters()
            }
            assert strides == {True}
        return model

    for ours, theirs in zip(
        train(DeferredLink()).parameters(), train(None).parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clipped", "in parts, clipped", "masters, clipped"])
def test_a_failed_backward_leaves_nothing_behind(name: str) -> None:
    link = BlockLink()
    training, streamed = away(name, link, keep_gradients=2000)
    for step in range(STEPS):
        if step == 3:
            held = sum(link.live.values())
            fail_once(training.model)
            with same_batch_again(training), pytest.raises(RuntimeError, match="in the middle"):
                training.step(step)
            assert training.host is not None
            assert not training.host.dirty
            assert not streamed._residents
            assert sum(link.live.values()) == held
        training.step(step)
    same_bits(training.run(0), plainly(name))


def test_a_failed_backward_that_stepped_something_says_so() -> None:
    link = BlockLink()
    training, streamed = away("plain", link)
    training.step(0)
    fail_once(training.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        training.step(1)
    host = training.host
    assert host is not None
    assert host.dirty
    with pytest.raises(BadInput, match="broke off halfway"):
        training.step(1)
    host.undo()
    streamed.undo()
    gc.collect()
    assert link.live == {}
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


def test_no_memory_in_mid_forward_can_be_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that finds no room comes later; the step is the same."""
    training, _ = away("masters, clipped", DeferredLink(), keep_gradients=2000)
    for step in range(3):
        training.step(step)
    with (
        same_batch_again(training),
        little_room(monkeypatch, 40),
        pytest.raises(torch.OutOfMemoryError),
    ):
        training.step(3)
    host = training.host
    assert host is not None
    host.abandon()
    host.settle()
    for step in range(3, STEPS):
        training.step(step)
    same_bits(training.run(0), plainly("masters, clipped"))


def test_a_full_host_leaves_everything_as_it_was() -> None:
    training = plain(RECIPES["masters, clipped"], 2)
    link = CountingLink(room=40000)
    streamed = StreamedWeights(training.model, BLOCKS, link)
    with pytest.raises(MemoryError):
        training.go_to_host(link, weights=streamed)
    training.host = None
    streamed.undo()
    gc.collect()
    assert link.live == {}
    same_bits(training.run(STEPS - 2), plainly("masters, clipped"))
