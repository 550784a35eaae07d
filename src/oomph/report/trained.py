"""Describe a training: one line per step while it runs, predicted against measured at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.report.plans import format_seconds
from oomph.report.report import Table
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.plans.plan import Plan
    from oomph.runs.training import StepDone, Trained


def describe_step(done: StepDone, plan: Plan) -> str:
    """Loss, speed, and memory against the prediction."""
    speed = _rate(done.tokens, done.samples, done.seconds)
    if done.memory is None:
        memory = "memory not measured"
    else:
        most, predicted = (format_bytes(one.device) for one in (done.memory, plan.predicted.peak))
        memory = f"{most} of {predicted} predicted"
    return f"loss {done.loss:.4g}, {speed}, {memory}"


def describe_training(trained: Trained) -> tuple[str, Table]:
    """A one-line summary of the training, and a table of predicted and measured values."""
    plan, steps = trained.plan, trained.steps
    last = steps[-1]
    count = f"{len(steps)} steps" if len(steps) > 1 else "one step"
    speed = _rate(last.tokens, last.samples, trained.seconds)
    place = plan.made_for.gpu or "the CPU"
    losses = " → ".join(f"{one.loss:.4g}" for one in dict.fromkeys((steps[0], last)))
    headline = f"{plan.made_for.job}, {count} on {place} at {speed}, loss {losses}"
    return headline, Table(
        title="Predicted and measured",
        header=("", "predicted", "measured", "difference"),
        rows=(*_memory_rows(trained), _time_row(trained)),
    )


def _memory_rows(trained: Trained) -> list[tuple[str, ...]]:
    predicted = trained.plan.predicted.peak.as_dict()
    if trained.memory is None:
        size = format_bytes(predicted["allocated"])
        return [("peak of tensors", size, "not measured on the CPU", "–")]
    return [
        (
            f"peak {name}",
            format_bytes(predicted[name]),
            format_bytes(size),
            _difference(size, predicted[name]),
        )
        for name, size in trained.memory.as_dict().items()
    ]


def _time_row(trained: Trained) -> tuple[str, ...]:
    predicted, measured = trained.plan.predicted.seconds, trained.seconds
    return (
        "a step",
        format_seconds(predicted),
        format_seconds(measured),
        # On the CPU, predicted times only serve to compare plans.
        _difference(measured, predicted) if trained.memory is not None else "–",
    )


def _difference(measured: float, predicted: float) -> str:
    return f"{100 * (measured / predicted - 1):+.1f} %" if predicted else "–"


def _rate(tokens: int, samples: int, seconds: float) -> str:
    if tokens:
        return f"{tokens / seconds:,.0f} tokens/s"
    return f"{samples / seconds:,.1f} samples/s"
