"""Decide the order of steps, what the GPU and the host step, and which gradients are offloaded.

The order is that of the forward. The host's cores step the parameters that the forward uses last,
up to a share; those that it uses first keep their gradients on the GPU, as far as they fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from torch import Tensor

from oomph.techniques.step_buckets import Bucket, Trained, last_of, make_buckets


class StepOrder:
    """The buckets that the GPU and the host step, in the order of the forward, with lookups."""

    def __init__(
        self,
        streamed: list[Bucket],
        on_host: list[Bucket],
        leaving: set[Trained],
        unused: Collection[Trained],
        first: set[Trained],
    ) -> None:
        self.streamed = streamed
        self.on_host = on_host
        #: Parameters whose gradients are offloaded until their step.
        self.leaving = leaving
        self.buckets = [*streamed, *on_host]
        self.streamed_set = set(streamed)
        #: How many buckets backward completes together at its very end.
        self.at_once = sum(first.issuperset(bucket.parameters) for bucket in streamed)
        self.host_stepped = {t for bucket in on_host for t in bucket.parameters}
        #: How many buckets must be stepped before each parameter may be used.
        self.stop = {trained: at + 1 for trained, at in last_of(streamed).items()}
        #: How many buckets must be stepped for parameters that no module is known to use.
        self.stop_of_unused = max((self.stop.get(trained, 0) for trained in unused), default=0)
        self.buckets_of: dict[Trained, list[Bucket]] = {}
        for bucket in self.buckets:
            for trained in bucket.parameters:
                self.buckets_of.setdefault(trained, []).append(bucket)


def arrange(
    trained: Sequence[Trained],
    unit_of: Mapping[Tensor, int],
    *,
    host_share: float,
    bound: Container[Trained],
    keep_gradients: int | None,
    bucket: int,
    may_cut: bool,
) -> StepOrder:
    """Arrange the steps of these parameters.

    `unit_of` gives the model part that uses a parameter first, numbered in the order of the
    forward; only the GPU may step the parameters in `bound`. The other arguments are as for
    `HostPlacement`.
    """
    places = {leaf: at for at, leaf in enumerate(unit_of)}
    ordered = sorted(trained, key=lambda one: places.get(one.leaf, -1))
    streamed, on_host = _split(ordered, host_share, bound)

    def block(one: Trained) -> int | None:
        return unit_of.get(one.leaf) if one.away is not None else None

    # A block with offloaded weights is stepped when they arrive: all of them, and nothing else.
    blocks = [list(some) for _, some in itertools.groupby(streamed, key=block)]
    return StepOrder(
        [one for some in blocks for one in make_buckets(some, bucket, may_cut=may_cut)],
        make_buckets(on_host, bucket, may_cut=may_cut),
        _leaving(streamed, keep_gradients) | set(on_host),
        [one for one in ordered if one.leaf not in unit_of],
        _first_unit(ordered, unit_of),
    )


def _split(
    ordered: list[Trained], host_share: float, bound: Container[Trained]
) -> tuple[list[Trained], list[Trained]]:
    """Split into what the GPU and what the host steps: the last unbound ones, up to its share."""
    left = host_share * sum(trained.leaf.numel() for trained in ordered)
    on_host: list[Trained] = []
    for trained in reversed([trained for trained in ordered if trained not in bound]):
        left -= trained.leaf.numel()
        if left < 0:
            break
        on_host.insert(0, trained)
    taken = set(on_host)
    return [trained for trained in ordered if trained not in taken], on_host


def _first_unit(ordered: list[Trained], unit_of: Mapping[Tensor, int]) -> set[Trained]:
    """The parameters of the model part that runs first, such as a large embedding."""
    first = min((unit for t in ordered if (unit := unit_of.get(t.leaf)) is not None), default=None)
    return {trained for trained in ordered if unit_of.get(trained.leaf) == first}


def _leaving(ordered: Iterable[Trained], keep: int | None) -> set[Trained]:
    """Parameters whose gradients are offloaded: in forward's order, all beyond `keep` bytes."""
    leaving: set[Trained] = set()
    for trained in ordered if keep is not None else ():
        assert keep is not None
        keep -= trained.leaf.numel() * trained.owned.element_size()
        if keep < 0:
            leaving.add(trained)
    return leaving
