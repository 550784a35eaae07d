"""Weights on the host: each block's are fetched to the GPU while the blocks before it run.

The GPU holds the weights of a few blocks at a time: the running block and the `ahead` blocks that
come next. The order is learned: the same blocks follow each other in each forward, in each backward
and for each generated token. A wrong guess costs time but never changes a result.

Parameters stay the same objects. While a block does not run, each of its parameters is watched:
code that reads or writes it, in the loss, in another block or between steps, does so with the
host's values (`AwayReads`). Code that cannot be watched, such as a C extension, sees one NaN
expanded to all elements. Loading into, saving and copying the model use the host's values, too.
Blocks whose weights have no room on the host keep them on disk (`disk_weights`). Disk weights are
only read from then on, by forwards and when the model is saved or copied; if they are trained, they
are also written piece by piece as they are stepped.

When autograd saves a weight, a view of it or autocast's copy of it, a note of its place in its
block is kept instead; backward finds it in the memory that the block has then. So saved tensors do
not keep weights on the GPU, and tensors that other code keeps stay as they were.

Apply this after the blocks were set up to be recomputed or were compiled, and before their
activations are offloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput, DiskDamaged, OomphError
from oomph.memory.limits import check_host_memory
from oomph.memory.link import Copy, DoneCopy, Link
from oomph.techniques.away_reads import AwayReads
from oomph.techniques.batch_calls import unwatched
from oomph.techniques.block_order import BlockOrder, Moment, Phase
from oomph.techniques.disk_weights import (
    BUFFERS,
    BUFFERS_OF_PIECES,
    Cuts,
    DiskWeights,
    OnDisk,
    parts_of,
    refuse_to_load,
)
from oomph.techniques.forward_call import note_read, told_before_again
from oomph.techniques.host_tensors import StandIns, brought_home, gpu_like, no_number
from oomph.techniques.recompute import replace_forward
from oomph.techniques.saved_weights import SavedWeights, storage_key
from oomph.techniques.surroundings import is_transformed
from oomph.techniques.technique import Undo
from oomph.techniques.tensor_writes import written_by
from oomph.techniques.users_line import users_line
from oomph.techniques.watched_tensors import is_own_work, own_work, unwatch, watch
from oomph.techniques.weight_blocks import (
    Numbers,
    Place,
    Unit,
    device_of,
    end_of,
    find_blocks,
    lay_out,
    numbers_in,
    refuse_shared_memory,
    streamed_by,
)
from oomph.techniques.weight_owners import AWAY, refuse_others
from oomph.torch_compat.autograd import (
    current_graph_task_id,
    queue_callback,
)
from oomph.torch_compat.compiler import ORIGINAL_FUNCTION, compiled_call_of
from oomph.torch_compat.dispatch import TorchDispatchMode
from oomph.torch_compat.modules import parameters_of
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_leaves
from oomph.torch_compat.tensors import version_of

#: Whether the host's values of these parameters may be read; the flag says that a block runs now.
MayRead = Callable[[Sequence[nn.Parameter], bool], bool]
#: Returns the values of a parameter that is a stand-in for one in a file.
Source = Callable[[nn.Parameter], Tensor]


class StreamedWeights:
    """Streams the weights of `blocks`, the paths of modules of `model`, in the order they run.

    The blocks run on `device`, by default the one they are on now. A weight that is also used
    outside of the blocks stays where it is; one that several blocks use is fetched with each of
    them. With `wraps` the blocks fetch their weights from now on; otherwise once `wrap` is called.
    The weights of the blocks in `on_disk` are there instead of on the host, except those that other
    blocks use too, and small ones that are trained.
    With a `source` the parameters are stand-ins without data, and are again after undo: the source
    gives their values.
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
        #: The units that each parameter is a part of.
        self._using: dict[Tensor, list[Unit]] = {}
        #: The host's values of each parameter, and the device that it came from.
        self._hosts: dict[nn.Parameter, Tensor] = {}
        self._origins: dict[nn.Parameter, torch.device] = {}
        #: The bytes of parameters on the host that are in no block's slab.
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._disk_weights: DiskWeights | None = None
        #: For trained parameters on disk: the elements of each of their pieces there.
        self._cuts: dict[Tensor, Cuts] = {}
        self._stand_ins: StandIns[nn.Parameter] = StandIns()
        #: Serves uses of a weight while its block does not run.
        self._reads = AwayReads(self)
        #: The backward in which each parameter's values were changed last.
        self._changed_in: dict[Tensor, int] = {}
        self._shows_disk = True
        #: Copies that must finish before the host's values of a parameter are valid.
        self._writes: dict[Tensor, list[Copy]] = {}
        #: How often the host's values of a parameter were changed.
        self._versions: Counter[Tensor] = Counter()
        self._placeholders: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self._shown: dict[nn.Parameter, Unit] = {}
        #: Blocks that are on the GPU or on their way, the first fetched first.
        self._residents: list[Unit] = []
        #: What autograd saves of them.
        self._noted = SavedWeights(self._need)
        self._order = BlockOrder(self._units, self._most)
        #: The block whose backward runs, and the id of that backward.
        self._goes_back: tuple[Unit, int] | None = None
        #: Called before the host's values of a block are read; see `ask_before_reading`.
        self._may_read: MayRead | None = None
        #: The block that is about to be fetched, with what was put into its memory meanwhile.
        self._arrival: _Arrival | None = None
        self._handles: list[RemovableHandle] = []
        self._put_back: list[Undo] = []
        streamed = streamed_by(model, modules.values())
        refuse_others(streamed)
        self._device = device or device_of(streamed)
        refuse_shared_memory(streamed, self._device)
        try:
            with _plainly():
                if on_disk is not None:
                    self._move_to_disk(modules, on_disk, streamed)
                for path, module in modules.items():
                    if self._disk_weights is None or path not in self._disk_weights:
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
        """The parameters whose values are on the host or on disk."""
        return list(self._origins)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """The blocks with weights on disk."""
        return tuple(unit.path for unit in self._units if unit.disk_bytes)

    def host_weight(self, parameter: nn.Parameter) -> Tensor:
        """The host's values of a parameter; before writing to them, see `before_write`.

        For a parameter on disk, a tensor without data that has its shape and strides.
        """
        if parameter in self._hosts:
            return self._hosts[parameter]
        return self._units_with(parameter)[0].places[parameter].like

    def cuts(self, parameter: Tensor) -> Cuts:
        """The elements of each piece of a parameter on disk; empty if it is on the host."""
        if parameter in self._origins and parameter not in (self._hosts.keys() | self._cuts.keys()):
            raise BadInput("weights on the disk that are only read cannot be trained")
        return self._cuts.get(parameter, ())

    def numbers(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's values: the host's, or read from disk."""
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
        """While active, a state dict has stand-ins for weights on disk."""
        self._shows_disk = False
        try:
            yield
        finally:
            self._shows_disk = True

    def stands_for(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter that a stand-in in a state dict replaces; None for other tensors."""
        return self._stand_ins.find(tensor)

    def holds(self, parameter: Tensor) -> bool:
        """Whether the values of a parameter are on the host or on disk."""
        return parameter in self._origins

    def name(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        unit = self._units_with(parameter)[0]
        names = (name for name, own in unit.module.named_parameters() if own is parameter)
        return f"{unit.path}.{next(names, '?')}"

    def is_noted(self, parameter: Tensor) -> bool:
        """Whether a backward is still to read a parameter that was used outside of its block."""
        return self._reads.is_noted(parameter)

    def version(self, parameter: Tensor) -> int:
        """How often the values of a parameter were changed."""
        return self._versions[parameter]

    def brought(self, parameter: nn.Parameter, version: int | None = None) -> Tensor:
        """A copy of a parameter's values on the GPU, for a use outside of its block.

        With `version`, an error if the values were changed since that version.
        """
        if self._may_read is not None:
            self._may_read([parameter], True)
        note_read(parameter)
        backward = current_graph_task_id()
        was_changed = version is not None and version != self._versions[parameter]
        if was_changed or (backward != -1 and self._changed_in.get(parameter) == backward):
            raise BadInput(
                f"the weight {self.name(parameter)} was changed before the backward of a forward"
                f" that read it outside of its block ({users_line()}): keep its block on the GPU"
            )
        with _plainly():
            there = gpu_like(self.host_weight(parameter), self._device)
            if parameter in self._hosts:
                after = self._writes.get(parameter, ())
                self._link.to_gpu(self._hosts[parameter], there, after).wait()
            elif self._cuts:
                pieces = [(p.start, p.stop) for p in self._cuts[parameter]]
                flat = there.as_strided((there.numel(),), (1,))
                for copy in [self.bring(parameter, a, flat[a:b]) for a, b in pieces]:
                    copy.wait()
            else:
                there.copy_(self.numbers(parameter))
        return there

    def wrap(self) -> Undo:
        """Make the blocks fetch their weights; undo this before changing any wrapper below it.

        Wrappers that were put around a block's forward earlier, such as recomputation, run inside
        of this one; later ones, such as activation offload, run outside.
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
        """The copies that read the host's values, and must finish before these are written to."""
        return [copy for unit in self._units_with(parameter) for copy in unit.copies]

    def written(self, parameter: Tensor, after: Sequence[Copy] = ()) -> None:
        """Note that the host's values changed, or will have when `after` is done.

        A block whose backward runs keeps its old values until that is done.
        """
        self._writes[parameter] = list(after)
        self._versions[parameter] += 1
        self._changed_in[parameter] = current_graph_task_id()
        for unit in self._units_with(parameter):
            if self._runs_backward(unit):
                unit.is_outdated = True
            else:
                self._drop(unit)

    def put(self, parameter: Tensor, piece: Callable[[Tensor], Tensor], numbers: Tensor) -> None:
        """Take new values of a piece of a parameter, which the GPU's compute stream produces.

        If its block is about to be fetched, they need not be copied from the host.
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
        """Start to read the piece of a disk parameter that begins at element `start`.

        A piece that the block has on the GPU is not read from disk.
        """
        unit, place, cold = self._on_disk(parameter)
        at = place.byte_of(start)
        flat = target.as_strided((target.numel(),), (1,))
        if unit.is_here and not cold.was_put_since(unit.puts, unit.path, at):
            assert unit.memory is not None
            flat.copy_(unit.memory[at : at + target.nbytes].view(target.dtype))
            return DoneCopy()
        following = functools.partial(self._order.on_disk_after, unit, Phase.FORWARD)
        return cold.get_part(unit.path, at, flat, following)

    def send(self, parameter: Tensor, start: int, numbers: Tensor) -> Copy:
        """Start to write new values of such a piece to disk; see `written` and `put`."""
        unit, place, cold = self._on_disk(parameter)
        flat = numbers.as_strided((numbers.numel(),), (1,))
        return cold.put(unit.path, place.byte_of(start), flat)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        """Give a parameter new values, synchronously."""
        if parameter not in self._hosts and not self._cuts:
            raise BadInput(
                f"the weight {self.name(parameter)} is on the disk, which is only read, and was"
                f" written to by {users_line()}: undo the run before"
            )
        self.settle()
        if parameter in self._hosts:
            self._hosts[parameter].copy_(numbers)
        else:
            unit, place, cold = self._on_disk(parameter)
            cold.write(unit.path, place, numbers.to(place.dtype))
        self.written(parameter)

    def ask_before_reading(self, may_read: MayRead | None) -> None:
        """Call `may_read` before each fetch of a block, to bring the host's values up to date.

        It gets the block's parameters and whether the block runs now. If the block does not run
        yet, returning False postpones the fetch.
        """
        self._may_read = may_read

    def leave_gpu(self) -> None:
        """Drop all blocks from the GPU; a block that runs is fetched again."""
        for unit in list(self._residents):
            self._drop(unit)

    def settle(self) -> None:
        """Drop all blocks and finish all copies: the host's values may be read and written then."""
        self.leave_gpu()
        for unit in self._units:
            for copy in unit.copies:
                copy.finish()
            unit.copies = []
        writes, self._writes = self._writes, {}  # so that an error of theirs is raised only once
        for write in (write for several in writes.values() for write in several):
            write.finish()
        self.finish_puts()

    def finish_puts(self) -> None:
        """Wait until everything sent to the disk is there; raises errors of those writes."""
        if self._disk_weights is not None:
            self._disk_weights.finish()

    @property
    def back_bytes(self) -> int:
        """Host memory in bytes that `undo` needs for weights on disk."""
        cold = [unit for unit in self._units if unit.disk_bytes]
        parameters = [p for unit in cold for p in unit.places if unit.is_on_disk(p)]
        to_host = sum(p.nbytes for p in parameters if self._origins[p].type == "cpu")
        return to_host + max((unit.disk_bytes for unit in cold), default=0)

    def origin(self, parameter: Tensor) -> torch.device:
        """The device that a parameter was on before, and returns to."""
        assert isinstance(parameter, nn.Parameter)
        return self._origins[parameter]

    def undo(self) -> None:
        """Move every weight back to where it was, with its current values."""
        self.settle()
        with _plainly():
            # Copy all of them first: if memory runs out, nothing has changed yet.
            back = self._all_brought_back() if self._brings_back else self._all_empty()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._put_back:
            self._put_back.pop()()
        for parameter, data in back.items():
            unwatch(parameter)
            parameter.data = data
            parameter.__dict__.pop("__deepcopy__", None)
            parameter.__dict__.pop(AWAY, None)
        for unit in self._units:  # a graph whose backward never ran may hold the unit
            unit.slab, unit.borrowed = torch.empty(0, dtype=torch.uint8, device="cpu"), []
        if self._disk_weights is not None:
            self._disk_weights.close()
        self._disk_weights = None
        self._cuts.clear()
        self._stand_ins = StandIns()
        self._apart.clear()
        self._hosts.clear()
        self._origins.clear()
        self._units.clear()
        self._using.clear()
        self._placeholders.clear()
        self._order.forget()
        self._versions.clear()
        self._goes_back = None

    # -- setting up -------------------------------------------------------------------------------

    def _move_to_disk(
        self, modules: Mapping[str, nn.Module], on_disk: OnDisk, streamed: set[nn.Parameter]
    ) -> None:
        """Move some blocks' weights to disk, one block after the other."""
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
            self._disk_weights = DiskWeights(whole, on_disk.open_store, BUFFERS)
        else:
            self._cuts = {p: on_disk.cut(p) for places in own.values() for p in places}
            pieces = {path: parts_of(places, self._cuts) for path, places in own.items()}
            self._disk_weights = DiskWeights(pieces, on_disk.open_store, BUFFERS_OF_PIECES)
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
        """Move to the host a weight of a disk block that is not kept on disk itself."""
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
        """Move a block's weights to the host or to disk, through `staging` if it is given."""
        mine = [parameter for parameter in module.parameters() if parameter in streamed]
        mine.sort(key=lambda parameter: parameter in self._hosts)  # own ones first, as in the slab
        places = lay_out(mine)
        own = {p: place for p, place in places.items() if p not in self._hosts}
        nbytes = end_of(own.values())
        is_on_disk = self._disk_weights is not None and path in self._disk_weights
        slab = self._link.host_memory(0 if is_on_disk else nbytes)
        if is_on_disk:
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
            disk_bytes=nbytes if is_on_disk else 0,
        )
        self._units.append(unit)
        for parameter in places:
            self._using.setdefault(parameter, []).append(unit)
            self._hide(parameter)

    def _copied_out(
        self, own: Mapping[nn.Parameter, Place], slab: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        """Copy weights to their places in host memory."""
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
        assert self._disk_weights is not None
        if staging is not None:
            slab = staging[: end_of(own.values())]
            self._copied_out(own, slab)
            self._disk_weights.put(path, 0, slab).finish()
        else:
            for parameter, place in own.items():
                self._disk_weights.write(path, place, self._given(parameter))

    def _given(self, parameter: nn.Parameter) -> Tensor:
        """The initial values of a parameter."""
        return parameter.detach() if self._source is None else self._source(parameter)

    def _bytes_on_host(self, parameter: nn.Parameter) -> Tensor:
        """The bytes of a weight that is on the host already."""
        if parameter in self._apart:
            return self._apart[parameter]
        lender = self._units_with(parameter)[0]
        return lender.places[parameter].bytes_in(lender.slab)

    def _add_hooks(self, model: nn.Module) -> None:
        for parameter in self._origins:
            parameter.__dict__[AWAY] = weakref.ref(self)
            copied = functools.partial(_copied, weakref.ref(self), parameter)
            parameter.__dict__["__deepcopy__"] = copied
        cold = {p for p in self._origins if p not in self._hosts}
        for module in model.modules():
            if not cold.isdisjoint(module.parameters()) and not self._cuts:
                self._handles.append(refuse_to_load(module))
            if any(p in self._origins for p in parameters_of(module).values()):
                self._show_host_to(module)
        for unit in self._units:
            if unit.disk_bytes and self._disk_weights is not None and not self._cuts:
                self._handles += self._disk_weights.read_once_when_saved(unit.path, unit.module)

    def _show_host_to(self, owner: nn.Module) -> None:
        """Make state dicts use the values on the host or on disk of a module's own parameters."""

        def own() -> dict[str, nn.Parameter]:
            """Read anew each time, because weights may have been tied or replaced since."""
            named = parameters_of(owner).items()
            return {name: p for name, p in named if p is not None and p in self._origins}

        def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            if module is owner:
                self.settle()
                for name, parameter in own().items():
                    if prefix + name in state:
                        state[prefix + name] = self._saved(parameter)

        def before_load(module: nn.Module, *_: Any) -> None:
            if module is owner:
                self.settle()
                for parameter in own().values():
                    unwatch(parameter)
                    parameter.data = self._loaded_into(parameter)
                    self._versions[parameter] += 1

        def after_load(module: nn.Module, _: Any) -> None:
            if module is owner:
                for parameter in own().values():
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
        """Host memory with a parameter's values, that new ones may be loaded into."""
        try:
            return self.numbers(parameter)
        except DiskDamaged:  # the old values are about to be replaced anyway
            return no_number(parameter.dtype, torch.device("cpu")).expand(parameter.shape).clone()

    def _all_brought_back(self) -> dict[nn.Parameter, Tensor]:
        back = {parameter: self._brought_back(parameter) for parameter in self._hosts}
        return back | self._back_from_disk()

    def _all_empty(self) -> dict[nn.Parameter, Tensor]:
        """Stand-ins as they were, without data."""
        return {
            parameter: torch.zeros((), dtype=parameter.dtype, device=origin).expand(parameter.shape)
            for parameter, origin in self._origins.items()
        }

    def _back_from_disk(self) -> dict[nn.Parameter, Tensor]:
        """The weights on disk, copied to the devices they came from."""
        back: dict[nn.Parameter, Tensor] = {}
        if self._disk_weights is None:
            return back
        check_host_memory(self.back_bytes, "bringing weights back from the disk")
        for unit in (unit for unit in self._units if unit.disk_bytes):
            memory = self._disk_weights.read(unit.path)
            for parameter in filter(unit.is_on_disk, unit.places):
                numbers = unit.places[parameter].view(memory)
                back[parameter] = numbers.to(self._origins[parameter], copy=True)
        return back

    def _brought_back(self, parameter: nn.Parameter) -> Tensor:
        return brought_home(
            self._link, self._hosts[parameter], self._origins[parameter], self._device
        )

    # -- fetching and dropping --------------------------------------------------------------------

    @unwatched()
    def _enter(self, unit: Unit, phase: Phase) -> None:
        """Bring the block that is about to run to the GPU, and start to fetch the next ones."""
        moment = Moment(unit, phase)
        if phase is not Phase.BACKWARD:
            self._end_of_backward()  # a backward that failed did not call it
        if moment == self._order.now and unit.is_here:
            self._use_in_backward(moment)
            return
        if unit not in self._units:
            raise BadInput(
                f"the weights of {unit.path} are streamed no more: undo it after the backward of"
                " each forward, not between them"
            )
        self._order.go_on(moment)
        wanted = self._order.expected(moment)
        self._drop_outdated()
        others = [resident for resident in self._residents if resident not in wanted]
        for other in others[: max(len(others) + len(wanted) - self._most, 0)]:
            self._drop(other)
        with _plainly():
            self._fetch(unit, now=True)
            self._show(unit)
            for following in wanted[1:]:
                self._fetch(following, now=False)
        self._use_in_backward(moment)

    def _use_in_backward(self, moment: Moment) -> None:
        """Leave a block's parameters unwatched until backward reaches the next block.

        A recomputed forward uses them then, and does not tell us when it is done.
        """
        backward = current_graph_task_id()
        now = (moment.unit, backward)
        if moment.phase is not Phase.BACKWARD or backward == -1 or now == self._goes_back:
            return
        is_first = self._goes_back is None or self._goes_back[1] != backward
        self._end_of_backward()
        self._goes_back = now
        for parameter in moment.unit.places:
            unwatch(parameter)
        if is_first:
            queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        """Resume watching the weights of the block whose backward ran last."""
        before, self._goes_back = self._goes_back, None
        if before is not None:
            self._watch(before[0])

    def _watch(self, unit: Unit) -> None:
        for parameter in unit.places:
            if parameter in self._origins:
                watch(parameter, self._reads)

    def _fetch(self, unit: Unit, *, now: bool) -> None:
        """Start to fetch a block's weights; `now` says that it is about to run."""
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
        self._noted.came(unit, memory)
        try:
            if cold := [unit.places[p].span for p in arrival.coming if unit.is_on_disk(p)]:
                assert self._disk_weights is not None and self._order.now is not None
                following = functools.partial(
                    self._order.on_disk_after, unit, self._order.now.phase
                )
                for copy in self._disk_weights.get(unit.path, memory, cold, following):
                    unit.from_disk.append(copy)
            if self._disk_weights is not None:
                unit.puts = self._disk_weights.puts
            for source, target in pairs:
                unit.copies.append(self._link.to_gpu(source, target, after))
        except BaseException:
            self._drop(unit)  # a partly fetched block must not count as resident
            raise

    def _show(self, unit: Unit) -> None:
        """Set the block's parameters to its GPU memory; the compute stream waits for the copies."""
        assert unit.memory is not None
        if not unit.is_here:
            try:
                for copy in (*unit.copies, *unit.from_disk):
                    copy.wait()
            except BaseException:
                self.leave_gpu()  # other fetches may have failed, too: all blocks are read again
                raise
            unit.is_here = True
        for parameter, place in unit.places.items():
            if self._shown.get(parameter) is not unit:  # another block may have set it since
                there = numbers_in(unit.memory, place.dtype, unit.numbers)
                parameter.data = place.view(there)
                self._shown[parameter] = unit

    def _drop(self, unit: Unit) -> None:
        """Free a block's GPU memory."""
        if unit.memory is None:
            return
        if not unit.is_here:
            # Before another op gets the memory. A later fetch raises again what failed here.
            unit.copies = [copy for copy in unit.copies if _came(copy)]
            for copy in unit.from_disk:
                _came(copy)
        for parameter in unit.places:
            if self._shown.get(parameter) is unit:
                self._hide(parameter)
        self._noted.left(unit.memory)
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
        watch(parameter, self._reads)

    def _units_with(self, parameter: Tensor) -> list[Unit]:
        return self._using.get(parameter, [])

    def _on_disk(self, parameter: Tensor) -> tuple[Unit, Place, DiskWeights]:
        """The one block of a parameter on disk, its place there, and the disk weights."""
        (unit,) = self._units_with(parameter)
        assert self._disk_weights is not None and isinstance(parameter, nn.Parameter)
        return unit, unit.places[parameter], self._disk_weights

    def _runs_backward(self, unit: Unit) -> bool:
        return (
            current_graph_task_id() != -1
            and self._order.now == Moment(unit, Phase.BACKWARD)
            and unit.is_here
        )

    # -- forward ----------------------------------------------------------------------------------

    def run(
        self, unit: Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a block's forward with its weights on the GPU."""
        if is_transformed():
            raise BadInput(
                f"{unit.path} is called inside of torch.func, which cannot have its weights come"
                " and go: leave its weights on the GPU"
            )
        if current_graph_task_id() != -1:
            phase = Phase.BACKWARD  # it is recomputed
        else:
            phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        self._enter(unit, phase)
        with contextlib.ExitStack() as stack:
            casts = _casts_weights(self._device.type)
            if casts:
                # Autocast would keep its copies of all weights until the model's forward ends.
                stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
                torch.set_autocast_cache_enabled(False)
            if torch.is_grad_enabled():
                if casts and not is_compiled(unit.module, forward):
                    stack.enter_context(self._noted.noting_casts())
                stack.enter_context(self._noted.noting(unit))
                # If a recomputed block has no tensor argument, nothing else fetches its weights.
                stack.enter_context(told_before_again(functools.partial(self._need, unit)))
            if unit.looks() and not is_compiled(unit.module, forward):
                stack.enter_context(_WatchedWrites(unit))
            before = [version_of(parameter) for parameter in unit.places]
            with self._in_use(unit):
                output = forward(*args, **kwargs)
            replaced = any(
                self._shown.get(parameter) is unit and not unit.shows(parameter)
                for parameter in unit.places
            )
        if replaced or before != [version_of(parameter) for parameter in unit.places]:
            raise BadInput(
                f"the forward of {unit.path} writes to its own weights, which would be lost: do"
                " not stream it"
            )
        if unit.written and phase is not Phase.BACKWARD:
            self._keep_written(unit)
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(lambda _: self._need(unit))
        return output

    def _keep_written(self, unit: Unit) -> None:
        """Copy to the host what a forward wrote to its own parameters through `data`.

        Autograd does not notice these writes, as it does not without a run.
        """
        assert unit.memory is not None
        with _plainly():
            for parameter in unit.written:
                if parameter not in self._hosts:
                    raise BadInput(
                        f"the forward of {unit.path} writes to its own weights through data, which"
                        " would be lost on the disk: keep this block on the GPU"
                    )
                now = unit.places[parameter].view(unit.memory)
                self._link.to_host(now, self._hosts[parameter]).finish()
                for other in self._units_with(parameter):
                    if other is not unit:
                        self._drop(other)

    @contextlib.contextmanager
    def _in_use(self, unit: Unit) -> Iterator[None]:
        """While active, a block's parameters are unwatched, because only the block uses them."""
        for parameter in unit.places:
            unwatch(parameter)
        try:
            yield
        finally:
            if self._goes_back is None or self._goes_back[0] is not unit:
                self._watch(unit)

    def _need(self, unit: Unit) -> None:
        """Provide a block's weights for backward."""
        moment = Moment(unit, Phase.BACKWARD)
        if self._order.now != moment or not unit.is_here:
            self._enter(unit, Phase.BACKWARD)
        else:
            self._use_in_backward(moment)


@dataclass(kw_only=True)
class _Arrival:
    """A block on its way to the GPU."""

    unit: Unit
    missing: dict[nn.Parameter, int]
    """By parameter: bytes that were not put into the memory."""
    memory: Tensor | None = None
    """Allocated once something is put into it."""
    numbers: Numbers = field(default_factory=dict)
    """Views of the same memory, by dtype."""

    @classmethod
    def of(cls, unit: Unit) -> _Arrival:
        """An arrival of which nothing is there yet."""
        missing = {parameter: place.nbytes for parameter, place in unit.places.items()}
        return cls(unit=unit, missing=missing)

    @property
    def coming(self) -> list[nn.Parameter]:
        """The parameters that must be fetched, because they were not put into the memory."""
        return [parameter for parameter, nbytes in self.missing.items() if nbytes]

    def copies_into(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The copies from the host, not from disk, that are still needed: sources and targets."""
        unit = self.unit
        if self.memory is None:
            own = unit.slab.numel()
            pairs = [(unit.slab, memory[:own])] if own else []
            return pairs + [(source, place.bytes_in(memory)) for source, place in unit.borrowed]
        lent = {place: source for source, place in unit.borrowed}
        return [
            (lent.get(place, place.bytes_in(unit.slab)), place.bytes_in(memory))
            for place in (unit.places[p] for p in self.coming if not unit.is_on_disk(p))
        ]


class _StreamedForward:
    """The forward of a streamed block."""

    def __init__(self, streamed: StreamedWeights, unit: Unit, forward: Callable[..., Any]) -> None:
        self._streamed = streamed
        self._unit = unit
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._streamed.run(self._unit, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Give a copied model its own forward, without streaming."""
        copied: Callable[..., Any] = deepcopy(self._forward, memo)
        return copied


class _WatchedWrites(TorchDispatchMode):
    """Records which of its weights a block's forward writes to, even without a version change."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self._unit = unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unit, kwargs = self._unit, kwargs or {}
        if schema_of(func).is_mutable and unit.memory is not None and not is_own_work():
            for tensor in written_by(func, args, kwargs):
                if storage_key(tensor) == storage_key(unit.memory):
                    start = int(tensor.storage_offset()) * tensor.element_size()
                    unit.written.add(unit.parameter_at(start))
        return func(*args, **kwargs)


def _copied(
    streamed: weakref.ref[StreamedWeights], parameter: nn.Parameter, memo: dict[int, Any]
) -> nn.Parameter:
    """A parameter of a copied model: with its values, on the device where the model runs."""
    alive = streamed()
    assert alive is not None
    alive.settle()
    data = alive.numbers(parameter).to(parameter.device, copy=True)
    memo[id(parameter)] = copied = nn.Parameter(data, parameter.requires_grad)
    return copied


def _came(copy: Copy) -> bool:
    """Wait for a copy; tells whether it succeeded."""
    try:
        copy.wait()
    except OomphError:
        return False
    return True


def _casts_weights(device_type: str) -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in {device_type, "cpu"})


def is_compiled(block: nn.Module, forward: Callable[..., Any] | None = None) -> bool:
    """Whether any of its code was compiled; under a dispatch mode that would not run compiled."""
    inner = (module.__dict__.get("forward") for module in block.modules())
    return any(hasattr(called, ORIGINAL_FUNCTION) for called in (forward, *inner)) or any(
        compiled_call_of(module) is not None for module in block.modules()
    )


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """While active: no autograd, no watchers, and new tensors are no inference tensors."""
    with torch.inference_mode(False), torch.no_grad(), own_work():
        yield
