"""What a card would like to be different about a model: advice only, nothing is changed."""

from __future__ import annotations

from torch import nn

from oomph.gpus import GPU

#: Tensor Cores multiply half-precision matrices at full speed where rows are multiples of 16 bytes.
FRIENDLY = 8
#: The first NVIDIA cards with Tensor Cores.
TENSOR_CORES = (7, 0)


def size_notes(model: nn.Module, precision: str, gpu: GPU | None) -> list[str]:
    """Linear layers whose sizes Tensor Cores do not like, the largest first, in words."""
    if gpu is None or gpu.compute_capability is None or gpu.compute_capability < TENSOR_CORES:
        return []
    if precision not in ("bf16", "bf16-mixed", "fp16-mixed"):
        return []
    odd = sorted(
        (
            (module.in_features * module.out_features, path, size)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
            for size in (module.in_features, module.out_features)
            if size % FRIENDLY
        ),
        reverse=True,
    )
    if not odd:
        return []
    _, path, size = odd[0]
    padded = -(-size // FRIENDLY) * FRIENDLY
    others = f"; {len(odd) - 1} more sizes are like that" if len(odd) > 1 else ""
    return [
        f"{path} has a size of {size:,}: Tensor Cores are faster with multiples of {FRIENDLY}, such"
        f" as {padded:,}{others}"
    ]
