"""Evaluating in parts gives the loss of one large batch, leaves no trace in the run, and keeps what
is asked for on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_plans import plan_with
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.profiler_memory import measure_cpu_peak
from oomph.engine.evaluating import Metric, evaluate
from oomph.engine.step import Stage
from oomph.errors import BadInput, StalePlan
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.rehearsal.world import pretend
from oomph.runs.run import Run, apply
from oomph.techniques.chunked_loss import chunk_loss
from oomph.techniques.lazy_logits import LazyLogits

CLASSES, LENGTH = 24, 6
Batch = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.drop(x))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    weight = torch.arange(1.0, CLASSES + 1)
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), weight)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["ids"]) - batch["ids"].unsqueeze(-1)).square().mean()


def both(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model, batch) + 0.1 * squares(model, batch)


def ragged(samples: int, seed: int) -> Batch:
    ids = torch.randint(CLASSES, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for at in range(samples):
        labels[at, (3 * at + seed) % LENGTH + 1 :] = -100
    return {"ids": ids, "labels": labels}


PLANNED = ragged(4, 0)
BATCHES = [ragged(4, 1), ragged(4, 2), ragged(7, 3), ragged(1, 4)]
WHOLE = {key: torch.cat([batch[key] for batch in BATCHES]) for key in PLANNED}


def start(choices: Choices, loss: Callable[..., Tensor] = cross_entropy, **options: Any) -> Run:
    model = Net()
    model.norm.eval()  # of one that trains, only whole batches can be planned for
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_with(choices, model, optimizer, PLANNED)
    return apply(plan, Job(model, loss, optimizer, PLANNED, **options))


def plainly(run: Run, loss: Callable[..., Tensor], batch: Batch) -> float:
    """The loss of one batch as anybody would compute it."""
    model = Net()
    model.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        return float(loss(model.eval(), batch))


@pytest.mark.parametrize("micro_batch", [1, 2, 3, None])
@pytest.mark.parametrize("loss", [cross_entropy, squares])
def test_the_loss_over_several_batches_is_that_of_one_large_batch(
    loss: Callable[..., Tensor], micro_batch: int | None
) -> None:
    run = start(Choices(micro_batch=micro_batch), loss)
    run.step(PLANNED)
    evaluation = run.evaluate(BATCHES)
    assert evaluation.loss == pytest.approx(plainly(run, loss, WHOLE), rel=1e-6)
    assert evaluation.samples == 16


def test_a_batch_that_is_not_split_has_its_loss_to_the_bit() -> None:
    run = start(Choices())
    assert run.evaluate([PLANNED]).loss == plainly(run, cross_entropy, PLANNED)


@pytest.mark.parametrize("loss", [both, weighted])
def test_a_loss_of_several_terms_is_exact_for_a_batch(loss: Callable[..., Tensor]) -> None:
    run = start(Choices(micro_batch=2 if loss is both else None), loss)
    assert run.evaluate([PLANNED]).loss == pytest.approx(plainly(run, loss, PLANNED), rel=1e-6)


def test_class_weights_count_between_batches() -> None:
    run = start(Choices(), weighted)
    small = [ragged(4, 1), ragged(3, 2)]
    whole = {key: torch.cat([batch[key] for batch in small]) for key in PLANNED}
    assert run.evaluate(small).loss == pytest.approx(plainly(run, weighted, whole), rel=1e-6)


def test_a_job_that_counts_itself_is_believed() -> None:
    def tokens(batch: Batch) -> Tensor:
        return (batch["labels"] != -100).sum()

    run = start(Choices(micro_batch=2), cross_entropy, items=tokens)
    expected = plainly(run, cross_entropy, WHOLE)
    assert run.evaluate(BATCHES).loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("micro_batch", [2, None])
def test_batches_without_a_target_count_nothing(micro_batch: int | None) -> None:
    run = start(Choices(micro_batch=micro_batch))
    empty = {**PLANNED, "labels": torch.full_like(PLANNED["labels"], -100)}
    expected = plainly(run, cross_entropy, PLANNED)
    assert run.evaluate([empty, PLANNED, empty]).loss == pytest.approx(expected, rel=1e-6)
    assert run.evaluate([empty]).loss != run.evaluate([empty]).loss  # there is none: NaN


def test_a_loss_whose_parts_do_not_add_up_is_refused() -> None:
    def spread(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"]).std()

    with pytest.raises(BadInput, match="std goes over the samples of the batch"):
        start(Choices(micro_batch=1), spread).evaluate([PLANNED])


def masked(model: nn.Module, batch: Batch) -> Tensor:
    mask = (batch["labels"] >= 0).float()
    errors = (model(batch["ids"]).mean(-1) - batch["ids"]).square()
    return (errors * mask).sum() / mask.sum()


def other_in_evaluation(model: nn.Module, batch: Batch) -> Tensor:
    loss = masked(model, batch)
    if model.training:
        loss = loss + model(batch["ids"]).square().mean()
    return loss / batch["labels"].clamp(min=0).sum() if not model.training else loss


def positives(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["ids"])[:, 0, :4]
    targets = (batch["ids"][:, :4] > CLASSES // 2).float()
    return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=batch["weight"])


@pytest.mark.parametrize("loss", [masked, other_in_evaluation])
def test_what_a_loss_counts_in_evaluation_is_counted_in_the_whole_batch(
    loss: Callable[..., Tensor],
) -> None:
    run = start(Choices(micro_batch=1), loss)
    for batch in BATCHES:
        assert run.evaluate([batch]).loss == pytest.approx(plainly(run, loss, batch), rel=1e-6)
    run.step(PLANNED)


def test_a_tensor_as_long_as_the_batch_is_not_split_in_evaluation() -> None:
    batch = {**PLANNED, "weight": torch.tensor([1.0, 2.0, 5.0, 9.0])}
    model = Net()
    model.norm.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_with(Choices(micro_batch=2), model, optimizer, batch)
    run = apply(plan, Job(model, positives, optimizer, batch))
    assert run.evaluate([batch]).loss == pytest.approx(plainly(run, positives, batch), rel=1e-6)


def test_a_batch_that_must_stay_whole_is_evaluated_as_a_whole_or_refused() -> None:
    def spread(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"]).std()

    run = start(Choices(), spread)
    assert run.evaluate([PLANNED]).loss == plainly(run, spread, PLANNED)
    with pytest.raises(BadInput, match=r"std goes over the samples of the batch.*no larger than"):
        run.evaluate([ragged(5, 1)])


@pytest.mark.parametrize("micro_batch", [2, None])
def test_a_metric_may_compute_what_it_likes(micro_batch: int | None) -> None:
    run = start(Choices(micro_batch=micro_batch), masked)

    def right(output: Tensor, part: Batch) -> Tensor:
        return (output.argmax(-1) == part["ids"]).float().mean()

    evaluation = run.evaluate([PLANNED], right)
    assert evaluation.loss == pytest.approx(plainly(run, masked, PLANNED), rel=1e-6)
    assert all(0 <= float(one) <= 1 for one in evaluation.results)


def test_a_run_goes_on_as_if_nobody_had_evaluated() -> None:
    def losses(evaluates: bool) -> list[float]:
        run = start(Choices(micro_batch=2))
        torch.manual_seed(1)
        done = []
        for batch in BATCHES[:3]:
            done.append(float(run.step(batch)))
            if evaluates:
                run.evaluate(DataLoader(_Random(), batch_size=3, shuffle=True))
        return done

    assert losses(True) == losses(False)


class _Random(torch.utils.data.Dataset[Batch]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, at: int) -> Batch:
        labels = torch.randint(CLASSES, (LENGTH,))
        return {"ids": labels, "labels": labels}


def test_modes_and_gradients_are_left_alone_even_if_it_fails() -> None:
    def broken(output: Any, part: Batch) -> None:
        raise KeyError("broken")

    run = start(Choices())
    with pytest.raises(KeyError):
        run.evaluate([PLANNED], broken)
    assert run.model.training and run.model.drop.training and not run.model.norm.training
    assert all(p.grad is None for p in run.model.parameters())
    assert not run.model._forward_hooks


@pytest.mark.parametrize(
    "choices",
    [
        Choices(),
        Choices(micro_batch=3),
        Choices(micro_batch=3, head="head", loss_chunk=4),
        Choices(micro_batch=3, precision="bf16-mixed"),
    ],
)
def test_outputs_come_in_order_and_on_the_host(choices: Choices) -> None:
    run = start(choices)
    evaluation = run.evaluate(BATCHES, lambda output, part: (output, part["ids"]))
    outputs = torch.cat([output for output, _ in evaluation.results])
    assert torch.equal(torch.cat([ids for _, ids in evaluation.results]), WHOLE["ids"])
    model = Net()
    model.load_state_dict(run.model.state_dict())
    half = choices.precision == "bf16-mixed"
    with torch.no_grad(), torch.autocast("cpu", enabled=half):
        expected = model.eval()(WHOLE["ids"])
    torch.testing.assert_close(outputs, expected)
    assert type(outputs) is Tensor and outputs.device.type == "cpu"
    assert len(evaluation.results) == (8 if choices.micro_batch else 5)


def test_logits_that_are_not_there_are_moved_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LazyLogits, "materialise", lambda _: pytest.fail("computed whole"))
    run = start(Choices(head="head", loss_chunk=4))
    (output,) = run.evaluate([PLANNED], lambda output, _: output).results
    assert output.shape == (4, LENGTH, CLASSES)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_logits_that_are_moved_in_chunks_are_the_models_own(scale: float) -> None:
    run = start(Choices(head="head", loss_chunk=4))
    run.model.register_forward_hook(lambda _, __, output: output * scale)
    (output,) = run.evaluate([PLANNED], lambda output, _: output).results
    model = Net()
    model.load_state_dict(run.model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(output, model.eval()(PLANNED["ids"]) * scale)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_a_metric_takes_no_more_of_a_card_than_the_loss_does(precision: str) -> None:
    ids = torch.zeros(8, 32, dtype=torch.long)
    with pretend(find_gpu("h200")) as recorder:
        model = nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 4096, bias=False)).to("cuda")
        chunk_loss(model[1], 64)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

        job = Job(model, loss, None, ids, precision=precision)  # type: ignore[arg-type]
        stage = Stage(job=job, model=model, optimizer=None)

        def peak(metric: Metric | None) -> int:
            before = recorder.allocated
            recorder.reset_peak()
            evaluate(
                stage,
                [ids],
                metric,
                device=torch.device("cuda"),
                planned=[(8, 32)],
                find_split=lambda _, **__: None,
            )
            return recorder.peak_allocated - before

        peak(None)  # cuBLAS has its workspace from now on
        alone = peak(None)
        assert 0 < alone < 256 * 4096 * 2  # all logits would be more
        assert peak(lambda output, _: output) <= alone


def test_a_metric_is_not_under_autocast() -> None:
    run = start(Choices(precision="bf16-mixed"))
    found = run.evaluate([PLANNED], lambda *_: torch.ones(2, 2) @ torch.ones(2, 2)).results
    assert found[0].dtype is torch.float32


def test_more_samples_than_planned_take_no_more_memory() -> None:
    run = start(Choices())
    many = ragged(64, 1)
    run.evaluate([many])  # how such a batch is split is looked at once
    small = measure_cpu_peak(lambda: run.evaluate([PLANNED]))
    assert measure_cpu_peak(lambda: run.evaluate([many])) < 3 * small
    assert run.evaluate([many]).loss == pytest.approx(plainly(run, cross_entropy, many), rel=1e-6)


def test_longer_samples_and_no_samples_are_refused() -> None:
    run = start(Choices(micro_batch=2))
    long = {key: torch.cat([value, value], 1) for key, value in PLANNED.items()}
    with pytest.raises(StalePlan, match=r"samples of up to \(6,\), and this batch has \(12,\)"):
        run.evaluate([long])
    with pytest.raises(BadInput, match="no batch to evaluate"):
        run.evaluate([])


def test_a_run_that_is_over_does_not_evaluate() -> None:
    run = start(Choices())
    run.undo()
    with pytest.raises(BadInput, match="this run is over"):
        run.evaluate([PLANNED])
