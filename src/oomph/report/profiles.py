"""The table of a machine's measurements beside the data sheet's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oomph.hardware.catalogue import known_gpus
from oomph.report.report import Table

if TYPE_CHECKING:
    from oomph.hardware.profile import Profile

_Row = tuple[str, float | None, str, float | None, str]
"""The quantity, its value, the unit, the data sheet's value, and how it was measured."""

_PREFIXES = (
    ("T", 1e12),
    ("G", 1e9),
    ("M", 1e6),
    ("k", 1e3),
    ("", 1.0),
    ("m", 1e-3),
    ("µ", 1e-6),
)


def describe_profile(profile: Profile) -> Table:
    """All measurements, each with its share of the data sheet's value."""
    driver = f", driver {profile.driver}" if profile.driver is not None else ""
    rows = (*_arithmetic(profile), *_memory_and_link(profile), *_host(profile))
    return Table(
        title=f"{profile.gpu}, measured {profile.date} with torch {profile.torch}{driver}",
        header=("what", "measured", "of data sheet", "how"),
        rows=tuple(
            (what, _format(number, unit), _part(number, promised), how)
            for what, number, unit, promised, how in rows
            if number is not None
        ),
        text=("how",),
    )


def _arithmetic(profile: Profile) -> Iterator[_Row]:
    card = known_gpus().get(profile.gpu)
    promised = card.rates if card is not None else {}
    for dtype, rates in profile.product_rates.items():
        large, sheet = profile.large_product_rate(dtype), promised.get(dtype)
        smallest = _format(min(rates)[1], "FLOP/s") if rates else ""
        how = f"large; {smallest} at {_format(min(rates)[0], 'FLOP')}" if rates else ""
        yield f"{dtype} matrix products", large, "FLOP/s", sheet, how
    for dtype, directions in profile.attention_rates.items():
        for direction, rate in directions.items():
            sheet = promised.get(dtype)
            yield f"{dtype} attention {direction}", rate, "FLOP/s", sheet, "causal"
    for dtype, rate in profile.convolution_rates.items():
        yield f"{dtype} convolution", rate, "FLOP/s", promised.get(dtype), "3×3, forward"


def _memory_and_link(profile: Profile) -> Iterator[_Row]:
    card = known_gpus().get(profile.gpu)
    memory = card.memory_bandwidth if card is not None else None
    link = card.host_link if card is not None else None
    both = 2 * link if link is not None else None
    yield "memory", profile.memory_bandwidth, "B/s", memory, "read and written by a large copy"
    yield "one launch", profile.launch_seconds, "s", None, "of the CPU, eager"
    yield "smallest kernel", profile.smallest_kernel_seconds, "s", None, "start to start, queued"
    yield "host to device", profile.host_to_device, "B/s", link, "pinned"
    yield "device to host", profile.device_to_host, "B/s", link, "pinned"
    yield "both ways at once", profile.both_ways, "B/s", both, "pinned, together"
    yield "host to device, pageable", profile.pageable, "B/s", link, "not pinned"
    yield "pinning", profile.pinning, "B/s", None, "new pinned memory"


def _host(profile: Profile) -> Iterator[_Row]:
    yield "disk write", profile.disk_write, "B/s", None, profile.disk_method
    yield "disk read", profile.disk_read, "B/s", None, profile.disk_method
    threads = f"fused, fp32, {profile.host_threads} threads"
    yield "AdamW on the host", profile.host_adam, "param/s", None, threads


def _format(number: float | None, unit: str) -> str:
    """Format a number with three digits and a decimal prefix: `783 TFLOP/s`, `4.31 µs`."""
    assert number is not None
    prefix, scale = next((p, s) for p, s in _PREFIXES if number >= s or p == "µ")
    value = number / scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {prefix}{unit}"


def _part(number: float | None, promised: float | None) -> str:
    return f"{number / promised:.0%}".replace("%", " %") if number and promised else "–"
