"""What the second process is asked to do with choices."""

from __future__ import annotations

import dataclasses
from typing import Any

from oomph.plans.choices import Choices

PROFILE, CHECK, QUICK_CHECK, PRICE = "hear", "check", "glance", "price"


Question = tuple[str, dict[str, Any]]


def question(what: str, choices: Choices) -> Question:
    """As plain JSON; the allocator's settings are part of no question, but of some answers."""
    return what, dataclasses.replace(choices, allocator="").as_dict()
