"""Memory that is parked on the host comes back as it was, and its slots are used again."""

from __future__ import annotations

import weakref

import pytest
import torch
from deferred_link import DeferredLink
from torch import Tensor

from oomph.host.parked import HostParking, Parked, Parking


def park(parking: Parking, tensor: Tensor, position: int = 0) -> Parked:
    parked = parking.park(tensor, position)
    parked.want()
    return parked


@pytest.mark.parametrize("eager", [0.0, 0.5, 1.0])
def test_the_whole_memory_of_a_view_comes_back(eager: float) -> None:
    parking = HostParking(DeferredLink(eager=eager))
    memory = torch.arange(12.0)
    parked = park(parking, memory.view(3, 4).t()[1:])
    parked.leave()
    parked.fetch()
    assert parked.take(first=True).tolist() == memory.tolist()


def test_it_is_not_here_between_leaving_and_coming_back() -> None:
    parking = HostParking(DeferredLink())
    memory = torch.ones(4)
    gone = weakref.ref(memory.untyped_storage())
    parked = park(parking, memory)
    del memory
    assert gone() is not None, "the copy is under way"
    parked.leave()
    assert gone() is None
    assert parked.take(first=True).tolist() == [1, 1, 1, 1]


def test_what_is_asked_for_before_it_left_was_never_away() -> None:
    link = DeferredLink()
    parked = park(HostParking(link), torch.ones(4))
    assert parked.take(first=True).tolist() == [1, 1, 1, 1]
    assert link.bytes["in"] == 0


def test_a_slot_is_used_again_when_nobody_wants_what_was_in_it() -> None:
    link = DeferredLink()
    parking = HostParking(link)
    for value in range(3):
        parked = park(parking, torch.full((4,), float(value)))
        parked.leave()
        assert parked.take(first=True).tolist() == [value] * 4
        del parked
    assert link.taken == 16


def test_a_slot_in_use_is_left_alone() -> None:
    link = DeferredLink()
    parking = HostParking(link)
    one, other = park(parking, torch.zeros(4)), park(parking, torch.ones(4))
    for parked in (one, other):
        parked.leave()
    assert one.take(first=True).tolist() == [0, 0, 0, 0]
    assert other.take(first=True).tolist() == [1, 1, 1, 1]
    assert link.taken == 32


def test_a_slot_grows_and_does_not_shrink() -> None:
    link = DeferredLink()
    parking = HostParking(link)
    for count in (2, 4, 3, 1):
        park(parking, torch.ones(count)).leave()
    assert link.taken == 4 * (2 + 4)
