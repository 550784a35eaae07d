"""Which attention kernel a GPU runs, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oomph.hardware import find_gpu
from oomph.rehearsal.cuda.attention import Attention, Kernel, choose_kernel
from oomph.rehearsal.world import pretend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCH, HEADS, LENGTH, WIDTH = 2, 8, 256, 64


def tensor(dtype: torch.dtype, heads: int = HEADS, width: int = WIDTH, **more: Any) -> Tensor:
    return torch.empty(BATCH, heads, LENGTH, width, dtype=dtype, device="meta", **more)


def choice(gpu: str, query: Tensor, key: Tensor | None = None, **changes: Any) -> str:
    key = query if key is None else key
    call = Attention(query=query, key=key, value=key, **{"causal": True, **changes})
    return str(choose_kernel(find_gpu(gpu), call))


@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"),
    [
        ("h200", BF16, "cudnn"),
        ("h100-sxm", BF16, "cudnn"),
        ("b200", FP16, "cudnn"),
        ("a100-80gb", BF16, "flash"),
        ("rtx-4090", BF16, "flash"),
        ("l4", FP16, "flash"),
        ("v100-32gb", FP16, "efficient"),
        ("t4", FP16, "efficient"),
        ("v100-32gb", BF16, "math"),
        ("h200", FP32, "efficient"),
        ("a100-80gb", FP32, "efficient"),
    ],
)
def test_each_architecture_has_its_favourite(gpu: str, dtype: torch.dtype, kernel: str) -> None:
    assert choice(gpu, tensor(dtype)) == kernel


def test_a_mask_rules_flash_out_and_a_trained_mask_cudnn() -> None:
    mask = torch.zeros(BATCH, HEADS, LENGTH, LENGTH, dtype=BF16, device="meta")
    trained = mask.clone().requires_grad_()
    query = tensor(BF16)
    assert choice("a100-80gb", query, mask=mask, causal=False) == "efficient"
    assert choice("h200", query, mask=mask, causal=False) == "cudnn"
    assert choice("h200", query, mask=trained, causal=False) == "efficient"


def test_shared_heads_in_fp32_are_left_to_plain_maths() -> None:
    query, key = tensor(FP32), tensor(FP32, heads=2)
    assert choice("h200", query, key, grouped=True) == "math"
    assert choice("h200", tensor(BF16), tensor(BF16, heads=2), grouped=True) == "cudnn"
    assert choice("a100-80gb", tensor(BF16), tensor(BF16, heads=2), grouped=True) == "flash"


def test_wide_heads_go_past_cudnn_to_flash_and_past_flash_to_efficient() -> None:
    assert choice("h200", tensor(BF16, width=128)) == "cudnn"
    assert choice("h200", tensor(BF16, width=256)) == "flash"
    assert choice("h200", tensor(BF16, width=320)) == "efficient"


@pytest.mark.parametrize(
    ("width", "dropout", "kernel"),
    [
        (192, 0.1, "flash"),
        (200, 0.0, "efficient"),
        (224, 0.0, "efficient"),
        (232, 0.0, "flash"),
        (256, 0.0, "flash"),
        (232, 0.1, "efficient"),
        (256, 0.1, "efficient"),
    ],
)
def test_consumer_cards_have_no_flash_backward_for_some_wide_heads(
    width: int, dropout: float, kernel: str
) -> None:
    trained = tensor(BF16, width=width, requires_grad=True)
    for gpu in ("rtx-3060", "rtx-4090", "rtx-5090"):
        assert choice(gpu, trained, dropout=dropout) == kernel
        assert choice(gpu, trained.detach(), dropout=dropout) == "flash"
    assert choice("a100-80gb", trained, dropout=dropout) == "flash"


def test_a_kernel_that_is_switched_off_is_not_chosen() -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert choice("h200", tensor(BF16)) == "flash"
    with sdpa_kernel(SDPBackend.MATH):
        assert choice("h200", tensor(BF16)) == "math"


def kept_after_forward(gpu: str, dtype: torch.dtype, **options: Any) -> int:
    """Bytes that attention leaves behind beside query, key and value."""
    with pretend(find_gpu(gpu)) as recorder:
        q, k, v = (
            torch.empty(BATCH, HEADS, LENGTH, WIDTH, dtype=dtype, device="cuda", requires_grad=True)
            for _ in range(3)
        )
        before = recorder.allocated
        out = scaled_dot_product_attention(q, k, v, **options)
        kept = recorder.allocated - before
        out.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
    return kept


@pytest.mark.parametrize("gpu", ["h200", "a100-80gb", "v100-32gb"])
def test_fused_kernels_keep_the_output_and_one_number_per_row(gpu: str) -> None:
    output = BATCH * HEADS * LENGTH * WIDTH * 2
    row_sums = BATCH * HEADS * LENGTH * 4
    kept = kept_after_forward(gpu, FP16, is_causal=True)
    assert output + row_sums <= kept <= output + row_sums + 1024


def test_plain_maths_keeps_the_scores() -> None:
    scores = BATCH * HEADS * LENGTH * LENGTH * 2
    with sdpa_kernel(SDPBackend.MATH):
        assert kept_after_forward("h200", BF16) >= scores
    assert kept_after_forward("h200", BF16) < scores


def test_every_kernel_has_a_name_of_its_own() -> None:
    assert {*Kernel} == {"cudnn", "flash", "efficient", "math"}
