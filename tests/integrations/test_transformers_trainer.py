"""The Trainer of transformers under a plan has the losses and weights of the plain Trainer."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ragged_text import (
    BLOCKS,
    VOCABULARY,
    Ragged,
    assert_plain,
    assert_same_weights,
    tiny_llama,
)
from switched_on import on
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import oomph
from oomph.errors import BadInput, DoesNotFit, MissingExtra
from oomph.integrations.transformers import (
    OomphMixin,
    OomphTrainer,
    arguments_diff,
    plain_arguments,
)
from oomph.plans.choices import Choices

BATCH = 8


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**given, **settings})


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_both(
    folder: Path, make_model: Any = tiny_llama, options: Any = None, **settings: Any
) -> tuple[Trainer, OomphTrainer]:
    """The same training, plain and under the plan."""
    given = {"train_dataset": Ragged(), **(options or {})}
    plain = Trainer(make_model(), arguments(folder, **settings), **given)
    plain.train()
    planned = OomphTrainer(
        make_model(), arguments(folder, **settings), budget="64MiB", say=lambda _: None, **given
    )
    planned.train()
    return plain, planned


def assert_same_training(plain: Trainer, planned: Trainer, tolerance: float = 1e-4) -> None:
    assert losses(planned) == pytest.approx(losses(plain), rel=tolerance)
    assert_same_weights(planned.model, plain.model, tolerance)


LEAN = {
    "micro_batch": 3,
    "blocks": dict.fromkeys(BLOCKS, "recompute"),
    "head": "lm_head",
    "loss_chunk": 7,
}


def test_a_plan_is_found_within_the_budget_and_trains_as_the_plain_trainer_does(
    tmp_path: Path, said: Any
) -> None:
    plain = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=Ragged())
    plain.train()
    planned = OomphTrainer(
        tiny_llama(), arguments(tmp_path), train_dataset=Ragged(), budget="3MiB", say=said
    )
    planned.train()
    plan = planned.plan
    assert plan is not None
    assert plan.choices.micro_batch is not None
    assert plan.predicted.peak.device <= plan.budget == 3 << 20
    assert "LlamaForCausalLM in 3.00 MiB on the CPU" in said[0]
    assert "per_device_train_batch_size: 8 →" in said[1]
    assert len(losses(planned)) == 3
    assert_same_training(plain, planned)
    assert planned.args.per_device_train_batch_size == BATCH
    # Plain arguments made of the plan do the same.
    split = plain_arguments(plan, planned.args, said)
    assert split.per_device_train_batch_size == plan.choices.micro_batch
    alike = Trainer(tiny_llama(), split, train_dataset=Ragged())
    alike.train()
    assert_same_training(plain, alike)


def test_parts_with_few_or_no_labels_add_up_to_the_batch(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    assert_same_training(*train_both(tmp_path))


def test_accumulated_batches_keep_their_size(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    plain, planned = train_both(tmp_path, gradient_accumulation_steps=2)
    assert len(losses(planned)) == 2
    assert_same_training(plain, planned)


class Classifier(nn.Module):
    """Averages over the samples it is given; knows nothing of the number of items."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden).relu()
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss}


class DeafClassifier(Classifier):
    """Takes the number of items, and does not use it."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("make_model", [Classifier, DeafClassifier])
def test_a_model_that_averages_by_itself_has_no_mean_of_means(
    tmp_path: Path, give: Any, make_model: Any
) -> None:
    give(micro_batch=3)
    assert_same_training(*train_both(tmp_path, make_model))


def test_a_loss_function_of_the_users_is_summed_over_the_parts(tmp_path: Path, give: Any) -> None:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits.float(), labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    give(**LEAN)
    assert_same_training(*train_both(tmp_path, options={"compute_loss_func": summed}))


def test_label_smoothing_is_the_trainers_own(tmp_path: Path, give: Any) -> None:
    give(micro_batch=3, blocks=dict.fromkeys(BLOCKS, "recompute"))
    assert_same_training(*train_both(tmp_path, label_smoothing_factor=0.1))


def test_bf16_stays_the_trainers_own(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    assert_same_training(*train_both(tmp_path, bf16=True), tolerance=2e-2)


class MaskedTrainer(Trainer):
    """Divides by what a mask counts: alike in all samples of the first batch, not in others."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        logits = model(**inputs)["logits"]
        mask = (inputs["labels"] >= 0).to(logits.dtype)
        each = (logits.mean(-1) - inputs["input_ids"]).square()
        loss: Tensor = (each * mask).sum() / mask.sum()
        return loss


class PlannedMaskedTrainer(OomphMixin, MaskedTrainer):
    """The same under a plan."""


def test_what_a_loss_counts_is_counted_in_the_whole_batch(tmp_path: Path, give: Any) -> None:
    give(**{**LEAN, "loss_chunk": None, "head": ""})
    data = Ragged()
    data.labels[:BATCH] = data.labels[:BATCH].abs()  # the first batch has no padding
    found = []
    for kind, options in (
        (MaskedTrainer, {}),
        (PlannedMaskedTrainer, {"budget": "64MiB", "say": lambda _: None}),
    ):
        args = arguments(tmp_path, seed=3, data_seed=3)
        one = kind(tiny_llama(), args, train_dataset=data, **options)
        one.train()
        found.append(one)
    assert_same_training(*found)


class Contrast(Classifier):
    """Its loss compares the samples of a batch with each other."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids).mean(1)
        return {"loss": (hidden @ hidden.T).logsumexp(-1).mean()}


def test_a_loss_that_parts_do_not_add_up_to_is_refused(tmp_path: Path, give: Any) -> None:
    give(micro_batch=3)
    with pytest.raises(
        BadInput, match="the loss mixes samples: mm multiplies each sample with others"
    ):
        train_both(tmp_path, Contrast)


def test_longer_batches_than_were_planned_for_are_split_into_more_parts(
    tmp_path: Path, give: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(micro_batch=4)
    sizes: list[tuple[int, ...]] = []
    run = Classifier.forward

    def note(model: Classifier, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if torch.is_grad_enabled():
            sizes.append(tuple(input_ids.shape))
        return run(model, input_ids, labels)

    short = Ragged(length=8)
    sample = {"input_ids": short.tokens[:BATCH], "labels": short.labels[:BATCH]}
    trainer = OomphTrainer(
        Classifier(),
        arguments(tmp_path, max_steps=1),
        train_dataset=Ragged(),
        budget="64MiB",
        batch=sample,
    )
    fit = trainer._fit

    def fit_and_watch() -> None:
        fit()  # a forward that notes something keeps its batch whole
        monkeypatch.setattr(Classifier, "forward", note)

    monkeypatch.setattr(trainer, "_fit", fit_and_watch)
    trainer.train()
    assert sizes == [(2, 16)] * 4


def test_checkpoints_on_the_way_are_plain_and_any_trainer_goes_on_from_them(
    tmp_path: Path, give: Any, said: Any
) -> None:
    give(**LEAN, techniques=on("fused_optimizer"))
    settings = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    plain, _ = train_both(tmp_path / "both", **settings)
    checkpoint = tmp_path / "both" / "checkpoint-2"
    assert_same_weights(LlamaForCausalLM.from_pretrained(checkpoint), tiny_llama(), tolerance=1)
    groups = torch.load(checkpoint / "optimizer.pt", weights_only=True)["param_groups"]
    assert not any(group["fused"] for group in groups)
    for kind, more in ((Trainer, {}), (OomphTrainer, {"budget": "64MiB", "say": said})):
        args = arguments(tmp_path / "more", **settings)
        resumed = kind(tiny_llama(), args, train_dataset=Ragged(), **more)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_same_weights(resumed.model, plain.model)


def test_the_model_is_plain_after_training(tmp_path: Path, give: Any) -> None:
    give(**LEAN, techniques=on("fused_optimizer"))
    _, planned = train_both(tmp_path, optim="adamw_torch")
    assert_plain(planned.model)
    planned.save_model(str(tmp_path / "saved"))
    assert_same_weights(LlamaForCausalLM.from_pretrained(tmp_path / "saved"), planned.model)


def test_an_error_in_training_leaves_the_model_plain_and_is_explained(
    tmp_path: Path, give: Any
) -> None:
    give(**LEAN)

    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no more")

    model = tiny_llama()
    trainer = OomphTrainer(
        model, arguments(tmp_path), train_dataset=Ragged(), budget="64MiB", callbacks=[Fails()]
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert caught.value.__notes__[0].startswith("oomph: ")
    assert_plain(model)


def test_evaluation_on_the_way_sees_the_plain_models_numbers(tmp_path: Path, give: Any) -> None:
    give(**LEAN)

    def accuracy(found: Any) -> dict[str, float]:
        return {"mean": float(found.predictions.mean())}

    options = {"eval_dataset": Ragged(5), "compute_metrics": accuracy}
    plain, planned = train_both(tmp_path, options=options, eval_strategy="steps", eval_steps=2)

    def measured(trainer: Trainer) -> list[float]:
        entries = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        return [entry[name] for entry in entries for name in ("eval_loss", "eval_mean")]

    assert len(measured(plain)) >= 2
    assert measured(planned) == pytest.approx(measured(plain), rel=1e-3)


def test_predicted_memory_is_logged_with_each_loss(
    tmp_path: Path, give: Any, some_plan: Any
) -> None:
    give(**LEAN)
    _, planned = train_both(tmp_path)
    entries = [entry for entry in planned.state.log_history if "loss" in entry]
    expected = some_plan.predicted.peak.allocated / 2**30
    assert [entry["peak_gib_predicted"] for entry in entries] == [expected] * 3
    assert all("peak_gib_measured" not in entry for entry in entries)  # the CPU does not measure


def test_gradient_checkpointing_of_the_model_is_put_aside_and_comes_back(
    tmp_path: Path, give: Any
) -> None:
    give(**LEAN)
    asked: list[bool] = []

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            asked.append(model.is_gradient_checkpointing)

    plain, planned = train_both(
        tmp_path, options={"callbacks": [Look()]}, gradient_checkpointing=True
    )
    assert asked == [True] * 3 + [False] * 3
    assert planned.model.is_gradient_checkpointing
    assert_same_training(plain, planned)


def test_what_is_not_planned_for_is_refused_or_trained_as_it_is(tmp_path: Path, said: Any) -> None:
    given = {"train_dataset": Ragged(), "budget": "1KiB", "say": said}
    compiled = arguments(tmp_path, torch_compile=True)
    with pytest.raises(BadInput, match="torch_compile compiles the whole model"):
        OomphTrainer(Classifier(), compiled, **given).train()
    with pytest.raises(DoesNotFit, match=r"oomph\.fit has more ways"):
        OomphTrainer(Classifier(), arguments(tmp_path), **given).train()
    trainer = OomphTrainer(Classifier(), arguments(tmp_path), unplanned=True, **given)
    trainer.train()
    assert said == [said[0]]
    assert said[0].startswith("training goes on without a plan: no plan fits 1.00 KiB")
    assert len(losses(trainer)) == 3


def test_a_budget_that_cannot_be_meant_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        OomphTrainer(tiny_llama(), arguments(tmp_path), budget="-1GiB")


def test_a_dataset_that_can_only_be_iterated_over_needs_a_batch(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from Ragged()

    trainer = OomphTrainer(
        tiny_llama(), arguments(tmp_path, max_steps=1), train_dataset=Stream(), budget="64MiB"
    )
    with pytest.raises(BadInput, match="as batch="):
        trainer.train()


class Noting(Trainer):
    """Keeps a note of each loss, as TRL's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.notes: dict[str, list[float]] = {"losses": []}
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs)
        self.notes["losses"].append(loss.item())
        return loss


class PlannedNoting(OomphMixin, Noting):
    """That one inside a budget."""


@pytest.mark.parametrize("parts", [1, 3])
def test_the_mixin_fits_a_trainer_with_a_loss_of_its_own(
    tmp_path: Path, give: Any, parts: int
) -> None:
    if parts > 1:
        give(micro_batch=3)
    plain = Noting(Classifier(), arguments(tmp_path), train_dataset=Ragged())
    plain.train()
    planned = PlannedNoting(
        Classifier(),
        arguments(tmp_path),
        train_dataset=Ragged(),
        budget="64MiB",
        say=lambda _: None,
    )
    planned.train()
    # None is of a rehearsal or a trial; the last batch has but five samples.
    assert len(planned.notes["losses"]) == (3 if parts == 1 else 3 + 3 + 2)
    assert_same_training(plain, planned)


# -- plain arguments -------------------------------------------------------------------------------


def with_choices(plan: oomph.Plan, **choices: Any) -> oomph.Plan:
    return dataclasses.replace(plan, choices=Choices(**choices))


def test_plain_arguments_keep_the_global_batch_and_say_what_they_cannot(
    tmp_path: Path, some_plan: Any, said: Any
) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=3, optim="adamw_torch")
    blocks = {"a": "recompute", "b": "keep"}
    plan = with_choices(
        some_plan,
        micro_batch=5,
        blocks=blocks,
        head="lm_head",
        loss_chunk=64,
        precision="bf16-mixed",
        techniques=on("fused_optimizer", cuda_allocator={"conf": "expandable_segments:True"}),
    )
    plain = plain_arguments(plan, args, said)
    assert plain.per_device_train_batch_size * plain.gradient_accumulation_steps == 24
    assert plain.per_device_train_batch_size == 4  # the most that divides it
    assert plain.gradient_checkpointing
    assert plain.bf16
    assert plain.optim == "adamw_torch_fused"
    assert not args.gradient_checkpointing
    (words,) = said
    for part in ("recomputing 1 of 2 blocks", "64 rows of logits", "expandable_segments:True"):
        assert f"no argument for: {part}" in words or part in words


def test_a_plan_can_be_made_without_training(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    planner = OomphTrainer(Classifier(), args, train_dataset=Ragged(), budget="1600KiB")
    plan = planner.make_plan()
    assert plan is planner.plan
    assert plan.choices.micro_batch is not None
    assert planner.optimizer is None
    assert_same_weights(planner.model, Classifier(), tolerance=0)
    assert_plain(planner.model)


def test_arguments_that_do_what_the_plan_does_may_stay(tmp_path: Path, some_plan: Any) -> None:
    diff = arguments_diff(with_choices(some_plan), arguments(tmp_path))
    assert str(diff) == "the arguments may stay as they are"
    compiled = arguments_diff(with_choices(some_plan, compiled=True), arguments(tmp_path))
    assert compiled.changes == {"torch_compile": (False, True)}


# -- without the library ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "extra"),
    [("transformers", "hf"), ("lightning", "lightning"), ("accelerate", "accelerate")],
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, library: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    module = f"oomph.integrations.{library}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'oomph\[{extra}\]'"):
        importlib.import_module(module)


class Clamping(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-4, 1e-4)
        return loss


class PlannedClamping(OomphMixin, Clamping):
    """A step that somebody wrote, and would run once for each part."""


def test_a_training_step_of_ones_own_has_its_batch_whole(tmp_path: Path, give: Any) -> None:
    trained = []
    for kind, options in ((Clamping, {}), (PlannedClamping, {"say": lambda _: None})):
        given = arguments(tmp_path, optim="sgd", learning_rate=1.0)
        if options:
            give(micro_batch=3)
            with pytest.raises(BadInput, match="training_step of its own"):
                kind(tiny_llama(), given, train_dataset=Ragged(), **options).train()
            give(blocks=dict.fromkeys(BLOCKS, "recompute"))
        trainer = kind(tiny_llama(), given, train_dataset=Ragged(), **options)
        trainer.train()
        trained.append(trainer)
    assert_same_training(*trained)


class Centring(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        if self.state.global_step:
            logits = logits - logits.mean(0)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlannedCentring(OomphMixin, Centring):
    """A loss that compares samples from the second step on."""


def test_a_loss_that_compares_samples_later_is_refused_then(tmp_path: Path, give: Any) -> None:
    give(micro_batch=3)
    trainer = PlannedCentring(
        tiny_llama(), arguments(tmp_path), train_dataset=Ragged(), say=lambda _: None
    )
    with pytest.raises(BadInput, match=r"weigh micro-batches|must not be split"):
        trainer.train()
    assert_plain(trainer.model)
