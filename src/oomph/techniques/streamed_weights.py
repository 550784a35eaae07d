"""Weights on the host: each block's come to the GPU when it runs, and the next block's meanwhile.

The GPU holds the weights of a few blocks at a time: those of the one that runs and of the `ahead`
that come next. Which come next is learned: the same blocks follow each other in each forward, in
each backward and in each token that is generated. A wrong guess costs time, never a number.

Parameters stay the same objects. While a block is not here, each of its parameters shows one NaN in
place of all its numbers: whoever looks at it then sees that something is wrong, and whoever writes
to it gets an error. What is loaded into the model, saved from it or copied with it are the host's
numbers. Blocks whose weights have no room on the host have them on the disk (`cold_weights`). Those
are only read from then on, by forwards and by whoever saves or copies the model; or, where they are
trained, written piece by piece as they are stepped.

What autograd saves of a weight, as it is, as a view or as autocast's copy of it, becomes a note of
where in its block it was; backward finds it in the memory that the block then has. So nothing keeps
weights from leaving, and what somebody else does keep stays as it was.

To be applied after the blocks were made to recompute themselves or were compiled, and before their
activations are offloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput, DiskDamaged, OomphError
from oomph.host.limits import check_host_memory
from oomph.host.link import Copy, DoneCopy, Link
from oomph.techniques.cold_weights import (
    BUFFERS,
    BUFFERS_OF_PIECES,
    ColdWeights,
    Cuts,
    OnDisk,
    parts_of,
    refuse_to_load,
)
from oomph.techniques.host_tensors import StandIns, brought_home, no_number
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo
from oomph.techniques.weight_blocks import (
    Numbers,
    Place,
    Unit,
    device_of,
    end_of,
    find_blocks,
    lay_out,
    numbers_in,
    streamed_by,
)

#: Whether the host's numbers of these parameters may be read; the flag says that a block runs now.
MayRead = Callable[[Sequence[nn.Parameter], bool], bool]
#: The numbers of parameters that are stand-ins for those in a file.
Source = Callable[[nn.Parameter], Tensor]


class _Phase(Enum):
    """What a block runs for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"


class StreamedWeights:
    """Streams the weights of `blocks`, the paths of modules of `model`, in the order they run.

    They run on `device`, which is where they are now if none is given. A weight that is also used
    outside of the blocks stays where it is; one that several blocks use comes with each of them.
    With `wraps` the blocks ask for their weights at once; else from when `wrap` is called on. Those
    of the blocks in `on_disk` are there instead of on the host, but for what other blocks use too,
    and for small ones that are trained.
    With a `source` the parameters hold no numbers themselves, and will hold none when this is
    undone: it gives those that a parameter is to have.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        link: Link,
        *,
        ahead: int = 1,
        device: torch.device | None = None,
        wraps: bool = True,
        on_disk: OnDisk | None = None,
        source: Source | None = None,
    ) -> None:
        if ahead < 0:
            raise BadInput(f"blocks come ahead of the one that runs, not {ahead}")
        modules = find_blocks(model, blocks)
        self._link = link
        self._source = source
        self._brings_back = source is None
        self._most = 1 + ahead
        self._units: list[Unit] = []
        #: By parameter: the units that it is a part of.
        self._using: dict[Tensor, list[Unit]] = {}
        #: The host's numbers of each parameter, and the device that it came from.
        self._hosts: dict[nn.Parameter, Tensor] = {}
        self._origins: dict[nn.Parameter, torch.device] = {}
        #: The bytes of parameters on the host that are in no block's slab.
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._cold: ColdWeights | None = None
        #: Of parameters on the disk that are trained: the elements of each of their pieces there.
        self._cuts: dict[Tensor, Cuts] = {}
        self._stand_ins: StandIns[nn.Parameter] = StandIns()
        self._shows_disk = True
        #: Who must be done before the host's numbers of a parameter are what they should be.
        self._writes: dict[Tensor, list[Copy]] = {}
        #: How often the host's numbers of a parameter were changed.
        self._versions: Counter[Tensor] = Counter()
        self._placeholders: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self._shown: dict[nn.Parameter, Unit] = {}
        #: Blocks that are on the GPU or on their way, the one that came first, first.
        self._residents: list[Unit] = []
        #: By storage: the block whose memory it is; what autocast made of a weight.
        self._memories: dict[int, Unit] = {}
        self._casts: dict[int, _Cast] = {}
        self._moment: _Moment | None = None
        self._follows: dict[_Moment, _Moment] = {}
        #: Asked before the host's numbers of a block are read; see `ask_before_reading`.
        self._may_read: MayRead | None = None
        #: The block that is about to be fetched, and what was put into its memory meanwhile.
        self._arrival: _Arrival | None = None
        self._handles: list[RemovableHandle] = []
        self._put_back: list[Undo] = []
        streamed = streamed_by(model, modules.values())
        self._device = device or device_of(streamed)
        try:
            with _plainly():
                if on_disk is not None:
                    self._move_to_disk(modules, on_disk, streamed)
                for path, module in modules.items():
                    if self._cold is None or path not in self._cold:
                        self._move_out(path, module, streamed)
            numbers = {path: number for number, path in enumerate(modules)}
            self._units.sort(key=lambda unit: numbers[unit.path])
            self._source = None  # it may keep files open
            self._add_hooks(model)
            if wraps:
                self.wrap()
        except BaseException:
            self.undo()
            raise

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose numbers are on the host or on the disk."""
        return list(self._origins)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """The blocks with weights on the disk."""
        return tuple(unit.path for unit in self._units if unit.cold_bytes)

    def host_weight(self, parameter: nn.Parameter) -> Tensor:
        """The host's numbers of a parameter; to write to them, see `before_write`.

        Of one that is on the disk, a tensor without numbers that lies as it does.
        """
        if parameter in self._hosts:
            return self._hosts[parameter]
        return self._units_with(parameter)[0].places[parameter].like

    def cuts(self, parameter: Tensor) -> Cuts:
        """The elements of each piece of a parameter on the disk; none if it is on the host."""
        if parameter in self._origins and parameter not in (self._hosts.keys() | self._cuts.keys()):
            raise BadInput("weights on the disk that are only read cannot be trained")
        return self._cuts.get(parameter, ())

    def numbers(self, parameter: nn.Parameter) -> Tensor:
        """What a parameter's numbers are: those of the host, or read from the disk."""
        if parameter in self._hosts:
            return self._hosts[parameter]
        unit, place, cold = self._on_disk(parameter)
        saving = cold.saving.get(unit.path)
        if saving is not None:
            return place.view(saving)
        with _plainly():
            return dataclasses.replace(place, offset=0).view(cold.read(unit.path, place.span))

    @contextlib.contextmanager
    def left_on_disk(self) -> Iterator[None]:
        """While active, a state dict has stand-ins for what is on the disk."""
        self._shows_disk = False
        try:
            yield
        finally:
            self._shows_disk = True

    def stands_for(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter that a stand-in of a state dict is there for; None for all else."""
        return self._stand_ins.find(tensor)

    def holds(self, parameter: Tensor) -> bool:
        """Whether the numbers of a parameter are on the host or on the disk."""
        return parameter in self._origins

    def wrap(self) -> Undo:
        """Have the blocks ask for their weights; undo it before anything below it is changed.

        What is done to a block's forward earlier, as recomputing it, runs inside; what is done
        later, as offloading its activations, outside.
        """
        undos = [
            replace_forward(unit.module, _StreamedForward(self, unit, unit.module.forward))
            for unit in self._units
        ]
        self._put_back += undos

        def undo() -> None:
            while undos:
                put_back = undos.pop()
                if put_back in self._put_back:
                    self._put_back.remove(put_back)
                    put_back()

        return undo

    def before_write(self, parameter: Tensor) -> list[Copy]:
        """What must be done before the host's numbers may be written to: copies that read them."""
        return [copy for unit in self._units_with(parameter) for copy in unit.copies]

    def written(self, parameter: Tensor, after: Sequence[Copy] = ()) -> None:
        """The host's numbers are other ones now, or will be when `after` is done.

        A block whose backward runs keeps those that it has until it is done.
        """
        self._writes[parameter] = list(after)
        self._versions[parameter] += 1
        for unit in self._units_with(parameter):
            if self._runs_backward(unit):
                unit.is_outdated = True
            else:
                self._drop(unit)

    def put(self, parameter: Tensor, piece: Callable[[Tensor], Tensor], numbers: Tensor) -> None:
        """New numbers of a piece of a parameter are on the GPU, by its computing stream.

        If its block is about to be fetched, they need not come from the host.
        """
        arrival = self._arrival
        assert isinstance(parameter, nn.Parameter)
        place = arrival.unit.places.get(parameter) if arrival is not None else None
        if arrival is None or place is None:
            return
        if arrival.memory is None:
            nbytes = arrival.unit.nbytes
            arrival.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        there = numbers_in(arrival.memory, place.dtype, arrival.numbers)
        piece(place.view(there)).copy_(numbers)
        arrival.missing[parameter] -= numbers.nbytes

    def bring(self, parameter: Tensor, start: int, target: Tensor) -> Copy:
        """Begin to bring the piece of a parameter on the disk that begins at this element.

        What its block has on the GPU need not come from the disk.
        """
        unit, place, cold = self._on_disk(parameter)
        at = place.byte_of(start)
        flat = target.as_strided((target.numel(),), (1,))
        if unit.is_here and not cold.was_put_since(unit.puts, unit.path, at):
            assert unit.memory is not None
            flat.copy_(unit.memory[at : at + target.nbytes].view(target.dtype))
            return DoneCopy()
        following = functools.partial(self._cold_after, unit, _Phase.FORWARD)
        return cold.get_part(unit.path, at, flat, following)

    def send(self, parameter: Tensor, start: int, numbers: Tensor) -> Copy:
        """Let new numbers of such a piece leave for the disk; see `written` and `put`."""
        unit, place, cold = self._on_disk(parameter)
        flat = numbers.as_strided((numbers.numel(),), (1,))
        return cold.put(unit.path, place.byte_of(start), flat)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Give a parameter other numbers, at once."""
        self.settle()
        if parameter in self._hosts:
            self._hosts[parameter].copy_(numbers)
        else:
            unit, place, cold = self._on_disk(parameter)
            cold.write(unit.path, place, numbers.to(place.dtype))
        self.written(parameter)

    def ask_before_reading(self, may_read: MayRead | None) -> None:
        """Have `may_read` asked before a block is fetched: it has the host's numbers written.

        It is given the block's parameters, and whether the block runs now. Where it does not, the
        answer False leaves it for later.
        """
        self._may_read = may_read

    def leave_gpu(self) -> None:
        """No block is on the GPU any more; those that run come again."""
        for unit in list(self._residents):
            self._drop(unit)

    def settle(self) -> None:
        """The host's numbers may be read and written from here on; no block is on the GPU."""
        self.leave_gpu()
        for unit in self._units:
            for copy in unit.copies:
                copy.finish()
            unit.copies = []
        writes, self._writes = self._writes, {}  # an error of theirs is told once
        for write in (write for several in writes.values() for write in several):
            write.finish()
        self.finish_puts()

    def finish_puts(self) -> None:
        """Wait until all that was sent to the disk is there; raises what went wrong."""
        if self._cold is not None:
            self._cold.finish()

    @property
    def back_bytes(self) -> int:
        """Host memory that `undo` takes for what is on the disk."""
        cold = [unit for unit in self._units if unit.cold_bytes]
        parameters = [p for unit in cold for p in unit.places if unit.is_cold(p)]
        to_host = sum(p.nbytes for p in parameters if self._origins[p].type == "cpu")
        return to_host + max((unit.cold_bytes for unit in cold), default=0)

    def origin(self, parameter: Tensor) -> torch.device:
        """Where a parameter was before, and will be again."""
        assert isinstance(parameter, nn.Parameter)
        return self._origins[parameter]

    def undo(self) -> None:
        """Every weight is where it was before, with the numbers that it has now."""
        self.settle()
        with _plainly():
            # All of them first: where memory runs out, nothing has changed yet.
            back = self._all_brought_back() if self._brings_back else self._all_empty()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._put_back:
            self._put_back.pop()()
        for parameter, data in back.items():
            parameter.data = data
            parameter.__dict__.pop("__deepcopy__", None)
        for unit in self._units:  # a graph that nobody went back through may hold it
            unit.slab, unit.borrowed = torch.empty(0, dtype=torch.uint8), []
        if self._cold is not None:
            self._cold.close()
        self._cold = None
        self._cuts.clear()
        self._stand_ins = StandIns()
        self._apart.clear()
        self._hosts.clear()
        self._origins.clear()
        self._units.clear()
        self._using.clear()
        self._placeholders.clear()
        self._follows.clear()
        self._versions.clear()
        self._moment = None

    # -- setting up -------------------------------------------------------------------------------

    def _move_to_disk(
        self, modules: Mapping[str, nn.Module], on_disk: OnDisk, streamed: set[nn.Parameter]
    ) -> None:
        """Take some blocks' weights to the disk, one block after the other."""
        used = Counter(p for module in modules.values() for p in module.parameters())

        def goes(parameter: nn.Parameter) -> bool:
            return parameter in streamed and used[parameter] == 1 and on_disk.takes(parameter)

        cold = {path: modules[path] for path in modules if path in set(on_disk.blocks)}
        own = {path: lay_out(filter(goes, module.parameters())) for path, module in cold.items()}
        own = {path: places for path, places in own.items() if places}
        if not own:
            return
        if on_disk.cut is None:
            whole = {path: [range(end_of(places.values()))] for path, places in own.items()}
            self._cold = ColdWeights(whole, on_disk.open_slots, BUFFERS)
        else:
            self._cuts = {p: on_disk.cut(p) for places in own.values() for p in places}
            pieces = {path: parts_of(places, self._cuts) for path, places in own.items()}
            self._cold = ColdWeights(pieces, on_disk.open_slots, BUFFERS_OF_PIECES)
        for path in own:
            for parameter in cold[path].parameters():
                apart = parameter in streamed and not goes(parameter)
                if apart and parameter not in self._hosts:
                    self._keep_apart(parameter)
        largest = max(end_of(places.values()) for places in own.values())
        staging = self._link.host_memory(largest) if on_disk.cut is None else None
        for path in own:
            self._move_out(path, cold[path], streamed, staging)

    def _keep_apart(self, parameter: nn.Parameter) -> None:
        """Take a weight to the host that a block of the disk has, but not there."""
        place = Place.of(parameter, 0)
        self._apart[parameter] = self._link.host_memory(place.nbytes)
        there = place.view(self._apart[parameter])
        self._link.to_host(self._given(parameter), there).finish()
        self._hosts[parameter], self._origins[parameter] = there, parameter.device
        self._hide(parameter)

    def _move_out(
        self,
        path: str,
        module: nn.Module,
        streamed: set[nn.Parameter],
        staging: Tensor | None = None,
    ) -> None:
        """Take a block's weights to the host, or to the disk: through `staging`, if there is."""
        mine = [parameter for parameter in module.parameters() if parameter in streamed]
        mine.sort(key=lambda parameter: parameter in self._hosts)  # own ones first, as in the slab
        places = lay_out(mine)
        own = {p: place for p, place in places.items() if p not in self._hosts}
        nbytes = end_of(own.values())
        is_cold = self._cold is not None and path in self._cold
        slab = self._link.host_memory(0 if is_cold else nbytes)
        if is_cold:
            self._take_to_disk(path, own, staging)
        else:
            self._hosts |= self._copied_out(own, slab)
        self._origins |= {parameter: parameter.device for parameter in own}
        unit = Unit(
            path=path,
            module=module,
            places=places,
            nbytes=end_of(places.values()),
            slab=slab,
            borrowed=[
                (self._bytes_on_host(p), place) for p, place in places.items() if p not in own
            ],
            cold_bytes=nbytes if is_cold else 0,
        )
        self._units.append(unit)
        for parameter in places:
            self._using.setdefault(parameter, []).append(unit)
            self._hide(parameter)

    def _copied_out(
        self, own: Mapping[nn.Parameter, Place], slab: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """Weights in their places of host memory."""
        there = {parameter: place.view(slab) for parameter, place in own.items()}
        copies: list[Copy] = []
        try:
            for parameter, target in there.items():
                copies.append(self._link.to_host(self._given(parameter), target))
        finally:
            for copy in copies:
                copy.finish()
        return there

    def _take_to_disk(
        self, path: str, own: Mapping[nn.Parameter, Place], staging: Tensor | None
    ) -> None:
        assert self._cold is not None
        if staging is not None:
            slab = staging[: end_of(own.values())]
            self._copied_out(own, slab)
            self._cold.put(path, 0, slab).finish()
        else:
            for parameter, place in own.items():
                self._cold.write(path, place, self._given(parameter))

    def _given(self, parameter: nn.Parameter) -> Tensor:
        """The numbers that a parameter is to have."""
        return parameter.detach() if self._source is None else self._source(parameter)

    def _bytes_on_host(self, parameter: nn.Parameter) -> Tensor:
        """Those of a weight that is on the host already."""
        if parameter in self._apart:
            return self._apart[parameter]
        lender = self._units_with(parameter)[0]
        return lender.places[parameter].bytes_in(lender.slab)

    def _add_hooks(self, model: nn.Module) -> None:
        for parameter in self._origins:
            copied = functools.partial(_copied, weakref.ref(self), parameter)
            parameter.__dict__["__deepcopy__"] = copied
        cold = {p for p in self._origins if p not in self._hosts}
        for module in model.modules():
            if not cold.isdisjoint(module.parameters()) and not self._cuts:
                self._handles.append(refuse_to_load(module))
            own = {n: p for n, p in module._parameters.items() if p in self._origins}
            if own:
                self._show_host_to(module, own)
        for unit in self._units:
            if unit.cold_bytes and self._cold is not None and not self._cuts:
                self._handles += self._cold.read_once_when_saved(unit.path, unit.module)

    def _show_host_to(self, owner: nn.Module, own: Mapping[str, nn.Parameter | None]) -> None:
        """What is saved of a module's own parameters, or loaded into them, are the host's.

        Of those on the disk it is what the disk has.
        """

        def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            if module is owner:
                self.settle()
                for name, parameter in own.items():
                    if prefix + name in state and parameter is not None:
                        state[prefix + name] = self._saved(parameter)

        def before_load(module: nn.Module, *_: Any) -> None:
            if module is owner:
                self.settle()
                for parameter in own.values():
                    if parameter is not None:
                        parameter.data = self._loaded_into(parameter)
                        self._versions[parameter] += 1

        def after_load(module: nn.Module, _: Any) -> None:
            if module is owner:
                for parameter in own.values():
                    if parameter is not None:
                        if parameter in self._cuts:
                            unit, place, cold = self._on_disk(parameter)
                            cold.write(unit.path, place, parameter.data)
                        self._hide(parameter)

        self._handles += [
            owner.register_state_dict_post_hook(saved),
            owner.register_load_state_dict_pre_hook(before_load),
            owner.register_load_state_dict_post_hook(after_load),
        ]

    def _saved(self, parameter: nn.Parameter) -> Tensor:
        if self._shows_disk or parameter in self._hosts:
            return self.numbers(parameter)
        return self._stand_ins.of(parameter, parameter.shape, parameter.dtype)

    def _loaded_into(self, parameter: nn.Parameter) -> Tensor:
        """Host memory with a parameter's numbers, that others may be loaded into."""
        try:
            return self.numbers(parameter)
        except DiskDamaged:  # then others are what is wanted
            return no_number(parameter.dtype, torch.device("cpu")).expand(parameter.shape).clone()

    def _all_brought_back(self) -> dict[nn.Parameter, Tensor]:
        back = {parameter: self._brought_back(parameter) for parameter in self._hosts}
        return back | self._back_from_disk()

    def _all_empty(self) -> dict[nn.Parameter, Tensor]:
        """Stand-ins as they were, without numbers."""
        return {
            parameter: torch.zeros((), dtype=parameter.dtype, device=origin).expand(parameter.shape)
            for parameter, origin in self._origins.items()
        }

    def _back_from_disk(self) -> dict[nn.Parameter, Tensor]:
        """The numbers that are on the disk, where they were before."""
        back: dict[nn.Parameter, Tensor] = {}
        if self._cold is None:
            return back
        check_host_memory(self.back_bytes, "bringing weights back from the disk")
        for unit in (unit for unit in self._units if unit.cold_bytes):
            memory = self._cold.read(unit.path)
            for parameter in filter(unit.is_cold, unit.places):
                numbers = unit.places[parameter].view(memory)
                back[parameter] = numbers.to(self._origins[parameter], copy=True)
        return back

    def _brought_back(self, parameter: nn.Parameter) -> Tensor:
        return brought_home(
            self._link, self._hosts[parameter], self._origins[parameter], self._device
        )

    # -- coming and going -------------------------------------------------------------------------

    def _enter(self, unit: Unit, phase: _Phase) -> None:
        """A block is about to run: have it here, and the next ones come."""
        moment = _Moment(unit, phase)
        if moment == self._moment and unit.is_here:
            return
        if unit not in self._units:
            raise BadInput(
                f"the weights of {unit.path} are streamed no more: undo it after the backward of"
                " each forward, not between them"
            )
        if self._moment is not None:
            self._follows[self._moment] = moment
        self._moment = moment
        wanted = self._expected(moment)
        self._drop_outdated()
        others = [resident for resident in self._residents if resident not in wanted]
        for other in others[: max(len(others) + len(wanted) - self._most, 0)]:
            self._drop(other)
        with _plainly():
            self._fetch(unit, now=True)
            self._show(unit)
            for following in wanted[1:]:
                self._fetch(following, now=False)

    def _expected(self, moment: _Moment) -> list[Unit]:
        """A block and those that will run next, as far as there is room for them."""
        wanted = [moment.unit]
        following: _Moment | None = moment
        # At the end of forward the same blocks come again the other way: look a little further.
        for _ in range(2 * self._most):
            following = following and (self._follows.get(following) or self._default(following))
            if following is None or len(wanted) == self._most:
                break
            if following.unit not in wanted:
                wanted.append(following.unit)
        return wanted

    def _default(self, moment: _Moment) -> _Moment | None:
        """What follows where it was not seen yet: the next one as they were named."""
        at = self._units.index(moment.unit) + (-1 if moment.phase is _Phase.BACKWARD else 1)
        if moment.phase is _Phase.EVALUATION:
            at %= len(self._units)
        return _Moment(self._units[at], moment.phase) if 0 <= at < len(self._units) else None

    def _fetch(self, unit: Unit, *, now: bool) -> None:
        """Begin to bring a block's weights; `now` says that it is about to run."""
        arrival = self._arrival = _Arrival.of(unit)
        try:
            may_read = self._may_read is None or self._may_read(list(unit.places), now)
        finally:
            self._arrival = None
        if unit.memory is not None or not (may_read or now):
            return
        memory = arrival.memory
        if memory is None:
            memory = torch.empty(unit.nbytes, dtype=torch.uint8, device=self._device)
        after = [write for parameter in arrival.coming for write in self._writes.get(parameter, ())]
        pairs = arrival.copies_into(memory)
        unit.memory, unit.copies, unit.from_disk = memory, [], []
        unit.numbers = arrival.numbers
        unit.versions = {parameter: self._versions[parameter] for parameter in unit.places}
        self._residents.append(unit)
        self._memories[_storage(memory)] = unit
        try:
            if cold := [unit.places[p].span for p in arrival.coming if unit.is_cold(p)]:
                assert self._cold is not None and self._moment is not None
                following = functools.partial(self._cold_after, unit, self._moment.phase)
                for copy in self._cold.get(unit.path, memory, cold, following):
                    unit.from_disk.append(copy)
            if self._cold is not None:
                unit.puts = self._cold.puts
            for source, target in pairs:
                unit.copies.append(self._link.to_gpu(source, target, after))
        except BaseException:
            self._drop(unit)  # a part of it must not be taken for the whole
            raise

    def _cold_after(self, unit: Unit, phase: _Phase) -> list[str]:
        """The blocks of the disk that will run after this one, each once, as far as is known."""
        following: _Moment | None = _Moment(unit, phase)
        seen: dict[_Moment, None] = {}
        while following is not None and following not in seen:
            seen[following] = None
            following = self._follows.get(following) or self._default(following)
        # Where forward turns back, the first ones are here already.
        expected = itertools.dropwhile(_is_resident, (moment.unit for moment in seen))
        paths = dict.fromkeys(one.path for one in expected if one.cold_bytes)
        return [path for path in paths if path != unit.path]

    def _show(self, unit: Unit) -> None:
        """Let the block's parameters be what came; the computing stream waits for it."""
        assert unit.memory is not None
        if not unit.is_here:
            try:
                for copy in (*unit.copies, *unit.from_disk):
                    copy.wait()
            except BaseException:
                self.leave_gpu()  # others may have failed to come, too: all are read again
                raise
            unit.is_here = True
        for parameter, place in unit.places.items():
            if self._shown.get(parameter) is not unit:  # another block may have shown it since
                there = numbers_in(unit.memory, place.dtype, unit.numbers)
                parameter.data = place.view(there)
                self._shown[parameter] = unit

    def _drop(self, unit: Unit) -> None:
        """Give a block's memory on the GPU back."""
        if unit.memory is None:
            return
        if not unit.is_here:
            # Before another op gets the memory; whoever needs what did not come will hear why.
            unit.copies = [copy for copy in unit.copies if _came(copy)]
            for copy in unit.from_disk:
                _came(copy)
        for parameter in unit.places:
            if self._shown.get(parameter) is unit:
                self._hide(parameter)
        del self._memories[_storage(unit.memory)]
        self._residents.remove(unit)
        unit.memory, unit.numbers, unit.from_disk = None, {}, []
        unit.is_here = unit.is_outdated = False

    def _drop_outdated(self) -> None:
        for unit in [unit for unit in self._residents if unit.is_outdated]:
            self._drop(unit)

    def _hide(self, parameter: nn.Parameter) -> None:
        self._shown.pop(parameter, None)
        kind = parameter.dtype, parameter.shape
        with _plainly():
            if kind not in self._placeholders:
                nothing = no_number(parameter.dtype, self._device)
                self._placeholders[kind] = nothing.expand(parameter.shape)
            parameter.data = self._placeholders[kind]

    def _units_with(self, parameter: Tensor) -> list[Unit]:
        return self._using.get(parameter, [])

    def _on_disk(self, parameter: Tensor) -> tuple[Unit, Place, ColdWeights]:
        """The one block of a parameter on the disk, its place there, and all that is there."""
        (unit,) = self._units_with(parameter)
        assert self._cold is not None and isinstance(parameter, nn.Parameter)
        return unit, unit.places[parameter], self._cold

    def _runs_backward(self, unit: Unit) -> bool:
        return (
            torch._C._current_graph_task_id() != -1
            and self._moment == _Moment(unit, _Phase.BACKWARD)
            and unit.is_here
        )

    # -- forward ----------------------------------------------------------------------------------

    def run(
        self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """The forward of a block, with its weights here."""
        if torch._C._current_graph_task_id() != -1:
            phase = _Phase.BACKWARD  # it is recomputed
        else:
            phase = _Phase.FORWARD if torch.is_grad_enabled() else _Phase.EVALUATION
        self._enter(unit, phase)
        with contextlib.ExitStack() as stack:
            casts = _casts_weights(self._device.type)
            if casts:
                # Autocast would keep its copies of all weights until the model's forward ends.
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            if torch.is_grad_enabled():
                if casts and not _is_compiled(unit.module, forward):
                    stack.enter_context(_WatchedCasts(self._note_cast))
                stack.enter_context(self._saving(unit))
            before = [parameter._version for parameter in unit.places]
            output = forward(*args, **kwargs)
        if before != [parameter._version for parameter in unit.places]:
            raise BadInput(
                f"the forward of {unit.path} writes to its own weights, which would be lost: do"
                " not stream it"
            )
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(lambda _: self._need(unit))
        return output

    # -- what autograd saves ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _saving(self, unit: Unit) -> Iterator[None]:
        """What is saved inside keeps no weight; the rest is left to whoever watches outside."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack_rest, unpack_rest = outer or (_as_it_is, _as_it_is)

        def pack(tensor: Tensor) -> Any:
            return self._note(tensor) or pack_rest(tensor)

        def unpack(kept: Any) -> Any:
            # Of any tensor: a recomputed block asks for its inputs, and then for its weights.
            self._need(unit)
            return self._tensor(kept) if isinstance(kept, _Note) else unpack_rest(kept)

        with saved_tensors_hooks(pack, unpack):
            yield

    def _need(self, unit: Unit) -> None:
        """Backward wants a block's weights."""
        if self._moment != _Moment(unit, _Phase.BACKWARD) or not unit.is_here:
            self._enter(unit, _Phase.BACKWARD)

    def _note(self, tensor: Tensor) -> _Note | None:
        """Which weight a tensor is, if it is one."""
        if is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        key = _storage(tensor)
        unit, cast = self._memories.get(key), self._casts.get(key)
        if unit is not None:
            parameter = unit.parameter_at(int(tensor.storage_offset()) * tensor.element_size())
        elif cast is not None and tensor._version == cast.version:
            unit, parameter = cast.unit, cast.parameter
        else:
            return None
        return _Note(
            unit=unit,
            parameter=parameter,
            version=unit.versions[parameter],
            is_cast=unit is not self._memories.get(key),
            dtype=tensor.dtype,
            view=(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())),
        )

    def _tensor(self, note: _Note) -> Tensor:
        """What a note stands for."""
        if not note.unit.is_here:
            self._need(note.unit)
        unit, parameter = note.unit, note.parameter
        if unit.versions[parameter] != note.version:
            raise BadInput(
                f"a weight {list(parameter.shape)} of {unit.path} was changed after the forward"
                " whose backward needs it: go backward before the optimizer steps"
            )
        assert unit.memory is not None
        with torch.no_grad():
            if note.is_cast:
                again = unit.places[parameter].view(unit.memory).to(note.dtype)
            else:
                again = numbers_in(unit.memory, note.dtype, unit.numbers)
            return again.as_strided(*note.view)

    def _note_cast(self, source: Tensor, cast: Tensor) -> None:
        """Remember that a tensor has the numbers of a weight, in another type."""
        unit = self._memories.get(_storage(source))
        if unit is None or cast.stride() != source.stride():
            return
        start = int(source.storage_offset()) * source.element_size()
        parameter = unit.parameter_at(start)
        place = unit.places[parameter]
        if place.offset == start and place.shape == source.shape and place.dtype == source.dtype:
            storage = cast.untyped_storage()
            key = storage._cdata
            # Forgotten with it: another storage may then have its number.
            forget = functools.partial(_forget, weakref.ref(self), key)
            self._casts[key] = _Cast(
                unit=unit,
                parameter=parameter,
                version=cast._version,
                storage=weakref.ref(storage, forget),
            )


@dataclass(kw_only=True)
class _Arrival:
    """A block on its way to the GPU."""

    unit: Unit
    missing: dict[nn.Parameter, int]
    """By parameter: bytes that nobody has put into the memory."""
    memory: Tensor | None = None
    """There once something was put into it."""
    numbers: Numbers = field(default_factory=dict)
    """The same memory, by the types that were asked for."""

    @classmethod
    def of(cls, unit: Unit) -> _Arrival:
        """Of which nothing is there yet."""
        missing = {parameter: place.nbytes for parameter, place in unit.places.items()}
        return cls(unit=unit, missing=missing)

    @property
    def coming(self) -> list[nn.Parameter]:
        """What is read from the host: nothing of what was put into the memory."""
        return [parameter for parameter, nbytes in self.missing.items() if nbytes]

    def copies_into(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What must still come from the host, not from the disk, and where it belongs."""
        unit = self.unit
        if self.memory is None:
            own = unit.slab.numel()
            pairs = [(unit.slab, memory[:own])] if own else []
            return pairs + [(source, place.bytes_in(memory)) for source, place in unit.borrowed]
        lent = {place: source for source, place in unit.borrowed}
        return [
            (lent.get(place, place.bytes_in(unit.slab)), place.bytes_in(memory))
            for place in (unit.places[p] for p in self.coming if not unit.is_cold(p))
        ]


@dataclass(frozen=True)
class _Moment:
    """A block runs for something; equal moments are followed by the same."""

    unit: Unit
    phase: _Phase


@dataclass(frozen=True, kw_only=True)
class _Cast:
    """What autocast made of a weight."""

    unit: Unit
    parameter: nn.Parameter
    version: int
    """Of the copy; another one says that somebody wrote to it."""
    storage: weakref.ref[Any]


@dataclass(frozen=True, kw_only=True)
class _Note:
    """What autograd keeps instead of a weight."""

    unit: Unit
    parameter: nn.Parameter
    version: int
    """Of the host's numbers in forward."""
    is_cast: bool
    """Whether the tensor was a copy of the weight in another type, not a view of it."""
    dtype: torch.dtype
    view: tuple[tuple[int, ...], tuple[int, ...], int]


class _StreamedForward:
    """The forward of a streamed block."""

    def __init__(self, streamed: StreamedWeights, unit: Unit, forward: Callable[..., Any]) -> None:
        self._streamed = streamed
        self._unit = unit
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._streamed.run(self._unit, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copied model has all of its weights, and its own forward."""
        copied: Callable[..., Any] = deepcopy(self._forward, memo)
        return copied


class _WatchedCasts(TorchDispatchMode):
    """Tells of every tensor that is a copy of another in another type."""

    def __init__(self, tell: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            self._tell(args[0], out)
        return out


def _copied(
    streamed: weakref.ref[StreamedWeights], parameter: nn.Parameter, memo: dict[int, Any]
) -> nn.Parameter:
    """A parameter of a copied model: all there, where the model runs."""
    alive = streamed()
    assert alive is not None
    alive.settle()
    data = alive.numbers(parameter).to(parameter.device, copy=True)
    memo[id(parameter)] = copied = nn.Parameter(data, parameter.requires_grad)
    return copied


def _is_resident(unit: Unit) -> bool:
    return unit.memory is not None


def _came(copy: Copy) -> bool:
    """Wait for a copy, whether it went well or not."""
    try:
        copy.wait()
    except OomphError:
        return False
    return True


def _forget(streamed: weakref.ref[StreamedWeights], key: int, _: Any) -> None:
    if (alive := streamed()) is not None:
        alive._casts.pop(key, None)


def _casts_weights(device_type: str) -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in {device_type, "cpu"})


def _is_compiled(block: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether code of it was compiled, which then would not run where somebody watches."""
    inner = (module.__dict__.get("forward") for module in block.modules())
    return any(
        hasattr(called, "_torchdynamo_orig_callable") for called in (forward, *inner)
    ) or any(module._compiled_call_impl is not None for module in block.modules())


def _storage(tensor: Tensor) -> int:
    """The same number for all views of one storage, while it lives."""
    with torch._C.DisableTorchFunction():
        key: int = tensor.untyped_storage()._cdata
        return key


def _as_it_is(kept: Any) -> Any:
    return kept


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """No history, and tensors as they are outside of inference mode: they outlive it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
