"""Which link there is from a device to the host."""

from __future__ import annotations

import torch

from oomph.host.cuda_link import CudaLink
from oomph.host.link import InstantLink, Link


def open_link(device_type: str) -> Link:
    """The link of the current GPU; or, on the CPU, one that copies at once."""
    if device_type == "cuda":
        return CudaLink(torch.device("cuda", torch.cuda.current_device()))
    return InstantLink()
