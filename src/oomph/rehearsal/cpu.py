"""Differences between the CPU's own kernels and the fake ones, for rehearsals without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.rehearsal.cpu_recurrent import run_recurrent_backward, run_recurrent_layer
from oomph.rehearsal.kept_storage import grow, run_with_kept_storage
from oomph.rehearsal.products import grouped_product
from oomph.rehearsal.rules import PlainKernels

aten = torch.ops.aten


class CpuKernels(PlainKernels):
    """CPU kernels free their scratch memory within the op, so it is not counted."""

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns outputs for the ops whose real outputs are larger than the fake ones."""
        if func is aten.mkldnn_rnn_layer.default:
            return run_recurrent_layer(func, args, kwargs)
        if func is aten.mkldnn_rnn_layer_backward.default:
            return run_recurrent_backward(func, args, kwargs)
        if func is aten._grouped_mm.default:
            return grouped_product(*args, **kwargs)
        if func is aten._embedding_bag.default:
            out = func(*args, **kwargs)
            _, bag_of_index, *_ = out
            if bag_of_index.numel():
                # The kernel allocates room for one bag more while it works.
                grow(bag_of_index, (bag_of_index.numel() + 1) * bag_of_index.element_size())
            return out
        return run_with_kept_storage(func, args, kwargs)
