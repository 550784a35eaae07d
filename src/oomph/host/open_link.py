"""Which link there is from a device to the host."""

from __future__ import annotations

import torch

from oomph.host.cuda_link import CudaLink
from oomph.host.link import InstantLink, Link


def open_link(device: str | torch.device) -> Link:
    """The link of a GPU, the current one where none is named; or, on the CPU, one that copies."""
    place = torch.device(device)
    if place.type != "cuda":
        return InstantLink()
    index = place.index if place.index is not None else torch.cuda.current_device()
    return CudaLink(torch.device("cuda", index))
