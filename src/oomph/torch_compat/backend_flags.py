"""Set flags of `torch.backends` even if PyTorch has frozen them.

Importing PyTorch's own test helpers, as users' test suites do, freezes the flags for the whole
process.
"""

from __future__ import annotations

import torch

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.backends.__allow_nonbracketed_mutation",
        used_for="sets flags such as `allow_tf32` where they are frozen",
        without_it="plans with tf32, and rehearsed scripts, fail beside PyTorch's test helpers",
    ),
)


def set_backend_flag(module: object, name: str, value: object) -> None:
    """Set a flag such as `torch.backends.cudnn.allow_tf32`; the caller restores it."""
    with torch.backends.__allow_nonbracketed_mutation():
        setattr(module, name, value)
