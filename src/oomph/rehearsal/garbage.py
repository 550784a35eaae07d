"""Garbage collection while much is rehearsed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_only_new = False


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """What exists already is not looked through for garbage, again and again, until the end.

    A process with PyTorch in it has hundreds of thousands of objects that stay; a rehearsal makes
    so many new ones that all would be looked at every few seconds. What is made inside is collected
    as ever.
    """
    global _only_new
    # Inside another one, or it is the user's own arrangement; counting takes long where much is.
    if _only_new or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    _only_new = True
    try:
        yield
    finally:
        _only_new = False
        gc.unfreeze()


def count_as_old() -> None:
    """What exists by now is not new any more: to be said after much was loaded that stays."""
    if _only_new:
        gc.freeze()
