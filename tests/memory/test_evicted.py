"""Memory that is parked on the host comes back as it was, and its slots are used again."""

from __future__ import annotations

import weakref

import pytest
import torch
from deferred_link import DeferredLink
from torch import Tensor

from oomph.memory.evicted import Evicted, EvictionStore, HostEvictionStore


def evict(parking: EvictionStore, tensor: Tensor, position: int = 0) -> Evicted:
    evicted = parking.evict(tensor, position)
    evicted.want()
    return evicted


@pytest.mark.parametrize("eager", [0.0, 0.5, 1.0])
def test_the_whole_memory_of_a_view_comes_back(eager: float) -> None:
    parking = HostEvictionStore(DeferredLink(eager=eager))
    memory = torch.arange(12.0)
    evicted = evict(parking, memory.view(3, 4).t()[1:])
    evicted.leave()
    evicted.fetch()
    assert evicted.take(first=True).tolist() == memory.tolist()


def test_it_is_not_here_between_leaving_and_coming_back() -> None:
    parking = HostEvictionStore(DeferredLink())
    memory = torch.ones(4)
    gone = weakref.ref(memory.untyped_storage())
    evicted = evict(parking, memory)
    del memory
    assert gone() is not None, "the copy is under way"
    evicted.leave()
    assert gone() is None
    assert evicted.take(first=True).tolist() == [1, 1, 1, 1]


def test_what_is_asked_for_before_it_left_was_never_away() -> None:
    link = DeferredLink()
    evicted = evict(HostEvictionStore(link), torch.ones(4))
    assert evicted.take(first=True).tolist() == [1, 1, 1, 1]
    assert link.bytes["in"] == 0


def test_a_slot_is_used_again_when_nobody_wants_what_was_in_it() -> None:
    link = DeferredLink()
    parking = HostEvictionStore(link)
    for value in range(3):
        evicted = evict(parking, torch.full((4,), float(value)))
        evicted.leave()
        assert evicted.take(first=True).tolist() == [value] * 4
        del evicted
    assert link.taken == 16


def test_a_slot_in_use_is_left_alone() -> None:
    link = DeferredLink()
    parking = HostEvictionStore(link)
    one, other = evict(parking, torch.zeros(4)), evict(parking, torch.ones(4))
    for evicted in (one, other):
        evicted.leave()
    assert one.take(first=True).tolist() == [0, 0, 0, 0]
    assert other.take(first=True).tolist() == [1, 1, 1, 1]
    assert link.taken == 32


def test_a_slot_grows_and_does_not_shrink() -> None:
    link = DeferredLink()
    parking = HostEvictionStore(link)
    for count in (2, 4, 3, 1):
        evict(parking, torch.ones(count)).leave()
    assert link.taken == 4 * (2 + 4)
