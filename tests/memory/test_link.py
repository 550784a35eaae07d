"""Links: what they promise, and that the one for tests finds broken promises."""

from __future__ import annotations

import pytest
import torch
from deferred_link import DeferredLink

from oomph.memory.link import Copies, DoneCopy, InstantLink


@pytest.mark.parametrize("link", [InstantLink(), DeferredLink(), DeferredLink(eager=0.5)])
def test_there_and_back_is_the_same(link: InstantLink | DeferredLink) -> None:
    there = link.host_memory(16).view(torch.float32)
    source, back = torch.arange(4.0), torch.zeros(4)
    out = link.to_host(source, there)
    link.to_gpu(there, back, after=[out]).wait()
    assert back.tolist() == [0, 1, 2, 3]
    link.close()


def test_a_target_that_is_read_before_the_wait_is_poison() -> None:
    link = DeferredLink()
    target = torch.zeros(4)
    copy = link.to_gpu(torch.ones(4), target)
    assert target.isnan().all()
    copy.wait()
    assert target.tolist() == [1, 1, 1, 1]


def test_a_source_that_is_written_before_the_wait_arrives_changed() -> None:
    link = DeferredLink()
    source, target = torch.ones(4), torch.zeros(4)
    copy = link.to_host(source, target)
    source.fill_(2)
    copy.wait()
    assert target.tolist() == [2, 2, 2, 2]


def test_memory_that_is_freed_before_the_wait_is_noticed() -> None:
    link = DeferredLink()
    target = torch.zeros(4)
    link.to_host(torch.ones(4), target)
    with pytest.raises(AssertionError, match="freed while"):
        link.close()


@pytest.mark.parametrize("link", [InstantLink(), DeferredLink(), DeferredLink(eager=0.5)])
def test_many_go_there_and_back_as_one(link: InstantLink | DeferredLink) -> None:
    sources = [torch.arange(4.0), torch.arange(2.0)]
    there = [link.host_memory(source.nbytes).view(torch.float32) for source in sources]
    back = [torch.zeros_like(source) for source in sources]
    out = link.to_host_all(list(zip(sources, there, strict=True)))
    link.to_gpu_all(list(zip(there, back, strict=True)), after=[out]).wait()
    assert [tensor.tolist() for tensor in back] == [[0, 1, 2, 3], [0, 1]]
    link.close()


@pytest.mark.parametrize("how", ["wait", "finish"])
def test_copies_behind_one_that_fails_are_waited_for_in_their_order(how: str) -> None:
    waited = []

    class Numbered(DoneCopy):
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)
            if self.number == 1:
                raise OSError("the second one")

        finish = wait

    with pytest.raises(OSError, match="the second one"):
        getattr(Copies([Numbered(number) for number in range(4)]), how)()
    assert waited == [0, 1, 2, 3]
