"""Real steps that run out of real memory: state to the bit, memory to the byte."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runs_on_a_card import DEPTH, SAMPLES, a_batch, differences, start, state_of
from switched_on import on
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.engine import host_copies
from oomph.engine.host_copies import HostCopies
from oomph.engine.out_of_memory import free_what_is_left
from oomph.errors import OutOfMemory
from oomph.plans.choices import Choices
from oomph.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECOMPUTE = dict.fromkeys((f"blocks.{at}" for at in range(DEPTH)), "recompute")
MASTERS = "bf16 with fp32 masters"
CHOICES = {
    "plain": Choices(),
    "fused": Choices(techniques=on("fused_optimizer")),
    "in backward": Choices(optimizer_in_backward=True, techniques=on("fused_optimizer")),
    "masters in backward": Choices(
        precision="bf16-mixed", weights=MASTERS, optimizer_in_backward=True
    ),
    "fp16": Choices(precision="fp16-mixed", micro_batch=SAMPLES // 2),
    "recompute": Choices(blocks=RECOMPUTE, techniques=on("fused_optimizer")),
}


@pytest.fixture(autouse=True)
def a_clean_card() -> Iterator[None]:
    """No limit is left behind; a collection after each failure looks at few objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class Refusing(TorchDispatchMode):
    """Has the card refuse the operation that is counted as `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0
        self.refused = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.at:
            self.refused = f"operation {self.at}, {func}"
            torch.empty(1 << 50, device="cuda")  # the real error
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CHOICES)
def test_a_failure_anywhere_leaves_state_to_the_bit_and_memory_to_the_byte(name: str) -> None:
    run = start(CHOICES[name])
    for seed in range(2):
        run.step(a_batch(seed))
    batch = a_batch(2)
    with pytest.raises(OutOfMemory), Refusing(10):  # once, so that nothing is there the first time
        run.step(batch)
    before, baseline = state_of(run), allocated()
    failures = 0
    for at in range(0, 10_000, 11):
        refusing, failed = Refusing(at), False
        try:
            with refusing:
                run.step(batch)
        except OutOfMemory:
            failed = True
        if not failed:
            if refusing.count <= at:
                break
            # The optimizer came to its end all the same.
            before, baseline = state_of(run), allocated()
            continue
        failures += 1
        more = allocated() - baseline
        assert not more, f"{more} bytes more than before are allocated after {refusing.refused}"
        changed = differences(state_of(run), before)
        assert not changed, f"after {refusing.refused}, of {len(before)}: {changed}"
    assert failures > 3, f"only {failures} of {refusing.count} operations were refused in vain"


class Slow:
    """Takes its time to go, and who holds it too."""

    def __del__(self) -> None:
        time.sleep(0.3)


class Sum(torch.autograd.Function):
    """A sum of two; the gradient of the first is slow to go."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        slow = gradient.clone()
        slow.goes = Slow()  # type: ignore[attr-defined]
        return slow, gradient.clone()


class Full(torch.autograd.Function):
    """A copy whose backward finds the card full."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty(1 << 50, device="cuda")


def test_what_the_thread_of_backward_is_slow_to_drop_is_waited_for() -> None:
    leaf = torch.ones(4 * MIB, device="cuda", requires_grad=True)
    leaf.exp().sum().backward()  # once, so that nothing is there the first time
    leaf.grad = None
    before = allocated()
    failed = False
    try:
        # The one that was made last fails first; what the other one saved is queued then.
        Sum.apply(leaf.exp(), Full.apply(leaf)).sum().backward()
    except torch.OutOfMemoryError:
        failed = True
    assert failed
    free_what_is_left(leaf.device)
    assert allocated() == before


@pytest.mark.parametrize("name", ["plain", "in backward", "fp16"])
def test_a_card_that_is_full_at_different_moments(name: str) -> None:
    run = start(CHOICES[name])
    for seed in range(2):
        run.step(a_batch(seed))
    batch = a_batch(2)
    torch.cuda.empty_cache()
    before, baseline = state_of(run), allocated()
    kept = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    failures = 0
    for extra in range(0, 400, 20):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((kept + extra * MIB) / total)
        failed = False
        try:
            run.step(batch)
        except OutOfMemory:
            failed = True
        if not failed:
            break
        failures += 1
        more = allocated() - baseline
        assert not more, f"{more} bytes more than before are allocated, with room for {extra} MiB"
        changed = differences(state_of(run), before)
        assert not changed, f"with room for {extra} MiB, of {len(before)}: {changed}"
    assert failures > 1, f"a step needed no more than {extra} MiB beside {kept} bytes"
    assert not failed, "400 MiB more were not enough for a step"


@pytest.mark.parametrize("queued", [1, 900], ids=["few at a time", "all at once"])
def test_copies_of_all_sizes_come_back(queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_QUEUED", queued)
    monkeypatch.setattr(host_copies, "_TOGETHER", 1 << 20)
    sizes = [1, 3, 1024, 16 << 10, 300_000, 1 << 20]
    groups = [
        [
            torch.randn(size, device="cuda").to(dtype)
            for size in sizes
            for dtype in (torch.float32, torch.bfloat16)
        ]
        + [torch.tensor(1.0, device="cuda"), torch.empty(0, device="cuda"), torch.ones(5)]
        for _ in range(30)
    ]
    expected = [[tensor.clone() for tensor in group] for group in groups]
    copies = HostCopies()
    for _ in range(2):
        copies.keep(groups)
        torch.cuda._sleep(10_000_000)
        for group in groups:  # as a step does: each is waited for, then written to
            copies.wait(group)
            for tensor in group:
                tensor.mul_(3).add_(1)
        for group in reversed(groups):
            for tensor in group:
                copies.put_back(tensor)
        torch.cuda.synchronize()
        for group, values in zip(groups, expected, strict=True):
            assert all(map(torch.equal, group, values))
