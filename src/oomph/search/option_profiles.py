"""Option profiling: one rehearsal in which blocks of one class try different options side by side.

Every block is profiled in place, in the whole step, by the code that will really run (rule 1). The
profile records the bytes alive when the block's forward and backward begin, the peak inside each,
and the predicted seconds. Blocks of one class share their profiles; a class with fewer blocks than
options is rehearsed several times. Together with what is alive outside the blocks, the profiles
make the solver's chain.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import CannotRehearse
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.hardware.timing.step_time import NONE, StepTime, ratio
from oomph.jobs.job import Job, batch_size, is_per_sample, make_batch
from oomph.plans.choices import MASTERS, RECOMPUTE, Choices, is_offloaded, offloaded
from oomph.rehearsal.link import LinkRates
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.step_cost import (
    END_OF_BACKWARD,
    Alive,
    StepCost,
    cost_between,
    end_of_backward,
    last_step,
    part_and_step,
    rounded,
)
from oomph.rehearsal.storages import tensors_in
from oomph.rehearsal.timeline import Block, Mark, Timeline
from oomph.search.solver import Chain, ChainBlock, Option, Solution
from oomph.search.survey import Survey
from oomph.techniques.chunked_loss import chunked_calls
from oomph.techniques.step_buckets import bucket_bytes
from oomph.techniques.technique import SearchContext, in_one_launch
from oomph.torch_compat.autograd import queue_callback
from oomph.torch_compat.pytree import tree_leaves, tree_map_with_path

#: Most rehearsals per option profiling: a class with few blocks tries only so many options.
MOST_ROUNDS = 2
#: Launching is taken to be possibly slower than the kernels from this share of their seconds on:
#: hosts differ, and a CUDA graph does not wait for launches.
MAY_WAIT = 0.7
#: Bytes of a gradient element.
GRADIENT_BYTES = 4


class NotInBackward(CannotRehearse):
    """Blocks run in the forward, but the loss does not depend on their results."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(f"{paths[0]} runs in the forward and takes no part in backward")
        self.paths = paths


@dataclass(frozen=True, kw_only=True)
class OptionProfiles:
    """What a job would take with these choices, for each way to choose options for its blocks."""

    choices: Choices
    """Choices of everything but the blocks."""
    chain: Chain
    parts: int
    """Micro-batches in a step."""
    others: StepTime
    """Time of one micro-batch outside the blocks."""
    step: StepTime
    """Time of one optimizer step."""
    loss_is_chunked: bool
    """Whether the head named by the choices really never materialized its logits."""
    fixed_part: int
    """Bytes alive when a step begins, such as weights and state; the same for parts of any size."""
    copies: Copies | None = None
    """Copies over the link in a step, if there are any."""
    graphed: OptionProfiles | None = None
    """The same with micro-batches captured as CUDA graphs, if the GPU may wait for launches."""

    @functools.cached_property
    def solved(self) -> dict[int, list[Solution]]:
        """Solutions by bytes of room, cached."""
        return {}

    @functools.cached_property
    def fastest(self) -> float:
        """Lower bound on the seconds of a step if memory were unlimited."""
        return self._seconds(self._fastest_blocks)

    def fastest_with(self, *, parts: int, late: float, gradients: int = 0) -> float:
        """From a whole batch: lower bound in parts, with more `late` state and offloaded gradients.

        The kernels are the same, but only the last part copies state in and out. So many bytes of
        gradients are copied out in each part, and copied back with the state.
        """
        assert self.copies is not None
        rates = self.copies.rates
        copies = dataclasses.replace(
            self.copies,
            part=self.copies.part + gradients / rates.out,
            step=self.copies.step + gradients / rates.back,
            late=late,
        )
        part = (self._fastest_blocks + self.others).seconds * self.parts / parts
        return self._whole(self._fastest_blocks).seconds + copies.exposed(part, parts)

    @property
    def waits_for_launches(self) -> bool:
        """Whether the GPU waits for the host because launching takes longer than the kernels."""
        whole = self._whole(self._fastest_blocks)
        return whole.launching > whole.kernels

    @property
    def waits(self) -> bool:
        """Whether the GPU waits for the host, for launches or for copies, in the fastest choice."""
        return self.waits_for_launches or self.fastest > self._whole(self._fastest_blocks).seconds

    def with_loss(self, chunk: int, more_bytes: int, more_seconds: float) -> OptionProfiles:
        """The same with another loss chunk that takes so much more."""
        return dataclasses.replace(
            self,
            choices=dataclasses.replace(self.choices, loss_chunk=chunk),
            chain=dataclasses.replace(self.chain, loss_base=self.chain.loss_base + more_bytes),
            others=StepTime(max(self.others.kernels + more_seconds, 0.0), self.others.launching),
        )

    def timed(self, times: Mapping[tuple[str, str], StepTime]) -> OptionProfiles:
        """The same by measured times, given by block and option.

        Options that were not timed keep their predicted ratio to those that were.
        """
        slower = ratio(
            (times[block.name, option.name], option.step_time)
            for block in self.chain.blocks
            for option in block.options
            if (block.name, option.name) in times
        )

        def by_real_clock(block: str, option: Option) -> Option:
            real = times.get((block, option.name), option.step_time.scaled(slower))
            # A graph is one launch, however long its contents would take to launch.
            launching = 0.0 if self.choices.launched_at_once else real.launching
            return dataclasses.replace(option, seconds=real.kernels, launching=launching)

        return dataclasses.replace(
            self,
            chain=self.chain.with_options(by_real_clock),
            others=self.others.scaled(slower),
            step=self.step.scaled(slower),
            graphed=self.graphed and self.graphed.timed(times),
        )

    def seconds(self, solution: Solution) -> float:
        """Predicted seconds of a step, with at least the time that kernels wait for copies."""
        chosen = self._chosen(solution)
        return self._seconds(
            sum((option.step_time for option in chosen), NONE),
            sum(option.moved for option in chosen),
        )

    def seconds_without_copies(self, solution: Solution) -> float:
        """The same if nothing had to wait for copies."""
        return self._whole(
            sum((option.step_time for option in self._chosen(solution)), NONE)
        ).seconds

    def _chosen(self, solution: Solution) -> list[Option]:
        pairs = zip(self.chain.blocks, solution.choice, strict=True)
        return [block.options[at] for block, at in pairs]

    def priced(self, price: float) -> Chain:
        """The solver's chain with a price in seconds for each byte that a block moves."""
        return self.chain.with_options(
            lambda _, option: dataclasses.replace(
                option, seconds=option.seconds + price * option.moved
            )
        )

    @property
    def launched(self) -> Chain:
        """The solver's chain by launching seconds, for when the GPU waits for launches."""
        return self.chain.with_options(
            lambda _, option: dataclasses.replace(option, seconds=option.launching)
        )

    @property
    def _fastest_blocks(self) -> StepTime:
        menus = self.chain.menus
        return StepTime(
            sum(min(option.seconds for option in menu) for menu in menus),
            sum(min(option.launching for option in menu) for menu in menus),
        )

    def _whole(self, blocks: StepTime) -> StepTime:
        """Time of the whole step."""
        return (blocks + self.others) * self.parts + self.step

    def _seconds(self, blocks: StepTime, moved: int = 0) -> float:
        part = (blocks + self.others).seconds
        exposed = self.copies.exposed(part, self.parts, moved) if self.copies else 0.0
        return self._whole(blocks).seconds + exposed

    def choose(self, solution: Solution) -> Choices:
        """The choices with the solution's options for the blocks."""
        blocks = {
            block.name: block.options[at].name
            for block, at in zip(self.chain.blocks, solution.choice, strict=True)
        }
        return dataclasses.replace(self.choices, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Seconds of a step's copies between GPU and host, except for what blocks save."""

    part: float
    """Seconds per micro-batch, such as for offloaded gradients."""
    step: float
    """Seconds once per step, for the optimizer's state."""
    window: float
    """The share of a micro-batch's kernels that state can be copied beside."""
    late: float
    """The share of state that cannot be prefetched before a block's gradients are complete."""
    rates: LinkRates

    def exposed(self, part: float, parts: int, moved: int = 0) -> float:
        """Least seconds that kernels wait: `part` is their seconds in each micro-batch.

        Blocks move `moved` bytes in each direction in each of them.
        """
        each = self.part + moved / self.rates.slower
        beside = self.window * max(part - each, 0.0)
        return parts * max(each - part, 0.0) + max(self.step - beside, self.late * self.step)


#: Share of the forward in the seconds of forward and backward.
FORWARD_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class _OptionProfile:
    """One block in one rehearsal."""

    option: str
    before: int
    """Bytes alive when its forward begins."""
    saved: int
    """Bytes left after its forward, once offloaded bytes are gone."""
    moved: int
    """Bytes offloaded in its forward."""
    bytes_freed_early: int
    """The part of `saved` that is freed before backward begins, as autocast's weight copies."""
    forward: int
    """Peak above `before`."""
    at_backward: int
    """Bytes alive when its backward begins."""
    backward: int
    """Peak above that."""
    cost: StepCost
    """Cost of its forward and backward."""


def profile_options(
    job: Job, gpu: GPU | None, clock: Clock, found: Survey, choices: Choices
) -> OptionProfiles:
    """Profile every block with every option of its menu under these choices."""
    members = Counter(block.kind for block in found.blocks)
    away = (offloaded(RECOMPUTE),) if choices.leaves else ()
    menus = {
        block.path: (*away, *found.options(block))[: MOST_ROUNDS * members[block.kind]]
        for block in found.blocks
    }
    rounds = _rounds(found, menus)
    even = with_even_parts(job, choices.micro_batch)
    profiles: dict[Any, dict[str, _OptionProfile]] = defaultdict(dict)
    base: _Round | None = None
    chunked = True
    for assigned in rounds:
        marks = Marks(tuple(assigned))
        timeline = rehearse(
            even,
            gpu,
            ("build", "step"),
            choices=dataclasses.replace(choices, blocks=assigned),
            watch=marks.watch,
            clock=clock,
            skip_first_step=True,
            wait_for_copies=False,
        )
        this = _listen(timeline, assigned, marks)
        chunked = chunked and marks.loss_is_chunked(choices.head)
        for at, block in enumerate(found.blocks):
            one = this.blocks[at]
            # The first and last block stand next to other code; an inner one of the class is
            # better.
            at_an_end = at in (0, len(found.blocks) - 1)
            # Offloaded weights of late blocks stay for backward: an early block is better.
            is_late = bool(choices.weights_away) and one.option in profiles[block.kind] and at > 1
            if one.option not in profiles[block.kind] or not (at_an_end or is_late):
                profiles[block.kind][one.option] = one
        base = base or this
    if base is None:
        raise CannotRehearse("there is nothing to hear")
    parts = count_parts(job, choices.micro_batch)
    copies = None if gpu is None else _copies_of(job, gpu, found, choices, base, parts)

    def result(choices: Choices, launch: float) -> OptionProfiles:
        in_blocks = sum((one.cost.step_time(launch) for one in base.blocks), NONE)
        return OptionProfiles(
            choices=choices,
            chain=_chain(found, menus, profiles, base, launch),
            parts=parts,
            others=base.part.step_time(launch) - in_blocks,
            step=base.step.step_time(clock.launch),
            loss_is_chunked=chunked,
            fixed_part=base.fixed_part,
            copies=copies,
        )

    as_profiled = result(choices, clock.launch)
    part = base.part.step_time(clock.launch)
    may_wait = part.launching > MAY_WAIT * part.kernels
    after_backward = dataclasses.replace(choices, optimizer_in_backward=False)
    captured = in_one_launch(SearchContext(gpu=gpu, choices=after_backward)) if may_wait else None
    if captured is None:
        return as_profiled
    graphed = result(captured, launch=0.0)
    if parts == 1:
        # Gradients exist from the beginning.
        more = GRADIENT_BYTES * found.trainable
        graphed = dataclasses.replace(graphed, chain=graphed.chain.raised(more))
    return dataclasses.replace(as_profiled, graphed=graphed)


def _copies_of(
    job: Job, gpu: GPU, found: Survey, choices: Choices, base: _Round, parts: int
) -> Copies | None:
    """What a step copies to and from the host; None if nothing leaves the GPU."""
    if choices.leaves:
        return _copies(
            base,
            parts,
            LinkRates.of(gpu),
            window=1 - FORWARD_SHARE if _steps_in_backward(job, choices) else FORWARD_SHARE,
            late=late_state(job, found, choices),
        )
    if choices.optimizer_in_backward:
        # What the optimizer is about to step is copied to the host during forward and backward.
        return _copies(base, parts, LinkRates.of(gpu), window=1.0, late=0.0)
    return None


def late_state(job: Job, found: Survey, choices: Choices) -> float:
    """The share of state that cannot be prefetched before a block's gradients are complete."""
    early = choices.state_ahead / buckets_of_a_block(found, choices)
    return max(1 - early, 0.0) if _steps_in_backward(job, choices) else 0.0


def _steps_in_backward(job: Job, choices: Choices) -> bool:
    """Whether an optimizer on the host steps buckets before all gradients are complete."""
    return job.clip_norm is None and choices.precision != "fp16-mixed"


def buckets_of_a_block(found: Survey, choices: Choices) -> int:
    """Buckets of one block: its gradients complete all at once, and their state should be there."""
    halved = choices.weights == MASTERS or choices.precision == "bf16"
    bucket = bucket_bytes(found.trainable * (2 if halved else 4))
    element = 2 if choices.precision == "bf16" else 4
    largest = max((block.parameters for block in found.blocks), default=0)
    return -(-largest * element // bucket) + 1


def _copies(base: _Round, parts: int, rates: LinkRates, *, window: float, late: float) -> Copies:
    """Copies of parts and step; offloaded gradients come back for each part after the first."""
    part, step = base.part, base.step
    moved = sum(block.moved for block in base.blocks)

    def seconds(sent: int, brought: int) -> float:
        return max(sent / rates.out, brought / rates.back)

    of_part = seconds(part.sent - moved, max(part.brought, part.sent) - moved)
    of_step = seconds(step.sent, step.brought)
    if parts == 1:  # the only part also steps
        of_part, of_step = 0.0, seconds(part.sent - moved, part.brought - moved)
    return Copies(part=of_part, step=of_step, window=window, late=late, rates=rates)


def count_parts(job: Job, micro_batch: int | None) -> int:
    """Number of micro-batches in a step."""
    samples = batch_size(make_batch(job), job.sample_tensors)
    return -(-samples // micro_batch) if micro_batch else 1


def with_even_parts(job: Job, micro_batch: int | None) -> Job:
    """The job with a last micro-batch as large as the others, so that any can stand for all.

    A smaller last one runs when gradients exist, but takes less memory; that would hide what the
    others take.
    """
    batch, named = make_batch(job), job.sample_tensors
    total = batch_size(batch, named)
    wanted = count_parts(job, micro_batch) * (micro_batch or total)
    if wanted == total:
        return job

    def grown(path: Any, leaf: Any) -> Any:
        per_sample = is_per_sample(path, leaf, total, named)
        return leaf[torch.arange(wanted, device="cpu") % total] if per_sample else leaf

    return dataclasses.replace(job, batch=tree_map_with_path(grown, batch))


def _rounds(found: Survey, menus: dict[str, tuple[str, ...]]) -> list[dict[str, str]]:
    """Assignments in which every class tries every option; without blocks, one empty round."""
    classes: dict[Any, list[str]] = defaultdict(list)
    for block in found.blocks:
        classes[block.kind].append(block.path)
    rounds = 1
    for paths in classes.values():
        rounds = max(rounds, -(-len(menus[paths[0]]) // len(paths)))
    order: list[dict[str, str]] = []
    for this in range(rounds):
        chosen: dict[str, str] = {}
        for paths in classes.values():
            menu = menus[paths[0]]
            for at, path in enumerate(paths):
                # Start at the second block: the first stands next to other code.
                turn = this * len(paths) + (at - 1) % len(paths)
                chosen[path] = menu[turn] if turn < len(menu) else RECOMPUTE
        order.append({block.path: chosen[block.path] for block in found.blocks})
    return order


class Marks:
    """Marks where each block's forward and backward begin and end, and where backward ends."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._model: nn.Module | None = None
        #: Memory of the blocks' results.
        self.results: list[Block] = []
        #: By path and event: memory of block inputs that backward goes through.
        self.given: dict[tuple[str, int], list[Block]] = {}

    def watch(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, recorder: Recorder
    ) -> None:
        """Register hooks that mark the blocks of this model."""
        self._model = model

        def begin(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            recorder.mark(f"{path}|forward")
            wanted = (tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
            given = {id(block): block for t in wanted if (block := recorder.block_of(t))}
            self.given[path, recorder.timeline.events] = list(given.values())
            _when_gradient_arrives((args, kwargs), functools.partial(recorder.mark, f"{path}|done"))

        def end(path: str, *call: Any) -> None:
            recorder.mark(f"{path}|end")
            made = [recorder.block_of(tensor) for tensor in tensors_in(call[-1])]
            self.results += [block for block in made if block is not None]
            _when_gradient_arrives(call[-1], functools.partial(begin_backward, path))

        def begin_backward(path: str) -> None:
            recorder.mark(f"{path}|backward")
            over = functools.partial(recorder.mark, END_OF_BACKWARD)
            queue_callback(over)

        for path in self._paths:
            block = model.get_submodule(path)
            block.register_forward_pre_hook(functools.partial(begin, path), with_kwargs=True)
            block.register_forward_hook(functools.partial(end, path))

    def loss_is_chunked(self, path: str) -> bool:
        """Whether the head at `path` only ever passed lazy logits to a loss."""
        if not path or self._model is None:
            return False
        head = self._model.get_submodule(path)
        assert isinstance(head, nn.Linear)
        return chunked_calls(head) > 0


def _when_gradient_arrives(values: Any, then: Callable[[], None]) -> None:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: then())
            return


@dataclass(frozen=True, kw_only=True)
class _Round:
    """The results of one rehearsal."""

    blocks: tuple[_OptionProfile, ...]
    loss: int
    """Peak between the last block's forward and its backward, without what blocks saved."""
    floor: int
    """Peak outside that: before the first block, after its backward, and in the optimizer step."""
    fixed_part: int
    """Bytes alive when the step begins."""
    part: StepCost
    """Cost of one micro-batch."""
    step: StepCost
    """Cost of the optimizer step."""


def _listen(timeline: Timeline, assigned: dict[str, str], watched: Marks) -> _Round:
    """Read the last micro-batch of a marked timeline: gradients exist by then."""
    alive = Alive.of(timeline)
    starts, done = last_step(timeline)
    start = starts[-1]
    marks = _marks_from(timeline, assigned, start, done)
    # With offloaded gradients the last part also steps: time an earlier, typical part.
    timed = marks
    if len(starts) > 1 and timeline.host_bytes:
        timed = _marks_from(timeline, assigned, starts[-2], start)
    first_backward = min((block.backward for block in marks), key=_event, default=done)
    last_end = max((block.end for block in marks), key=_event, default=start)
    given_on = {id(block) for block in watched.results}
    freed_early = {
        block.death: block
        for block in timeline.blocks
        if block.death is not None
        and id(block) not in given_on
        and start.event <= block.birth < last_end.event <= block.death < first_backward.event
    }
    in_transit = bool(timeline.host_bytes)
    if in_transit:
        born_in = _born_in(timeline, marks, given_on, {id(block) for block in freed_early.values()})
    profiles = []
    for at, (path, block, clocked) in enumerate(zip(assigned, marks, timed, strict=True)):
        before = alive.at(block.forward)
        begins = alive.at(block.backward)
        moved, saved = 0, alive.at(block.end) - before
        if in_transit:
            # State and weights come and go meanwhile: pick out the block's own memory.
            given = watched.given.get((path, block.forward.event), [])
            here = sum(rounded(one.size) for one in given if _is_alive(one, last_end))
            # A recomputed block saves its inputs.
            moved = sum(one.size for one in given) if is_offloaded(assigned[path]) else 0
            saved = born_in[at] + (0 if moved else here)
        profiles.append(
            _OptionProfile(
                option=assigned[path],
                before=before,
                saved=saved,
                moved=moved,
                bytes_freed_early=sum(
                    rounded(one.size)
                    for one in freed_early.values()
                    if block.forward.event <= one.birth < block.end.event
                ),
                forward=alive.peak(block.forward, block.end) - before,
                at_backward=begins,
                backward=alive.peak(block.backward, block.done) - begins,
                cost=clocked.cost,
            )
        )
    if marks:
        loss = _peak_of_loss(alive, marks, profiles, freed_early)
        over = end_of_backward(timeline, start) or done
        # What the first block saved outlives its backward for a moment.
        floor = max(
            alive.peak(start, marks[0].forward),
            alive.peak(marks[0].done, over) - profiles[0].saved,
            alive.peak(over, done),
        )
    else:
        loss = floor = alive.peak(start, done)
    part, step = part_and_step(timeline)
    return _Round(
        blocks=tuple(profiles),
        loss=loss,
        floor=floor,
        fixed_part=alive.at(starts[0]),
        part=part,
        step=step,
    )


def _peak_of_loss(
    alive: Alive,
    marks: Sequence[_BlockMarks],
    profiles: Sequence[_OptionProfile],
    freed_early: Iterable[int],
) -> int:
    """Peak between the last block's forward and its backward, without what blocks saved.

    `freed_early` are the events at which what blocks made is freed before their backward.
    """
    end = max(block.end.event for block in marks)
    begin = min(block.backward.event for block in marks)
    saved = sum(one.saved for one in profiles)
    bytes_freed_early = sum(one.bytes_freed_early for one in profiles)
    # What is freed early is freed at once, between the loss and its backward.
    before, after = min(freed_early, default=begin), max(freed_early, default=begin)
    return max(
        alive.peak_between(end, before) - saved,
        alive.peak_between(after + 1, begin) - saved + bytes_freed_early,
    )


def _born_in(
    timeline: Timeline, marks: Sequence[_BlockMarks], given_on: set[int], freed_early: set[int]
) -> list[int]:
    """For each block, the bytes made in its forward that stay until its backward begins.

    Memory freed early between the two counts as well. Its result does not: that is the next block's
    input. Weights and state copied in meanwhile for another block are gone by then.
    """
    sizes = [0] * len(marks)
    order = sorted(range(len(marks)), key=lambda at: marks[at].forward.event)
    begins = [marks[at].forward.event for at in order]
    for block in timeline.blocks:
        place = bisect.bisect_right(begins, block.birth) - 1
        if place < 0 or id(block) in given_on:
            continue
        mine = marks[order[place]]
        stays = id(block) in freed_early or _is_alive(block, mine.backward)
        if stays and block.birth < mine.end.event:
            sizes[order[place]] += rounded(block.size)
    return sizes


def _is_alive(block: Block, mark: Mark) -> bool:
    return block.death is None or block.death >= mark.event


def _marks_from(
    timeline: Timeline, paths: Iterable[str], start: Mark, stop: Mark
) -> list[_BlockMarks]:
    """Find where blocks begin and end in one micro-batch."""
    marks = [mark for mark in timeline.marks if start.event <= mark.event <= stop.event]
    last = {mark.name: mark for mark in marks}
    first = {mark.name: mark for mark in reversed(marks)}
    paths = list(paths)
    if unused := [path for path in paths if f"{path}|backward" not in first]:
        raise NotInBackward(unused)
    return [_BlockMarks.of(path, first, last, stop) for path in paths]


def _event(mark: Mark) -> int:
    return mark.event


@dataclass(frozen=True, kw_only=True)
class _BlockMarks:
    forward: Mark
    end: Mark
    backward: Mark
    done: Mark

    @property
    def cost(self) -> StepCost:
        """Cost of forward and backward."""
        return cost_between(self.forward, self.end) + cost_between(self.backward, self.done)

    @classmethod
    def of(
        cls, path: str, first: dict[str, Mark], last: dict[str, Mark], step_done: Mark
    ) -> _BlockMarks:
        # A block called twice in a forward spans from its first call to its last.
        return cls(
            forward=first[f"{path}|forward"],
            end=last[f"{path}|end"],
            backward=first[f"{path}|backward"],
            # A block whose input needs no gradient is the last to run in backward.
            done=last.get(f"{path}|done", step_done),
        )


def _chain(
    found: Survey,
    menus: dict[str, tuple[str, ...]],
    profiles: dict[Any, dict[str, _OptionProfile]],
    base: _Round,
    launch: float,
) -> Chain:
    """Build the chain from what each block saw around it, minus what earlier blocks saved.

    `launch` is the host's seconds per launch.
    """
    saved, left = [0], [0]
    for one in base.blocks:
        saved.append(saved[-1] + one.saved)
        left.append(left[-1] + one.saved - one.bytes_freed_early)
    blocks = []
    for at, (block, one) in enumerate(zip(found.blocks, base.blocks, strict=True)):
        menu = [profiles[block.kind][name] for name in menus[block.path]]
        blocks.append(
            ChainBlock(
                name=block.path,
                options=tuple(
                    Option(
                        name=option.option,
                        saved=option.saved,
                        forward=option.forward,
                        backward=option.saved + option.backward,
                        seconds=option.cost.kernels,
                        launching=launch * option.cost.launches,
                        moved=option.moved,
                    )
                    for option in menu
                ),
                forward_base=one.before - saved[at],
                # Memory freed early is gone by then, but the solver counts it, and errs upwards.
                backward_base=one.at_backward - left[at + 1],
            )
        )
    return Chain(
        blocks=tuple(blocks),
        loss_base=base.loss,
        floor=base.floor,
    )
