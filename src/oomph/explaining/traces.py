"""Profiler traces (Chrome's format, as Kineto writes it): the memory events among them.

`torch.profiler.profile(profile_memory=True).export_chrome_trace(…)` writes one, compressed where
its name ends in .gz. It is read as a stream, twice: for the peak, and for what ran at the peak.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from oomph.errors import BadInput

CHUNK = 1 << 20
#: No event is longer; a file without an end to one is broken.
LONGEST_EVENT = 16 << 20
GZIP = b"\x1f\x8b"
KEY = b'"traceEvents"'
_CUDA = 1
_MOST_OPS = 8


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace says about one device's memory. All sizes are bytes."""

    device: str
    peak_allocated: int
    reserved_at_peak: int
    peak_reserved: int
    at_seconds: float
    """When, from the first memory event on."""
    running: tuple[str, ...]
    """What ran at the peak, innermost first."""
    largest: tuple[tuple[str, int], ...]
    """What the largest requests were made by: the op, and bytes."""
    events: int
    """Memory events of the device."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "device": self.device,
            "peak_allocated": self.peak_allocated,
            "reserved_at_peak": self.reserved_at_peak,
            "peak_reserved": self.peak_reserved,
            "at_seconds": self.at_seconds,
            "running": list(self.running),
            "largest": [{"op": op, "size": size} for op, size in self.largest],
            "events": self.events,
        }


def read_trace(path: str | Path) -> Trace:
    """The device of the trace that took most memory: a GPU where there is one."""
    tallies: dict[tuple[int, int], _Tally] = {}
    for event in _events(Path(path)):
        found = _memory_event(event)
        if found is not None:
            device, sizes = found
            tallies.setdefault(device, _Tally()).add(event, sizes)
    if not tallies:
        raise BadInput(
            f"{path} is a trace without memory events; record it with profile_memory=True"
        )
    gpus = {device: tally for device, tally in tallies.items() if device[0] == _CUDA}
    among = gpus or tallies
    device = max(among, key=lambda one: among[one].peak)
    tally = among[device]
    running, makers = _what_ran(Path(path), tally)
    return Trace(
        device=f"cuda:{device[1]}" if device[0] == _CUDA else "cpu",
        peak_allocated=tally.peak,
        reserved_at_peak=tally.reserved_at_peak,
        peak_reserved=tally.peak_reserved,
        at_seconds=(tally.at - tally.first) / 1e6,
        running=running,
        largest=makers,
        events=tally.count,
    )


class _Tally:
    """The memory events of one device, added up."""

    def __init__(self) -> None:
        self.peak = self.reserved_at_peak = self.peak_reserved = self.count = 0
        self.at = self.first = 0.0
        self.thread: Any = None
        #: The largest requests: bytes, time, thread.
        self.largest: list[tuple[int, float, Any]] = []

    def add(self, event: dict[str, Any], sizes: tuple[int, int, int]) -> None:
        asked, allocated, reserved = sizes
        time = float(event.get("ts", 0.0))
        self.first = min(self.first, time) if self.count else time
        self.count += 1
        self.peak_reserved = max(self.peak_reserved, reserved)
        if allocated > self.peak:
            self.peak, self.reserved_at_peak = allocated, reserved
            self.at, self.thread = time, event.get("tid")
        if asked > 0 and (len(self.largest) < _MOST_OPS or asked > self.largest[-1][0]):
            kept = [*self.largest, (asked, time, event.get("tid"))]
            self.largest = sorted(kept, key=lambda one: -one[0])[:_MOST_OPS]


def _memory_event(event: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
    if event.get("name") != "[memory]":
        return None
    args = event.get("args")
    try:
        device = int(args["Device Type"]), int(args["Device Id"])  # type: ignore[index]
        sizes = tuple(
            int(args.get(name, 0))  # type: ignore[union-attr]
            for name in ("Bytes", "Total Allocated", "Total Reserved")
        )
    except (KeyError, TypeError, ValueError):
        raise BadInput("a memory event of the trace lacks its numbers") from None
    return device, (sizes[0], sizes[1], sizes[2])


def _what_ran(path: Path, tally: _Tally) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The spans around the peak and around the largest requests, in a second pass."""
    around_peak: list[tuple[float, str]] = []
    makers: list[tuple[float, str]] = [(float("inf"), "(unknown)")] * len(tally.largest)
    for event in _events(path):
        if event.get("ph") != "X":
            continue
        start, length = float(event.get("ts", 0.0)), float(event.get("dur", 0.0))
        name, thread = str(event.get("name", "")), event.get("tid")
        if thread == tally.thread and start <= tally.at <= start + length:
            around_peak = sorted([*around_peak, (length, name)])[:_MOST_OPS]
        for at, (_, time, owner) in enumerate(tally.largest):
            if thread == owner and start <= time <= start + length:
                makers[at] = min(makers[at], (length, name))
    running = tuple(name for _, name in around_peak)
    return running, tuple(
        (name, asked) for (_, name), (asked, _, _) in zip(makers, tally.largest, strict=True)
    )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The trace's events one by one; the file is never in memory as a whole."""
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            file: Any = gzip.GzipFile(fileobj=raw) if magic == GZIP else raw
            yield from _events_in(file)
    except (OSError, EOFError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None


def _events_in(file: BinaryIO) -> Iterator[dict[str, Any]]:
    text = _skip_to_events(file)
    decoder, at, ended = json.JSONDecoder(), 0, False
    while True:
        at = _skip_spaces(text, at)
        if at < len(text) and text[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:
            if ended or len(text) - at > LONGEST_EVENT:
                raise BadInput("the trace is cut short, or broken") from None
            more = file.read(CHUNK)
            ended = not more
            # Characters of two bytes may be cut in two here; names of ops that have any are rare.
            text, at = text[at:] + more.decode("utf-8", "replace"), 0
            continue
        if isinstance(event, dict):
            yield event


def _skip_to_events(file: BinaryIO) -> str:
    """The text from the first event on."""
    before = b""
    while chunk := file.read(CHUNK):
        window = before + chunk
        at = window.find(KEY)
        start = window.find(b"[", at + len(KEY)) if at >= 0 else -1
        if start >= 0:
            return window[start + 1 :].decode("utf-8", "replace")
        before = window[at:] if at >= 0 else window[-len(KEY) :]
        if len(before) > LONGEST_EVENT:
            break
    raise BadInput("the file holds no trace events")


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at
