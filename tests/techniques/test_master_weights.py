"""Half-precision weights with fp32 masters train as a handwritten loop over masters does."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oomph
from oomph.errors import BadInput
from oomph.rehearsal.world import pretend
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.optimizer_in_backward import OptimizerInBackward


class Net(nn.Module):
    """A tied weight, a frozen one, a BatchNorm, and a parameter the optimizer does not have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.foreign = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.norm(self.first(x)).tanh()
            return F.tanh(self.frozen(self.tied(x))) * self.foreign

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p is not self.foreign]


def batches(steps: int = 3, parts: int = 2) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randn(4, 6) for _ in range(parts)] for _ in range(steps)]


def train_by_hand(model: Net, **options: Any) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Masters in a list, gradients added up in fp32, weights rounded after each step."""
    weights = [p for p in model.trained() if p.requires_grad]
    masters = [p.detach().clone() for p in weights]
    for weight in (model.first.weight, model.first.bias):
        weight.data = weight.data.bfloat16()
    optimizer = torch.optim.AdamW(masters, **options)
    for parts in batches():
        for part in parts:
            model(part).float().square().mean().backward()
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                gradient, weight.grad = weight.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad + gradient
        optimizer.step()
        optimizer.zero_grad()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)
    return masters, optimizer


def train(
    model: Net, optimizer: torch.optim.Optimizer, in_backward: OptimizerInBackward | None = None
) -> None:
    for *parts, last in batches():
        for part in parts:
            model(part).float().square().mean().backward()
        loss = model(last).float().square().mean()
        if in_backward is None:
            loss.backward()
            assert model.first.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        else:
            with in_backward.armed():
                loss.backward()


def owned(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def make(lr: float = 0.1, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.trained(), lr=lr, **options)


@pytest.mark.parametrize("armed", [False, True])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_training_is_that_of_a_handwritten_loop_to_the_bit(
    armed: bool, options: dict[str, Any]
) -> None:
    by_hand = Net()
    masters, by_hand_optimizer = train_by_hand(by_hand, lr=0.1, **options)
    model, optimizer = make(**options)
    keeper = MasterWeights(model, optimizer)
    in_backward = OptimizerInBackward(optimizer, masters=keeper) if armed else None
    train(model, optimizer, in_backward)
    trained = [p for p in owned(optimizer) if p.dtype is torch.float32 and p in optimizer.state]
    assert len(trained) == len(masters)
    for mine, expected in zip(trained, masters, strict=True):
        assert torch.equal(mine, expected)
        state = by_hand_optimizer.state[expected]
        assert all(torch.equal(value, state[name]) for name, value in optimizer.state[mine].items())
    for mine, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_only_trained_fp32_parameters_of_the_optimizer_change_their_type() -> None:
    model, optimizer = make()
    model.first.bias.data = model.first.bias.data.double()
    parameters = list(model.parameters())
    MasterWeights(model, optimizer)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    half = {name for name, p in model.named_parameters() if p.dtype is torch.bfloat16}
    assert half == {"first.weight"}
    assert model.tied.weight is model.first.weight
    assert model.norm.running_mean.dtype is torch.float32


def test_the_master_is_the_old_storage() -> None:
    model, optimizer = make()
    storages = [p.untyped_storage().data_ptr() for p in owned(optimizer)]
    keeper = MasterWeights(model, optimizer)
    assert [p.untyped_storage().data_ptr() for p in owned(optimizer)] == storages
    keeper.undo()
    assert [p.untyped_storage().data_ptr() for p in model.trained()] == storages


def test_undo_gives_back_weights_state_and_gradients() -> None:
    model, optimizer = make()
    parameters = owned(optimizer)
    keeper = MasterWeights(model, optimizer)
    train(model, optimizer)
    model(torch.ones(4, 6)).float().sum().backward()
    masters = owned(optimizer)
    values = [master.clone() for master in masters]
    gradients = [master.grad for master in masters]
    states = [optimizer.state.get(master) for master in masters]
    keeper.undo()
    keeper.undo()
    assert all(one is other for one, other in zip(owned(optimizer), parameters, strict=True))
    assert set(optimizer.state) == {p for p in parameters if p.requires_grad}
    for p, value, gradient, state in zip(parameters, values, gradients, states, strict=True):
        assert p.dtype is torch.float32
        assert torch.equal(p, value)
        assert p.grad is gradient
        assert optimizer.state.get(p) is state
        assert not p._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_post_hooks
    before = model.first.weight.clone()
    optimizer.step()
    assert not torch.equal(model.first.weight, before)


def test_state_from_before_goes_on_and_a_plain_optimizer_can_load_it() -> None:
    model, optimizer = make()
    model(torch.ones(4, 6)).float().sum().backward()
    optimizer.step()
    moment = optimizer.state[model.first.weight]["exp_avg"]
    plain_state = optimizer.state_dict()
    MasterWeights(model, optimizer)
    assert optimizer.state[owned(optimizer)[0]]["exp_avg"] is moment
    state = optimizer.state_dict()
    assert state["param_groups"] == plain_state["param_groups"]
    assert state["state"].keys() == plain_state["state"].keys()
    other, other_optimizer = make()
    other_optimizer.load_state_dict(state)
    assert torch.equal(other_optimizer.state[other.first.weight]["exp_avg"], moment)


def test_gradients_from_before_are_moved() -> None:
    model, optimizer = make()
    model(torch.ones(4, 6)).float().sum().backward()
    gradient = model.first.weight.grad
    MasterWeights(model, optimizer)
    assert model.first.weight.grad is None
    assert owned(optimizer)[0].grad is gradient


def test_gradients_are_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1))
    module = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    MasterWeights(module, optimizer)
    for _ in range(1001):
        weight.sum().backward()
    optimizer.step()
    # bf16 cannot count beyond 256.
    assert owned(optimizer)[0].item() == -1001.0


def test_small_updates_are_not_lost() -> None:
    weight = nn.Parameter(torch.ones(1))
    module = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    MasterWeights(module, optimizer)
    for _ in range(1000):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.item() == pytest.approx(0.9, rel=0.01)


def test_a_step_that_a_scaler_skips_changes_nothing() -> None:
    model, optimizer = make()
    MasterWeights(model, optimizer)
    before = model.first.weight.clone()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 6)).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert torch.equal(model.first.weight, before)
    optimizer.step()
    assert not torch.equal(model.first.weight, before)


def test_a_write_that_the_master_does_not_know_is_an_error() -> None:
    model, optimizer = make()
    MasterWeights(model, optimizer)
    train(model, optimizer)
    model.load_state_dict(Net().state_dict())
    with pytest.raises(BadInput, match="undo the master weights"):
        model(torch.ones(4, 6)).float().sum().backward()


def test_an_apply_that_fails_halfway_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = owned(optimizer)
    convert, calls = torch.Tensor.to, 0

    def run_out_of_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError
        return convert(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        MasterWeights(model, optimizer)
    monkeypatch.undo()
    assert all(one is other for one, other in zip(owned(optimizer), parameters, strict=True))
    for name, value in model.state_dict().items():
        assert value.dtype is before[name].dtype
        assert torch.equal(value, before[name])
    assert not optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_optimizer_that_moves_weights_on_its_own_is_refused() -> None:
    model = nn.Linear(6, 6)
    with pytest.raises(BadInput, match="LBFGS"):
        MasterWeights(model, torch.optim.LBFGS(model.parameters()))


def test_a_weight_that_backward_still_needs_is_stepped_after_it_was_read() -> None:
    model = nn.Linear(6, 6, bias=False)
    plain = model.weight.detach().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = MasterWeights(model, optimizer)
    in_backward = OptimizerInBackward(optimizer, masters=keeper)
    x = torch.ones(1, 6, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.ones(1, 6, dtype=torch.bfloat16, requires_grad=True)
    F.linear(F.linear(expected, plain), plain).sum().backward()
    loss = model(F.linear(x, model.weight.detach())).sum()
    with in_backward.armed():
        loss.backward()
    assert torch.equal(x.grad, expected.grad)
    assert not torch.equal(model.weight, plain)


def test_masters_applied_under_a_step_inside_backward_are_an_error() -> None:
    model, optimizer = make()
    in_backward = OptimizerInBackward(optimizer)
    MasterWeights(model, optimizer)
    with pytest.raises(BadInput, match="hooks"), in_backward.armed():
        model(torch.ones(4, 6)).float().sum().backward()


def test_a_model_that_nobody_holds_is_freed_without_undo() -> None:
    model, optimizer = make()
    MasterWeights(model, optimizer)
    storages = [weakref.ref(p.untyped_storage()) for p in (*owned(optimizer), model.first.weight)]
    del model, optimizer
    gc.collect()
    assert all(storage() is None for storage in storages)


@pytest.mark.parametrize("armed", [False, True])
def test_on_a_gpu_weights_are_halved_and_fp32_gradients_come_one_by_one(armed: bool) -> None:
    layers, weight = 8, 256 * 256 * 4
    with pretend(oomph.find_gpu("h200")) as recorder:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
        model.to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = recorder.allocated
        recorder.reset_peak()
        keeper = MasterWeights(model, optimizer)
        assert recorder.allocated == recorder.peak_allocated == before + layers * weight // 2
        in_backward = OptimizerInBackward(optimizer, masters=keeper)
        x = torch.empty(1, 256, device="cuda", dtype=torch.bfloat16)
        peak = 0
        for _ in range(2):
            recorder.reset_peak()
            start = recorder.allocated
            loss = model(x).sum()
            if armed:
                with in_backward.armed():
                    loss.backward()
            else:
                loss.backward()
                optimizer.zero_grad()
            del loss
            peak = recorder.peak_allocated - start
        small = 20 * 256 * 4  # activations
        alive = 1 if armed else layers
        # The last gradient is there in both precisions for a moment.
        assert alive * weight <= peak <= (alive + 0.5) * weight + small
        keeper.undo()
        del x
        state = 2 * layers * weight + layers * 4 if armed else 0
        workspaces = sum(b.size for b in recorder.timeline.blocks if b.category == "workspace")
        assert recorder.allocated == before + state + workspaces
