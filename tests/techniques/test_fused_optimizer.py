"""A fused optimizer goes on where the plain one was, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oomph
from oomph.errors import BadInput
from oomph.rehearsal.world import pretend
from oomph.techniques.fused_optimizer import fuse_optimizer, why_not_fused

VARIANTS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("cls", "options"), VARIANTS)
def test_the_numbers_stay_when_fused_in_the_middle_and_undone_later(
    cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    plain, fused = make_model(), make_model()
    plain_optimizer = cls(plain.parameters(), lr=0.05, **options)
    optimizer = cls(fused.parameters(), lr=0.05, **options)
    undo = None
    for part in range(3):
        if part == 1:
            undo = fuse_optimizer(optimizer)
        elif undo is not None:
            undo()
        for model, stepper in ((plain, plain_optimizer), (fused, optimizer)):
            torch.manual_seed(part)
            train(model, stepper, 4)
        assert_near(fused.state_dict(), plain.state_dict())
    assert optimizer.param_groups[0]["fused"] is None


def test_all_groups_are_fused_and_get_their_flags_back() -> None:
    first, second = make_model(), make_model()
    groups = [
        {"params": list(first.parameters())},
        {"params": list(second.parameters()), "foreach": True, "fused": False},
    ]
    optimizer = torch.optim.AdamW(groups)
    before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    attributes = set(vars(optimizer))
    undo = fuse_optimizer(optimizer)
    assert [(g["fused"], g["foreach"]) for g in optimizer.param_groups] == [(True, False)] * 2
    assert optimizer._step_supports_amp_scaling
    optimizer.add_param_group({"params": list(make_model().parameters())})
    assert optimizer.param_groups[2]["fused"]
    undo()
    undo()
    for group, flags in zip(optimizer.param_groups, before, strict=False):
        assert {k: v for k, v in group.items() if k != "params"} == flags
    assert optimizer.param_groups[2]["fused"] is None
    assert set(vars(optimizer)) == attributes


def test_undo_leaves_what_was_fused_before_fused() -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), fused=True)
    fuse_optimizer(optimizer)()
    assert optimizer.param_groups[0]["fused"]
    assert optimizer._step_supports_amp_scaling


def test_once_undone_an_optimizer_that_counts_steps_on_the_host_does_so_again() -> None:
    with pretend(oomph.find_gpu("h200")):
        model = make_model().to("cuda")
        optimizer = torch.optim.Adagrad(model.parameters())
        if why_not_fused(optimizer):
            pytest.skip("Adagrad has a fused kernel for GPUs from torch 2.13 on")
        undo = fuse_optimizer(optimizer)
        assert all(state["step"].is_cuda for state in optimizer.state.values())
        undo()
        assert all(state["step"].is_cpu for state in optimizer.state.values())


def test_a_state_that_is_loaded_later_is_fused_too() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    undo = fuse_optimizer(optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"]
    undo()
    assert optimizer.param_groups[0]["fused"] is None


def test_a_loss_scaler_works_with_the_fused_step() -> None:
    plain, fused = make_model(), make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    optimizer = torch.optim.AdamW(fused.parameters())
    fuse_optimizer(optimizer)
    for model, stepper in ((plain, plain_optimizer), (fused, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, torch.inf, 1.0):
            torch.manual_seed(1)
            loss = model(torch.randn(4, 5, dtype=torch.float64)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
        assert scaler.get_scale() == 512.0, "the infinite step is skipped"
    assert_near(fused.state_dict(), plain.state_dict())


def test_what_has_no_fused_kernel_is_refused() -> None:
    for cls in (torch.optim.RMSprop, torch.optim.Adadelta):
        optimizer = cls(make_model().parameters())
        assert why_not_fused(optimizer)
        with pytest.raises(BadInput, match=f"{cls.__name__} has no fused kernel"):
            fuse_optimizer(optimizer)
    complex_weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(BadInput, match="complex64 on cpu"):
        fuse_optimizer(torch.optim.Adam([complex_weight]))
    with pytest.raises(BadInput, match="on meta"):
        fuse_optimizer(torch.optim.Adam([nn.Parameter(torch.ones(2, device="meta"))]))
    with pytest.raises(BadInput, match="not differentiable"):
        fuse_optimizer(torch.optim.Adam(make_model().parameters(), differentiable=True))
    assert not why_not_fused(torch.optim.Adam(make_model().parameters()))


@pytest.mark.parametrize(("version", "can"), [("2.11.0", False), ("2.13.0", True)])
def test_adagrad_is_fused_on_a_gpu_where_torch_can(
    version: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend(oomph.find_gpu("h200")):
        optimizer = torch.optim.Adagrad(make_model().to("cuda").parameters())
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        assert (not why_not_fused(optimizer)) is can


def test_on_a_gpu_counters_follow_and_the_step_needs_no_copies() -> None:
    layers, weight = 4, 256 * 256 * 4

    with pretend(oomph.find_gpu("h200")) as recorder:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
        model.to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def extra() -> int:
            """What a step needs beyond what lives before it."""
            model(torch.empty(1, 256, device="cuda")).sum().backward()
            before = recorder.allocated
            recorder.reset_peak()
            optimizer.step()
            optimizer.zero_grad()
            return recorder.peak_allocated - before

        def places() -> set[str]:
            return {state["step"].device.type for state in optimizer.state.values()}

        extra()  # makes the state
        assert extra() >= layers * weight
        assert places() == {"cpu"}
        undo = fuse_optimizer(optimizer)
        assert places() == {"cuda"}
        assert extra() < weight
        undo()
        assert places() == {"cpu"}
        assert extra() >= layers * weight


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True, "weight_decay": 0.1},
        {"dampening": 0.3, "weight_decay": 0.1, "maximize": True},
    ],
)
def test_what_gets_its_first_gradient_later_begins_with_the_momentum_of_a_first_step(
    options: dict[str, Any],
) -> None:
    plain, fused = make_model(), make_model()
    for model in (plain, fused):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)
        undo = fuse_optimizer(optimizer) if model is fused else None
        torch.manual_seed(0)
        model[2].requires_grad_(False)
        train(model, optimizer, 2)
        model[2].requires_grad_(True)
        train(model, optimizer, 3)
        if undo is not None:
            undo()
            assert not optimizer._optimizer_step_pre_hooks
    assert_near(fused.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_stepped_by_no_fused_sgd_on_the_cpu(dtype: torch.dtype) -> None:
    optimizer = torch.optim.SGD(make_model().to(dtype).parameters())
    assert why_not_fused(optimizer)
    with pytest.raises(BadInput, match="fused SGD does not step"):
        fuse_optimizer(optimizer)
    with pretend(oomph.find_gpu("h200")):
        assert not why_not_fused(torch.optim.SGD(make_model().to("cuda", dtype).parameters()))


def _turned(tensor: Tensor) -> Tensor:
    """The same numbers, lying in memory the other way."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize(("cls", "options"), VARIANTS)
def test_weights_may_lie_in_memory_in_another_order_than_their_state_and_gradients(
    cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    plain, fused = make_model(), make_model()
    plain_optimizer = cls(plain.parameters(), lr=0.05, **options)
    optimizer = cls(fused.parameters(), lr=0.05, **options)
    fuse_optimizer(optimizer)
    for part in range(3):
        for model, stepper in ((plain, plain_optimizer), (fused, optimizer)):
            torch.manual_seed(part)
            train(model, stepper, 2)
            weight = next(model.parameters())
            if part == 0:
                weight.data = _turned(weight.data)
            else:
                weight.grad = weight.detach().clone(memory_format=torch.contiguous_format)
        assert_near(fused.state_dict(), plain.state_dict())
