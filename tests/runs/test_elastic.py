"""A run follows the memory there is: smaller at once, larger after a while; its losses stay."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from oomph.errors import BadInput, DoesNotFit, StalePlan
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.elastic import Elastic, Elasticity
from oomph.runs.fallback_plans import Fallback, FallbackPlans
from oomph.runs.run import Run, apply, fit
from oomph.search.planner import make_planner

Batch = dict[str, Tensor]
CPU = torch.device("cpu")
LARGE = 1 << 30


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.embed(ids))


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def a_batch(length: int = 32, seed: int = 0) -> Batch:
    ids = torch.randint(16, (8, length), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(1, 1)}


BATCHES = [a_batch(seed=seed) for seed in range(12)]


def a_job() -> Job:
    model = Net()
    return Job(model, token_loss, torch.optim.AdamW(model.parameters(), lr=1e-2), BATCHES[0])


@pytest.fixture(scope="module")
def fallbacks() -> FallbackPlans:
    """All plans of the job, made once."""
    planner = make_planner(a_job(), budget=LARGE)
    fallbacks = FallbackPlans(planner, planner.plan())
    fallbacks.make_all()
    return fallbacks


def elastic_run(fallbacks: FallbackPlans, elastic: Elastic | None = None) -> Run:
    """As `fit` would make it, with plans that were made before."""
    run = apply(fallbacks.top.plan, a_job())
    adapting = run._adapting
    adapting._fallbacks_by_plan[0].steps_down = list(fallbacks.steps_down)
    adapting._fallbacks_by_plan[0].stop()
    if elastic is not None:
        adapting._elasticity = Elasticity(elastic, CPU, None)
    return run


@pytest.fixture(scope="module")
def undisturbed(fallbacks: FallbackPlans) -> list[Tensor]:
    run = elastic_run(fallbacks)
    return [run.step(batch) for batch in BATCHES]


# -- the ladder ------------------------------------------------------------------------------------


def test_each_rung_needs_less_takes_longer_and_makes_its_numbers_of_the_same(
    fallbacks: FallbackPlans,
) -> None:
    steps_down = fallbacks.steps_down
    assert len(steps_down) >= 3
    for above, below in itertools.pairwise(steps_down):
        assert below.need < above.need
        assert below.plan.choices.fixed_part == above.plan.choices.fixed_part
        assert below.need <= below.plan.budget
    assert fallbacks.below(steps_down[0]) is steps_down[1]
    assert fallbacks.below(steps_down[-1]) is None
    assert fallbacks.within(steps_down[1].need) is not steps_down[0]
    assert fallbacks.within(steps_down[-1].need - 1) is None


def test_a_rung_was_checked_and_needs_what_its_rehearsal_showed(fallbacks: FallbackPlans) -> None:
    for fallback in fallbacks.steps_down:
        assert fallback.plan.checked is not None
        assert fallback.plan.checked.fits
        assert fallback.need == fallback.plan.checked.peak.allocated


# -- budgets ---------------------------------------------------------------------------------------


def test_a_budget_that_is_set_changes_the_plan_at_once_and_not_the_losses(
    fallbacks: FallbackPlans, undisturbed: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    run = elastic_run(fallbacks)
    lean = fallbacks.steps_down[-1].need
    losses = []
    with caplog.at_level(logging.INFO, logger="oomph"):
        for at, batch in enumerate(BATCHES):
            if at % 4 == 2:
                run.budget = lean
                assert run.plan == fallbacks.steps_down[-1].plan
            if at % 4 == 0:
                run.budget = str(LARGE)
                assert run.plan == fallbacks.top.plan
            losses.append(run.step(batch))
    torch.testing.assert_close(losses, undisturbed, rtol=1e-4, atol=0)
    assert [event.step for event in run.events] == [2, 4, 6, 8, 10]
    assert {event.cause for event in run.events} == {"the budget was set"}
    assert run.events[0].budget == lean
    assert (run.events[0].before, run.events[0].after) == (
        fallbacks.top.plan,
        fallbacks.steps_down[-1].plan,
    )
    assert [record.message for record in caplog.records] == [str(event) for event in run.events]
    assert str(run.events[0]).startswith("after step 2, the budget was set: micro-batch whole → ")
    assert run.steps == len(BATCHES)


def test_a_budget_that_no_plan_fits_changes_nothing(fallbacks: FallbackPlans) -> None:
    run = elastic_run(fallbacks)
    lean = fallbacks.steps_down[-1].need
    words = r"the leanest needs .*; the budget is still 1\.00 GiB"
    with pytest.raises(DoesNotFit, match=words) as no:
        run.budget = lean - 1
    assert no.value.smallest == lean
    assert run.budget == LARGE
    assert run.plan == fallbacks.top.plan
    assert not run.events


def test_after_a_change_of_plan_undo_gives_back_the_users_model(fallbacks: FallbackPlans) -> None:
    run = elastic_run(fallbacks)
    run.step(BATCHES[0])
    run.budget = fallbacks.steps_down[-1].need
    run.undo()
    assert all("forward" not in vars(module) for module in run.model.modules())
    with pytest.raises(BadInput, match="this run is over"):
        run.budget = LARGE


# -- what others say -------------------------------------------------------------------------------


def test_a_run_shrinks_at_once_and_grows_back_after_its_patience(
    fallbacks: FallbackPlans, undisturbed: list[Tensor]
) -> None:
    said: list[int | None] = [None, fallbacks.steps_down[-1].need, None]
    says = iter([said[0], said[0], said[1], *[said[2]] * 20])
    run = elastic_run(fallbacks, Elastic(ask=lambda: next(says), patience=3))
    losses, plans = [], []
    for batch in BATCHES:
        losses.append(run.step(batch))
        plans.append(run.plan == fallbacks.top.plan)
    assert plans == [True, True, False, False, False, False, True, *[True] * 5]
    torch.testing.assert_close(losses, undisturbed, rtol=1e-4, atol=0)
    shrunk, grown = run.events
    assert shrunk.cause == "less memory was asked for"
    assert shrunk.budget == fallbacks.steps_down[-1].need
    assert grown.cause == "there has been room for a faster plan for 4 steps"


def test_a_file_is_followed_and_nonsense_in_it_is_not(
    fallbacks: FallbackPlans, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "budget"
    run = elastic_run(fallbacks, Elastic(ask=file, patience=1))
    run.step(BATCHES[0])
    assert not run.events
    file.write_text(f"{fallbacks.steps_down[1].need}\n")
    run.step(BATCHES[1])
    assert run.plan == fallbacks.steps_down[1].plan
    file.write_text("as much as you like")
    run.step(BATCHES[2])
    assert run.plan == fallbacks.steps_down[1].plan
    assert "is not followed: cannot read 'as much as you like' as memory" in caplog.text
    file.unlink()
    for batch in BATCHES[3:5]:
        run.step(batch)
    assert run.plan == fallbacks.top.plan


def test_with_less_memory_than_any_plan_needs_the_leanest_is_tried(
    fallbacks: FallbackPlans,
) -> None:
    run = elastic_run(fallbacks, Elastic(ask=lambda: 1))
    for batch in BATCHES[:3]:
        run.step(batch)
    assert run.plan == fallbacks.steps_down[-1].plan
    assert len(run.events) == 1


def test_patience_is_at_least_a_step() -> None:
    with pytest.raises(BadInput, match="patience is at least one step, not 0"):
        Elastic(patience=0)


# -- trouble ---------------------------------------------------------------------------------------


class OneStepAtATime(Elasticity):
    """As on a card, whose numbers are given here."""

    def __init__(self, patience: int = 2) -> None:
        self.retries = 0
        super().__init__(Elastic(patience=patience), CPU, None)

    def _count_retries(self) -> int:
        return self.retries


def test_an_allocator_that_cleans_up_in_every_step_is_given_more_room(
    fallbacks: FallbackPlans,
) -> None:
    watching = OneStepAtATime()
    for present, below in itertools.pairwise([fallbacks.top, *fallbacks.steps_down[1:3]]):
        for step in range(7):
            watching.retries += 1
            assert watching.next_move(fallbacks, present, present.need) is None, step
        watching.retries += 1
        move = watching.next_move(fallbacks, present, present.need)
        assert move is not None
        assert move.fallback is below
        assert move.cause == "the allocator had to clean up in 8 steps in a row"


def test_retries_that_were_predicted_are_no_trouble(fallbacks: FallbackPlans) -> None:
    watching = OneStepAtATime()
    expected = dataclasses.replace(fallbacks.top, retries=1)
    for _ in range(20):
        watching.retries += 1
        assert watching.next_move(fallbacks, expected, LARGE) is None


def test_running_out_soon_after_growing_makes_the_next_growing_wait_twice_as_long(
    fallbacks: FallbackPlans,
) -> None:
    watching, lean = OneStepAtATime(patience=2), fallbacks.steps_down[-1]

    def steps_until_it_grows() -> int:
        for step in range(1, 100):
            if watching.next_move(fallbacks, lean, LARGE) is not None:
                return step
        raise AssertionError

    waits = []
    for _ in range(3):
        waits.append(steps_until_it_grows())
        watching.ran_out()
    assert waits == [3, 5, 9]
    waits = [steps_until_it_grows()]
    for _ in range(100):
        watching.next_move(fallbacks, fallbacks.top, LARGE)
    watching.ran_out()
    assert [*waits, steps_until_it_grows()] == [17, 3]


def test_a_run_that_is_not_elastic_makes_a_smaller_plan_when_memory_runs_out(
    fallbacks: FallbackPlans, undisturbed: list[Tensor]
) -> None:
    full = [False]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rehearsed = isinstance(batch["ids"], FakeTensor)
        if full[0] and not rehearsed and len(batch["ids"]) > 2:
            raise torch.OutOfMemoryError("the card is full")
        return token_loss(model, batch)

    job = dataclasses.replace(a_job(), loss=loss)
    run = apply(fallbacks.top.plan, job)
    schedule = torch.optim.lr_scheduler.ConstantLR(run.optimizer, factor=1.0)
    losses = []
    for at, batch in enumerate(BATCHES):
        full[0] = at == 3
        losses.append(run.step(batch))
        schedule.step()
    torch.testing.assert_close(losses, undisturbed, rtol=1e-4, atol=0)
    assert {event.step for event in run.events} == {3}
    assert run.events[-1].after == run.plan
    assert run.plan.choices.micro_batch in (1, 2)
    assert all(event.cause.endswith("the card is full)") for event in run.events)


# -- other batches ---------------------------------------------------------------------------------


def test_an_elastic_run_plans_for_a_longer_batch_and_comes_back(fallbacks: FallbackPlans) -> None:
    run = elastic_run(fallbacks, Elastic(patience=2))
    longer = a_batch(length=48)
    batches = [BATCHES[0], longer, *BATCHES[1:6]]
    losses, lengths = [], []
    for batch in batches:
        losses.append(run.step(batch))
        lengths.append(run._adapting.fallback.plan.made_for.batch[0][1])
    assert lengths == [32, 48, 48, 48, 32, 32, 32], "it is planned for what comes"
    plain = elastic_run(fallbacks)
    plain_losses = []
    for batch in batches:
        plain_losses.append(token_loss(plain.model, batch).detach())
        token_loss(plain.model, batch).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=0)
    assert run.plan.made_for.batch[0] == (8, 32)
    assert run._adapting._fallbacks_by_plan[1].top.plan.made_for.batch[0] == (8, 48)
    assert elastic_run(fallbacks).step(BATCHES[0]).isfinite()


def test_a_run_that_is_not_elastic_refuses_a_longer_batch(fallbacks: FallbackPlans) -> None:
    with pytest.raises(StalePlan, match="plan with the largest batch there will be"):
        elastic_run(fallbacks).step(a_batch(length=48))


def test_a_longer_batch_that_fits_no_plan_is_refused_in_words_and_nothing_is_lost(
    fallbacks: FallbackPlans,
) -> None:
    run = elastic_run(fallbacks, Elastic())
    run.budget = fallbacks.steps_down[-1].need
    before = [parameter.clone() for parameter in run.model.parameters()]
    with pytest.raises(DoesNotFit):
        run.step(a_batch(length=4096))
    assert all(map(torch.equal, run.model.parameters(), before))
    assert run.step(BATCHES[0]).isfinite()


# -- the whole way ---------------------------------------------------------------------------------


def test_fit_makes_all_plans_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job()
    assert isinstance(job.model, nn.Module) and isinstance(job.optimizer, torch.optim.Optimizer)
    limit: list[Any] = [None]
    elastic = Elastic(ask=lambda: limit[0])
    run = fit(job.model, job.optimizer, token_loss, BATCHES[0], budget=LARGE, elastic=elastic)
    planner = run._adapting._fallbacks_by_plan[0]._planner
    monkeypatch.setattr(planner, "plan_like", lambda *_: pytest.fail("planned on the way"))
    run.step(BATCHES[0])
    lean = run._adapting._fallbacks_by_plan[0].steps_down[-1]
    limit[0] = lean.need
    run.step(BATCHES[1])
    assert run.plan == lean.plan


def test_masters_and_in_backward_come_along_when_the_plan_changes() -> None:
    job = a_job()
    first = Choices(precision="bf16-mixed", weights="bf16 with fp32 masters")
    other = dataclasses.replace(first, micro_batch=2)
    planner = make_planner(a_job(), budget=LARGE)
    plan = dataclasses.replace(planner.plan(), choices=first)
    run = apply(plan, job)
    masters = run._stage.masters
    for choices in (other, dataclasses.replace(first, optimizer_in_backward=True), first):
        run.step(BATCHES[0])
        state = {p: dict(s) for p, s in run.optimizer.state.items()}
        fallback = Fallback(plan=dataclasses.replace(plan, choices=choices), need=1, retries=0)
        run._adapting._fallbacks_by_plan[0].steps_down = [fallback]
        run.budget = 100
        assert run.plan.choices == choices
        assert run._stage.masters is masters
        assert (run._stage.in_backward is not None) == choices.optimizer_in_backward
        for parameter, values in run.optimizer.state.items():
            assert all(value is state[parameter][name] for name, value in values.items())
        run._adapting.budget = LARGE
    run.undo()
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


def test_what_numbers_are_made_of_cannot_be_switched(fallbacks: FallbackPlans) -> None:
    run = elastic_run(fallbacks)
    with pytest.raises(BadInput, match="precision, weights, compiling and the optimizer's state"):
        run._adapting._applied.switch(Choices(precision="bf16-mixed"))
    assert run.step(BATCHES[0]).isfinite()
