"""What all tests have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from oomph.torch_compat.function_modes import current_function_mode


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors on many threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def loggers_speak() -> None:
    """Programs that were tested before, and frameworks in them, may have silenced ours."""
    logging.disable(logging.NOTSET)
    logger = logging.getLogger("oomph")
    logger.disabled, logger.propagate = False, True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    """A mode that a test leaves behind is its own failure, and not one of all tests after it."""
    yield
    left = []
    while (mode := current_function_mode()) is not None:
        left.append(mode)
        mode.__exit__(None, None, None)
    assert not left, f"left active: {left}"
