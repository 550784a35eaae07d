"""State that PyTorch passes from a thread to the threads that it starts for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._C._is_key_in_tls",
        used_for="whether the thread that began this one kept something",
        without_it="backwards inside of backwards take no part in a rehearsal",
    ),
    PrivateName(
        "torch._C._get_obj_in_tls",
        used_for="what it kept: the rehearsal that it takes part in",
        without_it="backwards inside of backwards take no part in a rehearsal",
    ),
    PrivateName(
        "torch._C._stash_obj_in_tls",
        used_for="keeps it",
        without_it="backwards inside of backwards take no part in a rehearsal",
    ),
)

is_kept: Callable[[str], bool] = torch._C._is_key_in_tls
kept: Callable[[str], Any] = torch._C._get_obj_in_tls
keep: Callable[[str, Any], None] = torch._C._stash_obj_in_tls
