"""Old objects are left alone while much is rehearsed; new garbage is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from oomph.rehearsal.garbage import count_as_old, only_new_garbage


class Knot:
    """Holds itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def tie() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def test_what_was_there_before_is_left_alone_until_the_end() -> None:
    old = tie()
    with only_new_garbage():
        gc.collect()
        assert old() is not None
    gc.collect()
    assert old() is None


def test_new_garbage_is_collected_inside() -> None:
    with only_new_garbage():
        new = tie()
        gc.collect()
        assert new() is None


def test_afterwards_nothing_is_frozen_whatever_happened() -> None:
    with pytest.raises(ValueError, match="inside"), only_new_garbage():
        raise ValueError("inside")
    assert not gc.get_freeze_count()


def test_inside_another_it_changes_nothing() -> None:
    with only_new_garbage():
        new = tie()
        with only_new_garbage():
            gc.collect()
            assert new() is None
        assert gc.get_freeze_count()


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    with only_new_garbage():
        pass
    assert gc.get_freeze_count()


def test_what_was_loaded_meanwhile_can_count_as_old() -> None:
    with only_new_garbage():
        loaded = tie()
        count_as_old()
        gc.collect()
        assert loaded() is not None


def test_outside_nothing_counts_as_old() -> None:
    count_as_old()
    assert not gc.get_freeze_count()
