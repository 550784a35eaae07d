"""Chooses the link between a device and the host."""

from __future__ import annotations

import torch

from oomph.memory.cuda_link import CudaLink
from oomph.memory.link import InstantLink, Link


def open_link(device: str | torch.device) -> Link:
    """A GPU's link (the current GPU by default), or, on the CPU, a link that copies at once."""
    place = torch.device(device)
    if place.type != "cuda":
        return InstantLink()
    index = place.index if place.index is not None else torch.cuda.current_device()
    return CudaLink(torch.device("cuda", index))
