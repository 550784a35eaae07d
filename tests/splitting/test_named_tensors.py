"""Tensors that a job names as those with an entry for each sample are taken for just those."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from oomph.jobs.job import Job
from oomph.splitting import prove_split, prove_split_of_another


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]) @ batch["table"].T
    return (found - batch["y"]).square().mean()


def _job(samples: int) -> Job:
    """The table has four rows, whichever batch it comes with."""
    batch = {
        "x": torch.randn(samples, 8),
        "table": torch.randn(4, 8),
        "y": torch.randn(samples, 4),
    }
    return Job(nn.Linear(8, 8), _loss, "sgd", batch)


NAMED = ("['x']", "['y']")


def test_a_tensor_that_is_not_named_is_no_samples_though_it_is_as_long_as_the_batch() -> None:
    assert prove_split(_job(4), None).whole_because
    split = prove_split(dataclasses.replace(_job(4), sample_tensors=NAMED), None)
    assert not split.whole_because
    assert (split.leaves, split.others) == (NAMED, {"['table']"})


def test_named_tensors_are_checked_as_any_others() -> None:
    wrong = dataclasses.replace(_job(4), sample_tensors=("['x']",))
    assert prove_split(wrong, None).whole_because


def test_what_had_no_entry_for_each_sample_before_has_none_in_a_batch_of_its_length() -> None:
    before = prove_split(_job(6), None)
    split = prove_split_of_another(_job(4), None, before)
    assert (split.leaves, split.others) == (NAMED, {"['table']"})


def test_a_batch_of_another_kind_is_looked_at_as_if_it_were_the_first() -> None:
    before = prove_split(_job(6), None)
    other = Job(nn.Linear(8, 8), nn.MSELoss(), "sgd", (torch.randn(4, 8), torch.randn(4, 8)))
    assert prove_split_of_another(other, None, before) == prove_split(other, None)
