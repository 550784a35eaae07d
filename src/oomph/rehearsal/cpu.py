"""What the CPU's own kernels do that the fake ones do not, for rehearsals without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.errors import CannotRehearse
from oomph.rehearsal.kept_storage import grow, run_with_kept_storage
from oomph.rehearsal.rules import PlainKernels

aten = torch.ops.aten


class CpuKernels(PlainKernels):
    """The CPU takes scratch memory, too, but gives it back within the op: it is not counted."""

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Outputs that are larger than the fake ones; refuses where only oneDNN knows the size."""
        if func is aten.mkldnn_rnn_layer.default:
            raise CannotRehearse(
                "mkldnn_rnn_layer (an LSTM on the CPU) keeps a workspace whose size only oneDNN "
                "knows; rehearse a GPU, or run with torch.backends.mkldnn.flags(enabled=False)"
            )
        if func is aten._embedding_bag.default:
            out = func(*args, **kwargs)
            _, bag_of_index, *_ = out
            if bag_of_index.numel():
                # The kernel counts one bag more while it works.
                grow(bag_of_index, (bag_of_index.numel() + 1) * bag_of_index.element_size())
            return out
        return run_with_kept_storage(func, args, kwargs)
