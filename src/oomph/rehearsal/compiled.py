"""A compiled block in a rehearsal: the memory of its partitioned graphs, not of its eager ops.

`torch.compile` traces a block's forward and backward together, cuts the joint graph in two where
that saves most (recomputing what is cheap), and fuses what lies between matrix products. The block
is traced and cut here by PyTorch's own functions; which results then become buffers follows the
rules of its compiler (see `fusion`). What runs in the rehearsal is a stand-in that takes and frees
those buffers in the graphs' order.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from oomph.errors import CannotRehearse, OomphError
from oomph.planning.choices import KEEP, saved_ops
from oomph.rehearsal.fusion import Program, schedule
from oomph.rehearsal.recorder import Bare, Recorder
from oomph.techniques.recompute import KINDS, replace_forward
from oomph.techniques.technique import Undo


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """A block's joint graph of forward and backward, uncut."""

    joint: fx.GraphModule
    inputs: Any
    options: dict[str, Any]
    outputs: int
    """How many tensors the block returns."""
    spec: Any
    """How they are nested."""
    metas: tuple[Any, ...]
    """(shape, stride, dtype) of each."""


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The two programs of a block that was cut for one choice of recompute."""

    forward: Program
    backward: Program
    outputs: int
    spec: Any
    metas: tuple[Any, ...]


@dataclass
class _Cache:
    """Blocks of one class with inputs of one shape share their graphs."""

    traced: dict[Any, _Traced] = field(default_factory=dict)
    cut: dict[Any, _Cut] = field(default_factory=dict)


_cache = _Cache()


def forget_compiled() -> None:
    """Drop all traced graphs; they hold fake tensors only, but many."""
    _cache.traced.clear()
    _cache.cut.clear()


def stand_in_for_compiled(block: nn.Module, how: str, *, recorder: Recorder) -> Undo:
    """Make `block` take the memory it would take compiled, with the recompute choice `how`."""
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
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)  # evaluation is rehearsed as it is without compilation
    call = _Call.of(block, args, kwargs)
    cut = _cut(call, forward, how, recorder)
    results = _StandIn.apply(cut, recorder, *call.tensors)
    return tree_unflatten(list(results), cut.spec)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of a block, with its weights as arguments."""

    block: nn.Module
    names: tuple[str, ...]
    """Of parameters and buffers, which come first among the tensors."""
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
        """Equal for calls that compile to the same graphs."""
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in self.tensors)
        constants = tuple(
            leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
            for leaf in self.leaves
            if not isinstance(leaf, Tensor)
        )
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return type(self.block), self.names, shapes, constants, str(self.spec), cast


def _cut(call: _Call, forward: Callable[..., Any], how: str, recorder: Recorder) -> _Cut:
    key = call.key
    if (key, how) not in _cache.cut:
        if key not in _cache.traced:
            try:
                _cache.traced[key] = _trace(call, forward, recorder)
            except OomphError:
                raise
            except Exception as error:
                raise CannotRehearse(
                    f"{type(call.block).__name__} cannot be compiled as a whole: {error}"
                ) from error
        with _untouched(recorder):
            _cache.cut[key, how] = _partition(_cache.traced[key], how)
    return _cache.cut[key, how]


class _untouched:  # noqa: N801 - a context manager
    """Runs what is inside as if no rehearsal was on, but for CUDA's choice of kernels."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._function_off: Any = None
        self._modes_off: Any = None

    def __enter__(self) -> None:
        self._recorder.tracing = True
        self._function_off = torch._C.DisableTorchFunction()
        self._function_off.__enter__()
        self._modes_off = _disable_current_modes()
        self._modes_off.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._modes_off.__exit__(*error)
        self._function_off.__exit__(*error)
        self._recorder.tracing = False


def _trace(call: _Call, forward: Callable[..., Any], recorder: Recorder) -> _Traced:
    from torch._inductor.decomposition import select_decomp_table

    casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    found: dict[str, Any] = {}
    weights = len(call.names)

    def flat(*tensors: Tensor) -> Any:
        given = iter(tensors[weights:])
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        named = dict(zip(call.names, tensors[:weights], strict=True))
        with _reparametrize_module(call.block, named):
            out = forward(*args, **kwargs)
        results, found["spec"] = tree_flatten(out)
        found["metas"] = tuple((tuple(r.shape), r.stride(), r.dtype) for r in results)
        return tuple(results)

    def keep(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.update(joint=_copy(joint), inputs=inputs, options=options)
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)

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
            bw_compiler=lambda graph, _: graph,
            partition_fn=keep,
            decompositions=select_decomp_table(),
        )
        with mode, torch.autocast("cpu", dtype=casts[1], enabled=casts[0]):
            traced(*twins)
    if "joint" not in found:
        raise CannotRehearse(f"{type(call.block).__name__} has nothing to differentiate")
    return _Traced(
        joint=found["joint"],
        inputs=found["inputs"],
        options=found["options"],
        outputs=len(found["metas"]),
        spec=found["spec"],
        metas=found["metas"],
    )


def _copy(joint: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(joint, copy.deepcopy(joint.graph))


def _partition(traced: _Traced, how: str) -> _Cut:
    joint = _copy(traced.joint)
    if how != KEEP:
        _tag(joint, saved_ops(how))
    # States of the random generator take no memory to speak of, and fetching them wants a GPU.
    with mock.patch.object(partitioners, "functionalize_rng_ops", lambda _, fw, bw, __: (fw, bw)):
        forward, backward = partitioners.min_cut_rematerialization_partition(
            joint, traced.inputs, **traced.options
        )
    return _Cut(
        forward=schedule(forward.graph),
        backward=schedule(backward.graph),
        outputs=traced.outputs,
        spec=traced.spec,
        metas=traced.metas,
    )


def _tag(joint: fx.GraphModule, keep: frozenset[str]) -> None:
    """Say of each result of forward whether it is to be recomputed, as checkpointing would."""
    counts: dict[str, int] = {}
    needs_tangents: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                needs_tangents.add(node)
            continue
        if node.op != "call_function":
            continue
        if any(source in needs_tangents for source in node.all_input_nodes):
            needs_tangents.add(node)
            continue
        kind = KINDS.get(node.target)
        policy = CheckpointPolicy.PREFER_RECOMPUTE
        if kind is not None:
            name = f"{kind}#{counts.get(kind, 0)}"
            counts[kind] = counts.get(kind, 0) + 1
            if name in keep:
                policy = CheckpointPolicy.MUST_SAVE
        elif node.target is operator.getitem:
            policy = node.all_input_nodes[0].meta.get("recompute", policy)
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 1


#: What the timeline calls the op that takes a compiled kernel's buffer.
COMPILED = "oomph.compiled"

#: A buffer of a program: a tensor where somebody outside needs one, else just its memory.
_Buffer = Tensor | Bare
_Meta = tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype]


class _StandIn(torch.autograd.Function):
    """Takes and frees the buffers of a compiled block, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, cut: _Cut, recorder: Recorder, *inputs: Tensor) -> Any:
        buffers: dict[str, _Buffer] = dict(zip(cut.forward.inputs, inputs, strict=True))
        names = cut.forward.outputs
        metas = dict(zip(names[: cut.outputs], cut.metas, strict=True))
        _play(cut.forward, buffers, metas, recorder)
        ctx.cut, ctx.recorder = cut, recorder
        ctx.kept = [buffers[name] for name in names[cut.outputs :]]
        ctx.wants = [(t.requires_grad, tuple(t.shape), t.dtype) for t in inputs]
        return tuple(_shaped(buffers[name], meta) for name, meta in metas.items())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cut: _Cut = ctx.cut
        kept, ctx.kept = ctx.kept, None
        tangents = [gradient for gradient in gradients if gradient is not None]
        buffers: dict[str, _Buffer] = dict(
            zip(cut.backward.inputs, [*kept, *tangents], strict=True)
        )
        del kept
        metas: dict[str, _Meta] = {}
        named: list[str] = []
        for name, (wanted, shape, dtype) in zip(cut.backward.outputs, ctx.wants, strict=True):
            named.append(name if wanted else "")
            if wanted and name:
                metas[name] = (shape, None, dtype)
        _play(cut.backward, buffers, metas, ctx.recorder)
        grads = [_shaped(buffers[name], metas[name]) if name else None for name in named]
        return (None, None, *grads)


def _play(
    program: Program, buffers: dict[str, _Buffer], metas: dict[str, _Meta], recorder: Recorder
) -> None:
    """Take and free buffers in the program's order; those of `metas` as tensors."""
    for step in program.steps:
        for name in step.frees_first:
            buffers.pop(name, None)
        for name, size in step.takes:
            if name in metas:
                buffers[name] = _take_tensor(size, metas[name])
            else:
                buffers[name] = recorder.take(size, COMPILED)
        for name in step.frees:
            buffers.pop(name, None)
        recorder.run_kernel(step.work)


def _take_tensor(size: int, meta: _Meta) -> Tensor:
    shape, stride, dtype = meta
    if math.prod(shape) * dtype.itemsize != size:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    if stride is None:
        return torch.empty(shape, dtype=dtype, device="cuda")
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def _shaped(buffer: _Buffer, meta: _Meta) -> Tensor:
    """A buffer as a tensor of this shape."""
    shape, stride, dtype = meta
    assert isinstance(buffer, Tensor)
    if buffer.shape == shape and buffer.dtype is dtype:
        return buffer
    flat = buffer.detach().view(-1) if buffer.dtype is dtype else buffer.detach().view(dtype)
    return flat.as_strided(shape, stride or torch.empty(shape, device="meta").stride())
