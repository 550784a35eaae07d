"""What Python takes out of fake tensors, with a card and without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cpu_truth import measure, predict
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend
from oomph.splitting import prove_split

GPUS = [None, find_gpu("h200")]
LENGTHS = torch.tensor([3, 1, 2])


@pytest.fixture(params=GPUS, ids=["cpu", "h200"])
def device(request: pytest.FixtureRequest) -> str:
    return "cuda" if request.param else "cpu"


@pytest.fixture
def recorder(device: str) -> Iterator[Recorder]:
    with pretend(GPUS[device == "cuda"]) as recorder:
        yield recorder


def test_known_contents_are_shown(recorder: Recorder, device: str) -> None:
    lengths = LENGTHS.to(device)
    assert LENGTHS.numpy().tolist() == lengths.cpu().numpy().tolist() == [3, 1, 2]
    assert np.asarray(lengths.cpu())[0] == 3
    assert f"expert_{lengths[0]}" == "expert_3"
    assert torch.from_numpy(lengths.cpu().numpy()).tolist() == [3, 1, 2]
    assert copy.deepcopy(lengths + 0).tolist() == [3, 1, 2]
    assert not recorder.values.notes()


def test_unknown_contents_are_zeros_and_said_to_be(recorder: Recorder, device: str) -> None:
    costs = torch.randn(2, 2, device=device)
    assert costs.detach().cpu().numpy().tolist() == [[0, 0], [0, 0]]
    assert costs.tolist() == [[0, 0], [0, 0]]
    (note,) = {note.partition(" at ")[0] for note in recorder.values.notes()}
    assert note == "the contents of a tensor of shape [2, 2]"


def test_lists_of_numbers_become_tensors(recorder: Recorder, device: str) -> None:
    lengths = LENGTHS.to(device)
    assert torch.tensor([lengths[0], lengths[2]]).tolist() == [3, 2]
    assert torch.tensor([[lengths[0], 7], [0, lengths[1]]], device=device).tolist() == [
        [3, 7],
        [0, 1],
    ]
    assert torch.as_tensor([lengths[0] > 2, lengths[1] > 2]).tolist() == [True, False]
    assert lengths.new_tensor([lengths[1]]).tolist() == [1]
    assert torch.tensor([lengths[0].float() / 2]).tolist() == [1.5]
    assert not recorder.values.notes()


def test_an_unknown_number_in_a_list_is_assumed_in_words(recorder: Recorder, device: str) -> None:
    torch.tensor([torch.randn(4, device=device).sum(), 2.0])
    (note,) = recorder.values.notes()
    assert "a number read from a tensor at test_python_reads.py" in note


def test_distributions_check_their_arguments(recorder: Recorder, device: str) -> None:
    means, scales = torch.randn(4, device=device), torch.rand(4, device=device) + 0.1
    for distribution in (
        torch.distributions.Normal(means, scales, validate_args=True),
        torch.distributions.StudentT(scales + 2, means, scales, validate_args=True),
    ):
        assert distribution.log_prob(means).shape == (4,)
    assert any("_is_all_true()" in note for note in recorder.values.notes())


class Experts(nn.Module):
    """Rows go through the matrix of their expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.weight = nn.Parameter(torch.randn(3, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        experts = self.router(x).argmax(-1)
        order = experts.argsort()
        counts = torch.histc(experts.float(), bins=3, min=0, max=2)
        ends = counts.cumsum(0).to(torch.int32)
        return torch._grouped_mm(x[order], self.weight, offs=ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_take_the_memory_of_the_real_ones(dtype: torch.dtype) -> None:
    job = Job(
        lambda: Experts().to(dtype),
        lambda model, batch: model(batch).square().mean(),
        "sgd",
        lambda: torch.rand(24, 16, dtype=dtype),
    )
    predicted, measured = predict(job), measure(job).tensors
    assert predicted.alive == measured.alive


def _as_list(out: Tensor) -> Tensor:
    return torch.tensor(sum(out[:, 0].tolist()))


def _as_array(out: Tensor) -> Tensor:
    return torch.tensor(out[:, 0].detach().cpu().numpy().sum())


def _as_numbers(out: Tensor) -> Tensor:
    return torch.tensor([out[:, 0].sum().detach(), 1.0])[0]


def _as_branch(out: Tensor) -> Tensor:
    return torch.tensor(2.0 if torch._is_all_true(out[:, 0] > 0) else 1.0)


@pytest.mark.parametrize("gpu", GPUS, ids=["cpu", "h200"])
@pytest.mark.parametrize("take", [_as_list, _as_array, _as_numbers, _as_branch])
def test_a_loss_that_takes_numbers_of_its_samples_out_of_torch_keeps_its_batch_whole(
    gpu: Any, take: Callable[[Tensor], Tensor]
) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        return out[:, 1].sum() * take(out).to(out.device)

    model = nn.Linear(4, 2)
    job = Job(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 4))
    assert prove_split(job, gpu).whole_because


@pytest.mark.parametrize("gpu", GPUS, ids=["cpu", "h200"])
def test_a_likelihood_whose_distribution_checks_its_arguments_is_split(gpu: Any) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mean, scale = model(batch).unbind(-1)
        made = torch.distributions.Normal(mean, scale.exp(), validate_args=True)
        return -made.log_prob(batch[:, 0]).mean()

    model = nn.Linear(4, 2)
    job = Job(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 4))
    assert not prove_split(job, gpu).whole_because
