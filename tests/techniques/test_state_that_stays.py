"""State that stays on the GPU beside an optimizer on the host: the same numbers, no copies."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from deferred_link import CountingLink, DeferredLink
from host_training import Recipe, Training, nearly, overflowing, plain, same_bits, warm_up
from test_host_optimizer import LINKS, of

from oomph.errors import BadInput
from oomph.techniques import host_placement

STEPS = 7
"""A step that uses every parameter comes back twice."""

RECIPES = {
    "plain": Recipe(),
    "in parts, clipped": Recipe(parts=2, clip_norm=0.3),
    "scheduled, clipped": Recipe(schedule=warm_up, clip_norm=0.3),
    "bf16, clipped": Recipe(dtype=torch.bfloat16, clip_norm=0.3),
    "masters": Recipe(masters=True),
    "masters, clipped": Recipe(masters=True, clip_norm=0.3),
    "scaled, clipped": Recipe(scaler=overflowing, clip_norm=0.3, parts=2),
    "momentum": Recipe(make_optimizer=of(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "amsgrad": Recipe(make_optimizer=of(torch.optim.Adam, amsgrad=True)),
    "fused": Recipe(make_optimizer=of(torch.optim.AdamW, fused=True), clip_norm=0.3),
}


@functools.cache
def plainly(name: str) -> Training:
    return plain(RECIPES[name], STEPS)


def begun(name: str, link: Any = None, **placement: Any) -> Training:
    training = Training(recipe=RECIPES[name])
    training.go_to_host(link or DeferredLink(), **placement)
    return training


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("name", RECIPES)
def test_it_has_the_plain_bits(name: str, share: float) -> None:
    same_bits(begun(name, gpu_share=share, keep_gradients=3000).run(STEPS), plainly(name))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["plain", "masters, clipped"])
def test_whenever_copies_happen(name: str, link: str) -> None:
    trained = begun(name, LINKS[link](), gpu_share=0.5, early=3).run(STEPS)
    same_bits(trained, plainly(name))


@pytest.mark.parametrize("name", ["plain", "in parts, clipped"])
def test_the_host_steps_none_of_it(name: str) -> None:
    trained = begun(name, gpu_share=0.5, host_share=0.5)
    nearly(trained.run(STEPS), plainly(name))
    assert trained.host is not None
    on_host = {t.owned for t in trained.host._order.host_stepped}
    staying = {t.owned for t in trained.host._staying}
    assert on_host and staying and not on_host & staying


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("name", RECIPES)
def test_hardly_any_state_is_not_worth_a_copy(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_placement, "LITTLE", 0.01)
    trained = begun(name, gpu_share=share, keep_gradients=3000)
    same_bits(trained.run(STEPS), plainly(name))
    assert trained.host is not None
    total = sum(one.leaf.numel() for one in trained.host._trained)
    little = {one for one in trained.host._trained if one.leaf.numel() <= total / 100}
    assert len(little) > 5 and little <= trained.host._staying
    assert (little < trained.host._staying) is bool(share)


@pytest.mark.parametrize("name", ["plain", "masters, clipped"])
def test_only_the_others_take_host_memory(name: str) -> None:
    taken = []
    for share in (0.0, 0.5, 1.0):
        link = CountingLink()
        training = begun(name, link, gpu_share=share).run(2)
        taken.append(sum(link.live.values()))
        assert training.host is not None
        training.host.undo()
    assert taken[0] > taken[1] > taken[2] == 0


@pytest.mark.parametrize("name", ["plain", "masters, clipped", "momentum", "fused"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_undone_in_mid_training_it_goes_on_plainly(name: str, share: float) -> None:
    training = plain(RECIPES[name], 2)
    link = CountingLink()
    host = training.go_to_host(link, gpu_share=share)
    for step in range(2, 5):
        training.step(step)
    host.undo()
    assert link.live == {}
    training.host = None
    same_bits(training.run(STEPS - 5), plainly(name))


@pytest.mark.parametrize("name", ["plain", "masters, clipped", "amsgrad"])
def test_its_state_dict_is_the_plain_one(name: str) -> None:
    ours = begun(name, gpu_share=0.5)
    for step in range(3):
        ours.step(step)
    saved = copy.deepcopy(ours.optimizer.state_dict())
    theirs = plain(RECIPES[name], 3)
    theirs.optimizer.load_state_dict(saved)
    same_bits(theirs.run(3), ours.run(3))


@pytest.mark.parametrize("name", ["plain", "masters, clipped", "fused"])
def test_a_plain_state_dict_can_be_loaded(name: str) -> None:
    theirs = plain(RECIPES[name], 3)
    ours = begun(name, gpu_share=0.5)
    ours.step(0)
    assert ours.host is not None
    ours.host.settle()
    ours.go_on_from(theirs)
    same_bits(ours.run(4), theirs.run(4))


def test_a_share_is_a_share() -> None:
    with pytest.raises(BadInput, match="between 0 and 1"):
        begun("plain", gpu_share=1.5)
