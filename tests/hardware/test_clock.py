"""Predicted seconds follow work and card."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.hardware import find_gpu
from oomph.hardware.profile import Profile, save_profile
from oomph.hardware.timing.clock import BARE_LAUNCH, BETWEEN_KERNELS, LAUNCH, Clock
from oomph.hardware.timing.ops import work_of
from oomph.hardware.timing.work import Work

aten = torch.ops.aten


def test_a_product_has_two_operations_for_each_triple_and_reads_and_writes_all() -> None:
    with FakeTensorMode():
        left, right = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(16, 8)
        work = work_of(aten.mm.default, (left, right), torch.empty(8, 8))
    assert work == Work(
        flops=2 * 8 * 16 * 8, dtype="bf16", bytes=2 * 128 + 4 * 128 + 4 * 64, kind="product"
    )


@pytest.mark.parametrize(("causal", "pairs"), [(False, 32 * 32), (True, 32 * 32 / 2)])
def test_a_causal_mask_halves_attention_and_groups_of_queries_count_all(
    causal: bool, pairs: float
) -> None:
    with FakeTensorMode():
        query, key = torch.empty(2, 8, 32, 16), torch.empty(2, 2, 32, 16)
        args = (query, key, key, 0.0, causal)
        work = work_of(aten._scaled_dot_product_flash_attention.default, args, query)
    assert work.flops == 4 * 2 * 8 * pairs * 16
    assert work.kind == "attention"


def test_views_and_empty_tensors_are_no_work_and_a_lookup_reads_rows() -> None:
    with FakeTensorMode():
        table, rows = torch.empty(1000, 8), torch.zeros(3, dtype=torch.int64)
        assert work_of(aten.view.default, (table, [8000]), table.view(8000)) == Work()
        assert work_of(aten.empty.memory_format, ([4],), torch.empty(4)) == Work()
        looked_up = work_of(aten.embedding.default, (table, rows), torch.empty(3, 8))
    assert looked_up.bytes == 2 * 3 * 8 * 4


def test_more_work_takes_no_less_time_and_nothing_takes_none() -> None:
    clock = Clock.of(find_gpu("h200"))
    assert clock.seconds(Work()) == 0
    assert clock.seconds(Work(bytes=1)) == pytest.approx(BETWEEN_KERNELS)
    sizes = [10**power for power in range(6, 14)]
    for times in (
        [clock.seconds(Work(bytes=size)) for size in sizes],
        [clock.seconds(Work(flops=size, dtype="bf16", kind="product", bytes=1)) for size in sizes],
    ):
        assert times == sorted(times) and times[-1] > times[0]


@pytest.mark.parametrize(
    "work",
    [Work(bytes=10**9), Work(flops=1e13, dtype="bf16", kind="product", bytes=10**9)],
    ids=["moving", "multiplying"],
)
def test_what_reaches_half_of_its_kinds_rate_takes_twice_as_long(work: Work) -> None:
    clock = Clock.of(find_gpu("h200"))
    slower = dataclasses.replace(work, reach=0.5)
    begun = [clock.seconds(one) - BETWEEN_KERNELS for one in (work, slower)]
    assert begun[1] == pytest.approx(2 * begun[0])


def test_a_host_that_launches_slowly_does_so_in_a_model_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    h200 = find_gpu("h200")
    assert Clock.of(h200).launch == LAUNCH
    profile = Profile(gpu="h200", torch="", date="")
    save_profile(profile)
    assert Clock.of(h200).launch == LAUNCH
    save_profile(dataclasses.replace(profile, launch_seconds=2 * BARE_LAUNCH))
    assert Clock.of(h200).launch == pytest.approx(2 * LAUNCH)


def test_formats_run_at_the_cards_own_rates() -> None:
    work = {name: Work(flops=1e15, dtype=name, kind="product") for name in ("bf16", "fp32")}
    h200 = find_gpu("h200")
    clock, tf32 = Clock(gpu=h200), Clock(gpu=h200, tf32=True)
    assert clock.seconds(work["bf16"]) < tf32.seconds(work["fp32"]) < clock.seconds(work["fp32"])
    old = Clock(gpu=find_gpu("p100-16gb"))
    assert old.seconds(work["bf16"]) == old.seconds(work["fp32"])


def test_conversions_come_on_top_of_what_a_kernel_takes() -> None:
    clock = Clock(gpu=find_gpu("h200"))
    work = Work(flops=1e12, dtype="bf16", kind="convolution", bytes=10**6)
    slower = dataclasses.replace(work, converted=10**9)
    more = clock.seconds(slower) - clock.seconds(work)
    assert clock.moving(10**9) < more < 4 * clock.moving(10**9)
