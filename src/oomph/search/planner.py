"""The planner: finds the fastest choices that fit a budget, and checks each before it is returned.

Around the solver there is a small search over micro-batch sizes, weight formats and loss chunks.
The planner profiles each combination once (`option_profiles`). That also prices what rival tools do
(keep everything, recompute everything, save the matrix products): those are points of the solver's
own problem, so by the same clock no plan is slower than theirs. The fastest candidates are then
rehearsed as a whole and replayed through the allocator under the budget (rule 2); a candidate that
fails is solved again with less room.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from oomph.errors import BadInput, CannotRehearse, DoesNotFit, HostTooSmall
from oomph.hardware import GPU, find_gpu
from oomph.hardware.profile import load_profile
from oomph.hardware.size_notes import OddSize, odd_sizes, size_notes
from oomph.hardware.timing.clock import Clock
from oomph.jobs.description import describe_job
from oomph.jobs.job import Job, batch_size, make_batch
from oomph.plans.choices import KEEP, MASTERS, RECOMPUTE, Choices, Weights
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Change, MadeFor, Plan, Predicted
from oomph.rehearsal.compiled import forget_compiled
from oomph.rehearsal.estimation import Estimate
from oomph.rehearsal.garbage import only_new_garbage
from oomph.search.block_timer import BlockTimer
from oomph.search.candidates import (
    Candidate,
    Kind,
    PartTimes,
    Rooms,
    Variant,
    Verdict,
    kind_of,
    least_seconds,
    leaves_no_more,
    variant_of,
    with_blocks,
)
from oomph.search.changes import describe_changes, price, to_be_priced
from oomph.search.checker import Checker, Found, Say
from oomph.search.host_room import make_host_room
from oomph.search.measured_times import RealClock
from oomph.search.on_top import OnTop
from oomph.search.option_profiles import (
    NotInBackward,
    OptionProfiles,
    count_parts,
    late_state,
    profile_options,
)
from oomph.search.option_profiles_json import from_plain, to_plain
from oomph.search.pricing import Pricing
from oomph.search.process_questions import PRICE, PROFILE, question
from oomph.search.refining import WORTH_IT, Tried, refine
from oomph.search.second_process import SecondProcess
from oomph.search.solver import Solution, leanest, solve
from oomph.search.space import SearchSpace, stepping_later, tensors_of
from oomph.search.survey import survey
from oomph.search.trials import Trials
from oomph.techniques.technique import Technique, altering_forward, techniques
from oomph.units import format_bytes, parse_bytes

#: Rows of logits that may exist at a time; the largest number that fits is the fastest.
LOSS_CHUNKS = (16384, 8192, 4096, 2048, 1024, 512)
#: Rows to try where fragmentation between large pieces takes too much, and the largest share of a
#: peak that may be missing for it.
SMALL_LOSS, FRAGMENTED = 2048, 0.05
#: How much faster a plan with another weight format must be to be preferred.
FORMAT_HANDICAP = 1.02
#: How much faster a micro-batch size must be able to get to be profiled at all.
WORTH_PROFILING = 1e-6
#: The share of the budget left for fragmentation before any plan is checked.
FIRST_MARGIN = 0.015
#: The same for plans that offload: copies under way take memory, too.
LEAVING_MARGIN = 0.05
#: Plans that offload are tried if the best plan without is this much slower than without a limit.
LEAVE_FROM = 1.1
#: Nothing more is offloaded if a plan is at most this much slower than keeping everything.
FAST_ENOUGH = 1.02
#: Variants that take at least this many times the fastest profiled one's seconds are not profiled.
HOPELESS = 1.2
#: Prices in seconds for each byte that blocks move, as shares of the link's seconds per byte.
PRICES = (0.0, 0.5, 1.0)
#: The price of such a byte where host memory is short: only what must moves.
DEAR = 1e-6
#: Least bytes of a gradient element, and its bytes if its parameter has a master in fp32.
LEAST_GRADIENT, MASTER_GRADIENT = 2, 4
#: The time to release cached memory and allocate it again: an H200 stood idle for 9 and for 20 ms
#: in two steps that had about three of these each.
RETRY_SECONDS = 5e-3
#: How often a plan that failed its check is solved again with less room.
MOST_CHECKS = 12
#: How many block variants are timed on the GPU, at most.
MOST_TIMED = 4

#: How many plans that passed a quick check get a full check, at most.
MOST_CONFIRMED = 3


def plan(
    job: Job,
    *,
    budget: str | int | None = None,
    gpu: str | GPU | None = None,
    allow: str | Fidelity = Fidelity.ROUNDING,
    compile_blocks: bool = True,
    timer: BlockTimer | None = None,
    host: str | int | None = None,
    say: Say = lambda _: None,
) -> Plan:
    """The fastest plan for `job` that stays inside `budget` on `gpu`; needs no GPU.

    Without `gpu` the plan is for the CPU. `allow` says how far the plan's numbers may differ from
    the untouched job's. With a `timer`, the blocks of the best plan are timed on the real device.
    `host` limits the host memory for offloaded data; optimizer state, gradients, weights and what
    blocks save go to disk where there is no room. Raises `DoesNotFit` with the smallest budget that
    would do.
    """
    planner = make_planner(
        job,
        budget=budget,
        gpu=gpu,
        allow=allow,
        compile_blocks=compile_blocks,
        timer=timer,
        host=host,
        say=say,
    )
    return planner.plan()


def make_planner(
    job: Job,
    *,
    budget: str | int | None = None,
    gpu: str | GPU | None = None,
    allow: str | Fidelity = Fidelity.ROUNDING,
    compile_blocks: bool = True,
    timer: BlockTimer | None = None,
    host: str | int | None = None,
    say: Say = lambda _: None,
) -> Planner:
    """Builds a planner; it caches option profiles for other budgets."""
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    if budget is None and card is None:
        raise BadInput("nothing limits a job on the CPU but a budget: give one, as 16GiB")
    if host is not None and card is None:
        raise BadInput("on the CPU host memory is the budget: give that, and no host")
    limit = parse_bytes(budget) if budget is not None else card.memory if card else 0
    if job.optimizer is None:
        raise BadInput("a plan is for training: give the job an optimizer")
    try:
        fidelity = Fidelity(allow)
    except ValueError:
        raise BadInput(f"allow is {', '.join(Fidelity)}, not {allow!r}") from None
    return Planner(
        job=job,
        gpu=card,
        budget=limit,
        allow=fidelity,
        compiles=compile_blocks and card is not None,
        timer=timer,
        host=parse_bytes(host) if host is not None else None,
        say=say,
    )


class CannotSplit(CannotRehearse):
    """A loss that takes a whole batch but fails on a part, such as one that compares its halves."""


@dataclass(kw_only=True)
class Planner:
    """Plans one job for one budget after the other; caches what it has profiled."""

    job: Job
    gpu: GPU | None
    budget: int
    allow: Fidelity
    compiles: bool
    timer: BlockTimer | None
    host: int | None
    """Host memory that a plan may take; None for no limit."""
    say: Say
    notes: list[str] = dataclasses.field(default_factory=list)
    profiles: list[OptionProfiles] = dataclasses.field(default_factory=list)
    odd_sizes: list[OddSize] = dataclasses.field(default_factory=list)
    made_for: MadeFor | None = None
    _weights: Weights | None = None
    """The weight format that was best for the first micro-batch size."""
    _leaving: bool = False
    """Whether plans that offload are being profiled."""
    _refuses_capture: bool = False
    """Whether the forward reads its data on the host, so no CUDA graph can capture it."""
    _like: Choices | None = None
    """The fixed part that all plans share from now on; None before the first plan."""
    _told: list[OptionProfiles] = dataclasses.field(default_factory=list)
    """Option profiles by the predicted clock alone."""
    _real: RealClock = dataclasses.field(init=False)
    _slower: dict[Variant, float] = dataclasses.field(default_factory=dict)
    """By variant: rehearsed seconds divided by those predicted from its option profiles."""
    _variants: dict[int, tuple[OptionProfiles, list[OptionProfiles]]] = dataclasses.field(
        default_factory=dict
    )
    """By the `id` of option profiles: the profiles themselves and their loss-chunk variants."""
    _checker: Checker = dataclasses.field(init=False, repr=False)
    _pricing: Pricing = dataclasses.field(init=False, repr=False)
    _uncompiled: dict[Weights, str] = dataclasses.field(default_factory=dict)
    """By weight format with which blocks cannot be compiled: the reason."""
    _put_off: dict[int | None, float] = dataclasses.field(default_factory=dict)
    """By micro-batch size: a lower bound on the seconds of its variants not profiled yet."""
    _unprofiled: list[int | None] = dataclasses.field(default_factory=list)
    """Micro-batch sizes skipped because they cannot win by what was profiled, largest first."""
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _second: SecondProcess = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._real = RealClock(timer=self.timer)
        self._second = SecondProcess(self._answer)

    @only_new_garbage()
    def plan(self) -> Plan:
        """Find the fastest plan within the budget."""
        began = time.perf_counter()
        try:
            self._look()
            estimate, candidate = self._checker.confirmed(self._on_top.improve(self._find()[1]))
            changes = self._changes(candidate, estimate)
        finally:
            self._second.close()
            forget_compiled()
        return self._report(candidate, estimate, changes, time.perf_counter() - began)

    @only_new_garbage()
    def plan_like(self, plan: Plan, budget: int) -> Plan:
        """Find the fastest plan within another budget that has the same fixed part as `plan`.

        It lists no changes: their separate savings are not computed.
        """
        began = time.perf_counter()
        self.budget, self._like = budget, plan.choices.fixed_part
        self._leaving = self._like.leaves  # blocks are offloaded only if the optimizer is
        try:
            self._look()
            estimate, candidate = self._find()
        finally:
            self._second.close()
            forget_compiled()
        made = self._report(candidate, estimate, (), time.perf_counter() - began)
        return dataclasses.replace(made, fidelity=plan.fidelity)

    def _look(self) -> None:
        if self.made_for is None:
            self.say("looking at the model")
            self.clock = Clock.of(self.gpu)
            self.found = survey(self.job, self.gpu, self.clock, self._remember)
            if self.found.split is not None and not self.found.whole_because:
                self.job = dataclasses.replace(self.job, sample_tensors=self.found.split.leaves)
            self.batch = make_batch(self.job)
            self.notes += self.found.left_alone
            if self.found.whole_because and batch_size(self.batch) > 1:
                self._keep_whole(self.found.whole_because)
            if self.found.stepped_whole_because:
                self.notes.append(
                    "the optimizer steps as a whole, on the GPU and after backward:"
                    f" {self.found.stepped_whole_because}"
                )
        self._checker = Checker(
            job=self.job,
            gpu=self.gpu,
            clock=self.clock,
            budget=self.budget,
            second=self._second,
            say=self.say,
        )
        self._pricing = Pricing(job=self.job, gpu=self.gpu, clock=self.clock, second=self._second)

    def _find(self) -> tuple[Estimate, Candidate]:
        """The fastest plan that fits; with the batch whole if splitting it turns out to fail."""
        try:
            self._profile_all()
            if self._like is None:
                self._time_the_best()
            return self._choose()
        except CannotSplit as error:
            self._keep_whole(f"parts of it fail, {error}")
            self._second.close()  # it was forked before the split was ruled out
            self._leaving = self._like.leaves if self._like is not None else False
            self._weights = None
            return self._find()

    def _keep_whole(self, reason: str) -> None:
        self.found = dataclasses.replace(self.found, whole_because=reason)
        self.notes.append(f"the batch is not split: {reason}")

    def _remember(self, model: nn.Module, optimizer: Any) -> None:
        gpu = self.gpu.name if self.gpu is not None else None
        self.made_for = describe_job(self.job.name, model, make_batch(self.job), optimizer, gpu)
        self.odd_sizes = odd_sizes(model, self.job.precision, self.gpu)

    # -- what could be done -----------------------------------------------------------------------

    def _profile_all(self, to_beat: float = math.inf) -> None:
        """Profile every variant of the job that may win and be faster than `to_beat`."""
        sizes = self._micro_batches()
        self._put_off.clear()
        self._unprofiled = list(sizes)
        times: dict[int, PartTimes] = {}
        best, best_at = to_beat, 0

        def hear(at: int) -> None:
            nonlocal best, best_at
            self._unprofiled.remove(sizes[at])
            profiles = self._profile_size(sizes[at], to_beat=best)
            rooms = self._rooms()
            solved = min((one for h in profiles for one in self._solutions(h, rooms)), default=None)
            fastest = min(variant.fastest for one in profiles for variant in self._chunked(one))
            seconds = math.inf
            if solved is not None:
                seconds = solved.profiles.seconds(solved.solution)
                self._weights = self._weights or solved.choices.weights
            if seconds < best:
                best, best_at = seconds, at
            solved_at_least = min(seconds, self._put_off.get(sizes[at], math.inf))
            times[profiles[0].parts] = PartTimes(fastest=fastest, solved=solved_at_least)

        def may_win(at: int) -> bool:
            if self._has_no_room_for_gradients(sizes[at]):
                return False
            parts = count_parts(self.job, sizes[at])
            least = least_seconds(parts, times, leaves=self._leaving)
            if self._leaving and parts > 1:
                predicted = (self._predicted_by_whole(base) for base in self._bases(sizes[at]))
                return max(least, min(predicted, default=math.inf)) < WORTH_IT * best
            return least * (1 + WORTH_PROFILING) < best

        # With offloading, the largest difference is that between one part and two.
        for at in range(0, len(sizes), 1 if self._leaving else 2):
            if may_win(at):
                if at and best_at + 1 < at and may_win(best_at + 1):  # it comes after all of these
                    self._second.ask([question(PROFILE, self._bases(sizes[best_at + 1])[0])])
                hear(at)
        for at in (best_at - 1, best_at + 1):
            if 0 < at < len(sizes) and at % 2 and not self._leaving and may_win(at):
                hear(at)

    def _has_no_room_for_gradients(self, size: int | None) -> bool:
        """Whether parts of this size cannot fit: all gradients must exist before the step."""
        fixed_part = [
            profiles.fixed_part for profiles in self.profiles if not profiles.choices.leaves
        ]
        if size is None or self._leaving or not fixed_part:
            return False
        gradients = LEAST_GRADIENT * self.found.trainable
        return min(fixed_part) + gradients > self._rooms()[kind_of(Choices(micro_batch=size))]

    def _keeps_too_much(self, base: Choices) -> bool:
        """Whether the weights and gradients that stay on the GPU exceed its memory."""
        if (
            not base.leaves
            or not self._space.gradients_wait(base)
            or base.gradient_room is not None
        ):
            return False
        fixed_part = [
            one.fixed_part
            for one in self.profiles
            if one.choices.leaves and one.choices.weights == base.weights
            if one.choices.weights_away == base.weights_away
        ]
        stays = max(self._staying(base)(base), *fixed_part[:1], 0)
        each = MASTER_GRADIENT if base.weights == MASTERS else LEAST_GRADIENT
        return stays + each * self.found.trainable > self._rooms()[kind_of(base)]

    def _unlimited(self) -> float:
        """Seconds of a step if memory were unlimited."""
        return min(
            one.fastest
            for profiles in self.profiles
            for one in self._chunked(profiles)
            if not (one.choices.launched_at_once and self._refuses_capture)
        )

    @property
    def _space(self) -> SearchSpace:
        """The search space given what was found out so far."""
        return SearchSpace(
            job=self.job,
            gpu=self.gpu,
            batch=self.batch,
            found=self.found,
            allow=self.allow,
            compiles=self.compiles,
            uncompiled=self._uncompiled,
            host=self.host,
            techniques=self._techniques(),
        )

    def _techniques(self) -> list[Technique[Any]]:
        """Those that whoever runs the step may use."""
        return techniques()

    @property
    def _on_top(self) -> OnTop:
        def solve_in(candidate: Candidate, room: int) -> Candidate | None:
            solved = self._within(candidate.profiles, room)
            best = min(solved, key=candidate.profiles.seconds, default=None)
            return with_blocks(candidate, best) if best is not None else None

        space = self._space
        if self._like is not None:  # a run goes on with the techniques that it has
            space = dataclasses.replace(space, techniques=())
        return OnTop(
            space=space, checker=self._checker, clock=self.clock, solve=solve_in, host=self.host
        )

    def _micro_batches(self) -> list[int | None]:
        return self._space.sizes

    def _bases(self, size: int | None) -> list[Choices]:
        """Choices of everything but the blocks, for one micro-batch size."""
        if self._like is not None:
            return stepping_later(self._space.with_size(self._like, size))
        if not self._leaving:
            return self._space.staying(size, self._weights)
        variants = self._space.leaving(size, self._weights)
        return [variant for variant in variants if not self._keeps_too_much(variant)]

    # -- hearing and solving ----------------------------------------------------------------------

    def _profile_size(
        self, size: int | None, to_beat: float = math.inf, *, wants_leanest: bool = False
    ) -> list[OptionProfiles]:
        """Profile the variants of one micro-batch size that are not profiled yet.

        Variants much slower than `to_beat` even with unlimited memory are put off. With
        `wants_leanest`, variants known to be slower than others are profiled, too.
        """
        profiles: list[OptionProfiles] = []
        self._put_off.pop(size, None)
        bases = self._bases(size)
        self._profile_beside(bases)
        for base in bases:
            if not wants_leanest and self._is_no_faster(profiles, base):
                continue
            before = next((one for one in self.profiles if one.choices == base), None)
            least = max(self._takes_at_least(profiles, base), self._predicted_by_whole(base))
            # Parts of a batch accumulate their gradients: copies cost them more, not less.
            hopeless = to_beat if base.micro_batch is not None else HOPELESS * to_beat
            if before is None and least > hopeless:
                self._put_off[size] = min(least, self._put_off.get(size, math.inf))
                continue
            one = before or self._profile(base)
            if one is None:
                self._second.close()  # it still assumes what turned out to be different
                if base.compiled and base.weights in self._uncompiled:
                    self.profiles += [
                        it for it in profiles if it not in self.profiles
                    ]  # still valid
                return self._profile_size(size, to_beat, wants_leanest=wants_leanest)
            if before is None:
                self._told.append(one)
                one = self._by_real_clock(one)
            profiles.append(one)
        self.profiles += [one for one in profiles if one not in self.profiles]
        return profiles

    def _is_no_faster(self, profiles: list[OptionProfiles], base: Choices) -> bool:
        """Whether the profiles so far show that this variant is no faster."""
        if base.leaves and self._is_fast_enough(profiles, base.weights):
            return True
        if base.leaves and self._comes_too_late(profiles, base):
            return True
        return self._is_slower_later(profiles, base)

    def _profile_beside(self, bases: Sequence[Choices]) -> None:
        """Have the second process profile variants that this one comes to later."""
        if self._leaving:
            likely = bases[1:2]
        else:
            # A step after backward is mostly known to be slower by then.
            others = [base for base in bases if base.weights != bases[0].weights]
            likely = [base for base in others if base.optimizer_in_backward]
        known = [one.choices for one in self.profiles]
        self._second.ask([question(PROFILE, base) for base in likely if base not in known])

    def _takes_at_least(self, profiles: list[OptionProfiles], base: Choices) -> float:
        """Least seconds of a step, from profiles that offload no more: the kernels are the same."""
        # Where the GPU waits for launches, predictions say little about what copies cost.
        alike = [
            one
            for one in profiles
            if base.leaves and not one.waits_for_launches and leaves_no_more(one.choices, base)
        ]
        return max(
            (min(variant.fastest for variant in self._chunked(one)) for one in alike), default=0.0
        )

    def _predicted_by_whole(self, base: Choices) -> float:
        """About the seconds of a step in parts, predicted from profiles of the whole batch."""
        parts = count_parts(self.job, base.micro_batch)
        if not base.leaves or parts == 1:
            return 0.0
        late = late_state(self.job, self.found, base)
        room = base.gradient_room
        away = self._space.gradient_bytes(base) - room if room is not None else 0
        return max(
            (
                one.fastest_with(parts=parts, late=late, gradients=away)
                for one in self.profiles
                if one.choices.leaves and one.parts == 1 and not one.waits_for_launches
                if one.choices.gradient_room is None
                if leaves_no_more(dataclasses.replace(one.choices, **_size_of(base)), base)
            ),
            default=0.0,
        )

    def _is_fast_enough(self, profiles: list[OptionProfiles], weights: Weights) -> bool:
        """Whether one of these profiles is so fast that offloading more gains nothing."""
        rooms = self._rooms()
        return any(
            candidate.profiles.seconds(candidate.solution) <= FAST_ENOUGH * one.fastest
            for one in profiles
            if one.choices.leaves and one.choices.weights == weights
            for candidate in self._solutions(one, rooms)
        )

    def _comes_too_late(self, profiles: list[OptionProfiles], base: Choices) -> bool:
        """Whether waiting for state takes longer than other variants, even with more prefetched."""
        late = late_state(self.job, self.found, base)
        like = [
            one.fastest_with(parts=one.parts, late=late)
            for one in profiles
            if one.choices.state_ahead > base.state_ahead
            and dataclasses.replace(one.choices, state_ahead=base.state_ahead) == base
        ]
        rooms = self._rooms()
        return bool(like) and any(
            candidate.profiles.seconds(candidate.solution) <= max(like)
            for one in profiles
            if one.choices.leaves
            for candidate in self._solutions(one, rooms)
        )

    def _is_slower_later(self, profiles: list[OptionProfiles], base: Choices) -> bool:
        """Whether stepping inside backward, which takes less memory, is better than this.

        Not if the GPU waits for the host there, or if there is memory to spare.
        """
        rooms = self._rooms()
        return any(
            one.choices.optimizer_in_backward
            and dataclasses.replace(one.choices, optimizer_in_backward=False) == base
            and not one.waits
            and all(
                candidate.profiles.seconds(candidate.solution) > candidate.profiles.fastest
                for candidate in self._solutions(one, rooms)
            )
            for one in profiles
        )

    def _profile(self, base: Choices) -> OptionProfiles | None:
        """Profile one variant; None if it cannot be run, which is noted and not tried again."""
        size = base.micro_batch or batch_size(self.batch)
        self.say(f"trying micro-batches of {size}")
        answer = self._second.answer(question(PROFILE, base))
        try:
            profiles = from_plain(answer) if answer is not None else self._profile_options(base)
        except NotInBackward as error:
            kept = [block for block in self.found.blocks if block.path not in error.paths]
            self.found = dataclasses.replace(self.found, blocks=tuple(kept))
            return None
        except CannotRehearse as error:
            self._check_split(base, error)
            if base.compiled and self._like is None:
                self._uncompiled[base.weights] = str(error)
            elif self.found.blocks:
                self.notes.append(f"no block is recomputed: {error}")
                self.found = dataclasses.replace(self.found, blocks=())
            else:
                raise
            return None
        if base.head and not profiles.loss_is_chunked:
            self.notes.append(
                f"the loss is not chunked: what {base.head} gives is used for more than"
                " cross_entropy"
            )
            self.found = dataclasses.replace(self.found, heads={})
            return None
        return profiles

    def _check_split(self, base: Choices, error: CannotRehearse) -> None:
        """Raise `CannotSplit` if a part of the batch fails by itself, but the whole does not."""
        if base.micro_batch in (None, self.job.micro_batch):
            return
        plain = dataclasses.replace(altering_forward(base), precision=base.precision)
        for size in (None, base.micro_batch):
            try:
                tried = dataclasses.replace(plain, micro_batch=size)
                price(self.job, self.gpu, self.clock, tried)
            except CannotRehearse as failed:
                if size is None:
                    return
                raise CannotSplit(str(failed)) from error

    def _profile_options(self, base: Choices) -> OptionProfiles:
        return profile_options(self.job, self.gpu, self.clock, self.found, base)

    def _solutions(self, profiles: OptionProfiles, rooms: Rooms) -> Iterator[Candidate]:
        """The fastest solution for each loss chunk that has one."""
        for variant in self._chunked(profiles):
            room = rooms[kind_of(variant.choices)]
            for solution in self._within(variant, room):
                yield self._candidate(variant, solution)

    def _within(self, profiles: OptionProfiles, room: int) -> list[Solution]:
        """The fastest solutions in so much room, and some that move less where the link is busy."""
        if room not in profiles.solved:
            prices = [0.0]
            if profiles.copies is not None and profiles.choices.leaves:
                # Bytes that blocks move have a price: a high one makes blocks move less.
                prices = [price / profiles.copies.rates.slower for price in PRICES]
            chains = [profiles.priced(price) for price in prices]
            if profiles.waits_for_launches:
                chains.append(profiles.launched)
            solved = [solve(chain, room) for chain in chains]
            profiles.solved[room] = list(dict.fromkeys(filter(None, solved)))
        return profiles.solved[room]

    def _candidate(self, profiles: OptionProfiles, solution: Solution) -> Candidate:
        # Another weight format must be worth it.
        handicap = 1.0 if profiles.choices.weights == "own" else FORMAT_HANDICAP
        return Candidate(
            seconds=profiles.seconds(solution) * handicap,
            number=next(self._numbers),
            profiles=profiles,
            solution=solution,
            choices=profiles.choose(solution),
        )

    def _rooms(self) -> Rooms:
        """Room for tensors within the budget, before fragmentation is known."""
        room = self.budget
        if self.gpu is not None:
            margin = LEAVING_MARGIN if self._leaving else FIRST_MARGIN
            room = int((self._checker.limit(self._leaving) - self._checker.hidden) * (1 - margin))
        return defaultdict(lambda: room)

    def _chunked(self, profiles: OptionProfiles) -> list[OptionProfiles]:
        """The same step with other loss chunks, without profiling it again."""
        if id(profiles) not in self._variants:
            self._variants[id(profiles)] = profiles, self._make_variants(profiles)
        return self._variants[id(profiles)][1]

    def _make_variants(self, profiles: OptionProfiles) -> list[OptionProfiles]:
        if profiles.graphed is not None:
            plain = dataclasses.replace(profiles, graphed=None)
            return [*self._make_variants(plain), *self._make_variants(profiles.graphed)]
        base = profiles.choices
        if not base.head or base.loss_chunk is None:
            return [profiles]
        width, depth = self.found.heads[base.head]
        rows = self._space.rows(base.micro_batch)
        sizes = [size for size in LOSS_CHUNKS if size < rows]
        element = 4 if base.precision in ("fp32", "tf32") else 2
        variants = []
        for size in [rows, *sizes]:
            more_bytes = (size - base.loss_chunk) * width * element
            # Each chunk reads and writes the accumulated weight gradient once more.
            more_chunks = math.ceil(rows / size) - math.ceil(rows / base.loss_chunk)
            more_seconds = more_chunks * self.clock.moving(2 * 4 * width * depth)
            variants.append(profiles.with_loss(size, more_bytes, more_seconds))
        return variants

    def _time_the_best(self) -> None:
        """Replace predicted seconds by measured ones until the fastest candidate has been timed."""
        if self.timer is None or not self.found.blocks:
            return
        for _ in range(MOST_TIMED):
            best = self._fastest(self._rooms(), set())
            if best is None or self._real.knows(best.choices):
                return
            self.say("timing blocks")
            predicted = self._predicted_of_blocks(best.profiles.choices)
            self._real.time(best.choices, predicted, self.found)
            self.profiles = [self._by_real_clock(one) for one in self._told]

    def _predicted_of_blocks(self, choices: Choices) -> OptionProfiles:
        """The predicted profiles of blocks that run like this, on their own."""
        plain = dataclasses.replace(choices.without_switchable, optimizer_in_backward=False)
        for one in self._told:
            # Profiles with one loss chunk describe the blocks with any other chunk, too.
            if dataclasses.replace(one.choices, loss_chunk=choices.loss_chunk) == plain:
                return one
        return self._profile_options(plain)

    def _by_real_clock(self, predicted: OptionProfiles) -> OptionProfiles:
        return self._real.correct(predicted, batch_size(self.batch))

    # -- checking ---------------------------------------------------------------------------------

    def _choose(self) -> tuple[Estimate, Candidate]:
        """The fastest plan that passes its check; if that is slow, tries to offload, too."""
        may_leave = self.gpu is not None and self.found.steps_per_parameter and self._like is None
        likely = self._fastest(self._rooms(), set()) if may_leave else None
        to_beat = likely.seconds if likely is not None else math.inf
        stays = None
        if likely is None or not self._is_slow(likely.seconds):
            stays = self._check_until_one_fits()
            if not may_leave or (stays is not None and not self._is_slow(stays[0])):
                return self._settled(stays[1:] if stays is not None else self._refuse())
            to_beat = stays[0] if stays is not None else math.inf
        self._leaving, self._weights = True, None
        self._second.close()  # the next one forks with the graphs that were traced here
        self._profile_all(to_beat=to_beat)
        found = self._check_until_one_fits()
        leaves = found[1:] if found is not None else None
        # With less to copy, it may be as fast as its kernels alone.
        is_refined = leaves is not None and _without_copies(leaves[1]) < to_beat
        if leaves is not None and is_refined:
            leaves = self._refined(*leaves)
        if stays is None and to_beat < math.inf and self._counts(leaves) > to_beat:
            self._leaving = False
            stays = self._check_until_one_fits()
            self._leaving = True
        if stays is None and leaves is not None and leaves[1].choices.waits_on_disk:
            # Disks are slow: the leanest plan that stays on the GPU may be faster.
            self._leaving = False
            lean = self._check_leanest()
            self._leaving = True
            stays = (lean[1].seconds, *lean) if lean[0].fits else None
        if stays is not None and self._counts(leaves) > stays[0]:
            return self._checker.confirmed(stays[2])
        if leaves is None or not is_refined:
            leaves = self._refined(*(leaves or self._refuse()))
        return self._settled(leaves)

    def _settled(self, found: Found) -> tuple[Estimate, Candidate]:
        """The plan with its check, provided that it fits host memory."""
        missing = self._missing_on_host(found[0])
        return self._checker.confirmed(self._refuse_host(missing)[1] if missing else found[1])

    def _counts(self, leaves: Found | None) -> float:
        """Its seconds; infinite if it does not fit host memory, as the disk may make it slow."""
        if leaves is None or self._missing_on_host(leaves[0]):
            return math.inf
        return self._rehearsed_seconds(*leaves)

    def _is_slow(self, seconds: float) -> bool:
        """Whether a plan is slow enough to look into offloading."""
        return seconds > LEAVE_FROM * self._unlimited()

    def _missing_on_host(self, verdict: Verdict) -> int:
        """Bytes of host memory that a plan needs beyond the limit."""
        return max(verdict.host - self.host, 0) if self.host is not None else 0

    def _refined(self, verdict: Verdict, candidate: Candidate) -> tuple[Verdict, Candidate]:
        """The plan after tuning choices that are better rehearsed than predicted."""
        if candidate.choices.optimizer_on == "gpu" or self._like is not None:
            return verdict, candidate
        assert self.gpu is not None and candidate.rehearsed is not None
        trials = Trials(
            look_into=self._checker.quick_check,
            leaner=self._leaner,
            seconds=self._rehearsed_seconds,
            limit=self._checker.limit(True),
            staying=self._staying(candidate.choices),
        )
        profile = load_profile(self.gpu.name)
        best = refine(
            trials.begin(verdict, candidate),
            trials.attempt,
            foresee=trials.foresee,
            gradients=self._space.gradient_bytes(candidate.choices),
            first=self.found.first / self.found.trainable,
            host_steps=profile is not None
            and profile.host_adam is not None
            and self.allow.allows(Fidelity.ROUNDING),
        )
        if self.host is not None and best.host > self.host:
            # Begin with a plan that passes its check: one that fails would fail with less on the
            # host, too.
            best = trials.begin(*(self._confirmed(trials, best, None) or (verdict, candidate)))
            lighter = self._moving_less(trials.who_has(best.choices)[1])
            trials.add_blocks(lighter)
            best = make_host_room(best, lighter.choices, trials.attempt, self.host)
        return self._confirmed(trials, best, self.host) or (verdict, candidate)

    def _confirmed(self, trials: Trials, best: Tried, host: int | None) -> Found | None:
        """The fastest tried plan that passes its check, if need be with more room in its blocks."""
        leaner: list[Found] = []
        for tried in trials.fastest_first(best, host)[:MOST_CONFIRMED]:
            if any(self._rehearsed_seconds(*one) <= tried.seconds for one in leaner):
                break
            found = trials.who_has(tried.choices)
            if not self._checker.was_checked(found[1]):
                found = self._check_and_price(found[1])
            if found[0].fits:
                return min([*leaner, found], key=lambda one: self._rehearsed_seconds(*one))
            lean = self._leaner(found[1], found[0].smallest_budget - trials.limit)
            if lean is not None:
                checked = self._check_and_price(lean)
                if checked[0].fits and (host is None or checked[0].host <= host):
                    leaner.append(checked)
        return min(leaner, key=lambda one: self._rehearsed_seconds(*one), default=None)

    def _check_and_price(self, candidate: Candidate) -> Found:
        """Check a candidate while the second process begins to price its changes."""
        choices = candidate.choices
        wanted = to_be_priced(self._untouched(), choices)
        self._pricing.begin_beside_a_check(choices, wanted)
        return self._checker.check(candidate)

    def _staying(self, like: Choices) -> Callable[[Choices], int]:
        """Counts the bytes of state and block weights that such choices keep on the GPU."""
        state = self._state_bytes(like)
        halved = like.weights == MASTERS or like.precision == "bf16"
        weights = {one.path: (2 if halved else 4) * one.parameters for one in self.found.blocks}

        def staying(choices: Choices) -> int:
            away = sum(weights[path] for path in choices.weights_away)
            return int(choices.gpu_share * state) + sum(weights.values()) - away

        return staying

    def _state_bytes(self, choices: Choices) -> int:
        """Bytes of optimizer state and masters, from profiles with and without them."""
        whole, without = (
            [
                one.fixed_part
                for one in self.profiles
                if one.choices.weights == choices.weights and not one.choices.weights_away
                if one.choices.leaves is leaves
            ]
            for leaves in (False, True)
        )
        return max(min(whole) - min(without), 0) if whole and without else 0

    def _moving_less(self, candidate: Candidate) -> Candidate:
        """The same with blocks that move only what they must, to save host memory."""
        solution = solve(candidate.profiles.priced(DEAR), candidate.solution.peak)
        return candidate if solution is None else with_blocks(candidate, solution)

    def _rehearsed_seconds(self, verdict: Verdict, candidate: Candidate) -> float:
        """Seconds of a step, including the allocator's cleaning up of its cache."""
        seconds = candidate.rehearsed or candidate.seconds
        return seconds + verdict.step_retries * RETRY_SECONDS

    def _leaner(self, candidate: Candidate, missing: int) -> Candidate | None:
        """The same with so much more room: other options for the blocks, or smaller loss chunks."""
        peak = candidate.solution.peak
        least = peak - max(missing, 0)
        # With a little more room than needed if possible, and with the same loss chunk first.
        for room in (least - peak // 100, least):
            for variant in self._with_no_larger_loss(candidate):
                if solved := self._within(variant, room):
                    best = min(solved, key=variant.seconds)
                    return with_blocks(dataclasses.replace(candidate, profiles=variant), best)
        rows = candidate.choices.loss_chunk
        if rows is None or rows <= SMALL_LOSS or missing > FRAGMENTED * peak:
            return None
        # This changes nothing in the profiles, but smaller pieces leave smaller gaps.
        choices = dataclasses.replace(candidate.choices, loss_chunk=SMALL_LOSS)
        return dataclasses.replace(candidate, choices=choices)

    def _with_no_larger_loss(self, candidate: Candidate) -> list[OptionProfiles]:
        """Its profiles, with fewer and fewer rows of the loss at a time."""
        profiles, rows = candidate.profiles, candidate.choices.loss_chunk
        if rows is None:
            return [profiles]
        variants = next(s for _, s in self._variants.values() if any(v is profiles for v in s))
        smaller = {
            chunk: one
            for one in variants
            if (chunk := one.choices.loss_chunk) is not None and chunk <= rows
            if one.choices.launched_at_once == candidate.choices.launched_at_once
        }
        return [smaller[chunk] for chunk in sorted(smaller, reverse=True)]

    def _check_until_one_fits(self) -> tuple[float, Verdict, Candidate] | None:
        """Check the fastest candidate; if it fails, solve again with that much less room."""
        rooms = self._rooms()
        best: tuple[float, Verdict, Candidate] | None = None
        checked: set[str] = set()
        rival: Candidate | None = None
        for _ in range(MOST_CHECKS):
            if rival is not None and best is not None and not self._beats(rival, best[0]):
                rival = None
            candidate = rival or self._fastest(rooms, checked)
            if candidate is None and best is None:
                candidate = self._fastest_of_more(rooms, checked)
            if candidate is None or (best is not None and not self._beats(candidate, best[0])):
                break
            checked.add(str(candidate.choices))
            room = rooms[kind_of(candidate.choices)]
            to_beat = best[0] if best is not None else math.inf
            rival = self._rival(rooms, checked, kind_of(candidate.choices), to_beat)
            rivals = [rival.choices] if rival is not None else []
            verdict, candidate = self._checker.look_into(candidate, rivals)
            if verdict.refuses_capture:
                self._refuses_capture = True
                self.notes.append("no CUDA graph is captured: the forward reads its data")
                continue
            if self._like is not None and self._missing_on_host(verdict):
                # The share of state on disk is settled; where blocks are offloaded to is not.
                if not candidate.choices.offloaded:
                    continue
                verdict, candidate = self._checker.look_into(_offloaded_to_disk(candidate), ())
                if self._missing_on_host(verdict):
                    continue
            if candidate.rehearsed is not None:
                self._slower[variant_of(candidate.choices)] = (
                    candidate.rehearsed / candidate.seconds
                )
            if verdict.fits:
                # Cleaning up the cache takes time in every step: with a little less room the step
                # may be faster. For plans that offload, `refine` looks into that later.
                seconds = candidate.rehearsed or self._rehearsed_seconds(verdict, candidate)
                if best is None or seconds < best[0]:
                    best = (seconds, verdict, candidate)
                if candidate.rehearsed is not None:
                    continue  # copies take longer than predicted: another may be faster
                if not verdict.step_retries or best[0] < seconds:
                    break
                missing = room // 100
            elif best is not None and candidate.rehearsed is None:
                break
            else:
                limit = self._checker.limit(candidate.choices.leaves)
                missing = max(verdict.smallest_budget - limit, room // 200)
            tried = candidate.solution.peak
            smaller, lean = min(room, tried) - missing, self._leanest(kind_of(candidate.choices))
            # Fragmentation varies: the leanest is tried before a kind is given up.
            rooms[kind_of(candidate.choices)] = lean if smaller < lean < tried else smaller
        return best

    def _fastest_of_more(self, rooms: Rooms, checked: set[str]) -> Candidate | None:
        """The fastest of the variants skipped so far as too slow, if no other passed its check."""
        more = [[*self._put_off], *([size] for size in self._unprofiled)]
        for sizes in more:
            for size in sizes:
                if size in self._unprofiled:
                    self._unprofiled.remove(size)
                if not self._has_no_room_for_gradients(size):
                    self._profile_size(size)
            if sizes and (candidate := self._fastest(rooms, checked)) is not None:
                return candidate
        return None

    def _beats(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a check may find the candidate faster, by enough to be worth the check."""
        return self._expected(candidate) < (WORTH_IT if self._leaving else 1.0) * seconds

    def _rival(
        self, rooms: Rooms, checked: set[str], kind: Kind, to_beat: float
    ) -> Candidate | None:
        """The best candidate of another kind, to check beside this one: results are unrelated."""
        rival = self._fastest(rooms, checked, but=kind) if self._leaving else None
        return rival if rival is not None and self._beats(rival, to_beat) else None

    def _leanest(self, kind: Kind) -> int:
        """The smallest peak of all profiles of a kind."""
        return min(
            leanest(variant.chain).peak
            for profiles in self.profiles
            for variant in self._chunked(profiles)
            if kind_of(variant.choices) == kind
        )

    def _fastest(
        self, rooms: Rooms, without: set[str], but: Kind | None = None
    ) -> Candidate | None:
        """The fastest candidate that fits its room, is unchecked and is not of kind `but`."""
        like = self._like
        found = [
            candidate
            for profiles in self.profiles
            if profiles.choices.leaves is self._leaving
            if like is None or profiles.choices.fixed_part == like
            for candidate in self._solutions(profiles, rooms)
            if str(candidate.choices) not in without and kind_of(candidate.choices) != but
            if not (candidate.choices.launched_at_once and self._refuses_capture)
        ]
        return min(found, key=lambda one: (self._expected(one), one.number), default=None)

    def _expected(self, candidate: Candidate) -> float:
        """Its seconds, corrected by the delays from copies in checks of similar variants."""
        if not candidate.choices.leaves:
            return candidate.seconds
        variant = variant_of(candidate.choices)
        alike = [slower for other, slower in self._slower.items() if other[:-1] == variant[:-1]]
        least = min(alike or self._slower.values(), default=1.0)
        return candidate.seconds * self._slower.get(variant, least)

    def _refuse(self) -> tuple[Verdict, Candidate]:
        """Return the leanest plan if it fits after all; otherwise raise, saying what it needs."""
        verdict, candidate = self._check_leanest()
        if verdict.fits:
            return verdict, candidate
        if (fitting := self._on_top.make_fit(candidate)) is not None:
            return fitting
        need = self._checker.budget_for(verdict.smallest_budget, candidate.choices.leaves)
        raise DoesNotFit(
            f"no plan fits {format_bytes(self.budget)}: the leanest needs {format_bytes(need)}"
            f" ({self._advice()})",
            need,
        )

    def _refuse_host(self, missing: int) -> tuple[Verdict, Candidate]:
        """Return the leanest plan without offloading, or raise an error with what is missing."""
        assert self.gpu is not None and self.host is not None
        need, disk = self.gpu.memory, "with what the run has on the disk"
        if self._like is None:
            disk = "even with all on the disk that can wait there"
            self._leaving = False
            verdict, candidate = self._check_leanest()
            if verdict.fits:
                return verdict, candidate
            need = verdict.smallest_budget
        raise HostTooSmall(
            f"no plan fits {format_bytes(self.budget)} and {format_bytes(self.host)} of host"
            f" memory: {disk}, {format_bytes(missing)} of host memory is missing (that much more, a"
            f" smaller model, or {format_bytes(need)} on the GPU, where nothing has to leave it,"
            " would do)",
            need,
            missing,
        )

    def _check_leanest(self) -> tuple[Verdict, Candidate]:
        sizes = self._micro_batches()
        self._weights = None
        # Only a whole batch can step in backward; the smallest part has the fewest activations.
        profiles = [
            one
            for size in dict.fromkeys((sizes[0], sizes[-1]))
            for one in self._profile_size(size, wants_leanest=True)
        ]
        lean = [
            self._candidate(variant, leanest(variant.chain))
            for one in profiles
            for variant in self._chunked(one)
        ]
        return self._checker.check(min(lean, key=lambda one: one.solution.peak))

    def _advice(self) -> str:
        if advice := self._space.disallowed():
            return advice
        return "a shorter sequence, a smaller model or a larger card would do"

    # -- in the second process --------------------------------------------------------------------

    def _answer(self, question: Any) -> Any:
        """Answer a question built by `question`, in numbers and names."""
        what, values = question
        choices = Choices.from_dict(values)
        if what == PROFILE:
            return to_plain(self._profile_options(choices))
        if what == PRICE:
            return price(self.job, self.gpu, self.clock, choices)
        return self._checker.answer(what, choices)

    # -- saying it --------------------------------------------------------------------------------

    def _changes(self, candidate: Candidate, estimate: Estimate) -> tuple[Change, ...]:
        self.say("pricing each change")
        return describe_changes(
            self.job,
            self.gpu,
            self.clock,
            self._untouched(),
            candidate.choices,
            estimate.timeline,
            self._pricing.price_all,
        )

    def _untouched(self) -> Choices:
        """The job as it is."""
        blocks = {block.path: KEEP for block in self.found.blocks}
        if self.job.checkpointing == "full" or self.found.checkpoints_itself:
            blocks = dict.fromkeys(blocks, RECOMPUTE)
        return Choices(
            precision=self.job.precision, micro_batch=self.job.micro_batch, blocks=blocks
        )

    def _report(
        self,
        candidate: Candidate,
        estimate: Estimate,
        changes: tuple[Change, ...],
        planning_seconds: float,
    ) -> Plan:
        assert self.made_for is not None
        if self.found.draws_random_numbers and candidate.choices.micro_batch not in (
            None,
            self.job.micro_batch,
        ):
            self.notes.append(
                "micro-batches draw other random numbers than the whole batch would; each is as"
                " random"
            )
        if self._uncompiled and not candidate.choices.compiled:
            some = next(iter(self._uncompiled.values()))
            reason = self._uncompiled.get(candidate.choices.weights, some)
            self.notes.append(f"blocks are not compiled: {reason}")
        unlimited = self._unlimited()
        seconds = candidate.rehearsed or candidate.profiles.seconds(candidate.solution)
        choices = candidate.choices
        sizes = size_notes(self.odd_sizes, choices.head if choices.loss_chunk is not None else None)
        return Plan(
            made_for=self.made_for,
            budget=self.budget,
            choices=choices,
            predicted=Predicted(
                peak=estimate.peak,
                host=estimate.timeline.host_bytes,
                disk=estimate.timeline.disk_bytes,
                # Under the budget, the allocator releases memory that it would otherwise cache.
                high=min(estimate.interval["device"].high, self.budget),
                categories_at_peak=estimate.categories_at_peak,
                seconds=seconds,
                unlimited_seconds=min(unlimited, seconds),
                samples=batch_size(self.batch),
                tokens=self._tokens(),
            ),
            fidelity=max(
                (change.fidelity for change in changes),
                key=list(Fidelity).index,
                default=Fidelity.EXACT,
            ),
            gap=candidate.solution.gap,
            changes=changes,
            notes=tuple(dict.fromkeys((*self.notes, *sizes, *estimate.notes))),
            planning_seconds=planning_seconds,
            checked=estimate,
        )

    def _tokens(self) -> int:
        """Tokens in a global batch; 0 if nothing in it looks like tokens."""
        return max(
            (
                leaf.numel()
                for leaf in tensors_of(self.batch)
                if not leaf.is_floating_point() and leaf.dim() == 2
            ),
            default=0,
        )


def _without_copies(candidate: Candidate) -> float:
    return candidate.profiles.seconds_without_copies(candidate.solution)


def _offloaded_to_disk(candidate: Candidate) -> Candidate:
    choices = dataclasses.replace(candidate.choices, offloaded_to="disk")
    return dataclasses.replace(candidate, choices=choices)


def _size_of(base: Choices) -> dict[str, Any]:
    """Choices that go with a micro-batch size."""
    return {"micro_batch": base.micro_batch, "loss_chunk": base.loss_chunk}
