"""Every optimizer of torch.optim is rehearsed to the byte of a real run, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cpu_truth import measure, predict
from torch import Tensor, nn

from oomph.errors import CannotRehearse
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.timeline import Category, Timeline

ALL = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
}

#: Refused, with the words that say why.
REFUSED = {"LBFGS": "as often in one step as the data make it", "SparseAdam": "sparse gradients"}

#: A [20, 10] and a [3, 20] weight in fp32.
WEIGHTS = 260 * 4

#: Bytes of state on a GPU. Step counters stay on the host but for ASGD's, which has three numbers
#: per weight, and for fused optimizers, whose kernels count by themselves.
STATE = {
    "ASGD": WEIGHTS + 2 * 3 * 4,
    "Adadelta": 2 * WEIGHTS,
    "Adafactor": (20 + 10 + 3 + 20) * 4,
    "Adagrad": WEIGHTS,
    "Adam": 2 * WEIGHTS,
    "AdamW": 2 * WEIGHTS,
    "Adamax": 2 * WEIGHTS,
    "Muon": WEIGHTS,
    "NAdam": 2 * WEIGHTS,
    "RAdam": 2 * WEIGHTS,
    "RMSprop": WEIGHTS,
    "Rprop": 2 * WEIGHTS,
    "SGD": 0,
}

#: Optimizers that go over their weights one by one on a GPU, too, unless told otherwise.
ONE_BY_ONE = {"Adafactor", "Muon"}

#: torch 2.11 has no fused Adagrad for a GPU.
FUSED_ON_GPU = ["Adam", "AdamW", "SGD", *(["Adagrad"] if torch.__version__ >= "2.13" else [])]

VARIANTS = [
    (name, variant)
    for name, cls in ALL.items()
    if name not in REFUSED
    for variant in ("default", "foreach", "fused")
    if variant == "default" or variant in inspect.signature(cls).parameters
]


def job_with(name: str, variant: str = "default", **options: Any) -> Job:
    if variant != "default":
        options[variant] = True

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 3, bias=False))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return torch.mul(out, out).sum()

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return ALL[name](list(parameters), lr=0.01, **options)

    return Job(build, loss, make, lambda: torch.rand(4, 10))


def rehearse_on_gpu(job: Job) -> Timeline:
    return rehearse(job, find_gpu("h200"), ("build", "first step", "step"))


def state_bytes(timeline: Timeline) -> int:
    return sum(b.size for b in timeline.blocks if b.category is Category.OPTIMIZER)


def test_all_optimizers_of_torch_are_accounted_for() -> None:
    assert ALL.keys() == STATE.keys() | REFUSED.keys()
    assert len(ALL) == 15


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_an_optimizer_is_rehearsed_to_the_byte(name: str, variant: str) -> None:
    job = job_with(name, variant)
    predicted, measured = predict(job), measure(job)
    assert predicted.alive == measured.tensors.alive
    assert predicted.peaks == measured.tensors.peaks
    for stretch, peak in predicted.peaks.items():
        # A Python number that meets a tensor in a kernel is held as 8 bytes, then as 4 more.
        assert measured.all.peaks[stretch] - peak in (0, 8, 12), stretch


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_state_on_a_gpu_is_what_the_optimizer_keeps_per_weight(name: str, variant: str) -> None:
    if variant == "fused" and name not in FUSED_ON_GPU:
        pytest.skip("this torch has no such kernel")
    counters = 2 * 4 if variant == "fused" and name != "SGD" else 0
    assert state_bytes(rehearse_on_gpu(job_with(name, variant))) == STATE[name] + counters


@pytest.mark.parametrize("name", sorted(STATE.keys() - ONE_BY_ONE))
def test_an_optimizer_takes_all_weights_at_once_on_a_gpu(name: str) -> None:
    # Decay makes every one of them allocate, so that its way of doing it shows.
    job = job_with(name, **({} if name == "Rprop" else {"weight_decay": 0.1}))
    on_gpu = {block.op for block in rehearse_on_gpu(job).blocks}
    on_cpu = {block.op for block in rehearse(job, None).blocks}
    assert any("_foreach_" in op for op in on_gpu)
    assert not any("_foreach_" in op for op in on_cpu)


@pytest.mark.parametrize("name", sorted(ONE_BY_ONE))
def test_an_optimizer_without_foreach_goes_weight_by_weight(name: str) -> None:
    assert not any("_foreach_" in block.op for block in rehearse_on_gpu(job_with(name)).blocks)


@pytest.mark.parametrize("name", sorted(FUSED_ON_GPU))
def test_a_fused_optimizer_needs_no_memory_for_its_step(name: str) -> None:
    timeline = rehearse_on_gpu(job_with(name, "fused"))
    step = next(span for span in timeline.spans if span.name == "step")
    made = [b for b in timeline.blocks if step.start <= b.birth < step.stop and not b.module]
    assert not any("fused" in block.op or "sqrt" in block.op for block in made)


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_an_optimizer_that_hangs_on_data_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(CannotRehearse, match=f"{name}.*{why}"):
        rehearse(job_with(name), None)
    with pytest.raises(CannotRehearse, match=name):
        Job(nn.Linear(2, 2), None, name.lower(), torch.ones(1, 2))
