"""What all integrations share: the sample batch, and plans that a framework's loop can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ragged_text import Ragged
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

import oomph
from oomph.errors import BadInput
from oomph.integrations import framework_plan
from oomph.integrations.framework_plan import (
    Fitted,
    collate_longest,
    plan_for_framework,
    resized,
    sample_batch,
)

CPU = torch.device("cpu")


class Words(list[dict[str, list[int]]]):
    """Tokens of different lengths."""


WORDS = Words([{"input_ids": [0] * length} for length in (2, 9, 1, 7, 8, 3)])


def test_the_longest_samples_make_the_batch() -> None:
    def lengths(samples: list[Any]) -> list[int]:
        return [len(sample["input_ids"]) for sample in samples]

    assert collate_longest(WORDS, lengths, 3) == [9, 8, 7]
    assert collate_longest(WORDS, lengths, 8) == [9, 8, 7, 3, 2, 1, 9, 8]


def test_looking_at_a_loader_moves_no_random_stream() -> None:
    def batches(look: bool) -> list[Any]:
        torch.manual_seed(4)
        loader = DataLoader(Ragged(), 4, shuffle=True, collate_fn=default_collate)
        if look:
            found = sample_batch(loader, CPU)
            assert found["input_ids"].shape == (4, 16)
        return [batch["input_ids"] for batch in loader]

    for seen, expected in zip(batches(True), batches(False), strict=True):
        assert torch.equal(seen, expected)


def test_a_stream_gives_its_first_batch_and_an_iterator_is_not_used_up() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from Ragged()

    found = sample_batch(DataLoader(Stream(), 4), CPU)
    assert torch.equal(found["input_ids"], Ragged().tokens[:4])
    with pytest.raises(BadInput, match="use it up"):
        sample_batch(iter([found]), CPU)
    with pytest.raises(BadInput, match="no batch"):
        sample_batch([], CPU)


def test_a_batch_is_resized_by_taking_its_samples_again() -> None:
    batch = {"x": torch.tensor([[1], [2], [3]]), "temperature": torch.tensor(0.5), "name": "n"}
    found = resized(batch, 5)
    assert found["x"].flatten().tolist() == [1, 2, 3, 1, 2]
    assert found["temperature"] is batch["temperature"] and found["name"] == "n"
    assert resized(batch, 2)["x"].flatten().tolist() == [1, 2]


def deep_net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks)


def job_for(model: nn.Module, samples: int = 32, **options: Any) -> oomph.Job:
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.ones(samples, 64), torch.ones(samples, 64))
    return oomph.Job(model, nn.MSELoss(), optimizer, batch, **options)


def test_plans_leave_to_the_framework_what_is_its_own() -> None:
    job = job_for(deep_net())
    plan = plan_for_framework(job, device=CPU, budget="400KiB", allow="lossy")
    choices = plan.choices
    assert choices.weights == "own"
    assert choices.techniques.keys() <= {"fused_optimizer"}
    assert not choices.optimizer_in_backward


def test_plans_for_a_card_that_is_nearly_too_small_leave_the_optimizer_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framework_plan, "card_of", lambda _: oomph.find_gpu("rtx-4090"))
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 2048, 2048) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.ones(64, 2048), torch.ones(64, 2048))
    job = oomph.Job(model, nn.MSELoss(), optimizer, batch)

    def planned(budget: int) -> oomph.Plan:
        return plan_for_framework(job, device=CPU, budget=budget, allow="exact")

    with pytest.raises(oomph.DoesNotFit) as refused:
        planned(1 << 30)
    plan = planned(int(refused.value.smallest * 1.01))
    assert not plan.choices.leaves
    assert "cuda_graph" not in plan.choices.techniques


def test_accumulated_batches_are_planned_with_gradients_there_in_forward() -> None:
    def planned(accumulated: int) -> oomph.Plan:
        job = job_for(deep_net(), clip_norm=float("inf"))
        return plan_for_framework(
            job, device=CPU, budget="4MiB", allow="exact", accumulated=accumulated
        )

    once, twice = planned(1), planned(3)
    assert once.choices.micro_batch is None
    assert twice.choices.micro_batch is None  # each of them whole
    assert twice.predicted.samples == 96
    gradients = 4 * sum(p.numel() for p in deep_net().parameters())
    assert twice.predicted.peak.allocated > once.predicted.peak.allocated
    assert twice.predicted.peak.allocated < once.predicted.peak.allocated + 3 * gradients


def test_a_model_that_averages_over_its_batch_may_accumulate() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3)))
    job = job_for(model, clip_norm=1.0)
    plan = plan_for_framework(job, device=CPU, budget="4MiB", allow="exact", accumulated=2)
    fitted = Fitted(plan, job, CPU, split=None, enforced=False)
    assert fitted.split(job.batch) == [job.batch]
    fitted.undo()


def test_planning_with_a_scheduler_steps_neither_the_optimizer_nor_the_scheduler() -> None:
    model = deep_net()
    job = job_for(model, clip_norm=1.0)
    assert isinstance(job.optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)
    step = job.optimizer.step
    before = [p.clone() for p in model.parameters()]
    plan_for_framework(job, device=CPU, budget="4MiB", allow="exact")
    assert job.optimizer.step is step
    assert not job.optimizer.state
    assert scheduler.last_epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_that_averages_over_its_batch_is_never_split(some_plan: oomph.Plan) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    fitted = Fitted(some_plan, job_for(model, samples=4), CPU, split=None, enforced=False)
    longer = torch.ones(16, 64), torch.ones(16, 64)
    assert fitted.split(longer) == [longer]
    fitted.undo()
    whole = Fitted(some_plan, job_for(deep_net(), samples=4), CPU, split=None, enforced=False)
    assert [len(part[0]) for part in whole.split(longer)] == [4, 4, 4, 4]
