"""PyTorch's CUDA caching allocator, replayed: which bytes a stream of requests would reserve.

The rules are those of torch 2.11 to 2.13 for one device, without user-created memory pools and
`record_stream`. The allocator hands out whole blocks: the request rounded up to 512 B, or all of a
free block whose remainder is too small to split off. `allocated` therefore counts blocks, exactly
as `torch.cuda.memory_allocated` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from oomph.errors import BadInput, OomphError
from oomph.rehearsal.allocator.driver import DriverAddresses, RecordedAddresses
from oomph.rehearsal.allocator.pool import Block, Pool
from oomph.rehearsal.allocator.settings import (
    DEFAULT_SETTINGS,
    POWER2_INTERVALS,
    AllocatorSettings,
)
from oomph.units import MIB, format_bytes

NULL = 0
"""The handle of an empty allocation."""

LEAST_BLOCK = 512
LARGEST_SMALL = 1 * MIB
"""Requests up to this size come from the small pool."""

SMALL_SEGMENT = 2 * MIB
SHARED_SEGMENT = 20 * MIB
"""The segment size requested from the driver for a large request below `OWN_SEGMENT_FROM`."""

OWN_SEGMENT_FROM = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB

# By how much an oversize block may exceed the request and still serve it whole.
_OVERSIZE_SLACK = 20 * MIB
_UNLIMITED = 1 << 64

GRAPH_POOL = 1 << 16
"""Stream numbers from here on stand for a CUDA graph's pool, which lives as long as the graph."""

# Address space of an expandable segment: a whole number of pages of either size, and more than any
# device has. (PyTorch takes 9/8 of the device's memory; only a segment full of holes could show the
# difference.)
_EXPANDABLE_RANGE = (1 << 20) * SHARED_SEGMENT

TraceEvent = tuple[Literal["alloc"], int, int, int] | tuple[Literal["free"], int]
"""`("alloc", address, size, stream)` or `("free", address)`."""


class OutOfMemory(OomphError):
    """The request exceeds the cap, even with all unused memory returned to the driver."""

    def __init__(
        self, *, requested: int, allocated: int, reserved: int, cap: int, largest_free_block: int
    ) -> None:
        super().__init__(
            f"out of memory: {format_bytes(requested)} requested with {format_bytes(allocated)} "
            f"allocated and {format_bytes(reserved)} reserved of {format_bytes(cap)} (largest free "
            f"block {format_bytes(largest_free_block)}); raise the cap or plan for less"
        )
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.cap = cap
        self.largest_free_block = largest_free_block


@dataclass(frozen=True, kw_only=True)
class AllocatorStats:
    """Bytes now and at their separate peaks, as `torch.cuda.memory_stats` reports them."""

    allocated: int
    reserved: int
    requested: int
    inactive_split: int
    """Free bytes in partly allocated segments; expandable segments are not counted."""

    segments: int
    """cudaMalloc calls whose memory is still held; expandable segments are not counted."""

    peak_allocated: int
    peak_reserved: int
    peak_requested: int
    peak_inactive_split: int
    peak_segments: int

    retries: int
    """How often all unused memory was returned to the driver to make a request fit."""

    ooms: int

    largest_free_block: int
    allocated_at_peak_reserved: int
    """Measured right after the request for which `reserved` first rose to its peak."""

    largest_free_block_at_peak_reserved: int

    @property
    def fragmentation(self) -> float:
        """The fraction of the peak `reserved` that was not allocated at that moment."""
        if not self.peak_reserved:
            return 0.0
        return (self.peak_reserved - self.allocated_at_peak_reserved) / self.peak_reserved


class SegmentBlock(NamedTuple):
    offset: int
    size: int
    allocated: bool


class Segment(NamedTuple):
    """A stretch of memory held from the driver; for an expandable segment, each mapped stretch."""

    stream: int
    address: int
    size: int
    pool: str
    blocks: tuple[SegmentBlock, ...]


class Allocator:
    """A caching allocator with no memory behind it.

    A handle is the block's address and, like one, may be reused after the block is freed. `cap` is
    the limit on reserved memory that `set_per_process_memory_fraction` would set.
    """

    def __init__(
        self, settings: AllocatorSettings = DEFAULT_SETTINGS, *, cap: int | None = None
    ) -> None:
        self.settings = settings
        self.cap = cap
        self._expandable = settings.expandable_segments
        self._max_split = settings.max_split_size or _UNLIMITED
        # Pages can be returned one by one, so blocks of expandable segments are split whatever
        # their size.
        self._splits_below = _UNLIMITED if self._expandable else self._max_split
        self._rounds_power2 = any(n > 1 for n in settings.roundup_power2_divisions)
        self._collects = cap is not None and settings.garbage_collection_threshold > 0

        self._blocks: dict[int, Block] = {}
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self.driver = DriverAddresses()
        self._large_searches = 0

        self._allocated = self._peak_allocated = 0
        self._requested = self._peak_requested = 0
        self._inactive_split = self._peak_inactive_split = 0
        self._segments = self._peak_segments = 0
        self._reserved = self._peak_reserved = 0
        self._allocated_at_peak = self._largest_free_at_peak = 0
        self._retries = self._ooms = 0

    def malloc(self, size: int, stream: int = 0) -> int:
        """A handle to a block of at least `size` bytes; `NULL` for an empty request."""
        if size <= 0:
            if size < 0:
                raise BadInput(f"cannot allocate {size} bytes")
            return NULL
        rounded = self._rounded(size) if self._rounds_power2 else (size + 511) & -512
        if rounded <= LARGEST_SMALL:
            pool = self._small.get(stream) or self._open_pool(stream, small=True)
        else:
            pool = self._large.get(stream) or self._open_pool(stream, small=False)
            self._large_searches += 1
        max_split = self._max_split
        # An oversize block is not split, so it serves only requests for nearly all of it.
        limit = max_split if rounded < max_split else rounded + _OVERSIZE_SLACK
        block = pool.take_fit(rounded, limit, expandable=self._expandable)
        found = block is not None
        if block is None:
            block = self._grow(pool, rounded, size)

        spare = block.size - rounded
        was_split = block.prev is not None or block.next is not None
        if spare >= pool.least_spare and rounded < self._splits_below:
            pool.split(block, rounded).cached_at = self._large_searches
            change = -rounded if was_split else spare
        else:
            change = -block.size if was_split else 0
        if change and not self._expandable:
            self._inactive_split += change
            if self._inactive_split > self._peak_inactive_split:
                self._peak_inactive_split = self._inactive_split

        block.requested = size
        self._allocated += block.size
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
        self._requested += size
        if self._requested > self._peak_requested:
            self._peak_requested = self._requested
        if not found and self._reserved > self._peak_reserved:
            self._mark_peak_reserved()
        return block.address

    def free(self, handle: int) -> None:
        """Put a block back into the cache. Freeing `NULL` does nothing."""
        if handle == NULL:
            return
        block = self._blocks.get(handle)
        if block is None or block.free:
            raise BadInput(f"{handle:#x} is not allocated: freed twice, or never allocated here")
        size = block.size
        self._allocated -= size
        self._requested -= block.requested
        block = block.pool.put_merged(block)
        block.cached_at = self._large_searches
        if self._expandable:
            return
        # Still split: the block's bytes became inactive. Whole again: its neighbours' bytes no
        # longer count.
        split = block.prev is not None or block.next is not None
        self._inactive_split += size if split else size - block.size
        if self._inactive_split > self._peak_inactive_split:
            self._peak_inactive_split = self._inactive_split

    @property
    def allocated(self) -> int:
        """Bytes handed out now; cheaper to read than all of `stats`."""
        return self._allocated

    def empty_cache(self) -> None:
        """Return unused memory: whole segments, or whole pages of expandable segments."""
        for pool in (*self._large.values(), *self._small.values()):
            if pool.stream >= GRAPH_POOL:
                continue  # a replay uses it again
            for block in pool.free_blocks():
                if self._expandable:
                    self._reserved -= pool.unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def reset_peaks(self) -> None:
        self._peak_allocated = self._allocated
        self._peak_requested = self._requested
        self._peak_inactive_split = self._inactive_split
        self._peak_segments = self._segments
        self._mark_peak_reserved()

    @property
    def stats(self) -> AllocatorStats:
        return AllocatorStats(
            allocated=self._allocated,
            reserved=self._reserved,
            requested=self._requested,
            inactive_split=self._inactive_split,
            segments=self._segments,
            peak_allocated=self._peak_allocated,
            peak_reserved=self._peak_reserved,
            peak_requested=self._peak_requested,
            peak_inactive_split=self._peak_inactive_split,
            peak_segments=self._peak_segments,
            retries=self._retries,
            ooms=self._ooms,
            largest_free_block=self._largest_free(),
            allocated_at_peak_reserved=self._allocated_at_peak,
            largest_free_block_at_peak_reserved=self._largest_free_at_peak,
        )

    def segments(self) -> list[Segment]:
        """The segments held from the driver, by address."""
        segments = []
        for address in sorted(self._blocks):
            block: Block | None = self._blocks[address]
            assert block is not None
            if block.prev is not None and block.prev.mapped:
                continue
            pool, parts, size = block.pool, [], 0
            while block is not None and block.mapped:
                parts.append(SegmentBlock(size, block.size, not block.free))
                size += block.size
                block = block.next
            segments.append(Segment(pool.stream, address, size, pool.name, tuple(parts)))
        return segments

    def _rounded(self, size: int) -> int:
        interval = min(max(size.bit_length() - MIB.bit_length(), 0), POWER2_INTERVALS - 1)
        divisions = self.settings.roundup_power2_divisions[interval]
        step = LEAST_BLOCK
        if divisions > 1 and size > LEAST_BLOCK * divisions:
            step = (1 << size.bit_length() - 1) // divisions
        return -(-size // step) * step

    def _open_pool(self, stream: int, *, small: bool) -> Pool:
        pool = Pool(
            "small" if small else "large",
            stream,
            page=SMALL_SEGMENT if small else SHARED_SEGMENT,
            # A large block is handed out whole if the remainder would be too small for the large
            # pool.
            least_spare=LEAST_BLOCK if small or self._expandable else LARGEST_SMALL + 1,
            blocks=self._blocks,
        )
        (self._small if small else self._large)[stream] = pool
        return pool

    def _grow(self, pool: Pool, size: int, requested: int) -> Block:
        """Take a block from the driver, returning ever more unused memory until it fits."""
        if self._collects:
            self._collect_garbage()
        block = self._from_driver(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._from_driver(pool, size)
        if block is None and pool.stream < GRAPH_POOL:  # no memory is returned during a capture
            self.empty_cache()
            self._retries += 1
            block = self._from_driver(pool, size)
        if block is None:
            assert self.cap is not None
            self._ooms += 1
            raise OutOfMemory(
                requested=requested,
                allocated=self._allocated,
                reserved=self._reserved,
                cap=self.cap,
                largest_free_block=self._largest_free(),
            )
        return block

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        if size <= LARGEST_SMALL:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            segment = SHARED_SEGMENT
        else:
            segment = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        # The cap is checked against this size for expandable segments too, whatever they will map:
        # so a cap may refuse a request that would fit, and whole pages may exceed the cap.
        if self.cap is not None and self._reserved + segment > self.cap:
            return None
        if self._expandable:
            room = pool.find_room(size)
            if room is None:
                room = pool.add_range(self.driver.reserve(_EXPANDABLE_RANGE), _EXPANDABLE_RANGE)
            block, mapped = pool.take_room(room, size)
            self._reserved += mapped
            return block
        block = Block(self.driver.take(segment), segment, pool)
        self._blocks[block.address] = block
        self._reserved += segment
        self._segments += 1
        self._peak_segments = max(self._peak_segments, self._segments)
        return block

    def _release(self, block: Block) -> None:
        block.pool.take(block)
        del self._blocks[block.address]
        self.driver.give_back(block.address, block.size)
        self._reserved -= block.size
        self._segments -= 1

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Return as few oversize blocks as make up for the request; tells whether they suffice."""
        if self._max_split == _UNLIMITED or self._expandable:
            return False
        wanted = max(size, self._max_split)
        oversize = [b for b in pool.free_blocks() if b.size >= self._max_split]
        enough = next((b for b in oversize if b.size >= wanted), None)
        if enough is not None:
            self._release(enough)
            return True
        released = 0
        while oversize and released < wanted:
            block = oversize.pop()
            released += block.size
            self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, return the large segments that were unused for longest."""
        assert self.cap is not None
        surplus = self._reserved - int(self.settings.garbage_collection_threshold * self.cap)
        ages = {
            block: self._large_searches - block.cached_at
            for pool in self._large.values()
            if pool.stream < GRAPH_POOL
            for block in pool.free_blocks()
            if block.prev is None and block.next is None
        }
        while surplus > 0 and ages:
            # All that are older than average are released, even past the threshold: this should be
            # rare.
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                surplus -= block.size
                del ages[block]
                self._release(block)

    def _largest_free(self) -> int:
        pools = (*self._small.values(), *self._large.values())
        return max((pool.largest_free() for pool in pools), default=0)

    def _mark_peak_reserved(self) -> None:
        self._peak_reserved = self._reserved
        self._allocated_at_peak = self._allocated
        self._largest_free_at_peak = self._largest_free()


def replay_trace(
    trace: Iterable[TraceEvent],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    cap: int | None = None,
) -> AllocatorStats:
    """What an allocator with these settings would have done with a recorded history.

    New segments get the addresses that the driver gave out then: addresses differ from process to
    process, and break ties. Raises `OutOfMemory` if the cap is too low.
    """
    allocator = Allocator(settings, cap=cap)
    driver = allocator.driver = RecordedAddresses()
    handles: dict[int, int] = {}
    for event in trace:
        address = event[1]
        if event[0] == "alloc":
            if address in handles:
                raise BadInput(f"the trace allocates {address:#x} again before it is freed")
            driver.next_segment = address
            handles[address] = allocator.malloc(event[2], event[3])
        elif event[0] == "free":
            if address not in handles:
                raise BadInput(f"the trace frees {address:#x}, which it never allocated")
            allocator.free(handles.pop(address))
        else:
            raise BadInput(f"a trace has alloc and free events, not {event[0]!r}")
    return allocator.stats
