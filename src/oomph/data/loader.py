"""A loader that keeps its place: where the step is, not where its workers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from oomph.data.epochs import EpochBatches
from oomph.errors import BadInput


class Loader:
    """The samples of a dataset in the batches that a sampler makes, loaded by worker processes.

    `run.batches(loader)` saves its place with the run; a resumed one loads nothing twice. So a
    dataset that draws random numbers, as for augmentation, draws others after that.
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
        """`prefetch` batches are loaded ahead by each worker; `options` are a `DataLoader`'s."""
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
        """Open a pass; workers begin at once."""
        if self._place is not None:  # broken off: workers may have been given the whole epoch
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
        """Begin with this epoch."""
        self.batches.epoch, self.batches.taken, self._place = epoch, 0, None

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is."""
        state = self.batches.state_dict()
        if self._place is not None:  # workers were given more batches than came back
            state["epoch"], state["taken"] = self._place
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass be the rest of the one that was saved."""
        self.batches.load_state_dict(state_dict)
        self._place = None
