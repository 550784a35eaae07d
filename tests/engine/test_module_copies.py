"""A model with a plan applied is copied with its true weights, and not pickled with the plan."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from interrupted_runs import CHOICES, Started
from torch import nn

from oomph.errors import BadInput


def stepped(name: str) -> tuple[Started, nn.Module]:
    """A run after a step, and its model as the user has it: nobody asked the run for it."""
    started = Started.with_choices(name)
    started.run.step(started.batches[0])
    return started, started.run._stage.model


@pytest.mark.parametrize("name", CHOICES)
def test_a_deep_copy_has_the_weights_of_the_last_step(name: str) -> None:
    started, model = stepped(name)
    x, target = started.batches[1]
    copied = copy.deepcopy(model).eval()
    other, _ = stepped(name)
    expected = {key: value.clone() for key, value in other.run.model.state_dict().items()}
    for key, value in copied.state_dict().items():
        assert torch.equal(value, expected[key]), key
    (copied(x) - target).square().mean().backward()
    started.run.step(started.batches[1])
    for key, value in copied.state_dict().items():
        if key != "mean":  # which its own forward moved
            assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", CHOICES)
def test_a_pickle_is_refused_in_words_until_the_run_is_undone(name: str) -> None:
    started, model = stepped(name)
    for attempt in (
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save({"model": model}, io.BytesIO()),
        lambda: pickle.dumps(copy.deepcopy(model)),
    ):
        with pytest.raises(BadInput, match=r"save its state_dict\(\), use run.save, or undo"):
            attempt()
    torch.save(started.run.model.state_dict(), io.BytesIO())
    started.run.step(started.batches[1])
    started.run.undo()
    assert "__reduce_ex__" not in vars(model)
    again = pickle.loads(pickle.dumps(model))
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
