"""The chunked loss on a GPU: its kernel against PyTorch's, its memory, its silence."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from oomph.techniques.chunked_loss import chunk_loss, chunked_calls
from oomph.techniques.softmax_grad import add_product, cross_entropy_chunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: Of a gradient rounded once to the dtype.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
GIB = 1 << 30


def error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


def reference(
    logits: Tensor, target: Tensor, ignore_index: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of their sum, in fp64."""
    exact = logits.to(torch.float64, copy=True).requires_grad_()
    losses = F.cross_entropy(exact * scale, target, ignore_index=ignore_index, reduction="none")
    losses.sum().backward()
    assert exact.grad is not None
    return losses.detach(), exact.grad / scale


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 4097, 50257, 128256])
@pytest.mark.parametrize("padding", [0, 47, 5000])
@pytest.mark.parametrize("rows", [1, 33])
def test_the_kernel_computes_pytorchs_loss_and_gradient(
    dtype: torch.dtype, vocabulary: int, padding: int, rows: int
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocabulary, device="cuda") * 4).to(dtype)
    target = torch.randint(0, vocabulary, (rows,), device="cuda")
    target[-1] = vocabulary - 1
    if rows > 1:
        target[::5] = -100
    for scale, factor in ((1.0, 1.0), (0.25, 256.0)):
        losses, gradient = reference(logits, target, -100, scale)
        padded = F.pad(logits, (0, padding), value=torch.nan)
        untouched = padded.clone()
        found_losses = cross_entropy_chunk(padded, target, vocabulary, -100, scale, factor, True)
        torch.testing.assert_close(found_losses.double(), losses, rtol=1e-5, atol=1e-5)
        found = padded[:, :vocabulary]
        assert error(found / factor, gradient) <= ROUNDING[dtype]
        assert not found[target == -100].any()
        assert not padded[:, vocabulary:].any()
        only_losses = cross_entropy_chunk(untouched, target, vocabulary, -100, scale, factor, False)
        assert torch.equal(only_losses, found_losses)


def test_logits_masked_by_the_block_make_no_nan() -> None:
    logits = torch.randn(4, 10000, device="cuda")
    logits[:, :9000] = -torch.inf
    target = torch.tensor([9999, 9000, -100, 9500], device="cuda")
    losses, gradient = reference(logits, target, -100, 1.0)
    found_losses = cross_entropy_chunk(logits, target, 10000, -100, 1.0, 1.0, True)
    torch.testing.assert_close(found_losses.double(), losses, rtol=1e-5, atol=1e-5)
    assert error(logits, gradient) <= 1e-5


def test_a_target_outside_the_vocabulary_makes_its_row_nan_and_no_other() -> None:
    padded = torch.randn(3, 128, device="cuda")
    target = torch.tensor([100, 7, -1], device="cuda")
    losses = cross_entropy_chunk(padded, target, 100, -100, 1.0, 1.0, True)
    assert losses.isnan().tolist() == [True, False, True]
    logits, padding = padded.split([100, 28], 1)
    assert logits.isnan().all(1).tolist() == [True, False, True]
    assert not logits[1].isnan().any()
    assert not padding.any()


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    rows, vocabulary = 16500, 131072
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB")
    assert rows * vocabulary > 2**31
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    logits[-1, 3] = 5
    target = torch.full((rows,), 3, device="cuda")
    _, gradient = reference(logits[-1:], target[-1:], -100, 1.0)
    losses = cross_entropy_chunk(logits, target, vocabulary, -100, 1.0, 1.0, True)
    assert losses[-1] < losses[0]
    assert error(logits[-1:], gradient) <= ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_summed_in_fp32_without_a_copy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left = torch.randn(256, 4096, device="cuda").to(dtype)
    right = torch.randn(256, 1024, device="cuda").to(dtype)
    total = torch.empty(4096, 1024, device="cuda")
    add_product(left.t(), right, total, False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        add_product(left.t(), right, total, True)
    assert torch.cuda.max_memory_allocated() == before
    assert error(total, 4 * (left.double().t() @ right.double())) <= 1e-5


# -- the whole loss --------------------------------------------------------------------------------

ROWS, WIDTH, VOCABULARY = 1000, 256, 32003


@pytest.fixture
def job() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY).cuda()
    hidden = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    target = torch.randint(0, VOCABULARY, (ROWS,), device="cuda")
    target[::7] = -100
    return head, hidden, target


def gradients(
    head: nn.Linear, hidden: Tensor, target: Tensor, autocast: torch.dtype | None, scale: float
) -> tuple[Tensor, list[Tensor]]:
    with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
        loss = F.cross_entropy(head(hidden).float(), target)
    inputs = [hidden, head.weight, *([head.bias] if head.bias is not None else [])]
    found = torch.autograd.grad(loss * scale, inputs)
    return loss.detach(), [gradient / scale for gradient in found]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [128, 5000])
def test_errors_are_no_worse_than_the_untouched_jobs(
    job: tuple[nn.Linear, Tensor, Tensor],
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    tokens: int,
) -> None:
    head, hidden, target = job
    head, hidden = head.to(dtype), hidden.detach().to(dtype).requires_grad_()
    exact_head, exact_hidden = copy.deepcopy(head).double(), hidden.detach().double()
    exact = F.cross_entropy(exact_head(exact_hidden.requires_grad_()), target)
    exact.backward()
    truth = [exact_hidden.grad, exact_head.weight.grad, exact_head.bias.grad]
    scale = 1024.0 if autocast is torch.float16 else 1.0
    loss, untouched = gradients(head, hidden, target, autocast, scale)
    chunk_loss(head, tokens)
    found_loss, found = gradients(head, hidden, target, autocast, scale)
    assert chunked_calls(head) == 1
    torch.testing.assert_close(found_loss, loss, rtol=1e-4, atol=1e-4)
    for mine, theirs, true in zip(found, untouched, truth, strict=True):
        assert true is not None
        assert mine.dtype is theirs.dtype
        assert error(mine, true) <= 2 * error(theirs, true) + 1e-6


def test_no_logits_are_ever_allocated(job: tuple[nn.Linear, Tensor, Tensor]) -> None:
    head, hidden, target = job

    def peak() -> int:
        for _ in range(2):  # workspaces are there the second time
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            gradients(head, hidden, target, torch.bfloat16, 1.0)
            most = torch.cuda.max_memory_allocated() - before
        return most

    untouched = peak()
    chunk_loss(head, 64)
    assert untouched - peak() > ROWS * VOCABULARY * (4 + 4), "log-softmax and its gradient"


def test_nothing_waits_for_the_gpu(job: tuple[nn.Linear, Tensor, Tensor]) -> None:
    head, hidden, target = job
    chunk_loss(head, 128)
    gradients(head, hidden, target, torch.bfloat16, 1.0)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(head, hidden, target, torch.bfloat16, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_product_over_an_odd_vocabulary_loads_its_numbers_one_by_one(
    job: tuple[nn.Linear, Tensor, Tensor], dtype: torch.dtype
) -> None:
    assert VOCABULARY % 8
    head, hidden, target = job
    head, hidden = head.to(dtype), hidden.detach().to(dtype).requires_grad_()
    chunk_loss(head, 512)
    autocast = torch.bfloat16 if dtype is torch.float32 else None
    gradients(head, hidden, target, autocast, 1.0)  # compiles the kernel
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        gradients(head, hidden, target, autocast, 1.0)
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages()]
    assert any("_row_kernel" in kernel for kernel in kernels)
    assert not [kernel for kernel in kernels if re.search(r"align1(?!\d)", kernel)]
