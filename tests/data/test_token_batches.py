"""Batches by tokens: every sample once, none too large, the same again after a resume."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from oomph.data.padding import pad_samples
from oomph.data.samples import IGNORED
from oomph.data.token_batches import TokenBatches
from oomph.errors import BadInput, WrongCheckpoint

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)
SETTINGS = settings(max_examples=40, deadline=None)


@given(LENGTHS, st.integers(60, 300), st.integers(1, 8), st.integers(1, 30), st.integers(0, 3))
@SETTINGS
def test_every_sample_comes_once_in_every_epoch_and_no_batch_is_too_large(
    lengths: list[int], tokens: int, multiple: int, window: int, epoch: int
) -> None:
    tokens += -tokens % multiple
    batches = TokenBatches(lengths, tokens=tokens, multiple=multiple, window=window)
    batches.set_epoch(epoch)
    seen = list(batches)
    assert sorted(index for batch in seen for index in batch) == list(range(len(lengths)))
    worst, (most, longest_of_all) = batches.worst_shapes(), batches.planned_shape()
    for batch in seen:
        longest = max(lengths[index] for index in batch)
        padded = -(-longest // multiple) * multiple
        assert len(batch) * padded <= tokens
        assert padded <= longest_of_all
        assert len(batch) * padded <= most * longest_of_all
        assert any(
            padded <= length and len(batch) * padded <= rows * length for rows, length in worst
        )


@given(LENGTHS, st.integers(1, 5), st.integers(0, 2), st.data())
@SETTINGS
def test_ranks_share_the_samples_in_as_many_batches_each(
    lengths: list[int], world: int, epoch: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(2 * max(lengths), 400))
    if len(lengths) < 2 * world:
        return  # two to a batch always fit, so from there on any number divides
    ranks = [TokenBatches(lengths, tokens=tokens, rank=rank, world=world) for rank in range(world)]
    for rank in ranks:
        rank.set_epoch(epoch)
    each = [list(rank) for rank in ranks]
    assert len({len(batches) for batches in each}) == 1
    together = sorted(index for batches in each for batch in batches for index in batch)
    assert together == list(range(len(lengths)))


@given(LENGTHS, st.data())
@SETTINGS
def test_a_resumed_epoch_is_the_rest_of_it(lengths: list[int], data: st.DataObject) -> None:
    make = functools.partial(TokenBatches, lengths, tokens=64, window=16, seed=3)
    whole = make()
    two_epochs = [list(whole), list(whole)]
    flat = [batch for epoch in two_epochs for batch in epoch]
    stop = data.draw(st.integers(0, len(flat)))
    first = make()
    taken: list[list[int]] = []
    while len(taken) < stop:
        for batch in first:
            taken.append(batch)
            if len(taken) == stop:
                break
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    rest = list(second)
    if len(taken) + len(rest) < len(flat):
        rest += list(second)
    assert taken + rest == flat


def test_each_epoch_has_an_order_of_its_own_and_each_seed_too() -> None:
    lengths = list(range(1, 101))
    batches = TokenBatches(lengths, tokens=200)
    first, second = list(batches), list(batches)
    assert first != second
    assert first == list(TokenBatches(lengths, tokens=200))
    assert first != list(TokenBatches(lengths, tokens=200, seed=1))


def test_a_pass_that_was_broken_off_begins_again() -> None:
    batches = TokenBatches(list(range(1, 50)), tokens=60)
    for _ in batches:
        break
    assert list(batches) == list(TokenBatches(list(range(1, 50)), tokens=60))


def test_sorting_by_length_leaves_little_padding() -> None:
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(16), np.log(2048), 4000)).astype(int)
    waste = TokenBatches(lengths, tokens=16 * 2048).waste()
    assert waste.tokens == lengths.sum()
    assert waste.samples == 4000
    assert waste.padding < 0.05
    # Sixteen at random, each batch padded to its longest:
    shuffled = random.permutation(lengths)
    fixed = sum(16 * shuffled[at : at + 16].max() for at in range(0, 4000, 16))
    assert 1 - lengths.sum() / fixed > 0.6


def test_batches_of_one_step_are_alike_on_all_ranks() -> None:
    lengths = list(range(1, 401))
    ranks = [list(TokenBatches(lengths, tokens=800, rank=rank, world=4)) for rank in range(4)]
    spreads = []
    for step in zip(*ranks, strict=True):
        longest = [max(lengths[index] for index in batch) for batch in step]
        spreads.append(max(longest) - min(longest))
    assert np.mean(spreads) < 40


def test_one_shape_is_worst_where_the_longest_fills_the_budget() -> None:
    assert TokenBatches([8, 16, 3, 5, 7], tokens=32).worst_shapes() == ((2, 16),)


def test_a_shorter_batch_may_hold_more_tokens_than_the_longest() -> None:
    batches = TokenBatches([20, 10, 10, 10, 10], tokens=35)
    assert batches.worst_shapes() == ((1, 20), (3, 10))
    assert batches.planned_shape() == (2, 20)


def test_a_batch_has_no_more_samples_than_asked() -> None:
    batches = list(TokenBatches([1] * 50, tokens=100, samples=8))
    assert max(map(len, batches)) == 8


def test_a_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(BadInput, match=r"sample 2 of 99 tokens: at most 50 tokens fit"):
        TokenBatches([10, 20, 99], tokens=50)


def test_many_that_are_too_long_are_counted() -> None:
    with pytest.raises(BadInput, match="sample 2 of 7 tokens and 4 more"):
        TokenBatches([7] * 7, tokens=5)


def test_samples_that_are_too_long_are_skipped_where_that_is_chosen() -> None:
    batches = TokenBatches([10, 99, 20, 70], tokens=50, too_long="skip")
    assert sorted(index for batch in batches for index in batch) == [0, 2]
    assert batches.waste().skipped == 2
    assert "2 samples were too long and left out" in str(batches.waste())


def test_samples_that_are_too_long_are_cut_where_that_is_chosen() -> None:
    batches = TokenBatches([10, 99, 20], tokens=50, longest=40, too_long="truncate")
    assert batches.worst_shapes()[0] == (1, 40)
    waste = batches.waste()
    assert (waste.truncated, waste.tokens_cut, waste.tokens) == (1, 59, 70)
    batch = pad_samples([list(range(99)), [1, 2]], longest=batches.longest)
    assert batch["input_ids"].shape == (2, 40)


def test_batches_are_split_so_that_their_number_divides() -> None:
    ranks = [list(TokenBatches([10] * 9, tokens=30, rank=rank, world=2)) for rank in range(2)]
    assert [sorted(map(len, batches)) for batches in ranks] in ([[1, 3], [2, 3]], [[2, 3], [1, 3]])


def test_single_samples_that_do_not_divide_are_refused_or_dropped() -> None:
    with pytest.raises(BadInput, match='leave 1 out in each epoch with uneven="drop"'):
        list(TokenBatches([10] * 5, tokens=10, world=2))
    batches = TokenBatches([10] * 5, tokens=10, world=2, uneven="drop")
    assert len(batches) == 2
    assert batches.waste().dropped == 1
    left_out = set()
    for epoch in range(20):
        batches.set_epoch(epoch)
        left_out |= {*range(5)} - {index for batch in batches.of_all_ranks() for index in batch}
    assert left_out == {*range(5)}


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(BadInput, match="3 ranks need a sample each, and there are 2"):
        list(TokenBatches([4, 4], tokens=10, world=3, uneven="drop"))


@pytest.mark.parametrize(
    ("lengths", "options", "says"),
    [
        ([], {}, "there are no samples"),
        ([3, 0, 5], {}, "leave out sample 1 of 0 tokens"),
        ([3, -1], {}, "leave out sample 1 of -1 tokens"),
        ([1.5], {}, "whole numbers"),
        ([3], {"tokens": 0}, "the tokens of a batch must be"),
        ([3], {"rank": 2, "world": 2}, "a rank of 2 is from 0 to 1"),
        ([3], {"seed": -1}, "a seed is zero or more"),
        ([3], {"too_long": "cut"}, "too_long is one of error, truncate, skip"),
        ([3], {"uneven": "repeat"}, "uneven is error or drop"),
        ([3], {"tokens": 4, "multiple": 8}, "do not go into 4 tokens"),
        ([30, 40], {"too_long": "skip"}, "skipping those leaves none"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    lengths: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        TokenBatches(lengths, **{"tokens": 16, **options})


def test_a_place_in_other_batches_is_refused() -> None:
    state = TokenBatches([1, 2, 3], tokens=8).state_dict()
    with pytest.raises(WrongCheckpoint, match="tokens was 8 and is 9"):
        TokenBatches([1, 2, 3], tokens=9).load_state_dict(state)
    with pytest.raises(WrongCheckpoint, match="lengths was"):
        TokenBatches([1, 2, 4], tokens=8).load_state_dict(state)


def test_a_loader_pads_what_the_batches_choose() -> None:
    dataset = [{"input_ids": list(range(1, length + 1))} for length in (3, 9, 4, 7)]
    batches = TokenBatches([3, 9, 4, 7], tokens=24, multiple=4)
    collate = functools.partial(pad_samples, longest=batches.longest, multiple=4)
    loaded = list(DataLoader(dataset, batch_sampler=batches, collate_fn=collate))
    assert sum(int(batch["attention_mask"].sum()) for batch in loaded) == 3 + 9 + 4 + 7
    for batch in loaded:
        assert batch["input_ids"].numel() <= 24
        assert batch["input_ids"].shape[1] % 4 == 0
        padding = batch["attention_mask"] == 0
        assert (batch["labels"][padding] == IGNORED).all()
        assert torch.equal(batch["labels"][~padding], batch["input_ids"][~padding])
