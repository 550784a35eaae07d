"""Survey: one forward of a job, to learn which blocks it has and what is worth saving in them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.errors import BadInput, CannotRehearse
from oomph.gpus import GPU
from oomph.job import Job, make_batch
from oomph.planning.blocks import Call, choose_blocks, families
from oomph.planning.choices import KEEP, RECOMPUTE, saving
from oomph.rehearsal.passing_errors import PassingErrors
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.storages import storage_key, tensors_in, written_by
from oomph.techniques.attention_rows import gaps_noticed
from oomph.techniques.channels_last import takes_images
from oomph.techniques.chunked_loss import find_heads
from oomph.techniques.fused_optimizer import can_fuse
from oomph.techniques.generation_cache import (
    caching_modules,
    notice_cache,
    tells_samples_apart,
    without_cache,
)
from oomph.techniques.low_bit_state import low_bit_state
from oomph.techniques.micro_batch import why_whole
from oomph.techniques.optimizer_in_backward import check_per_parameter
from oomph.techniques.own_choices import checkpoints_itself, put_aside
from oomph.techniques.recompute import KINDS
from oomph.timing.clock import Clock
from oomph.timing.ops import work_of

#: Why blocks may be left as they are where keys and values for generating cannot be dropped.
BESIDE_A_CACHE = (
    "keys and values are kept for generating, beside which no block can be recomputed or compiled:"
    " set model.config.use_cache = False (transformers then also keeps samples of one row apart"
    " that position_ids tell apart)"
)

#: Images of so many channels were made by the model; those of a batch have fewer.
MADE_CHANNELS = 8


@dataclass(frozen=True, kw_only=True)
class SavableOp:
    """An op of a block whose result could be kept."""

    name: str
    nbytes: int
    seconds: float
    is_overwritten: bool = False
    """Whether the block writes to the result later: checkpointing refuses to keep such a one."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A repeated part of the model, in the order it runs."""

    path: str
    kind: tuple[Any, ...]
    """Equal for blocks of one class with weights and inputs of one shape."""
    ops: tuple[SavableOp, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What planning has to know of a model before it begins."""

    blocks: tuple[Block, ...]
    others: tuple[str, ...]
    """Modules outside the blocks, written in Python op by op, that are worth compiling."""
    heads: dict[str, tuple[int, int]]
    """Output layers over a large vocabulary, by path: how wide they are, and their input."""
    trainable: int
    """Parameters that have gradients."""
    first: int
    """Those of the tensor that the optimizer steps first: an embedding, as a rule."""
    can_fuse: bool
    """Whether the optimizer has a fused step that the job does not use yet."""
    can_low_bit: bool
    steps_per_parameter: bool
    """Whether the optimizer can step one parameter after the other."""
    draws_random_numbers: bool
    """Whether a forward does, as dropout."""
    attention_has_gaps: bool
    """Whether attention is given biases that no fused kernel takes as they are."""
    can_drop_cache: bool
    """Whether the model keeps keys and values for generating that its loss can do without."""
    convolves_images: bool
    """Whether convolutions over images feed one another, as they do in nets made of them."""
    checkpoints_itself: bool
    """Whether the model's owner switched on that it recomputes its blocks."""
    whole_because: str
    """Why a batch must not be split; empty where it may."""
    left_alone: tuple[str, ...]
    """What cannot be recomputed and why, in words."""

    @property
    def can_compile(self) -> bool:
        """Whether there is anything that is compiled by itself."""
        return bool(self.blocks or self.others)

    def options(self, block: Block) -> tuple[str, ...]:
        """The menu of a block: keep, recompute, and ways between them."""
        # The last product's result goes out of the block: nothing in backward asks for it.
        ops = [op for op in block.ops[:-1] if op.nbytes and not op.is_overwritten]
        ranked = sorted(ops, key=lambda op: -op.seconds / op.nbytes)
        sizes = sorted({1, (len(ranked) + 1) // 2, len(ranked)} - {0}) if ranked else []
        in_order = [op.name for op in ops]
        between = [
            saving(tuple(sorted((op.name for op in ranked[:size]), key=in_order.index)))
            for size in sizes
        ]
        return (KEEP, RECOMPUTE, *between)


#: Given the model and its optimizer, both fake.
Look = Callable[[nn.Module, torch.optim.Optimizer], None]


def survey(job: Job, gpu: GPU | None, clock: Clock, look: Look) -> Survey:
    """Run the job's forward on fake tensors and look at its modules."""
    plain = dataclasses.replace(job, checkpointing="none", micro_batch=None)
    seen = _see(plain, gpu, _Seen(clock=clock, look=look))
    without = _seen_without_cache(plain, gpu, _Seen(clock=clock, look=look, caches=False), seen)
    can_drop_cache, seen = without is not seen, without
    chosen = [
        path
        for path in choose_blocks(seen.families, seen.calls)
        if seen.takes_part_in_backward(path) and not seen.holds_a_head(path)
    ]
    hooked = [path for path in chosen if path in seen.hooked]
    left_alone = tuple(
        f"{path} has a hook inside, which recompute would call twice" for path in hooked
    )
    if seen.keeps_for_generating:
        left_alone += (BESIDE_A_CACHE,)
    return Survey(
        blocks=tuple(seen.block(path) for path in chosen if path not in seen.hooked),
        others=seen.others(chosen),
        heads=seen.heads,
        trainable=seen.trainable,
        first=seen.first,
        can_fuse=seen.can_fuse,
        can_low_bit=seen.can_low_bit,
        steps_per_parameter=seen.steps_per_parameter,
        draws_random_numbers=seen.draws_random_numbers,
        attention_has_gaps=seen.attention_has_gaps,
        can_drop_cache=can_drop_cache,
        convolves_images=seen.convolves_images,
        checkpoints_itself=seen.checkpoints_itself,
        whole_because="the job says so" if job.whole_batch else seen.whole_because,
        left_alone=left_alone,
    )


def _see(job: Job, gpu: GPU | None, seen: _Seen) -> _Seen:
    with gaps_noticed(seen.notice_gaps):
        rehearse(job, gpu, ("eval",), watch=seen.watch)
    return seen


def _seen_without_cache(job: Job, gpu: GPU | None, without: _Seen, seen: _Seen) -> _Seen:
    """The forward as it will run if nothing is kept for generating; else what was seen before."""
    if not seen.keeps_for_generating or tells_samples_apart(make_batch(job)):
        return seen
    try:
        return _see(job, gpu, without)
    except CannotRehearse:  # the loss reads it
        return seen


class _Seen:
    """What one forward showed; with `caches` false, one that keeps nothing for generating."""

    def __init__(self, clock: Clock, look: Look, *, caches: bool = True) -> None:
        self._clock = clock
        self._look = look
        self._caches = caches
        self.keeps_for_generating = False
        self.trainable = self.first = 0
        self.can_fuse = self.can_low_bit = self.steps_per_parameter = False
        self.calls: list[Call] = []
        self.families: list[Any] = []
        self._model: nn.Module | None = None
        self.heads: dict[str, tuple[int, int]] = {}
        self.attention_has_gaps = False
        self.convolves_images = False
        self.checkpoints_itself = False
        self.whole_because = ""
        self.hooked: set[str] = set()
        self._kinds: dict[str, tuple[Any, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._ops: dict[Any, tuple[SavableOp, ...]] = {}
        self._log = _OpLog(clock)
        #: Where in the log each call that has begun did.
        self._starts: list[int] = []
        self._errors = PassingErrors()
        self._differentiated: set[str] = set()

    def watch(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, recorder: Recorder
    ) -> None:
        """Look at the modules, and at each call of one that may be a block."""
        assert optimizer is not None
        self._model = model
        self._look(model, optimizer)
        self.checkpoints_itself = checkpoints_itself(model)
        put_aside(model)
        for module in caching_modules(model):
            if self._caches:
                notice_cache(module, self._notice_cache)
            else:
                without_cache(module)
        # As in training: evaluation runs other kernels, and tells nothing of what is frozen.
        model.eval = model.train  # type: ignore[method-assign]
        model.forward = torch.enable_grad()(model.forward)
        self.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        self.first = next((p.numel() for p in stepped if p.requires_grad), 0)
        self.can_fuse = can_fuse(optimizer) and not all(
            group.get("fused") for group in optimizer.param_groups
        )
        self.can_low_bit = _is_accepted(lambda: low_bit_state(optimizer)())
        self.steps_per_parameter = _is_accepted(lambda: check_per_parameter(optimizer, ""))
        self.families = families(model)
        self.heads = {
            path: (head.out_features, head.in_features) for path, head in find_heads(model)
        }
        self.convolves_images = _convolves_images(model)
        self.whole_because = why_whole(model)
        paths = ["", *(path for family in self.families for path in family.all_paths())]
        modules = {path: model.get_submodule(path) for path in paths}
        self.hooked = {path for path, module in modules.items() if _has_own_hooks(module)}
        for path, module in modules.items():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(
                functools.partial(self._leave, path), with_kwargs=True, always_call=True
            )

    def notice_gaps(self) -> None:
        """Attention was given a bias with gaps."""
        self.attention_has_gaps = True

    def _notice_cache(self) -> None:
        self.keeps_for_generating = True

    def _enter(self, *_: Any) -> None:
        if not self._starts:
            self._log.__enter__()
        self._starts.append(len(self._log.ops))
        self._errors.enter()

    def _leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        ops = self._log.ops[self._starts.pop() :]
        if not self._starts:
            self._log.__exit__(None, None, None)
        if self._errors.leave():
            return
        taken, given = list(tensors_in((args, kwargs))), list(tensors_in(out))
        self.calls.append((path, _keys(taken), _keys(given)))
        if any(tensor.requires_grad for tensor in given):
            self._differentiated.add(path)
        weights = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
        shapes = tuple((tuple(t.shape), t.dtype) for t in taken)
        # Blocks of one class can still do different things, as every second one of a Swin does.
        kind = (type(module), weights, shapes, tuple(func for func, _ in ops))
        self._kinds[path] = kind
        self._sizes[path] = sum(p.numel() for p in module.parameters())
        if kind not in self._ops:
            self._ops[kind] = _named([op for _, op in ops if op is not None])

    @property
    def draws_random_numbers(self) -> bool:
        """Whether any op that ran did."""
        return self._log.draws_random_numbers

    def takes_part_in_backward(self, path: str) -> bool:
        """Whether something that is trained comes before or inside a block.

        Where a loss goes around the model's forward nothing is known, and every block may.
        """
        return path in self._differentiated or not self._differentiated

    def holds_a_head(self, path: str) -> bool:
        """Whether an output layer, which may be chunked with its loss, is inside."""
        return any(head.startswith(f"{path}.") for head in self.heads)

    def others(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """Small modules of a library's own, such as norms, that stand outside the blocks."""
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
        """What is known of the block at `path`."""
        kind = self._kinds[path]
        return Block(path=path, kind=kind, ops=self._ops[kind], parameters=self._sizes[path])


class _OpLog(TorchDispatchMode):
    """Writes down all ops, and what is to know of those whose results are worth saving."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.ops: list[tuple[Any, SavableOp | None]] = []
        self.draws_random_numbers = False
        self._clock = clock
        #: By storage: where in the log the op is whose result is worth saving.
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
        """Know which storages are results worth saving, and which of them are written to."""
        for key in _keys(written_by(func, args, kwargs)):
            if (at := self._results.get(key)) is not None:
                op, savable = self.ops[at]
                assert savable is not None
                self.ops[at] = op, dataclasses.replace(savable, is_overwritten=True)
        for key in _keys(tensors_in(out)) - _keys(tensors_in((args, kwargs))):
            self._results.pop(key, None)  # of something that is gone
            if is_savable:
                self._results[key] = len(self.ops)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; attention does where it has dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p"))


def _named(ops: Sequence[SavableOp]) -> tuple[SavableOp, ...]:
    """The ops of one block, each with its number among those of its kind."""
    counts: Counter[str] = Counter()
    named = []
    for op in ops:
        named.append(dataclasses.replace(op, name=f"{op.name}#{counts[op.name]}"))
        counts[op.name] += 1
    return tuple(named)


def _keys(tensors: Any) -> frozenset[int]:
    return frozenset(storage_key(tensor) for tensor in tensors)


def _has_own_hooks(block: nn.Module) -> bool:
    """Whether a module inside the block has a hook of the user's; the rehearsal's own are one."""
    return any(
        len(inside._forward_hooks) > 1 or len(inside._forward_pre_hooks) > 1
        for inside in block.modules()
        if inside is not block
    )


def _convolves_images(model: nn.Module) -> bool:
    """Whether convolutions go over what it made, not only over a batch, to cut it into patches."""
    channels = [one.in_channels for one in model.modules() if takes_images(one)]
    return sum(number >= MADE_CHANNELS for number in channels) >= 2


def _is_accepted(attempt: Callable[[], None]) -> bool:
    """Whether a technique that is tried out, and taken back, raises no objection."""
    try:
        attempt()
    except BadInput:
        return False
    return True
