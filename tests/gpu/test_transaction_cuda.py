"""Real steps that run out of real memory: state to the bit, memory to the byte, and the retry."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomph.errors import OutOfMemory
from oomph.job import Job
from oomph.planning.choices import Choices
from oomph.planning.plan import Plan
from oomph.planning.planner import plan as make_plan
from oomph.running.elastic import Elastic
from oomph.running.ladder import Rung
from oomph.running.run import Run, apply, fit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
WIDTH, DEPTH, SAMPLES = 1024, 4, 4096
MASTERS = "bf16 with fp32 masters"


@pytest.fixture(autouse=True)
def a_clean_card() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
                for _ in range(DEPTH)
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.norm(self.blocks(x))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def a_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randn(SAMPLES, WIDTH, generator=generator),
    )


RECOMPUTE = dict.fromkeys((f"blocks.{at}" for at in range(DEPTH)), "recompute")
CHOICES = {
    "plain": Choices(),
    "fused": Choices(fused_optimizer=True),
    "in backward": Choices(fused_optimizer=True, optimizer_in_backward=True),
    "masters in backward": Choices(
        precision="bf16-mixed", weights=MASTERS, optimizer_in_backward=True
    ),
    "fp16": Choices(precision="fp16-mixed", micro_batch=SAMPLES // 2),
    "recompute": Choices(blocks=RECOMPUTE, fused_optimizer=True),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = Net()
    job = Job(model, loss_of, torch.optim.AdamW(model.parameters()), a_batch(0))
    return make_plan(job, gpu=torch.cuda.get_device_name(), compile_blocks=False)


def start(plan: Plan, choices: Choices, *smaller: Choices) -> Run:
    model = Net().cuda()
    job = Job(model, loss_of, torch.optim.AdamW(model.parameters()), a_batch(0))
    run = apply(dataclasses.replace(plan, choices=choices, checked=None), job)
    ladder = run._adapting._ladders[0]
    ladder.stop()
    for at, other in enumerate(smaller):
        rung = Rung(plan=dataclasses.replace(plan, choices=other), need=1000 - at, retries=0)
        ladder.rungs.append(rung)
    return run


def state_of(run: Run) -> list[Any]:
    scaler = run._stage.scaler
    owned = [p for group in run.optimizer.param_groups for p in group["params"]]
    values = (
        list(run.model.parameters()),
        list(run.model.buffers()),
        [owned, [dict(run.optimizer.state.get(p, {})) for p in owned]],
        scaler and [scaler._scale, scaler._growth_tracker],
        [p.grad for p in (*run.model.parameters(), *owned)],
        [torch.get_rng_state(), torch.cuda.get_rng_state()],
    )
    return tree_leaves(copy.deepcopy(values))


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class Refusing(TorchDispatchMode):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.at:
            torch.empty(1 << 50, device="cuda")  # the real error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CHOICES)
def test_a_failure_anywhere_leaves_state_to_the_bit_and_memory_to_the_byte(
    name: str, plan: Plan
) -> None:
    run = start(plan, CHOICES[name])
    for seed in range(2):
        run.step(a_batch(seed))
    with pytest.raises(OutOfMemory), Refusing(10):  # once, so that nothing is there the first time
        run.step(a_batch(2))
    before, baseline = state_of(run), allocated()
    for at in range(0, 10_000, 11):
        try:
            with Refusing(at) as refusing:
                run.step(a_batch(2))
        except OutOfMemory:
            assert allocated() == baseline, at
            assert same(state_of(run), before), at
            continue
        if refusing.count <= at:
            break
        # The optimizer came to its end all the same.
        before, baseline = state_of(run), allocated()


@pytest.mark.parametrize("name", ["plain", "in backward", "fp16"])
def test_a_card_that_is_full_at_different_moments(name: str, plan: Plan) -> None:
    run = start(plan, CHOICES[name])
    for seed in range(2):
        run.step(a_batch(seed))
    torch.cuda.empty_cache()
    before, baseline = state_of(run), allocated()
    kept = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    failures = 0
    for extra in range(0, 400, 20):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((kept + extra * MIB) / total)
        try:
            run.step(a_batch(2))
        except OutOfMemory:
            failures += 1
            assert allocated() == baseline
            assert same(state_of(run), before)
            continue
        break
    assert failures > 1


def test_a_hog_on_the_card_makes_the_run_split_the_batch(plan: Plan) -> None:
    parts = Choices(micro_batch=SAMPLES // 8)
    expected_run = start(plan, parts)
    torch.manual_seed(7)
    expected = [float(expected_run.step(a_batch(seed))) for seed in range(2)]
    expected_state = [p.clone() for p in expected_run.model.parameters()]
    del expected_run
    run = start(plan, Choices(), parts)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 150 * MIB, dtype=torch.uint8, device="cuda")
    torch.manual_seed(7)
    losses = [float(run.step(a_batch(seed))) for seed in range(2)]
    del hog
    assert [event.after.choices for event in run.events] == [parts]
    assert losses == expected
    assert all(map(torch.equal, run.model.parameters(), expected_state))


def test_an_elastic_run_follows_what_others_leave_of_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    run = fit(model, optimizer, loss_of, a_batch(0), elastic=Elastic(patience=2))
    run.step(a_batch(0))
    first, lean = run.plan, run._adapting._ladders[0].rungs[-1]
    elasticity, real = run._adapting._elasticity, torch.cuda.mem_get_info
    assert elasticity is not None
    taken = elasticity._left() - lean.need

    def after_others(device: Any = None) -> tuple[int, int]:
        free, total = real(device)
        return free - taken, total

    monkeypatch.setattr(torch.cuda, "mem_get_info", after_others)
    run.step(a_batch(1))
    assert run.plan == lean.plan
    monkeypatch.undo()
    for seed in range(2, 6):
        run.step(a_batch(seed))
    assert run.plan == first
    shrunk, _ = run.events
    assert shrunk.cause == "others took memory of the card"
