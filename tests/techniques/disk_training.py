"""The small model of `host_training` with its optimizer on the disk: what tests of that share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from host_training import Recipe, Training
from shared_link import SharedLink

from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.link import Link
from oomph.memory.numbered_store import NumberedStore


class Disk:
    """Opens slots in a folder, and remembers them."""

    def __init__(self, link: Link, folder: Path, most: int = 100) -> None:
        self.link, self.folder, self.most = link, folder, most
        self.opened: list[NumberedDiskStore] = []

    def __call__(self, largest: int, buffers: int) -> NumberedStore:
        buffers = min(buffers, self.most)
        self.opened.append(
            NumberedDiskStore(self.link, self.folder, largest=largest, buffers=buffers)
        )
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
