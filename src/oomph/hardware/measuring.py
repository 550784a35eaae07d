"""Measures this machine in under a minute: its GPU, its host link, its disk, its CPU.

Each part is a separate function with a time limit, and takes the median of repeats after a warm-up.
The limit is kept to within a few calls of what is measured, since calls are not interrupted.
Operations are counted as in `oomph.hardware.timing`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import mmap
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.errors import BadInput, UnknownName
from oomph.hardware.catalogue import find_gpu
from oomph.hardware.profile import Profile
from oomph.memory.scratch_file import default_folder
from oomph.torch_compat import cuda
from oomph.torch_compat.operators import scaled_mm
from oomph.units import GIB, MIB, format_bytes

#: Shapes of products: rows (tokens), inner width, columns; squares, and transformer layers.
PRODUCT_SHAPES = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (16384, 768, 768),
    (8192, 1024, 4096),
    (4096, 4096, 4096),
    (4096, 2048, 32768),
    (8192, 8192, 8192),
)
#: Batch, heads, positions and head width.
ATTENTION_SHAPE = (4, 16, 2048, 128)
#: Products in attention's backward, relative to its forward.
ATTENTION_BACKWARD = 2.5
#: Images, channels in and out, and height and width of a 3×3 convolution.
CONVOLUTION_SHAPE = (128, 128, 28)
#: Larger than the caches of GPUs and of most hosts.
COPIED = 512 * MIB
LINK_COPIED = 256 * MIB
PINNED = 128 * MIB
ADAM_PARAMETERS = 1 << 25
DISK_COPIED = GIB
DISK_CHUNK = 16 * MIB
#: The share of free GPU memory that may be used, and the least that must be free.
DEVICE_PART = 1 / 4
LEAST_FREE = 4 * GIB
HOST_ROOM = 2 * GIB

#: A measurement takes no longer than this once it has enough repeats.
LONG_ENOUGH = 0.25
FEWEST_REPEATS = 3
#: Calls of the shortest measurement: first one to warm up and one to estimate its time.
FEWEST_CALLS = FEWEST_REPEATS + 2
#: Kernels per repeat, if one alone is too short to time, and the seconds they should fill.
MOST_CALLS, REPEAT_SECONDS = 50, 1e-2
#: Cycles, about 3 ms, in which the CPU queues kernels ahead, so that its speed does not count.
HEAD_START = 5_000_000
LAUNCHES = 200

#: How the time is divided. The rest is for starting CUDA.
_SHARES = {
    "disk": 0.14,
    "host_adam": 0.08,
    "products": 0.40,
    "attention": 0.08,
    "convolution": 0.06,
    "memory": 0.04,
    "launch": 0.02,
    "link": 0.10,
}
_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def measure_machine(
    *,
    device: str | None = None,
    folder: Path | None = None,
    seconds: float = 50,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure how fast this machine is.

    Args:
        device: `cuda`, one GPU such as `cuda:1`, or `cpu`; by default CUDA if there is a GPU.
        folder: where the disk is measured, with a file that is removed afterwards.
        seconds: about how long everything may take at most.
        say: called with what is being measured.
    """
    place = _device(device)
    if not seconds > 0:
        raise BadInput(f"measuring takes some seconds, not {seconds}")
    limits = {part: share * seconds for part, share in _SHARES.items()}
    room = _room(place)  # first of all, so that a GPU in use is refused at once
    say("measuring the disk")
    disk_write, disk_read, disk_method = disk_rates(
        folder if folder is not None else default_folder(), seconds=limits["disk"]
    )
    say("measuring AdamW on the host")
    host_adam = host_adam_rate(seconds=limits["host_adam"])
    with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
        on_card = _measure_card(place, limits, say) if place.type == "cuda" else {}
        say("measuring memory")
        bandwidth = memory_bandwidth(place, room=room, seconds=limits["memory"])
        say("measuring matrix products")
        products = product_rates(place, room=room, seconds=limits["products"])
    return Profile(
        gpu=_name(place),
        torch=str(torch.__version__),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        product_rates=products,
        memory_bandwidth=bandwidth,
        disk_write=disk_write,
        disk_read=disk_read,
        disk_method=disk_method,
        host_adam=host_adam,
        host_threads=torch.get_num_threads(),
        **on_card,
    )


def _measure_card(
    device: torch.device, limits: Mapping[str, float], say: Callable[[str], None]
) -> dict[str, Any]:
    """The profile fields that only a GPU has."""
    say("measuring the host link")
    _wake(device)
    link = {"pinning": pinning_rate(), **link_rates(device, seconds=limits["link"])}
    cuda.empty_host_cache()
    say("measuring launches")
    launch = launch_seconds(device, seconds=limits["launch"] / 2)
    smallest = smallest_kernel_seconds(device, seconds=limits["launch"] / 2)
    say("measuring attention")
    attention = attention_rates(device, seconds=limits["attention"])
    say("measuring convolutions")
    convolutions = convolution_rates(device, seconds=limits["convolution"])
    torch.cuda.empty_cache()
    return {
        "driver": _driver(),
        "attention_rates": attention,
        "convolution_rates": convolutions,
        "launch_seconds": launch,
        "smallest_kernel_seconds": smallest,
        **link,
    }


# --- Arithmetic -----------------------------------------------------------------------------------


def product_rates(
    device: torch.device, *, room: int, seconds: float
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Operations in a product and operations per second, by dtype, from small products to large.

    Sizes that would take more memory than `room`, or too long, are skipped.
    """
    kinds = _product_kinds(device)
    return {
        dtype: _rates_by_size(device, dtype, room=room, seconds=seconds / len(kinds))
        for dtype in kinds
    }


def _product_kinds(device: torch.device) -> tuple[str, ...]:
    if device.type == "cpu":
        return ("fp32",)
    capability = torch.cuda.get_device_capability(device)
    nvidia = torch.version.hip is None
    return (
        "fp32",
        *(("tf32",) if nvidia and capability >= (8, 0) else ()),
        *_half_dtypes(),
        *(("fp8",) if nvidia and capability >= (8, 9) else ()),
    )


def _half_dtypes() -> tuple[str, ...]:
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return ("bf16", "fp16") if has_bf16 else ("fp16",)


def _rates_by_size(
    device: torch.device, dtype: str, *, room: int, seconds: float
) -> tuple[tuple[float, float], ...]:
    end = time.perf_counter() + seconds
    rates: list[tuple[float, float]] = []
    with _fp32_products_as("high" if dtype == "tf32" else "highest"):
        for rows, inner, columns in PRODUCT_SHAPES:
            if 4 * (rows * inner + inner * columns + rows * columns) > room:
                continue
            flops = 2.0 * rows * inner * columns
            left = end - time.perf_counter()
            if rates and FEWEST_CALLS * flops / rates[-1][1] > left:
                break
            taken = _product_seconds(device, dtype, (rows, inner, columns), seconds=left)
            rates.append((flops, flops / taken))
            torch.cuda.empty_cache()  # otherwise the blocks of all sizes would add up
    return tuple(rates)


def _product_seconds(
    device: torch.device, dtype: str, shape: tuple[int, int, int], *, seconds: float
) -> float:
    rows, inner, columns = shape
    kind = _HALF_DTYPES.get(dtype, torch.bfloat16 if dtype == "fp8" else torch.float32)
    left = _random((rows, inner), kind, device)
    # A weight as linear layers store it: transposed.
    right = _random((columns, inner), kind, device).t()
    if dtype == "fp8":
        return _fp8_product_seconds(left, right, seconds=seconds)
    out = torch.empty((rows, columns), dtype=kind, device=device)
    return median_seconds(lambda: torch.mm(left, right, out=out), device, seconds=seconds)


def _fp8_product_seconds(left: Tensor, right: Tensor, *, seconds: float) -> float:
    left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    one = torch.ones((), device=left.device)

    def multiply() -> Tensor:
        return scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return median_seconds(multiply, left.device, seconds=seconds)


def attention_rates(device: torch.device, *, seconds: float) -> dict[str, dict[str, float]]:
    """Operations per second of causal attention on a GPU, forward and backward, by dtype."""
    batch, heads, positions, width = ATTENTION_SHAPE
    flops = 4 * batch * heads * positions**2 * width / 2  # a causal mask drops half of the pairs
    share = seconds / len(_half_dtypes())
    rates = {}
    for dtype in _half_dtypes():
        forward, backward = _attention_seconds(device, _HALF_DTYPES[dtype], seconds=share)
        rates[dtype] = {
            "forward": flops / forward,
            "backward": ATTENTION_BACKWARD * flops / backward,
        }
    return rates


def _attention_seconds(
    device: torch.device, kind: torch.dtype, *, seconds: float
) -> tuple[float, float]:
    query, key, value, grad = (_random(ATTENTION_SHAPE, kind, device) for _ in range(4))
    leaves = (query, key, value)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward_seconds = median_seconds(forward, device, seconds=seconds / 2)
    for leaf in leaves:
        leaf.requires_grad_()
    out = forward()

    def backward() -> object:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return forward_seconds, median_seconds(backward, device, seconds=seconds / 2)


def convolution_rates(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Operations per second of a 3×3 convolution on a GPU, by dtype."""
    images, channels, size = CONVOLUTION_SHAPE
    flops = 2.0 * images * channels**2 * 9 * size**2
    kinds = {"fp32": torch.float32, **{name: _HALF_DTYPES[name] for name in _half_dtypes()}}
    return {
        dtype: flops / _convolution_seconds(device, kind, seconds=seconds / len(kinds))
        for dtype, kind in kinds.items()
    }


def _convolution_seconds(device: torch.device, kind: torch.dtype, *, seconds: float) -> float:
    images, channels, size = CONVOLUTION_SHAPE
    batch = _random((images, channels, size, size), kind, device)
    weight = _random((channels, channels, 3, 3), kind, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return median_seconds(lambda: F.conv2d(batch, weight, padding=1), device, seconds=seconds)


def host_adam_rate(*, seconds: float) -> float:
    """Parameters per second of torch's fused AdamW on the CPU, with torch's number of threads."""
    weights = torch.ones(ADAM_PARAMETERS, dtype=torch.float32, device="cpu", requires_grad=True)
    weights.grad = torch.full_like(weights, 1e-3)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return ADAM_PARAMETERS / wall_seconds(optimizer.step, seconds=seconds)


# --- Memory, the link and launches ----------------------------------------------------------------


def memory_bandwidth(device: torch.device, *, room: int, seconds: float) -> float:
    """Bytes read plus bytes written per second by a large copy in the device's memory."""
    size = min(COPIED, room // 2)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device, seconds=seconds)


def launch_seconds(device: torch.device, *, seconds: float) -> float:
    """CPU seconds to launch one small kernel."""
    small = torch.zeros(1, device=device)

    def once() -> float:
        torch.cuda.synchronize(device)  # an empty queue: a full one would make the CPU wait
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            small.add_(1)
        return (time.perf_counter() - start) / LAUNCHES

    once()
    return _median_of(once, seconds=seconds)


def smallest_kernel_seconds(device: torch.device, *, seconds: float) -> float:
    """Seconds from the start of a minimal kernel to the start of the next, both already queued."""
    small = torch.zeros(1, device=device)
    return median_seconds(lambda: small.add_(1), device, seconds=seconds)


def link_rates(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Bytes per second between host and GPU, by the names of `Profile`'s fields."""
    share = seconds / 4
    pinned = [_pinned(LINK_COPIED) for _ in range(2)]
    on_card = [torch.zeros(LINK_COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    pageable = torch.ones(LINK_COPIED, dtype=torch.uint8, device="cpu")
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def to_card() -> None:
        on_card[0].copy_(pinned[0], non_blocking=True)

    def to_host() -> None:
        pinned[1].copy_(on_card[1], non_blocking=True)

    def both() -> None:
        now = torch.cuda.current_stream(device)
        for stream, copy in zip(streams, (to_card, to_host), strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                copy()
        for stream in streams:
            now.wait_stream(stream)

    def from_pageable() -> None:
        on_card[0].copy_(pageable)
        torch.cuda.synchronize(device)

    return {
        "host_to_device": LINK_COPIED / median_seconds(to_card, device, seconds=share),
        "device_to_host": LINK_COPIED / median_seconds(to_host, device, seconds=share),
        "both_ways": 2 * LINK_COPIED / median_seconds(both, device, seconds=share),
        "pageable": LINK_COPIED / wall_seconds(from_pageable, seconds=share),
    }


def pinning_rate() -> float:
    """Bytes per second at which new pinned memory is allocated."""
    cuda.empty_host_cache()
    held, taken = [], []
    for _ in range(FEWEST_REPEATS):  # all are held, since freed blocks would be reused
        start = time.perf_counter()
        held.append(_pinned(PINNED))
        taken.append(time.perf_counter() - start)
    return PINNED / statistics.median(taken)


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


# --- The disk -------------------------------------------------------------------------------------


def disk_rates(folder: Path, *, seconds: float) -> tuple[float, float, str]:
    """Bytes per second written to and read from a folder's disk, and the method of measuring."""
    try:
        with tempfile.TemporaryDirectory(prefix="oomph-", dir=folder) as private:
            most = min(DISK_COPIED, shutil.disk_usage(private).free // 4)
            if most < DISK_CHUNK:
                raise OSError(errno.ENOSPC, "it is almost full")
            path = Path(private, "measured")
            direct = _takes_direct(path)
            flag = os.O_DIRECT if direct else 0
            # Anonymous maps are page-aligned, as direct I/O needs. Noise: some disks compress
            # zeros.
            with mmap.mmap(-1, DISK_CHUNK) as chunk:
                chunk.write(os.urandom(DISK_CHUNK))
                size, writing = _write(path, chunk, flag, most=most, seconds=seconds / 2)
                if not direct:
                    _forget_cached(path)
                read, reading = _read(path, chunk, flag, most=size, seconds=seconds / 2)
    except OSError as error:
        raise BadInput(
            f"cannot measure the disk in {folder}: {error.strerror}; name another folder"
        ) from None
    return (
        size / writing,
        read / reading,
        f"{_disk_method(direct)}, {format_bytes(size)} in {folder}",
    )


def _takes_direct(path: Path) -> bool:
    """Whether files there can be written past the page cache."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            _write(path, page, os.O_DIRECT, most=mmap.PAGESIZE, seconds=0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _write(
    path: Path, chunk: mmap.mmap, flag: int, *, most: int, seconds: float
) -> tuple[int, float]:
    """Bytes written in whole chunks, at least one, and the seconds until they were on the disk."""
    written, start = 0, time.perf_counter()
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag) as file:
        while not written or (
            written + len(chunk) <= most and time.perf_counter() - start < seconds
        ):
            if os.write(file, chunk) < len(chunk):
                raise OSError(errno.ENOSPC, "it is full")
            if not flag:  # otherwise the page cache would take it all and the last sync be long
                os.fsync(file)
            written += len(chunk)
        os.fsync(file)
    return written, time.perf_counter() - start


def _read(
    path: Path, chunk: mmap.mmap, flag: int, *, most: int, seconds: float
) -> tuple[int, float]:
    """Bytes read in whole chunks, at least one, and the seconds they took."""
    read, start = 0, time.perf_counter()
    with _opened(path, os.O_RDONLY | flag) as file:
        while not read or (read < most and time.perf_counter() - start < seconds):
            count = os.readv(file, [chunk])
            if not count:
                raise OSError(errno.EIO, "the file became shorter")
            read += count
    return read, time.perf_counter() - start


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _forget_cached(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with _opened(path, os.O_RDONLY) as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_method(direct: bool) -> str:
    if direct:
        return "direct I/O"
    if hasattr(os, "posix_fadvise"):
        return "fsync, page cache dropped"
    return "fsync, page cache may have helped"


# --- Timing ---------------------------------------------------------------------------------------


def median_seconds(call: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Median seconds of a call on its device, by CUDA events on a GPU."""
    if device.type == "cpu":
        return wall_seconds(call, seconds=seconds)
    call()
    torch.cuda.synchronize(device)
    calls = min(max(int(REPEAT_SECONDS / _event_seconds(call, 1)), 1), MOST_CALLS)
    return _median_of(lambda: _event_seconds(call, calls), seconds=seconds)


def wall_seconds(call: Callable[[], object], *, seconds: float) -> float:
    """Median seconds of a call that returns when its work is done."""

    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    once()
    return _median_of(once, seconds=seconds)


def _median_of(measure: Callable[[], float], *, seconds: float) -> float:
    end = time.perf_counter() + min(seconds, LONG_ENOUGH)
    taken: list[float] = []
    while len(taken) < FEWEST_REPEATS or time.perf_counter() < end:
        taken.append(measure())
    return statistics.median(taken)


def _event_seconds(call: Callable[[], object], calls: int) -> float:
    """GPU seconds of one of several calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cuda.sleep(HEAD_START)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


# --- The machine ----------------------------------------------------------------------------------


def _device(device: str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise BadInput(f"{device!r} is no device; write cuda, cuda:1 or cpu") from None
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise BadInput(f"only CUDA cards and the CPU can be measured, not {device}")
    if not torch.cuda.is_available():
        raise BadInput("PyTorch sees no CUDA card here; `cpu` measures the rest of the machine")
    index = place.index if place.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise BadInput(f"there is no {device}: PyTorch sees {torch.cuda.device_count()} cards")
    return torch.device("cuda", index)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    try:
        return find_gpu(name).name
    except UnknownName:
        return name


def _driver() -> str | None:
    """The driver's version, if the system reports it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def _room(device: torch.device) -> int:
    """Bytes that one part may use."""
    if device.type == "cpu":
        return HOST_ROOM
    free, _ = torch.cuda.mem_get_info(device)
    if free < LEAST_FREE:
        raise BadInput(
            f"only {format_bytes(free)} of the card is free, too little to measure it; end what"
            " else is using it"
        )
    return int(free * DEVICE_PART)


def _wake(device: torch.device) -> None:
    """Keep a GPU busy until its clocks are up."""
    for _ in range(2):
        _product_seconds(device, "fp32", (2048, 2048, 2048), seconds=LONG_ENOUGH)


@contextlib.contextmanager
def _fp32_products_as(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _random(shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers, since zeros make a GPU faster; from a separate generator, not the user's."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, dtype=kind, device=device, generator=generator)
