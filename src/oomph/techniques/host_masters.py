"""fp32 masters on the host, shown through the optimizer's own parameters.

A master is kept where its parameter's state is: in host memory, on the disk (`DiskState`), or on
the GPU; the rest of this text does not apply to masters that stay on the GPU. Between `hide` and
`show`, a parameter of the optimizer is an empty tensor on the GPU that can receive a gradient. At
other times it is the master, or a stand-in for a master on the disk; `show_numbers` replaces
stand-ins by the masters' values.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from oomph.memory.link import Link
from oomph.techniques.disk_state import MASTER, DiskState
from oomph.techniques.host_tensors import brought_home, to_host_now
from oomph.techniques.step_buckets import Trained


class HostMasters:
    """The masters of those optimizer parameters that have one."""

    def __init__(
        self, link: Link, disk: DiskState | None = None, staying: Collection[Trained] = ()
    ) -> None:
        self._link = link
        self._disk = disk
        self._staying = staying
        #: The masters in host memory.
        self.in_memory: dict[Trained, Tensor] = {}
        #: All offloaded masters, by the optimizer's tensor.
        self._moved: dict[Tensor, Trained] = {}
        #: Masters on the disk whose values are shown.
        self._shown: set[Trained] = set()
        self._are_hidden = False

    def move_out(self, trained: Trained) -> None:
        """Offload a parameter's master, if it has one."""
        if not trained.has_master:
            return
        if trained in self._staying:
            trained.owned.data = trained.owned.detach().to(trained.leaf.device)
            return
        if self._disk is not None and trained in self._disk:
            self._disk.write(trained, {MASTER: trained.owned})
        else:
            self.in_memory[trained] = to_host_now(self._link, trained.owned)
        self._moved[trained.owned] = trained
        trained.owned.data = self._at_rest(trained)

    def move_in(self, trained: Trained, home: torch.device) -> None:
        """Move a parameter's master back to `home`."""
        if trained.has_master and trained in self._staying:
            trained.owned.data = trained.owned.detach().to(home)
        if trained.owned not in self._moved:
            return
        if (master := self.in_memory.pop(trained, None)) is not None:
            trained.owned.data = brought_home(self._link, master, home, trained.leaf.device)
        elif trained in self._shown:
            trained.owned.data = trained.owned.detach().to(home)
        else:
            trained.owned.data = self._read(trained, home)
        del self._moved[trained.owned]

    def hide(self) -> None:
        """Make the optimizer's tensors receive gradients; write shown disk masters back."""
        if self._are_hidden:
            return
        for trained in list(self._shown):
            # Written back even if apparently unchanged: writes through `.data` bump no version.
            self._write(trained, trained.owned)
        for trained in self._moved.values():
            leaf = trained.leaf
            nothing = torch.full((), math.nan, dtype=trained.owned.dtype, device=leaf.device)
            trained.owned.data = nothing.expand(leaf.shape)
        self._are_hidden = True

    def show(self) -> None:
        """Make the optimizer's tensors show the masters, or their stand-ins."""
        for trained in self._moved.values():
            if trained not in self._shown:
                trained.owned.data = self._at_rest(trained)
        self._are_hidden = False

    def show_numbers(self) -> None:
        """Load the masters that are on the disk into host memory, for reading."""
        for trained in self._not_shown():
            trained.owned.data = self._read(trained)
            self._shown.add(trained)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of host memory that `show_numbers` takes."""
        return sum(t.leaf.numel() * t.owned.element_size() for t in self._not_shown())

    def numbers(self, owned: Tensor) -> Tensor:
        """The master for this tensor of the optimizer, whatever the tensor shows now."""
        trained = self._moved.get(owned)
        if trained is None or trained in self._shown:
            return owned
        master = self.in_memory.get(trained)
        return master if master is not None else self._read(trained)

    def write(self, owned: Tensor, numbers: Tensor) -> None:
        """Overwrite a master, synchronously."""
        trained = self._moved.get(owned)
        if trained is None:
            owned.copy_(numbers)
        elif (master := self.in_memory.get(trained)) is not None:
            master.copy_(numbers)
        else:
            self._write(trained, numbers.to(owned.dtype))
            if not self._are_hidden:
                owned.data = self._at_rest(trained)

    def _at_rest(self, trained: Trained) -> Tensor:
        if (master := self.in_memory.get(trained)) is not None:
            return master
        assert self._disk is not None
        return self._disk.stand_in(trained, MASTER)

    def _not_shown(self) -> list[Trained]:
        return [t for t in self._moved.values() if t not in self.in_memory and t not in self._shown]

    def _read(self, trained: Trained, device: torch.device | None = None) -> Tensor:
        assert self._disk is not None
        return self._disk.read(trained, device or torch.device("cpu"), [MASTER])[MASTER]

    def _write(self, trained: Trained, numbers: Tensor) -> None:
        assert self._disk is not None
        self._disk.write(trained, {MASTER: numbers})
        self._shown.discard(trained)
