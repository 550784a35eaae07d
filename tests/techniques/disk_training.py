"""The small model of `host_training` with its optimizer on the disk: what tests of that share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from host_training import Recipe, Training

from oomph.host.disk_slots import DiskSlots
from oomph.host.link import Link
from oomph.host.slots import SlotStore

sys.path.append(str(Path(__file__).parents[1] / "host"))
from shared_link import SharedLink


class Disk:
    """Opens slots in a folder, and remembers them."""

    def __init__(self, link: Link, folder: Path, most: int = 100) -> None:
        self.link, self.folder, self.most = link, folder, most
        self.opened: list[DiskSlots] = []

    def __call__(self, largest: int, buffers: int) -> SlotStore:
        buffers = min(buffers, self.most)
        self.opened.append(DiskSlots(self.link, self.folder, largest=largest, buffers=buffers))
        return self.opened[-1]


def trained_on_disk(
    recipe: Recipe, folder: Path, link: Link | None, steps: int, **placement: Any
) -> Training:
    """All of its state on the disk, and gradients that leave, unless the placement says so."""
    link = link or SharedLink()
    training = Training(recipe=recipe)
    training.go_to_host(
        link, disk=Disk(link, folder), **{"disk_share": 1.0, "keep_gradients": 3000, **placement}
    )
    return training.run(steps)


def undone(training: Training) -> Training:
    assert training.host is not None
    training.host.undo()
    training.host = None
    return training
