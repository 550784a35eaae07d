"""What tests on a card have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oomph.memory.cuda_link import CudaLink


@pytest.fixture
def links() -> Iterator[list[CudaLink]]:
    """Links that are closed when the test is over."""
    links: list[CudaLink] = []
    yield links
    for link in links:
        link.close()
