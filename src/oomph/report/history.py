"""Replay a timeline through the allocator: allocated and reserved bytes after each event."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from oomph.rehearsal.allocator import Allocator, AllocatorSettings
from oomph.rehearsal.timeline import Block, Timeline

if TYPE_CHECKING:
    from oomph.rehearsal.estimation import Estimate


class Happening(NamedTuple):
    """One birth or death of a block, and the memory right after it."""

    event: int
    block: Block
    is_birth: bool
    address: int
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class History:
    """A timeline with the settings of its allocator."""

    timeline: Timeline
    settings: AllocatorSettings | None = None
    """None without a known allocator, as on the CPU: blocks then count with their own sizes."""
    overhead: int = 0
    """Device memory beyond what is reserved: the context and loaded kernels."""

    def walk(self, allocator: Allocator | None = None) -> Iterator[Happening]:
        """Every birth and death in order, until the last phase ends.

        Addresses are 0 where there is no allocator.
        """
        if self.settings is None:
            yield from self._add_up()
            return
        allocator = allocator or Allocator(self.settings)
        addresses: dict[int, int] = {}
        emptied = list(self.timeline.emptied)
        reserved = 0
        for event, block, is_birth in self._events():
            while emptied and event >= emptied[0]:
                emptied.pop(0)
                allocator.empty_cache()
                reserved = allocator.stats.reserved
            if is_birth:
                address = addresses[id(block)] = allocator.malloc(block.size, block.stream)
                reserved = allocator.stats.reserved
            else:
                address = addresses.pop(id(block))
                allocator.free(address)
            yield Happening(event, block, is_birth, address, allocator.allocated, reserved)

    def _add_up(self) -> Iterator[Happening]:
        now = 0
        for event, block, is_birth in self._events():
            now += block.size if is_birth else -block.size
            yield Happening(event, block, is_birth, 0, now, now)

    def _events(self) -> Iterator[tuple[int, Block, bool]]:
        stop = self.stop
        return itertools.takewhile(lambda one: one[0] < stop, self.timeline.stream_of_events())

    @property
    def stop(self) -> int:
        """The event at which the last phase ends; later frees are only cleanup."""
        return max((span.stop for span in self.timeline.spans), default=self.timeline.events)


def history_of(estimate: Estimate) -> History:
    """The history from which an estimate's numbers come."""
    on_gpu = estimate.gpu is not None
    return History(
        timeline=estimate.timeline,
        settings=AllocatorSettings.parse(estimate.allocator) if on_gpu else None,
        overhead=estimate.peak.device - estimate.peak.reserved,
    )
