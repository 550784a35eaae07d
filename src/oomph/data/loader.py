"""A loader that tracks the position of the training step rather than of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from oomph.data.epochs import EpochBatches
from oomph.errors import BadInput


class Loader:
    """Loads the batches of a sampler from a dataset in worker processes.

    `run.batches(loader)` saves its position with the run; a resumed run loads nothing twice. So a
    dataset that draws random numbers, as for augmentation, draws different ones after resuming.
    """

    def __init__(
        self,
        dataset: Any,
        batches: EpochBatches[Any],
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        **options: Any,
    ) -> None:
        """Each worker loads `prefetch` batches ahead; `options` are passed to `DataLoader`."""
        if workers < 0 or prefetch < 1:
            raise BadInput("a loader has no or more workers, and each loads at least one batch")
        self.batches = batches
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            **options,
        )
        #: The epoch of this pass, and batches handed out in it; None between two passes.
        self._place: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Open a pass; workers start at once."""
        if self._place is not None:  # interrupted: workers may have been given the whole epoch
            self.set_epoch(self._place[0])
        state = self.batches.state_dict()
        first = state["taken"] if self.batches.resuming else 0
        self._place = state["epoch"], first
        return self._hand_out(iter(self._loader), state["epoch"], first)

    def _hand_out(self, loaded: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        for taken, batch in enumerate(loaded, start=first + 1):
            self._place = epoch, taken
            yield batch
        self._place = None

    def set_epoch(self, epoch: int) -> None:
        """Start with this epoch."""
        self.batches.epoch, self.batches.taken, self._place = epoch, 0, None

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        state = self.batches.state_dict()
        if self._place is not None:  # workers were given more batches than came back
            state["epoch"], state["taken"] = self._place
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass the rest of the saved one."""
        self.batches.load_state_dict(state_dict)
        self._place = None
