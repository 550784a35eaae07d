"""Decides which layers move down or up the precision ladder, and when, by measured divergence.

A divergence is one number for how far a model with its layers at given levels is from the same
model in fp32. It is measured before anything is changed: going down is tried on a batch, and has to
look safe several times in a row. If the model has come too far from fp32, halves of its lowered
layers are tested against each other until the cause is found.

Layers go down in groups that double while all goes well and are halved when it does not. A layer
that had to go up, or failed when tried alone, waits twice as long as the last time before it is
tried again, so noise around a threshold causes fewer and fewer changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oomph.errors import BadInput, WrongCheckpoint

#: By a layer's path: its place on the ladder; 0 is fp32.
Places = Mapping[str, int]
Measure = Callable[[Places], float]

#: How often the wait of a layer is doubled at most.
MOST_DOUBLINGS = 8


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds for moving layers down and up."""

    demote_below: float
    promote_above: float
    patience: int
    """Number of consecutive probes in which going down must have looked safe."""
    wait: int
    """Probes before a layer that went up is tried again; doubled each time."""

    def __post_init__(self) -> None:
        if not 0 < self.demote_below < self.promote_above < math.inf:
            raise BadInput(
                "layers go down where divergence is below one threshold and up where it is above a"
                f" higher one: demote_below={self.demote_below} is not between 0 and"
                f" promote_above={self.promote_above}"
            )
        for name, value in (("patience", self.patience), ("wait", self.wait)):
            if value < 1:
                raise BadInput(f"{name} is at least one probe, not {value}")


@dataclass(frozen=True, kw_only=True)
class Move:
    """A layer moves from one place on the ladder to another."""

    layer: str
    before: int
    after: int
    why: str


@dataclass(kw_only=True)
class _Standing:
    """A layer's place and history."""

    place: int
    failures: int = 0
    """How often it had to go up, or failed when tried."""
    waits_until: int = 0
    """The first probe in which it may be tried again."""


class Policy:
    """Moves layers up and down the ladder; its whole state can be saved."""

    def __init__(self, thresholds: Thresholds, lowest: Mapping[str, int], start: Places) -> None:
        """`lowest` has the last place of each layer, in the model's order."""
        self._thresholds = thresholds
        self._lowest = dict(lowest)
        self._layers = {path: _Standing(place=start[path]) for path in lowest}
        self._probes = 0
        #: The layers being tried, how often that looked safe, and how many to try next.
        self._tried: list[str] = []
        self._calm = 0
        self._size = 1
        #: Whether the last probe had to move layers up, which may not have been enough.
        self.restless = False

    @property
    def places(self) -> dict[str, int]:
        """The place of each layer."""
        return {path: standing.place for path, standing in self._layers.items()}

    def probe(self, measure: Measure) -> list[Move]:
        """Measure the divergence from fp32, and decide on moves."""
        self._probes += 1
        limits = self._thresholds
        now = measure(self.places)
        self.restless = now > limits.promote_above
        if self.restless:
            return self._promote(measure, f"divergence {now:.2g} > {limits.promote_above:g}")
        if now >= limits.demote_below or not self._choose():
            return []  # no margin, or no layer to try
        would_be = measure({**self.places, **self._one_down(self._tried)})
        if would_be >= limits.demote_below:
            self._in_vain()
            return []
        self._calm += 1
        if self._calm < limits.patience:
            return []
        why = f"divergence {would_be:.2g} < {limits.demote_below:g} in {self._calm} probes"
        moves = [self._move(path, +1, why) for path in self._tried]
        self._tried, self._calm, self._size = [], 0, self._size * 2
        return moves

    def recover(self, is_finite: Callable[[Places], bool], why: str) -> list[Move]:
        """After a non-finite step, move up the layers that caused it; no moves if none can."""
        self.restless = True
        return self._promote(lambda places: 0.0 if is_finite(places) else math.inf, why)

    # -- up ---------------------------------------------------------------------------------------

    def _promote(self, measure: Measure, why: str) -> list[Move]:
        self._tried, self._calm, self._size = [], 0, 1
        moves = []
        for path in self._culprits(measure):
            self._hold_back(path)
            moves.append(self._move(path, -1, why))
        return moves

    def _culprits(self, measure: Measure) -> list[str]:
        """The smallest set found of layers that diverge too far while all others are in fp32.

        Two measurements halve the suspects. If neither half is bad by itself, all of them are
        culprits.
        """
        suspects = [path for path, place in self.places.items() if place > 0]
        while len(suspects) > 1:
            halves = [suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]]
            found = [measure(self._only(half)) for half in halves]
            if max(found) <= self._thresholds.promote_above:
                break
            suspects = halves[found.index(max(found))]
        return suspects

    def _only(self, lowered: Sequence[str]) -> dict[str, int]:
        return {path: place if path in lowered else 0 for path, place in self.places.items()}

    # -- down -------------------------------------------------------------------------------------

    def _choose(self) -> bool:
        """Whether there are layers to try; those in the highest places come first."""
        if not self._tried:
            free = [
                path
                for path, one in self._layers.items()
                if one.place < self._lowest[path] and one.waits_until <= self._probes
            ]
            free.sort(key=lambda path: (self._layers[path].place, self._layers[path].failures))
            self._tried = free[: self._size]
        return bool(self._tried)

    def _one_down(self, paths: Sequence[str]) -> dict[str, int]:
        return {path: self._layers[path].place + 1 for path in paths}

    def _in_vain(self) -> None:
        self._calm = 0
        if len(self._tried) > 1:
            self._size = len(self._tried) // 2
            self._tried = self._tried[: self._size]
            return
        self._hold_back(self._tried[0])
        self._tried, self._size = [], 1

    def _hold_back(self, path: str) -> None:
        one = self._layers[path]
        one.waits_until = self._probes + (
            self._thresholds.wait << min(one.failures, MOST_DOUBLINGS)
        )
        one.failures += 1

    def _move(self, path: str, by: int, why: str) -> Move:
        one = self._layers[path]
        before, one.place = one.place, one.place + by
        return Move(layer=path, before=before, after=one.place, why=why)

    # -- saved ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on."""
        return {
            "layers": {path: asdict(one) for path, one in self._layers.items()},
            "probes": self._probes,
            "tried": list(self._tried),
            "calm": self._calm,
            "size": self._size,
            "restless": self.restless,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; if the layers differ, refuse it and change nothing."""
        saved = {path: _Standing(**one) for path, one in state["layers"].items()}
        if list(saved) != list(self._layers):
            other = sorted(saved.keys() ^ self._layers.keys()) or ["their order"]
            raise WrongCheckpoint(
                f"precision was adapted for other layers when saved; one difference is {other[0]}"
            )
        self._layers = saved
        self._probes, self._calm = state["probes"], state["calm"]
        self._tried, self._size = list(state["tried"]), state["size"]
        self.restless = state["restless"]
