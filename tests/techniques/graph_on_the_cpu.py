"""What a CUDA graph does, on the CPU: ops are noted once and run again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomph.techniques.cuda_graph import Replay
from oomph.techniques.host_reads import HostReads


class CpuCapture(TorchDispatchMode):
    """Captures by running: what `lasting` tensors held before is put back, as nothing had run."""

    def __init__(self, fixed_part: Callable[[], Sequence[Tensor]]) -> None:
        super().__init__()
        self.captures = 0
        self.replays = 0
        self._lasting = fixed_part
        self._ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self._ops.append((func, args, kwargs or {}, out))
        return out

    def __call__(
        self, work: Callable[[], Tensor], look: Callable[[], None], varying: Sequence[Tensor]
    ) -> tuple[Tensor, Replay]:
        reads = HostReads.of(look, varying)
        self._ops = []
        before = [tensor.clone() for tensor in self._lasting()]
        with self, reads.told():
            result = work()
        for tensor, old in zip(self._lasting(), before, strict=True):
            tensor.detach().copy_(old)
        self.captures += 1
        return result, self._replay

    @torch.no_grad()
    def _replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self._ops:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old is not new and old.numel():
                    old.detach().copy_(new)
