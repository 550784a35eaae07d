"""A compiled block in a rehearsal: the memory of its partitioned graphs, not of its eager ops.

`torch.compile` traces a block's forward and backward together, cuts the joint graph in two where
that saves most (recomputing what is cheap), and fuses the ops between matrix products. Here the
block is traced and cut by PyTorch's own functions; the rules of its compiler decide which results
become buffers (see `fusion`). The rehearsal runs a stand-in that takes and frees those buffers in
the graphs' order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from oomph.errors import CannotRehearse, OomphError
from oomph.hardware.timing.layouts import has_channels_last
from oomph.plans.choices import KEEP, saved_ops
from oomph.process.rehearsal_threads import replaced_here
from oomph.rehearsal.fusion import Program, schedule
from oomph.rehearsal.garbage import count_as_old
from oomph.rehearsal.recorder import Bare, Recorder
from oomph.rehearsal.settings_read import SettingsRead, reading_settings
from oomph.techniques.compiled_blocks import FALLBACK_RANDOM
from oomph.techniques.recompute import KINDS, replace_forward
from oomph.techniques.technique import Undo, techniques
from oomph.torch_compat import tracing
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.fake_tensors import FakeTensorMode
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.modules import reparametrized
from oomph.torch_compat.pytree import tree_flatten, tree_leaves, tree_unflatten
from oomph.torch_compat.tracing import (
    aot_function,
    fx_graph_cse,
    make_graph_module,
    partitioners,
    use_lazy_graph_module,
)
from oomph.torch_compat.tracing import config as functorch_config


class _Meta(NamedTuple):
    """Metadata of a tensor that a block returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    wants_gradient: bool


@dataclass(frozen=True, kw_only=True)
class _Result:
    """A block's return value: its tensors (as metadata), its constants and their nesting."""

    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, value: Any) -> _Result:
        leaves, spec = tree_flatten(value)
        known = tuple(
            _Meta(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        )
        return cls(leaves=known, spec=spec)

    @property
    def metas(self) -> tuple[_Meta, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, _Meta))

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """The return value with these tensors filled in."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, _Meta) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """A block's joint graph of forward and backward, before the cut, with equal ops merged."""

    joint: fx.GraphModule
    inputs: Any
    options: dict[str, Any]
    result: _Result
    written: int
    """How many buffers the forward writes to: their new values precede the results."""
    settings: SettingsRead
    """The settings read while tracing: blocks with other settings have other graphs."""
    cuts: dict[str, _Cut] = field(default_factory=dict)
    """The graph cut in two, by recompute choice."""


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The forward and backward programs of a block that was cut for one recompute choice."""

    forward: Program
    backward: Program
    result: _Result
    names: tuple[str, ...]
    """The buffers that hold the result's tensors."""
    kept: tuple[str, ...]
    """The buffers that backward needs."""
    gradients: tuple[tuple[int, ...] | None, ...]
    """The strides of each input gradient that is channels last; None for packed ones."""

    @property
    def made(self) -> dict[str, _Meta]:
        """The result's tensors that the block computes rather than passes through."""
        inputs = set(self.forward.inputs)
        return {
            name: meta
            for name, meta in zip(self.names, self.result.metas, strict=True)
            if name not in inputs
        }


#: Traced graphs by what is known before tracing; blocks with the same key may still differ in
#: settings.
_traced: dict[Any, list[_Traced]] = {}


def forget_compiled() -> None:
    """Drop all traced graphs; they hold only fake tensors, but many of them."""
    _traced.clear()


def stand_in_for_compiled(block: nn.Module, how: str, *, recorder: Recorder) -> Undo:
    """Make `block` take the memory it would take if compiled with the recompute choice `how`."""
    forward = block.forward
    return replace_forward(block, functools.partial(_run, block, forward, how, recorder))


def _run(
    block: nn.Module,
    forward: Callable[..., Any],
    how: str,
    recorder: Recorder,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = _Call.of(block, args, kwargs)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in call.tensors):
        return forward(*args, **kwargs)  # without backward the block is rehearsed uncompiled
    cut = _cut(call, forward, how, recorder)
    given = dict(zip(cut.forward.inputs, call.tensors, strict=True))
    made = zip(cut.made, _StandIn.apply(cut, recorder, *call.tensors), strict=True)
    tensors = {**given, **dict(made)}
    return cut.result.filled(tensors[name] for name in cut.names)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of a block, with its weights as arguments."""

    block: nn.Module
    names: tuple[str, ...]
    """Names of parameters and buffers, which come first among the tensors."""
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, block: nn.Module, args: Any, kwargs: Any) -> _Call:
        weights = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        leaves, spec = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(
            block=block,
            names=tuple(weights),
            tensors=(*weights.values(), *given),
            leaves=tuple(leaves),
            spec=spec,
        )

    @property
    def key(self) -> Any:
        """Equal for calls that compile to the same graphs if the blocks' settings agree."""
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in self.tensors)
        constants = tuple(
            leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
            for leaf in self.leaves
            if not isinstance(leaf, Tensor)
        )
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        inside = tuple(type(module) for module in self.block.modules())
        called = (inside, self.names, shapes, constants, str(self.spec), cast)
        process = tuple(technique.process_state() for technique in techniques())
        return *called, process, self._changed_inside()

    def _changed_inside(self) -> tuple[str, ...]:
        """Modules whose forward was replaced by a technique."""
        inside = self.block.named_modules()
        return tuple(name for name, module in inside if name and "forward" in vars(module))


def _cut(call: _Call, forward: Callable[..., Any], how: str, recorder: Recorder) -> _Cut:
    alike = _traced.setdefault(call.key, [])
    traced = next((one for one in alike if one.settings.hold_for(call.block)), None)
    if traced is None:
        try:
            traced = _trace(call, forward, recorder)
        except OomphError:
            raise
        except Exception as error:
            raise CannotRehearse(
                f"{type(call.block).__name__} cannot be compiled as a whole: {error}"
            ) from error
        alike.append(traced)
    if how not in traced.cuts:
        with _untouched(recorder):
            traced.cuts[how] = _partition(traced, how)
    return traced.cuts[how]


class _untouched:  # noqa: N801 - a context manager
    """Runs its body as if no rehearsal were on, but keeps CUDA's choice of kernels."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._function_off: Any = None
        self._modes_off: Any = None

    def __enter__(self) -> None:
        self._recorder.tracing = True
        self._function_off = DisableTorchFunction()
        self._function_off.__enter__()
        self._modes_off = disable_current_modes()
        self._modes_off.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._modes_off.__exit__(*error)
        self._function_off.__exit__(*error)
        self._recorder.tracing = False


class _TracedEnough(Exception):
    """Raised once the joint graph is captured, since nobody is going to run it."""


def _trace(call: _Call, forward: Callable[..., Any], recorder: Recorder) -> _Traced:
    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    found: dict[str, Any] = {}
    weights = len(call.names)

    def flat(*tensors: Tensor) -> Any:
        given = iter(tensors[weights:])
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        named = dict(zip(call.names, tensors[:weights], strict=True))
        with reparametrized(call.block, named), reading_settings(call.block) as settings:
            out = forward(*args, **kwargs)
        found.update(result=_Result.of(out), settings=settings)
        return tuple(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))

    def keep(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.update(joint=joint, inputs=inputs, options=options)
        raise _TracedEnough

    shapes = [
        (tuple(t.shape), t.stride(), t.dtype, t.requires_grad, t.is_floating_point())
        for t in call.tensors
    ]
    with _untouched(recorder):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        twins = []
        for shape, stride, dtype, wants_gradient, floating in shapes:
            with mode:
                twin = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            twins.append(twin.requires_grad_(wants_gradient and floating))
        traced = aot_function(
            flat,
            fw_compiler=lambda graph, _: graph,
            partition_fn=keep,
            decompositions=_decompositions(),
        )
        with (
            contextlib.suppress(_TracedEnough),
            mode,
            torch.autocast("cpu", dtype=casts[1], enabled=casts[0]),
        ):
            traced(*twins)
    if "joint" not in found:
        raise CannotRehearse(f"{type(call.block).__name__} has nothing to differentiate")
    written = _count_written(call, found)
    _number(found["joint"].graph)
    with _untouched(recorder), _never_run():
        found["joint"].graph.eliminate_dead_code()
        found["joint"].graph = fx_graph_cse(found["joint"].graph)
    return _Traced(**found, written=written)


@functools.cache
def _decompositions() -> Any:
    """The compiler's decompositions; the first call loads the compiler, which then stays loaded."""
    settings = tracing.compiler_settings()
    count_as_old()
    with settings.patch(FALLBACK_RANDOM):
        return tracing.decompositions()


@contextlib.contextmanager
def _never_run() -> Iterator[None]:
    """Skip writing Python code for graphs that are inspected but never run."""
    with (
        use_lazy_graph_module(True),
        replaced_here(fx.GraphModule, "recompile", lambda _: None),
    ):
        yield


def _count_written(call: _Call, found: dict[str, Any]) -> int:
    """How many of its buffers a block writes to, as a BatchNorm does; other writes are refused."""
    metas = found["result"].metas
    *_, output = found["joint"].graph.nodes
    returned = output.args[0]
    written: int = found["options"]["num_fwd_outputs"] - len(metas)
    buffers = iter(
        (tuple(buffer.shape), buffer.dtype)
        for name, buffer in zip(call.names, call.tensors, strict=False)
        if not isinstance(buffer, nn.Parameter)
    )
    for node in returned[: max(written, 0)]:
        value = node.meta["val"]
        if (tuple(value.shape), value.dtype) not in buffers:  # also advances the iterator
            raise CannotRehearse("it writes to its inputs, or gives back views of its own results")
    differentiated = [
        node
        for node, meta in zip(returned[written:], metas, strict=False)
        if meta.wants_gradient and node.op != "placeholder"
    ]
    tangents = [node for node in found["joint"].graph.nodes if _is_tangent(node)]
    if len(differentiated) != len(tangents):
        raise CannotRehearse("it gives back views of its inputs")
    return written


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _partition(traced: _Traced, how: str) -> _Cut:
    with (
        _never_run(),
        functorch_config.patch(cse=False),  # equal ops are merged already
        # The random generator's states take negligible memory, and fetching them needs a GPU.
        replaced_here(partitioners, "functionalize_rng_ops", lambda _, fw, bw, __: (fw, bw)),
    ):
        joint = make_graph_module(traced.joint, copy.deepcopy(traced.joint.graph))
        if how != KEEP:
            _tag(joint, saved_ops(how))
        forward, backward = partitioners.min_cut_rematerialization_partition(
            joint, traced.inputs, **traced.options
        )
    program = schedule(forward.graph)
    results = program.outputs[traced.written :]
    count = len(traced.result.metas)
    return _Cut(
        forward=program,
        backward=schedule(backward.graph),
        result=traced.result,
        names=results[:count],
        kept=results[count:],
        gradients=tuple(map(_strides_of_images, [*backward.graph.nodes][-1].args[0])),
    )


def _strides_of_images(node: Any) -> tuple[int, ...] | None:
    """The strides of a channels-last result; None for any other."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.stride() if isinstance(value, Tensor) and has_channels_last(value) else None


#: The node metadata key naming which of the block's savable ops a forward node is; all others get
#: `_NO_NAME`.
_NAME, _NO_NAME = "oomph_name", ""


def _number(graph: fx.Graph) -> None:
    """Name each forward result as checkpointing does, before equal ones are merged."""
    counts: dict[str, int] = {}
    needs_tangents: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if _is_tangent(node):
                needs_tangents.add(node)
            continue
        if node.op != "call_function":
            continue
        if any(source in needs_tangents for source in node.all_input_nodes):
            needs_tangents.add(node)
            continue
        kind = KINDS.get(node.target)
        node.meta[_NAME] = _NO_NAME
        if kind is not None:
            node.meta[_NAME] = f"{kind}#{counts.get(kind, 0)}"
            counts[kind] = counts.get(kind, 0) + 1


def _tag(joint: fx.GraphModule, keep: frozenset[str]) -> None:
    """Tag each forward result as recomputed or saved, as checkpointing would decide."""
    for node in joint.graph.nodes:
        name = node.meta.get(_NAME)
        if name is None:
            continue
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        if name in keep:
            policy = CheckpointPolicy.MUST_SAVE
        elif node.target is operator.getitem:
            policy = node.all_input_nodes[0].meta.get("recompute", policy)
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 1


#: The op name under which the timeline lists a compiled kernel's buffer.
COMPILED = "oomph.compiled"

#: A buffer of a program: a tensor if code outside the program needs one, else just its memory.
_Buffer = Tensor | Bare


class _StandIn(torch.autograd.Function):
    """Takes and frees the buffers of a compiled block, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, cut: _Cut, recorder: Recorder, *inputs: Tensor) -> Any:
        buffers: dict[str, _Buffer] = dict(zip(cut.forward.inputs, inputs, strict=True))
        _play(cut.forward, buffers, cut.made, recorder, kept=frozenset(cut.kept))
        ctx.cut, ctx.recorder = cut, recorder
        # As a compiled block does: hooks on tensors saved for backward see these.
        ctx.save_for_backward(*(buffers[name] for name in cut.kept))
        ctx.wants = [(t.requires_grad, tuple(t.shape), t.dtype) for t in inputs]
        ctx.set_materialize_grads(False)
        results = {name: _shaped(buffers[name], meta) for name, meta in cut.made.items()}
        ctx.mark_non_differentiable(
            *(results[name] for name, meta in cut.made.items() if not meta.wants_gradient)
        )
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cut: _Cut = ctx.cut
        kept = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # lets each be freed as soon as the program is done with it
        given = {
            # A result that was not used gets a gradient of zeros.
            name: gradient if gradient is not None else _take_tensor(_nbytes(meta), meta)
            for gradient, (name, meta) in zip(gradients, cut.made.items(), strict=True)
            if meta.wants_gradient
        }
        # A tensor that the block returns twice has two tangents.
        tangents = [given[name] for name in cut.names if name in given]
        del given
        buffers: dict[str, _Buffer] = dict(
            zip(cut.backward.inputs, [*kept, *tangents], strict=True)
        )
        del kept
        wanted = [
            (name, _Meta(shape, stride, dtype, False)) if wants and name else None
            for name, (wants, shape, dtype), stride in zip(
                cut.backward.outputs, ctx.wants, cut.gradients, strict=True
            )
        ]
        # Gradients may be parts of one buffer, such as those of concatenated inputs: any shape will
        # do.
        _play(cut.backward, buffers, dict(filter(None, wanted)), ctx.recorder)
        grads = [_shaped(buffers[one[0]], one[1]) if one else None for one in wanted]
        return (None, None, *grads)


def _play(
    program: Program,
    buffers: dict[str, _Buffer],
    metas: dict[str, _Meta],
    recorder: Recorder,
    kept: Collection[str] = (),
) -> None:
    """Take and free buffers in the program's order; those in `metas` and `kept` become tensors."""
    for step in program.steps:
        for name in step.frees_first:
            buffers.pop(name, None)
        for name, size in step.takes:
            if name in metas:
                buffers[name] = _take_tensor(size, metas[name])
            elif name in kept:
                buffers[name] = _take_bytes(size)
            else:
                buffers[name] = recorder.take(size, COMPILED)
        for name in step.frees:
            buffers.pop(name, None)
        recorder.run_kernel(step.work)


def _take_tensor(size: int, meta: _Meta) -> Tensor:
    if _nbytes(meta) != size:
        return _take_bytes(size)
    if meta.stride is None:
        return torch.empty(meta.shape, dtype=meta.dtype, device="cuda")
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cuda")


def _take_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _nbytes(meta: _Meta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def _shaped(buffer: _Buffer, meta: _Meta) -> Tensor:
    """The buffer as a tensor of the given shape, strides and dtype."""
    shape, stride, dtype, _ = meta
    assert isinstance(buffer, Tensor)
    if buffer.shape == shape and buffer.dtype is dtype:
        return buffer
    flat = buffer.detach().view(-1) if buffer.dtype is dtype else buffer.detach().view(dtype)
    return flat.as_strided(shape, stride or torch.empty(shape, device="meta").stride())
