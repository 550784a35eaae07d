"""Values that can be known are known; the rest is assumed in words, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oomph.errors import CannotRehearse
from oomph.hardware import find_gpu
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend

MASK = torch.ones(4, 6, dtype=torch.long)
LENGTHS = torch.tensor([3, 1, 2])
PADDED = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.fixture(params=[None, "h200"])
def device(request: pytest.FixtureRequest) -> str:
    return "cuda" if request.param else "cpu"


@pytest.fixture
def recorder(device: str) -> Iterator[Recorder]:
    with pretend(find_gpu("h200") if device == "cuda" else None) as recorder:
        yield recorder


def test_a_mask_of_ones_is_known_to_hide_nothing(recorder: Recorder, device: str) -> None:
    mask = MASK.to(device)
    assert mask.bool().all()
    assert not (mask == 0).any()
    assert mask.sum().item() == 24
    assert not recorder.values.notes()


def test_a_mask_with_padding_is_known_to_hide_something(recorder: Recorder, device: str) -> None:
    mask = PADDED.to(device)
    assert not mask.bool().all()
    assert mask.sum(dim=1).tolist() == [2, 1]
    assert mask.sum(dim=1).max().item() == 2
    assert not recorder.values.notes()


def test_shapes_that_hang_on_known_values_are_true(recorder: Recorder, device: str) -> None:
    mask = PADDED.to(device)
    assert mask.nonzero().shape == (3, 2)
    assert torch.zeros(2, 3, device=device)[mask.bool()].shape == (3,)
    assert torch.masked_select(torch.zeros(2, 3, device=device), mask.bool()).shape == (3,)
    assert torch.unique(mask).shape == (2,)
    assert torch.repeat_interleave(LENGTHS.to(device)).shape == (6,)
    assert not recorder.values.notes()


def test_what_is_written_to_a_copy_does_not_reach_what_was_copied(
    recorder: Recorder, device: str
) -> None:
    zeros = torch.zeros(3, device=device)
    for copied in (zeros.clone(), zeros.to(torch.float64), zeros + 0):
        copied.add_(1)
        assert copied.sum().item() == 3
    assert zeros.sum().item() == 0
    torch.ops.aten._unsafe_view(LENGTHS, [3, 1]).add_(1)
    assert LENGTHS.to(device).tolist() == [3, 1, 2]


def test_views_of_known_values_are_known(recorder: Recorder, device: str) -> None:
    lengths = LENGTHS.to(device)
    assert lengths[1:].sum().item() == 3
    assert lengths[:1].item() == 3
    assert LENGTHS[2:].item() == 2
    assert LENGTHS[:2].sum().item() == 4
    assert lengths.expand(5, 3).sum().item() == 30
    assert lengths.view(3, 1).t().tolist() == [[3, 1, 2]]
    assert not recorder.values.notes()


def test_values_written_in_place_are_followed(recorder: Recorder, device: str) -> None:
    lengths = LENGTHS.to(device).clone()
    lengths[0] = 7
    lengths += 1
    assert lengths.tolist() == [8, 2, 3]
    lengths.copy_(torch.randn(3, device=device))
    lengths[0].item()
    assert recorder.values.notes(), "what is drawn at random is not known"


def test_unknown_numbers_are_assumed_in_words(recorder: Recorder, device: str) -> None:
    loss = torch.randn(8, 8, device=device).mean()
    assert loss.item() == 1.0
    assert float(loss) == 1.0
    (note,) = recorder.values.notes()[:1]
    assert "test_values.py" in note
    assert "was taken to be 1.0" in note


def test_unknown_numbers_are_taken_to_be_finite(recorder: Recorder, device: str) -> None:
    x = torch.randn(8, 8, device=device)
    assert not torch.isnan(x).any()
    assert torch.isfinite(x).all()
    assert not torch.any(x < 0)
    assert not torch.isnan(x.mean())
    assert len(recorder.values.notes()) == 4


def test_an_unknown_selection_takes_everything(recorder: Recorder, device: str) -> None:
    x = torch.randn(8, 8, device=device)
    assert (x > 0).nonzero().shape == (64, 2)
    assert torch.masked_select(x, x > 0).shape == (64,)
    assert x[x > 0].shape == (64,)
    assert x[:, x[0] > 0].shape == (8, 8)
    assert x[x[0] > 0, torch.arange(8, device=device)].shape == (8,)
    assert any("select everything" in note for note in recorder.values.notes())


def test_what_an_unknown_mask_chooses_is_written_and_has_gradients(
    recorder: Recorder, device: str
) -> None:
    """As the overlap of boxes is computed where there is any."""
    x = torch.randn(8, device=device, requires_grad=True)
    overlap, mask = torch.zeros_like(x), x > 0
    overlap[mask] = x[mask] * 2
    overlap.sum().backward()
    assert x.grad is not None and x.grad.shape == (8,)


@pytest.mark.parametrize(
    ("compare", "answer"),
    [
        (lambda drawn: drawn > 0.1, True),
        (lambda drawn: drawn < 0.1, False),
        (lambda drawn: drawn >= torch.tensor(0.9), True),
        (lambda drawn: drawn < 0.5, False),
        (lambda drawn: drawn * 2 > 0.1, False),  # nothing is known of what is computed from it
    ],
)
def test_a_branch_by_a_drawn_number_is_taken_as_if_the_largest_was_drawn(
    recorder: Recorder, device: str, compare: Any, answer: bool
) -> None:
    """As adapters leave themselves out at a rate, which is usually zero."""
    assert bool(compare(torch.rand(1, device=device))) is answer


@pytest.mark.parametrize(
    ("draw", "largest"),
    [
        (lambda on: torch.empty(1, device=on).uniform_(0.0, 1.0), 0),
        (lambda on: torch.empty(1, device=on).uniform_(0.0, 3.0), 2),
        (lambda on: torch.rand(2, device=on)[1], 0),
        (lambda on: torch.rand((), device=on, generator=torch.Generator(on)), 0),
        (lambda on: torch.randint(1, (1,), device=on), 0),
        (lambda on: torch.randint(2, 5, (3,), device=on)[0], 4),
        (lambda on: torch.empty(1, dtype=torch.long, device=on).random_(2, 9), 8),
        (lambda on: torch.randperm(6, device=on)[:2][1], 5),
    ],
)
def test_a_number_that_is_drawn_is_one_that_can_be(
    recorder: Recorder, device: str, draw: Any, largest: int
) -> None:
    """As detectors choose the size of an image among those in a list, which may have just one."""
    drawn = draw(device)
    assert int(drawn.item()) == largest
    assert any("drawn at random" in note for note in recorder.values.notes())
    drawn.mul_(0)
    assert drawn.item() == 1, "it is no number that was drawn any more"


def test_boxes_that_overlap_less_than_others_are_at_most_all_of_them(
    recorder: Recorder, device: str
) -> None:
    library = None
    if not hasattr(torch.ops.torchvision, "nms"):  # torchvision, which brings it, is not there
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    boxes, scores = torch.rand(5, 4, device=device), torch.rand(5, device=device)
    kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
    assert kept.dtype is torch.int64 and boxes[kept].shape == (5, 4)
    assert any("nms" in note for note in recorder.values.notes())
    del library


def test_a_known_mask_selects_so_much_of_what_is_not_known(recorder: Recorder, device: str) -> None:
    x, mask = torch.randn(2, 3, 5, device=device), PADDED.bool().to(device)
    assert x[mask].shape == (3, 5)
    assert x.transpose(0, 2)[:, mask.t()].shape == (5, 3)
    assert not recorder.values.notes()


def test_gradients_of_what_is_written_where_a_mask_says_are_known(
    recorder: Recorder, device: str
) -> None:
    """As speech models hide some of their frames in training."""
    hidden = torch.randn(2, 3, 5, device=device, requires_grad=True)
    embedding = torch.randn(5, device=device, requires_grad=True)
    frames = hidden * 1
    frames[PADDED.bool().to(device)] = embedding
    frames.sum().backward()
    assert hidden.grad is not None and embedding.grad is not None
    assert embedding.grad.shape == (5,)


def test_an_unknown_branch_is_refused_with_its_line(recorder: Recorder, device: str) -> None:
    x = torch.randn(8, 8, device=device)
    with pytest.raises(CannotRehearse, match=r"test_values\.py:\d+ branches on a value"):
        bool(torch.logical_xor(x > 0, x > 1)[0, 0])


def test_unknown_numbers_are_counted_in_as_many_bins_as_were_asked_for(
    recorder: Recorder, device: str
) -> None:
    x = torch.randn(8, 8, device=device)
    found = x.argmax(1)
    assert torch.bincount(found, minlength=8).shape == (8,)
    assert torch.bincount(found, minlength=8).dtype is torch.int64
    assert torch.bincount(found, x[0], 8).dtype is torch.float32
    assert torch.bincount(found, weights=found, minlength=9).dtype is torch.float64
    assert any("no number above 7" in note for note in recorder.values.notes())
    with pytest.raises(CannotRehearse, match=r"bincount at test_values\.py:\d+"):
        torch.bincount(found)


def test_derivatives_that_are_zero_are_followed_in_forward_mode(
    recorder: Recorder, device: str
) -> None:
    norm = torch.nn.LayerNorm(4, device=device)
    x = torch.ones(2, 4, device=device)
    out, tangent = torch.func.jvp(norm, (x,), (torch.ones_like(x),))
    assert out.shape == tangent.shape == (2, 4)
    assert torch.zeros(3, device=device).sum().item() == 0


def test_an_unknown_shape_is_refused_with_its_op_and_line(recorder: Recorder, device: str) -> None:
    x = torch.randn(8, 8, device=device)
    with pytest.raises(CannotRehearse, match=r"unique2 at test_values\.py:\d+"):
        x.unique()


def test_a_loop_that_waits_for_a_value_is_refused(
    recorder: Recorder, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.rehearsal.values.MOST_TRUTHS", 100)
    x = torch.randn(8, 8, device=device)
    with pytest.raises(CannotRehearse, match="seems to wait"):
        while not x.mean() > 0:
            x = x + 1


def test_a_mask_of_floats_is_followed(recorder: Recorder, device: str) -> None:
    mask = torch.ones(4, 64, device=device)
    assert bool((mask == 1).all())
    assert recorder.values.notes() == []


def test_a_known_operand_decides_where_the_other_is_unknown(
    recorder: Recorder, device: str
) -> None:
    unknown = torch.rand(8, device=device) > 0.5
    assert bool((unknown | torch.ones(8, dtype=torch.bool, device=device)).all())
    assert not bool((unknown & torch.zeros(8, dtype=torch.bool, device=device)).any())
    assert recorder.values.notes() == []


def test_large_tensors_and_weights_are_not_followed(recorder: Recorder, device: str) -> None:
    weights = torch.ones((1 << 16) + 1, device=device)
    large = torch.zeros((1 << 20) + 1, dtype=torch.int64, device=device)
    assert recorder.values.of(weights) is None
    assert recorder.values.of(large) is None


def test_what_an_optimizer_reads_is_said_to_be_read_by_torch() -> None:
    from oomph.jobs.job import Job
    from oomph.rehearsal.phases import rehearse

    job = Job(
        lambda: torch.nn.Linear(8, 8),
        lambda model, batch: model(batch).sum(),
        "adafactor",
        lambda: torch.randn(4, 8),
    )
    notes = rehearse(job, find_gpu("h200")).notes
    assert notes
    assert all("torch/optim/_adafactor.py" in note for note in notes)


def test_what_is_known_of_a_tensor_goes_with_it(recorder: Recorder, device: str) -> None:
    before = len(recorder.values._contents)
    for _ in range(20):
        known = torch.tensor([3, 1, 2], device=device)
        assert recorder.values.of(known) is not None
        assert len(recorder.values._contents) > before
        del known
    assert len(recorder.values._contents) == before
