"""Speeds up garbage collection during rehearsals."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from oomph.rehearsal.left_behind import nothing_left_behind

_only_new = False


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Exclude objects that already exist from garbage collection until the end.

    A process with PyTorch in it has hundreds of thousands of long-lived objects; a rehearsal makes
    so many new ones that the collector would scan all of them every few seconds. Objects made
    inside are collected as usual, and none of their tensors stays behind in older objects.
    """
    global _only_new
    if _only_new:
        yield
        return
    if gc.get_freeze_count():  # the user's own arrangement; counting takes long where much is
        with nothing_left_behind():
            yield
        return
    gc.freeze()
    _only_new = True
    try:
        with nothing_left_behind():
            yield
    finally:
        _only_new = False
        gc.unfreeze()


def count_as_old() -> None:
    """Exclude everything that exists by now: called after loading much that stays loaded."""
    if _only_new:
        gc.freeze()
