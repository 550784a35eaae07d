"""The GPU catalogue: its numbers are plausible, its names are forgiving."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oomph.errors import BadInput, UnknownName
from oomph.hardware import find_gpu, known_gpus
from oomph.hardware.catalogue import parse_gpus
from oomph.units import GIB

GPUS = known_gpus()

ONE_GPU = """
schema = 1
[gpus.toy]
vendor = "nvidia"
architecture = "ada"
compute_capability = [8, 9]
sm_count = 10
memory = "8 GiB"
memory_bandwidth = 1e11
host_link = 1e10
rates = { fp32 = 1e12 }
"""


def test_the_cards_people_have_are_there() -> None:
    assert len(GPUS) >= 24
    expected = "t4 v100-16gb v100-32gb a10 a100-40gb a100-80gb l4 l40s h100-pcie h100-sxm h200 b200"
    expected += " gh200 mi300x rtx-2080-ti rtx-3060 rtx-3090 rtx-4070 rtx-4090 rtx-5090 rtx-a6000"
    assert set(expected.split()) <= set(GPUS)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_numbers_are_plausible(gpu) -> None:
    assert 8 * GIB < gpu.memory < 300 * GIB
    assert 20 <= gpu.sm_count <= 320
    assert 200e9 < gpu.memory_bandwidth < 10e12
    assert 10e9 < gpu.host_link < gpu.memory_bandwidth / 4
    # Reading all of memory once takes some tens of milliseconds on any of them.
    assert 0.005 < gpu.memory / gpu.memory_bandwidth < 0.1


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_narrower_dtypes_are_not_slower(gpu) -> None:
    rates = gpu.rates
    assert rates["fp64"] <= rates["fp32"] <= rates.get("tf32", rates["fp32"]) <= rates["fp16"]
    assert 1.9 <= rates["fp16"] / rates["fp32"] <= 32
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"]
    assert rates.get("fp8", rates["fp16"]) >= rates["fp16"]
    assert rates.get("int8", rates["fp16"]) >= rates.get("fp8", rates["fp16"]) * 0.99


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_dtypes_follow_the_compute_capability(gpu) -> None:
    if gpu.vendor == "amd":
        assert gpu.compute_capability is None
        return
    assert ("bf16" in gpu.rates) == ("tf32" in gpu.rates) == (gpu.compute_capability >= (8, 0))
    assert ("fp8" in gpu.rates) == (gpu.compute_capability >= (8, 9))


def test_published_figures() -> None:
    h200 = GPUS["h200"]
    assert h200.memory == int(139.8 * GIB)
    assert (h200.memory_bandwidth, h200.sm_count) == (4.8e12, 132)
    assert GPUS["a100-80gb"].rates["bf16"] == 312e12
    assert h200.rates == GPUS["h100-sxm"].rates


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("rtx_4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("A100 80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("nvidia h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("2080-ti", "rtx-2080-ti"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_common_spellings_are_understood(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


def test_every_name_finds_itself() -> None:
    assert all(find_gpu(name) is gpu for name, gpu in GPUS.items())


def test_an_unknown_name_offers_near_ones() -> None:
    with pytest.raises(UnknownName, match="did you mean") as caught:
        find_gpu("rtx-4091")
    assert "rtx-4090" in caught.value.near


@pytest.mark.parametrize("name", ["a100", "v100"])
def test_a_name_that_leaves_the_memory_open_is_not_guessed(name: str) -> None:
    with pytest.raises(UnknownName) as caught:
        find_gpu(name)
    assert any(near.startswith(name) for near in caught.value.near)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ("sm_count = 10", "sm_count = -1", "positive"),
        ("sm_count = 10", "", "lacks 'sm_count'"),
        ("sm_count = 10", "sm_count = 10\nsmcount = 1", "'smcount', which is unknown"),
        ('"nvidia"', '"nvidea"', "vendor"),
        ("[8, 9]", "[8]", "compute_capability"),
        ("compute_capability = [8, 9]", "", "compute_capability"),
        ("fp32 = 1e12", "fp16 = 1e12", "fp32"),
        ("fp32 = 1e12", "fp32 = 1e12, fp17 = 1e12", "rates"),
        ("1e11", "nan", "positive"),
        ('"8 GiB"', '"eight"', "memory"),
        ("[gpus.toy]", "[gpus.toy", "not TOML"),
    ],
)
def test_a_malformed_catalogue_is_refused(old: str, new: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        parse_gpus(ONE_GPU.replace(old, new, 1))


def test_looking_up_a_gpu_imports_no_torch() -> None:
    code = "import sys, oomph.hardware as g; g.find_gpu('h200'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
