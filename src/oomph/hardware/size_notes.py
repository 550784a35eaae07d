"""Notes on sizes in a model that are slow on a GPU: advice only, nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from oomph.hardware import GPU

#: Tensor Cores multiply half-precision matrices at full speed if rows are multiples of 16 bytes.
FRIENDLY = 8
#: The first NVIDIA cards with Tensor Cores.
TENSOR_CORES = (7, 0)


class OddSize(NamedTuple):
    """A dimension of a linear layer that is slow on Tensor Cores."""

    parameters: int
    path: str
    size: int
    of_results: bool
    """Whether it is the size of the layer's results rather than of its input."""


def odd_sizes(model: nn.Module, precision: str, gpu: GPU | None) -> list[OddSize]:
    """Odd sizes of a model's linear layers, the largest layer first."""
    if gpu is None or gpu.compute_capability is None or gpu.compute_capability < TENSOR_CORES:
        return []
    if precision not in ("bf16", "bf16-mixed", "fp16-mixed"):
        return []
    return sorted(
        (
            OddSize(module.in_features * module.out_features, path, size, of_results)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
            for size, of_results in ((module.in_features, False), (module.out_features, True))
            if size % FRIENDLY
        ),
        reverse=True,
    )


def size_notes(sizes: Iterable[OddSize], padded_head: str | None = None) -> list[str]:
    """The notes as text, without a head whose loss is chunked, which pads the logits itself."""
    odd = [one for one in sizes if one.path != padded_head or not one.of_results]
    if not odd:
        return []
    largest = odd[0]
    friendly = -(-largest.size // FRIENDLY) * FRIENDLY
    others = f"; {len(odd) - 1} more sizes are like that" if len(odd) > 1 else ""
    return [
        f"{largest.path} has a size of {largest.size:,}: Tensor Cores are faster with multiples of"
        f" {FRIENDLY}, such as {friendly:,}{others}"
    ]
