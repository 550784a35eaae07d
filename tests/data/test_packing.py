"""Packed rows: the numbers of the samples one by one, and no sample sees another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from oomph.data.packed_rows import (
    PackedDataset,
    block_diagonal_mask,
    check_packing,
    for_flash_attention,
    pack_row,
)
from oomph.data.packing import PackedBatches, best_fit
from oomph.data.samples import IGNORED
from oomph.errors import BadInput
from oomph.jobs.job import Job
from oomph.rehearsal.estimation import estimate
from oomph.runs.run import fit

LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=80)
SETTINGS = settings(max_examples=40, deadline=None)
ROW = 32


@given(LENGTHS, st.integers(1, 4), st.integers(1, 40), st.integers(0, 2))
@SETTINGS
def test_every_sample_comes_once_in_every_epoch_and_every_row_has_room(
    lengths: list[int], rows: int, window: int, epoch: int
) -> None:
    batches = PackedBatches(lengths, length=ROW, rows=rows, window=window)
    batches.set_epoch(epoch)
    seen = list(batches)
    packed = [row for batch in seen for row in batch]
    assert sorted(index for row in packed for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= ROW for row in packed)
    assert all(len(batch) <= batches.worst_shapes()[0][0] for batch in seen)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 4))
@SETTINGS
def test_ranks_share_the_rows_in_as_many_batches_each(
    lengths: list[int], rows: int, world: int
) -> None:
    if len(lengths) < world:
        return
    make = functools.partial(
        PackedBatches, lengths, length=ROW, rows=rows, world=world, uneven="drop"
    )
    each = [list(make(rank=rank)) for rank in range(world)]
    assert len({len(batches) for batches in each}) == 1
    together = [i for batches in each for batch in batches for row in batch for i in row]
    assert len(together) == len(set(together))
    # Only single samples that do not divide are left out, fewer than there are ranks.
    assert len(lengths) - len(together) < world


@given(LENGTHS, st.data())
@SETTINGS
def test_a_resumed_epoch_is_the_rest_of_it(lengths: list[int], data: st.DataObject) -> None:
    make = functools.partial(PackedBatches, lengths, length=ROW, rows=2, window=20)
    whole = list(make())
    stop = data.draw(st.integers(0, len(whole) - 1))
    state = {**make().state_dict(), "taken": stop}
    resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == whole[stop:]


@given(LENGTHS)
@SETTINGS
def test_no_two_rows_would_go_into_one(lengths: list[int]) -> None:
    totals = sorted(sum(lengths[at] for at in row) for row in best_fit(lengths, ROW))
    assert len(totals) < 2 or totals[0] + totals[1] > ROW


def test_packing_leaves_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(3000, generator=generator) * 7.0).exp().long().clamp(1) + 1
    waste = PackedBatches(lengths.numpy(), length=2048, rows=4).waste()
    assert waste.tokens == int(lengths.sum())
    assert waste.padding < 0.01


def test_samples_longer_than_a_row_are_named_cut_or_skipped() -> None:
    with pytest.raises(BadInput, match="sample 1 of 40 tokens"):
        PackedBatches([3, 40], length=ROW, rows=1)
    cut = PackedBatches([3, 40], length=ROW, rows=1, too_long="truncate").waste()
    assert (cut.samples, cut.truncated, cut.tokens_cut, cut.tokens) == (2, 1, 8, 35)
    skipped = PackedBatches([3, 40], length=ROW, rows=1, too_long="skip").waste()
    assert (skipped.samples, skipped.skipped, skipped.tokens) == (1, 1, 3)


def test_positions_begin_again_and_first_tokens_are_not_learned() -> None:
    row = pack_row([[5, 6, 7], {"input_ids": [8, 9], "labels": [8, IGNORED]}], length=7)
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert row["labels"].tolist() == [IGNORED, 6, 7, IGNORED, IGNORED, IGNORED, IGNORED]


def test_samples_that_are_not_as_long_as_was_said_are_refused() -> None:
    with pytest.raises(BadInput, match="samples of 5, 4 tokens do not go into a row of 8"):
        pack_row([[1] * 5, [2] * 4], length=8)


@pytest.mark.parametrize(
    "sample", [{"tokens": [1]}, [[1, 2]], {"input_ids": [1], "labels": [1, 2]}]
)
def test_what_is_no_sample_is_refused(sample: Any) -> None:
    with pytest.raises(BadInput, match="a sample"):
        pack_row([sample], length=8)


def make_llama(attention: str = "sdpa", **options: Any) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        **{"use_cache": False, **options},
    )
    config._attn_implementation = attention
    return hf.LlamaForCausalLM(config)


def make_dataset(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (length,), generator=generator) for length in lengths]


def packed_batches(lengths: list[int]) -> list[dict[str, Tensor]]:
    sampler = PackedBatches(lengths, length=ROW, rows=2)
    dataset = PackedDataset(make_dataset(lengths), length=ROW)
    return list(DataLoader(dataset, batch_sampler=sampler))


def sums_and_gradients(model: nn.Module, batches: list[Any]) -> tuple[float, list[Tensor]]:
    """The loss summed over all learned tokens, divided by their number, and its gradients."""
    model.zero_grad()
    total, learned = 0.0, 0
    for batch in batches:
        output = model(**{name: value for name, value in batch.items() if name != "labels"})
        targets = batch["labels"][:, 1:].flatten()
        loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        loss.backward()
        total += float(loss.detach())
        learned += int((targets != IGNORED).sum())
    gradients = [parameter.grad / learned for parameter in model.parameters()]
    return total / learned, gradients


# Eager attention takes its softmax in fp32, whatever the model is in.
@pytest.mark.parametrize(("attention", "error"), [("sdpa", 1e-12), ("eager", 1e-7)])
def test_packed_rows_have_the_loss_and_gradients_of_the_samples_one_by_one(
    attention: str, error: float
) -> None:
    lengths = [9, 30, 4, 1, 17, 12, 8, 2, 21, 32]
    model = make_llama(attention).double()
    alone = [
        {"input_ids": sample[None], "labels": sample[None]} for sample in make_dataset(lengths)
    ]
    packed = packed_batches(lengths)
    assert any(row.eq(0).sum() > 2 for batch in packed for row in batch["position_ids"])
    loss, gradients = sums_and_gradients(model, alone)
    loss_packed, gradients_packed = sums_and_gradients(model, packed)
    assert loss_packed == pytest.approx(loss, rel=error)
    for one, other in zip(gradients, gradients_packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e3 * error, atol=error)


def test_the_model_s_own_loss_is_that_of_the_samples_too() -> None:
    lengths = [9, 17, 6]
    model = make_llama().double()
    (batch,) = packed_batches(lengths)
    alone = [
        {"input_ids": sample[None], "labels": sample[None]} for sample in make_dataset(lengths)
    ]
    loss, _ = sums_and_gradients(model, alone)
    assert float(model(**batch).loss.detach()) == pytest.approx(loss, rel=1e-6)


def test_a_model_that_keeps_samples_apart_passes_the_check() -> None:
    model = make_llama().train()
    frozen = next(iter(model.children())).eval()
    check_packing(model, packed_batches([9, 17, 12, 20])[0])
    assert model.training and not frozen.training


def test_a_model_whose_cache_hides_the_boundaries_is_refused() -> None:
    model = make_llama(use_cache=True)
    with pytest.raises(BadInput, match="use_cache = False"):
        check_packing(model, packed_batches([9, 17, 12, 20])[0])


class Plain(nn.Module):
    """Attention by hand; with the mask or without."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)[:, None]
        mask = block_diagonal_mask(position_ids) if self.masked else None
        mixed = F.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)
        logits: Tensor = self.head(mixed[:, 0])
        return logits


def test_a_plain_model_keeps_samples_apart_by_the_mask() -> None:
    batch = packed_batches([9, 17, 12, 20])[0]
    check_packing(Plain(masked=True), batch)
    with pytest.raises(BadInput, match=r"oomph\.block_diagonal_mask"):
        check_packing(Plain(masked=False), batch)


def test_a_check_needs_two_samples_in_a_row() -> None:
    with pytest.raises(BadInput, match="at least two samples"):
        check_packing(make_llama(), packed_batches([32])[0])


def test_the_mask_is_block_diagonal() -> None:
    mask = block_diagonal_mask(torch.tensor([[0, 1, 0, 1, 2]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    both_ways = block_diagonal_mask(torch.tensor([[0, 1, 0]]), causal=False)
    assert both_ways[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_flash_attention_gets_one_row_and_the_bounds_of_its_samples() -> None:
    rows = [pack_row([[1, 2, 3], [4, 5]], length=6), pack_row([[6] * 6], length=6)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    flat = for_flash_attention(batch)
    assert flat["input_ids"].shape == flat["labels"].shape == (1, 12)
    assert flat["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 12]
    assert flat["cu_seq_lens_k"].dtype == torch.int32
    assert flat["max_length_q"] == flat["max_length_k"] == 6


def test_a_plan_that_splits_packed_rows_learns_the_same() -> None:
    parts = packed_batches([9, 30, 4, 1, 17, 12, 8, 2, 21, 32, 5, 6, 7, 30, 31, 29, 28])
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    plain, planned = make_llama(), make_llama()
    needs = estimate(Job(make_llama, None, "sgd", batch), budget="1GiB", phases=("step",)).peak
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    with fit(planned, optimizer, None, batch, budget=int(0.55 * needs.device)) as run:
        assert run.plan.choices.micro_batch is not None
        loss = float(run.step(batch))
    loss_alone, gradients = sums_and_gradients(plain, [batch])
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    for new, old, gradient in zip(planned.parameters(), plain.parameters(), gradients, strict=True):
        torch.testing.assert_close(new, old - 0.1 * gradient, rtol=1e-4, atol=1e-6)
