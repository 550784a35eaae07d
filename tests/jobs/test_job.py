"""What a Job takes, and what it refuses."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.errors import BadInput, OomphError, UnknownName
from oomph.jobs.job import (
    Job,
    batch_size,
    build_model,
    check_count,
    compute_loss,
    make_batch,
    make_optimizer,
    repeated_blocks,
    split_batch,
)
from oomph.jobs.sources import job_from_name
from oomph.rehearsal.estimation import estimate

ROWS = torch.ones(4, 2)


def job(**changes: Any) -> Job:
    given = {"model": nn.Linear(2, 3), "loss": None, "optimizer": "adamw", "batch": ROWS}
    return Job(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch": -1}, "at least one sample, not -1"),
        ({"micro_batch": 0}, "at least one sample, not 0"),
        ({"checkpointing": "some"}, "none or full"),
        ({"model": 3}, "nn.Module or a function"),
        ({"batch": None}, "needs a sample batch"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        job(**changes)


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"precision": "bf16mixed"}, "bf16-mixed"),
        ({"optimizer": "adamww"}, "adamw"),
        ({"optimizer": "sgd-momentun"}, "sgd-momentum"),
        ({"optimizer": "AdamW-Fusd"}, "adamw-fused"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(changes: dict[str, Any], near: str) -> None:
    with pytest.raises(UnknownName, match=near) as caught:
        job(**changes)
    assert near in caught.value.near


@pytest.mark.parametrize("name", ["adamw-momentum", "rprop-fused", "sgd-fused-momentum"])
def test_a_variant_that_an_optimizer_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(UnknownName, match=name):
        make_optimizer(name)


@pytest.mark.parametrize(
    ("name", "cls", "option"),
    [
        ("adamw", torch.optim.AdamW, {}),
        ("AdamW", torch.optim.AdamW, {}),
        ("adam-fused", torch.optim.Adam, {"fused": True}),
        ("sgd-momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("adafactor", torch.optim.Adafactor, {}),
    ],
)
def test_an_optimizer_is_named_as_its_class(name: str, cls: type, option: dict[str, Any]) -> None:
    optimizer = make_optimizer(name)([nn.Parameter(torch.ones(2))])
    assert type(optimizer) is cls
    assert option.items() <= optimizer.defaults.items()


def test_a_builder_that_returns_no_module_is_refused() -> None:
    with pytest.raises(BadInput, match="returned list"):
        build_model(job(model=list))


@pytest.mark.parametrize(
    ("output", "words"),
    [(torch.ones(2), r"shape \(2,\)"), ("text", "not str"), ((torch.ones(()),), "not tuple")],
)
def test_a_loss_that_is_not_one_number_is_refused(output: Any, words: str) -> None:
    returns = job(loss=lambda model, batch: output)
    with pytest.raises(BadInput, match=words):
        compute_loss(returns, nn.Identity(), ROWS)


def test_the_loss_is_the_models_own_a_criterion_or_a_function() -> None:
    class WithLoss(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return type("Output", (), {"loss": x.sum()})

    assert compute_loss(job(), WithLoss(), ROWS) == 8
    assert compute_loss(job(), WithLoss(), {"x": ROWS}) == 8
    assert compute_loss(job(loss=nn.MSELoss()), nn.Identity(), (ROWS, ROWS - 2)) == 4
    assert compute_loss(job(loss=lambda m, b: m(b).max()), nn.Identity(), ROWS) == 1


@pytest.mark.parametrize("batch", [{}, {"flag": True}, torch.ones(()), []])
def test_a_batch_without_a_batch_dimension_is_refused(batch: Any) -> None:
    with pytest.raises(BadInput, match="no tensor with a batch dimension"):
        batch_size(batch)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BadInput, match="holds no samples"):
        batch_size({"x": torch.ones(0, 4)})


def test_a_batch_is_split_along_its_samples_and_nothing_else() -> None:
    table = torch.ones(7, 3)
    batch = {"x": torch.arange(5), "y": torch.ones(5, 2), "table": table, "scale": 2.0}
    parts = split_batch(batch, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [len(part["y"]) for part in parts] == [2, 2, 1]
    assert all(part["table"] is table and part["scale"] == 2.0 for part in parts)


def test_repeated_blocks_are_the_outermost_lists_of_one_class() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = nn.ModuleDict(
        {"layers": nn.ModuleList([block(), block()]), "head": nn.Sequential(nn.Linear(2, 2))}
    )
    assert repeated_blocks(model) == list(model["layers"])


def test_checkpointing_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(BadInput, match="no repeated blocks"):
        build_model(job(checkpointing="full"))


def test_checkpointing_gives_the_same_gradients() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)))

    gradients = []
    for checkpointing in ("none", "full"):
        model = build_model(job(model=build, checkpointing=checkpointing))
        model(ROWS).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), float("inf"), 1e12])
def test_a_count_that_nobody_can_mean_is_refused(value: float) -> None:
    with pytest.raises(BadInput, match="batch must be a whole number"):
        check_count("batch", value)


def test_every_refusal_is_an_error_of_oomph() -> None:
    assert issubclass(BadInput, OomphError)
    assert issubclass(UnknownName, OomphError)


def test_a_batch_of_numbers_has_the_dtype_of_a_bf16_model() -> None:
    batch = (torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
    job = Job(lambda: nn.Linear(3, 3), nn.CrossEntropyLoss(), batch=batch, precision="bf16")
    images, labels = make_batch(job)
    assert (images.dtype, labels.dtype) == (torch.bfloat16, torch.int64)
    assert batch[0].dtype is torch.float32


def test_a_model_that_transformers_cannot_checkpoint_is_checkpointed_block_by_block() -> None:
    plain, full = (
        estimate(job_from_name("convnext-base", batch=4, checkpointing=how), "h200")
        for how in ("none", "full")
    )
    assert full.peak.allocated < plain.peak.allocated


def test_bf16_autocast_is_refused_on_a_card_without_it() -> None:
    with pytest.raises(BadInput, match="t4 knows no bf16: use fp16-mixed"):
        estimate(job_from_name("gpt2", batch=1, seq=64, precision="bf16-mixed"), "t4")


def test_a_part_that_its_user_set_to_evaluate_stays_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    assert build_model(Job(model, batch=torch.ones(2, 2))) is model
    assert model.training and not model[1].training


def test_a_mapping_of_a_librarys_own_kind_becomes_a_dict() -> None:
    batch = UserDict(x=torch.ones(2, 2))
    made = make_batch(Job(nn.Linear(2, 2), batch=batch))
    assert type(made) is dict and batch_size(made) == 2
