"""Stepping inside backward gives the numbers of the plain optimizer, without all gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import oomph
from oomph.errors import BadInput, SteppedTooEarly
from oomph.rehearsal.world import pretend
from oomph.techniques.optimizer_in_backward import OptimizerInBackward
from oomph.techniques.optimizer_steps import PER_PARAMETER, steps_in_its_place

Make = Callable[[Any], torch.optim.Optimizer]

VARIANTS = [
    (cls, options)
    for cls in PER_PARAMETER
    for options in (
        {},
        {"foreach": True},
        {"foreach": False},
        {"fused": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"amsgrad": True},
        {"maximize": True},
    )
    if options.keys() <= inspect.signature(cls).parameters.keys()
]


class Net(nn.Module):
    """Three layers; the last is also the first, turned around."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
        self.unused = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.tanh(layer(x))
        return F.linear(x, self.layers[0].weight.t())


def batches(steps: int = 3, parts: int = 2) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(4, 6) for _ in range(parts)] for _ in range(steps)]


def step_once(
    loss: Tensor, optimizer: torch.optim.Optimizer, in_backward: OptimizerInBackward | None
) -> None:
    if in_backward is not None:
        with in_backward.armed():
            loss.backward()
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parts in batches():
        for part in parts:
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, in_backward: OptimizerInBackward
) -> None:
    for *parts, last in batches():
        for part in parts:
            model(part).square().mean().backward()
        loss = model(last).square().mean()
        with in_backward.armed():
            loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())


def assert_equal(one: Any, other: Any) -> None:
    """Bitwise, through nested dicts and lists."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def assert_same_training(make: Make) -> None:
    plain, stepped = Net(), Net()
    plain_optimizer, optimizer = make(plain.parameters()), make(stepped.parameters())
    train_plainly(plain, plain_optimizer)
    train_in_backward(stepped, optimizer, OptimizerInBackward(optimizer))
    assert_equal(stepped.state_dict(), plain.state_dict())
    assert_equal(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize(("cls", "options"), VARIANTS)
def test_weights_and_state_are_the_plain_optimizers_to_the_bit(
    cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    assert_same_training(lambda parameters: cls(parameters, lr=0.01, **options))


def test_every_optimizer_of_torch_is_taken_or_refused_by_name() -> None:
    classes = {
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    left = classes - set(PER_PARAMETER)
    assert left == {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(BadInput, match=f"{cls.__name__}: use one of torch.optim's"):
            OptimizerInBackward(cls(Net().parameters()))


def test_a_class_with_a_step_of_its_own_is_refused_and_one_without_is_not() -> None:
    class Renamed(torch.optim.AdamW):
        pass

    class Other(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    OptimizerInBackward(Renamed(Net().parameters()))
    with pytest.raises(BadInput, match="Other"):
        OptimizerInBackward(Other(Net().parameters()))


def test_each_group_keeps_its_hyper_parameters_and_follows_its_schedule() -> None:
    def train(armed: bool) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.5}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        in_backward = OptimizerInBackward(optimizer) if armed else None
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: n])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scheduler warns if it steps before the optimizer
            for (part,) in batches(steps=4, parts=1):
                step_once(model(part).square().mean(), optimizer, in_backward)
                scheduler.step()
        return model, optimizer

    (plain, plain_optimizer), (stepped, optimizer) = train(False), train(True)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert_equal(stepped.state_dict(), plain.state_dict())
    assert_equal(optimizer.state_dict(), plain_optimizer.state_dict())


def test_a_schedule_goes_on_although_no_parameter_got_a_gradient() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    in_backward = OptimizerInBackward(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with in_backward.armed():
            pass
        scheduler.step()
    assert scheduler.get_last_lr() == [0.05]


def test_groups_loaded_meanwhile_are_the_ones_that_count() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_backward = OptimizerInBackward(optimizer)
    optimizer.load_state_dict(torch.optim.SGD(Net().parameters(), lr=0.0).state_dict())
    with in_backward.armed():
        model(torch.ones(1, 6)).sum().backward()
    assert_equal(model.state_dict(), Net().state_dict())


def test_only_the_armed_backward_steps() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_backward = OptimizerInBackward(optimizer)
    model(torch.ones(1, 6)).sum().backward()
    assert_equal(model.state_dict(), Net().state_dict())
    assert model.layers[0].weight.grad is not None
    with in_backward.armed():
        pass
    assert not torch.equal(model.layers[0].weight, Net().layers[0].weight)


def test_a_parameter_that_the_last_backward_does_not_reach_is_stepped_at_its_end() -> None:
    def losses(model: Net) -> list[Tensor]:
        x = torch.ones(1, 6)
        return [model.unused(x).sum(), model(x).sum()]

    plain, stepped = Net(), Net()
    plain_optimizer = torch.optim.Adam(plain.parameters())
    optimizer = torch.optim.Adam(stepped.parameters())
    in_backward = OptimizerInBackward(optimizer)
    for loss in losses(plain):
        loss.backward()
    plain_optimizer.step()
    early, last = losses(stepped)
    early.backward()
    with in_backward.armed():
        last.backward()
    assert_equal(stepped.state_dict(), plain.state_dict())
    assert_equal(optimizer.state_dict(), plain_optimizer.state_dict())
    assert stepped.unused.weight.grad is None


def test_a_parameter_without_a_gradient_gets_no_state() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with OptimizerInBackward(optimizer).armed():
        model(torch.ones(1, 6)).sum().backward()
    assert set(optimizer.state) == {layer.weight for layer in model.layers}
    assert torch.equal(model.unused.weight, Net().unused.weight)


def test_gradients_are_scaled_before_the_step() -> None:
    scale = torch.tensor(1 / 3)
    plain, stepped = Net(), Net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1)
    in_backward = OptimizerInBackward(optimizer)
    for *parts, last in batches():
        for model in (plain, stepped):
            for part in parts:
                model(part).sum().backward()
        plain(last).sum().backward()
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        with in_backward.armed(scale):
            stepped(last).sum().backward()
    assert_equal(stepped.state_dict(), plain.state_dict())


def test_two_backwards_in_one_armed_region_are_an_error() -> None:
    model = Net()
    in_backward = OptimizerInBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(BadInput, match=r"second gradient.*arm one backward"), in_backward.armed():
        for _ in range(2):
            model(torch.ones(1, 6)).sum().backward()
    assert in_backward.dirty


def test_arming_twice_is_an_error() -> None:
    in_backward = OptimizerInBackward(torch.optim.SGD(Net().parameters()))
    with (
        in_backward.armed(),
        pytest.raises(BadInput, match="armed already"),
        in_backward.armed(),
    ):
        pass


class Recomputed(Net):
    """`Net` with every layer recomputed, its first weight in two of them."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant).tanh()
        return x


def test_recomputation_leaves_the_numbers_as_they_are() -> None:
    plain, stepped = Recomputed(False), Recomputed(False)
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    optimizer = torch.optim.AdamW(stepped.parameters())
    train_plainly(plain, plain_optimizer)
    train_in_backward(stepped, optimizer, OptimizerInBackward(optimizer))
    assert_equal(stepped.state_dict(), plain.state_dict())


def test_a_weight_that_was_stepped_too_early_waits_from_then_on() -> None:
    """Two reentrant recomputations use it, and its gradient comes in two parts."""
    model, plain = Recomputed(True), Recomputed(True)
    in_backward = OptimizerInBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(1, 6, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SteppedTooEarly, match=r"test_optimizer_in_backward.py:\d+"):
        step(model, in_backward, x)
    assert in_backward.dirty
    model.load_state_dict(before)  # whoever makes the step takes it back
    model.zero_grad()
    step(model, in_backward, x)
    plain(x).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_equal(model.state_dict(), plain.state_dict())


def test_a_weight_that_backward_still_needs_is_stepped_when_it_has_it() -> None:
    model = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_backward = OptimizerInBackward(optimizer)
    stepped: list[Tensor] = []
    in_backward.before_step = stepped.append
    x = torch.ones(1, 6, requires_grad=True)

    def loss(layers: nn.ModuleList) -> Tensor:
        first = F.linear(layers[0](x), layers[2].weight.detach())
        out: Tensor = layers[2](layers[1](first)).sum()
        return out

    with in_backward.armed():
        loss(model).backward()
    assert [any(one is p for one in stepped[:1]) for p in model.parameters()] == [0, 1, 0]
    loss(plain).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_equal(model.state_dict(), plain.state_dict())


def step(model: nn.Module, in_backward: OptimizerInBackward, x: Tensor) -> None:
    with in_backward.armed():
        model(x).sum().backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise torch.OutOfMemoryError("halfway")


def test_a_backward_that_fails_halfway_raises_its_own_error_and_says_the_step_is_torn() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    in_backward = OptimizerInBackward(optimizer)
    groups = optimizer.param_groups
    loss = second(Fails.apply(first(torch.ones(1, 6)))).sum()
    with pytest.raises(torch.OutOfMemoryError, match="halfway"), in_backward.armed():
        loss.backward()
    assert in_backward.dirty
    assert set(optimizer.state) == set(second.parameters())
    assert optimizer.param_groups is groups
    with in_backward.armed():
        second(first(torch.ones(1, 6))).sum().backward()
    assert not in_backward.dirty


def test_a_backward_that_fails_before_any_step_leaves_nothing_torn() -> None:
    model = nn.Linear(6, 6)
    in_backward = OptimizerInBackward(torch.optim.Adam(model.parameters()))
    loss = Fails.apply(model(torch.ones(1, 6))).sum()
    with pytest.raises(torch.OutOfMemoryError), in_backward.armed():
        loss.backward()
    assert not in_backward.dirty


def test_a_step_that_fails_puts_the_groups_back_and_counts_as_torn() -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    in_backward = OptimizerInBackward(optimizer)
    optimizer.param_groups[0]["betas"] = None
    groups = optimizer.param_groups
    loss = model(torch.ones(1, 6)).sum()
    with pytest.raises(TypeError, match="NoneType"), in_backward.armed():
        loss.backward()
    assert in_backward.dirty
    assert optimizer.param_groups is groups


def test_clipping_and_a_scaler_are_refused() -> None:
    optimizer = torch.optim.AdamW(Net().parameters())
    with pytest.raises(BadInput, match="clipping by the norm"):
        OptimizerInBackward(optimizer, clip_norm=1.0)
    with pytest.raises(BadInput, match="use bf16, which needs no scaler"):
        OptimizerInBackward(optimizer, scaler=torch.amp.GradScaler("cpu"))
    OptimizerInBackward(optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))


def test_hooks_on_the_step_are_refused_when_applied_and_when_armed() -> None:
    optimizer = torch.optim.AdamW(Net().parameters())
    in_backward = OptimizerInBackward(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        with pytest.raises(BadInput, match="would not run once for each step"):
            OptimizerInBackward(optimizer)
        with pytest.raises(BadInput, match="would not run once for each step"), in_backward.armed():
            pass
        handle.remove()


def test_a_parameter_that_left_the_optimizer_is_an_error() -> None:
    model = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    in_backward = OptimizerInBackward(optimizer)
    optimizer.param_groups[0]["params"] = [torch.ones(6, 6)]
    with pytest.raises(BadInput, match="no longer in the optimizer"), in_backward.armed():
        model(torch.ones(1, 6)).sum().backward()


def test_undo_leaves_the_plain_optimizer() -> None:
    plain, stepped = Net(), Net()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    optimizer = torch.optim.AdamW(stepped.parameters())
    train_plainly(plain, plain_optimizer)
    train_plainly(plain, plain_optimizer)
    in_backward = OptimizerInBackward(optimizer)
    train_in_backward(stepped, optimizer, in_backward)
    in_backward.undo()
    in_backward.undo()
    assert not any(p._post_accumulate_grad_hooks for p in stepped.parameters())
    train_plainly(stepped, optimizer)
    assert_equal(stepped.state_dict(), plain.state_dict())


def test_a_model_that_nobody_holds_is_freed_without_undo() -> None:
    model = Net()
    in_backward = OptimizerInBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    storage = weakref.ref(model.unused.weight.untyped_storage())
    del model, in_backward
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_a_gpu_the_gradients_never_live_at_once(momentum: float) -> None:
    layers, weight = 8, 256 * 256 * 4

    def peak(armed: bool) -> int:
        with pretend(oomph.find_gpu("h200")) as recorder:
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
            model.to("cuda")
            options = {"lr": 0.1, "momentum": momentum, "foreach": False}
            optimizer = torch.optim.SGD(model.parameters(), **options)
            in_backward = OptimizerInBackward(optimizer) if armed else None
            x = torch.empty(1, 256, device="cuda")
            for _ in range(2):
                recorder.reset_peak()
                before = recorder.allocated
                step_once(model(x).sum(), optimizer, in_backward)
            return recorder.peak_allocated - before

    small = 20 * 256 * 4  # activations
    assert layers * weight <= peak(armed=False) <= layers * weight + small
    assert weight <= peak(armed=True) <= weight + small


def test_small_parameters_step_together_and_large_ones_as_they_come() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        wide = [nn.Linear(64, 64) for _ in range(4)]
        return nn.Sequential(*wide, *(nn.LayerNorm(64) for _ in range(8)))

    def train(model: nn.Module, armed: bool) -> list[int]:
        """How many parameters each step was shown, in one training step."""
        optimizer = torch.optim.Adam(model.parameters())
        in_backward = OptimizerInBackward(optimizer) if armed else None
        shown: list[int] = []
        original = optimizer.step

        @steps_in_its_place
        def step() -> None:
            shown.append(sum(len(group["params"]) for group in optimizer.param_groups))
            original()

        optimizer.step = step  # type: ignore[method-assign]
        torch.manual_seed(1)
        step_once(model(torch.randn(4, 64)).square().mean(), optimizer, in_backward)
        return shown

    plain, stepped = made(), made()
    assert train(plain, armed=False) == [24]
    shown = train(stepped, armed=True)
    # A wide layer's weight does not wait; norms and biases do.
    assert sum(shown) == 24 and 4 <= len(shown) <= 6
    for one, other in zip(plain.parameters(), stepped.parameters(), strict=True):
        assert torch.equal(one, other)
