"""The most tokens that fit: predicted for the longest batch, and true of every other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.data import token_limit
from oomph.data.batch_shapes import in_shape
from oomph.data.prefetch_memory import prefetched_bytes
from oomph.data.token_batches import TokenBatches
from oomph.data.token_limit import tokens_that_fit
from oomph.errors import BadInput, DoesNotFit
from oomph.jobs.job import Job, make_batch
from oomph.rehearsal.estimation import Estimate, estimate

KIB = 1024


class Net(nn.Module):
    """Every token costs the same, and every pair of a sample too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = (x @ x.mT).softmax(-1)
        logits: Tensor = self.head(scores @ x)
        return logits


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def make_job(rows: int = 2, length: int = 8) -> Job:
    ids = torch.ones(rows, length, dtype=torch.long)
    return Job(Net, loss, "sgd", {"input_ids": ids, "labels": ids.clone()})


def test_a_job_s_batch_is_stretched_and_cut() -> None:
    ids = torch.arange(6).reshape(2, 3)
    weights = torch.ones(5)
    job = Job(Net, loss, "sgd", {"input_ids": ids, "mask": torch.ones(2, 1, 3, 3), "w": weights})
    batch = make_batch(in_shape(job, 3, 5))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 1], [3, 4, 5, 3, 4], [0, 1, 2, 0, 1]]
    assert batch["mask"].shape == (3, 1, 5, 5)
    assert batch["w"] is weights


def test_the_next_size_up_does_not_fit() -> None:
    limit = tokens_that_fit(make_job(), [8, 64, 16, 32] * 20, budget=400 * KIB, phases=("step",))
    assert limit.value % 64 == 0
    rows = limit.value // 64
    fits = estimate(make_job(rows, 64), budget=400 * KIB, phases=("step",))
    beyond = estimate(make_job(rows + 1, 64), budget=400 * KIB, phases=("step",))
    assert fits.fits
    assert not beyond.fits
    assert limit.next_value == limit.value + 64
    assert "number of tokens" in str(limit)


def test_every_batch_of_that_many_tokens_fits() -> None:
    lengths = [8, 64, 16, 32, 5, 11, 48] * 20
    limit = tokens_that_fit(make_job(), lengths, budget=400 * KIB, phases=("step",))
    batches = TokenBatches(lengths, tokens=limit.value)
    assert batches.worst_shapes() == ((limit.value // 64, 64),)
    shapes = {(len(batch), max(lengths[index] for index in batch)) for batch in batches}
    assert len(shapes) > 3
    for rows, length in shapes:
        assert estimate(make_job(rows, length), budget=400 * KIB, phases=("step",)).fits


class CostlySamples(Net):
    """A sample costs as much as many tokens, however short it is."""

    def forward(self, ids: Tensor) -> Tensor:
        once = self.embed(ids[:, :1]).mean(-1, keepdim=True).expand(-1, -1, 1024).exp()
        logits: Tensor = super().forward(ids) + once.mean(-1, keepdim=True)
        return logits


def costly(rows: int, length: int) -> Job:
    return dataclasses.replace(make_job(rows, length), model=CostlySamples)


def test_short_samples_that_cost_more_decide() -> None:
    limit = tokens_that_fit(costly, [8, 64] * 200, budget=1600 * KIB, phases=("step",))
    rows = limit.value // 64
    beyond = rows + 1

    def fits(samples: int, length: int) -> bool:
        return estimate(costly(samples, length), budget=1600 * KIB, phases=("step",)).fits

    assert fits(rows, 64)
    assert fits(rows * 8, 8)
    assert fits(beyond, 64)
    assert not fits(beyond * 8, 8)
    assert limit.next_value == beyond * 64


def test_every_rehearsal_counts_and_the_shortest_samples_need_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = list[int]()

    def noting(job: Job, **options: Any) -> Estimate:
        lengths.append(make_batch(job)["input_ids"].shape[1])
        return estimate(job, **options)

    monkeypatch.setattr(token_limit, "estimate", noting)
    limit = tokens_that_fit(make_job, [8, 64] * 40, budget=400 * KIB, phases=("step",))
    assert limit.rehearsals == len(lengths)
    assert lengths.count(8) == 1


def test_prefetched_batches_leave_less_room() -> None:
    batch = make_batch(make_job(4, 16))
    assert prefetched_bytes(batch, 3) == 3 * 2 * 512
    assert prefetched_bytes(batch, 0) == 0
    lengths = [64] * 100
    without = tokens_that_fit(make_job, lengths, budget=800 * KIB, phases=("step",))
    ahead = tokens_that_fit(make_job, lengths, budget=800 * KIB, phases=("step",), prefetch=30)
    assert ahead.value < without.value


def test_few_samples_end_it_before_memory_does() -> None:
    limit = tokens_that_fit(make_job, [8, 4, 8], budget="1GiB", phases=("step",))
    assert limit.value == 24
    assert limit.reason == "there are only 3 samples"


def test_a_sample_longer_than_anything_that_fits_is_named_with_the_length_that_does() -> None:
    with pytest.raises(DoesNotFit, match=r"as sample 2, fits 400\.0 KiB") as caught:
        tokens_that_fit(make_job, [8, 16, 4096, 32], budget=400 * KIB, phases=("step",))
    said = str(caught.value)
    longest = int(said.split("longest=")[1].split(",")[0])
    assert estimate(make_job(1, longest), budget=400 * KIB, phases=("step",)).fits
    assert not estimate(make_job(1, longest + 1), budget=400 * KIB, phases=("step",)).fits
    limit = tokens_that_fit(
        make_job, [8, 16, 4096, 32], longest=longest, budget=400 * KIB, phases=("step",)
    )
    assert limit.value == longest
    assert TokenBatches([8, 4096], tokens=limit.value, longest=longest, too_long="skip")


def test_weights_that_do_not_fit_at_all_are_said_so() -> None:
    with pytest.raises(DoesNotFit, match="no shorter one fits either"):
        tokens_that_fit(make_job, [8, 16], budget=100, phases=("step",))


def test_no_limit_is_no_question() -> None:
    with pytest.raises(BadInput, match="give one, as 16GiB"):
        tokens_that_fit(make_job, [8])
