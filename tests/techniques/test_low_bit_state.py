"""Adam with 8-bit averages learns as plain Adam does, in a quarter of the memory for its state."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oomph
from oomph.errors import BadInput
from oomph.rehearsal.world import pretend
from oomph.techniques import low_bit_state as module
from oomph.techniques.fused_optimizer import fuse_optimizer
from oomph.techniques.low_bit_state import BLOCK, SLICE, low_bit_state
from oomph.techniques.master_weights import MasterWeights
from oomph.techniques.optimizer_in_backward import OptimizerInBackward

#: 4,225 elements, so that the last block is not full, and 65, which stay in fp32.
WIDTH = 65


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(dtype)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model(dtype)
    return model, torch.optim.AdamW(model.parameters(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 1) -> Any:
    """Learns to predict a random linear map; returns the loss of each step."""
    truth = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        x = torch.randn(32, WIDTH, generator=generator)
        loss = (model(x.to(dtype)).float() - x @ truth).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Transformer(nn.Module):
    def __init__(self, words: int, width: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) / 10)
        feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.blocks = nn.Sequential(Attention(width), feed, Attention(width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(x) + self.places))


def learn_a_language(dtype: torch.dtype, low_bit: bool) -> float:
    """Mean loss of the last steps; each word follows from the last but for one in ten."""
    torch.manual_seed(0)
    model = Transformer(words=64, width=64, length=16).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if low_bit:
        low_bit_state(optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(150):
        words = [torch.randint(0, 64, (16,), generator=generator)]
        for _ in range(16):
            surprise = torch.rand(16, generator=generator) < 0.1
            random = torch.randint(0, 64, (16,), generator=generator)
            words.append(torch.where(surprise, random, (words[-1] * 5 + 1) % 64))
        text = torch.stack(words, dim=1)
        logits = model(text[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses[-50:]).mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_learns_as_with_plain_adamw(dtype: torch.dtype) -> None:
    plain = learn_a_language(torch.float32, low_bit=False)
    low_bit = learn_a_language(dtype, low_bit=True)
    assert plain < 1.0, "it started at log(64) = 4.2"
    assert low_bit == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_stored_numbers_are_off_by_less_than_a_level(name: str) -> None:
    levels = module._AVERAGES[name]
    exponents = torch.rand(64 * BLOCK, dtype=torch.float64) * levels.octaves
    values = torch.exp2(-exponents).float()
    if name == "exp_avg":
        values *= torch.randn_like(values).sign()
    step = 2 ** (1 / levels.per_octave)
    assert step < 1.1
    for number in (1.0, 2.0, 1000.0):
        thresholds = module._thresholds(torch.tensor(number), values.device)
        ratio = levels.decode(*levels.encode(values, thresholds)) / values
        assert ratio.min() > 1 / step - 1e-5
        assert ratio.max() < step + 1e-5
        largest = values.view(-1, BLOCK).abs().argmax(dim=1, keepdim=True)
        assert (ratio.view(-1, BLOCK).gather(1, largest) == 1).all()


def test_a_second_moment_that_is_not_zero_stays_so_and_is_never_rounded_far_down() -> None:
    levels = module._AVERAGES["exp_avg_sq"]
    values = torch.zeros(2 * BLOCK)
    values[0] = 1.0
    values[1:100] = 1e-30
    for number in range(10):
        thresholds = module._thresholds(torch.tensor(float(number)), values.device)
        stored = levels.decode(*levels.encode(values, thresholds))
        assert (stored[1:100] > 1e-30).all()
        assert (stored[100:] == 0).all()


def test_rounding_thresholds_are_spread_evenly_over_steps() -> None:
    steps = torch.arange(1_000_000.0, 1_001_000.0)
    draws = torch.stack([module._thresholds(step, step.device) for step in steps])
    assert ((draws >= 0) & (draws <= 1)).all()
    assert (draws.mean(dim=0) - 0.5).abs().max() < 0.01
    below = (draws < 0.011).float().mean(dim=0)
    assert (below - 0.011).abs().max() < 0.004


def test_a_second_moment_falls_as_its_gradients_do() -> None:
    """Each step takes off far less than a level; the block's largest number stays as it is."""
    plain, low_bit = (nn.Parameter(torch.zeros(16, BLOCK)) for _ in range(2))
    optimizers = [torch.optim.Adam([weight]) for weight in (plain, low_bit)]
    low_bit_state(optimizers[1])
    for step in range(1200):
        gradient = torch.full((16, BLOCK), 1.0 if step < 100 else 0.2)
        gradient[:, 0] = 10.0
        for weight, optimizer in zip((plain, low_bit), optimizers, strict=True):
            weight.grad = gradient
            optimizer.step()
    expected = optimizers[0].state[plain]["exp_avg_sq"]
    mine = module._to_plain(low_bit, optimizers[1].state[low_bit])["exp_avg_sq"]
    assert expected[0, 1] < 0.06, "it was 0.095 when its gradients fell"
    assert (mine[:, 1:] / expected[:, 1:]).mean().item() == pytest.approx(1, abs=0.1)
    assert (mine / expected).max() < 1.3
    assert (mine / expected).min() > 0.7


OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"maximize": True},
    {"betas": (0.5, 0.9), "eps": 1e-3},
    {"fused": True},
    {"lr": torch.tensor(0.01)},
]


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_first_step_is_plain_adams(
    cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    options = {"weight_decay": 0.1, "lr": 0.01, **options}
    plain, model = make_model(), make_model()
    plain_optimizer = cls(plain.parameters(), **options)
    optimizer = cls(model.parameters(), **options)
    low_bit_state(optimizer)
    train(plain, plain_optimizer)
    train(model, optimizer)
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_small_parameters_keep_plain_adams_numbers() -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 4095)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([weight], lr=0.1) for weight in weights]
    low_bit_state(optimizers[1])
    for _ in range(20):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    assert optimizers[1].state[weights[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_groups_keep_their_hyper_parameters() -> None:
    model = make_model()
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.0, "weight_decay": 0.0},
        {"params": list(model[2].parameters())},
    ]
    optimizer = torch.optim.AdamW(groups)
    low_bit_state(optimizer)
    train(model, optimizer)
    first, last = make_model()[0].weight, make_model()[2].weight
    assert torch.equal(model[0].weight, first)
    assert not torch.equal(model[2].weight, last)


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, whole_optimizer = make()
    low_bit_state(whole_optimizer)
    train(whole, whole_optimizer, 3)
    monkeypatch.setattr(module, "SLICE", 4 * BLOCK)
    sliced, optimizer = make()
    low_bit_state(optimizer)
    train(sliced, optimizer, 3)
    for mine, expected in zip(sliced.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_channels_last_weights_are_stepped_as_they_lie() -> None:
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for low_bit in (False, True):
            torch.manual_seed(0)
            model = nn.Conv2d(32, 32, 3).to(memory_format=memory_format)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if low_bit:
                low_bit_state(optimizer)
            for _ in range(2):
                model(torch.ones(1, 32, 8, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model.weight.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0.01, atol=0.01)


def test_a_step_inside_backward_is_the_same_step() -> None:
    plain, plain_optimizer = make()
    low_bit_state(plain_optimizer)
    stepped, optimizer = make()
    in_backward = OptimizerInBackward(optimizer)
    low_bit_state(optimizer)
    for seed in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        plain(x).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        with in_backward.armed():
            stepped(x).square().mean().backward()
        assert all(p.grad is None for p in stepped.parameters())
    for mine, expected in zip(stepped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("low_bit_first", [False, True])
def test_it_works_on_master_weights_inside_backward(low_bit_first: bool) -> None:
    model, optimizer = make()
    if low_bit_first:
        low_bit_state(optimizer)
    keeper = MasterWeights(model, optimizer)
    if not low_bit_first:
        low_bit_state(optimizer)
    in_backward = OptimizerInBackward(optimizer, masters=keeper)
    reference, reference_optimizer = make()
    low_bit_state(reference_optimizer)
    reference_keeper = MasterWeights(reference, reference_optimizer)
    for seed in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
        reference(x).square().mean().backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        with in_backward.armed():
            model(x).square().mean().backward()
    assert model[0].weight.dtype is torch.bfloat16
    in_backward.undo()
    keeper.undo()
    reference_keeper.undo()
    assert "exp_avg_8bit" in optimizer.state[model[0].weight]
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_schedulers_work_whether_made_before_or_after(scheduler_first: bool) -> None:
    model, optimizer = make(lr=0.1)
    undo = None if scheduler_first else low_bit_state(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if undo is None:
        undo = low_bit_state(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it misses the optimizer's step
        for _ in range(2):
            train(model, optimizer)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert "exp_avg_8bit" in optimizer.state[model[0].weight]
    undo()
    optimizer.state.clear()
    train(model, optimizer)
    scheduler.step()
    assert optimizer.state[model[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_hooks_on_the_step_run_once_and_a_closure_is_called() -> None:
    model, optimizer = make()
    low_bit_state(optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure")
        model(torch.ones(1, WIDTH)).sum().backward()
        return 3.0

    before = model[0].weight.clone()
    assert optimizer.step(closure) == 3.0
    assert calls == ["before", "closure", "after"]
    assert not torch.equal(model[0].weight, before)


def test_training_so_far_goes_on_and_undo_gives_plain_adam_back() -> None:
    plain, plain_optimizer = make()
    model, optimizer = make()
    for trained, stepper in ((plain, plain_optimizer), (model, optimizer)):
        train(trained, stepper, 5)
    attributes = set(vars(optimizer))
    undo = low_bit_state(optimizer)
    assert optimizer.state[model[0].weight]["exp_avg_8bit"].dtype is torch.int8
    undo()
    undo()
    assert set(vars(optimizer)) == attributes
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        state, plain_state = optimizer.state[mine], plain_optimizer.state[expected]
        assert state.keys() == plain_state.keys()
        assert state["step"].item() == 5
        torch.testing.assert_close(state["exp_avg_sq"], plain_state["exp_avg_sq"], rtol=0.1, atol=0)
    train(model, optimizer)


def test_it_keeps_no_optimizer_alive() -> None:
    model, optimizer = make()
    low_bit_state(optimizer)
    train(model, optimizer)
    held = [weakref.ref(one) for state in optimizer.state.values() for one in state.values()]
    del model, optimizer
    gc.collect()
    assert not any(tensor() is not None for tensor in held)


def test_an_apply_that_runs_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    train(model, optimizer)
    states = {p: dict(state) for p, state in optimizer.state.items()}
    write, calls = module._write, 0

    def run_out_of_memory(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError
        write(*args)

    monkeypatch.setattr(module, "_write", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        low_bit_state(optimizer)
    for p, state in states.items():
        assert optimizer.state[p].keys() == state.keys()
        assert all(optimizer.state[p][name] is value for name, value in state.items())
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_where_it_was(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    low_bit_state(optimizer, stochastic_rounding=False)
    train(model, optimizer, 3)
    resumed, resumed_optimizer = make(dtype)
    low_bit_state(resumed_optimizer, stochastic_rounding=False)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(model.state_dict())
    untouched = copy.deepcopy(saved)
    resumed_optimizer.load_state_dict(saved)
    train(model, optimizer, 2, seed=2)
    train(resumed, resumed_optimizer, 2, seed=2)
    for mine, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, expected)
        for name, value in optimizer.state[expected].items():
            assert resumed_optimizer.state[mine][name].dtype is value.dtype
    for name, value in untouched["state"][0].items():
        assert torch.equal(saved["state"][0][name], value), "a step changes what it was loaded from"


def test_a_state_saved_by_plain_adam_is_taken_over() -> None:
    plain, plain_optimizer = make()
    train(plain, plain_optimizer, 3)
    model, optimizer = make()
    low_bit_state(optimizer)
    optimizer.load_state_dict(plain_optimizer.state_dict())
    state = optimizer.state[model[0].weight]
    assert state["exp_avg_sq_8bit"].dtype is torch.uint8
    expected = plain_optimizer.state[plain[0].weight]["exp_avg_sq"]
    read = module._to_plain(model[0].weight, state)["exp_avg_sq"]
    torch.testing.assert_close(read, expected, rtol=0.1, atol=0)


def test_bf16_weights_are_rounded_at_random_without_touching_the_random_stream() -> None:
    weights = {}
    for stochastic_rounding in (False, True):
        weight = nn.Parameter(torch.ones(SLICE // 1024, dtype=torch.bfloat16))
        optimizer = torch.optim.Adam([weight], lr=1e-4)
        low_bit_state(optimizer, stochastic_rounding=stochastic_rounding)
        before = torch.get_rng_state()
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        weights[stochastic_rounding] = weight.detach().float()
    assert (weights[False] == 1).all(), "rounded to the nearest, every update is lost"
    assert weights[True].mean().item() == pytest.approx(0.99, abs=5e-4)


def test_a_loss_scaler_works_although_the_step_was_fused() -> None:
    results = []
    for low_bit in (False, True):
        model, optimizer = make(lr=0.01)
        fuse_optimizer(optimizer)
        if low_bit:
            low_bit_state(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for factor in (1.0, torch.inf):
            loss = model(torch.ones(1, WIDTH)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(model[0].weight.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_nan_shows() -> None:
    weight = nn.Parameter(torch.ones(4096))
    optimizer = torch.optim.Adam([weight])
    low_bit_state(optimizer)
    weight.grad = torch.ones(4096)
    weight.grad[5] = torch.nan
    for _ in range(2):
        optimizer.step()
    assert weight[:BLOCK].isnan().all()
    assert not weight[BLOCK:].isnan().any()


def test_what_is_not_plain_adam_is_refused() -> None:
    model = make_model()
    for optimizer, why in (
        (torch.optim.SGD(model.parameters()), "SGD"),
        (torch.optim.NAdam(model.parameters()), "NAdam"),
        (torch.optim.Adam(model.parameters(), amsgrad=True), "amsgrad=True"),
        (torch.optim.Adam(make_model(torch.float64).parameters()), "float64"),
        (torch.optim.Adam([nn.Parameter(torch.ones(4, 4)[:, :2])]), "contiguous"),
        (
            torch.optim.Adam(model.parameters(), betas=(torch.tensor(0.9), torch.tensor(0.9))),
            "betas as numbers",
        ),
    ):
        with pytest.raises(BadInput, match=why):
            low_bit_state(optimizer)
        assert "step" not in vars(optimizer)


def test_a_group_that_is_added_later_is_checked_too() -> None:
    model, optimizer = make()
    low_bit_state(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4096, dtype=torch.float16))]})
    with pytest.raises(BadInput, match="float16"):
        train(model, optimizer)


def test_on_a_gpu_the_state_is_a_quarter_and_the_step_needs_a_few_slices() -> None:
    elements = 4 * SLICE
    with pretend(oomph.find_gpu("h200")) as recorder:
        weight = nn.Parameter(torch.empty(elements, device="cuda"))
        optimizer = torch.optim.AdamW([weight])
        low_bit_state(optimizer)
        for _ in range(2):
            weight.grad = torch.empty(elements, device="cuda")
            recorder.reset_peak()
            before = recorder.allocated
            optimizer.step()
            needed = recorder.peak_allocated - before
            optimizer.zero_grad()
        state = recorder.allocated - 4 * elements
        assert state == 2 * (elements + elements // BLOCK * 4)
        assert optimizer.state[weight]["step"].device.type == "cpu"
        assert needed <= 6 * SLICE * 4


def test_on_a_gpu_bf16_weights_need_no_fp32_copy_of_themselves() -> None:
    elements = 4 * SLICE
    with pretend(oomph.find_gpu("h200")) as recorder:
        weight = nn.Parameter(torch.empty(elements, device="cuda", dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW([weight], fused=True)
        low_bit_state(optimizer)
        in_backward = OptimizerInBackward(optimizer)
        for _ in range(2):
            recorder.reset_peak()
            before = recorder.allocated
            loss = weight.sum()
            with in_backward.armed():
                loss.backward()
            del loss
            needed = recorder.peak_allocated - before
        assert needed <= elements * 2 + 8 * SLICE * 4
        assert optimizer.state[weight]["step"].device.type == "cuda"
