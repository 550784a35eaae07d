"""How a job's loss is composed of the losses of parts of its batch: the analysis result."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LossSplit:
    """How to scale a part's loss, and which numbers in it must come from the whole batch."""

    whole_because: str = ""
    """Why the batch must stay whole; empty if it may be split."""
    leaves: tuple[str, ...] = ()
    """The tensors of the batch that have an entry for each sample, by their paths in it."""
    power: int = 1
    """The loss is the sum of its parts', each times its share of the samples to this power: 1 for
    a mean over samples, 0 for a sum."""
    calls: tuple[tuple[str, bool], ...] = ()
    """The calls that return a single number, in order, and whether a call may be missing, as it is
    inside a compiled block."""
    totals: frozenset[int] = frozenset()
    """Which of these calls count the batch: their result is computed over the whole batch."""
    means: int = 0
    """The number of means over class targets; their targets are counted in the whole batch."""
    plain_means: frozenset[int] = frozenset()
    """Which means over class targets, in order, have no samples: they are the same in each part."""
    sizes: tuple[tuple[str, tuple[int, ...], bool], ...] = ()
    """Calls that shape the tensors from which the batch is counted, in order: their names, which of
    their arguments are sizes that grow with the samples, and whether the call may be missing."""
    grown: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By index in `calls`: which arguments of a call in `totals` grow with the samples."""
    rescaled: Mapping[int, int] = field(default_factory=dict)
    """By index in `calls`: the power of the part's share by which a call's result is multiplied,
    for terms of another power than the loss."""
    picked: Mapping[int, int] = field(default_factory=dict)
    """By index in `calls`: for a mean over what a mask selects, the index of that mask."""
    finite: frozenset[int] = frozenset()
    """By index in `calls`: those of `nan_to_num` that are given a sum over samples, which parts add
    up to only if it is finite."""
    samples: int = field(default=0, compare=False)
    """The number of samples in the analysed batch."""
    others: frozenset[str] = field(default=frozenset(), compare=False)
    """The tensors of that batch that are as long as it but have no entry for each sample."""
    sites: frozenset[Hashable] = field(default=frozenset(), compare=False)
    """Where in the program PyTorch's functions were called; see `BatchCalls.sites`."""

    @property
    def counts(self) -> int:
        """How many numbers of the whole batch a part needs, or checks of its own."""
        replaced = len(self.totals) + len(self.picked) + len(self.rescaled)
        return self.means + replaced + len(self.finite)
