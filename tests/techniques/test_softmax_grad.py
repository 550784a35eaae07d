"""A vocabulary padded for the GPU's sake: the same numbers, in shapes that its kernels like."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from oomph import find_gpu
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.timeline import Block
from oomph.rehearsal.world import pretend
from oomph.techniques import softmax_grad
from oomph.techniques.chunked_loss import chunk_loss, chunked_calls
from oomph.techniques.softmax_grad import (
    LossOptions,
    chunked_cross_entropy,
    cross_entropy_chunk,
    padded_vocabulary,
)

ROWS, WIDTH, VOCABULARY, PADDED = 21, 16, 37, 64
#: Of numbers rounded once to the dtype.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
CUDA = torch.device("cuda", 0)


def error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every vocabulary is padded, as half-precision products on a GPU have it; can be undone."""
    monkeypatch.setattr(
        softmax_grad, "padded_vocabulary", lambda vocabulary, *_: vocabulary + -vocabulary % 64
    )
    return monkeypatch


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "columns"), [(50257, 50304), (50265, 50304), (4100, 4160)])
def test_an_odd_vocabulary_is_padded_for_half_precision_products_of_a_gpu(
    dtype: torch.dtype, vocabulary: int, columns: int
) -> None:
    assert padded_vocabulary(vocabulary, dtype, CUDA) == columns


@pytest.mark.parametrize("vocabulary", [8, 4104, 50304, 128256])
def test_multiples_of_eight_are_left_alone(vocabulary: int) -> None:
    assert padded_vocabulary(vocabulary, torch.bfloat16, CUDA) == vocabulary


def test_where_it_would_not_help_nothing_is_padded() -> None:
    assert padded_vocabulary(50257, torch.float32, CUDA) == 50257
    assert padded_vocabulary(50257, torch.bfloat16, torch.device("cpu")) == 50257


# -- the same numbers ------------------------------------------------------------------------------


class Inputs:
    """Rows, a head's weight and bias, and targets of which some do not count."""

    def __init__(self, dtype: torch.dtype, *, bias: bool = True, frozen: str = "") -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(name: str, *shape: int) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
            return drawn.requires_grad_(name not in frozen.split())

        self.rows = draw("rows", ROWS, WIDTH)
        self.weight = draw("weight", VOCABULARY, WIDTH)
        self.bias = draw("bias", VOCABULARY) if bias else None
        self.target = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
        self.target[[0, 1, 2, 13]] = -100
        self.target[-1] = VOCABULARY - 1

    def loss(self, **options: Any) -> Tensor:
        asked = {"compute_dtype": self.rows.dtype, "tokens": 4, "ignore_index": -100, "mean": True}
        return chunked_cross_entropy(
            self.rows, self.weight, self.bias, self.target, LossOptions(**asked | options)
        )

    def gradients(self, **options: Any) -> tuple[Tensor, list[Tensor]]:
        tensors = [self.rows, self.weight, *([self.bias] if self.bias is not None else [])]
        loss = self.loss(**options)
        return loss.detach(), list(
            torch.autograd.grad(loss, [t for t in tensors if t.requires_grad])
        )


def check_same(inputs: Inputs, padding: pytest.MonkeyPatch, **options: Any) -> None:
    """Padded or not: the same loss, the same gradients of the same shapes."""
    most = ROUNDING[options.get("compute_dtype", inputs.rows.dtype)]
    padded_loss, padded = inputs.gradients(**options)
    padding.undo()
    loss, expected = inputs.gradients(**options)
    assert error(padded_loss, loss) <= most
    assert len(padded) == len(expected)
    for found, gradient in zip(padded, expected, strict=True):
        assert (found.shape, found.dtype) == (gradient.shape, gradient.dtype)
        assert found.is_contiguous()
        assert error(found, gradient) <= most


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("tokens", [4, 1000])
def test_loss_and_gradients_are_those_of_the_vocabulary_as_it_is(
    padding: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, scale: float, tokens: int
) -> None:
    check_same(Inputs(dtype, bias=bias), padding, scale=scale, tokens=tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_are_those_of_fp32_weights_cast_for_the_products(
    padding: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    check_same(Inputs(torch.float32), padding, compute_dtype=dtype, mean=False)


@pytest.mark.parametrize("frozen", ["weight bias", "weight", "bias", "rows"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(
    padding: pytest.MonkeyPatch, frozen: str
) -> None:
    check_same(Inputs(torch.float64, frozen=frozen), padding)


def test_a_loss_nobody_wants_gradients_of_is_the_same(padding: pytest.MonkeyPatch) -> None:
    inputs = Inputs(torch.float64)
    with torch.no_grad():
        padded = inputs.loss()
        padding.undo()
        assert error(padded, inputs.loss()) <= 1e-12


def test_a_kept_graph_can_be_used_again(padding: pytest.MonkeyPatch) -> None:
    inputs = Inputs(torch.float64)
    loss = inputs.loss()
    tensors = [inputs.rows, inputs.weight, inputs.bias]
    first = torch.autograd.grad(loss, tensors, retain_graph=True)  # type: ignore[arg-type]
    second = torch.autograd.grad(2 * loss, tensors)  # type: ignore[arg-type]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, other, rtol=1e-12, atol=0)


def test_a_tied_weights_two_gradients_are_added_in_the_memory_of_the_first(
    padding: pytest.MonkeyPatch,
) -> None:
    inputs = Inputs(torch.float32)
    tokens = torch.arange(ROWS) % 5

    def gradient() -> Tensor:
        inputs.weight.grad = None
        inputs.rows = F.embedding(tokens, inputs.weight).tanh()
        inputs.loss(compute_dtype=torch.bfloat16).backward()
        assert inputs.weight.grad is not None
        return inputs.weight.grad

    padded = gradient()
    assert padded.untyped_storage().nbytes() == PADDED * WIDTH * 4
    padding.undo()
    assert error(padded, gradient()) <= ROUNDING[torch.bfloat16]


def test_an_ignored_row_that_is_nan_gets_no_gradient_as_ever(padding: pytest.MonkeyPatch) -> None:
    inputs = Inputs(torch.float32, frozen="weight bias")
    with torch.no_grad():
        inputs.rows[1] = torch.nan
    loss, (gradient,) = inputs.gradients()
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_no_memory_is_read_before_it_is_written(padding: pytest.MonkeyPatch) -> None:
    inputs = Inputs(torch.float32)
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    try:
        assert inputs.rows.new_empty(3).isnan().all()
        _, gradients = inputs.gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_target_in_the_padding_is_an_error(padding: pytest.MonkeyPatch) -> None:
    inputs = Inputs(torch.float32)
    inputs.target[5] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        inputs.loss()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("found_there", [0.0, 1e4, torch.inf, torch.nan])
def test_what_is_in_the_padding_has_no_part_in_the_softmax_and_becomes_zero(
    dtype: torch.dtype, found_there: float
) -> None:
    inputs = Inputs(dtype)
    alone = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    padded = F.pad(alone, (0, PADDED - VOCABULARY), value=found_there)
    arguments = (inputs.target, VOCABULARY, -100, 0.5, 2.0, True)
    losses = cross_entropy_chunk(padded, *arguments)
    assert torch.equal(losses, cross_entropy_chunk(alone, *arguments))
    assert torch.equal(padded, F.pad(alone, (0, PADDED - VOCABULARY)))


def test_products_are_counted_as_they_are_made(padding: pytest.MonkeyPatch) -> None:
    with FlopCounterMode(display=False) as counter:
        Inputs(torch.float32).gradients()
    assert counter.get_total_flops() == 3 * 2 * ROWS * WIDTH * PADDED


# -- rehearsed -------------------------------------------------------------------------------------

GPT2, GPT2_PADDED, GPT2_WIDTH = 50257, 50304, 768
BATCH, CHUNK = 2048, 512


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    with pretend(find_gpu("h200")) as recorder:
        yield recorder


class Rehearsed:
    """A head like GPT-2's and its loss in chunks, on a GPU that is not there."""

    def __init__(
        self, recorder: Recorder, dtype: torch.dtype, *, vocabulary: int = GPT2, tied: bool = False
    ) -> None:
        self.recorder = recorder
        self.embedding = nn.Embedding(vocabulary, GPT2_WIDTH).to("cuda", dtype)
        self.head = nn.Linear(GPT2_WIDTH, vocabulary, bias=False).to("cuda", dtype)
        if tied:
            self.head.weight = self.embedding.weight
        chunk_loss(self.head, CHUNK)
        self.step()  # cuBLAS has its workspaces from now on

    def step(self) -> tuple[int, list[Block]]:
        """The loss's peak above what was there, and all that was allocated, backward included."""
        for layer in (self.embedding, self.head):
            layer.zero_grad()
        recorder = self.recorder
        tokens = torch.zeros(BATCH, dtype=torch.long, device="cuda")
        before, first = recorder.allocated, len(recorder.timeline.blocks)
        recorder.reset_peak()
        calls = chunked_calls(self.head)
        casts = self.head.weight.dtype is torch.float32
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=casts):
            loss = F.cross_entropy(self.head(self.embedding(tokens)), tokens)
        peak = recorder.peak_allocated - before
        loss.backward()
        assert chunked_calls(self.head) == calls + 1
        assert self.head.weight.grad is not None
        assert self.head.weight.grad.shape == self.head.weight.shape
        return peak, recorder.timeline.blocks[first:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rehearsal_counts_the_padded_copy_and_the_wider_logits(
    gpu: Recorder, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    job = Rehearsed(gpu, dtype)
    padded, blocks = job.step()
    copies = [block for block in blocks if block.size == GPT2_PADDED * GPT2_WIDTH * 2]
    chunks = [block for block in blocks if block.size == CHUNK * GPT2_PADDED * 2]
    assert (len(copies), len(chunks)) == (1, BATCH // CHUNK)
    (copied,) = copies
    for chunk in chunks:
        assert copied.death is not None
        assert chunk.death is not None
        assert copied.birth < chunk.birth < chunk.death < copied.death
    monkeypatch.setattr(softmax_grad, "padded_vocabulary", lambda vocabulary, *_: vocabulary)
    plain, _ = job.step()
    more = (GPT2_PADDED - GPT2) * (GPT2_WIDTH * 4 + CHUNK * 2)
    copy = GPT2_PADDED * GPT2_WIDTH * 2
    was_cast_anyway = GPT2 * GPT2_WIDTH * 2 if dtype is torch.float32 else 0
    assert padded - plain == more + copy - was_cast_anyway


def test_a_tied_weight_has_no_third_gradient(gpu: Recorder) -> None:
    _, blocks = Rehearsed(gpu, torch.float32, tied=True).step()
    sizes = [block.size for block in blocks]
    assert sizes.count(GPT2_PADDED * GPT2_WIDTH * 4) == 1, "the head's"
    assert sizes.count(GPT2 * GPT2_WIDTH * 4) == 1, "the embedding's"


def test_a_multiple_of_eight_is_neither_copied_nor_padded(gpu: Recorder) -> None:
    vocabulary = 50264
    _, blocks = Rehearsed(gpu, torch.bfloat16, vocabulary=vocabulary).step()
    chunks = [block for block in blocks if block.size == CHUNK * vocabulary * 2]
    assert len(chunks) == BATCH // CHUNK
    for earlier, later in itertools.pairwise(chunks):
        between = [block for block in blocks if earlier.birth <= block.birth < later.birth]
        assert all(block.size <= earlier.size for block in between)
    made_before = [block for block in blocks if block.birth < chunks[0].birth]
    assert vocabulary * GPT2_WIDTH * 2 not in [block.size for block in made_before]
