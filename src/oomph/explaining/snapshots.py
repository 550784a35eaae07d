"""A memory snapshot of PyTorch's: what was allocated, from which line, and where the peak was.

`torch.cuda.memory._dump_snapshot` writes one. It is read as a stream: each event and block is added
up and forgotten, so a snapshot of any size takes little memory (see `plain_pickle`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

from oomph.errors import BadInput
from oomph.explaining.plain_pickle import CONSUMED, List, Map, Swap, read_plain_pickle

NO_STACK = "(no stack recorded)"
OTHERS = "(others)"
#: Lines beyond so many are counted together.
MOST_SITES = 100_000
#: What is alive is copied again when a peak is this much higher than the last one copied.
_HIGHER = 1.01
_LIBRARIES = ("site-packages", "dist-packages", "/torch/", "<frozen", "<string>")


class _Frame(NamedTuple):
    label: str
    is_python: bool
    own: bool
    """Of the user's program, no library's."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that failed while events were recorded."""

    asked: int
    free: int
    """What the driver had left."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a snapshot says. All sizes are bytes."""

    allocated: int
    reserved: int
    unused_blocks: int
    """How many pieces the unused memory is in."""
    largest_unused: int
    segments: int
    sites: dict[str, int]
    """Allocated when it was taken, by the line that asked for it."""
    peak: int
    """The most that was allocated while events were recorded."""
    sites_at_peak: dict[str, int]
    """What had been asked for since recording began and was alive at the peak, to within 1 %."""
    events: int
    ooms: tuple[Refused, ...]

    @property
    def unused(self) -> int:
        """Reserved, and in no use."""
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
    """Read a snapshot; refuses whatever is none, and runs nothing of it."""
    try:
        with Path(path).open("rb") as file:
            return parse_snapshot(file)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def parse_snapshot(file: BinaryIO) -> Snapshot:
    """The snapshot in an open file."""
    tally = _Tally()
    value = read_plain_pickle(file, tally.take)
    known = isinstance(value, dict) and bool({"segments", "device_traces"} & value.keys())
    # The oldest snapshots are a list of segments, without a history.
    if not known and not (isinstance(value, list) and tally.segments):
        raise BadInput("this pickle is no memory snapshot of PyTorch's")
    return tally.snapshot()


class _Tally:
    """Adds up events, blocks and segments as they come."""

    def __init__(self) -> None:
        self.segments = 0
        self._reserved = 0
        self._allocated = 0
        self._unused_blocks = 0
        self._largest_unused = 0
        self._sites: Counter[str] = Counter()
        self._frames: dict[tuple[Any, ...], _Frame] = {}
        self._labels: dict[str, str] = {}
        self._events = 0
        self._ooms: list[Refused] = []
        self._live: dict[int, tuple[int, str]] = {}
        self._by_site: defaultdict[str, int] = defaultdict(int)
        self._now = self._highest = self._copied = 0
        self._at_peak: dict[str, int] = {}
        self._rising = False

    def take(self, item: Map, swap: Swap) -> Any:
        """Count what a dict stands for; see `plain_pickle.Take`."""
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
        """The sums."""
        self._copy_peak()
        return Snapshot(
            allocated=self._allocated,
            reserved=self._reserved,
            unused_blocks=self._unused_blocks,
            largest_unused=self._largest_unused,
            segments=self.segments,
            sites=_largest_first(self._sites),
            # Events begin somewhere in a run: only how far below the peak it ended is known.
            peak=self._allocated + max(self._highest - self._now, 0),
            sites_at_peak=_largest_first(self._at_peak),
            events=self._events,
            ooms=tuple(self._ooms),
        )

    def _frame(self, item: Map) -> _Frame:
        file, line, name = item["filename"], item["line"], item.get("name", "")
        found = self._frames.get((file, line, name))
        if found is None:
            is_python = str(file).endswith(".py")
            own = is_python and not any(part in str(file) for part in _LIBRARIES)
            short = "/".join(PurePath(str(file)).parts[-2:])
            label = f"{short}:{line} {name}" if is_python else str(name)[:200]
            found = _Frame(label, is_python, own)
            if len(self._frames) < MOST_SITES:
                self._frames[file, line, name] = found
        return found

    def _site(self, frames: Any, swap: Swap) -> str:
        """The user's line that led to an allocation: the innermost that is no library's."""
        if isinstance(frames, str):
            return frames  # seen before, and swapped for its label
        if type(frames) is not List or not frames:
            return NO_STACK
        known = [one for one in frames if type(one) is _Frame]
        chosen = next((one for one in known if one.own), None)
        chosen = chosen or next((one for one in known if one.is_python), None)
        label = chosen.label if chosen is not None else NO_STACK
        if len(self._labels) >= MOST_SITES and label not in self._labels:
            label = OTHERS
        label = self._labels.setdefault(label, label)
        swap(frames, label)
        return label

    def _block(self, item: Map, swap: Swap) -> None:
        size = _size(item, "size")
        frames = item.get("frames")
        for past in item.get("history") or ():  # snapshots before torch 2.1 keep stacks there
            frames = frames or (past.get("frames") if isinstance(past, dict) else None)
        site = self._site(frames, swap)
        if str(item["state"]).startswith("active"):
            self._allocated += size
            self._sites[site] += size
        else:
            self._unused_blocks += 1
            self._largest_unused = max(self._largest_unused, size)

    def _event(self, item: Map, swap: Swap) -> None:
        self._events += 1
        action, size = item["action"], _size(item, "size")
        site = self._site(item.get("frames"), swap)
        if action == "alloc":
            self._live[_size(item, "addr")] = size, site
            self._by_site[site] += size
            self._now += size
            if self._now > self._highest:
                self._highest, self._rising = self._now, True
        elif action == "free_completed":
            self._copy_peak()
            known, site = self._live.pop(_size(item, "addr"), (0, ""))
            if known:
                self._by_site[site] -= known
            self._now -= size
        elif action == "oom":
            self._ooms = [
                *self._ooms[-15:],
                Refused(asked=size, free=_size(item, "device_free", "addr")),
            ]

    def _copy_peak(self) -> None:
        """At the end of a rise, what is alive; only if it is worth the copy."""
        if self._rising and self._highest > self._copied * _HIGHER:
            self._copied = self._highest
            self._at_peak = {site: size for site, size in self._by_site.items() if size > 0}
        self._rising = False


def _size(item: Map, *names: str) -> int:
    value = next((item[name] for name in names if name in item), 0)
    if not isinstance(value, int):
        raise BadInput(f"the snapshot's {names[0]} is {type(value).__name__}, not a number")
    return value


def _largest_first(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
