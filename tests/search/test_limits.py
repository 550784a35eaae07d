"""The largest batch or length that fits: it does, the next one does not, and few were tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oomph
from oomph.search import limits

STEP = ("build", "first step")
FORWARD = ("build", "eval")


def wide(batch: int) -> oomph.Job:
    """A job of one layer whose activations grow by 4 MiB a sample."""
    return oomph.Job(
        lambda: nn.Linear(64, 1 << 20, bias=False),
        lambda model, inputs: model(inputs).relu().sum(),
        "sgd",
        lambda: torch.ones(batch, 64),
        name="wide",
    )


def attending(seq: int) -> oomph.Job:
    """A job whose scores grow with the square of the length."""

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        hidden = model(inputs)
        return (hidden @ hidden.transpose(1, 2)).softmax(-1).sum()

    return oomph.Job(lambda: nn.Linear(32, 32), loss, "sgd", lambda: torch.ones(4, seq, 32))


def gpt2(**shape: int) -> oomph.Job:
    return oomph.job_from_name("gpt2", **shape)


@pytest.mark.parametrize("start", [1, 64, 5000])
def test_the_answer_fits_and_the_next_does_not_wherever_the_search_begins(start) -> None:
    limit = oomph.largest(wide, "rtx-4090", start=start)
    assert limit.verdict == "fits"
    assert oomph.estimate(wide(limit.value), "rtx-4090").fits
    assert limit.next_value == limit.value + 1
    assert not oomph.estimate(wide(limit.next_value), "rtx-4090").fits
    assert limit.limited_by == "memory"
    assert limit.rehearsals <= 14


def test_few_rehearsals_lead_to_a_real_models_batch(monkeypatch) -> None:
    rehearsed = []

    def counted(job: oomph.Job, **options: object) -> oomph.Estimate:
        rehearsed.append(job)
        return oomph.estimate(job, **options)

    monkeypatch.setattr(limits, "estimate", counted)
    limit = oomph.largest(lambda n: gpt2(batch=n, seq=64), "rtx-4090", start=8, phases=STEP)
    assert limit.fits
    assert limit.next_value == limit.value + 1
    assert not limit.next_estimate.fits
    assert len(rehearsed) == limit.rehearsals <= 12


def test_memory_that_grows_with_the_square_is_followed_too() -> None:
    limit = oomph.largest(attending, "rtx-4090", what="seq", start=512, step=64)
    assert limit.fits
    assert limit.value % 64 == 0
    assert limit.next_value == limit.value + 64
    assert not limit.next_estimate.fits
    assert limit.rehearsals <= 14


def test_more_memory_never_holds_less() -> None:
    budgets = ["1GiB", "2GiB", "5GiB", "20GiB"]
    values = [oomph.largest(wide, "h200", budget=budget).value for budget in budgets]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_learned_positions_end_the_search_on_a_large_card() -> None:
    limit = oomph.largest(
        lambda n: gpt2(batch=1, seq=n), "h200", what="seq", start=500, step=64, phases=FORWARD
    )
    assert limit.value == 1024
    assert limit.limited_by == "model"
    assert limit.next_estimate is None
    assert "takes 1024 tokens, not 1025" in str(limit).splitlines()[1]


def test_a_bound_between_two_steps_is_an_answer() -> None:
    def up_to_300(seq: int) -> oomph.Job:
        if seq > 300:
            raise oomph.BadInput("300 is the most")
        return attending(seq)

    limit = oomph.largest(up_to_300, "h200", what="seq", step=64)
    assert limit.value == 300
    assert limit.reason == "300 is the most"


def test_a_size_that_is_the_only_one_is_the_answer() -> None:
    def only_224(side: int) -> oomph.Job:
        if side != 224:
            raise oomph.BadInput("224 it must be")
        return attending(side)

    assert oomph.largest(only_224, "h200", start=224, step=64).value == 224
    none = oomph.largest(only_224, "h200", budget="100MiB", start=224, step=64)
    assert (none.value, none.verdict) == (224, "does_not_fit")


def test_a_search_that_memory_does_not_end_is_ended() -> None:
    limit = oomph.largest(lambda n: wide(1), "h200")
    assert (limit.value, limit.limited_by) == (limits.MOST, "search")
    assert "the search ends at 1,000,000" in str(limit)


def test_where_nothing_fits_the_smallest_budget_is_said() -> None:
    limit = oomph.largest(wide, "h200", budget="300MiB", start=16)
    assert limit.verdict == "does_not_fit"
    assert limit.value == 1
    first, second, *_ = str(limit).splitlines()
    assert first.startswith("does not fit: not even with a batch of 1, where wide needs ")
    assert second.startswith("The smallest budget it would run in: ")
    assert oomph.estimate(wide(1), "h200", budget=limit.estimate.smallest_budget).fits
    assert limit.as_dict()["solve"]["value"] is None


def test_an_inconclusive_size_is_not_a_fit_and_is_called_by_its_name() -> None:
    limit = oomph.largest(wide, "h200", budget="2GiB")
    assert limit.next_estimate.verdict == "inconclusive"
    assert f"A batch of {limit.value + 1} is inconclusive: " in str(limit)


def test_on_the_cpu_the_answer_is_exact() -> None:
    limit = oomph.largest(wide, budget="2GiB")
    assert limit.estimate.peak.allocated <= 2**31 < limit.next_estimate.peak.allocated


def test_the_json_has_the_estimate_and_the_answer() -> None:
    limit = oomph.largest(wide, "h200", budget="2GiB")
    answer = limit.as_dict()
    assert answer.keys() == {*limit.estimate.as_dict(), "solve"}
    assert answer["solve"].keys() == {
        *("what", "value", "limited_by", "reason", "next", "rehearsals")
    }
    assert answer["solve"]["next"].keys() == {"value", "verdict", "peak", "interval"}


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(oomph.BadInput, match="nothing limits a job on the CPU"):
        oomph.largest(wide)
    with pytest.raises(oomph.BadInput, match="the batch must be a whole number"):
        oomph.largest(wide, "h200", start=0)
    with pytest.raises(oomph.BadInput, match="takes 1024 tokens"):
        oomph.largest(lambda n: gpt2(seq=n), "h200", start=2000)


def test_sizes_refused_here_and_there_are_an_error_not_an_endless_search() -> None:
    def even(batch: int) -> oomph.Job:
        if batch % 2:
            raise oomph.BadInput("two by two")
        return wide(batch)

    with pytest.raises(oomph.BadInput, match="two by two"):
        oomph.largest(even, "h200", budget="2GiB", start=64)
