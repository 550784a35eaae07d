"""Choices in the files of measurements, which were written by every version of oomph so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomph.plans.choices import Choices
from oomph.plans.migrations import choices_from_1


def stored_choices(values: Mapping[str, Any]) -> Choices:
    """As they are said now; the files do not say which version wrote them, and the first one's
    fields are no others' names."""
    return Choices.from_dict(choices_from_1(values))
