"""The blocks of one pool and one stream: which are free, and how they split, merge, map and unmap.

A segment is a chain of blocks that tile it. Memory taken from the driver with cudaMalloc is a chain
of mapped blocks. An expandable segment is a long range of addresses of which only some pages are
mapped to memory, so its chain also has unmapped blocks, and ends in one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

# A free block's rank in the best-fit order is one integer, size then address: fast to compare.
_ADDRESS_BITS = 64
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1

_by_address = attrgetter("address")


class Block:
    """A stretch of addresses: unmapped, free (cached), or allocated (mapped and not free)."""

    __slots__ = (
        "address",
        "cached_at",
        "free",
        "mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "size",
    )

    def __init__(self, address: int, size: int, pool: Pool, *, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.mapped = mapped
        self.free = False
        self.requested = 0
        self.cached_at = 0
        self.prev: Block | None = None
        self.next: Block | None = None


class Pool:
    """The small or the large blocks of one stream: blocks never move between streams."""

    __slots__ = ("blocks", "keys", "least_spare", "name", "page", "stream", "unmapped")

    def __init__(
        self, name: str, stream: int, *, page: int, least_spare: int, blocks: dict[int, Block]
    ) -> None:
        self.name = name
        self.stream = stream
        self.page = page
        self.least_spare = least_spare
        self.blocks = blocks
        """Every mapped block by its address; one dictionary for all pools."""
        self.keys: list[int] = []
        self.unmapped: list[Block] = []

    def free_blocks(self) -> list[Block]:
        """All cached blocks, smallest first."""
        return [self.blocks[key & _ADDRESS_MASK] for key in self.keys]

    def largest_free(self) -> int:
        return self.keys[-1] >> _ADDRESS_BITS if self.keys else 0

    def take_fit(self, size: int, limit: int, *, expandable: bool) -> Block | None:
        """Best fit: the smallest free block with `size`, at the lowest address, if below `limit`.

        The limit is checked after the search: a block that fails it is not passed over.
        """
        keys = self.keys
        place = bisect_left(keys, size << _ADDRESS_BITS)
        if place == len(keys):
            return None
        if expandable:
            place = self._least_growable(place)
        key = keys[place]
        if key >> _ADDRESS_BITS >= limit:
            return None
        del keys[place]
        block = self.blocks[key & _ADDRESS_MASK]
        block.free = False
        return block

    def _least_growable(self, place: int) -> int:
        """Best fit by the size a block could grow to, so that the tail of a segment comes last."""
        best = self._growable_size(place)
        while place + 1 < len(self.keys) and (other := self._growable_size(place + 1)) < best:
            place, best = place + 1, other
        return place

    def _growable_size(self, place: int) -> int:
        block = self.blocks[self.keys[place] & _ADDRESS_MASK]
        after = block.next
        return block.size + (after.size if after is not None and not after.mapped else 0)

    def take(self, block: Block) -> None:
        """Take the block out of the cache: to be merged, released or unmapped."""
        keys = self.keys
        del keys[bisect_left(keys, block.size << _ADDRESS_BITS | block.address)]
        block.free = False

    def put(self, block: Block) -> None:
        """Put the block into the cache, as it is."""
        block.free = True
        insort(self.keys, block.size << _ADDRESS_BITS | block.address)

    def put_merged(self, block: Block) -> Block:
        """Merge the block with its free neighbours and put it into the cache."""
        before, after = block.prev, block.next
        if after is not None and after.free:
            self.take(after)
            self._absorb(block, after)
        if before is not None and before.free:
            self.take(before)
            self._absorb(before, block)
            block = before
        self.put(block)
        return block

    def _absorb(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.prev = block
        if after.mapped:
            del self.blocks[after.address]

    def split(self, block: Block, size: int) -> Block:
        """Leave `size` bytes in `block`; the rest, which is returned, goes into the cache."""
        rest = self._cut(block, size)
        self.blocks[rest.address] = rest
        self.put(rest)
        return rest

    def _cut(self, block: Block, size: int) -> Block:
        rest = Block(block.address + size, block.size - size, self, mapped=block.mapped)
        rest.prev, rest.next = block, block.next
        if block.next is not None:
            block.next.prev = rest
        block.size, block.next = size, rest
        return rest

    def add_range(self, address: int, size: int) -> Block:
        """Open a new expandable segment: a range of addresses, with no memory mapped yet."""
        block = Block(address, size, self, mapped=False)
        self.unmapped.append(block)
        return block

    def find_room(self, size: int) -> Block | None:
        """The lowest block from which `size` bytes in a row are free or could be mapped."""
        for gap in self.unmapped:
            start = gap.prev if gap.prev is not None and gap.prev.free else gap
            room = 0
            block: Block | None = start
            while room < size and block is not None and (block.free or not block.mapped):
                room += block.size
                block = block.next
            if room >= size:
                return start
        return None

    def take_room(self, start: Block, size: int) -> tuple[Block, int]:
        """Map pages from `start` on until `size` bytes are; returns the block and bytes mapped."""
        block, mapped = start, 0
        while not block.mapped or block.size < size:
            # Free neighbours are always merged, so what follows a free block here is unmapped.
            gap = block.next if block.mapped else block
            assert gap is not None
            wanted = size - block.size if block.mapped else size
            pages = -(-min(wanted, gap.size) // self.page) * self.page
            self.unmapped.remove(gap)
            if pages < gap.size:
                insort(self.unmapped, self._cut(gap, pages), key=_by_address)
            gap.mapped = True
            self.blocks[gap.address] = gap
            block = self.put_merged(gap)
            mapped += pages
        self.take(block)
        return block, mapped

    def unmap(self, block: Block) -> int:
        """Give the whole pages in a free block back to the driver; returns their bytes."""
        begin = -(-block.address // self.page) * self.page
        end = (block.address + block.size) // self.page * self.page
        if begin >= end:
            return 0
        self.take(block)
        if end < block.address + block.size:
            self.split(block, end - block.address)
        if begin > block.address:
            middle = self._cut(block, begin - block.address)
            self.put(block)
            block = middle
        else:
            del self.blocks[block.address]
        block.mapped = False
        before, after = block.prev, block.next
        if after is not None and not after.mapped:
            self.unmapped.remove(after)
            self._absorb(block, after)
        if before is not None and not before.mapped:
            self.unmapped.remove(before)
            self._absorb(before, block)
            block = before
        # A segment with nothing mapped is dropped; the next request opens a new one.
        if block.prev is not None or block.next is not None:
            insort(self.unmapped, block, key=_by_address)
        return end - begin
