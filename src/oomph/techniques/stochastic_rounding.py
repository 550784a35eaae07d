"""Round fp32 to bf16 up or down at random, so that the mean is right (lossy).

bf16 has 8 bits of precision. Rounded to the nearest, an update smaller than half a step of a weight
is lost every time; rounded at random, it takes effect as often as its size says.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The bits of an fp32 number that bf16 does not have.
_LOST_BITS = 16


def round_stochastically(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 `values` in bf16: each goes to one of its two neighbours, the nearer the likelier."""
    bits = torch.randint(
        0,
        1 << _LOST_BITS,
        values.shape,
        dtype=torch.int32,
        device=values.device,
        generator=generator,
    )
    # Sign and magnitude are apart in a float, so this raises the magnitude of either sign.
    bits.add_(values.view(torch.int32)).bitwise_and_(-1 << _LOST_BITS)
    # The bits of a NaN could run over into another number.
    return bits.view(torch.float32).to(torch.bfloat16).masked_fill_(values.isnan(), torch.nan)
