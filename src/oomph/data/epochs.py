"""The batches of an epoch: reshuffled each epoch, reproducible by seed, and divided among ranks.

A subclass makes all batches of an epoch; this class shuffles them, assigns them to ranks and counts
them, so that a resumed run takes the next one. It reads none of the data.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from oomph.data.lengths import Samples
from oomph.data.waste import Waste
from oomph.errors import BadInput, WrongCheckpoint
from oomph.jobs.job import check_count

T = TypeVar("T")
Uneven = Literal["error", "drop"]


class EpochBatches(Sampler[list[T]], abc.ABC, Generic[T]):
    """A batch sampler of this rank's batches, one epoch per `for`.

    After `load_state_dict` the first pass is the rest of the saved one.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        shuffle: bool,
        rank: int,
        world: int,
        uneven: Uneven,
    ) -> None:
        self.samples = samples
        self.rank, self.world = rank, check_count("the world size", world)
        if not 0 <= rank < world:
            raise BadInput(f"a rank of {world} is from 0 to {world - 1}, not {rank}")
        if seed < 0:
            raise BadInput(f"a seed is zero or more, not {seed}")
        if uneven not in get_args(Uneven):
            raise BadInput(f"uneven is error or drop, not {uneven!r}")
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        #: Finished passes, and batches taken in this one.
        self.epoch = self.taken = 0
        #: Whether the next pass is the rest of one.
        self.resuming = False
        self._made: tuple[int, list[list[list[T]]]] | None = None

    @abc.abstractmethod
    def _make_batches(self, order: NDArray[np.int64]) -> list[list[T]]:
        """All batches of all ranks from samples in this order, those of similar cost adjacent."""

    @abc.abstractmethod
    def _samples_in(self, batch: list[T]) -> list[int]:
        """The batch's samples, as indices of the dataset."""

    @abc.abstractmethod
    def _computed(self, lengths: list[int], batch: list[T]) -> int:
        """Tokens of a batch including padding; `lengths` are those of its samples."""

    @abc.abstractmethod
    def _split(self, batch: list[T]) -> tuple[list[T], list[T]]:
        """Split a batch of at least two samples into two smaller ones."""

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """What a saved position depends on besides the seed and the world size."""

    def __iter__(self) -> Iterator[list[T]]:
        first = self.taken if self.resuming else 0
        self.resuming = False
        steps = self._steps(self.epoch)
        self.taken = first
        for step in steps[first:]:
            self.taken += 1
            yield step[self.rank]
        self.epoch, self.taken = self.epoch + 1, 0

    def __len__(self) -> int:
        """Batches of this rank in the current epoch; another epoch may have a few more or fewer."""
        return len(self._steps(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Start with this epoch, as samplers of distributed training do."""
        if epoch != self.epoch:  # for the epoch being resumed, the position is kept
            self.epoch, self.taken, self.resuming = epoch, 0, False

    def of_all_ranks(self) -> list[list[T]]:
        """Every batch of the current epoch, step by step, and by rank within each step."""
        return [batch for step in self._steps(self.epoch) for batch in step]

    @abc.abstractmethod
    def worst_shapes(self) -> tuple[tuple[int, int], ...]:
        """Samples and length of the largest batches of any epoch, the longest first."""

    def planned_shape(self) -> tuple[int, int]:
        """The batch to plan with: no batch of any epoch is longer or has more tokens."""
        worst = self.worst_shapes()
        longest = worst[0][1]
        return max(-(-rows * length // longest) for rows, length in worst), longest

    def waste(self) -> Waste:
        """The padding in the current epoch."""
        batches = self.of_all_ranks()
        indices, known = self.samples.indices.tolist(), self.samples.lengths.tolist()
        length_of = dict(zip(indices, known, strict=True))
        lengths = [[length_of[index] for index in self._samples_in(batch)] for batch in batches]
        there = sum(map(len, lengths))
        return Waste(
            samples=there,
            batches=len(batches),
            tokens=sum(map(sum, lengths)),
            computed=sum(map(self._computed, lengths, batches)),
            truncated=self.samples.truncated,
            tokens_cut=self.samples.tokens_cut,
            skipped=self.samples.skipped,
            dropped=len(indices) - there,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        return {"epoch": self.epoch, "taken": self.taken, "made_from": self._made_from()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass the rest of the saved one."""
        saved, now = state_dict["made_from"], self._made_from()
        if different := [name for name in now if saved.get(name) != now[name]]:
            name = different[0]
            raise WrongCheckpoint(
                f"the saved place is of other batches: {name} was {saved.get(name)} and is"
                f" {now[name]}; resume with the same data and settings"
            )
        self.epoch, self.taken = state_dict["epoch"], state_dict["taken"]
        self.resuming = True

    def _made_from(self) -> dict[str, Any]:
        # The rank is not included: every rank is at the same step.
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "world": self.world,
            "uneven": self.uneven,
            "lengths": _fingerprint(self.samples.lengths),
            "samples": _fingerprint(self.samples.indices),
            **self._settings(),
        }

    def _steps(self, epoch: int) -> list[list[list[T]]]:
        """For each step of an epoch, the batch of each rank."""
        if self._made is None or self._made[0] != epoch:
            self._made = epoch, self._make_steps(epoch)
        return self._made[1]

    def _make_steps(self, epoch: int) -> list[list[list[T]]]:
        random = np.random.default_rng([self.seed, epoch])
        count = len(self.samples.indices)
        order = random.permutation(count) if self.shuffle else np.arange(count)
        batches = self._even_out(self._make_batches(order), random)
        # Ranks wait for a step's slowest one, so adjacent batches go to the same step.
        steps = [batches[at : at + self.world] for at in range(0, len(batches), self.world)]
        if not self.shuffle:
            return steps
        for step in steps:
            random.shuffle(step)
        return [steps[at] for at in random.permutation(len(steps))]

    def _even_out(self, batches: list[list[T]], random: np.random.Generator) -> list[list[T]]:
        """Split batches until each rank has the same number; no sample is lost or repeated."""
        while surplus := len(batches) % self.world:
            sizes = [len(self._samples_in(batch)) for batch in batches]
            largest = sizes.index(max(sizes))
            if sizes[largest] < 2:
                return self._drop(batches, surplus, random)
            batches[largest : largest + 1] = self._split(batches[largest])
        return batches

    def _drop(
        self, batches: list[list[T]], surplus: int, random: np.random.Generator
    ) -> list[list[T]]:
        """Drop surplus batches if each is one sample and the ranks do not divide their number."""
        if len(batches) < self.world:
            raise BadInput(f"{self.world} ranks need a sample each, and there are {len(batches)}")
        if self.uneven == "error":
            raise BadInput(
                f"{len(batches):,} batches of one sample cannot be shared out evenly to"
                f' {self.world} ranks: leave {surplus} out in each epoch with uneven="drop", or let'
                " a batch hold more"
            )
        dropped = set(random.choice(len(batches), surplus, replace=False).tolist())
        return [batch for at, batch in enumerate(batches) if at not in dropped]


def _fingerprint(numbers: NDArray[np.int64]) -> str:
    """A hash that tells one dataset's lengths from another's."""
    return hashlib.sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest()[:16]
