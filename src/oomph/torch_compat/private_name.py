"""The description of a private PyTorch name that oomph uses."""

from __future__ import annotations

from dataclasses import dataclass

#: The versions of PyTorch that oomph runs with: on a machine with a GPU, and in CI.
TESTED_WITH = ("2.11", "2.13")


@dataclass(frozen=True)
class PrivateName:
    """One private name, documented for when a new version of PyTorch breaks it.

    Attributes:
        path: Full path from `torch`. An attribute of objects is written after their class.
        used_for: What oomph does with it.
        without_it: What breaks in oomph if the name is gone or changes its meaning.
        has_cuda: Whether only CUDA builds have it.
        is_optional: Whether oomph checks that it exists, and works without it.
    """

    path: str
    used_for: str
    without_it: str
    has_cuda: bool = False
    is_optional: bool = False
