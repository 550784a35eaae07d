"""Packed sequences in a rehearsal: as many rows as the lengths say, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_truth import measure, predict
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.world import pretend

LENGTHS = (9, 7, 7, 3, 1)


class Packed(nn.Module):
    """A recurrent layer over packed sequences, and its output padded again."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 5, 2, batch_first=True, **options)
        self.options: dict[str, Any] = {}

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.rnn(packed)
        padded, long = pad_packed_sequence(out, batch_first=True, total_length=11)
        assert long.tolist() == lengths.tolist()
        last = state[0] if isinstance(state, tuple) else state
        return padded.square().mean() + last.square().mean()


def job_of(kind: Any, *lengths: int, **options: Any) -> Job:
    batch = torch.randn(len(lengths), max(lengths), 6), torch.tensor(lengths)
    return Job(lambda: Packed(kind, **options), lambda model, b: model(*b), "sgd", batch)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_are_rehearsed_to_the_byte(kind: Any, bidirectional: bool) -> None:
    job = job_of(kind, 1, *LENGTHS, bidirectional=bidirectional)
    predicted, measured = predict(job), measure(job)
    assert predicted.alive == measured.tensors.alive
    assert predicted.peaks == measured.tensors.peaks


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_on_a_gpu_a_packed_layer_takes_memory_by_its_steps(kind: Any) -> None:
    def reserve(job: Job) -> int:
        timeline = rehearse(job, find_gpu("H200"), ("step",))
        made = [b.size for _, b, born in timeline.stream_of_events() if born and "rnn" in b.op]
        return sum(made)

    few, many = reserve(job_of(kind, *LENGTHS)), reserve(job_of(kind, 9, 9, 9, 9, 9))
    assert few < many < 2 * few


class Copies(TorchDispatchMode):
    """Notes the sizes of what is copied into other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("lengths", "sizes"), [((5, 3, 3), [18, 4]), ((4, 4), [16]), ((1,), [2]), ((3, 2), [8, 2])]
)
def test_each_run_of_equal_batch_sizes_is_copied_once(
    lengths: tuple[int, ...], sizes: list[int]
) -> None:
    with pretend(find_gpu("h200")):
        x = torch.ones(len(lengths), max(lengths), 2, device="cuda")
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
        with Copies() as copies:
            padded, _ = pad_packed_sequence(packed, batch_first=True)
        assert padded.shape == x.shape
        assert copies.sizes == sizes


def test_lengths_that_nobody_knows_are_taken_for_the_longest() -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(3, 8, 6), torch.rand(3).mul(8).long() + 1

    def loss(model: Any, given: Any) -> Any:
        x, lengths = given
        out, _ = model(pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False))
        assert out.data.shape[0] == 3 * 8
        return out.data.square().mean()

    timeline = rehearse(Job(lambda: nn.GRU(6, 5), loss, "sgd", batch), None)
    assert any("packed" in note for note in timeline.notes)
