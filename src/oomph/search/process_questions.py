"""What the second process is asked to do with choices."""

from __future__ import annotations

from typing import Any

from oomph.plans.choices import Choices

PROFILE, CHECK, QUICK_CHECK, PRICE = "hear", "check", "glance", "price"


Question = tuple[str, dict[str, Any]]


def question(what: str, choices: Choices) -> Question:
    """As plain JSON; what changes no tensor is part of no question, but of some answers."""
    return what, choices.concerning_tensors.as_dict()
