"""What a model is trained on: a factory's loader, or random numbers in the sample's shapes."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from oomph.errors import BadInput
from oomph.jobs.job import make_batch
from oomph.jobs.sources import default_shape, job_from, job_from_factory, job_to_train

FACTORY = """
import torch, oomph
from torch import nn

def job():
    return oomph.Job(nn.Linear(2, 2), nn.MSELoss(), "sgd", (torch.ones(3, 2), torch.ones(3, 2)))

def loaded():
    return job(), [1, 2, 3]

def no_loader():
    return job(), 3
"""


@pytest.fixture
def file(tmp_path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(FACTORY)
    return str(file)


def test_a_factory_may_return_a_loader_beside_its_job(file) -> None:
    job, loader = job_to_train(f"{file}:loaded", precision="bf16-mixed")
    assert loader == [1, 2, 3]
    assert job.precision == "bf16-mixed"
    assert job_to_train(f"{file}:job")[1] is None


def test_where_only_the_job_is_asked_for_the_loader_is_left(file) -> None:
    assert job_from_factory(f"{file}:loaded").name == "model"
    assert job_from(f"{file}:loaded", precision="bf16").precision == "bf16"


def test_a_loader_that_cannot_be_iterated_is_refused(file) -> None:
    with pytest.raises(BadInput, match="returned a job and int, which is no iterable of batches"):
        job_to_train(f"{file}:no_loader")


def test_a_language_model_is_trained_on_random_tokens_of_its_vocabulary(tmp_path) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job, batches = job_to_train(str(tmp_path), batch=4, seq=64)
    first, second = itertools.islice(batches, 2)
    assert first["input_ids"].shape == first["labels"].shape == (4, 64)
    assert set(first["input_ids"].flatten().tolist()) == {0, 1, 2, 3, 4}
    assert not torch.equal(first["input_ids"], second["input_ids"])
    again, _ = itertools.islice(job_to_train(str(tmp_path), batch=4, seq=64)[1], 2)
    assert torch.equal(first["input_ids"], again["input_ids"])
    weights = job.model().transformer.h[0].attn.c_attn.weight
    assert 0.01 < weights.std() < 0.03  # as GPT-2 is initialised


def test_an_image_model_is_trained_on_noise_and_keeps_its_labels() -> None:
    _, batches = job_to_train("resnet-50", batch=2, seq=32)
    images = next(iter(batches))
    assert 0.9 < images["pixel_values"].std() < 1.1
    assert images["labels"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"model_type": "beit", "architectures": ["BeitForImageClassification"]}, 224),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 96},
            96,
        ),
        ({"model_type": "regnet", "architectures": ["RegNetForImageClassification"]}, 224),
        ({"model_type": "hubert", "architectures": ["HubertForCTC"]}, 160_000),
        ({"model_type": "gpt2", "n_positions": 128}, 128),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, 510),
        ({"model_type": "llama"}, 512),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_where_no_length_is_given_a_config_gets_one_that_its_model_takes(
    config: dict, length: int, tmp_path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert default_shape(str(tmp_path)) == {"batch": 1, "seq": length}
    batch = make_batch(job_from(str(tmp_path)))
    assert max(batch[name].shape[-1] for name in batch if name != "labels") == length
