"""Errors say what to do."""

from __future__ import annotations

import pytest

from oomph import errors
from oomph.errors import BadInput, CannotRehearse, MissingExtra, OomphError, UnknownName


def test_every_error_of_the_module_is_an_oomph_error() -> None:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = [cls for cls in found if issubclass(cls, Exception)]
    assert {BadInput, CannotRehearse, MissingExtra, UnknownName} <= set(raised)
    assert all(issubclass(cls, OomphError) for cls in raised)


def test_an_unknown_name_offers_the_nearest_ones() -> None:
    error = UnknownName("GPU", "RTX-4091", ["h200", "rtx-4090", "rtx-4080"], "see the list")
    assert error.near[0] == "rtx-4090"
    assert str(error).startswith("unknown GPU 'RTX-4091'; did you mean rtx-4090 or rtx-4080")
    assert "see the list" in str(error)


def test_an_unknown_name_far_from_all_others_offers_none() -> None:
    error = UnknownName("GPU", "abacus", ["h200", "rtx-4090"], "see the list")
    assert error.near == []
    assert str(error) == "unknown GPU 'abacus' (see the list)"


def test_a_missing_extra_says_what_to_install() -> None:
    with pytest.raises(OomphError, match=r"transformers is needed.*pip install 'oomph\[hf\]'"):
        raise MissingExtra("transformers", "hf")
