"""An optimizer on the host trains as the plain one does: to the bit where the GPU steps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deferred_link import CountingLink, DeferredLink, NobodyWaits
from host_training import (
    SMALL,
    MakeOptimizer,
    Recipe,
    Training,
    adamw,
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
from torch import Tensor, nn

from oomph.errors import BadInput
from oomph.memory.link import InstantLink, Link
from oomph.techniques import host_optimizer, host_step
from oomph.techniques.fused_optimizer import fuse_optimizer
from oomph.techniques.gradient_norm import clip_coefficient, gradient_norm
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.low_bit_state import low_bit_state
from oomph.techniques.optimizer_twin import OptimizerTwin
from oomph.techniques.recompute import recompute
from oomph.techniques.step_buckets import make_buckets
from oomph.techniques.watched_tensors import own_work

STEPS = 7
"""A step that uses every parameter comes back twice."""


@functools.cache
def plainly(name: str, steps: int = STEPS) -> Training:
    return plain(RECIPES[name], steps)


def on_host(name: str, link: Link, steps: int = STEPS, **placement: Any) -> Training:
    training = Training(recipe=RECIPES[name])
    training.go_to_host(link, **placement)
    return training.run(steps)


def of(optimizer: type[torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: optimizer(two_groups(model), **{"lr": 1e-2, **options})  # type: ignore[call-arg]


RECIPES = {
    "plain": Recipe(),
    "clipped": Recipe(clip_norm=0.3),
    "hardly clipped": Recipe(clip_norm=1e6),
    "in parts": Recipe(parts=2),
    "in parts, clipped": Recipe(parts=2, clip_norm=0.3),
    "scheduled": Recipe(schedule=warm_up),
    "scheduled, clipped": Recipe(schedule=warm_up, clip_norm=0.3),
    "tensor rate": Recipe(
        # Schedulers write to it: a new one for each.
        make_optimizer=lambda model: torch.optim.AdamW(
            two_groups(model), lr=torch.tensor(1e-2), foreach=False
        ),
        schedule=warm_up,
        clip_norm=0.3,
    ),
    "bf16, clipped": Recipe(dtype=torch.bfloat16, clip_norm=0.3),
    "bf16, in parts, clipped": Recipe(dtype=torch.bfloat16, parts=2, clip_norm=0.3),
    "masters": Recipe(masters=True),
    "masters, clipped": Recipe(masters=True, clip_norm=0.3),
    "masters, in parts, clipped": Recipe(masters=True, parts=2, clip_norm=0.3),
    "scaled": Recipe(scaler=overflowing),
    "scaled, clipped": Recipe(scaler=overflowing, clip_norm=0.3, parts=2),
    "sgd": Recipe(make_optimizer=of(torch.optim.SGD)),
    "momentum": Recipe(make_optimizer=of(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "adam, amsgrad, clipped": Recipe(
        make_optimizer=of(torch.optim.Adam, amsgrad=True), clip_norm=0.3
    ),
    "maximize": Recipe(make_optimizer=of(torch.optim.AdamW, maximize=True)),
    "fused": Recipe(make_optimizer=of(torch.optim.AdamW, fused=True), clip_norm=0.3),
    "foreach": Recipe(make_optimizer=of(torch.optim.AdamW, foreach=True), clip_norm=0.3),
}

LINKS: dict[str, Callable[[], Link]] = {
    "instant": InstantLink,
    "late": DeferredLink,
    "by chance": lambda: DeferredLink(eager=0.3, seed=1),
    "otherwise by chance": lambda: DeferredLink(eager=0.6, seed=2),
    "early": lambda: DeferredLink(eager=1.0),
}


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_streamed_steps_have_the_plain_bits(name: str) -> None:
    same_bits(on_host(name, DeferredLink(), keep_gradients=3000), plainly(name))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["plain", "in parts, clipped", "masters, clipped"])
def test_whenever_copies_happen(name: str, link: str) -> None:
    same_bits(on_host(name, LINKS[link](), keep_gradients=3000), plainly(name))
    trained = on_host(name, LINKS[link](), host_share=0.5)
    nearly(trained, plainly(name), tolerance=1e-3 if trained.masters else 1e-6)


@pytest.mark.parametrize("name", [n for n in RECIPES if not n.startswith("bf16")])
def test_steps_of_the_host_are_nearly_the_plain_ones(name: str) -> None:
    trained = on_host(name, DeferredLink(), host_share=1.0)
    if RECIPES[name].masters:  # where fp32 rounds the other way, bf16 weights differ by a bit
        nearly(trained, plainly(name), tolerance=1e-3)
    else:
        nearly(trained, plainly(name))


@pytest.mark.parametrize(
    "name",
    ["clipped", "in parts, clipped", "bf16, clipped", "masters", "masters, clipped", "fused"],
)
def test_the_host_takes_gradients_a_little_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is scaled or converted is cut from the second step on, which changes nothing."""
    whole = on_host(name, DeferredLink(), host_share=1.0, bucket=1 << 20)
    largest = []
    step = OptimizerTwin.step

    def noting(self: Any, group: Any, tensors: Any, states: Any) -> Any:
        largest.append(max(tensor.numel() for tensor in tensors))
        return step(self, group, tensors, states)

    monkeypatch.setattr(OptimizerTwin, "step", noting)
    monkeypatch.setattr(host_step, "_IN_CACHE", 16)
    nearly(on_host(name, DeferredLink(), host_share=1.0, bucket=1 << 20), whole)
    assert max(largest) > 256
    assert max(largest[-3:]) <= 256


@pytest.mark.parametrize("name", ["plain", "in parts, clipped", "masters, clipped"])
def test_over_a_hundred_steps(name: str) -> None:
    link = DeferredLink(eager=0.5, seed=2)
    trained = on_host(name, link, 100, keep_gradients=2000, bucket=3000)
    same_bits(trained, plainly(name, 100))


def test_over_a_hundred_steps_of_the_host() -> None:
    trained = on_host("clipped", DeferredLink(), 100, host_share=1.0, bucket=3000)
    nearly(trained, plainly("clipped", 100))


@pytest.mark.parametrize("name", ["plain", "clipped", "in parts, clipped"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_both_ways_share_the_parameters(name: str, share: float) -> None:
    link = DeferredLink(eager=0.3, seed=3)
    nearly(on_host(name, link, host_share=share, keep_gradients=500), plainly(name))


@pytest.mark.parametrize("name", ["in parts", "masters, clipped"])
@pytest.mark.parametrize("keep", [None, 0, 1000])
@pytest.mark.parametrize("bucket", [1, 10**9])
def test_sizes_change_nothing(name: str, keep: int | None, bucket: int) -> None:
    trained = on_host(name, DeferredLink(), keep_gradients=keep, bucket=bucket, ahead=1)
    same_bits(trained, plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "in parts, clipped", "masters, clipped"])
@pytest.mark.parametrize("early", [1, 7, 10**6])
@pytest.mark.parametrize("link", LINKS)
def test_state_may_come_as_early_as_it_likes(name: str, early: int, link: str) -> None:
    placement = {"keep_gradients": 2000, "bucket": 500, "ahead": 1, "early": early}
    same_bits(on_host(name, LINKS[link](), **placement), plainly(name))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["plain", "clipped"])
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
def test_every_optimizer_of_single_parameters(
    optimizer: type[torch.optim.Optimizer], name: str
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return optimizer(list(model.parameters()), lr=1e-2)  # type: ignore[call-arg]

    recipe = Recipe(make_optimizer=make, clip_norm=RECIPES[name].clip_norm)
    ours, theirs = Training(recipe=recipe), plain(recipe, STEPS)
    ours.go_to_host(DeferredLink(), keep_gradients=2000)
    same_bits(ours.run(STEPS), theirs)
    ours = Training(recipe=recipe)
    ours.go_to_host(DeferredLink(), host_share=1.0)
    nearly(ours.run(STEPS), theirs)


def test_muon_steps_whole_matrices() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)

    recipe = Recipe(make_optimizer=make)
    ours = Training(recipe=recipe)
    ours.go_to_host(DeferredLink(), bucket=64)
    same_bits(ours.run(STEPS), plain(recipe, STEPS))


def test_state_of_another_layout() -> None:
    """Channels-last weights keep their strides on the host."""

    def train(link: Link | None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        host = HostOptimizer(model, optimizer, link, HostPlacement(bucket=64)) if link else None
        for step in range(4):
            loss = model(torch.full((2, 3, 6, 6), float(step))).square().sum()
            step_once(loss, optimizer, host)
        return model

    for ours, theirs in zip(
        train(DeferredLink()).parameters(), train(None).parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_fused_optimizer_stays_fused() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        fuse_optimizer(optimizer)
        return optimizer

    recipe = Recipe(make_optimizer=make, clip_norm=0.3)
    ours = Training(recipe=recipe)
    ours.go_to_host(DeferredLink())
    same_bits(ours.run(STEPS), plain(recipe, STEPS))


def test_norms_of_many_types_are_put_together_as_clipping_does() -> None:
    types = [torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.float32]
    torch.manual_seed(0)
    gradients = [torch.randn(300 + at, dtype=dtype) for at, dtype in enumerate(types)]
    norms = [(gradient_norm(gradient), gradient.dtype) for gradient in gradients]
    ours = clip_coefficient(norms, 0.7)
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, 0.7)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(gradient.mul_(ours), parameter.grad)  # type: ignore[arg-type]


# -- races -----------------------------------------------------------------------------------------


class Impatient(DeferredLink):
    """From some copy on, nobody really waits: what comes of forgotten waits."""

    def __init__(self, patience: int) -> None:
        super().__init__()
        self.patience = patience

    def _enqueue(self, *args: Any) -> Any:
        copy = super()._enqueue(*args)
        self.patience -= 1
        if self.patience < 0:
            copy.wait = lambda: setattr(copy, "_held", ())
        return copy


@pytest.mark.parametrize("name", ["plain", "clipped"])
@pytest.mark.parametrize("patience", [60, 100])
def test_forgotten_waits_would_be_noticed(name: str, patience: int) -> None:
    with pytest.raises(AssertionError):
        same_bits(on_host(name, Impatient(patience), keep_gradients=2000), plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "in parts, clipped", "masters, clipped"])
def test_the_host_never_waits_for_streamed_steps(name: str) -> None:
    link = NobodyWaits()
    training = Training(recipe=RECIPES[name])
    host = training.go_to_host(link, keep_gradients=2000)
    link.stepping = True
    for step in range(STEPS):
        training.step(step)
    link.stepping = False
    host.settle()
    same_bits(training, plainly(name))


def test_a_step_is_not_complete_before_the_next_forward() -> None:
    training = Training(recipe=RECIPES["clipped"])
    host = training.go_to_host(DeferredLink())
    training.step(0)
    last = training.model.norm.weight
    with own_work():  # whoever looks otherwise has it stepped
        before = last.clone()
    seen: list[bool] = []

    def look(*_: Any) -> None:
        with own_work():
            seen.append(torch.equal(last, before))

    training.model.blocks[2].register_forward_pre_hook(look)
    training.model.norm.register_forward_hook(look)
    training.step(1)
    assert seen == [True, False]
    host.settle()


# -- from and to the plain optimizer ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped", "momentum", "fused"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_undone_in_mid_training_it_goes_on_plainly(name: str, share: float) -> None:
    training = plain(RECIPES[name], 2)
    link = DeferredLink()
    host = training.go_to_host(link, host_share=share)
    for step in range(2, 5):
        training.step(step)
    host.undo()
    link.close()
    training.host = None
    training.run(STEPS - 5)
    if share and name != "fused":
        nearly(training, plainly(name), tolerance=1e-3 if training.masters else 1e-6)
    else:
        same_bits(training, plainly(name))


@pytest.mark.parametrize("name", ["plain", "clipped", "adam, amsgrad, clipped", "momentum"])
def test_its_state_dict_is_the_plain_one(name: str) -> None:
    ours = Training(recipe=RECIPES[name])
    ours.go_to_host(DeferredLink())
    for step in range(3):
        ours.step(step)
    # It settles what is under way. What is loaded must not share memory with what is trained.
    saved = copy.deepcopy(ours.optimizer.state_dict())
    theirs = plain(RECIPES[name], 3)
    expected = theirs.optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    theirs.optimizer.load_state_dict(saved)
    same_bits(theirs.run(3), ours.run(3))


@pytest.mark.parametrize("name", ["plain", "clipped", "masters, clipped", "fused"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_plain_state_dict_can_be_loaded(name: str, share: float) -> None:
    theirs = plain(RECIPES[name], 3)
    ours = Training(recipe=RECIPES[name])
    link = DeferredLink()
    ours.go_to_host(link, host_share=share)
    ours.step(0)
    ours.optimizer.load_state_dict(theirs.optimizer.state_dict())
    assert ours.state().keys() == theirs.state().keys()
    for at, value in ours.state().items():
        assert torch.equal(value, theirs.state()[at]), at
    ours.run(2)


def test_loading_goes_on_as_if_nothing_had_been() -> None:
    theirs = plain(RECIPES["clipped"], 3)
    ours = Training(recipe=RECIPES["clipped"])
    ours.go_to_host(DeferredLink())
    ours.go_on_from(theirs)
    same_bits(ours.run(4), theirs.run(4))


def test_weights_that_somebody_writes_to_are_stepped_by_the_host() -> None:
    def train(share: float | None) -> Training:
        training = Training(recipe=RECIPES["clipped"])
        host = training.go_to_host(DeferredLink(), host_share=share) if share else None
        for step in range(STEPS):
            if step == 3:
                if host is not None:
                    host.settle()
                with torch.no_grad():
                    for parameter in training.model.parameters():
                        parameter.mul_(0.5)
            training.step(step)
        return training.run(0)

    nearly(train(1.0), train(None))


@pytest.mark.parametrize("name", ["plain", "in parts, clipped", "masters, clipped"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_undo_gives_all_host_memory_back(name: str, share: float) -> None:
    link = CountingLink()
    training = Training(recipe=RECIPES[name])
    host = training.go_to_host(link, host_share=share, keep_gradients=0)
    for step in range(3):
        training.step(step)
    assert sum(link.live.values()) > 10000
    host.undo()
    assert link.live == {}


def test_state_is_on_the_host_and_undo_takes_it_back() -> None:
    link = CountingLink()
    training = Training(recipe=RECIPES["clipped"])
    host = training.go_to_host(link)
    training.run(2)
    state = training.optimizer.state[training.model.embed.weight]
    assert state["exp_avg"].untyped_storage()._cdata in link.live
    host.undo()
    host.undo()
    assert training.optimizer.state[training.model.embed.weight]["exp_avg"].shape == (24, 16)
    assert link.live == {}


def test_a_full_host_leaves_the_optimizer_as_it_was() -> None:
    training = plain(RECIPES["masters, clipped"], 2)
    before = training.state(), training.weights()
    with pytest.raises(MemoryError):
        training.go_to_host(CountingLink(room=20000))
    training.host = None
    for one, other in zip(before, (training.state(), training.weights()), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    same_bits(training.run(STEPS - 2), plainly("masters, clipped"))


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clipped", "in parts, clipped", "masters, clipped"])
def test_a_failed_backward_leaves_nothing_behind(name: str) -> None:
    training = Training(recipe=RECIPES[name])
    host = training.go_to_host(DeferredLink(), keep_gradients=2000)
    for step in range(STEPS):
        if step == 3:
            fail_once(training.model)
            with same_batch_again(training), pytest.raises(RuntimeError, match="in the middle"):
                training.step(step)
            assert not host.dirty
        training.step(step)
    same_bits(training.run(0), plainly(name))


def test_a_failed_backward_that_stepped_something_says_so() -> None:
    training = Training(recipe=RECIPES["plain"])
    host = training.go_to_host(DeferredLink())
    training.step(0)
    fail_once(training.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        training.step(1)
    assert host.dirty
    with pytest.raises(BadInput, match="broke off halfway"):
        training.step(1)
    host.undo()


def test_no_memory_in_mid_forward_can_be_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that finds no room comes later; the step is the same."""
    training = Training(recipe=RECIPES["clipped"])
    host = training.go_to_host(DeferredLink(), keep_gradients=2000)
    for step in range(3):
        training.step(step)
    with (
        same_batch_again(training),
        little_room(monkeypatch, 4),
        pytest.raises(torch.OutOfMemoryError),
    ):
        training.step(3)
    host.abandon()
    host.settle()
    for step in range(3, STEPS):
        training.step(step)
    same_bits(training.run(0), plainly("clipped"))


def test_weights_that_nobody_waited_for_are_stepped_when_they_are_used() -> None:
    """A module that was called so far is passed over, and its weight used all the same."""

    def passed_over(training: Training) -> Training:
        training.step(0)
        norm = training.model.norm
        training.model.norm = nn.Identity()
        training.model.head.register_forward_pre_hook(
            lambda _, args: nn.functional.layer_norm(args[0], norm.normalized_shape, norm.weight)
        )
        for step in range(1, 4):
            training.step(step)
        return training

    training = Training(recipe=RECIPES["clipped"])
    host = training.go_to_host(DeferredLink())
    passed_over(training)
    host.settle()
    same_bits(training, passed_over(Training(recipe=RECIPES["clipped"])))


def test_a_module_that_is_never_called_is_ready_before_all_others() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self) -> None:
            raise AssertionError("nobody calls it")

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.holder = Holder()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.first(x) @ self.holder.weight
            return out

    def train(link: Link | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Direct()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        host = HostOptimizer(model, optimizer, link, clip_norm=0.1) if link else None
        for _ in range(4):
            step_once(model(torch.ones(2, 4)).square().sum(), optimizer, host, clip_norm=0.1)
        if host is not None:
            host.settle()
        return list(model.parameters())

    for ours, theirs in zip(train(DeferredLink()), train(None), strict=True):
        assert torch.equal(ours, theirs)


def test_a_second_backward_that_claims_to_be_the_last_is_refused() -> None:
    training = Training(recipe=RECIPES["clipped"])
    host = training.go_to_host(InstantLink())
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with host.backward():
        training.model(tokens, False).sum().backward()
    with pytest.raises(BadInput, match="second gradient"), host.backward():
        training.model(tokens, False).sum().backward()


def test_a_step_without_a_last_backward_is_refused() -> None:
    training = Training(recipe=RECIPES["clipped"])
    host = training.go_to_host(InstantLink(), keep_gradients=0)
    with host.backward(last=False):
        training.model(torch.zeros(2, 3, dtype=torch.long), False).sum().backward()
    with pytest.raises(BadInput, match="no backward was the last"):
        host.step()


def test_a_parameter_that_joins_later_is_refused() -> None:
    training = Training(recipe=RECIPES["clipped"])
    training.go_to_host(InstantLink())
    training.step(0)
    training.model.frozen.requires_grad_(True)
    with pytest.raises(BadInput, match="added or unfrozen"):
        training.step(1)


class Lion(torch.optim.Optimizer):
    """Somebody's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-4})

    def step(self, closure: Any = None) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Lion, "Lion"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable"),
    ],
)
def test_optimizers_that_cannot_go_are_refused_by_name(make: Any, why: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(BadInput, match=why):
        HostOptimizer(model, make(list(model.parameters())), InstantLink())


def test_step_hooks_and_8_bit_state_are_refused() -> None:
    model = nn.Linear(2, 2)
    hooked = adamw(model)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(BadInput, match="hooks"):
        HostOptimizer(model, hooked, InstantLink())
    low = torch.optim.AdamW(model.parameters())
    low_bit_state(low)
    with pytest.raises(BadInput, match="8 bits"):
        HostOptimizer(model, low, InstantLink())


@pytest.mark.parametrize("placement", [{"host_share": 1.5}, {"bucket": 0}, {"ahead": 0}])
def test_settings_that_cannot_be_meant_are_refused(placement: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(BadInput):
        HostOptimizer(model, adamw(model), InstantLink(), HostPlacement(**placement))


# -- what is moved ---------------------------------------------------------------------------------


def test_gradients_that_have_room_stay() -> None:
    moved = {}
    for keep in (None, 0):
        link = DeferredLink()
        training = Training(recipe=RECIPES["clipped"])
        training.go_to_host(link, keep_gradients=keep)
        training.run(4)
        before = dict(link.bytes)
        training.run(1)  # uses all parameters
        moved[keep] = {way: link.bytes[way] - before[way] for way in before}
    stepped = sum(p.nbytes for p in training.model.parameters() if p.requires_grad)
    assert moved[None] == {"out": 2 * stepped, "in": 2 * stepped}
    assert moved[0] == {"out": 3 * stepped, "in": 3 * stepped}


def test_gradients_of_masters_travel_as_small_as_they_were_made() -> None:
    link = DeferredLink()
    training = Training(recipe=RECIPES["masters, clipped"])
    training.go_to_host(link, host_share=1.0)
    training.run(4)
    before = dict(link.bytes)
    training.run(1)
    stepped = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    coefficient = 4
    assert link.bytes["out"] - before["out"] == 2 * stepped + coefficient
    assert link.bytes["in"] - before["in"] == 2 * stepped


def test_buckets_hold_no_more_than_their_size() -> None:
    training = Training(recipe=RECIPES["plain"])
    host = training.go_to_host(InstantLink())
    training.run(1)
    assert len(host._order.buckets) > 10
    for bucket in host._order.buckets:
        assert sum(4 * piece.numel for piece in bucket.pieces) <= SMALL
    whole = make_buckets(host._trained, SMALL, may_cut=False)
    assert all(piece.is_whole for bucket in whole for piece in bucket.pieces)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
)
def test_the_hosts_kernels_step_every_element(
    cls: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    start, gradient = torch.rand(100).add_(0.5).to(dtype), torch.ones(100, dtype=dtype)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    plain, other = (cls([weight], lr=0.1) for weight in weights)
    for weight in weights:
        weight.grad = gradient.clone()
    plain.step()
    OptimizerTwin(other, on_host=True).step(other.param_groups[0], [weights[1]], [{}])
    moved = [(weight.detach() - start).float() for weight in weights]
    torch.testing.assert_close(moved[1], moved[0], rtol=0.2, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["plain", "in parts", "masters", "scheduled", "momentum"])
def test_the_first_backward_of_recomputed_blocks_steps_at_its_end(
    name: str, link: str, share: float
) -> None:
    training = Training(recipe=RECIPES[name])
    for block in training.model.blocks:
        recompute(block)
    host = training.go_to_host(LINKS[link](), host_share=share)
    stepped: list[bool] = []
    training.model.embed.weight.register_post_accumulate_grad_hook(
        lambda _: stepped.append(host.has_stepped)
    )
    training.run(STEPS)
    parts = RECIPES[name].parts
    assert not any(stepped[:parts]) and (share or stepped[-1])
    if share:
        nearly(training, plainly(name), tolerance=1e-3 if training.masters else 1e-6)
    else:
        same_bits(training, plainly(name))


def test_it_steps_inside_the_first_backward_where_the_host_has_no_room_for_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_optimizer, "MOST_OF_HOST", 0.0)
    training = Training(recipe=RECIPES["plain"])
    for block in training.model.blocks:
        recompute(block)
    host = training.go_to_host(DeferredLink())
    fail_once(training.model)
    with pytest.raises(RuntimeError, match="in the middle"):
        training.step(0)
    assert host.dirty
    host.undo()


def test_gradients_that_waited_give_their_host_memory_back() -> None:
    taken = []
    for recomputes in (False, True):
        link = CountingLink(eager=1.0)
        training = Training(recipe=RECIPES["plain"])
        for block in training.model.blocks if recomputes else ():
            recompute(block)
        host = training.go_to_host(link)
        training.run(2)
        taken.append(sum(link.live.values()))
        host.undo()
    assert taken[0] == taken[1] > 0
