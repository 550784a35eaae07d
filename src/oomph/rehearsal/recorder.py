"""Observes every op of the rehearsed step and records the memory it would take on the GPU.

The step runs on fake CPU tensors. Each storage is assigned a *side*: the rehearsed GPU, or the
host. The birth and death of a storage on the GPU's side become a `Block`; host storages are tracked
only to tell copies between the sides from computation.

The recorder is a dispatch mode, so it also sees autograd and recomputation. It is popped while it
works: memory a fake kernel takes inside is not memory the real kernel would take. `Rules` supply
what the real kernel takes beyond its outputs.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from oomph.errors import CannotRehearse
from oomph.hardware.timing.clock import Clock
from oomph.hardware.timing.ops import work_of
from oomph.hardware.timing.work import Work
from oomph.process.rehearsal_threads import current_rehearsal
from oomph.rehearsal.in_place import (
    Holders,
    held_by_autograd_alone,
    holders,
    is_in_place,
    may_be_in_place,
)
from oomph.rehearsal.mixed_sides import refuse_mixed
from oomph.rehearsal.quick_fakes import quick_fake, shows_its_argument
from oomph.rehearsal.rules import Burst, Rules
from oomph.rehearsal.storages import storage_key, storage_key_inside, tensors_in
from oomph.rehearsal.timeline import Block, Category, Mark, Span, Timeline
from oomph.rehearsal.users_tensors import run_fake
from oomph.rehearsal.values import KnownValues
from oomph.torch_compat.autograd import current_node, next_sequence_number, sequence_number
from oomph.torch_compat.dispatch import TorchDispatchMode, has_kernel
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.storages import cdata_of

aten = torch.ops.aten
_ASKS_WHERE_TO_RUN = torch.ops.prim.device.default


#: The name of the mark where a micro-batch begins.
FORWARD = "forward"


class Side(Enum):
    """Where a storage lives."""

    GPU = "gpu"
    HOST = "host"


class _Storage:
    """The record of one storage: its side and, on the GPU's side, its block."""

    __slots__ = ("block", "nbytes", "reference", "side")

    def __init__(self, side: Side, nbytes: int) -> None:
        self.side = side
        self.nbytes = nbytes
        self.block: Block | None = None
        self.reference: weakref.ref[Any] | None = None


class Bare:
    """Memory without a tensor: taken by a compiled kernel, freed when the last reference goes."""

    __slots__ = ("_block", "_recorder")

    def __init__(self, recorder: Recorder, block: Block) -> None:
        self._recorder = recorder
        self._block = block

    def __del__(self) -> None:
        self._recorder._free(self._block)


class Recorder(TorchDispatchMode):
    """Writes the timeline of everything that runs while it is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled for real, and the check takes longer than some ops."""
        return False

    def __init__(self, rules: Rules, default_side: Side) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.values = KnownValues()
        #: By id: real weights passed to ops, and the gradients that they had before.
        self._own_gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        #: True while a fake kernel runs: tensors then report the device of the fake.
        self.busy = False
        #: Whether ops refuse to mix sides: they do where a program moves its tensors itself.
        self.one_device_only = False
        #: True while a block is traced for compilation: every tensor then counts as on the GPU.
        self.tracing = False
        #: Arguments of the running torch function, for ops inside it that have none.
        self.arguments: Sequence[Any] = ()
        #: The innermost module that raised an error.
        self.failed_in = ""
        #: Bytes of GPU tensors alive now, and the peak since `reset_peak`.
        self.allocated = 0
        self.peak_allocated = 0
        #: Predicted kernel seconds so far, and the number of launches, if there is a clock.
        self.clock: Clock | None = None
        self.seconds = 0.0
        self.launches = 0.0
        #: Bytes whose copy to the host has begun, and whose copy from the host has begun.
        self.sent = 0
        self.brought = 0
        #: Whether kernels wait for copies; if not, the seconds are those of kernels alone.
        self.waits_for_copies = True
        #: The allocator's pool that memory comes from: a stream's, or that of a graph in capture.
        self.pool = 0
        self._rules = rules
        #: The side of new tensors if no device is named.
        self.side_of_new = default_side
        self._default_side = default_side
        self._storages: dict[int, _Storage] = {}
        self._rehearsal = current_rehearsal()
        #: Blocks freed by another thread's garbage collection; only one thread writes the timeline.
        self._died_elsewhere: deque[Block] = deque()
        self._workspaces: set[tuple[int, str]] = set()
        self._placing: Side | None = None
        self._modules: list[str] = []
        self._phase = ""
        held_by_autograd_alone()  # measured once, outside of any backward
        #: The running autograd node, and the event at which it was first seen.
        self._node: tuple[str, int] | None = None
        self._node_start = 0
        # Autograd nodes are numbered when made; the number tells which module a backward op is in.
        self._sequence_starts: list[int] = []
        self._sequence_modules: list[str] = []

    # -- timeline, phases and modules ---------------------------------------------------------

    def tick(self) -> int:
        """The next event's number."""
        self.timeline.events += 1
        return self.timeline.events - 1

    def reset_peak(self) -> None:
        """Restart the peak from the memory alive now."""
        self.peak_allocated = self.allocated

    def mark(self, name: str) -> None:
        """Add a mark at this moment of the timeline."""
        mark = Mark(
            name, self.timeline.events, self.seconds, self.launches, self.sent, self.brought
        )
        self.timeline.marks.append(mark)

    def run_kernel(self, work: Work) -> None:
        """Advance the clock by the time the kernel takes."""
        if self.clock is not None and (seconds := self.clock.seconds(work)):
            self.seconds += seconds
            self.launches += work.launches

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign all events inside to the phase `name`."""
        start, before, self._phase = self.timeline.events, self._phase, name
        try:
            yield
        finally:
            self.timeline.spans.append(Span(name, start, self.timeline.events))
            self._phase = before

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """File blocks made inside and still alive at its end as activations."""
        self.mark(FORWARD)
        start = len(self.timeline.blocks)
        try:
            yield
        finally:
            for block in self.timeline.blocks[start:]:
                if block.death is None and block.category is Category.TEMPORARY:
                    block.category = Category.ACTIVATION

    @contextlib.contextmanager
    def placing(self, side: Side) -> Iterator[None]:
        """Put new storages made inside on this side, whatever the op's inputs are."""
        before, self._placing = self._placing, side
        try:
            yield
        finally:
            self._placing = before

    def enter_module(self, path: str) -> None:
        """Assign the ops that follow to the module `path`."""
        self._modules.append(path)
        self._note_sequence()

    def leave_module(self) -> None:
        """Return to the enclosing module."""
        if self._modules:
            self._modules.pop()
        self._note_sequence()

    def _note_sequence(self) -> None:
        number = next_sequence_number()
        if self._sequence_starts and number < self._sequence_starts[-1]:
            return  # recomputation inside backward reuses no numbers, but another thread may
        self._sequence_starts.append(number)
        self._sequence_modules.append(self._modules[-1] if self._modules else "")

    @property
    def current_module(self) -> str:
        """The module whose forward or backward is running."""
        node = current_node()
        if node is not None and not self._modules:
            at = bisect.bisect_right(self._sequence_starts, sequence_number(node)) - 1
            return self._sequence_modules[at] if at >= 0 else ""
        return self._modules[-1] if self._modules else ""

    # -- sides ----------------------------------------------------------------------------------

    def side_of(self, tensor: Tensor) -> Side:
        """The side of a tensor; tensors made outside the rehearsal are on the host."""
        record = self._storages.get(storage_key(tensor))
        return record.side if record is not None else Side.HOST

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block recorded for a GPU tensor's storage."""
        record = self._storages.get(storage_key(tensor))
        return record.block if record is not None else None

    def categorise(
        self,
        tensors: Sequence[Tensor],
        category: Category,
        *,
        module: str | None = None,
        belongs_to: Tensor | None = None,
    ) -> None:
        """File tensors under a category, and under a module or the module of a parameter."""
        if belongs_to is not None:
            owner = self.block_of(belongs_to)
            module = owner.module if owner is not None else None
        for tensor in tensors:
            block = self.block_of(tensor)
            # A tied weight stays with the module that was seen first.
            if block is None or (block.category is category and block.module):
                continue
            block.category = category
            if module is not None:
                block.module = module

    # -- ops --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ASKS_WHERE_TO_RUN:
            return args[0].fake_device  # C++ asks where to run: always on the fake CPU
        kwargs = kwargs or {}
        self._follow_node()
        watched = self._node is not None and may_be_in_place(func) and isinstance(args[0], Tensor)
        held = holders(args) if watched else None
        with DisableTorchFunction():
            self.busy = True
            try:
                if held is not None and self._writes_in_place(func, args, held):
                    self.values.forget(storage_key(args[0]))
                    if self.clock is not None:
                        self.run_kernel(work_of(func, args, args[0]))
                    return args[0]
                return self._run(func, args, kwargs)
            finally:
                self.busy = False

    def _note_gradients(self, inputs: Sequence[Tensor]) -> None:
        """Remember the gradients of weights that are not the rehearsed model's."""
        for tensor in inputs:
            if not isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.is_leaf:
                self._own_gradients.setdefault(id(tensor), (tensor, tensor.grad))

    def put_gradients_back(self) -> None:
        """Restore the gradients that real weights, such as a criterion's, had before."""
        for tensor, gradient in self._own_gradients.values():
            tensor.grad = gradient

    def _follow_node(self) -> None:
        node = current_node()
        key = None if node is None else (node.name(), sequence_number(node))
        if key != self._node:
            self._node, self._node_start = key, self.timeline.events

    def _writes_in_place(self, func: Any, args: Sequence[Any], held: Holders) -> bool:
        assert self._node is not None
        block = self.block_of(args[0])
        if block is None:
            return False
        made_by_node = block.birth >= self._node_start
        return is_in_place(func, self._node[0], args, made_by_node, held)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if shows_its_argument(func, args) and self._is_written_down(args[0]):
            out = quick_fake(func, args, kwargs)
            if out is not NotImplemented:
                return out
        side = self._placing
        device = kwargs.get("device")
        if device is not None:
            # "cpu" carries no information here: autograd's own conversions name the fake device.
            side = side or (Side.GPU if is_gpu(device) else None)
            kwargs = {**kwargs, "device": torch.device("cpu")}
        inputs = list(tensors_in(args))
        self._note_gradients(inputs)
        if kwargs:
            inputs += tensors_in(kwargs)
        on_gpu = False
        on_host: list[Tensor] = []
        for tensor in inputs:
            record = self._storages.get(storage_key_inside(tensor))
            if record is None:
                # Made outside the rehearsal; recorded so that it is not mistaken for a new one.
                record = self._remember(tensor, Side.HOST)
            if record.side is Side.GPU:
                on_gpu = True
            else:
                on_host.append(tensor)
        if on_gpu and on_host and self.one_device_only:
            refuse_mixed(func, on_host)
        if side is None:
            side = (
                Side.GPU
                if on_gpu
                else self._default_side
                if inputs
                else self._side_without_inputs()
            )
        elif func is aten._to_copy.default and self._is_no_copy(inputs[0], side, kwargs):
            return aten.alias.default(inputs[0])

        out = self.values.answer(func, args, kwargs)
        if out is NotImplemented:
            out = self._rules.replace(func, args, kwargs)
        if out is NotImplemented:
            out = quick_fake(func, args, kwargs)
        if out is NotImplemented:
            out = None if _only_writes(func) else run_fake(func, args, kwargs)
        self._record(func, args, out, side)
        self.values.follow(func, args, kwargs, out)
        return out

    def _is_written_down(self, tensor: Tensor) -> bool:
        """Whether a view of it needs no record: its memory is known, at its present size."""
        storage = tensor.untyped_storage()
        record = self._storages.get(cdata_of(storage))
        # For booleans, `values` must see views: it tracks which op made each.
        return (
            record is not None
            and record.nbytes == storage.nbytes()
            and tensor.dtype is not torch.bool
        )

    def _side_without_inputs(self) -> Side:
        """The side of the result of an op without tensor inputs, when no device is named.

        Inside backward or a composite op on GPU tensors, C++ names the device of those tensors,
        which is the fake CPU for C++.
        """
        on_gpu = current_node() is not None or any(
            self.side_of(tensor) is Side.GPU for tensor in tensors_in(self.arguments)
        )
        return Side.GPU if on_gpu else self.side_of_new

    def _is_no_copy(self, tensor: Tensor, side: Side, kwargs: dict[str, Any]) -> bool:
        """Detects `.to(device)` of a tensor already there, which the fake kernel cannot know."""
        return (
            self.side_of(tensor) is side
            and kwargs.get("dtype", tensor.dtype) in (None, tensor.dtype)
            and kwargs.get("memory_format") in (None, torch.preserve_format)
        )

    def adopt(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
        """Count tensors that no op made, such as those of a copied model."""
        for tensor in tensors:
            if storage_key(tensor) not in self._storages:
                record = self._remember(tensor, self._default_side)
                if record.side is Side.GPU:
                    record.block = self._allocate(record.nbytes, "copy")

    def _record(self, func: Any, args: Sequence[Any], out: Any, side: Side) -> None:
        host_outputs: Collection[int] = ()
        bursts: Sequence[Burst] = ()
        if side is Side.GPU:
            host_outputs = self._rules.host_outputs(func)
            bursts = self._rules.scratch(func, args, out)
        outputs = list(enumerate(tensors_in(out)))
        order = self._rules.output_order(func)
        if order is not None:
            outputs = [outputs[at] for at in order]
        for count, (index, tensor) in enumerate(outputs):
            if bursts:
                self._pass(str(func), [burst for burst in bursts if burst.after == count])
            if tensor.layout is not torch.strided:
                raise CannotRehearse(
                    f"{func} makes a sparse tensor, whose size only real data can tell; for an "
                    "embedding, sparse=False makes its gradient dense"
                )
            record = self._storages.get(storage_key_inside(tensor))
            if record is None:
                # A view of a storage that the recorder never saw: a constant from outside the step.
                outside = func.is_view and func is not aten.lift_fresh.default
                on_host = outside or index in host_outputs
                record = self._remember(tensor, Side.HOST if on_host else side)
                if record.side is Side.GPU:
                    record.block = self._allocate(record.nbytes, str(func))
            elif record.nbytes != tensor.untyped_storage().nbytes():
                self._resize(record, tensor.untyped_storage().nbytes(), str(func))
        if side is not Side.GPU:
            return
        if self.clock is not None:
            self.run_kernel(work_of(func, args, out))
        in_backward = current_node() is not None
        for key, size in self._rules.fixed_part(func, args, in_backward):
            if (self.pool, key) not in self._workspaces:
                self._workspaces.add((self.pool, key))
                self._allocate(size, key, Category.WORKSPACE)
        if bursts:
            late = [b for b in bursts if b.after is None or b.after >= len(outputs)]
            self._pass(str(func), late)

    def take(self, size: int, op: str) -> Bare:
        """Take GPU memory that no tensor stands for."""
        return Bare(self, self._allocate(size, op))

    def _pass(self, op: str, bursts: Sequence[Burst]) -> None:
        """Allocate and free scratch memory, freeing the last block first."""
        for burst in bursts:
            blocks = [self._allocate(size, op) for size in burst.sizes if size]
            for block in reversed(blocks):
                block.doubtful = burst.doubtful
                self._free(block)

    def _remember(self, tensor: Tensor, side: Side) -> _Storage:
        storage = tensor.untyped_storage()
        key = cdata_of(storage)
        record = _Storage(side, storage.nbytes())
        record.reference = weakref.ref(storage, functools.partial(self._bury, key))
        self._storages[key] = record
        return record

    def _allocate(self, size: int, op: str, category: Category = Category.TEMPORARY) -> Block:
        for _ in range(len(self._died_elsewhere)):
            self._free(self._died_elsewhere.popleft())
        block = Block(
            size=size,
            birth=self.tick(),
            category=category,
            module=self.current_module,
            op=op,
            phase=self._phase,
            stream=self.pool,
        )
        self.timeline.blocks.append(block)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def _free(self, block: Block) -> None:
        if current_rehearsal() is not self._rehearsal:
            # Blocks freed after the end of the rehearsal no longer change its timeline.
            self._died_elsewhere.append(block)
            return
        block.death = self.tick()
        self.allocated -= block.size

    def _resize(self, record: _Storage, nbytes: int, op: str) -> None:
        record.nbytes = nbytes
        if record.block is not None:
            category = record.block.category
            self._free(record.block)
            record.block = self._allocate(nbytes, op, category)

    def _bury(self, key: int, _: Any) -> None:
        record = self._storages.pop(key, None)
        if record is not None and record.block is not None:
            self._free(record.block)
        self.values.forget(key)


def is_gpu(device: Any) -> bool:
    """Whether a device, in any notation, is the rehearsed GPU."""
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


#: Dispatch keys whose kernels fake tensors can use.
_FAKE_KERNELS = (
    "Meta",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


@functools.cache
def _only_writes(func: Any) -> bool:
    """Whether an op returns nothing and has no fake kernel, as some fused optimizers.

    There is nothing to compute for it, and PyTorch would run the real kernel on real memory.
    """
    return not schema_of(func).returns and not any(
        has_kernel(func.name(), key) for key in _FAKE_KERNELS
    )
