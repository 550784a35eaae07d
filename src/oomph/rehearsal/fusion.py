"""Decides which results of a graph become buffers when compiled, and when each is taken and freed.

The rules are those of PyTorch's compiler, as far as memory goes. Matrix products, attention and all
other ops with a kernel of their own write buffers and read buffers. The ops between them are fused:
a pointwise result exists only in registers, unless the graph returns it, an unfused kernel reads
it, or it is read several times and costly to recompute. Reductions write buffers. A fused kernel
overwrites an input of the same size that is not read afterwards.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from oomph.hardware.timing.ops import SLOW, work_of
from oomph.hardware.timing.work import Work
from oomph.torch_compat.operators import OVERLOADS, OpOverload, schema_of

aten = torch.ops.aten
prims = torch.ops.prims

#: A result that is used more than once is written to a buffer if it reads more buffers than this.
MOST_READS_ON_REUSE = 4
#: Any result that reads more buffers than this is written to a buffer.
MOST_READS = 8

#: The multiple of a large copy's bandwidth that fused kernels reach on the bytes counted here, on
#: an H200: they find recently written data in the card's cache, and Inductor fuses some kernels
#: that are separate here.
FUSED_REACH = 1.3
#: The same for sums of few numbers that lie far apart, such as a bias' gradient over a batch: a
#: kernel reads the numbers of a sum side by side. 100 MB of t5-base's took 96 µs.
FAR_APART_REACH, FEW = 0.25, 64
#: The same where the largest of a row is found first, as in softmax: rows are read once more.
SOFTMAX_REACH = 0.5

_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all", "argmax"}
_FUSED = {
    "arange",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "cat",
    "clamp",
    "clone",
    "constant_pad_nd",
    "convert_element_type",
    "copy",
    "embedding",
    "empty",
    "erf",
    "exp",
    "expand",
    "full",
    "full_like",
    "gather",
    "index",
    "iota",
    "lift_fresh_copy",
    "masked_fill",
    "repeat",
    "rsqrt",
    "scalar_tensor",
    "select_scatter",
    "slice_scatter",
    "where",
    "_to_copy",
    "inductor_random",
    "inductor_lookup_seed",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel: the buffers that it overwrites, takes, and frees when it is done."""

    frees_first: tuple[str, ...]
    takes: tuple[tuple[str, int], ...]
    frees: tuple[str, ...]
    work: Work


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled graph as a sequence of kernels over named buffers."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    """The buffer of each result; empty where the graph returns None."""
    steps: tuple[Step, ...]


def schedule(graph: fx.Graph) -> Program:
    """The graph's kernels in order, with the lifetimes of their buffers."""
    return _Scheduler(graph).program()


class _Scheduler:
    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = list(graph.nodes)
        self._returned = [
            node if isinstance(node, fx.Node) else None for node in self._nodes[-1].args[0]
        ]
        #: By node: the node whose storage it views; itself where it is not a view.
        self._root: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            viewed = _viewed(node)
            self._root[node] = self._root[viewed] if viewed is not None else node
        self._written = self._find_written()

    def _find_written(self) -> set[fx.Node]:
        """The results that become buffers."""
        root = self._root
        written = {root[node] for node in self._returned if node is not None}
        users: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in self._nodes:
            if node.op != "call_function" or _viewed(node) is not None:
                continue
            for source in node.all_input_nodes:
                users[root[source]].add(node)
            if _is_item(node):
                written.update((node, node.all_input_nodes[0]))
                continue
            if _is_fused(node):
                continue
            # A kernel that is not fused reads and writes buffers.
            written.add(node)
            written.update(root[source] for source in node.all_input_nodes)
        written.update(node for node in self._nodes if node.op == "placeholder")
        for node in self._nodes:
            if node.op != "call_function" or root[node] is not node or node in written:
                continue
            reads = len(self._reads(node, written))
            most = MOST_READS_ON_REUSE if len(users[node]) > 1 else MOST_READS
            if _is_reduction(node) or reads > most:
                written.add(node)
        return written

    def _reads(self, node: fx.Node, written: set[fx.Node]) -> set[fx.Node]:
        """The buffers that a node reads, directly or through fused nodes."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = [self._root[source] for source in node.all_input_nodes]
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in written:
                found.add(source)
            else:
                stack.extend(self._root[deeper] for deeper in source.all_input_nodes)
        return found

    def program(self) -> Program:
        """The kernels, ordered so that each runs after those whose results it reads."""
        written = [
            node
            for node in self._nodes
            if node.op == "call_function" and node in self._written and self._root[node] is node
        ]
        writers = [node for node in written if not _is_item(node)]
        reads = {node: self._reads(node, self._written) for node in writers}
        kernels = _in_order(_fuse_side_by_side(writers, reads), _by_writer(reads))
        # If an op has several results, each is a buffer, and the op's kernel writes them all.
        for kernel in kernels:
            kernel += [item for node in kernel for item in node.users if _is_item(item)]
        reads.update({node: set() for node in written if _is_item(node)})
        last_use: dict[fx.Node, int] = {}
        for at, kernel in enumerate(kernels):
            for node in kernel:
                last_use.update(dict.fromkeys(reads[node], at))
        returned = {self._root[node] for node in self._returned if node is not None}
        dying: dict[int, list[fx.Node]] = defaultdict(list)
        place = {node: at for at, node in enumerate(self._nodes)}
        # Sorted by the graph's order: iteration over a set of nodes differs from run to run.
        for source in sorted(last_use, key=place.__getitem__):
            if source not in returned:
                dying[last_use[source]].append(source)
        steps = []
        for at, kernel in enumerate(kernels):
            unread = [node for node in kernel if node not in last_use and node not in returned]
            steps.append(_step(kernel, reads, dying[at] + unread))
        return Program(
            inputs=tuple(node.name for node in self._nodes if node.op == "placeholder"),
            outputs=tuple(
                self._root[node].name if node is not None else "" for node in self._returned
            ),
            steps=tuple(steps),
        )


_Kernel = list[fx.Node]
_Reads = dict[fx.Node, set[fx.Node]]


def _fuse_side_by_side(nodes: list[fx.Node], reads: _Reads) -> list[_Kernel]:
    """Pointwise results of equal size that share an input buffer are written by one kernel."""
    kernels: list[_Kernel] = []
    home: dict[fx.Node, int] = {}
    waits: list[set[int]] = []
    """By kernel: the kernels whose results it reads."""
    sources = _by_writer(reads)
    for node in nodes:
        direct = {home[source] for source in sources[node] if source in home}
        at = len(kernels)
        if _is_fused(node) and not _is_reduction(node):
            # Exclude earlier kernels: fusing with one that this node depends on would make a cycle.
            earlier = _all_before(direct, waits)
            alike = (k for k in reversed(range(at)) if _are_alike(node, kernels[k], reads))
            at = next((k for k in alike if k not in earlier), at)
        if at == len(kernels):
            kernels.append([])
            waits.append(set())
        kernels[at].append(node)
        waits[at] |= direct
        home[node] = at
    return kernels


def _all_before(direct: set[int], waits: list[set[int]]) -> set[int]:
    """These kernels and all kernels that must have run before them."""
    found, new = set(direct), direct
    while new:
        new = set().union(*(waits[kernel] for kernel in new)) - found
        found |= new
    return found


def _are_alike(node: fx.Node, kernel: _Kernel, reads: _Reads) -> bool:
    first = kernel[0]
    if not _is_fused(first) or _is_reduction(first) or _numel(first) != _numel(node):
        return False
    return any(reads[node] & reads[member] for member in kernel)


def _by_writer(reads: _Reads) -> _Reads:
    """The same reads, but if a read result is one of several, the op that computes them all."""
    return {
        node: {s.all_input_nodes[0] if _is_item(s) else s for s in sources}
        for node, sources in reads.items()
    }


def _in_order(kernels: list[_Kernel], reads: _Reads) -> list[_Kernel]:
    """Each kernel as soon as its inputs exist, otherwise in the graph's order."""
    home = {node: at for at, kernel in enumerate(kernels) for node in kernel}
    waits = [
        {home[source] for node in kernel for source in reads[node] if source in home} - {at}
        for at, kernel in enumerate(kernels)
    ]
    followers: dict[int, list[int]] = defaultdict(list)
    for at, sources in enumerate(waits):
        for source in sources:
            followers[source].append(at)
    ready = [at for at, sources in enumerate(waits) if not sources]
    heapq.heapify(ready)
    order = []
    while ready:
        at = heapq.heappop(ready)
        order.append(kernels[at])
        for follower in followers[at]:
            waits[follower].discard(at)
            if not waits[follower]:
                heapq.heappush(ready, follower)
    assert len(order) == len(kernels), "kernels wait for each other"
    return order


def _step(kernel: _Kernel, reads: _Reads, dying: list[fx.Node]) -> Step:
    over: list[str] = []
    first = kernel[0]
    sources = set().union(*(reads[node] for node in kernel))
    if _is_fused(first):
        # A single result overwrites an input that is not read afterwards; several results do not.
        if len(kernel) == 1:
            same = [s for s in dying if _nbytes(s) == _nbytes(first) and s.op != "placeholder"]
            over = [source.name for source in same[:1] if source is not first]
        moved = sum(_nbytes(node) for node in (*kernel, *sources))
        work = Work(bytes=moved, reach=min(map(_fused_reach, kernel)))
    else:
        work = work_of(first.target, _values(first.args), _value(first))
    return Step(
        frees_first=tuple(over),
        takes=tuple((node.name, size) for node in kernel if (size := _nbytes(node))),
        frees=tuple(source.name for source in dying if source.name not in over),
        work=work,
    )


def _fused_reach(node: fx.Node) -> float:
    packet: Any = getattr(node.target, OVERLOADS, None)
    if packet is aten.sum and _adds_few_far_apart(node):
        return FAR_APART_REACH
    return SOFTMAX_REACH if packet is aten.amax else SLOW.get(packet, FUSED_REACH)


def _adds_few_far_apart(node: fx.Node) -> bool:
    added, *which = _values(node.args)
    dims = [at for at in (which[0] or () if which else ()) if added.shape[at] > 1]
    strides = [added.stride(at) for at in dims]
    count = math.prod(added.shape[at] for at in dims)
    return bool(dims) and bool(min(strides) >= FEW >= count)


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that this one views; an item of an op with several views views that op's input."""
    if node.op != "call_function" or _is_item(node):
        return None
    if node.target is operator.getitem:
        return _viewed(node.all_input_nodes[0])
    is_view = isinstance(node.target, OpOverload) and (node.target.is_view or node.target in _VIEWS)
    sources: list[fx.Node] = node.all_input_nodes
    return sources[0] if is_view and sources else None


def _is_item(node: fx.Node) -> bool:
    """Whether a node is one of an op's several results, where these are not views."""
    return node.target is operator.getitem and _viewed(node.all_input_nodes[0]) is None


_VIEWS = {aten._unsafe_view.default, aten.reshape.default, aten.alias.default}


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True  # sizes and the like
    name = schema_of(target).name.split("::")[-1]
    return torch.Tag.pointwise in target.tags or name in _FUSED or name in _REDUCTIONS


def _is_reduction(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).name.split("::")[-1] in _REDUCTIONS


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _values(args: Any) -> Any:
    return fx.node.map_arg(args, _value)


def _numel(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in _tensors(_value(node)))


def _nbytes(node: fx.Node) -> int:
    """Bytes of a result; if an op has several, only of those that no getitem node picks."""
    value = _value(node)
    if isinstance(value, (tuple, list)):
        items = {user.args[1] for user in node.users if _is_item(user)}
        value = [one for at, one in enumerate(value) if at not in items]
    return sum(_tensor_bytes(tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _tensor_bytes(tensor: Tensor) -> int:
    if 0 in tensor.shape:
        return 0
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return span * tensor.element_size()
