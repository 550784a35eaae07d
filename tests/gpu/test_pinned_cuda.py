"""A driver that refuses to pin: it is said, and nothing else fails for it. Needs a GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from oomph.memory.pinned import PinnedMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_refusal_is_not_heard_by_the_next_kernel(caplog: pytest.LogCaptureFixture) -> None:
    memory = PinnedMemory()
    piece = memory.take(1 << 20)
    assert piece.is_pinned()
    with caplog.at_level(logging.WARNING, logger="oomph"):
        memory._pin(piece, piece.numel())  # it is pinned already
    assert "refuses to pin" in caplog.text
    there = torch.full((1 << 20,), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    other = memory.take(1 << 20)
    assert not other.is_pinned()
    other.copy_(there)
    assert bool((other == 3).all())
    memory.close()


def test_no_bytes_leave_the_card_as_it_is() -> None:
    memory = PinnedMemory()
    assert memory.take(0).numel() == 0
    assert memory.take(4096).is_pinned()
    torch.ones(8, device="cuda").sum().item()
    memory.close()
