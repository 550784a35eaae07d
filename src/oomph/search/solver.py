"""Chooses an option for each block: the fastest choice whose memory stays under a limit.

A chain of blocks runs forward, then the loss, then backward. What a block's option saves stays
until its backward ends, so all that a block notices of earlier choices is the sum they saved:

- What the blocks from k on need, above what earlier ones saved, does not depend on the earlier
  choices. One pass from the end finds the least of it, and so the smallest possible peak.
- Of two partial choices for the first k blocks, one that saves no less and takes no less time can
  be dropped. Networks repeat their blocks, so few remain: one sweep finds the fastest choice.

Both are exact, in whole bytes. A long chain of blocks that all differ leaves too many partial
choices; there a mixed-integer program is quick (with equal blocks it is not: it tries all their
permutations). It runs in floating point, so its answer is checked in whole bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from oomph.hardware.timing.step_time import StepTime

#: The sweep gives up after this many partial choices, which takes about a second.
MOST_VARIANTS = 10_000_000
#: Up to this many blocks the program's choice is optimal; beyond that, it is within this gap.
EXACT_BLOCKS = 12
GAP = 1e-4
#: HiGHS treats 1e-6 as zero: the most bytes that blocks can save, and the seconds of all blocks
#: together, are scaled to these numbers.
SCALED_BYTES = 1e3
SCALED_SECONDS = 1e4


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run a block."""

    name: str
    saved: int
    """Bytes left after forward until the block's backward ends; negative where it frees some."""
    forward: int
    """Peak inside the forward, above what was alive when it began."""
    backward: int
    """Peak inside the backward, above what is alive without this block's saved bytes."""
    seconds: float
    """Seconds of its kernels."""
    launching: float = 0.0
    """Seconds that the host takes to launch them."""
    moved: int = 0
    """Bytes copied to the host in forward and back in backward."""

    def __post_init__(self) -> None:
        assert math.isfinite(self.seconds) and self.seconds >= 0, self

    @property
    def step_time(self) -> StepTime:
        """Seconds of the GPU and of the host."""
        return StepTime(self.seconds, self.launching)


@dataclass(frozen=True, kw_only=True)
class ChainBlock:
    """A block, its options, and the bytes alive at its two moments that no block's option saved."""

    name: str
    options: tuple[Option, ...]
    forward_base: int
    backward_base: int

    def __post_init__(self) -> None:
        assert self.options, f"{self.name} has no option"

    def need(self, option: Option) -> int:
        """Peak at the worse of the block's two moments, without what earlier blocks saved."""
        return max(self.forward_base + option.forward, self.backward_base + option.backward)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The blocks in the order of their forwards, and the moments that belong to none of them."""

    blocks: tuple[ChainBlock, ...]
    loss_base: int
    """Bytes at the loss's peak that no block's option saved."""
    floor: int
    """Peak at the moments that no choice changes, such as the optimizer's step."""

    def raised(self, nbytes: int) -> Chain:
        """The same with `nbytes` more bytes at every moment."""
        return dataclasses.replace(
            self,
            blocks=tuple(
                dataclasses.replace(
                    block,
                    forward_base=block.forward_base + nbytes,
                    backward_base=block.backward_base + nbytes,
                )
                for block in self.blocks
            ),
            loss_base=self.loss_base + nbytes,
            floor=self.floor + nbytes,
        )

    @property
    def menus(self) -> list[tuple[Option, ...]]:
        """The options of each block."""
        return [block.options for block in self.blocks]

    def with_options(self, change: Callable[[str, Option], Option]) -> Chain:
        """The same with each option replaced by `change(block name, option)`."""
        return dataclasses.replace(
            self,
            blocks=tuple(
                dataclasses.replace(
                    block, options=tuple(change(block.name, option) for option in block.options)
                )
                for block in self.blocks
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Solution:
    """One option per block, by its index in the block's menu."""

    choice: tuple[int, ...]
    seconds: float
    bound: float
    """No choice that fits the same limit takes less than this."""
    gap: float
    """The share of `seconds` that a better choice might still save."""
    peak: int


def peak(chain: Chain, choice: Sequence[int]) -> int:
    """The largest number of bytes of any moment under this choice."""
    saved = 0
    moments = [chain.floor]
    for block, place in zip(chain.blocks, choice, strict=True):
        option = block.options[place]
        moments.append(block.forward_base + saved + option.forward)
        moments.append(block.backward_base + saved + option.backward)
        saved += option.saved
    return max(*moments, chain.loss_base + saved)


def leanest(chain: Chain) -> Solution:
    """A choice with the smallest possible peak; `solve` at that peak gives the fastest of them."""
    rest = _least_rest(chain, chain.menus)
    choice = []
    for block, after in zip(chain.blocks, rest[1:], strict=True):
        costs = [
            (max(block.need(option), option.saved + after), option.seconds)
            for option in block.options
        ]
        choice.append(costs.index(min(costs)))
    return _solution(chain, choice, bound=0.0)


def solve(chain: Chain, limit: int, *, seconds_limit: float = 5.0) -> Solution | None:
    """The fastest choice whose peak is at most `limit` bytes; None if there is none.

    The solution is optimal, or its gap says how far from it it may be. After `seconds_limit`, it is
    the best found so far, or the leanest choice if none was found.
    """
    deadline = time.perf_counter() + seconds_limit
    lean = leanest(chain)
    if lean.peak > limit:
        return None
    swept = _sweep(_stages(chain, limit))
    if swept is not None:
        return _solution(chain, swept, bound=math.inf)
    choice, bound = _choose_by_program(chain, limit, deadline)
    return _solution(chain, lean.choice if choice is None else choice, bound=bound)


def _solution(chain: Chain, choice: Sequence[int], *, bound: float) -> Solution:
    """Build a solution from a choice.

    `bound` may be any proven lower bound, or infinite for the fastest choice: it is clamped between
    the seconds of every block at its fastest and those of the choice itself.
    """
    seconds = math.fsum(
        menu[place].seconds for menu, place in zip(chain.menus, choice, strict=True)
    )
    fastest = math.fsum(min(option.seconds for option in menu) for menu in chain.menus)
    bound = min(max(bound, fastest), seconds)
    return Solution(
        choice=tuple(choice),
        seconds=seconds,
        bound=bound,
        gap=(seconds - bound) / seconds if seconds else 0.0,
        peak=peak(chain, choice),
    )


def _least_rest(chain: Chain, menus: Sequence[Sequence[Option]]) -> list[int]:
    """For each k, the smallest peak from block k to the loss, without what blocks before k saved.

    Only options in `menus` are taken. The last number is the loss's own.
    """
    rest = [chain.loss_base]
    for block, menu in zip(reversed(chain.blocks), reversed(menus), strict=True):
        rest.append(min(max(block.need(option), option.saved + rest[-1]) for option in menu))
    return rest[::-1]


class _Offer(NamedTuple):
    """An option under a limit."""

    place: int
    saved: int
    room: int
    """The most that earlier blocks may have saved if this block, or any after it, is to fit."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """A block under a limit, with the options that can be part of the fastest choice."""

    offers: tuple[_Offer, ...]
    least: int
    most: int
    """Earlier blocks of a choice that fits save between these two."""
    plenty: int
    """If blocks up to this one save no more than this, all later ones can be their fastest."""


def _stages(chain: Chain, limit: int) -> list[_Stage]:
    """The stages of the chain under a limit that some choice fits, without useless options."""
    fastest = []
    for menu in chain.menus:
        seconds = min(option.seconds for option in menu)
        fastest.append([option for option in menu if option.seconds == seconds])
    rest, rest_when_fast = _least_rest(chain, chain.menus), _least_rest(chain, fastest)
    stages = []
    least = most = 0
    for k, block in enumerate(chain.blocks):
        usable = []
        for place, option in enumerate(block.options):
            room = limit - max(block.need(option), option.saved + rest[k + 1])
            if room >= least:
                # Room that cannot be filled is no advantage over another option.
                usable.append(_Offer(place, option.saved, min(room, most), option.seconds))
        offers: list[_Offer] = []
        for offer in sorted(usable, key=lambda offer: (offer.saved, -offer.room, offer.seconds)):
            if not any(one.room >= offer.room and one.seconds <= offer.seconds for one in offers):
                offers.append(offer)
        plenty = limit - rest_when_fast[k + 1]
        stages.append(_Stage(offers=tuple(offers), least=least, most=most, plenty=plenty))
        least += offers[0].saved
        most = max(offer.room + offer.saved for offer in offers)
    return stages


def _sweep(stages: Sequence[_Stage]) -> list[int] | None:
    """The fastest choice, exactly; None if too many partial choices would be kept."""
    saved, seconds = np.zeros(1, np.int64), np.zeros(1)
    steps = []
    looked_at = 0
    for stage in stages:
        place, menu_saved, room, menu_seconds = map(np.array, zip(*stage.offers, strict=True))
        offer, variant = np.nonzero(saved <= room[:, None])
        looked_at += len(variant)
        if looked_at > MOST_VARIANTS:
            return None
        saved, seconds = saved[variant] + menu_saved[offer], seconds[variant] + menu_seconds[offer]
        order = np.lexsort((seconds, saved))
        fastest_before = np.minimum.accumulate(seconds[order])[:-1]
        order = order[np.append(True, seconds[order][1:] < fastest_before)]
        # With plenty left, the rest can be at its fastest: keep only the fastest of those.
        lean_variants = int(np.searchsorted(saved[order], stage.plenty, side="right"))
        order = order[max(lean_variants - 1, 0) :]
        steps.append((place[offer[order]], variant[order]))
        saved, seconds = saved[order], seconds[order]
    # After the last block whatever fits is plenty, so one partial choice is left.
    choice, at = [], 0
    for places, variants in reversed(steps):
        choice.append(int(places[at]))
        at = variants[at]
    return choice[::-1]


def _choose_by_program(chain: Chain, limit: int, deadline: float) -> tuple[list[int] | None, float]:
    """A choice that fits, or None if none was found in time, and a lower bound on the seconds."""
    bound, margin = 0.0, 0
    while _least_rest(chain, chain.menus)[0] <= limit - margin:
        time_left = max(deadline - time.perf_counter(), 0.0)
        choice, its_bound = _run_program(_stages(chain, limit - margin), time_left)
        if margin == 0:
            bound = its_bound
        excess = peak(chain, choice) - limit if choice is not None else 0
        if excess <= 0:
            return choice, bound
        # HiGHS ignored a few bytes: ask for less. The margin grows fast, so this ends soon.
        margin = max(8 * margin, excess)
    return None, bound


def _run_program(stages: Sequence[_Stage], time_limit: float) -> tuple[list[int] | None, float]:
    """HiGHS's choice, None if it finds nothing in time, and its bound on the seconds.

    The columns are whether each offer is taken, then, for each stage, what earlier blocks saved
    above their least.
    """
    offers = [offer for stage in stages for offer in stage.offers]
    yes_or_no, any_number = np.ones(len(offers)), np.zeros(len(stages))
    spans = np.array([stage.most - stage.least for stage in stages])
    byte = SCALED_BYTES / max(1, spans.max())
    fastest, slowest = (
        sum(pick(offer.seconds for offer in stage.offers) for stage in stages)
        for pick in (min, max)
    )
    second = SCALED_SECONDS / (fastest or slowest or 1.0)
    found = milp(
        np.concatenate([[offer.seconds * second for offer in offers], any_number]),
        integrality=np.concatenate([yes_or_no, any_number]),
        bounds=Bounds(0.0, np.concatenate([yes_or_no, spans * byte])),
        constraints=_constraint(stages, byte),
        options={
            "time_limit": time_limit,
            "mip_rel_gap": 0.0 if len(stages) <= EXACT_BLOCKS else GAP,
        },
    )
    bound = found.mip_dual_bound
    bound = bound / second if bound is not None and math.isfinite(bound) else 0.0
    if found.x is None:
        return None, bound
    choice, start = [], 0
    for stage in stages:
        end = start + len(stage.offers)
        choice.append(stage.offers[int(np.argmax(found.x[start:end]))].place)
        start = end
    return choice, bound


def _constraint(stages: Sequence[_Stage], byte: float) -> LinearConstraint:
    """One offer per stage, sums that add up, and no more saved before an offer than its room.

    Each sum is a column of its own, so rows stay short however long the chain is.
    """
    entries: list[tuple[int, int, float]] = []
    limits: list[tuple[float, float]] = []

    def add_row(row: dict[int, float], lower: float, upper: float) -> None:
        entries.extend((len(limits), column, value) for column, value in row.items())
        limits.append((lower, upper))

    start, before = 0, sum(len(stage.offers) for stage in stages)
    for stage, following in itertools.zip_longest(stages, stages[1:]):
        columns = dict(enumerate(stage.offers, start))
        add_row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
        lacks = {at: (stage.most - offer.room) * byte for at, offer in columns.items()}
        if any(lacks.values()):
            add_row({**lacks, before: 1.0}, -math.inf, (stage.most - stage.least) * byte)
        if following is not None:
            grown = following.least - stage.least
            adds = {at: (offer.saved - grown) * byte for at, offer in columns.items()}
            add_row({**adds, before: 1.0, before + 1: -1.0}, 0.0, 0.0)
        start, before = start + len(stage.offers), before + 1
    rows, at, values = zip(*entries, strict=True)
    matrix = csr_array((values, (rows, at)), shape=(len(limits), before))
    lower, upper = zip(*limits, strict=True)
    return LinearConstraint(matrix, lower, upper)
