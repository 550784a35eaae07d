"""The three ledgers in which memory is counted."""

from __future__ import annotations

from dataclasses import dataclass

from oomph.files.schema import Count

LEDGERS = ("allocated", "reserved", "device")


@dataclass(frozen=True, kw_only=True)
class Ledgers:
    """One amount of memory, counted in the three ways that are never mixed."""

    allocated: Count
    """What PyTorch handed out, as `torch.cuda.memory_allocated` counts it."""
    reserved: Count
    """What its allocator took from the driver."""
    device: Count
    """What `nvidia-smi` shows: reserved, the CUDA context and loaded kernels."""

    def as_dict(self) -> dict[str, int]:
        """Plain numbers by ledger."""
        return {name: getattr(self, name) for name in LEDGERS}
