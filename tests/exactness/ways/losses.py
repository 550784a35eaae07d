"""Losses, as people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .pieces import (
    SIZES,
    WIDTH,
    WORDS,
    Rows,
    Tokens,
    classes,
    momentum,
    numbers,
    rows,
    texts,
    whole,
)
from .training import Training, way

#: Why a loss that compares samples keeps its batch whole.
COMPARES = r"micro-batch|parts of a batch|split"
WHOLE = {"micro_batch": COMPARES, "one_by_one": COMPARES}


def _rows(loss: Any, *, outputs: int = WIDTH, batches: Any = None, **options: Any) -> Training:
    model = Rows(outputs=outputs)
    given = batches or rows(outputs=outputs)
    return Training(
        model=model, loss=loss, optimizer=momentum(model), batches=given, options=options
    )


def _words(loss: Any, **options: Any) -> Training:
    model = Tokens()
    return Training(
        model=model, loss=loss, optimizer=momentum(model), batches=texts(), options=options
    )


@way()
def mean_squared_error() -> Training:
    """The commonest criterion, as a module."""
    return _rows(nn.MSELoss())


@way()
def cross_entropy() -> Training:
    """Classes of rows, with the criterion as a module."""
    return _rows(nn.CrossEntropyLoss(), batches=classes(5), outputs=5)


@way()
def ignored_labels() -> Training:
    """Words that do not count are labelled -100, and their number differs between samples."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    return _words(loss)


@way()
def shifted_labels() -> Training:
    """A causal loss: each word is to tell the next."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))

    return _words(loss)


@way()
def masked_mean() -> Training:
    """The sum of what a mask lets through, divided by the mask's sum; the first mask is full."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        mask = batch["mask"].double()
        return (each * mask).sum() / mask.sum()

    return _words(loss)


@way()
def masked_regression() -> Training:
    """The squared error of what a mask selects, by indexing."""
    batches = [(x, y, y[:, :3] > 0.2 * at - 1) for at, (x, y) in enumerate(rows())]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, mask = batch
        return ((model(x)[:, :3] - y[:, :3])[mask] ** 2).mean()

    return _rows(loss, batches=batches)


@way()
def sample_weights() -> Training:
    """A weighted mean: weights come with the samples, and their sum divides."""
    batches = [(x, y, numbers(len(x), seed=at).exp()) for at, (x, y) in enumerate(classes(5))]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, weight = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each * weight).sum() / weight.sum()

    return _rows(loss, outputs=5, batches=batches)


@way()
def class_weights() -> Training:
    """A criterion that divides by the weights of the classes that are there."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0]).double())
    return _rows(criterion, outputs=5, batches=classes(5))


@way()
def label_smoothing() -> Training:
    """Targets that are smoothed, with labels that are ignored."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    return _words(loss)


@way()
def heads_with_divisors_of_their_own() -> Training:
    """A mean over valid words, a mean over samples and a sum over the mask by a constant."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels, mask = model(batch["ids"]), batch["labels"], batch["mask"].double()
        words = F.cross_entropy(logits.mT, labels)
        texts = (logits.mean((1, 2)) - labels[:, 0].double() / WORDS).square().mean()
        lengths = (logits.square().mean(2) * mask).sum() / (100 * len(mask))
        return words + 0.5 * texts + lengths

    return _words(loss)


@way()
def summed() -> Training:
    """A sum over the batch, not a mean."""
    return _rows(nn.MSELoss(reduction="sum"))


@way()
def focal() -> Training:
    """Focal loss: hard samples count more; a plain mean all the same."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    return _rows(loss, outputs=5, batches=classes(5))


@way()
def focal_by_positives() -> Training:
    """As detectors have it: a sum over all, divided by how many are positive."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        target = F.one_hot(y, 5).double()
        each = F.binary_cross_entropy_with_logits(model(x), target, reduction="none")
        return each.sum() / (y > 0).sum().clamp(min=1)

    return _rows(loss, outputs=5, batches=classes(5))


@way(refusals=WHOLE)
def dice_over_the_batch() -> Training:
    """One quotient of sums over all samples: no sum of what samples give."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        p, target = torch.sigmoid(model(x)), (y > 0).double()
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)

    return _rows(loss)


@way()
def dice_per_sample() -> Training:
    """A quotient for each sample, then their mean."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        p, target = torch.sigmoid(model(x)), (y > 0).double()
        each = 1 - (2 * (p * target).sum(1) + 1) / (p.sum(1) + target.sum(1) + 1)
        return each.mean()

    return _rows(loss)


@way(refusals=WHOLE)
def root_of_the_mean() -> Training:
    """The root of a mean is no mean of roots."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1]).sqrt()

    return _rows(loss)


@way(refusals=WHOLE)
def contrastive() -> Training:
    """InfoNCE: each sample against all others of the batch."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        ones, others = (F.normalize(model(side), dim=1) for side in batch)
        return F.cross_entropy(ones @ others.T / 0.1, torch.arange(len(ones)))

    return _rows(loss)


@way(refusals=WHOLE)
def triplets_within_the_batch() -> Training:
    """Each sample with its farthest of the same class and its nearest of another."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        at = model(batch[0])
        apart = (at[:, None] - at).square().sum(2)
        same = batch[1][:, None] == batch[1]
        far = apart.masked_fill(~same, -torch.inf).amax(1)
        near = apart.masked_fill(same, 1e3).amin(1)
        return F.relu(far - near + 1).mean()

    return _rows(loss, batches=classes(2))


@way()
def given_triplets() -> Training:
    """Anchor, positive and negative come as three tensors of the batch."""
    batches = [
        {
            name: numbers(size, WIDTH, seed=at * 3 + place)
            for place, name in enumerate(("anchor", "positive", "negative"))
        }
        for at, size in enumerate(SIZES)
    ]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.triplet_margin_loss(*(model(one) for one in batch.values()), margin=5.0)

    return _rows(loss, batches=batches)


@way(refusals=WHOLE)
def preference_pairs_behind_each_other() -> Training:
    """DPO as most write it: chosen texts are the batch's first half, rejected ones its second."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        likely = torch.log_softmax(model(batch["ids"]), -1)
        likely = likely.gather(2, batch["ids"].unsqueeze(2)).squeeze(2)
        each = (likely * batch["mask"]).sum(1)
        chosen, rejected = each.chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    training = _words(loss)
    training.batches = texts(sizes=(6, 4, 2, 6, 4))
    return training


@way()
def preference_pairs_beside_each_other() -> Training:
    """DPO with the chosen and the rejected texts as tensors of their own."""
    sides = zip(texts(), reversed(texts()), strict=True)
    batches = [
        {"chosen": whole(WORDS, size, 5, seed=at), "rejected": whole(WORDS, size, 6, seed=at + 10)}
        for at, (size, _) in enumerate(zip(SIZES, sides, strict=True))
    ]

    def likely(model: nn.Module, ids: Tensor) -> Tensor:
        each = torch.log_softmax(model(ids), -1).gather(2, ids.unsqueeze(2))
        return each.sum((1, 2))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        apart = likely(model, batch["chosen"]) - likely(model, batch["rejected"])
        return -F.logsigmoid(0.1 * apart).mean()

    training = _words(loss)
    training.batches = batches
    return training


@way()
def speech_with_ctc() -> Training:
    """CTC's mean: each sample by the length of its target, then over samples."""
    model = Tokens()
    batches = [
        {
            "ids": whole(WORDS, size, 9, seed=at),
            "target": 1 + whole(WORDS - 1, size, 4, seed=at + 10),
            "length": 9 - whole(2, size, seed=at + 20),
            "target_length": 4 - whole(3, size, seed=at + 30),
        }
        for at, size in enumerate(SIZES)
    ]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        likely = torch.log_softmax(model(batch["ids"]), 2).transpose(0, 1)
        return F.ctc_loss(likely, batch["target"], batch["length"], batch["target_length"])

    return Training(model=model, loss=loss, optimizer=momentum(model), batches=batches)


@way()
def speech_with_summed_ctc() -> Training:
    """CTC as transformers has it by default: a sum over samples."""
    training = speech_with_ctc()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        likely = torch.log_softmax(model(batch["ids"]), 2).transpose(0, 1)
        lengths = batch["length"], batch["target_length"]
        return F.ctc_loss(likely, batch["target"], *lengths, reduction="sum")

    training.loss = loss
    return training


class _Autoencoder(Rows):
    """Means and variances in the middle; drawing is left out, so that parts can be compared."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        middle = self.hidden(x)
        mean, log_variance = middle.chunk(2, -1)
        decoded = self.head(torch.cat([mean, log_variance.exp()], -1))
        return decoded, mean, log_variance


def _divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp())


@way()
def summed_vae() -> Training:
    """A VAE as PyTorch's example has it: both terms are sums over the batch."""
    model = _Autoencoder()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        decoded, mean, log_variance = model(batch[0])
        reconstruction = F.mse_loss(decoded, batch[0], reduction="sum")
        return reconstruction + _divergence(mean, log_variance).sum()

    return Training(model=model, loss=loss, optimizer=momentum(model, 1e-3), batches=rows())


@way()
def vae_of_a_mean_and_a_sum() -> Training:
    """A mean and a sum in one loss, which no single divisor makes right."""
    model = _Autoencoder()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        decoded, mean, log_variance = model(batch[0])
        return F.mse_loss(decoded, batch[0]) + 0.1 * _divergence(mean, log_variance).sum()

    return Training(model=model, loss=loss, optimizer=momentum(model, 1e-3), batches=rows())


@way()
def penalty_on_weights() -> Training:
    """L2 of the parameters, in the loss."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()).double())
        return F.mse_loss(model(batch[0]), batch[1]) + 1e-2 * penalty

    return _rows(loss)


@way()
def gradient_penalty() -> Training:
    """A critic whose gradient by its input is to have norm one: second derivatives."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = model(x).sum(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return _rows(loss)


@way()
def after_a_warm_up() -> Training:
    """A loss whose second term, a masked mean, begins with the second step."""
    passed = {"steps": 0}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, mask = model(batch["ids"]), batch["mask"].double()
        plain = F.cross_entropy(logits.mT, batch["ids"])
        if not passed["steps"]:
            return plain
        return plain + (logits.square().mean(2) * mask).sum() / mask.sum()

    training = _words(loss)

    def count() -> None:
        passed["steps"] += 1

    training.after_step = count
    return training


@way(refusals={**WHOLE, "recompute": "counter", "fit": "counter"})
def counting_itself() -> Training:
    """A loss with a state of its own, which it goes by: a weight that falls with every call."""

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return F.mse_loss(out, target) / self.calls

    criterion = Annealed()
    training = _rows(criterion)
    training.state = lambda: criterion.calls
    return training


@way()
def positive_weights_as_many_as_samples() -> Training:
    """A weight for each of six outputs, beside the batch; the first batch has six samples, too."""
    weight = torch.tensor([0.5, 1.0, 3.0, 7.0, 0.1, 2.0]).double()
    batches = [{"x": x, "y": (y > 0).double(), "pos_weight": weight} for x, y in rows(outputs=6)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        return F.binary_cross_entropy_with_logits(
            logits, batch["y"], pos_weight=batch["pos_weight"]
        )

    return _rows(loss, outputs=6, batches=batches)


@way(refusals=WHOLE)
def variance_over_the_batch() -> Training:
    """A regularizer on the spread of outputs over samples, as in VICReg."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        return (
            F.mse_loss(out, batch[1]) + F.relu(1 - (out.var(0, correction=0) + 1e-4).sqrt()).mean()
        )

    return _rows(loss)


@way(refusals=WHOLE)
def ranked_by_difficulty() -> Training:
    """Only the harder half of the batch counts: online hard example mining."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)
        return each.topk(max(len(each) // 2, 1)).values.mean()

    return _rows(loss)


@way()
def distilled() -> Training:
    """A frozen teacher inside the loss, and batchmean's divisor."""
    teacher = Rows(outputs=5).requires_grad_(False)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        with torch.no_grad():
            taught = teacher(batch[0]).log_softmax(1)
        apart = F.kl_div(logits.log_softmax(1), taught, reduction="batchmean", log_target=True)
        return F.cross_entropy(logits, batch[1]) + apart

    return _rows(loss, outputs=5, batches=classes(5))


@way()
def labels_written_over_a_copy() -> Training:
    """Labels are the words themselves but for those that are padding, which are written over."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["ids"].clone()
        labels[~batch["mask"]] = -100
        labels[labels == 3] = -100
        weights = batch["mask"].double()
        weights[:, 0] = 0
        weights.mul_(2)
        logits = model(batch["ids"])
        each = F.cross_entropy(logits.mT, batch["ids"], reduction="none")
        return F.cross_entropy(logits.mT, labels) + (each * weights).sum() / weights.sum()

    return _words(loss)


@way(refusals=WHOLE)
def mask_written_through_a_view() -> Training:
    """What a mask counts is changed by a write to another view of its memory, in later samples."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"].clone()
        mask.view(-1).masked_fill_((batch["ids"] == WORDS - 1).view(-1), False)
        each = F.cross_entropy(model(batch["ids"]).mT, batch["ids"], reduction="none")
        return (each * mask).sum() / mask.sum()

    return _words(loss)


@way(refusals=WHOLE)
def damped_where_it_is_large() -> Training:
    """A spike counts less: Python compares the loss, as a number, with a threshold."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = F.mse_loss(model(batch[0]), batch[1])
        return found * 0.1 if found.item() > 1.45 else found

    return _rows(loss)


@way(refusals=WHOLE)
def divided_by_how_many_are_confident() -> Training:
    """As with pseudo-labels: Python counts what the model is sure of, and divides by that."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        sure = (logits.softmax(1).amax(1) > 0.3).double()
        each = F.cross_entropy(logits, batch[1], reduction="none")
        return (each * sure).sum() / (int(sure.sum().item()) or 1)

    return _rows(loss, outputs=5, batches=classes(5))


@way()
def a_loss_that_is_told_and_checked() -> Training:
    """Python reads the loss for its log, and looks whether it is a number."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = F.mse_loss(model(batch[0]), batch[1])
        number = found.item()
        assert number == number and math.isfinite(number)
        assert f"{100 * number:.2f} {round(number, 3)}"
        return found

    return _rows(loss)


#: Why a run stops that began with a loss which could be split.
NO_LONGER = {"micro_batch": "computed otherwise", "one_by_one": "computed otherwise"}


def _changed_after_a_step(change: Any) -> Training:
    passed = {"steps": 0}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, target = model(batch[0]), batch[1]
        if passed["steps"]:
            out, target = change(out, target)
        return F.mse_loss(out, target)

    training = _rows(loss)
    training.after_step = lambda: passed.update(steps=passed["steps"] + 1)
    return training


@way(refusals={**NO_LONGER, "fit": "computed otherwise"})
def centred_after_a_warm_up() -> Training:
    """From the second step on outputs are compared with each other; the numbers of calls that end
    in a single number stay the same."""
    return _changed_after_a_step(lambda out, target: (out - out.mean(0), target))


@way(refusals={**NO_LONGER, "fit": "computed otherwise"})
def mixed_after_a_warm_up() -> Training:
    """Each sample with its opposite in the batch, as mixup does, from the second step on."""
    return _changed_after_a_step(lambda out, target: (0.7 * out + 0.3 * out.flip(0), target))


@way()
def scaled_after_a_warm_up() -> Training:
    """A branch that is new, and treats each sample by itself all the same."""
    return _changed_after_a_step(lambda out, target: (out * 1.5 - target.tanh(), target))


@way()
def summed_after_a_warm_up() -> Training:
    """The criterion is told to sum where it averaged."""
    criterion = nn.MSELoss()
    training = _rows(criterion)
    training.optimizer = momentum(training.model, 1e-3)
    training.after_step = lambda: setattr(criterion, "reduction", "sum")
    return training


@way(refusals={**NO_LONGER, "fit": "computed otherwise"})
def told_by_the_batch() -> Training:
    """A word in the batch says how the loss compares, and is another one in the second batch."""
    batches = [
        {"x": x, "y": y, "how": "ranks" if at == 1 else "values"}
        for at, (x, y) in enumerate(rows())
    ]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out, target = model(batch["x"]), batch["y"]
        if batch["how"] == "ranks":
            out, target = out.sort(0).values, target.sort(0).values
        return F.mse_loss(out, target)

    return _rows(loss, batches=batches)


@way(refusals=dict.fromkeys(("micro_batch", "one_by_one", "fit"), "must not be split"))
def norms_that_begin_to_train() -> Training:
    """Batch norm evaluates while the plan is made, and trains from the second step on."""

    class Normed(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
            self.passed = 0

        def train(self, mode: bool = True) -> Normed:
            super().train(mode)
            self.norm.train(mode and self.passed > 0)
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.hidden(x)))  # type: ignore[no-any-return]

    model = Normed()

    def after() -> None:
        model.passed += 1
        model.train()

    batches = rows(sizes=(6, 5, 3, 4, 3))
    training = Training(model=model, loss=nn.MSELoss(), optimizer=momentum(model), batches=batches)
    training.after_step = after
    return training
