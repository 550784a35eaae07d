"""A disk that is full after so many slots."""

from __future__ import annotations

import math

import pytest

from oomph.errors import DiskFull
from oomph.memory.scratch_file import ScratchFile


class ScarceDisk:
    """From now on, files on the disk have room for `room` more slots; then it is full."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.room: float = room
        self.asked = 0
        real = ScratchFile.take

        def take(file: ScratchFile, nbytes: int) -> int:
            self.asked += 1
            if self.room < 1:
                raise DiskFull("the disk is full", nbytes)
            self.room -= 1
            return real(file, nbytes)

        patch.setattr(ScratchFile, "take", take)

    def grow(self) -> None:
        """There is room for all that comes."""
        self.room = math.inf
