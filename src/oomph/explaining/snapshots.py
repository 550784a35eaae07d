"""A PyTorch memory snapshot: what was allocated, by which line, and where the peak was.

`torch.cuda.memory._dump_snapshot` writes one. It is read as a stream: each event and block is
counted and dropped, so a snapshot of any size takes little memory (see `plain_pickle`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

from oomph.errors import BadInput
from oomph.explaining.plain_pickle import CONSUMED, List, Map, Swap, read_plain_pickle
from oomph.files.reading import open_regular
from oomph.quoting import printable

NO_STACK = "(no stack recorded)"
OTHERS = "(others)"
#: Most frames to remember, and most lines to tell apart: others are counted together.
MOST_FRAMES = 100_000
MOST_SITES = 20_000
#: Most live allocations at a time: a GPU has far fewer.
MOST_LIVE = 4_000_000
#: Longest label of a line, and the limit for sizes and addresses.
_LONGEST_LABEL = 300
_LARGEST = 1 << 64
#: What is alive is recorded again if a peak is this much higher than the last recorded one.
_HIGHER = 1.01
_LIBRARIES = ("site-packages", "dist-packages", "/torch/", "<frozen", "<string>")


class _Frame(NamedTuple):
    label: str
    is_python: bool
    own: bool
    """Whether it is in the user's program rather than a library."""


class _Label(str):
    """The label that replaced a stack; strings from the file have another type."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that failed while events were recorded."""

    asked: int
    free: int
    """What the driver had left."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a snapshot says. All sizes are in bytes."""

    allocated: int
    reserved: int
    unused_blocks: int
    """Number of pieces of unused memory."""
    largest_unused: int
    segments: int
    sites: dict[str, int]
    """Bytes allocated when it was taken, by the line that requested them."""
    peak: int
    """Peak of allocated bytes while events were recorded."""
    sites_at_peak: dict[str, int]
    """Allocations since recording began that were alive at the peak, to within 1 %."""
    events: int
    ooms: tuple[Refused, ...]

    @property
    def unused(self) -> int:
        """Reserved but not in use."""
        return max(self.reserved - self.allocated, 0)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "allocated": self.allocated,
            "reserved": self.reserved,
            "unused": self.unused,
            "unused_blocks": self.unused_blocks,
            "largest_unused": self.largest_unused,
            "segments": self.segments,
            "sites": self.sites,
            "peak": self.peak,
            "sites_at_peak": self.sites_at_peak,
            "events": self.events,
            "ooms": [{"asked": oom.asked, "free": oom.free} for oom in self.ooms],
        }


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot, running nothing in it; refuses any other file."""
    try:
        with open_regular(path) as file:
            return parse_snapshot(file)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def parse_snapshot(file: BinaryIO) -> Snapshot:
    """Parse the snapshot in an open file."""
    tally = _Tally()
    value = read_plain_pickle(file, tally.take)
    known = isinstance(value, dict) and bool({"segments", "device_traces"} & value.keys())
    # The oldest snapshots are a list of segments, without a history.
    if not known and not (isinstance(value, list) and tally.segments):
        raise BadInput("this pickle is no memory snapshot of PyTorch's")
    return tally.snapshot()


class _Tally:
    """Adds up events, blocks and segments as they are read."""

    def __init__(self) -> None:
        self.segments = 0
        self._reserved = 0
        self._allocated = 0
        self._unused_blocks = 0
        self._largest_unused = 0
        self._sites: Counter[str] = Counter()
        self._frames: dict[tuple[Any, ...], _Frame] = {}
        self._labels: dict[_Label, _Label] = {}
        self._events = 0
        self._ooms: list[Refused] = []
        self._live: dict[int, tuple[int, str]] = {}
        self._by_site: defaultdict[str, int] = defaultdict(int)
        self._now = self._highest = self._copied = 0
        self._at_peak: dict[str, int] = {}
        self._rising = False

    def take(self, item: Map, swap: Swap) -> Any:
        """Count a dict according to its kind; see `plain_pickle.Take`."""
        if "filename" in item and "line" in item:
            return self._frame(item)
        if "action" in item:
            self._event(item, swap)
        elif "total_size" in item and "blocks" in item:
            self.segments += 1
            self._reserved += _size(item, "total_size")
        elif "state" in item and "size" in item:
            self._block(item, swap)
        else:
            return item
        return CONSUMED

    def snapshot(self) -> Snapshot:
        """The totals."""
        self._copy_peak()
        return Snapshot(
            allocated=self._allocated,
            reserved=self._reserved,
            unused_blocks=self._unused_blocks,
            largest_unused=self._largest_unused,
            segments=self.segments,
            sites=_largest_first(self._sites),
            # Recording may start at any time, so only the drop from the peak to the end is known.
            peak=self._allocated + max(self._highest - self._now, 0),
            sites_at_peak=_largest_first(self._at_peak),
            events=self._events,
            ooms=tuple(self._ooms),
        )

    def _frame(self, item: Map) -> _Frame:
        file, line, name = item["filename"], item["line"], item.get("name", "")
        if not (type(file) is str and type(line) is int and type(name) is str):
            raise BadInput("a frame of the snapshot has no filename, line and name of their kind")
        found = self._frames.get((file, line, name))
        if found is None:
            _number(item, "line")
            is_python = file.endswith(".py")
            own = is_python and not any(part in file for part in _LIBRARIES)
            short = "/".join(PurePath(file).parts[-2:])[-_LONGEST_LABEL:]
            label = f"{short}:{line} {name}"[:_LONGEST_LABEL] if is_python else name[:200]
            found = _Frame(printable(label), is_python, own)
            if len(self._frames) < MOST_FRAMES:
                self._frames[file, line, name] = found
        return found

    def _site(self, frames: Any, swap: Swap) -> str:
        """The user's line that led to an allocation: the innermost outside libraries."""
        if type(frames) is _Label:
            return frames  # already replaced
        if type(frames) is not List or not frames:
            return NO_STACK
        known = [one for one in frames if type(one) is _Frame]
        chosen = next((one for one in known if one.own), None)
        chosen = chosen or next((one for one in known if one.is_python), None)
        label = _Label(chosen.label if chosen is not None else NO_STACK)
        if len(self._labels) >= MOST_SITES and label not in self._labels:
            label = _Label(OTHERS)
        label = self._labels.setdefault(label, label)
        swap(frames, label)
        return label

    def _block(self, item: Map, swap: Swap) -> None:
        size = _size(item, "size")
        frames = item.get("frames")
        history = item.get("history")  # snapshots before torch 2.1 keep stacks there
        for past in history if isinstance(history, list) else ():
            frames = frames or (past.get("frames") if isinstance(past, dict) else None)
        site = self._site(frames, swap)
        if _word(item, "state").startswith("active"):
            self._allocated += size
            self._sites[site] += size
        else:
            self._unused_blocks += 1
            self._largest_unused = max(self._largest_unused, size)

    def _event(self, item: Map, swap: Swap) -> None:
        self._events += 1
        action, size = _word(item, "action"), _size(item, "size")
        site = self._site(item.get("frames"), swap)
        if action == "alloc":
            self._live[_number(item, "addr")] = size, site
            if len(self._live) > MOST_LIVE:
                raise BadInput(f"more than {MOST_LIVE:,} allocations live at once: no snapshot")
            self._by_site[site] += size
            self._now += size
            if self._now > self._highest:
                self._highest, self._rising = self._now, True
        elif action == "free_completed":
            self._copy_peak()
            known, site = self._live.pop(_number(item, "addr"), (0, ""))
            if known:
                self._by_site[site] -= known
            self._now -= size
        elif action == "oom":
            self._ooms = [
                *self._ooms[-15:],
                Refused(asked=size, free=_size(item, "device_free", "addr")),
            ]

    def _copy_peak(self) -> None:
        """At the end of a rise, record what is alive, if the peak is worth it."""
        if self._rising and self._highest > self._copied * _HIGHER:
            self._copied = self._highest
            self._at_peak = {site: size for site, size in self._by_site.items() if size > 0}
        self._rising = False


def _size(item: Map, *names: str) -> int:
    size = _number(item, *names)
    if size < 0:
        raise BadInput(f"the snapshot's {names[0]} is {size}: no size is negative")
    return size


def _number(item: Map, *names: str) -> int:
    value: Any = 0
    for name in names:
        if name in item:
            value = item[name]
            break
    if type(value) is not int:
        raise BadInput(f"the snapshot's {names[0]} is {type(value).__name__}, not a number")
    if not -_LARGEST < value < _LARGEST:
        raise BadInput(f"the snapshot's {names[0]} has more than 64 bits")
    return value


def _word(item: Map, name: str) -> str:
    value = item[name]
    if type(value) is not str:
        raise BadInput(f"the snapshot's {name} is {type(value).__name__}, not a word")
    return value


def _largest_first(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
