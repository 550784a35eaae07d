"""Choices that differ by card: graphs where launches take longest, FP8, the layout of images."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from switched_on import on
from tiny_models import llama, resnet, tokens, vit
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.rehearsal.phases import rehearse
from oomph.search.planner import plan

H200 = find_gpu("h200")


def small() -> Job:
    """Kernels so small that the card waits for the host."""
    return llama(layers=2, vocabulary=512, batch=tokens(4, 64), precision="bf16-mixed")


@functools.cache
def planned(gpu: str, allow: str = "rounding") -> Plan:
    return plan(small(), gpu=gpu, budget="4GiB", allow=allow)


def test_where_launches_take_longest_micro_batches_are_captured() -> None:
    made = planned("h200")
    assert made.choices.techniques.keys() >= {"cuda_graph"}
    (change,) = (one for one in made.changes if one.technique == "CUDA graph")
    assert change.fidelity is Fidelity.EXACT
    assert change.costs < 0


def test_a_forward_that_reads_its_data_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    job = small()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        # As a model does that asks for its longest sample.
        length = int((batch["input_ids"] >= 0).sum(1).max())
        return model(**{name: tensor[:, :length] for name, tensor in batch.items()}).loss

    made = plan(dataclasses.replace(job, loss=loss), gpu="h200", budget="4GiB")
    assert "cuda_graph" not in made.choices.techniques
    assert "no CUDA graph is captured: the forward reads its data" in made.notes
    assert not [one for one in caplog.records if one.name == "oomph"]  # said once
    assert made.predicted.seconds > planned("h200").predicted.seconds


def test_fp8_is_chosen_only_where_the_card_has_it_and_the_user_allows_it() -> None:
    assert "fp8_products" not in planned("h200").choices.techniques
    assert "fp8_products" not in planned("a100-40gb", "lossy").choices.techniques


def test_images_have_channels_last_where_tensor_cores_convolve_them() -> None:
    made = plan(resnet(), gpu="h200", budget="4GiB")
    assert (
        made.choices.precision == "bf16-mixed" and made.choices.techniques["channels_last"].enabled
    )
    (change,) = (one for one in made.changes if one.technique == "channels")
    assert (change.before, change.after) == ("as they are", "last")
    assert change.fidelity is Fidelity.EXACT


@pytest.mark.parametrize(
    ("job", "gpu", "allow"),
    [
        pytest.param(vit, "h200", "rounding", id="patches"),
        pytest.param(resnet, "p100-16gb", "rounding", id="no Tensor Cores"),
        pytest.param(resnet, "h200", "exact", id="fp32"),
        pytest.param(resnet, None, "rounding", id="CPU"),
    ],
)
def test_elsewhere_images_stay_as_they_are(job: Any, gpu: str | None, allow: str) -> None:
    choices = plan(job(), gpu=gpu, budget="4GiB", allow=allow).choices
    assert "channels_last" not in choices.techniques


def test_a_graph_and_a_step_in_backward_exclude_each_other() -> None:
    with pytest.raises(Exception, match="cannot step the optimizer in its backward"):
        Choices(optimizer_in_backward=True, techniques=on("cuda_graph"))


def step_of(choices: Choices) -> tuple[float, int, int]:
    """Seconds, launches and the blocks of memory that a step takes, in the second step."""
    timeline = rehearse(small(), H200, choices=choices, clock=Clock.of(H200))
    first, second = (mark for mark in timeline.marks if mark.name == "end of step")
    span = next(span for span in timeline.spans if span.name == "step")
    taken = [b for b in timeline.blocks if span.start <= b.birth < span.stop]
    return second.seconds - first.seconds, second.launches - first.launches, len(taken)


def test_a_rehearsed_graph_takes_its_memory_once_and_launches_once_a_part() -> None:
    plain = Choices(precision="bf16-mixed", micro_batch=1, techniques=on("fused_optimizer"))
    graphed = Choices(
        precision="bf16-mixed", micro_batch=1, techniques=on("fused_optimizer", "cuda_graph")
    )
    seconds, launches, taken = step_of(plain)
    graphed_seconds, graphed_launches, graphed_taken = step_of(graphed)
    assert graphed_launches < launches / 4
    assert graphed_seconds == pytest.approx(seconds, rel=0.2)
    assert graphed_taken < taken
