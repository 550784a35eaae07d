"""One forward of a block that backward will run again, from the same starting state.

Before the forward, the attributes, containers and generators that the block's modules hold are
recorded. Tensors that the forward writes to in place are copied before the first write. For the
second run all of that is restored, as copies; afterwards the state from before the second run comes
back. So a block may count calls, collect losses, average over batches, or take its arguments from a
list. Function caches that got new entries in the first run are cleared for the second.

Most blocks write only to the statistics of their norms, which are copied without looking. A block's
1st, 2nd, 4th, 8th, … calls are traced op by op; a block that writes to anything else, or owns
tensors that may be written to, is traced in every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import NotRepeatable
from oomph.process.random_state import get_random_state, set_random_state
from oomph.techniques.python_state import PythonState
from oomph.techniques.recompute_stop import RecomputeStop
from oomph.techniques.same_again import SameAgain
from oomph.techniques.surroundings import Surroundings
from oomph.techniques.tensor_writes import Kept, TensorWrites, View, state_of, storage_of
from oomph.torch_compat import cuda
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.function_modes import DisableTorchFunction
from oomph.torch_compat.modules import BatchNorm, InstanceNorm, NormBase, buffers_of
from oomph.torch_compat.pytree import tree_flatten, tree_unflatten
from oomph.torch_compat.tensors import set_versions, version_of

#: Forwards of PyTorch's norms, which write only to their statistics.
_NORMS = {BatchNorm.forward, InstanceNorm.forward, nn.SyncBatchNorm.forward}

#: Calls whose first run ended and whose second has not begun.
_waiting: weakref.WeakSet[ForwardCall] = weakref.WeakSet()


#: By thread: the calls in their first run, and the callback to call before they run again.
_running = threading.local()


def is_awaited(weight: Tensor) -> bool:
    """Whether a forward that has yet to run again reads this weight."""
    return any(call.reads(weight) for call in list(_waiting))


def untried_blocks(weights: Collection[Tensor]) -> list[Repeated]:
    """The blocks that read one of these weights, and will run again for the first time."""
    calls = [call for call in list(_waiting) if not call.block.ran_again]
    found = [call.block for call in calls if any(call.reads(weight) for weight in weights)]
    return list(dict.fromkeys(found))


def note_read(weight: Tensor) -> None:
    """Tell the calls in their first run of a weight read that they cannot see themselves."""
    for call in getattr(_running, "calls", ()):
        call.also_reads(weight)


@contextlib.contextmanager
def told_before_again(tell: Callable[[], None]) -> Iterator[None]:
    """Have `tell` called before each second run of a forward that begins inside."""
    outer = getattr(_running, "tell", None)
    _running.tell = tell
    try:
        yield
    finally:
        _running.tell = outer


def not_repeatable(name: str, why: str) -> NotRepeatable:
    """The error for a block of this name that cannot be run twice."""
    return NotRepeatable(
        f"{name} cannot be recomputed: {why}. The step was not made; have the plan keep this block,"
        " or plan again"
    )


class Repeated:
    """A block whose forward runs twice, and its known behavior."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], name: str) -> None:
        self.block, self.forward, self.name = block, forward, name
        self.calls = 0
        #: Whether a backward ran it again and came to its end.
        self.ran_again = False
        #: Whether it has written to anything so far.
        self.writes = False
        #: The indices of the arguments that it wrote to.
        self.written_arguments: set[int] = set()
        #: Weights of other modules that it reads.
        self.foreign: list[weakref.ref[Tensor]] = []
        self._state: PythonState | None = None
        self._has_tensors = False

    def state(self) -> PythonState:
        """The Python state that its modules hold now."""
        if self._state is None or not self._state.is_current:
            self._state = PythonState([("", self.block), ("forward", self.forward)])
            norms = {id(one) for norm in self._norms() for one in buffers_of(norm).values()}
            self._has_tensors = any(
                not isinstance(one, nn.Parameter) and id(one) not in norms
                for _, one in self._state.tensors
            )
        return self._state

    def statistics(self) -> Iterator[Tensor]:
        """The buffers that its norms write to in their current mode."""
        for norm in self._norms():
            if norm.training and norm.track_running_stats:
                yield from (one for one in buffers_of(norm).values() if one is not None)

    def is_looked_at(self) -> bool:
        """Count a call that begins now; return whether to trace it (the 1st, 2nd, 4th, …)."""
        self.calls += 1
        return self.calls & (self.calls - 1) == 0

    @property
    def is_followed(self) -> bool:
        """Whether every call is traced op by op for writes."""
        return self.writes or self._has_tensors

    def learn(self, writes: TensorWrites) -> None:
        """Record what a traced call wrote to and read."""
        if writes.elsewhere:
            raise self.error(f"its forward writes to what is not its own ({writes.elsewhere[0]})")
        self.writes |= bool(writes.written or writes.generators)
        known = [ref() for ref in self.foreign]
        for weight in writes.foreign:
            if all(weight is not one for one in known):
                self.foreign.append(weakref.ref(weight))

    def refuse_write(self, what: str) -> NotRepeatable:
        """The error for a call that wrote where none did before; later calls will be traced."""
        self.writes = True
        return self.error(f"its forward writes to {what}, as it never did before")

    def error(self, why: str) -> NotRepeatable:
        """The error for a forward that cannot be run twice."""
        return not_repeatable(self.name, why)

    def _norms(self) -> Iterator[NormBase]:
        for module in self.block.modules():
            if isinstance(module, NormBase) and type(module).forward in _NORMS:
                yield module


class ForwardCall:
    """One call of a block: its forward runs once now, and once more in `again`."""

    def __init__(
        self, block: Repeated, args: Any, kwargs: Any, watching: AbstractContextManager[Any] | None
    ) -> None:
        self.block = block
        self._call: Any = (args, kwargs)
        #: Called before the second run: autograd may not see any of the arguments.
        self._tell: Callable[[], None] | None = getattr(_running, "tell", None)
        #: A context that watches the calls of the first run only, not those around it.
        self._watching = watching
        leaves, self._spec = tree_flatten((args, kwargs))
        self._state = block.state()
        # Arguments that are neither tensors nor containers of tensors, such as a cache.
        objects = [("argument", leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        self._given = PythonState(objects, inside=False)
        self._surroundings = Surroundings()
        #: Functions with a cache of results, and their number of cache misses so far.
        self._caches = [(one, one.cache_info().misses) for one in self._state.caches]
        #: By storage: the tensors the first run writes to in place, with their former values.
        self._kept = {storage_of(one): Kept(one) for one in block.statistics()}
        given = (*leaves, *(one for _, one in self._state.tensors))
        is_rehearsed = any(isinstance(one, FakeTensor) for one in given)
        looks = block.is_looked_at() and (is_rehearsed or not _is_captured())
        closely = looks or block.is_followed or bool(self._kept)
        self._arguments = {
            at: _Before(leaf, closely=closely)
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        }
        self._held = {
            id(one): _Before(one, closely=closely)
            for _, one in (*self._state.tensors, *self._given.tensors)
        }
        foreign = (ref() for ref in block.foreign)
        self._foreign = [_Before(one, closely=False) for one in foreign if one is not None]
        self._writes: TensorWrites | None = None
        tensors = [one.tensor for one in (*self._held.values(), *self._arguments.values())]
        if looks or block.is_followed:
            self._writes = TensorWrites(tensors, kept=self._kept)
        self._same: SameAgain | None = None
        if looks and not is_rehearsed:
            # The graph holds this, and must not hold the block: see `recompute`.
            self._same = SameAgain(functools.partial(not_repeatable, block.name))
        #: The arguments that autograd does not save, as they are copied before they change.
        self._copied = set(block.written_arguments)
        self._leaves = [None if at in self._copied else leaf for at, leaf in enumerate(leaves)]
        #: Generators passed to ops, and their states before.
        self._drawn: list[tuple[torch.Generator, Tensor]] = []
        #: By index: arguments that were written to, and others that autograd did not save.
        self._written: dict[int, tuple[int, View]] = {}
        self._unsaved: dict[int, _Before] = {}
        #: The tensors that `run` uses in their place.
        self._renewed: dict[int, Tensor] = {}
        #: The arguments of the running second run.
        self._saved: tuple[Any, ...] = ()

    def reads(self, weight: Tensor) -> bool:
        """Whether the forward reads this weight, its own or another module's."""
        return id(weight) in self._held or any(one.tensor is weight for one in self._foreign)

    def also_reads(self, weight: Tensor) -> None:
        """Note that the forward reads another module's weight."""
        if not self.reads(weight):
            self._foreign.append(_Before(weight, closely=False))

    def take_leaves(self) -> list[Any]:
        """Hand over the arguments that autograd is to save; no reference is kept here."""
        leaves, self._leaves = self._leaves, []
        return leaves

    def run(self, *leaves: Any) -> Any:
        """Run the block's forward; in `again`, with the arguments that autograd saved."""
        if self._call is not None:
            (args, kwargs), self._call = self._call, None
            watching, self._watching = self._watching, None
            with watching or contextlib.nullcontext():
                return self.block.forward(*args, **kwargs)
        if self._same is not None:
            self._saved = leaves
        given = [self._renewed.get(at, leaf) for at, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(given, self._spec)
        with RecomputeStop():
            return self.block.forward(*args, **kwargs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The outer context of the first run."""
        outer = getattr(_running, "calls", ())
        _running.calls = (*outer, self)
        try:
            with self._writes or contextlib.nullcontext():
                yield
        finally:
            _running.calls = outer
        with DisableTorchFunction():  # as when the call was made
            self._ended()

    def compared(self) -> AbstractContextManager[Any]:
        """The innermost context of each run, which compares the two."""
        return self._same.run() if self._same is not None else contextlib.nullcontext()

    # -- after the first run ----------------------------------------------------------------------

    def _ended(self) -> None:
        """Record what was written to; drop arguments that autograd saved or that were copied."""
        block, writes = self.block, self._writes
        if writes is not None:
            block.learn(writes)
            self._drawn = list(writes.generators.values())
            known = [one.tensor for one in self._foreign]
            new = [one for one in writes.foreign if all(one is not other for other in known)]
            self._foreign += [_Before(one, closely=False) for one in new]
        for at, argument in self._arguments.items():
            if argument.storage in self._kept:
                block.written_arguments.add(at)
                self._written[at] = argument.storage, View.of(argument.tensor)
                if at not in self._copied:
                    argument.hide_writes()
            elif not argument.ends_unchanged():
                raise block.refuse_write("an argument")
            elif at in self._copied:
                self._unsaved[at] = argument
        for one in self._held.values():
            if one.storage not in self._kept and not one.ends_unchanged():
                block.writes = True
                if not one.was_replaced:
                    raise block.refuse_write("a weight or buffer")
        self._arguments, self._writes = {}, None
        self._caches = [one for one in self._caches if one[0].cache_info().misses != one[1]]
        _waiting.add(self)

    # -- the second run ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """While active, all state is restored to the start of the first run."""
        if self._same is None:
            with self._as_before():
                yield
            return
        random_state = get_random_state(_device())
        try:
            with self._as_before():
                yield
        finally:
            leaves, self._saved = self._saved, ()
            if self._same.difference:
                set_random_state(random_state, _device())
                self._run_to_the_end(leaves)

    def _run_to_the_end(self, leaves: tuple[Any, ...]) -> None:
        """Run the forward once more for the comparison, saving nothing for backward."""
        assert self._same is not None
        with self._as_before(), self._same.to_the_end():
            self.run(*leaves)
        self._saved = ()

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        if self._tell is not None:
            self._tell()
        self._check_unchanged()
        _waiting.discard(self)
        copies = {key: kept.renewed() for key, kept in self._kept.items()}
        self._renewed = {at: one.tensor for at, one in self._unsaved.items()}
        for at, (storage, view) in self._written.items():
            self._renewed[at] = view.on(copies[storage], may_be_written=True)
        replaced = {
            key: one.stand_in(copies)
            for key, one in self._held.items()
            if one.storage in copies or one.was_replaced
        }

        def replace(value: Any) -> Any:
            return replaced.get(id(value), value)

        states = (self._state, self._given)
        now = [state if state.is_current else state.again() for state in states]
        try:
            for state in states:
                state.put_back(replace if replaced else None)
            for cache, _ in self._caches:
                cache.cache_clear()
            with self._generators(), self._surroundings.put_back():
                yield
        finally:
            self._renewed = {}
            for state in now:
                state.put_back()

    @contextlib.contextmanager
    def _generators(self) -> Iterator[None]:
        """While active, generators passed to ops have their states from the first run."""
        now = [(generator, state_of(generator)) for generator, _ in self._drawn]
        for generator, before in self._drawn:
            generator.set_state(before)
        try:
            yield
        finally:
            for generator, after in now:
                generator.set_state(after)

    def _check_unchanged(self) -> None:
        """Raise if a tensor was written to since: the second run would read other values."""
        if lost := [*self._state.lost(), *self._given.lost()]:
            raise self.block.error(f"its forward advances an iterator ({lost[0]})")
        held = (one for one in self._held.values() if one.storage not in self._kept)
        for one in (*held, *self._foreign, *self._unsaved.values()):
            if one.was_written_since:
                raise self.block.error("what its forward read was written to in the meantime")


class _Before:
    """A tensor as the first run found it; `closely` also tracks its storage and data."""

    def __init__(self, tensor: Tensor, *, closely: bool) -> None:
        self.tensor = tensor
        self._version = self._end = _version_of(tensor)
        self.storage = storage_of(tensor) if closely else 0
        #: Its data before; not kept for weights, which may be moved at any time.
        self._data = tensor.data if closely and not isinstance(tensor, nn.Parameter) else None
        #: Whether the run replaced its data.
        self.was_replaced = False

    def ends_unchanged(self) -> bool:
        """Whether the run, which ends now, left the tensor unchanged."""
        self._end = _version_of(self.tensor)
        self.was_replaced = self._data is not None and storage_of(self.tensor) != self.storage
        return self._end == self._version and not self.was_replaced

    @property
    def was_written_since(self) -> bool:
        """Whether the tensor was written to after the run."""
        return _version_of(self.tensor) != self._end

    def hide_writes(self) -> None:
        """Hide writes from autograd, which saved the tensor: the second run uses a copy."""
        set_versions((self.tensor,), (self._version,))

    def stand_in(self, copies: dict[int, Tensor]) -> Tensor:
        """The tensor that takes its place in the second run."""
        if self.storage in copies:
            shown = self.tensor if self._data is None else self._data
            view = dataclasses.replace(
                View.of(shown),
                wants_gradient=self.tensor.requires_grad,
                is_parameter=isinstance(self.tensor, nn.Parameter),
            )
            return view.on(copies[self.storage])
        assert self._data is not None
        return self._data.requires_grad_(self.tensor.requires_grad)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _device() -> torch.device:
    has_cuda = torch.backends.cuda.is_built() and torch.cuda.is_initialized()
    return torch.device("cuda" if has_cuda else "cpu")


def _is_captured() -> bool:
    """Whether a CUDA graph is being captured, so that reading values on the host is forbidden."""
    has_cuda = torch.backends.cuda.is_built() and torch.cuda.is_initialized()
    # Not `torch.cuda`'s own function: our captures patch it to return False.
    return has_cuda and cuda.is_capturing()
