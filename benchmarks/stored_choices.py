"""Choices in the files of measurements, which were written by every version of oomph so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomph.plans.choices import Choices
from oomph.plans.migrations import migrate_choices


def stored_choices(values: Mapping[str, Any]) -> Choices:
    """As they are said now; the files do not say which version wrote them, and a field of one
    version is no other's name for something else."""
    return Choices.from_dict(migrate_choices(values, 1))
