"""Solutions that wait for their check, and what the planner knows of others from each of them."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from oomph.plans.choices import Choices, Outside, Weights
from oomph.rehearsal.estimation import Estimate
from oomph.search.option_profiles import OptionProfiles
from oomph.search.solver import Solution
from oomph.techniques.allocator_settings import with_allocator


@dataclass(order=True)
class Candidate:
    """A solution that waits for its check, the fastest first."""

    seconds: float
    number: int
    profiles: OptionProfiles = dataclasses.field(compare=False)
    solution: Solution = dataclasses.field(compare=False)
    choices: Choices = dataclasses.field(compare=False)
    rehearsed: float | None = dataclasses.field(default=None, compare=False)
    """Seconds of the whole step with all its copies, where something leaves the GPU."""


class Verdict(NamedTuple):
    """What the check of a candidate found, in numbers."""

    fits: bool
    smallest_budget: int
    step_retries: int
    host: int
    """Bytes of host memory."""
    rehearsed: float | None
    """Seconds of the whole step, where something leaves the GPU."""
    allocator: str
    """The settings with which it is so."""
    refuses_capture: bool
    """Whether a CUDA graph is wanted of a forward that reads its data."""

    @classmethod
    def of(cls, estimate: Estimate, rehearsed: float | None, allocator: str) -> Verdict:
        """By the estimate of the whole job, rehearsed in so many seconds."""
        return cls(
            fits=estimate.fits,
            smallest_budget=estimate.smallest_budget,
            step_retries=estimate.step_retries,
            host=estimate.timeline.host_bytes,
            rehearsed=rehearsed,
            allocator=allocator,
            refuses_capture=estimate.timeline.refuses_capture,
        )

    def passed_on(self, candidate: Candidate) -> Candidate:
        """The candidate as this check leaves it."""
        choices = with_allocator(candidate.choices, self.allocator)
        return dataclasses.replace(candidate, choices=choices, rehearsed=self.rehearsed)


def with_blocks(candidate: Candidate, solution: Solution) -> Candidate:
    """The same with other ways to run the blocks, and the rows of the loss that were heard."""
    profiles = candidate.profiles.choose(solution)
    choices = dataclasses.replace(
        candidate.choices, blocks=profiles.blocks, loss_chunk=profiles.loss_chunk
    )
    return dataclasses.replace(candidate, solution=solution, choices=choices)


#: By kind of choices: bytes that the solver may plan with.
Kind = tuple[bool, bool, int | None, int | None, bool, int]
Rooms = defaultdict[Kind, int]


def kind_of(choices: Choices) -> Kind:
    """Choices of one kind miss the solver's numbers alike.

    A graph has a pool of its own; what leaves the GPU is there for a while on its way.
    """
    return (
        choices.launched_at_once,
        choices.leaves,
        choices.micro_batch if choices.leaves else None,
        choices.gradient_room,
        bool(choices.weights_away),
        choices.state_ahead,
    )


Variant = tuple[int | None, Weights, int | None, Outside, bool, Outside, float, int, Outside, int]


def variant_of(choices: Choices) -> Variant:
    """Choices that have about the same to copy, and the same time for it: last what blocks have."""
    return (
        choices.micro_batch,
        choices.weights,
        choices.gradient_room,
        choices.gradients_on,
        bool(choices.weights_away),
        choices.weights_away_on,
        choices.disk_share,
        choices.state_ahead,
        choices.offloaded_to,
        len(choices.offloaded),
    )


def leaves_no_more(one: Choices, other: Choices) -> bool:
    """Whether all that leaves the GPU in `one` does so in `other`, which is the same otherwise."""
    alike = dataclasses.replace(
        one,
        gradient_room=other.gradient_room,
        weights_away=other.weights_away,
        state_ahead=other.state_ahead,
    )
    rooms = [math.inf if c.gradient_room is None else c.gradient_room for c in (one, other)]
    return (
        alike == other
        and rooms[0] >= rooms[1]
        and set(one.weights_away) <= set(other.weights_away)
        and one.state_ahead >= other.state_ahead
    )


class PartTimes(NamedTuple):
    """Seconds of a step in some number of parts."""

    fastest: float
    """With everything kept."""
    solved: float
    """Inside the budget; infinite where that is not possible."""


def least_seconds(parts: int, known: Mapping[int, PartTimes], *, leaves: bool = False) -> float:
    """Seconds that a step in so many parts takes at least, by what other numbers of parts take.

    Parts cost time of their own: they launch more and multiply smaller matrices. And larger parts
    need more memory, so that at least as much has to be given for it. What `leaves` the GPU has
    other times to do so from the second part on: from one part to several is no slope then.
    """
    fewer = sorted(number for number in known if number < parts)
    least = known[fewer[-1]].fastest if fewer else 0.0
    alike = [number for number in fewer if number > 1 or not leaves]
    if len(alike) > 1:
        first, last = alike[-2:]
        slope = (known[last].fastest - known[first].fastest) / (last - first)
        least += max(slope, 0.0) * (parts - last)
    # A step in one part is another matter: it can step the optimizer in backward.
    given = [known[number] for number in known if number > parts > 1]
    return least + max((times.solved - times.fastest for times in given), default=0.0)


def merit_of(estimate: Estimate) -> tuple[bool, int, int]:
    """Fitting is better than not, then few retries, then a small need."""
    retries = estimate.step_retries if estimate.fits else 0
    return estimate.fits, -retries, -estimate.smallest_budget
