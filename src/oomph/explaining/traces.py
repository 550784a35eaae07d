"""Profiler traces (Chrome's format, as written by Kineto): reads their memory events.

`torch.profiler.profile(profile_memory=True).export_chrome_trace(…)` writes one, compressed if its
name ends in .gz. It is read as a stream, twice: for the peak, and for what ran at the peak.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from oomph.errors import BadInput
from oomph.files.reading import open_regular
from oomph.quoting import brief, printable

CHUNK = 1 << 20
#: Longest event; a file with an unterminated event is broken.
LONGEST_EVENT = 4 << 20
#: A trace compresses to about a twentieth of its size; anything that expands further is no trace.
_MOST_UNPACKED = 100
_WORTH_A_LOOK = 64 << 20
#: Most devices of one machine.
_MOST_DEVICES = 1024
GZIP = b"\x1f\x8b"
KEY = b'"traceEvents"'
_CUDA = 1
_LARGEST = 1 << 60
#: Longest time in microseconds.
_LONGEST_TIME = 1e20
_LONGEST_NAME = 300
_MOST_OPS = 8


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace says about one device's memory. All sizes are in bytes."""

    device: str
    peak_allocated: int
    reserved_at_peak: int
    peak_reserved: int
    at_seconds: float
    """Time of the peak, from the first memory event on."""
    running: tuple[str, ...]
    """What ran at the peak, innermost first."""
    largest: tuple[tuple[str, int], ...]
    """The largest requests: op and bytes."""
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
    """Read the device that used most memory, a GPU if there is one."""
    tallies: dict[tuple[int, int], _Tally] = {}
    for event in _events(Path(path)):
        found = _memory_event(event)
        if found is not None:
            device, sizes = found
            if len(tallies) >= _MOST_DEVICES and device not in tallies:
                raise BadInput(f"{path} has memory events of more than {_MOST_DEVICES} devices")
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
    """Adds up the memory events of one device."""

    def __init__(self) -> None:
        self.peak = self.reserved_at_peak = self.peak_reserved = self.count = 0
        self.at = self.first = 0.0
        self.thread: int | str | None = None
        #: The largest requests: bytes, time, thread.
        self.largest: list[tuple[int, float, int | str | None]] = []

    def add(self, event: dict[str, Any], sizes: tuple[int, int, int]) -> None:
        asked, allocated, reserved = sizes
        time, thread = _time(event, "ts"), _thread(event)
        self.first = min(self.first, time) if self.count else time
        self.count += 1
        self.peak_reserved = max(self.peak_reserved, reserved)
        if allocated > self.peak:
            self.peak, self.reserved_at_peak = allocated, reserved
            self.at, self.thread = time, thread
        if asked > 0 and (len(self.largest) < _MOST_OPS or asked > self.largest[-1][0]):
            kept = [*self.largest, (asked, time, thread)]
            self.largest = sorted(kept, key=lambda one: -one[0])[:_MOST_OPS]


def _memory_event(event: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int, int]] | None:
    if event.get("name") != "[memory]":
        return None
    args = event.get("args")
    if not isinstance(args, dict):
        raise BadInput("a memory event of the trace lacks its numbers")
    device = _whole(args, "Device Type"), _whole(args, "Device Id")
    sizes = (
        _whole(args, name, missing=0) for name in ("Bytes", "Total Allocated", "Total Reserved")
    )
    asked, allocated, reserved = sizes
    return device, (asked, allocated, reserved)


def _whole(args: dict[str, Any], name: str, missing: int | None = None) -> int:
    """An integer, which some writers store as text."""
    value = args.get(name, missing)
    number = _number(value)
    if number is None or not number.is_integer() or abs(number) > _LARGEST:
        raise BadInput(f"a memory event of the trace lacks its numbers: {name} is {brief(value)}")
    return value if type(value) is int else int(number)


def _time(event: dict[str, Any], name: str) -> float:
    """Microseconds; 0 if the event has none."""
    value = event.get(name, 0.0)
    number = _number(value)
    if number is None:
        raise BadInput(f"an event of the trace has no number as its {name}: {brief(value)}")
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < _LONGEST_TIME else None


def _thread(event: dict[str, Any]) -> int | str | None:
    thread = event.get("tid")
    return thread if isinstance(thread, int | str) else None


def _what_ran(path: Path, tally: _Tally) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The spans around the peak and around the largest requests, from a second pass."""
    around_peak: list[tuple[float, str]] = []
    makers: list[tuple[float, str]] = [(float("inf"), "(unknown)")] * len(tally.largest)
    for event in _events(path):
        if event.get("ph") != "X":
            continue
        start, length = _time(event, "ts"), _time(event, "dur")
        name, thread = event.get("name"), _thread(event)
        name = printable(name[:_LONGEST_NAME]) if isinstance(name, str) else ""
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
        with open_regular(path) as raw:
            magic = raw.read(2)
            raw.seek(0)
            file: Any = _Unpacked(raw) if magic == GZIP else raw
            yield from _events_in(file)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise BadInput(f"cannot read {path}: {why or error}") from None


class _Unpacked:
    """A compressed file, read until it expands to far more than a trace would."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._file, self._out = raw, gzip.GzipFile(fileobj=raw), 0

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        self._out += len(piece)
        if self._out > max(_MOST_UNPACKED * self._raw.tell(), _WORTH_A_LOOK):
            raise BadInput("the trace unpacks to far more than a trace would")
        return piece


def _events_in(file: BinaryIO) -> Iterator[dict[str, Any]]:
    text = _skip_to_events(file)
    decoder, at, ended = json.JSONDecoder(), 0, False
    while True:
        at = _skip_spaces(text, at)
        if at < len(text) and text[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise BadInput("the trace has an event that is nested too deep") from None
        except ValueError:
            if ended or len(text) - at > LONGEST_EVENT:
                raise BadInput("the trace is cut short, or broken") from None
            more = file.read(CHUNK)
            ended = not more
            # A multi-byte character may be cut in two here; names with any are rare.
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
