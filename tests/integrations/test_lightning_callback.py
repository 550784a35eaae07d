"""Lightning under a plan has the losses, logs and weights of plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from ragged_text import LENGTH, VOCABULARY, Ragged, assert_plain, assert_same_weights
from switched_on import on
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oomph
from oomph.errors import BadInput
from oomph.integrations.lightning import OomphCallback, largest_batch

BATCH = 8
WIDTH = 8


class Network(L.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options = options
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        tokens, labels = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden).relu()
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"size": float(len(tokens) > 0)}, batch_size=len(tokens))
        return {"loss": loss, "tokens": tokens} if self.options.get("as_dict") else loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader(**options: Any) -> DataLoader[Any]:
    data = Ragged()
    return DataLoader(TensorDataset(data.tokens, data.labels), BATCH, **options)


def trainer_in(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    given = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "callbacks": list(callbacks),
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(**{**given, **settings})


def callback(budget: str = "64MiB", **options: Any) -> OomphCallback:
    return OomphCallback(budget, **{"say": lambda _: None, **options})


def train_both(
    folder: Path, make_module: Any = Network, **settings: Any
) -> tuple[L.Trainer, L.Trainer]:
    plain = trainer_in(folder / "plain", **settings)
    plain.fit(make_module(), loader())
    planned = trainer_in(folder / "planned", callback(), **settings)
    planned.fit(make_module(), loader())
    return plain, planned


def assert_same_training(plain: L.Trainer, planned: L.Trainer, tolerance: float = 1e-4) -> None:
    before, after = plain.lightning_module, planned.lightning_module
    assert isinstance(before, Network) and isinstance(after, Network)
    assert len(after.seen) == 6
    assert after.seen == pytest.approx(before.seen, rel=tolerance)
    assert plain.global_step == planned.global_step
    assert_same_weights(after, before, tolerance)
    for name, value in plain.callback_metrics.items():
        assert float(planned.callback_metrics[name]) == pytest.approx(float(value), rel=tolerance)


LEAN = {
    "micro_batch": 3,
    "blocks": dict.fromkeys(("blocks.0", "blocks.1"), "recompute"),
    "head": "head",
    "loss_chunk": 7,
    "techniques": on("fused_optimizer"),
}


def test_a_plan_is_found_within_the_budget_and_trains_as_plain_lightning_does(
    tmp_path: Path, said: Any
) -> None:
    plain = trainer_in(tmp_path)
    plain.fit(Network(), loader())
    planned = trainer_in(tmp_path, OomphCallback("1600KiB", say=said))
    planned.fit(Network(), loader())
    assert said[0].startswith("Network in 1.56 MiB on the CPU")
    assert "micro-batch" in said[0]
    assert_same_training(plain, planned)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}],
    ids=["one batch a step", "two batches a step", "clipped"],
)
def test_parts_of_a_batch_add_up_to_it_in_losses_logs_and_weights(
    tmp_path: Path, give: Any, settings: dict[str, Any]
) -> None:
    give(**LEAN)
    assert_same_training(*train_both(tmp_path, **settings))


def test_bf16_stays_lightnings_own(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    assert_same_training(*train_both(tmp_path, precision="bf16-mixed"), tolerance=2e-2)


def test_a_step_may_return_a_dictionary(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    assert_same_training(*train_both(tmp_path, lambda: Network(as_dict=True)))


class Squares(Network):
    """A mean over numbers; keeps notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.notes.append(len(batch[0]))
        self.log("size", float(len(batch[0])))
        return self.blocks[0](self.embedding(batch[0])).square().mean()


def test_a_step_that_keeps_notes_has_its_batch_whole(tmp_path: Path, give: Any) -> None:
    give(blocks={"blocks.0": "recompute"})
    plain, planned = train_both(tmp_path, Squares)
    assert_same_weights(planned.lightning_module, plain.lightning_module)
    assert planned.lightning_module.notes == plain.lightning_module.notes == [8, 8, 5] * 2
    give(micro_batch=3)
    with pytest.raises(BadInput, match="the forward writes to notes"):
        trainer_in(tmp_path, callback()).fit(Squares(), loader())


class Masked(Network):
    """Divides by what a mask counts: alike in all samples of the first batch, not in others."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, labels = batch
        mask = (labels >= 0).double()
        each = (self.head(self.embedding(tokens)).mean(-1) - tokens).square()
        loss = (each * mask).sum() / mask.sum()
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def test_what_a_step_counts_is_counted_in_the_whole_batch(tmp_path: Path, give: Any) -> None:
    give(micro_batch=3)
    data = Ragged()
    data.labels[:BATCH] = data.labels[:BATCH].abs()  # the first batch has no padding
    pairs = TensorDataset(data.tokens, data.labels)
    seen = []
    for callbacks in ([], [callback()]):
        module = Masked()
        trainer_in(tmp_path, *callbacks).fit(module, DataLoader(pairs, BATCH))
        seen.append(module)
    assert seen[1].seen == pytest.approx(seen[0].seen, rel=1e-4)
    assert_same_weights(seen[1], seen[0])


class WithoutIndex(Network):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        return super().training_step(batch, 0)


def test_a_step_need_not_take_the_batchs_number(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    assert_same_training(*train_both(tmp_path, WithoutIndex))


class WarmingUp(Masked):
    """From its third step on, another term is added that counts otherwise."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.trainer.global_step < 2:
            return loss
        few = (batch[1] > 7).float()
        return loss + (self.embedding(batch[0]).square().sum(-1) * few).sum() / few.sum()


def test_a_step_that_computes_another_loss_later_on_is_looked_at_again(
    tmp_path: Path, give: Any
) -> None:
    give(micro_batch=3, blocks={"blocks.0": "recompute"})
    plain, planned = train_both(tmp_path, WarmingUp)
    assert_same_weights(planned.lightning_module, plain.lightning_module)


class Contrast(Network):
    """Its loss compares the samples of a batch with each other."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        hidden = self.embedding(batch[0]).mean(1)
        return (hidden @ hidden.T).logsumexp(-1).mean()


def test_a_loss_that_parts_do_not_add_up_to_is_refused(tmp_path: Path, give: Any) -> None:
    give(micro_batch=3)
    module = Contrast()
    with pytest.raises(
        BadInput, match="the loss mixes samples: mm multiplies each sample with others"
    ):
        trainer_in(tmp_path, callback()).fit(module, loader())
    assert_plain(module)


def test_what_was_shuffled_comes_in_the_same_order(tmp_path: Path) -> None:
    def seen(*callbacks: L.Callback) -> list[float]:
        L.seed_everything(3, verbose=False)
        network = Network()
        trainer_in(tmp_path, *callbacks).fit(network, loader(shuffle=True))
        return network.seen

    assert seen(callback("64MiB")) == pytest.approx(seen(), rel=1e-4)


def test_predicted_memory_goes_to_the_logger(tmp_path: Path, give: Any, some_plan: Any) -> None:
    give(**LEAN)
    _, planned = train_both(tmp_path)
    expected = some_plan.predicted.peak.allocated / 2**30
    assert float(planned.callback_metrics["peak_gib_predicted"]) == pytest.approx(expected)
    logged = (Path(planned.logger.log_dir) / "metrics.csv").read_text()
    assert "peak_gib_predicted" in logged


def test_checkpoints_on_the_way_are_plain_and_plain_lightning_goes_on_from_them(
    tmp_path: Path, give: Any
) -> None:
    give(**LEAN)
    saving = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="first", every_n_epochs=1)
    trainer_in(tmp_path, callback(), saving, enable_checkpointing=True, max_epochs=1).fit(
        Network(), loader()
    )
    resumed, plain = trainer_in(tmp_path), trainer_in(tmp_path)
    resumed.fit(Network(), loader(), ckpt_path=tmp_path / "first.ckpt", weights_only=False)
    plain.fit(Network(), loader())
    assert resumed.lightning_module is not None and plain.lightning_module is not None
    assert_same_weights(resumed.lightning_module, plain.lightning_module)
    saved = torch.load(tmp_path / "first.ckpt", weights_only=False)
    (optimizer,) = saved["optimizer_states"]
    assert not optimizer["param_groups"][0]["fused"]


def test_the_module_is_plain_after_training(tmp_path: Path, give: Any) -> None:
    give(**LEAN)
    _, planned = train_both(tmp_path)
    assert planned.lightning_module is not None
    assert_plain(planned.lightning_module)


def test_running_out_of_memory_is_explained_and_leaves_the_module_plain(
    tmp_path: Path, give: Any
) -> None:
    give(**LEAN)

    class Fails(Network):
        def on_train_batch_end(self, *_: Any) -> None:
            raise torch.OutOfMemoryError("no more")

    module = Fails()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_in(tmp_path, callback()).fit(module, loader())
    assert caught.value.__notes__[0].startswith("oomph: ")
    assert_plain(module)


class Manual(Network):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(0.0)


def test_what_is_not_planned_for_is_refused_or_trained_as_it_is(tmp_path: Path, said: Any) -> None:
    with pytest.raises(BadInput, match="manual optimization"):
        trainer_in(tmp_path, callback()).fit(Manual(), loader())
    module = Manual()
    trainer_in(tmp_path, callback(unplanned=True, say=said)).fit(module, loader())
    assert len(module.seen) == 6
    assert said[0].startswith("training goes on without a plan: the module steps its optimizers")


def test_a_budget_that_cannot_be_meant_is_refused_at_once() -> None:
    with pytest.raises(BadInput):
        OomphCallback("a lot")


# -- the largest batch -----------------------------------------------------------------------------


def job_of(size: int) -> oomph.Job:
    def loss(model: Any, batch: Any) -> Tensor:
        tokens, labels = batch
        hidden = model.embedding(tokens)
        for block in model.blocks:
            hidden = block(hidden).relu()
        return F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())

    tokens = torch.zeros(size, LENGTH, dtype=torch.long)
    return oomph.Job(Network(), loss, "adamw", (tokens, tokens))


def test_the_largest_batch_is_the_one_that_estimates_find() -> None:
    found = largest_batch(Network(), loader(), budget="12MiB")
    assert found.verdict == "fits" and found.next_value == found.value + 1
    assert oomph.estimate(job_of(found.value), budget="12MiB").verdict == "fits"
    assert oomph.estimate(job_of(found.next_value), budget="12MiB").verdict != "fits"


def test_a_datamodule_has_a_largest_batch_on_a_card_that_is_not_here() -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

    plain = largest_batch(Network(), loader(), "rtx-4090", budget="4GiB")
    found = largest_batch(Network(), Data(), "rtx-4090", budget="4GiB")
    assert found.value == plain.value > BATCH


class Steep(Network):
    """Weights that move with the size of a gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


class Clamping(Steep):
    backwards = 0

    def on_before_backward(self, loss: Tensor) -> None:
        self.backwards += 100

    def on_after_backward(self) -> None:
        self.backwards += 1
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)


def test_hooks_around_backward_see_the_gradients_of_the_whole_batch(
    tmp_path: Path, give: Any
) -> None:
    give(micro_batch=3)
    plain, planned = train_both(tmp_path, Clamping)
    assert planned.lightning_module.backwards == plain.lightning_module.backwards
    assert_same_weights(planned.lightning_module, plain.lightning_module)


class Returning(Network):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        tokens, labels = batch
        logits = self.head(self.embedding(tokens))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        told = {"size": logits.square().mean(), "valid": (labels >= 0).sum(), "words": "told"}
        return {"loss": loss, "best": logits.argmax(-1), **told}

    def on_train_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        right = (outputs["best"] == batch[0]).sum()
        assert outputs["words"] == "told"
        self.seen += [float(right), float(outputs["valid"]), round(float(outputs["size"]), 4)]


def test_what_a_step_returns_beside_its_loss_is_of_the_whole_batch(
    tmp_path: Path, give: Any
) -> None:
    give(micro_batch=3)
    plain, planned = train_both(tmp_path, Returning)
    assert planned.lightning_module.seen == pytest.approx(plain.lightning_module.seen)


class Centred(Network):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, labels = batch
        hidden = self.embedding(tokens)
        if self.global_step > 1:
            hidden = hidden - hidden.mean(0)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def test_a_loss_that_compares_samples_later_is_refused_then(tmp_path: Path, give: Any) -> None:
    give(micro_batch=3)
    with pytest.raises(BadInput, match="must not be split"):
        train_both(tmp_path, Centred)
