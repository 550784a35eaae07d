"""Whether and how a job's loss is composed of the losses of parts of its batch.

The forward is rehearsed twice, with different numbers of samples, and both traces are compared side
by side: each op's rule (`rules/`) tells what it does with samples. A difference between the two
forwards that no rule expects, or an op that mixes samples, keeps the batch whole, with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import CannotRehearse
from oomph.hardware import GPU
from oomph.jobs.job import Job, as_long_as, batch_size, compute_loss, make_batch
from oomph.plans.choices import Choices
from oomph.process.rehearsal_threads import rehearsing
from oomph.rehearsal.garbage import only_new_garbage
from oomph.rehearsal.phases import FORWARD, rehearse
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.shared_state import shared_state_kept
from oomph.splitting.call import Call, MixesSamples, power_of
from oomph.splitting.flow import FREE, Flow, Kind, first_mixed, joined, mixed, rows, same_order
from oomph.splitting.read_numbers import watched
from oomph.splitting.rules import OPS, find_rule
from oomph.splitting.rules.creation import drawn_for_all, is_decided
from oomph.splitting.rules.elementwise import Rescale, elementwise, is_random
from oomph.splitting.rules.products import product
from oomph.splitting.token_wise import is_token_wise
from oomph.splitting.trace import Origin, Place, Seen, TokenWise, Trace, Tracing
from oomph.techniques.batch_calls import BatchCalls, Derived, name_of
from oomph.techniques.generation_cache import evaluating_the_loss
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.micro_batch import FILLS, mean_over_targets, why_whole
from oomph.techniques.technique import ApplyContext, altering_forward, apply_techniques
from oomph.techniques.written_state import Written, find_written
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_with_path,
)

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
}
_OOMPH = Path(__file__).parent.parent
_DISTRIBUTIONS = Path(torch.distributions.__file__).parent
_DIVIDES = ("div", "true_divide", "__truediv__")
#: How often the analysis may restart to bring terms of a loss to one scale.
_MOST_TERMS = 32
#: How many tensors of a batch are tried, one after the other, as tensors without samples.
_MOST_DOUBTS = 3
#: Matches a module inside a list of modules: one of many blocks.
_IN_A_LIST = re.compile(r"(^|\.)\d+(\.|$)")
#: PyTorch's own `torch.autograd.Function`s, whose backward is the true derivative of forward.
_PLAIN_FUNCTIONS = ("CheckpointFunctionBackward", "GraphExecGroup")


@rehearsing()
@only_new_garbage()
def prove_split(
    job: Job, gpu: GPU | None, *, evaluating: bool = False, choices: Choices | None = None
) -> LossSplit:
    """How the job's batch may be split; it stays whole if nothing can be proved.

    `evaluating` asks for the loss in evaluation mode instead of training mode. Of the `choices` of
    a plan, those techniques count with which the model's own code takes other paths. The tensors
    with an entry for each sample are those that the job names, if it names any.
    """
    mode = _Mode(evaluating=evaluating, choices=altering_forward(choices or Choices()))
    batch, named = make_batch(job), job.sample_tensors
    samples = batch_size(batch, named)
    if samples < 2:
        return LossSplit(whole_because="it has one sample")
    plain = dataclasses.replace(job, batch=batch, checkpointing="none", micro_batch=None)
    long = as_long_as(batch, samples)
    candidates = long if named is None else long & frozenset(named)
    try:
        first = _Forward.of(plain, gpu, batch, samples, mode=mode)
    except CannotRehearse as error:
        return LossSplit(whole_because=f"its forward cannot be followed ({error})")
    if first.whole_because:
        return LossSplit(whole_because=first.whole_because)
    if first.written:
        return LossSplit(whole_because=_what_is_written(first.written))
    found = _prove(plain, gpu, first, batch, candidates, mode)
    if not found.whole_because:
        return dataclasses.replace(found, others=long - candidates)
    if named is not None:
        return found
    others = []
    for doubt in _doubtful(batch, candidates):
        one = _prove(plain, gpu, first, batch, candidates - {doubt}, mode)
        if not one.whole_because:
            others.append(dataclasses.replace(one, others=frozenset([doubt])))
    if len(others) > 1:
        return LossSplit(
            whole_because="more than one of its tensors may be the one that is no sample's"
        )
    return others[0] if others else found


def prove_split_of_another(
    job: Job,
    gpu: GPU | None,
    before: LossSplit | None,
    *,
    evaluating: bool = False,
    choices: Choices | None = None,
) -> LossSplit:
    """The same for a later batch than the one that an earlier analysis saw.

    Tensors that had an entry for each sample before are tried alone first: another may be as long
    as this batch by chance.
    """
    paths = {keystr(path) for path, _ in tree_flatten_with_path(make_batch(job))[0]}
    if before is not None and before.leaves and paths.issuperset(before.leaves):
        known = dataclasses.replace(job, sample_tensors=before.leaves)
        found = prove_split(known, gpu, evaluating=evaluating, choices=choices)
        if not found.whole_because:
            return found
    return prove_split(job, gpu, evaluating=evaluating, choices=choices)


def _prove(
    job: Job,
    gpu: GPU | None,
    first: _Forward,
    batch: Any,
    leaves: frozenset[str],
    mode: _Mode,
) -> LossSplit:
    """What two forwards show, provided that others of other sizes show the same."""
    samples = first.trace.samples

    def with_samples(other: int) -> _Forward:
        rows_ = torch.arange(other, device="cpu") % samples

        def resize(path: Any, leaf: Any) -> Any:
            return leaf[rows_.to(leaf.device)] if keystr(path) in leaves else leaf

        resized = tree_map_with_path(resize, batch)
        return _Forward.of(job, gpu, resized, other, first.numbers, mode=mode)

    # A number that Python computes from the number of samples may be proportional to it for two
    # batch sizes by chance: a half that is rounded, the larger of two. So a third size is checked.
    half = samples - samples // 2 if samples > 3 else samples + 1
    another = samples - 1 if samples > 2 else samples + 2
    try:
        second = with_samples(half)
        found = _Analysis(first, second, leaves).result()
        if found.whole_because:
            return found
        if _Analysis(first, with_samples(another), leaves).result() != found:
            return LossSplit(whole_because=_DEPENDS_OTHERWISE)
        # The smallest possible part. PyTorch itself runs other ops for a single sample.
        if not _calls_alike(first, second, with_samples(1)):
            return LossSplit(whole_because=f"{_DEPENDS_OTHERWISE} where it is a single one")
    except CannotRehearse as error:
        return LossSplit(
            whole_because=f"the loss does not take another number of samples ({error})"
        )
    return found


_DEPENDS_OTHERWISE = "the loss depends on how many samples there are in a way that is not followed"


def _calls_alike(first: _Forward, second: _Forward, single: _Forward) -> bool:
    """Whether Python makes the same calls for a single sample as in the other two forwards.

    Plain numbers in the calls must scale with the samples as they do in those two.
    """
    samples = [forward.trace.samples for forward in (first, second, single)]
    calls = single.calls.called[::-1]
    for one, two in zip(first.calls.called, second.calls.called, strict=False):
        if not calls or calls[-1][0] != one[0]:
            if _shows_for_each(one, samples[0]) and _shows_for_each(two, samples[1]):
                continue
            return False
        _, theirs = calls.pop()
        for numbers in zip(one[1], two[1], theirs, strict=False):
            expected = power_of(numbers[0], numbers[1], (samples[0], samples[1]))
            if power_of(numbers[0], numbers[2], (samples[0], samples[2])) != expected:
                return False
    return not calls


def _shows_for_each(call: tuple[str, tuple[float, ...]], samples: int) -> bool:
    """Whether a call expands a tensor to one entry per sample.

    For a single sample such a call does nothing, and models leave it out.
    """
    name, numbers = call
    return name in ("expand", "broadcast_to") and samples in numbers


def _doubtful(batch: Any, candidates: frozenset[str]) -> list[str]:
    """Tensors that may be as long as the batch by chance: class weights, square masks.

    Integer tensors come last, as they are more likely words and labels.
    """
    found = [
        (leaf.dtype is not torch.bool and not leaf.is_floating_point(), keystr(path))
        for path, leaf in tree_flatten_with_path(batch)[0]
        if keystr(path) in candidates
        and (
            (leaf.dim() == 1 and leaf.is_floating_point())
            or (leaf.dim() == 2 and leaf.shape[0] == leaf.shape[1])
        )
    ]
    found.sort(key=lambda doubt: doubt[0])
    return [name for _, name in found[:_MOST_DOUBTS]] if len(candidates) > 1 else []


def _what_is_written(written: Written) -> str:
    places = (*written.buffers, *written.parameters, *written.tensors, *written.attributes)
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        return f"the forward writes to {places[0]}{more}: in parts that would be done once for each"
    if written.elsewhere:
        return f"the forward writes to memory that is not the model's ({written.elsewhere[0]})"
    return f"the forward draws random numbers of its own ({written.draws[0]})"


def _but_settled(first: Written, second: Written) -> Written:
    """Writes made by every forward; plain attributes set only by the first do not count."""
    tensors = first.buffers or first.parameters or first.tensors
    return first if tensors else dataclasses.replace(first, attributes=second.attributes)


@dataclass(frozen=True, kw_only=True)
class _Mode:
    """The mode in which the model runs."""

    evaluating: bool
    choices: Choices


# -- one forward -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _FunctionCall:
    """One call of a PyTorch function, and the ops it ran."""

    name: str
    start: int
    end: int
    place: Place | None
    """The location of the number it returned, if any."""
    number: int
    """Its index among the calls that return a number; -1 if it returned none."""
    module: str
    derived: Derived | None
    """How its number is computed from the batch; for a mean over targets, how the targets are."""
    over_targets: dict[str, Seen] | None
    """For a mean over class targets: its tensors by name."""
    settings: dict[str, Any] | None
    """For a mean over class targets: its other arguments."""
    plain: tuple[Any, ...]
    """Its positional arguments, where they are plain numbers."""
    only_checks: bool
    """Whether the numbers it reads only decide if PyTorch raises an error."""


class _Calls(BatchCalls):
    """Records function calls beside the ops."""

    def __init__(self, batch: Any, samples: int, tracing: Tracing, recorder: Recorder) -> None:
        super().__init__(batch, samples)
        self.calls: list[_FunctionCall] = []
        self.masks: list[Place] = []
        self.hooks: list[str] = []
        #: Calls that take sizes: their names, their arguments, and the module that made them.
        self.sizes: list[tuple[str, list[Any], str]] = []
        self.taken_out: list[Seen] = []
        #: All calls: their names, and the plain numbers among their arguments.
        self.called: list[tuple[str, tuple[float, ...]]] = []
        #: Steps that gave Python a number which Python compared with another one.
        self.compared: set[int] = set()
        #: Whether a tensor is filled with more or fewer entries than its mask has room for.
        self.fills_unevenly = False
        self.tracing = tracing
        self._recorder = recorder

    def growing(self, name: str, args: Sequence[Any]) -> tuple[int, ...]:
        """Record the call, to be compared with another forward."""
        self.sizes.append((name, tree_leaves(tuple(args)), self._recorder.current_module))
        return ()

    def _note_filled(self, filled: Tensor, mask: Tensor, source: Tensor) -> None:
        """Check whether a masked fill's source is as large as the room in the mask, if known."""
        with DisableTorchFunction():
            known = self._recorder.values.of(mask)
            if known is None:
                return
            with disable_current_modes():
                room = int(known.count_nonzero()) * (filled.numel() // max(known.numel(), 1))
            self.fills_unevenly |= room != source.numel()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        steps = self.tracing.trace.steps
        start, name, picked = len(steps), name_of(func), len(self.picks)
        leaves = tree_leaves((tuple(args), kwargs))
        self.called.append((name, tuple(one for one in leaves if _is_number(one))))
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            self.hooks.append(self._recorder.current_module)
        if name in ("tolist", "numpy", "__array__") and args[0].numel():
            self.taken_out.append(self.tracing.see(args[0]))
        if name in FILLS and len(args) == 3:
            self._note_filled(*args)
        targets, over_targets, settings = None, None, None
        if (given := mean_over_targets(func, args, kwargs or {})) is not None:
            targets = self.derived(given["target"])
            over_targets = {
                name: self.tracing.see(value)
                for name, value in given.items()
                if isinstance(value, Tensor)
            }
            settings = {
                name: value for name, value in given.items() if not isinstance(value, Tensor)
            }
        counted = len(self.numbers)
        out = super().__torch_function__(func, types, args, kwargs)
        if name == "item" and len(steps) > start:
            out = watched(out, functools.partial(self.compared.add, len(steps) - 1))
        if len(self.picks) > picked:
            self.masks.append(self.tracing.see(args[1]).place)
        is_number = isinstance(out, Tensor) and out.dim() == 0
        if len(steps) > start or is_number:
            self.calls.append(
                _FunctionCall(
                    name=name,
                    start=start,
                    end=len(steps),
                    place=self.tracing.see(out).place if is_number else None,
                    number=counted if len(self.numbers) > counted else -1,
                    module=self._recorder.current_module,
                    derived=targets or (self.derived(out) if is_number else None),
                    over_targets=over_targets,
                    settings=settings,
                    plain=tuple(one if _is_number(one) else None for one in args),
                    only_checks=name not in OPS["reading_functions"] or _asked_by_a_distribution(),
                )
            )
        return out


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _asked_by_a_distribution() -> bool:
    """Whether the calling code is that of PyTorch's distributions, which check their arguments."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_OOMPH):
        frame = frame.f_back
    return Path(frame.f_code.co_filename).is_relative_to(_DISTRIBUTIONS)


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """One rehearsed forward: its ops, its calls, what it read and what it wrote to."""

    trace: Trace
    calls: _Calls
    numbers: list[Any]
    written: Written
    whole_because: str
    """Why the batch must stay whole, as far as the modules alone show it, before any op."""

    @classmethod
    def of(
        cls,
        job: Job,
        gpu: GPU | None,
        batch: Any,
        samples: int,
        told: list[Any] | None = None,
        *,
        mode: _Mode,
    ) -> _Forward:
        """Rehearse it; Python's reads return the numbers of an earlier forward, where known."""
        made: list[_Forward] = []
        recorders: list[Recorder] = []
        reasons: list[str] = []

        def loss(model: nn.Module, fake: Any) -> Tensor:
            if made:
                return compute_loss(job, model, fake)
            trace = Trace(samples=samples)
            tracing = Tracing(trace, recorders[0], told)
            calls = _Calls(fake, samples, tracing, recorders[0])
            for path, leaf in tree_flatten_with_path(fake)[0]:
                if isinstance(leaf, Tensor):
                    trace.leaves[tracing.see(leaf).place] = keystr(path)
            for buffer in model.buffers():
                # The contents of a buffer existed before any batch.
                place = tracing.see(buffer).place
                trace.origins[place] = Origin(is_parameter=False, numbers=None)
            _note_token_wise(model, tracing)
            results: list[Tensor] = []

            def run() -> None:
                with tracing, calls:
                    result = compute_loss(job, model, fake)
                trace.loss = tracing.see(result)
                trace.custom_functions += _custom_functions(result)
                results.append(result)

            # A second forward serves only to record its ops.
            written = Written()
            if told is None:
                beside = [("the loss", job.loss)]
                written = find_written(model, run, beside)
                if written.attributes:
                    compute_loss(job, model, fake)
                    again = find_written(model, lambda: compute_loss(job, model, fake), beside)
                    written = _but_settled(written, again)
            else:
                run()
            made.append(
                cls(
                    trace=trace,
                    calls=calls,
                    numbers=tracing.numbers,
                    written=written,
                    whole_because=reasons[0],
                )
            )
            return results[0]

        def watch(model: nn.Module, optimizer: Any, recorder: Recorder) -> None:
            recorders.append(recorder)
            if mode.evaluating:
                model.eval()
            apply_techniques(
                ApplyContext(
                    model=model,
                    optimizer=optimizer,
                    device_type="cpu" if gpu is None else "cuda",
                    choices=mode.choices,
                )
            )
            recorder.values.picks_fewer = told is not None
            reasons.append(why_whole(model))

        traced = dataclasses.replace(job, loss=loss, batch=batch)
        # The rehearsal runs only the loss above.
        with evaluating_the_loss(), shared_state_kept(job):
            rehearse(traced, gpu, (FORWARD,), watch=watch)
        return made[0]


def _note_token_wise(model: nn.Module, tracing: Tracing) -> None:
    """Record the calls of modules that are known to process each token independently."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [tracing.see(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        started.append((len(tracing.trace.steps), given))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        start, given = started.pop()
        tracing.trace.token_wise[start] = TokenWise(
            end=len(tracing.trace.steps), given=tuple(given), made=tracing.see(out)
        )

    started: list[tuple[int, list[Seen]]] = []
    for module in model.modules():
        if is_token_wise(module):
            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _custom_functions(loss: Tensor) -> list[str]:
    """The names of graph nodes, in the loss's graph, whose backward is written in Python."""
    found: dict[str, None] = {}
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[type(node).__name__] = None
        waiting += [one for one, _ in node.next_functions]
    return [name for name in found if name not in _PLAIN_FUNCTIONS]


# -- comparing both forwards -----------------------------------------------------------------------


class _Keep(Exception):
    """The batch must stay whole, for the reason given as text."""


@dataclass
class _State:
    """The flows of all tensors so far, by location, and by the storages they lie in."""

    flows: dict[Place, Flow] = field(default_factory=dict)
    places: dict[int, set[Place]] = field(default_factory=lambda: defaultdict(set))
    made_by: dict[Place, int] = field(default_factory=dict)
    writes: Counter[int] = field(default_factory=Counter)

    def put(self, place: Place, flow: Flow) -> None:
        """Set the flow of the tensor at this location."""
        self.flows[place] = flow
        self.places[place[0]].add(place)

    def version_of(self, seen: Seen) -> object:
        """A tensor's location, and how often its memory was written to."""
        return seen.place, self.writes[seen.place[0]]

    def write(self, place: Place, flow: Flow) -> None:
        """Record an op's write; other views of the memory change with it."""
        self.writes[place[0]] += 1
        for other in self.places[place[0]] - {place}:
            self.put(other, _overwritten(self.flows[other], flow))
        self.put(place, flow)


def _overwritten(flow: Flow, written: Flow) -> Flow:
    """The flow of a view after another view of the same memory was written to."""
    if (bad := first_mixed([flow, written])) is not None:
        return bad
    both = joined([flow, written])
    kept = dataclasses.replace(flow, learned=both.learned, needs=both.needs)
    if flow == written or (flow.is_whole and written.is_whole):
        return kept
    if (
        flow.kind is Kind.ROWS
        and not flow.power
        and (written.is_whole or (written.kind is Kind.ROWS and not written.power))
    ):
        return kept
    return mixed("samples are written to memory that all have in common")


class _Analysis:
    """Compares two forwards to derive how the first one's loss is composed of its parts'."""

    def __init__(self, first: _Forward, second: _Forward, leaves: frozenset[str]) -> None:
        self._first, self._second = first, second
        self._leaves = leaves
        #: Steps whose result is turned into a mean, though it is a sum over samples.
        self._rescaled: dict[int, int] = {}
        #: Steps inside PyTorch's own functions, which read numbers to reject invalid arguments.
        self._checks = {
            at
            for call in first.calls.calls
            if call.only_checks
            for at in range(call.start, call.end)
        }
        #: By step: the kind of correction it needs, and the location of a mask.
        self._needs: dict[int, tuple[str, Any]] = {}
        self._state = _State()

    def result(self) -> LossSplit:
        """How the batch may be split, or why not."""
        try:
            self._check_both()
            for _ in range(_MOST_TERMS):
                needs, power = self._go_through()
                if needs is not None:
                    return self._split(needs, power)
            raise _Keep("its loss has more terms of different kinds than oomph follows")
        except (_Keep, MixesSamples) as error:
            return LossSplit(whole_because=str(error))

    def _check_both(self) -> None:
        one, other = self._first, self._second
        if "BackwardHookFunctionBackward" in one.trace.custom_functions:
            raise _Keep("a module has a full backward hook, which may mix samples")
        if one.calls.fills_unevenly:
            raise _Keep("masked_scatter fills samples with what others bring")
        if one.trace.custom_functions:
            raise _Keep(
                f"{one.trace.custom_functions[0]} has a backward of its own, which may mix samples"
            )
        if one.calls.hooks:
            where = one.calls.hooks[0] or "the loss"
            raise _Keep(f"a hook is put on a tensor in {where}, which may mix samples in backward")
        names = [[step.func for step in forward.trace.steps] for forward in (one, other)]
        called = [[call.name for call in forward.calls.calls] for forward in (one, other)]
        if names[0] != names[1] or called[0] != called[1]:
            at = next(
                (at for at, pair in enumerate(zip(*names, strict=False)) if pair[0] is not pair[1]),
                -1,
            )
            where = one.trace.steps[at].module if one.trace.steps else ""
            raise _Keep(
                "the forward does other things for another number of samples"
                + (f", in {where}" if where else "")
            )

    def _go_through(self) -> tuple[frozenset[int] | None, int]:
        """The corrections that the loss needs, and its power; None if the analysis must restart."""
        state = _State()
        self._needs = {}
        needed: frozenset[int] = frozenset()
        self._state = state
        first, second = self._first.trace, self._second.trace
        means = {call.start: call for call in self._first.calls.calls if call.over_targets}
        inside = 0
        for at, (step, other) in enumerate(zip(first.steps, second.steps, strict=True)):
            if at >= inside and (block := first.token_wise.get(at)) is not None:
                inside = block.end
                self._token_wise(state, at, block)
            if at in means:
                # Only the one number for the whole batch is needed, however it is computed.
                inside = means[at].end
                self._over_targets(state, at, means[at])
            if at < inside:
                continue
            try:
                needed |= self._follow(state, at, step, other)
            except Rescale as asked:
                self._rescale(state, asked.seen)
                return None, 0
        taken_out = self._first.calls.taken_out, self._second.calls.taken_out
        if len({len(one) for one in taken_out}) > 1:
            raise _Keep("the forward takes numbers of each sample out of PyTorch")
        for seen, twin in zip(*taken_out, strict=True):
            if seen.place not in state.flows:
                state.put(seen.place, self._origin(seen, twin))  # no op has read it
            flow = state.flows[seen.place]
            if not flow.is_whole:
                raise _Keep("the forward takes numbers of the batch out of PyTorch")
            needed |= flow.needs
        assert first.loss is not None
        loss = state.flows.get(first.loss.place, FREE)
        if loss.kind is Kind.MIXED:
            raise _Keep(f"the loss mixes samples: {loss.because}")
        if loss.kind not in (Kind.SUM, Kind.FREE):
            raise _Keep("the loss is no number of the whole batch")
        if loss.kind is Kind.FREE and loss.power:
            raise _Keep("the loss depends on how many samples there are")
        power = loss.power if loss.kind is Kind.SUM else 1
        return needed | loss.needs | frozenset(self._rescaled), power

    def _rescale(self, state: _State, seen: Seen) -> None:
        at = state.made_by.get(seen.place)
        if at is None or at in self._rescaled:
            raise _Keep("two terms of its loss count samples in different ways")
        self._rescaled[at] = state.flows[seen.place].power - 1

    def _token_wise(self, state: _State, at: int, block: TokenWise) -> None:
        """Set the flow of a module that processes each token independently."""
        for seen in block.given:
            if seen.place not in state.flows:
                state.put(seen.place, self._origin(seen, seen))
        flows = [state.flows[seen.place] for seen in block.given]
        found = first_mixed(flows)
        if found is None:
            carrying = [flow for flow in flows if flow.has_samples]
            same = len({(flow.dim, flow.order) for flow in carrying}) == 1
            plain = all(flow.kind in (Kind.ROWS, Kind.FREE) and not flow.power for flow in flows)
            if len(carrying) == len(flows) and same and plain and carrying[0].dim == 0:
                found = dataclasses.replace(carrying[0], learned=True, needs=joined(flows).needs)
            elif carrying:
                found = mixed("experts are given samples in another order than tokens")
            else:
                found = dataclasses.replace(joined(flows), learned=True)
        state.put(block.made.place, found)
        state.made_by.setdefault(block.made.place, at)

    def _over_targets(self, state: _State, at: int, call: _FunctionCall) -> None:
        """Set the flow of a mean over class targets."""
        assert call.over_targets is not None and call.place is not None
        of = {}
        for name, seen in call.over_targets.items():
            if seen.place not in state.flows:
                state.put(seen.place, self._origin(seen, seen))
            of[name] = state.flows[seen.place]
        flow, target = of["input"], of["target"]
        found = first_mixed(of.values())
        if call.settings != self._twin(call).settings:
            found = mixed(f"{call.name} is told how many samples there are")
        if found is None:
            found = self._targets_flow(call, of, flow, target)
            if found.kind is Kind.SUM:
                self._needs[at] = "targets", None
                needs = found.needs | {at}
                found = dataclasses.replace(found, needs=needs, power=self._rescaled.get(at, 0) + 1)
                if at in self._rescaled:
                    found = dataclasses.replace(found, power=1)
        state.put(call.place, found)
        state.made_by[call.place] = at

    def _targets_flow(
        self, call: _FunctionCall, of: dict[str, Flow], flow: Flow, target: Flow
    ) -> Flow:
        made = joined(of.values())
        others = [one for name, one in of.items() if name not in ("input", "target")]
        if not flow.has_samples and not target.has_samples and flow.is_whole:
            return made
        where = f" (in {call.module})" if call.module else ""
        if any(not one.is_whole for one in others):
            return mixed(f"each sample has class weights of its own{where}")
        classes = 1 if call.name != "linear_cross_entropy" else -1
        at = flow.dim if flow.dim < 1 or classes < 0 else flow.dim - 1
        order = same_order(flow.order, target.order)
        if (
            flow.kind is not Kind.ROWS
            or target.kind is not Kind.ROWS
            or flow.dim == classes
            or target.dim != at
            or order is None
            or flow.power
        ):
            return mixed(f"{call.name} compares samples with each other{where}")
        if target.learned:
            return mixed(f"how many targets count is decided by the model{where}")
        return dataclasses.replace(made, kind=Kind.SUM, learned=True)

    def _follow(self, state: _State, at: int, step: Any, other: Any) -> frozenset[int]:
        """Set the flows of an op's results; returns what a number read by Python needs."""
        ours, theirs = list(step.tensors()), list(other.tensors())
        if len(ours) != len(theirs):
            raise _Keep(f"an op takes as many tensors as there are samples{_where(step)}")
        for seen, twin in zip(ours, theirs, strict=True):
            if seen.place not in state.flows:
                state.put(seen.place, self._origin(seen, twin))
        made = [(one, two) for one, two in zip(step.made(), other.made(), strict=False)]
        flows = [state.flows[seen.place] for seen in ours]
        if not made:
            return frozenset() if at in self._checks else self._read(at, step, flows)
        call = Call(
            step=step,
            other=other,
            samples=(self._first.trace.samples, self._second.trace.samples),
            flow_of=lambda seen: state.flows[seen.place],
            need=lambda kind: self._need(at, kind, flows),
            version_of=state.version_of,
        )
        found = self._flow(call, flows, step, made)
        if at in self._rescaled:
            found = dataclasses.replace(found, power=1)
        written = _written_places(step)
        for one, two in made:
            flow = (
                found
                if _is_shaped_so(call, one, two, found)
                else mixed(
                    found.because or f"{call.base} gives samples a shape of their own{_where(step)}"
                )
            )
            if one.place in written:
                continue
            state.put(one.place, flow)
            state.made_by.setdefault(one.place, at)
        for place in written:
            state.write(place, found)
        return frozenset()

    def _flow(self, call: Call, flows: Sequence[Flow], step: Any, made: Sequence[Any]) -> Flow:
        if is_decided(call):
            return FREE
        found = self._flow_by_rule(call, flows, step, made)
        return drawn_for_all(call) if found.kind is Kind.FREE and is_random(call) else found

    def _flow_by_rule(
        self, call: Call, flows: Sequence[Flow], step: Any, made: Sequence[Any]
    ) -> Flow:
        if (bad := first_mixed(flows)) is not None and not _ignores_contents(call):
            return dataclasses.replace(bad, drawn_between=None)
        rule = find_rule(call)
        try:
            if rule is not None:
                return _checked(call, rule, flows, rule(call))
            same = all(one.shape == two.shape for one, two in made)
            if all(flow.is_whole for flow in flows) and same and _same_numbers(call):
                return joined(flows)
            learned = any(flow.learned for flow in flows)
            plain = all(flow.kind is not Kind.SUM and not flow.power for flow in flows)
            if not learned and same and plain and _same_numbers(call):
                made_of = joined(flows)
                return dataclasses.replace(made_of, needs=made_of.needs | {call.need("total")})
            return mixed(f"nothing is known of {call.base} with samples{_where(step)}")
        except MixesSamples as error:
            return self._mean_of_picked(call) or mixed(f"{error}{_where(step)}")

    def _mean_of_picked(self, call: Call) -> Flow | None:
        """The flow of a sum over what a mask selects that is divided by how many that is."""
        summed = call["self"]
        if call.base != "div" or call["rounding_mode"] is not None or not isinstance(summed, Seen):
            return None
        flow, at = call.flow_of(summed), self._state.made_by.get(summed.place)
        if flow.kind is not Kind.SUM or flow.power or at is None:
            return None
        step, other = self._first.trace.steps[at], self._second.trace.steps[at]
        one, two = step.given.get("self"), other.given.get("self")
        if schema_of(step.func).name != "aten::sum" or not isinstance(one, Seen) or two is None:
            return None
        picked = self._state.flows[one.place]
        # The second forward selects one entry fewer: another number would not follow.
        counts = (call["other"], call.other.given.get("other"))
        if picked.order[0] != "picked" or picked.dim != 0 or picked.power:
            return None
        if step.results[0] != summed or counts != (one.shape[0], two.shape[0]):
            return None
        number = call.need("mean")
        self._needs[number] = "mean", picked.order[1]
        return dataclasses.replace(flow, needs=flow.needs | {number}, power=1)

    def _need(self, at: int, kind: str, flows: Sequence[Flow]) -> int:
        masks = [flow.order[1] for flow in flows if flow.order[0] == "picked"]
        self._needs[at] = kind, masks[0] if masks else None
        return at

    def _read(self, at: int, step: Any, flows: Sequence[Flow]) -> frozenset[int]:
        """Check a read: Python requested a tensor's number, or compared two tensors."""
        if step.func not in _READS:
            return frozenset()
        needed: frozenset[int] = frozenset()
        for flow in flows:
            if flow.is_whole:
                needed |= flow.needs
                continue
            truth = any(isinstance(one, bool) for one in step.results)
            truth |= at in self._first.calls.compared
            if flow.learned and (not truth or flow.asks_if_finite):
                continue  # the second forward got another number, and did the same
            if flow.asks_if_finite:
                continue
            why = f": {flow.because}" if flow.kind is Kind.MIXED else ""
            raise _Keep(
                "the forward goes by numbers that differ between parts of the batch"
                f"{_where(step)}{why}"
            )
        return needed

    def _origin(self, seen: Seen, twin: Seen) -> Flow:
        """The flow of a tensor that no op made."""
        trace = self._first.trace
        if (path := trace.leaves.get(seen.place)) is not None:
            return rows(0, ("rows", 1, 1)) if path in self._leaves else FREE
        one = trace.origins.get(seen.place)
        other = self._second.trace.origins.get(twin.place)
        if seen.shape != twin.shape:
            if any(seen.place[0] == place[0] for place in trace.leaves):
                return mixed("a tensor of the batch is shown in a way of its own")
            return mixed("a tensor is made in Python, with an entry for each sample")
        if one is None or other is None:
            return FREE
        if one.is_parameter:
            return dataclasses.replace(FREE, learned=True)
        if one.numbers is None or one.numbers == other.numbers or other.numbers is None:
            return FREE
        samples = self._first.trace.samples, self._second.trace.samples
        in_proportion = all(
            abs(mine * samples[1] - theirs * samples[0]) <= 1e-6 * abs(mine * samples[1])
            for mine, theirs in zip(one.numbers, other.numbers, strict=True)
        )
        if in_proportion:
            return dataclasses.replace(FREE, power=-1)
        return mixed("a number that is made in Python differs between parts of the batch")

    # -- corrections -------------------------------------------------------------------------------

    def _split(self, needs: frozenset[int], power: int) -> LossSplit:
        totals: set[int] = set()
        grown: dict[int, tuple[int, ...]] = {}
        rescaled: dict[int, int] = {}
        picked: dict[int, int] = {}
        finite: set[int] = set()
        for at in sorted(needs):
            call = self._call_around(at)
            kind, mask = self._needs.get(at, ("rescale", None))
            if at in self._rescaled:
                rescaled[self._number(call, at)] = self._rescaled[at]
            if kind == "targets":
                if call.derived is None:
                    raise _Keep("its targets do not come from the batch in a way that is followed")
                self._check_made_of(call.derived, at)
            elif kind == "total":
                if call.derived is None:
                    raise _Keep(
                        f"{call.name} counts the batch in a way that oomph does not follow"
                        f"{_where(self._first.trace.steps[at])}"
                    )
                self._check_made_of(call.derived, at)
                totals.add(number := self._number(call, at))
                if places := self._in_proportion(call):
                    grown[number] = places
            elif kind == "finite":
                if call.name != "nan_to_num":
                    raise _Keep(f"{call.name} replaces what is not finite in a sum over samples")
                finite.add(self._number(call, at))
            elif kind == "mean":
                masks = self._first.calls.masks
                place, writes = mask
                averages = call.name in OPS["averaging_functions"] or call.name in _DIVIDES
                known = averages and place in masks
                if writes or not known:
                    raise _Keep(f"{call.name} averages over what a mask selects")
                which = masks.index(place)
                mask_of_batch = self._first.calls.picks[which]
                if mask_of_batch is None:
                    raise _Keep(f"{call.name} averages over what a mask selects")
                self._check_made_of(mask_of_batch, at)
                picked[self._number(call, at)] = which
        calls = self._first.calls
        numbered = [call for call in calls.calls if call.number >= 0]
        return LossSplit(
            leaves=tuple(sorted(self._leaves)),
            power=power,
            calls=tuple((call.name, bool(_IN_A_LIST.search(call.module))) for call in numbered),
            totals=frozenset(totals),
            means=sum(self._needs.get(at, ("", None))[0] == "targets" for at in needs),
            plain_means=self._plain_means(),
            sizes=self._sizes(),
            grown=grown,
            rescaled=rescaled,
            picked=picked,
            finite=frozenset(finite),
            samples=self._first.trace.samples,
            sites=frozenset(self._first.calls.sites),
        )

    def _plain_means(self) -> frozenset[int]:
        """Which of the means over class targets, in order, are made without the batch's samples."""
        means = (call for call in self._first.calls.calls if call.over_targets)
        flows = (self._state.flows[call.place] for call in means if call.place is not None)
        return frozenset(at for at, flow in enumerate(flows) if flow.kind is Kind.FREE)

    def _sizes(self) -> tuple[tuple[str, tuple[int, ...], bool], ...]:
        """For each call that takes sizes: which of its sizes grow with the samples."""
        one, other = self._first.trace.samples, self._second.trace.samples
        found = []
        pairs = zip(self._first.calls.sizes, self._second.calls.sizes, strict=False)
        for (name, mine, module), (_, theirs, _) in pairs:
            growing = tuple(
                at
                for at, (size, twin) in enumerate(zip(mine, theirs, strict=False))
                if type(size) is int and size != twin and size * other == twin * one
            )
            found.append((name, growing, bool(_IN_A_LIST.search(module))))
        return tuple(found)

    def _check_made_of(self, derived: Derived, at: int) -> None:
        """Check that a value recomputed for the whole batch uses nothing else of a part."""
        tracing = self._first.calls.tracing
        for tensor in derived.others():
            if not self._state.flows.get(tracing.see(tensor).place, FREE).is_whole:
                raise _Keep(
                    "the batch is counted together with a tensor that has an entry for each sample"
                    f" and does not come from it{self._where(at)}"
                )

    def _twin(self, call: _FunctionCall) -> _FunctionCall:
        """The same call in the other forward."""
        at = next(at for at, one in enumerate(self._first.calls.calls) if one is call)
        return self._second.calls.calls[at]

    def _in_proportion(self, call: _FunctionCall) -> tuple[int, ...]:
        """The positions of a call's arguments that are numbers which grow with the samples."""
        twin = self._twin(call)
        one, other = self._first.trace.samples, self._second.trace.samples
        pairs = list(zip(call.plain, twin.plain, strict=False))
        differing = [at for at, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if any(pairs[at][0] * other != pairs[at][1] * one for at in differing):
            raise _Keep(f"{call.name} uses a number that depends on how many samples there are")
        return tuple(differing)

    def _call_around(self, at: int) -> _FunctionCall:
        for call in self._first.calls.calls:
            if call.start <= at < call.end:
                return call
        raise _Keep(f"a number is computed beside PyTorch's functions{self._where(at)}")

    def _number(self, call: _FunctionCall, at: int) -> int:
        if call.number < 0 or _IN_A_LIST.search(call.module):
            raise _Keep(
                f"{call.name} computes with all samples of the batch, where their whole cannot be"
                f" put in its place{self._where(at)}"
            )
        return call.number

    def _where(self, at: int) -> str:
        return _where(self._first.trace.steps[at])


def _where(step: Any) -> str:
    return f" (in {step.module})" if step.module else ""


def _checked(call: Call, rule: Any, flows: Sequence[Flow], found: Flow) -> Flow:
    """The rule's result, after checking that it dropped no property that must be kept."""
    if call.base not in OPS["uniform"] and rule is not elementwise:
        _refuse_numbers(call)
    if call.base in OPS["like"] or call.base in OPS["uniform"]:
        return found
    sums = any(flow.kind is Kind.SUM for flow in flows)
    powers = any(flow.power for flow in flows)
    places = any(flow.kind is Kind.POSITION for flow in flows)
    if sums and found.kind is not Kind.SUM:
        raise MixesSamples(f"{call.base} of a sum over samples")
    if powers and not found.power and rule not in (elementwise, product):
        raise MixesSamples(f"{call.base} of something that depends on how many samples there are")
    if places and found.kind is not Kind.POSITION and not call.base.startswith(_INDEXING):
        raise MixesSamples(f"{call.base} counts samples by their place in the batch")
    return found


def _refuse_numbers(call: Call) -> None:
    """Reject plain numbers, except sizes, that depend on how many samples there are."""
    for name, value in call.step.given.items():
        if name in _SIZES or (name == "start" and call.base in ("slice", "narrow")):
            continue
        pairs = zip(tree_leaves(value), tree_leaves(call.other.given.get(name)), strict=False)
        for one, other in pairs:
            is_number = isinstance(one, (int, float)) and isinstance(other, (int, float))
            if is_number and call.power_of(one, other) != 0:
                raise MixesSamples(
                    f"{call.base} uses a number that depends on how many samples there are"
                )


#: Arguments that are sizes: where they differ, so do the shapes of results. The start of a slice is
#: checked by its rule.
_SIZES = (
    *("size", "sizes", "self_size", "input_size", "input_sizes", "repeats", "shape", "stride"),
    *("end", "length", "split_size", "split_sizes", "chunks", "sections", "N", "output_size"),
    "batch_sizes",
)
#: Ops that may use positions in the batch for their purpose: as indices.
_INDEXING = ("index", "_unsafe_index", "_index_put")


def _ignores_contents(call: Call) -> bool:
    return call.base.endswith("_like") and call.base.startswith(("zeros", "ones", "full", "empty"))


def _same_numbers(call: Call) -> bool:
    return all(call.power_of(one, other) == 0 for one, other in call.numbers())


def _written_places(step: Any) -> list[Place]:
    """The locations that an op writes to."""
    found = []
    for argument in schema_of(step.func).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = step.given.get(argument.name)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Seen):
                    found.append(one.place)
    return found


def _is_shaped_so(call: Call, one: Seen, two: Seen, flow: Flow) -> bool:
    """Whether a result's shapes in the two forwards agree with its flow."""
    if flow.kind is Kind.MIXED:
        return True
    if len(one.shape) != len(two.shape):
        return False
    varying = [
        at for at, pair in enumerate(zip(one.shape, two.shape, strict=True)) if pair[0] != pair[1]
    ]
    if not flow.has_samples:
        return not varying
    if flow.order[0] == "picked":
        return set(varying) <= {flow.dim}
    mine, theirs = call.samples
    if varying != [flow.dim]:
        return False
    if flow.order[0] == "rows":
        unit = int(str(flow.order[1])) * int(str(flow.order[2]))
        return (one.shape[flow.dim], two.shape[flow.dim]) == (unit * mine, unit * theirs)
    return one.shape[flow.dim] * theirs == two.shape[flow.dim] * mine
