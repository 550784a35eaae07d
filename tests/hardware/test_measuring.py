"""Measuring the machine at hand: the CPU's path for real, in little time and leaving nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from oomph.errors import BadInput
from oomph.hardware import measuring
from oomph.hardware.measuring import disk_rates, measure_machine, memory_bandwidth, product_rates
from oomph.hardware.profile import Profile, load_profile, save_profile
from oomph.units import GIB, MIB

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to copy and to update than on a machine that is to be judged."""
    monkeypatch.setattr(measuring, "ADAM_PARAMETERS", 1 << 20)
    monkeypatch.setattr(measuring, "COPIED", 16 * MIB)
    monkeypatch.setattr(measuring, "DISK_COPIED", 32 * MIB)
    monkeypatch.setattr(measuring, "LONG_ENOUGH", 0.02)


@pytest.fixture
def measured(tmp_path: Path) -> Profile:
    return measure_machine(device="cpu", folder=tmp_path, seconds=1)


def test_the_cpu_gives_plausible_numbers(measured) -> None:
    flops, rate = measured.product_rates["fp32"][0]
    assert flops == 2 * 512**3
    assert 1e8 < rate < 1e14
    assert 1e8 < measured.memory_bandwidth < 1e13
    assert 1e6 < measured.disk_write < 1e12
    assert 1e6 < measured.disk_read < 1e12
    assert 1e6 < measured.host_adam < 1e12
    assert measured.host_threads == torch.get_num_threads()
    assert (measured.gpu, measured.torch) == ("cpu", torch.__version__)


def test_the_cpu_has_nothing_that_only_a_card_has(measured) -> None:
    assert measured.driver is measured.host_to_device is measured.launch_seconds is None
    assert measured.attention_rates == measured.convolution_rates == {}


def test_what_is_measured_can_be_saved_and_loaded(measured, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    save_profile(measured)
    assert load_profile("cpu") == measured


def test_each_part_is_said_and_the_folder_is_left_empty(tmp_path) -> None:
    said: list[str] = []
    measure_machine(device="cpu", folder=tmp_path, seconds=0.1, say=said.append)
    assert [line.removeprefix("measuring ") for line in said] == [
        "the disk",
        "AdamW on the host",
        "memory",
        "matrix products",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_random_state_and_the_precision_stay_as_they_were(tmp_path) -> None:
    torch.set_float32_matmul_precision("high")
    state = torch.get_rng_state()
    try:
        measure_machine(device="cpu", folder=tmp_path, seconds=0.1)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), state)


# --- Limits ---------------------------------------------------------------------------------------


def test_products_stop_growing_when_the_time_is_up() -> None:
    start = time.perf_counter()
    few = product_rates(CPU, room=GIB, seconds=0.05)["fp32"]
    assert time.perf_counter() - start < 5
    assert 1 <= len(few) < len(measuring.PRODUCT_SHAPES)


def test_products_that_need_too_much_memory_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "PRODUCT_SHAPES", ((64, 64, 64), (256, 256, 256), (8, 8, 8)))
    rates = product_rates(CPU, room=3 * 4 * 64 * 64, seconds=5)["fp32"]
    assert [flops for flops, _ in rates] == [2 * 64**3, 2 * 8**3]


def test_a_copy_takes_no_more_than_its_room(monkeypatch) -> None:
    made: list[int] = []
    ones = torch.ones

    def noted(size: int, **options: object) -> torch.Tensor:
        made.append(size)
        return ones(size, **options)

    monkeypatch.setattr(torch, "ones", noted)
    assert memory_bandwidth(CPU, room=4 * MIB, seconds=0.01) > 0
    assert made == [2 * MIB]  # and a target of the same size


def test_the_disk_is_written_in_chunks_until_the_time_is_up(tmp_path) -> None:
    assert "16.00 MiB" in disk_rates(tmp_path, seconds=1e-9)[2]
    assert "32.00 MiB" in disk_rates(tmp_path, seconds=60)[2]


# --- The disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("function", ["_write", "_read"])
def test_the_private_folder_is_removed_when_a_part_raises(
    function: str, error: type[BaseException], tmp_path, monkeypatch
) -> None:
    seen: list[Path] = []

    def broken(path: Path, *_: object, **__: object) -> None:
        seen.extend(tmp_path.iterdir())
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(measuring, function, broken)
    with pytest.raises(error):
        measure_machine(device="cpu", folder=tmp_path, seconds=0.1)
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_can_read_the_private_folder(tmp_path, monkeypatch) -> None:
    modes: list[int] = []
    read = measuring._read

    def noted(path: Path, *args: object, **options: object) -> object:
        modes.extend(place.stat().st_mode & 0o777 for place in (path.parent, path))
        return read(path, *args, **options)

    monkeypatch.setattr(measuring, "_read", noted)
    disk_rates(tmp_path, seconds=0.01)
    assert modes == [0o700, 0o600]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot drop the cache")
def test_where_direct_io_is_refused_the_page_cache_is_dropped(tmp_path, monkeypatch) -> None:
    opened, dropped = os.open, []

    def no_direct(path: Path, flags: int, mode: int = 0o777, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args[3]))
    write, read, method = disk_rates(tmp_path, seconds=0.1)
    assert min(write, read) > 0
    assert method.startswith("fsync, page cache dropped")
    assert dropped == [os.POSIX_FADV_DONTNEED]


def test_a_full_disk_is_said_in_words_and_left_empty(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "write", lambda file, chunk: len(chunk) // 2)
    with pytest.raises(BadInput, match=f"{tmp_path}: it is full; name another folder"):
        disk_rates(tmp_path, seconds=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="No such file or directory; name another folder"):
        measure_machine(device="cpu", folder=tmp_path / "nowhere", seconds=0.1)


# --- Devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words"),
    [("warp", "is no device; write cuda"), ("mps", "only CUDA cards and the CPU")],
)
def test_a_device_that_cannot_be_measured_is_refused(device: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        measure_machine(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_asking_for_a_card_where_there_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="no CUDA card here; `cpu` measures the rest"):
        measure_machine(device="cuda")


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_no_time_at_all_is_refused(seconds: float) -> None:
    with pytest.raises(BadInput, match="takes some seconds"):
        measure_machine(device="cpu", seconds=seconds)
