"""How a tensor of the forward depends on the samples of the batch.

The question is always the same: if the forward runs on a part of the batch, how is this tensor
related to the same tensor for the whole batch? There are five answers (`Kind`). Each op has a rule
that derives the answer for its results from those for its arguments; a result without such a proof
is `MIXED`, and a loss that depends on one keeps its batch whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

#: How the samples lie along a dimension: `("rows", outer, inner)` for a size of outer × samples ×
#: inner, `("picked", mask)` for the entries that a mask selects, in order, `("same",)` if all
#: samples have the same contents, and `("any",)` if the contents are random, so that any order will
#: do.
Order = tuple[object, ...]
ANY: Order = ("any",)
SAME: Order = ("same",)


class Kind(Enum):
    """How a part's tensor is related to that of the whole batch."""

    FREE = "free"
    """The same for every part: weights, constants, and totals that depend on the batch alone, which
    are computed over the whole batch."""
    ROWS = "rows"
    """The part's samples of the whole batch's tensor, along one dimension."""
    SUM = "sum"
    """The parts' tensors add up to that of the whole batch."""
    POSITION = "position"
    """The indices of the samples, in order: 0, 1, 2 …"""
    MIXED = "mixed"
    """Samples are compared, counted or reordered: nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """How one tensor of a part is related to that of the whole batch."""

    kind: Kind
    dim: int = 0
    """The dimension along which samples lie, for `ROWS` and `POSITION`."""
    order: Order = SAME
    power: int = 0
    """To get the whole batch's tensor, the part's is multiplied by (samples of the part / samples
    of the batch) to this power. A mean over samples has 1, a sum over them 0."""
    learned: bool = False
    """Whether it depends on a parameter. A tensor made from the batch alone can be computed for the
    whole batch in advance; one that the model makes cannot."""
    needs: frozenset[int] = frozenset()
    """The numbers of the corrections without which this does not hold."""
    because: str = ""
    """For `MIXED`: what mixed the samples, as text."""
    drawn_between: tuple[float, float] | None = None
    """For random numbers drawn once for all samples: the smallest possible value, and the bound
    that none of them reaches."""
    asks_if_finite: bool = False
    """Whether it only tells if numbers are finite, which decides nothing if all goes well."""

    @property
    def is_whole(self) -> bool:
        """Whether it is bitwise the same in each part."""
        return self.kind is Kind.FREE and self.power == 0

    @property
    def has_samples(self) -> bool:
        """Whether samples lie along one of its dimensions."""
        return self.kind in (Kind.ROWS, Kind.POSITION)

    def moved(self, dim: int) -> Flow:
        """The same flow with samples along another dimension."""
        return replace(self, dim=dim)


FREE = Flow(kind=Kind.FREE)


def rows(dim: int, order: Order = ANY, *, of: Iterable[Flow] = ()) -> Flow:
    """A result made from `of` with samples along `dim`."""
    return replace(joined(of), kind=Kind.ROWS, dim=dim, order=order)


def mixed(because: str) -> Flow:
    """A flow of which nothing is known, for this reason."""
    return Flow(kind=Kind.MIXED, because=because)


def first_mixed(flows: Iterable[Flow]) -> Flow | None:
    """The first flow of which nothing is known."""
    return next((flow for flow in flows if flow.kind is Kind.MIXED), None)


def joined(flows: Iterable[Flow]) -> Flow:
    """A constant that combines what these flows learned and need."""
    flows = list(flows)
    return Flow(
        kind=Kind.FREE,
        learned=any(flow.learned for flow in flows),
        needs=frozenset().union(*(flow.needs for flow in flows)),
    )


def same_order(one: Order, other: Order) -> Order | None:
    """The order after combining these sample by sample; None if that would mix samples."""
    for any_will_do in (SAME, ANY):
        if one == any_will_do:
            return other
        if other == any_will_do:
            return one
    return one if one == other else None


def is_anywhere(order: Order) -> bool:
    """Whether samples may lie in any order."""
    return order in (ANY, SAME)
