"""Survey: one forward of a job, which shows its blocks and the ops in them worth saving."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oomph.errors import CannotRehearse
from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.hardware.timing.ops import work_of
from oomph.jobs.blocks import Call, choose_blocks, families
from oomph.jobs.job import Job
from oomph.jobs.preexisting_settings import checkpoints_itself, put_aside
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, saving
from oomph.rehearsal.passing_errors import PassingErrors
from oomph.rehearsal.phases import FORWARD, rehearse
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.storages import storage_key, tensors_in
from oomph.splitting import prove_split
from oomph.techniques.chunked_loss import find_heads
from oomph.techniques.gradient_hooks import why_whole_for_hooks
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.micro_batch import why_whole
from oomph.techniques.optimizer_steps import why_not_divided
from oomph.techniques.recompute import KINDS
from oomph.techniques.surroundings import is_transformed
from oomph.techniques.technique import (
    ApplyContext,
    SearchContext,
    apply_techniques,
    techniques,
)
from oomph.techniques.tensor_writes import written_by
from oomph.torch_compat.dispatch import TorchDispatchMode
from oomph.torch_compat.modules import forward_hooks_of, forward_pre_hooks_of
from oomph.torch_compat.operators import schema_of


@dataclass(frozen=True, kw_only=True)
class SavableOp:
    """An op of a block whose result could be kept."""

    name: str
    nbytes: int
    seconds: float
    is_overwritten: bool = False
    """Whether the block writes to the result later: checkpointing cannot keep it then."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A repeated part of the model; blocks are in the order they run."""

    path: str
    kind: tuple[Any, ...]
    """Equal for blocks of one class with weights and inputs of one shape."""
    ops: tuple[SavableOp, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the planner has to know about a model before it begins."""

    blocks: tuple[Block, ...]
    others: tuple[str, ...]
    """Modules outside the blocks, written op by op in Python, that are worth compiling."""
    heads: dict[str, tuple[int, int]]
    """Output layers over a large vocabulary, by path: their output and input widths."""
    trainable: int
    """Number of parameters that have gradients."""
    first: int
    """Number of parameters in the tensor that the optimizer steps first, usually an embedding."""
    stepped_whole_because: str
    """Why the optimizer must step all parameters at once; empty if it need not."""
    draws_random_numbers: bool
    """Whether a forward does so, for example in dropout."""
    unsuited: Mapping[str, str]
    """By technique: why this model, or its optimizer, cannot have it; others are not named."""
    checkpoints_itself: bool
    """Whether the user enabled the model's own checkpointing of its blocks."""
    whole_because: str
    """Why a batch must not be split; empty if it may be."""
    split: LossSplit | None
    """How the losses of parts make that of the batch; None if the user says so."""
    left_alone: tuple[str, ...]
    """Reasons why some blocks cannot be recomputed."""

    @property
    def steps_per_parameter(self) -> bool:
        """Whether the optimizer can step one parameter after the other."""
        return not self.stepped_whole_because

    @property
    def can_compile(self) -> bool:
        """Whether there is anything to compile separately."""
        return bool(self.blocks or self.others)

    def options(self, block: Block) -> tuple[str, ...]:
        """The menu of a block: keep, recompute, and options between them."""
        # The last product's result leaves the block: its backward does not need it.
        ops = [op for op in block.ops[:-1] if op.nbytes and not op.is_overwritten]
        ranked = sorted(ops, key=lambda op: -op.seconds / op.nbytes)
        sizes = sorted({1, (len(ranked) + 1) // 2, len(ranked)} - {0}) if ranked else []
        in_order = [op.name for op in ops]
        between = [
            saving(tuple(sorted((op.name for op in ranked[:size]), key=in_order.index)))
            for size in sizes
        ]
        return (KEEP, RECOMPUTE, *between)


#: Called with the model and its optimizer, both fake.
Look = Callable[[nn.Module, torch.optim.Optimizer], None]


def survey(job: Job, gpu: GPU | None, clock: Clock, look: Look) -> Survey:
    """Run the job's forward on fake tensors and examine its modules."""
    whole_because, split = _why_whole(job), None
    if not whole_because and job.whole_batch is None and job.normalizer is None:
        split = prove_split(job, gpu)
        whole_because = split.whole_because
    plain = dataclasses.replace(job, checkpointing="none", micro_batch=None)
    seen = _see_altered(_see(_Seen(plain, gpu, clock=clock, look=look)))
    chosen = [
        path
        for path in choose_blocks(seen.families, seen.calls)
        if seen.takes_part_in_backward(path) and not seen.holds_a_head(path)
    ]
    hooked = [path for path in chosen if path in seen.hooked]
    left_alone = tuple(
        f"{path} has a hook inside, which recompute would call twice" for path in hooked
    )
    left_alone += tuple(one.left_alone for one in seen.inspections.values() if one.left_alone)
    return Survey(
        blocks=tuple(seen.block(path) for path in chosen if path not in seen.hooked),
        others=seen.others(chosen),
        heads=seen.heads,
        trainable=seen.trainable,
        first=seen.first,
        stepped_whole_because=_why_stepped_whole(job) or seen.stepped_whole_because,
        draws_random_numbers=seen.draws_random_numbers,
        unsuited=seen.unsuited,
        checkpoints_itself=seen.checkpoints_itself,
        whole_because=whole_because or seen.whole_because,
        split=split,
        left_alone=left_alone,
    )


def _why_whole(job: Job) -> str:
    """Why the user's batch must not be split, from the original job: copies lose their hooks."""
    if job.whole_batch:
        return "the job says so"
    if not isinstance(job.model, nn.Module):
        return ""
    return why_whole_for_hooks(job.model, in_parts=job.micro_batch is not None)


def _why_stepped_whole(job: Job) -> str:
    """Why the user's optimizer steps as a whole; its copies lose hooks and a replaced step."""
    own = job.optimizer
    return why_not_divided(own) if isinstance(own, torch.optim.Optimizer) else ""


def _see(seen: _Seen) -> _Seen:
    with contextlib.ExitStack() as entered:
        for inspection in seen.inspections.values():
            entered.enter_context(inspection.rehearsing())
        rehearse(seen.job, seen.gpu, (FORWARD,), watch=seen.watch)
    return seen


def _see_altered(seen: _Seen) -> _Seen:
    """The forward as it runs with the techniques that alter it; else what was seen before."""
    context = SearchContext(gpu=seen.gpu, choices=Choices(precision=seen.job.precision))
    altering = {
        one.name: one.options(context)[0]
        for one in techniques()
        if one.alters_forward and one.name not in seen.unsuited and not one.why_not(context)
    }
    if not altering:
        return seen
    try:
        return _see(seen.again(Choices(techniques=altering)))
    except CannotRehearse as error:  # say, the loss reads what a technique drops
        seen.refused = dict.fromkeys(altering, str(error))
        return seen


class _Seen:
    """What one forward showed, with the techniques of these choices."""

    def __init__(
        self, job: Job, gpu: GPU | None, *, clock: Clock, look: Look, choices: Choices | None = None
    ) -> None:
        self.job = job
        self.gpu = gpu
        self.inspections = {one.name: one.inspect(job) for one in techniques()}
        #: Why techniques that alter the forward cannot be had after all, by name.
        self.refused: dict[str, str] = {}
        self._clock = clock
        self._look = look
        self._choices = choices or Choices()
        self.trainable = self.first = 0
        self.stepped_whole_because = ""
        self.calls: list[Call] = []
        self.families: list[Any] = []
        self._model: nn.Module | None = None
        self.heads: dict[str, tuple[int, int]] = {}
        self.checkpoints_itself = False
        self.whole_because = ""
        self.hooked: set[str] = set()
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._ops: dict[Any, tuple[SavableOp, ...]] = {}
        self._log = _OpLog(clock)
        #: For each call under way, its start in the log.
        self._starts: list[int] = []
        self._errors = PassingErrors()
        self._differentiated: set[str] = set()

    def watch(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, recorder: Recorder
    ) -> None:
        """Examine the modules, and hook each one that may be a block."""
        assert optimizer is not None
        self._model = model
        self._look(model, optimizer)
        self.checkpoints_itself = checkpoints_itself(model)
        put_aside(model)
        apply_techniques(
            ApplyContext(
                model=model,
                optimizer=optimizer,
                device_type="cpu" if self.gpu is None else "cuda",
                choices=self._choices,
            )
        )
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        self.first = next((p.numel() for p in stepped if p.requires_grad), 0)
        self.stepped_whole_because = why_not_divided(optimizer)
        self.families = families(model)
        self.heads = {
            path: (head.out_features, head.in_features) for path, head in find_heads(model)
        }
        for inspection in self.inspections.values():
            inspection.built(model, optimizer)
        self.whole_because = why_whole(model)
        paths = ["", *(path for family in self.families for path in family.all_paths())]
        modules = {path: model.get_submodule(path) for path in paths}
        self.hooked = {path for path, module in modules.items() if _has_own_hooks(module)}
        for path, module in modules.items():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(
                functools.partial(self._leave, path), with_kwargs=True, always_call=True
            )

    @property
    def unsuited(self) -> dict[str, str]:
        """By technique: why not, of those that cannot be had."""
        found = {name: one.why_not for name, one in self.inspections.items()}
        found = {name: why for name, why in found.items() if name not in self._choices.techniques}
        return {name: why for name, why in (found | self.refused).items() if why}

    def again(self, choices: Choices) -> _Seen:
        """Looks at the same forward, with the techniques of these choices."""
        return _Seen(self.job, self.gpu, clock=self._clock, look=self._look, choices=choices)

    def _enter(self, *_: Any) -> None:
        if not self._starts:
            # Of what was computed outside of all calls nothing is known.
            self._log.results = _CallResults()
            self._log.__enter__()
        self._starts.append(len(self._log.ops))
        self._errors.enter()

    def _leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        ops = self._log.ops[self._starts.pop() :]
        if not self._starts:
            self._log.__exit__(None, None, None)
        if self._errors.leave() or is_transformed():
            return
        taken, given = list(tensors_in((args, kwargs))), list(tensors_in(out))
        made_of = self._log.results.made_of(_keys(taken))
        gave = self._log.results.note(_keys(given))
        self.calls.append((path, _keys(taken) | made_of, _keys(given) | gave))
        if any(tensor.requires_grad for tensor in given):
            self._differentiated.add(path)
        weights = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
        shapes = tuple((tuple(t.shape), t.dtype) for t in taken)
        # Blocks of one class can still differ, as every second one of a Swin does.
        kind = (type(module), weights, shapes, tuple(func for func, _ in ops))
        self._kinds[path] = kind
        self._sizes[path] = sum(p.numel() for p in module.parameters())
        if kind not in self._ops:
            self._ops[kind] = _named([op for _, op in ops if op is not None])

    @property
    def draws_random_numbers(self) -> bool:
        """Whether any op that ran did so."""
        return self._log.draws_random_numbers

    def takes_part_in_backward(self, path: str) -> bool:
        """Whether something trainable comes before or inside a block.

        If the loss bypasses the model's forward nothing is known, and every block may.
        """
        return path in self._differentiated or not self._differentiated

    def holds_a_head(self, path: str) -> bool:
        """Whether it contains an output layer, which may be chunked with its loss."""
        return any(head.startswith(f"{path}.") for head in self.heads)

    def others(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """Small modules that are not PyTorch's, such as custom norms, outside the blocks."""
        assert self._model is not None
        inside = tuple(f"{path}." for path in blocks)
        return tuple(
            path
            for path, module in self._model.named_modules()
            if not path.startswith(inside)
            and path not in blocks
            and not list(module.children())
            and list(module.parameters())
            and not type(module).__module__.startswith("torch.")
        )

    def block(self, path: str) -> Block:
        """What was found out about the block at `path`."""
        kind = self._kinds[path]
        return Block(path=path, kind=kind, ops=self._ops[kind], parameters=self._sizes[path])


class _CallResults:
    """Which modules' results each tensor was computed from, by ops between their calls.

    A residual connection outside of the blocks, as in `x = x + block(x)`, hands the next block
    such a tensor, and not the result itself.
    """

    def __init__(self) -> None:
        #: By storage: numbers of results. They are negative, so that they are no storages' keys.
        self._of: dict[int, frozenset[int]] = {}
        #: By storage: the results that lie in it.
        self._in: dict[int, frozenset[int]] = {}
        self._count = 0

    def made_of(self, keys: frozenset[int]) -> frozenset[int]:
        """The results that these storages hold or were computed from."""
        return frozenset().union(*(self._of.get(key, ()) for key in keys))

    def note(self, keys: frozenset[int]) -> frozenset[int]:
        """A module returned these storages: gives the numbers of its result.

        What was computed inside of the call stays inside, but the result of another module that it
        returned as its own.
        """
        self._count += 1
        own = frozenset([-self._count])
        for key in keys:
            self._of[key] = self._in[key] = own | self._in.get(key, frozenset())
        return own

    def follow(self, taken: frozenset[int], given: frozenset[int]) -> None:
        """An op computed storages from others."""
        made_of = self.made_of(taken)
        for key in given:
            self._of[key] = made_of
            self._in.pop(key, None)


class _OpLog(TorchDispatchMode):
    """Logs all ops, with details of those whose results are worth saving."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.ops: list[tuple[Any, SavableOp | None]] = []
        self.draws_random_numbers = False
        self.results = _CallResults()
        self._clock = clock
        #: By storage: index in the log of the op that made it, if the result is worth saving.
        self._results: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        savable = None
        if (kind := KINDS.get(func)) is not None:
            savable = SavableOp(
                name=kind,
                nbytes=sum(t.numel() * t.element_size() for t in tensors_in(out)),
                seconds=self._clock.seconds(work_of(func, args, out)),
            )
        self._follow_results(func, args, kwargs or {}, out, is_savable=savable is not None)
        self.ops.append((func, savable))
        self.draws_random_numbers |= _draws(func, args, kwargs or {})
        return out

    def _follow_results(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, *, is_savable: bool
    ) -> None:
        """Track which storages are results worth saving, and which of them are overwritten."""
        for key in _keys(written_by(func, args, kwargs)):
            if (at := self._results.get(key)) is not None:
                op, savable = self.ops[at]
                assert savable is not None
                self.ops[at] = op, dataclasses.replace(savable, is_overwritten=True)
        taken, given = _keys(tensors_in((args, kwargs))), _keys(tensors_in(out))
        self.results.follow(taken, given)
        for key in given - taken:
            self._results.pop(key, None)  # its old entry was freed memory
            if is_savable:
                self._results[key] = len(self.ops)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in schema_of(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _named(ops: Sequence[SavableOp]) -> tuple[SavableOp, ...]:
    """The ops of one block, each numbered among those of its kind."""
    counts: Counter[str] = Counter()
    named = []
    for op in ops:
        named.append(dataclasses.replace(op, name=f"{op.name}#{counts[op.name]}"))
        counts[op.name] += 1
    return tuple(named)


def _keys(tensors: Any) -> frozenset[int]:
    return frozenset(storage_key(tensor) for tensor in tensors)


def _has_own_hooks(block: nn.Module) -> bool:
    """Whether a module inside the block has a user's hook; the rehearsal registers one itself."""
    return any(
        len(forward_hooks_of(inside)) > 1 or len(forward_pre_hooks_of(inside)) > 1
        for inside in block.modules()
        if inside is not block
    )
