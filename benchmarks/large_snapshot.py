"""How long a large memory snapshot takes to explain, and how much memory.

python -m benchmarks.large_snapshot --megabytes 200

The file is written here, as PyTorch would write it: one event after the other, each with a stack of
its own that shares its frames with all others.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from oomph.explaining.snapshots import read_snapshot

FRAMES, DEPTH = 2_000, 24
KEYS = ("action", "addr", "size", "stream", "time_us", "frames", "alloc", "free_completed")


class _Writer:
    """Writes a pickle piece by piece, so that the file may be larger than memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._memo = 0
        self._known: dict[str, int] = {}

    def raw(self, data: bytes) -> None:
        self._file.write(data)

    def remember(self) -> int:
        self.raw(b"\x94")
        self._memo += 1
        return self._memo - 1

    def again(self, index: int) -> None:
        self.raw(b"j" + index.to_bytes(4, "little"))

    def word(self, text: str) -> None:
        if text in self._known:
            self.again(self._known[text])
            return
        encoded = text.encode()
        self.raw(b"\x8c" + bytes([len(encoded)]) + encoded)
        self._known[text] = self.remember()

    def number(self, value: int) -> None:
        self.raw(b"\x8a\x08" + value.to_bytes(8, "little", signed=True))

    def frame(self, at: int) -> int:
        self.raw(b"}")
        index = self.remember()
        self.raw(b"(")
        self.word("filename")
        self.word(f"/home/me/project/part_{at % 100}.py")
        self.word("line")
        self.number(at)
        self.word("name")
        self.word(f"function_{at}")
        self.raw(b"u")
        return index


def write_snapshot(path: Path, size: int) -> int:
    """Write a snapshot of about `size` bytes; returns its number of events."""
    with path.open("wb") as file:
        writer = _Writer(file)
        writer.raw(b"\x80\x04}")
        writer.remember()
        writer.raw(b"(")
        writer.word("segments")
        writer.raw(b"]")
        writer.remember()
        writer.word("device_traces")
        writer.raw(b"]")
        writer.remember()
        writer.raw(b"(]")
        writer.remember()
        frames: list[int] = []
        count = 0
        for count in _batches(file, size):
            writer.raw(b"(")
            for event in range(count, count + 1000):
                _write_event(writer, event, frames)
            writer.raw(b"e")
        writer.raw(b"eu.")
    return count + 1000


def _batches(file: BinaryIO, size: int) -> Iterator[int]:
    count = 0
    while file.tell() < size:
        yield count
        count += 1000


def _write_event(writer: _Writer, event: int, frames: list[int]) -> None:
    writer.raw(b"}")
    writer.remember()
    writer.raw(b"(")
    writer.word("action")
    writer.word("alloc" if event % 2 == 0 else "free_completed")
    writer.word("addr")
    writer.number(event // 2)
    writer.word("size")
    writer.number(1 << 20)
    writer.word("frames")
    writer.raw(b"]")
    writer.remember()
    writer.raw(b"(")
    for depth in range(DEPTH):
        at = (event * 7 + depth) % FRAMES
        if at < len(frames):
            writer.again(frames[at])
        else:
            frames.append(writer.frame(len(frames)))
    writer.raw(b"eu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        events = write_snapshot(path, megabytes * 10**6)
        before = _most_memory()
        began = time.perf_counter()
        snapshot = read_snapshot(path)
        seconds = time.perf_counter() - began
        size = path.stat().st_size
    assert snapshot.events == events, "every event is counted"
    grown = _most_memory() - before
    print(
        f"{size / 1e6:.0f} MB, {events:,} events: {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s"
    )
    print(f"memory taken: {grown / 1e6:.0f} MB, {grown / size:.0%} of the file")


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
