"""Measuring the card that is here. Skipped where there is none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from oomph.hardware import find_gpu
from oomph.hardware.measuring import (
    LEAST_FREE,
    attention_rates,
    convolution_rates,
    link_rates,
    measure_machine,
    memory_bandwidth,
    product_rates,
)
from oomph.hardware.profile import Profile, load_profile, save_profile
from oomph.units import GIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MOST_SECONDS = 60


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, float]:
    start = time.perf_counter()
    profile = measure_machine(folder=tmp_path_factory.mktemp("disk"))
    return profile, time.perf_counter() - start


@pytest.fixture
def profile(timed: tuple[Profile, float]) -> Profile:
    return timed[0]


def test_it_takes_under_a_minute(timed) -> None:
    assert timed[1] < MOST_SECONDS


def test_products_reach_a_plausible_part_of_the_data_sheet(profile) -> None:
    gpu = find_gpu(torch.cuda.get_device_name())
    assert profile.gpu == gpu.name
    for dtype in profile.product_rates.keys() & gpu.rates.keys():
        assert 0.2 < profile.large_product_rate(dtype) / gpu.rates[dtype] < 1.1, dtype


def test_every_dtype_of_the_card_is_measured_at_every_size(profile) -> None:
    gpu = find_gpu(torch.cuda.get_device_name())
    assert profile.product_rates.keys() == gpu.rates.keys() - {"fp64", "int8"}
    assert len({len(rates) for rates in profile.product_rates.values()}) == 1


def test_large_products_run_at_a_higher_rate_than_small_ones(profile) -> None:
    for dtype, rates in profile.product_rates.items():
        assert rates[0][1] < profile.large_product_rate(dtype), dtype


def test_every_efficiency_is_plausible(profile) -> None:
    efficiency = profile.efficiency(find_gpu(profile.gpu))
    assert len(efficiency) == 5
    for kind, part in efficiency.items():
        assert 0.1 < part < 1.1, kind


def test_the_link_and_launches_are_plausible(profile) -> None:
    link = find_gpu(profile.gpu).host_link
    assert 0.1 * link < profile.host_to_device < 1.1 * link
    assert 0.1 * link < profile.device_to_host < 1.1 * link
    assert profile.both_ways > 0.9 * max(profile.host_to_device, profile.device_to_host)
    assert profile.pageable < 1.1 * profile.host_to_device
    assert 1e8 < profile.pinning < 1e12
    assert 0.5e-6 < profile.smallest_kernel_seconds < 20e-6
    assert 0.5e-6 < profile.launch_seconds < 100e-6


def test_it_can_be_saved_and_loaded(profile, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save_profile(profile)
    assert load_profile(torch.cuda.get_device_name()) == profile


def test_no_part_takes_more_than_a_quarter_of_the_least_that_must_be_free() -> None:
    device, room = torch.device("cuda", 0), LEAST_FREE // 4
    parts = {
        "products": lambda: product_rates(device, room=room, seconds=2),
        "memory": lambda: memory_bandwidth(device, room=room, seconds=0.1),
        "attention": lambda: attention_rates(device, seconds=0.1),
        "convolutions": lambda: convolution_rates(device, seconds=0.1),
        "link": lambda: link_rates(device, seconds=0.1),
    }
    for name, part in parts.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        part()
        assert torch.cuda.max_memory_reserved() - before <= GIB, name


def test_nothing_stays_behind_on_the_card_and_on_the_disk(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    measure_machine(folder=tmp_path, seconds=1)
    # What stays is the workspace of cuBLAS, which is its own.
    assert torch.cuda.memory_allocated() - before < 128 << 20
    assert list(tmp_path.iterdir()) == []
