"""Place the weights: those of offloaded blocks on the host or on disk, all others on the GPU.

A model that was built on the host is then never on the GPU as a whole, nor on the host twice:
blocks are moved to their memory one after the other, the rest one parameter at a time. With
masters, apply in this order, and undo in reverse:

    masters = MasterWeights(model, optimizer)  # fp32 masters, with rounded weights beside them
    placed = PlacedWeights(model, blocks, link, device=device)
    host = HostOptimizer(…, masters=masters, weights=placed.streamed, home=placed.home)
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from oomph.memory.link import Link
from oomph.techniques.disk_weights import OnDisk
from oomph.techniques.streamed_weights import Source, StreamedWeights
from oomph.techniques.technique import Undo
from oomph.torch_compat.modules import buffers_of


class PlacedWeights:
    """Makes a model compute on `device`, with the weights of the blocks `away` offloaded.

    `ahead`, `wraps`, `on_disk` and `source` are as for `StreamedWeights`.
    """

    def __init__(
        self,
        model: nn.Module,
        away: Sequence[str],
        link: Link,
        *,
        device: torch.device,
        ahead: int = 1,
        wraps: bool = True,
        on_disk: OnDisk | None = None,
        source: Source | None = None,
    ) -> None:
        self._homes: dict[Tensor, torch.device] = {p: p.device for p in model.parameters()}
        #: The offloaded weights; None where all are on the device.
        self.streamed: StreamedWeights | None = None
        streamed: set[nn.Parameter] = set()
        with contextlib.ExitStack() as undos:
            if away:
                self.streamed = StreamedWeights(
                    model,
                    away,
                    link,
                    ahead=ahead,
                    device=device,
                    wraps=wraps,
                    on_disk=on_disk,
                    source=source,
                )
                undos.callback(self.streamed.undo)
                streamed = set(self.streamed.parameters)
            if source is not None:
                undos.callback(_fill(model, device, source, but=streamed))
            undos.callback(move_model(model, device, but=streamed))
            self._undos = undos.pop_all()

    def home(self, parameter: Tensor) -> torch.device:
        """The device that a parameter was on before, and returns to."""
        return self._homes[parameter]

    def undo(self) -> None:
        """Move every weight back to where it was, with its current values."""
        if self.streamed is not None:
            self.streamed.undo()  # first, because it may be refused and called again
        self._undos.close()


def _fill(
    model: nn.Module, device: torch.device, source: Source, *, but: Collection[nn.Parameter]
) -> Undo:
    """Give stand-ins, except `but`, their values on a device; undo makes them empty again."""
    empty = {parameter: parameter.data for parameter in model.parameters() if parameter not in but}

    def undo() -> None:
        for parameter, nothing in empty.items():
            parameter.data = nothing

    try:
        for parameter in empty:
            parameter.data = source(parameter).to(device, copy=True)
    except BaseException:
        undo()
        raise
    return undo


def move_model(
    model: nn.Module, device: torch.device, *, but: Collection[nn.Parameter] = ()
) -> Undo:
    """Move parameters and buffers, except `but`, to a device; undo moves them back."""
    parameters = [
        (p, p.device) for p in model.parameters() if p not in but and not _is_on(p, device)
    ]
    buffers = [
        (module, name, buffer.device)
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None and not _is_on(buffer, device)
    ]

    def move(to: torch.device | None) -> None:
        for parameter, origin in parameters:
            parameter.data = parameter.data.to(to or origin)
        for module, name, origin in buffers:
            buffer = buffers_of(module)[name]
            buffers_of(module)[name] = buffer.to(to or origin) if buffer is not None else None

    def undo() -> None:
        move(None)

    try:
        move(device)
    except BaseException:
        undo()
        raise
    return undo


def move_training(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Undo:
    """Move a model and its optimizer's state to a device; undo moves them back."""
    undo_model = move_model(model, device)

    def follow() -> None:
        """Move state to its parameter's device, except counters, which the optimizer places."""
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, Tensor):
                continue  # an entry of the user's own optimizer class, which places it itself
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[name] = value.to(parameter.device)

    def undo() -> None:
        undo_model()
        follow()

    try:
        follow()
    except BaseException:
        undo()
        raise
    return undo


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
