"""Wraps a loader and tracks its position, so that a resumed run takes the next batch.

A loader with `state_dict` and `load_state_dict` keeps its own position. Any other is opened again
with the random state it was opened with then, and the batches already taken are skipped: it must
give the same batches for the same random state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from oomph.errors import WrongCheckpoint
from oomph.process.random_state import get_random_state, random_state_kept, set_random_state


class Batches:
    """The batches of a loader, one pass per `for`; the first one after a load is a partial pass."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        #: Finished passes, and batches taken in this one.
        self.epoch = self.taken = 0
        self._loader: Any = loader
        self._device = device
        #: The state that the next pass starts from; set only by a load.
        self._resumed: dict[str, Any] | None = None
        #: The random state when this pass was opened; None between two passes.
        self._opened: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = self._open()
        for batch in batches:
            self.taken += 1
            yield batch
        self.epoch, self.taken, self._opened = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        if self._resumed is not None:  # loaded, and nothing taken since
            return self._resumed
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "opened": self._opened or self._streams(),
            "loader": self._loader.state_dict() if _keeps_place(self._loader) else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass the rest of the saved one."""
        self.epoch, self.taken = state_dict["epoch"], state_dict["taken"]
        if state_dict["loader"] is not None and not _keeps_place(self._loader):
            raise WrongCheckpoint(
                "the loader of the saved run kept its own place, and this one has no"
                " load_state_dict: resume with the same loader"
            )
        self._resumed, self._opened = state_dict, None

    def _open(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if resumed is None or not resumed["taken"]:
            if resumed is not None:
                self._restore(resumed)
            self.taken, self._opened = 0, self._streams()
            return iter(self._loader)
        self._opened = resumed["opened"]
        # Random numbers used for opening and skipping were drawn before the run was saved.
        with random_state_kept(self._device):
            set_random_state(self._opened["random"], self._device)
            self._restore(resumed)
            batches: Iterator[Any] = iter(self._loader)
            for number in range(0 if resumed["loader"] is not None else self.taken):
                if next(batches, self) is self:
                    raise WrongCheckpoint(
                        f"the loader ends after {number} batches, and the saved run had taken"
                        f" {self.taken}: resume with the same loader"
                    )
        return batches

    def _restore(self, resumed: dict[str, Any]) -> None:
        """Restore the loader and its random generators as they were before the pass was opened."""
        for generator, state in zip(
            _generators(self._loader), resumed["opened"]["generators"], strict=False
        ):
            generator.set_state(state)
        if resumed["loader"] is not None:
            self._loader.load_state_dict(resumed["loader"])

    def _streams(self) -> dict[str, Any]:
        return {
            "random": get_random_state(self._device),
            "generators": [one.get_state() for one in _generators(self._loader)],
        }


def _keeps_place(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _generators(loader: Any) -> list[torch.Generator]:
    """The loader's own random generators, without duplicates."""
    sampler = getattr(loader, "batch_sampler", None)
    owners = loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None)
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
