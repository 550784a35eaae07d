"""Round fp32 to bf16 up or down at random, so that the mean is right (lossy).

bf16 has 8 bits of precision. With rounding to nearest, an update smaller than half the spacing of
a weight is always lost; with random rounding, it takes effect with a probability proportional to
its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The low bits of an fp32 number that bf16 lacks.
_LOST_BITS = 16


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 `values` to bf16: each to one of its two neighbours, the nearer the likelier."""
    bits = torch.randint(
        0,
        1 << _LOST_BITS,
        values.shape,
        dtype=torch.int32,
        device=values.device,
        generator=generator,
    )
    # A float stores sign and magnitude separately, so this raises the magnitude of either sign.
    bits.add_(values.view(torch.int32)).bitwise_and_(-1 << _LOST_BITS)
    # Adding to the bits of a NaN could overflow into another number.
    return bits.view(torch.float32).to(torch.bfloat16).masked_fill_(values.isnan(), torch.nan)
