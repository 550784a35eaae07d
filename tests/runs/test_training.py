"""Training under a plan: one event a step, the loader's batches, prediction beside measurement."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from oomph.errors import BadInput, StalePlan
from oomph.jobs.job import Job
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Plan
from oomph.report.trained import describe_step, describe_training
from oomph.runs.training import StepDone, Trained, choose_device, count_tokens, train
from oomph.search.planner import plan as make_plan

CPU = torch.device("cpu")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4, 8), value), torch.zeros(4, 1)


JOB = Job(build, nn.MSELoss(), "sgd", batch(1.0), name="small")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(JOB, budget="1MiB")


def done(**changes) -> StepDone:
    fields = {"step": 1, "loss": 1.5, "seconds": 0.5, "samples": 4, "tokens": 0, "memory": None}
    return StepDone(**{**fields, **changes})


def test_there_is_an_event_for_every_step(plan) -> None:
    steps = list(train(plan, JOB, device=CPU, steps=3))
    assert [done.step for done in steps] == [1, 2, 3]
    assert steps[0].loss > steps[1].loss > steps[2].loss
    assert all(done.seconds > 0 and done.samples == 4 for done in steps)
    assert all(done.memory is None for done in steps)


def test_the_losses_are_those_of_a_plain_loop(plan) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plain = []
    for _ in range(3):
        inputs, targets = batch(1.0)
        loss = nn.functional.mse_loss(model(inputs), targets)
        plain.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [done.loss for done in train(plan, JOB, device=CPU, steps=3)] == plain


def test_a_loader_is_read_again_from_its_beginning(plan) -> None:
    read = []

    class Loader:
        def __iter__(self):
            for value in (1.0, 2.0):
                read.append(value)
                yield batch(value)

    assert len(list(train(plan, JOB, device=CPU, steps=5, loader=Loader()))) == 5
    assert read[:5] == [1.0, 2.0, 1.0, 2.0, 1.0]


def test_a_batch_that_is_a_function_is_made_for_every_step(plan) -> None:
    made = []

    def fresh() -> tuple[torch.Tensor, torch.Tensor]:
        made.append(None)
        return batch(1.0)

    job = dataclasses.replace(JOB, batch=fresh)
    list(train(plan, job, device=CPU, steps=1))
    after_one = len(made)
    list(train(plan, job, device=CPU, steps=4))
    assert len(made) - after_one >= after_one + 3


def test_a_loader_that_ends_for_good_is_refused_and_the_plan_is_undone(plan) -> None:
    model = build()
    job = dataclasses.replace(JOB, model=model)
    with pytest.raises(BadInput, match="gives no more batches"):
        list(train(plan, job, device=CPU, steps=5, loader=iter([batch(1.0)])))
    # A plan can be applied only to a model that has none.
    assert len(list(train(plan, job, device=CPU, steps=1))) == 1


def test_a_loader_that_fails_is_named(plan) -> None:
    def failing():
        yield batch(1.0)
        raise KeyError("no such file")

    with pytest.raises(BadInput, match="the loader failed: KeyError: 'no such file'"):
        list(train(plan, JOB, device=CPU, steps=5, loader=failing()))


def test_another_model_or_a_longer_batch_is_refused(plan) -> None:
    other = dataclasses.replace(JOB, model=lambda: nn.Linear(8, 1))
    with pytest.raises(StalePlan, match="has other weights"):
        next(train(plan, other, device=CPU, steps=1))
    with pytest.raises(StalePlan, match="batches of up to"):
        wide = (torch.ones(4, 9), torch.zeros(4, 1))
        next(train(plan, JOB, device=CPU, steps=1, loader=[wide]))


def test_no_steps_or_an_unknown_device_is_refused(plan) -> None:
    with pytest.raises(BadInput, match="at least one step, not 0"):
        next(train(plan, JOB, device=CPU, steps=0))
    with pytest.raises(BadInput, match="cpu or cuda, not 'mps'"):
        choose_device("mps")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_cpu_is_the_default() -> None:
    assert choose_device(None) == CPU
    with pytest.raises(BadInput, match="--device cpu trains without one"):
        choose_device("cuda")


def test_tokens_are_counted_where_there_are_any() -> None:
    ids = torch.ones(2, 8, dtype=torch.int64)
    assert count_tokens({"input_ids": ids, "labels": ids, "mask": torch.ones(2, 8)}) == 16
    assert count_tokens(batch(1.0)) == 0


def test_the_median_leaves_the_first_two_steps_out(plan) -> None:
    steps = tuple(done(step=n, seconds=s) for n, s in enumerate((90.0, 80.0, 1.0, 2.0, 60.0), 1))
    assert Trained(plan=plan, device="cpu", steps=steps).seconds == 2.0
    assert Trained(plan=plan, device="cpu", steps=steps[:2]).seconds == 80.0


def test_the_json_has_the_keys_that_stay_and_no_number_that_json_lacks(plan) -> None:
    trained = Trained(plan=plan, device="cpu", steps=(done(loss=math.nan), done(step=2)))
    answer = json.loads(json.dumps(trained.as_dict(), allow_nan=False))
    assert answer.keys() == {
        *("schema_version", "verdict", "job", "gpu", "device", "steps", "losses", "step_seconds"),
        *("predicted", "measured", "plan", "first_step", "saved", "plan_changes"),
    }
    assert answer["losses"] == [None, 1.5]


def test_on_a_gpu_memory_is_compared_ledger_by_ledger(plan) -> None:
    predicted = dataclasses.replace(
        plan.predicted, peak=Ledgers(allocated=1000, reserved=2000, device=4000), seconds=0.25
    )
    on_a_card = dataclasses.replace(plan, predicted=predicted)
    memory = Ledgers(allocated=1100, reserved=2000, device=3000)
    last = done(memory=memory, tokens=100)
    assert (
        describe_step(last, on_a_card) == "loss 1.5, 200 tokens/s, 2.93 KiB of 3.91 KiB predicted"
    )
    _, table = describe_training(Trained(plan=on_a_card, device="cuda", steps=(last,)))
    differences = {row[0]: row[-1] for row in table.rows}
    assert differences == {
        "peak allocated": "+10.0 %",
        "peak reserved": "+0.0 %",
        "peak device": "-25.0 %",
        "a step": "+100.0 %",
    }
