"""The planner: the fastest choices that fit a budget, each checked before anyone sees it.

Around the solver stands a small search: sizes of the micro-batch, ways to hold the weights, chunks
of the loss. Each is heard once (`audition`), which also prices what rivals do (keep everything,
recompute everything, save the matrix products): those are points of the solver's own problem, so no
plan is slower than theirs by the same clock. The fastest candidates are then rehearsed as a whole
and replayed through the allocator under the budget (rule 2); one that fails is solved again with
less room.
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
from oomph.estimation import Estimate
from oomph.gpus import GPU, find_gpu
from oomph.gpus.profile import load_profile
from oomph.job import Job, batch_size, make_batch
from oomph.planning.audition import (
    Audition,
    NotInBackward,
    audition,
    count_parts,
    late_state,
)
from oomph.planning.audition_json import from_plain, to_plain
from oomph.planning.block_timer import BlockTimer
from oomph.planning.candidates import (
    Candidate,
    Kind,
    PartTimes,
    Rooms,
    Verdict,
    Way,
    kind_of,
    least_seconds,
    leaves_no_more,
    way_of,
    with_blocks,
)
from oomph.planning.changes import describe_changes, price, to_be_priced
from oomph.planning.checker import Checker, Found, Say
from oomph.planning.choices import KEEP, MASTERS, RECOMPUTE, Choices, Weights
from oomph.planning.hardware_notes import OddSize, odd_sizes, size_notes
from oomph.planning.host_room import make_host_room
from oomph.planning.plan import Change, MadeFor, Plan, Predicted
from oomph.planning.pricing import Pricing
from oomph.planning.questions import HEAR, PRICE, question
from oomph.planning.real_clock import RealClock
from oomph.planning.refining import WORTH_IT, Tried, refine
from oomph.planning.second_process import SecondProcess
from oomph.planning.solver import Solution, leanest, solve
from oomph.planning.survey import survey
from oomph.planning.trials import Trials
from oomph.planning.ways import Ways, stepping_later, tensors_of
from oomph.rehearsal.compiled import forget_compiled
from oomph.rehearsal.garbage import only_new_garbage
from oomph.techniques.technique import Fidelity
from oomph.timing.clock import Clock
from oomph.units import format_bytes, parse_bytes

#: Rows of logits that may exist at a time; the largest that fits is the fastest.
LOSS_CHUNKS = (16384, 8192, 4096, 2048, 1024, 512)
#: Rows that are tried where gaps between large pieces take too much, and the part of a peak that
#: these may be.
SMALL_LOSS, FRAGMENTED = 2048, 0.05
#: How much faster a plan with other weights must be to be preferred.
FORMAT_HANDICAP = 1.02
#: How much faster a size of micro-batch must be able to get to be heard at all.
WORTH_HEARING = 1e-6
#: The part of the budget that is left for fragmentation before any plan is checked.
FIRST_MARGIN = 0.015
#: The same where something leaves the GPU, and what is on its way takes memory, too.
LEAVING_MARGIN = 0.05
#: How much slower than without a limit a plan must be for others to leave the GPU.
LEAVE_FROM = 1.1
#: How much slower than with everything kept a plan may be for nothing more to leave the GPU.
FAST_ENOUGH = 1.02
#: How much slower than the fastest that was heard a way must be, at least, not to be heard itself.
HOPELESS = 1.2
#: Seconds that a byte which blocks move is taken for, as shares of what the link takes.
PRICES = (0.0, 0.5, 1.0)
#: Seconds that such a byte is taken for where host memory is short: only what must moves.
DEAR = 1e-6
#: Bytes of a parameter's gradient, at least, and where it has a master in fp32.
LEAST_GRADIENT, MASTER_GRADIENT = 2, 4
#: What it takes to give cached memory back and ask for it anew: an H200 stood idle for 9 and for
#: 20 ms in two steps that had about three of these each.
RETRY_SECONDS = 5e-3
#: How often a plan that failed its check is solved again with less room.
MOST_CHECKS = 12
#: How many ways to run blocks are timed for real, at most.
MOST_TIMED = 4

#: How many that seemed to fit at a glance are checked, at most.
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
    """The fastest plan for `job` that stays inside `budget` on `gpu`, with no GPU needed.

    Without `gpu` the plan is for the CPU. `allow` is how far its numbers may be from the untouched
    job's. With a `timer` the blocks of the best plan are timed for real. `host` is the host memory
    that what leaves the GPU may take; state, gradients, weights and what blocks save wait on the
    disk where there is no room. Raises `DoesNotFit`, which carries the smallest budget that would
    do.
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
    """Who makes the plan, and keeps what it heard on the way for plans within other budgets."""
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
    """A loss that takes a whole batch fails with a part of it, as one that compares its halves."""


@dataclass(kw_only=True)
class Planner:
    """Plans one job within one budget after the other; what was heard once is not heard again."""

    job: Job
    gpu: GPU | None
    budget: int
    allow: Fidelity
    compiles: bool
    timer: BlockTimer | None
    host: int | None
    """Host memory that a plan may take; None where there is no limit."""
    say: Say
    notes: list[str] = dataclasses.field(default_factory=list)
    heard: list[Audition] = dataclasses.field(default_factory=list)
    odd_sizes: list[OddSize] = dataclasses.field(default_factory=list)
    made_for: MadeFor | None = None
    _weights: Weights | None = None
    """The way to hold the weights that was best for the first size."""
    _leaving: bool = False
    """Whether what leaves the GPU is heard."""
    _refuses_capture: bool = False
    """Whether the model's forward reads its data, so that no CUDA graph can be made of it."""
    _like: Choices | None = None
    """What all plans share from now on; None while there is no plan yet."""
    _told: list[Audition] = dataclasses.field(default_factory=list)
    """What was heard, by the clock alone."""
    _real: RealClock = dataclasses.field(init=False)
    _slower: dict[Way, float] = dataclasses.field(default_factory=dict)
    """By the way to run the job: rehearsed seconds over those that its audition gave."""
    _variants: dict[int, tuple[Audition, list[Audition]]] = dataclasses.field(default_factory=dict)
    """By the identity of an audition: itself, and the same with other chunks of the loss."""
    _checker: Checker = dataclasses.field(init=False, repr=False)
    _pricing: Pricing = dataclasses.field(init=False, repr=False)
    _uncompiled: dict[Weights, str] = dataclasses.field(default_factory=dict)
    """By the way to hold the weights with which blocks cannot be compiled: why not."""
    _put_off: dict[int | None, float] = dataclasses.field(default_factory=dict)
    """By size of micro-batch: what the ways to run it that were not heard take at least."""
    _unheard: list[int | None] = dataclasses.field(default_factory=list)
    """Sizes of micro-batch that could not win by what was heard of others, the largest first."""
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _second: SecondProcess = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._real = RealClock(timer=self.timer)
        self._second = SecondProcess(self._answer)

    @only_new_garbage()
    def plan(self) -> Plan:
        """The fastest plan within the budget."""
        began = time.perf_counter()
        try:
            self._look()
            estimate, candidate = self._find()
            changes = self._changes(candidate, estimate)
        finally:
            self._second.close()
            forget_compiled()
        return self._report(candidate, estimate, changes, time.perf_counter() - began)

    @only_new_garbage()
    def plan_like(self, plan: Plan, budget: int) -> Plan:
        """The fastest plan within another budget whose numbers are made of the same as `plan`'s.

        It lists no changes: what each of them saves is not looked into.
        """
        began = time.perf_counter()
        self.budget, self._like = budget, plan.choices.lasting
        self._leaving = self._like.leaves  # blocks leave only beside their optimizer
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
            self.batch = make_batch(self.job)
            self.notes += self.found.left_alone
            if self.found.whole_because:
                self._keep_whole(self.found.whole_because)
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
        """The fastest that fits; in one part, where it turns out that the batch has none."""
        try:
            self._hear_all()
            if self._like is None:
                self._time_the_best()
            return self._choose()
        except CannotSplit as error:
            self._keep_whole(f"parts of it fail, {error}")
            self._second.close()  # it believes in parts
            self._leaving = self._like.leaves if self._like is not None else False
            self._weights = None
            return self._find()

    def _keep_whole(self, reason: str) -> None:
        self.found = dataclasses.replace(self.found, whole_because=reason)
        self.notes.append(f"the batch is not split: {reason}")

    def _remember(self, model: nn.Module, optimizer: Any) -> None:
        gpu = self.gpu.name if self.gpu is not None else None
        self.made_for = MadeFor.of(self.job.name, model, make_batch(self.job), optimizer, gpu)
        self.odd_sizes = odd_sizes(model, self.job.precision, self.gpu)

    # -- what could be done -----------------------------------------------------------------------

    def _hear_all(self, to_beat: float = math.inf) -> None:
        """Hear every way to run the job that may win, and be faster than what there is."""
        sizes = self._micro_batches()
        self._put_off.clear()
        self._unheard = list(sizes)
        times: dict[int, PartTimes] = {}
        best, best_at = to_beat, 0

        def hear(at: int) -> None:
            nonlocal best, best_at
            self._unheard.remove(sizes[at])
            heard = self._hear_size(sizes[at], to_beat=best)
            rooms = self._rooms()
            solved = min((one for h in heard for one in self._solutions(h, rooms)), default=None)
            fastest = min(variant.fastest for one in heard for variant in self._chunked(one))
            seconds = math.inf
            if solved is not None:
                seconds = solved.heard.seconds(solved.solution)
                self._weights = self._weights or solved.choices.weights
            if seconds < best:
                best, best_at = seconds, at
            solved_at_least = min(seconds, self._put_off.get(sizes[at], math.inf))
            times[heard[0].parts] = PartTimes(fastest=fastest, solved=solved_at_least)

        def may_win(at: int) -> bool:
            if self._has_no_room_for_gradients(sizes[at]):
                return False
            parts = count_parts(self.job, sizes[at])
            least = least_seconds(parts, times, leaves=self._leaving)
            if self._leaving and parts > 1:
                told = (self._told_by_whole(base) for base in self._bases(sizes[at]))
                return max(least, min(told, default=math.inf)) < WORTH_IT * best
            return least * (1 + WORTH_HEARING) < best

        # From one part to two is the largest step where something leaves the GPU.
        for at in range(0, len(sizes), 1 if self._leaving else 2):
            if may_win(at):
                if at and best_at + 1 < at and may_win(best_at + 1):  # which comes after all these
                    self._second.ask([question(HEAR, self._bases(sizes[best_at + 1])[0])])
                hear(at)
        for at in (best_at - 1, best_at + 1):
            if 0 < at < len(sizes) and at % 2 and not self._leaving and may_win(at):
                hear(at)

    def _has_no_room_for_gradients(self, size: int | None) -> bool:
        """Whether parts of this size cannot fit: no step is made before all gradients are there."""
        lasting = [heard.lasting for heard in self.heard if not heard.choices.leaves]
        if size is None or self._leaving or not lasting:
            return False
        gradients = LEAST_GRADIENT * self.found.trainable
        return min(lasting) + gradients > self._rooms()[kind_of(Choices(micro_batch=size))]

    def _keeps_too_much(self, base: Choices) -> bool:
        """Whether the weights and gradients that do not leave the GPU cannot fit it."""
        if not base.leaves or not self._ways.gradients_wait(base) or base.gradient_room is not None:
            return False
        lasting = [
            one.lasting
            for one in self.heard
            if one.choices.leaves and one.choices.weights == base.weights
            if one.choices.weights_away == base.weights_away
        ]
        stays = max(self._staying(base)(base), *lasting[:1], 0)
        each = MASTER_GRADIENT if base.weights == MASTERS else LEAST_GRADIENT
        return stays + each * self.found.trainable > self._rooms()[kind_of(base)]

    def _unlimited(self) -> float:
        """Seconds of a step if memory did not matter."""
        return min(
            one.fastest
            for heard in self.heard
            for one in self._chunked(heard)
            if not (one.choices.cuda_graph and self._refuses_capture)
        )

    @property
    def _ways(self) -> Ways:
        """As they are by what was found out so far."""
        return Ways(
            job=self.job,
            gpu=self.gpu,
            batch=self.batch,
            found=self.found,
            allow=self.allow,
            compiles=self.compiles,
            uncompiled=self._uncompiled,
            host=self.host,
        )

    def _micro_batches(self) -> list[int | None]:
        return self._ways.sizes

    def _bases(self, size: int | None) -> list[Choices]:
        """Choices of everything but the blocks, for one size of micro-batch."""
        if self._like is not None:
            return stepping_later(self._ways.with_size(self._like, size))
        if not self._leaving:
            return self._ways.staying(size, self._weights)
        ways = self._ways.leaving(size, self._weights)
        return [way for way in ways if not self._keeps_too_much(way)]

    # -- hearing and solving ----------------------------------------------------------------------

    def _hear_size(
        self, size: int | None, to_beat: float = math.inf, *, wants_leanest: bool = False
    ) -> list[Audition]:
        """Hear the ways to run one size of micro-batch, but for those heard before.

        What takes much longer than `to_beat` even where memory does not matter is put off; and who
        `wants_leanest` hears ways that are slower than others, too.
        """
        heard: list[Audition] = []
        self._put_off.pop(size, None)
        bases = self._bases(size)
        self._hear_beside(bases)
        for base in bases:
            if not wants_leanest and self._is_no_faster(heard, base):
                continue
            before = next((one for one in self.heard if one.choices == base), None)
            least = max(self._takes_at_least(heard, base), self._told_by_whole(base))
            # Parts of a batch add their gradients up on the way: copies cost them more, not less.
            hopeless = to_beat if base.micro_batch is not None else HOPELESS * to_beat
            if before is None and least > hopeless:
                self._put_off[size] = min(least, self._put_off.get(size, math.inf))
                continue
            one = before or self._hear(base)
            if one is None:
                self._second.close()  # it believes in what turned out to be different
                if base.compiled and base.weights in self._uncompiled:
                    self.heard += [it for it in heard if it not in self.heard]  # as true as before
                return self._hear_size(size, to_beat, wants_leanest=wants_leanest)
            if before is None:
                self._told.append(one)
                one = self._by_real_clock(one)
            heard.append(one)
        self.heard += [one for one in heard if one not in self.heard]
        return heard

    def _is_no_faster(self, heard: list[Audition], base: Choices) -> bool:
        """Whether it can be told to be, by those heard before."""
        if base.leaves and self._is_fast_enough(heard, base.weights):
            return True
        if base.leaves and self._comes_too_late(heard, base):
            return True
        return self._is_slower_later(heard, base)

    def _hear_beside(self, bases: Sequence[Choices]) -> None:
        """Have the second process hear those that the first comes to later."""
        if self._leaving:
            likely = bases[1:2]
        else:
            # Steps that come later are mostly known to be slower by then.
            others = [base for base in bases if base.weights != bases[0].weights]
            likely = [base for base in others if base.optimizer_in_backward]
        known = [one.choices for one in self.heard]
        self._second.ask([question(HEAR, base) for base in likely if base not in known])

    def _takes_at_least(self, heard: list[Audition], base: Choices) -> float:
        """Seconds of a step by what was heard with less on its way: the kernels are the same."""
        # Where the card waits for launches, what is told says little of what copies cost.
        alike = [
            one
            for one in heard
            if base.leaves and not one.waits_for_launches and leaves_no_more(one.choices, base)
        ]
        return max(
            (min(variant.fastest for variant in self._chunked(one)) for one in alike), default=0.0
        )

    def _told_by_whole(self, base: Choices) -> float:
        """Seconds of a step in parts, about, by what was heard of the whole batch."""
        parts = count_parts(self.job, base.micro_batch)
        if not base.leaves or parts == 1:
            return 0.0
        late = late_state(self.job, self.found, base)
        room = base.gradient_room
        away = self._ways.gradient_bytes(base) - room if room is not None else 0
        return max(
            (
                one.fastest_with(parts=parts, late=late, gradients=away)
                for one in self.heard
                if one.choices.leaves and one.parts == 1 and not one.waits_for_launches
                if one.choices.gradient_room is None
                if leaves_no_more(dataclasses.replace(one.choices, **_size_of(base)), base)
            ),
            default=0.0,
        )

    def _is_fast_enough(self, heard: list[Audition], weights: Weights) -> bool:
        """Whether nothing is gained by what leaves the GPU beside all that left it in these."""
        rooms = self._rooms()
        return any(
            candidate.heard.seconds(candidate.solution) <= FAST_ENOUGH * one.fastest
            for one in heard
            if one.choices.leaves and one.choices.weights == weights
            for candidate in self._solutions(one, rooms)
        )

    def _comes_too_late(self, heard: list[Audition], base: Choices) -> bool:
        """Whether state waits for longer than what others take, even with more of it ahead."""
        late = late_state(self.job, self.found, base)
        like = [
            one.fastest_with(parts=one.parts, late=late)
            for one in heard
            if one.choices.state_ahead > base.state_ahead
            and dataclasses.replace(one.choices, state_ahead=base.state_ahead) == base
        ]
        rooms = self._rooms()
        return bool(like) and any(
            candidate.heard.seconds(candidate.solution) <= max(like)
            for one in heard
            if one.choices.leaves
            for candidate in self._solutions(one, rooms)
        )

    def _is_slower_later(self, heard: list[Audition], base: Choices) -> bool:
        """Whether the step is better made inside backward, which takes less memory.

        Not if the card waits for the host there, or if there is memory to spare.
        """
        rooms = self._rooms()
        return any(
            one.choices.optimizer_in_backward
            and dataclasses.replace(one.choices, optimizer_in_backward=False) == base
            and not one.waits
            and all(
                candidate.heard.seconds(candidate.solution) > candidate.heard.fastest
                for candidate in self._solutions(one, rooms)
            )
            for one in heard
        )

    def _hear(self, base: Choices) -> Audition | None:
        """Hear one way; None where it cannot be gone, which is noted and not tried again."""
        size = base.micro_batch or batch_size(self.batch)
        self.say(f"trying micro-batches of {size}")
        told = self._second.answer(question(HEAR, base))
        try:
            heard = from_plain(told) if told is not None else self._audition(base)
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
        if base.head and not heard.loss_is_chunked:
            self.notes.append(
                f"the loss is not chunked: what {base.head} gives is used for more than"
                " cross_entropy"
            )
            self.found = dataclasses.replace(self.found, heads={})
            return None
        return heard

    def _check_split(self, base: Choices, error: CannotRehearse) -> None:
        """Raise `CannotSplit` where it is a part of a batch by itself that fails, not the whole."""
        if base.micro_batch in (None, self.job.micro_batch):
            return
        plain = Choices(precision=base.precision, generation_cache=base.generation_cache)
        for size in (None, base.micro_batch):
            try:
                tried = dataclasses.replace(plain, micro_batch=size)
                price(self.job, self.gpu, self.clock, tried)
            except CannotRehearse as failed:
                if size is None:
                    return
                raise CannotSplit(str(failed)) from error

    def _audition(self, base: Choices) -> Audition:
        return audition(self.job, self.gpu, self.clock, self.found, base)

    def _solutions(self, heard: Audition, rooms: Rooms) -> Iterator[Candidate]:
        """The fastest for each chunk of the loss that leaves one."""
        for variant in self._chunked(heard):
            room = rooms[kind_of(variant.choices)]
            for solution in self._within(variant, room):
                yield self._candidate(variant, solution)

    def _within(self, heard: Audition, room: int) -> list[Solution]:
        """The fastest in so much room; where the link is busy, some that move less."""
        if room not in heard.solved:
            prices = [0.0]
            if heard.copies is not None and heard.choices.leaves:
                # Bytes that blocks move have a price: dear ones make blocks move less.
                prices = [price / heard.copies.rates.slower for price in PRICES]
            chains = [heard.priced(price) for price in prices]
            if heard.waits_for_launches:
                chains.append(heard.launched)
            solved = [solve(chain, room) for chain in chains]
            heard.solved[room] = list(dict.fromkeys(filter(None, solved)))
        return heard.solved[room]

    def _candidate(self, heard: Audition, solution: Solution) -> Candidate:
        # Another number format must buy something.
        handicap = 1.0 if heard.choices.weights == "own" else FORMAT_HANDICAP
        return Candidate(
            seconds=heard.seconds(solution) * handicap,
            number=next(self._numbers),
            heard=heard,
            solution=solution,
            choices=heard.choose(solution),
        )

    def _rooms(self) -> Rooms:
        """What tensors may take of the budget, before fragmentation is known."""
        room = self.budget
        if self.gpu is not None:
            margin = LEAVING_MARGIN if self._leaving else FIRST_MARGIN
            room = int((self._checker.limit(self._leaving) - self._checker.hidden) * (1 - margin))
        return defaultdict(lambda: room)

    def _chunked(self, heard: Audition) -> list[Audition]:
        """The same step with other chunks of the loss, without hearing it again."""
        if id(heard) not in self._variants:
            self._variants[id(heard)] = heard, self._make_variants(heard)
        return self._variants[id(heard)][1]

    def _make_variants(self, heard: Audition) -> list[Audition]:
        if heard.graphed is not None:
            plain = dataclasses.replace(heard, graphed=None)
            return [*self._make_variants(plain), *self._make_variants(heard.graphed)]
        base = heard.choices
        if not base.head or base.loss_chunk is None:
            return [heard]
        width, depth = self.found.heads[base.head]
        rows = self._ways.rows(base.micro_batch)
        sizes = [size for size in LOSS_CHUNKS if size < rows]
        element = 4 if base.precision in ("fp32", "tf32") else 2
        variants = []
        for size in [rows, *sizes]:
            more_bytes = (size - base.loss_chunk) * width * element
            # Each chunk reads and writes the sum of the weight's gradients once more.
            more_chunks = math.ceil(rows / size) - math.ceil(rows / base.loss_chunk)
            more_seconds = more_chunks * self.clock.moving(2 * 4 * width * depth)
            variants.append(heard.with_loss(size, more_bytes, more_seconds))
        return variants

    def _time_the_best(self) -> None:
        """Replace the clock's seconds by real ones, until what is fastest was timed itself."""
        if self.timer is None or not self.found.blocks:
            return
        for _ in range(MOST_TIMED):
            best = self._fastest(self._rooms(), set())
            if best is None or self._real.knows(best.choices):
                return
            self.say("timing blocks")
            told = self._told_of_blocks(best.heard.choices)
            self._real.time(best.choices, told, self.found)
            self.heard = [self._by_real_clock(one) for one in self._told]

    def _told_of_blocks(self, choices: Choices) -> Audition:
        """What the clock says of blocks that are run like this, by themselves."""
        plain = dataclasses.replace(choices, optimizer_in_backward=False, cuda_graph=False)
        for one in self._told:
            # What was heard with one chunk of the loss tells of blocks with all.
            if dataclasses.replace(one.choices, loss_chunk=choices.loss_chunk) == plain:
                return one
        return self._audition(plain)

    def _by_real_clock(self, told: Audition) -> Audition:
        return self._real.correct(told, batch_size(self.batch))

    # -- checking ---------------------------------------------------------------------------------

    def _choose(self) -> tuple[Estimate, Candidate]:
        """The fastest that passes its check; where it is slow for it, with what leaves the GPU."""
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
        self._second.close()  # the next one begins with the graphs that were traced here
        self._hear_all(to_beat=to_beat)
        found = self._check_until_one_fits()
        leaves = found[1:] if found is not None else None
        # With less to copy it may be as fast as its kernels.
        is_refined = leaves is not None and _without_copies(leaves[1]) < to_beat
        if leaves is not None and is_refined:
            leaves = self._refined(*leaves)
        if stays is None and to_beat < math.inf and self._counts(leaves) > to_beat:
            self._leaving = False
            stays = self._check_until_one_fits()
            self._leaving = True
        if stays is None and leaves is not None and leaves[1].choices.waits_on_disk:
            # As slow as a disk is, the leanest that stays on the GPU may be faster.
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
        """With its check, where host memory has room for it."""
        missing = self._missing_on_host(found[0])
        return self._checker.confirmed(self._refuse_host(missing)[1] if missing else found[1])

    def _counts(self, leaves: Found | None) -> float:
        """Its seconds, if it can be had at all: with the disk it may have become slow."""
        if leaves is None or self._missing_on_host(leaves[0]):
            return math.inf
        return self._rehearsed_seconds(*leaves)

    def _is_slow(self, seconds: float) -> bool:
        """Whether what leaves the GPU is looked into for it."""
        return seconds > LEAVE_FROM * self._unlimited()

    def _missing_on_host(self, verdict: Verdict) -> int:
        """Bytes of host memory that a plan needs and may not take."""
        return max(verdict.host - self.host, 0) if self.host is not None else 0

    def _refined(self, verdict: Verdict, candidate: Candidate) -> tuple[Verdict, Candidate]:
        """The same with what is better tried than heard."""
        if candidate.choices.optimizer_on == "gpu" or self._like is not None:
            return verdict, candidate
        assert self.gpu is not None and candidate.rehearsed is not None
        trials = Trials(
            look_into=self._checker.glance_at,
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
            gradients=self._ways.gradient_bytes(candidate.choices),
            first=self.found.first / self.found.trainable,
            host_steps=profile is not None
            and profile.host_adam is not None
            and self.allow.allows(Fidelity.ROUNDING),
        )
        if self.host is not None and best.host > self.host:
            # From what passes its check: what fails it would do so with less in host memory, too.
            best = trials.begin(*(self._confirmed(trials, best, None) or (verdict, candidate)))
            lighter = self._moving_less(trials.who_has(best.choices)[1])
            trials.add_blocks(lighter)
            best = make_host_room(best, lighter.choices, trials.attempt, self.host)
        return self._confirmed(trials, best, self.host) or (verdict, candidate)

    def _confirmed(self, trials: Trials, best: Tried, host: int | None) -> Found | None:
        """The fastest of what was tried that passes its check, or does with the room it lacks."""
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
        """Its check, while the second process begins to price its changes."""
        choices = candidate.choices
        wanted = to_be_priced(self._untouched(), choices)
        self._pricing.begin_beside_a_check(choices, wanted)
        return self._checker.check(candidate)

    def _staying(self, like: Choices) -> Callable[[Choices], int]:
        """Bytes of state, and of blocks' weights, that others like these leave on the GPU."""
        state = self._state_bytes(like)
        halved = like.weights == MASTERS or like.precision == "bf16"
        weights = {one.path: (2 if halved else 4) * one.parameters for one in self.found.blocks}

        def staying(choices: Choices) -> int:
            away = sum(weights[path] for path in choices.weights_away)
            return int(choices.gpu_share * state) + sum(weights.values()) - away

        return staying

    def _state_bytes(self, choices: Choices) -> int:
        """Bytes of the optimizer's state, and masters, as what was heard without them tells."""
        whole, without = (
            [
                one.lasting
                for one in self.heard
                if one.choices.weights == choices.weights and not one.choices.weights_away
                if one.choices.leaves is leaves
            ]
            for leaves in (False, True)
        )
        return max(min(whole) - min(without), 0) if whole and without else 0

    def _moving_less(self, candidate: Candidate) -> Candidate:
        """The same with blocks that move only what they must, for the GPU to have room."""
        solution = solve(candidate.heard.priced(DEAR), candidate.solution.peak)
        return candidate if solution is None else with_blocks(candidate, solution)

    def _rehearsed_seconds(self, verdict: Verdict, candidate: Candidate) -> float:
        """With the time in which the allocator cleans up its cache."""
        seconds = candidate.rehearsed or candidate.seconds
        return seconds + verdict.step_retries * RETRY_SECONDS

    def _leaner(self, candidate: Candidate, missing: int) -> Candidate | None:
        """The same with so much more room: other ways to run the blocks, or a smaller loss."""
        peak = candidate.solution.peak
        least = peak - max(missing, 0)
        # A little more than that, if there is such a way, and with the same loss first.
        for room in (least - peak // 100, least):
            for variant in self._with_no_larger_loss(candidate):
                if solved := self._within(variant, room):
                    best = min(solved, key=variant.seconds)
                    return with_blocks(dataclasses.replace(candidate, heard=variant), best)
        rows = candidate.choices.loss_chunk
        if rows is None or rows <= SMALL_LOSS or missing > FRAGMENTED * peak:
            return None
        # By what was heard that changes nothing, but smaller pieces leave smaller gaps.
        choices = dataclasses.replace(candidate.choices, loss_chunk=SMALL_LOSS)
        return dataclasses.replace(candidate, choices=choices)

    def _with_no_larger_loss(self, candidate: Candidate) -> list[Audition]:
        """What was heard of it, with fewer and fewer rows of the loss at a time."""
        heard, rows = candidate.heard, candidate.choices.loss_chunk
        if rows is None:
            return [heard]
        variants = next(s for _, s in self._variants.values() if any(v is heard for v in s))
        smaller = {
            chunk: one
            for one in variants
            if (chunk := one.choices.loss_chunk) is not None and chunk <= rows
            if one.choices.cuda_graph == candidate.choices.cuda_graph
        }
        return [smaller[chunk] for chunk in sorted(smaller, reverse=True)]

    def _check_until_one_fits(self) -> tuple[float, Verdict, Candidate] | None:
        """Check the fastest, and where it fails solve all again with that much less room."""
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
                # The share of state on the disk is settled; where blocks are offloaded to is not.
                if not candidate.choices.offloaded:
                    continue
                verdict, candidate = self._checker.look_into(_offloaded_to_disk(candidate), ())
                if self._missing_on_host(verdict):
                    continue
            if candidate.rehearsed is not None:
                self._slower[way_of(candidate.choices)] = candidate.rehearsed / candidate.seconds
            if verdict.fits:
                # Cleaning up the cache in every step takes time: a little less room may be faster.
                # Where something leaves the GPU that is looked into later, see `refine`.
                seconds = candidate.rehearsed or self._rehearsed_seconds(verdict, candidate)
                if best is None or seconds < best[0]:
                    best = (seconds, verdict, candidate)
                if candidate.rehearsed is not None:
                    continue  # copies take longer than it seemed: another may be faster
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
            # Fragmentation is no fixed amount: the leanest is tried before a kind is given up.
            rooms[kind_of(candidate.choices)] = lean if smaller < lean < tried else smaller
        return best

    def _fastest_of_more(self, rooms: Rooms, checked: set[str]) -> Candidate | None:
        """The fastest of what seemed too slow to be heard, where nothing else passed its check."""
        more = [[*self._put_off], *([size] for size in self._unheard)]
        for sizes in more:
            for size in sizes:
                if size in self._unheard:
                    self._unheard.remove(size)
                if not self._has_no_room_for_gradients(size):
                    self._hear_size(size)
            if sizes and (candidate := self._fastest(rooms, checked)) is not None:
                return candidate
        return None

    def _beats(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a check may find it faster, by as much as a check is worth."""
        return self._expected(candidate) < (WORTH_IT if self._leaving else 1.0) * seconds

    def _rival(
        self, rooms: Rooms, checked: set[str], kind: Kind, to_beat: float
    ) -> Candidate | None:
        """What is checked beside one of this kind: whether that fits says nothing of it."""
        rival = self._fastest(rooms, checked, but=kind) if self._leaving else None
        return rival if rival is not None and self._beats(rival, to_beat) else None

    def _leanest(self, kind: Kind) -> int:
        """The smallest peak of all that was heard of a kind."""
        return min(
            leanest(variant.chain).peak
            for heard in self.heard
            for variant in self._chunked(heard)
            if kind_of(variant.choices) == kind
        )

    def _fastest(
        self, rooms: Rooms, without: set[str], but: Kind | None = None
    ) -> Candidate | None:
        """The fastest way to run the job in its room that was not checked yet, nor of a kind."""
        like = self._like
        found = [
            candidate
            for heard in self.heard
            if heard.choices.leaves is self._leaving
            if like is None or heard.choices.lasting == like
            for candidate in self._solutions(heard, rooms)
            if str(candidate.choices) not in without and kind_of(candidate.choices) != but
            if not (candidate.choices.cuda_graph and self._refuses_capture)
        ]
        return min(found, key=lambda one: (self._expected(one), one.number), default=None)

    def _expected(self, candidate: Candidate) -> float:
        """Its seconds, by how much longer copies took where its like was checked."""
        if not candidate.choices.leaves:
            return candidate.seconds
        way = way_of(candidate.choices)
        alike = [slower for other, slower in self._slower.items() if other[:-1] == way[:-1]]
        least = min(alike or self._slower.values(), default=1.0)
        return candidate.seconds * self._slower.get(way, least)

    def _refuse(self) -> tuple[Verdict, Candidate]:
        """The leanest there is, if it fits after all; else how much it would need."""
        verdict, candidate = self._check_leanest()
        if verdict.fits:
            return verdict, candidate
        need = self._checker.budget_for(verdict.smallest_budget, candidate.choices.leaves)
        raise DoesNotFit(
            f"no plan fits {format_bytes(self.budget)}: the leanest needs {format_bytes(need)}"
            f" ({self._advice()})",
            need,
        )

    def _refuse_host(self, missing: int) -> tuple[Verdict, Candidate]:
        """The leanest that stays on the GPU, if it fits after all; else what is missing."""
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
        # The whole batch can step in backward, the smallest part has the fewest activations.
        heard = [
            one
            for size in dict.fromkeys((sizes[0], sizes[-1]))
            for one in self._hear_size(size, wants_leanest=True)
        ]
        lean = [
            self._candidate(variant, leanest(variant.chain))
            for one in heard
            for variant in self._chunked(one)
        ]
        return self._checker.check(min(lean, key=lambda one: one.solution.peak))

    def _advice(self) -> str:
        if not self.allow.allows(Fidelity.LOSSY) and self.found.can_low_bit:
            return "8-bit optimizer state needs less: --allow lossy"
        return "a shorter sequence, a smaller model or a larger card would do"

    # -- in the second process --------------------------------------------------------------------

    def _answer(self, question: Any) -> Any:
        """What `_question` asks for, in numbers and names."""
        what, values = question
        choices = Choices.from_dict(values)
        if what == HEAR:
            return to_plain(self._audition(choices))
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
        seconds = candidate.rehearsed or candidate.heard.seconds(candidate.solution)
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
                # Under the budget the allocator gives back what it would keep without one.
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
        """Tokens in a global batch; 0 where nothing in it looks like them."""
        return max(
            (
                leaf.numel()
                for leaf in tensors_of(self.batch)
                if not leaf.is_floating_point() and leaf.dim() == 2
            ),
            default=0,
        )


def _without_copies(candidate: Candidate) -> float:
    return candidate.heard.seconds_without_copies(candidate.solution)


def _offloaded_to_disk(candidate: Candidate) -> Candidate:
    choices = dataclasses.replace(candidate.choices, offloaded_to="disk")
    return dataclasses.replace(candidate, choices=choices)


def _size_of(base: Choices) -> dict[str, Any]:
    """What goes with a size of micro-batch."""
    return {"micro_batch": base.micro_batch, "loss_chunk": base.loss_chunk}
