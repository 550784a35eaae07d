"""Losses over masks, weights, counts and statistics of the batch, in people's own spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.contrastive import encoder
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, training

WIDTH, CLASSES = 24, 6


class Sequence(nn.Module):
    """Scores for each step of sequences."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(12, WIDTH)
        self.blocks = nn.ModuleList([Residual(WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Any:
        """(B, T, F) → (B, T, outputs)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _steps(drawn: Drawn) -> dict[str, Tensor]:
    mask = drawn.mask()
    tags = drawn.whole(CLASSES, drawn.size, drawn.length)
    return {
        "x": drawn.normal(drawn.size, drawn.length, 12),
        "y": drawn.normal(drawn.size, drawn.length) + 1,
        "mask": mask,
        "tags": tags,
        "labels": tags.masked_fill(~mask, -100),
        "lengths": drawn.lengths(),
        "weight": drawn.uniform(drawn.size) + 0.1,
        "label": drawn.whole(CLASSES, drawn.size),
        "positive": (drawn.uniform(drawn.size, drawn.length) < 0.3).float(),
    }


def _tagged(loss: Callable[[Tensor, Any], Any], steps: str = "sgd") -> Training:
    return training(Sequence(), lambda m, b: loss(m(b["x"]), b), each(_steps), steps)


def _regressed(loss: Callable[[Tensor, Any], Any], steps: str = "sgd") -> Training:
    return training(Sequence(1), lambda m, b: loss(m(b["x"]).squeeze(-1), b), each(_steps), steps)


@entry()
def masked_mean_by_sums() -> Training:
    """`(l * m).sum() / m.sum()`."""

    def loss(out: Tensor, b: Any) -> Any:
        lost = F.cross_entropy(out.transpose(1, 2), b["tags"], reduction="none")
        mask = b["mask"].float()
        return (lost * mask).sum() / mask.sum()

    return _tagged(loss)


@entry()
def masked_mean_by_index() -> Training:
    """`l[m].mean()`."""
    return _regressed(lambda out, b: (out - b["y"]).abs()[b["mask"]].mean())


@entry()
def masked_mean_by_masked_select() -> Training:
    """Predictions and targets selected each."""

    def loss(out: Tensor, b: Any) -> Any:
        one = torch.masked_select(out, b["mask"])
        return F.smooth_l1_loss(one, torch.masked_select(b["y"], b["mask"]))

    return _regressed(loss)


@entry()
def masked_mean_by_nan() -> Training:
    """`nanmean` over what was made not a number."""

    def loss(out: Tensor, b: Any) -> Any:
        lost = (out - b["y"]).pow(2)
        return torch.where(b["mask"], lost, torch.full_like(lost, torch.nan)).nanmean()

    return _regressed(loss)


@entry()
def masked_mean_clamped() -> Training:
    """`/ m.sum().clamp(min=1)`, with a mask of another dtype."""
    return _regressed(
        lambda out, b: (
            ((out - b["y"]) ** 2 * b["mask"].to(out.dtype)).sum()
            / b["mask"].to(out.dtype).sum().clamp(min=1.0)
        )
    )


@entry()
def masked_mean_with_epsilon() -> Training:
    """`/ (m.sum() + 1e-8)`, as means of both."""
    return _regressed(
        lambda out, b: (
            torch.mean((out - b["y"]) ** 2 * b["mask"]) / (torch.mean(b["mask"].float()) + 1e-8)
        )
    )


@entry()
def masked_mean_by_item() -> Training:
    """A count read with `.item()`."""
    return _regressed(
        lambda out, b: ((out - b["y"]).abs() * b["mask"]).sum() / max(b["mask"].sum().item(), 1)
    )


@entry()
def masked_mean_by_numpy() -> Training:
    """A count computed by numpy."""

    def loss(out: Tensor, b: Any) -> Any:
        count = np.sum(b["mask"].cpu().numpy())
        return ((out - b["y"]) ** 2 * b["mask"]).sum() / float(count)

    return _regressed(loss)


@entry()
def masked_mean_by_lengths_list() -> Training:
    """A count summed up in Python from a list."""

    def loss(out: Tensor, b: Any) -> Any:
        total = sum(b["lengths"].tolist())
        return ((out - b["y"]).abs() * b["mask"]).sum() / total

    return _regressed(loss)


@entry()
def mean_of_each_sequence() -> Training:
    """Each sequence by its own length, then a mean."""
    return _regressed(
        lambda out, b: (((out - b["y"]) ** 2 * b["mask"]).sum(1) / b["lengths"].clamp(min=1)).mean()
    )


@entry()
def mean_of_each_sequence_in_a_loop() -> Training:
    """A loop over samples, each up to its own length."""

    def loss(out: Tensor, b: Any) -> Any:
        total = out.new_zeros(())
        for row, n in enumerate(b["lengths"]):
            total = total + F.mse_loss(out[row, :n], b["y"][row, :n])
        return total / len(b["lengths"])

    return training(Sequence(1), lambda m, b: loss(m(b["x"]).squeeze(-1), b), each(_steps, 1))


@entry()
def mask_made_in_the_loss() -> Training:
    """Lengths become a mask by arange and expand, up to the longest."""

    def loss(out: Tensor, b: Any) -> Any:
        longest = int(b["lengths"].max())
        mask = torch.arange(longest).expand(len(b["lengths"]), longest) < b["lengths"].unsqueeze(1)
        lost = (out[:, :longest] - b["y"][:, :longest]).abs()
        return lost.masked_fill(~mask, 0).sum() / mask.sum()

    return _regressed(loss)


@entry()
def ignored_labels() -> Training:
    """`ignore_index`, flat."""
    return _tagged(
        lambda out, b: F.cross_entropy(out.view(-1, CLASSES), b["labels"].view(-1)), "adamw"
    )


@entry()
def ignored_labels_and_two_heads() -> Training:
    """Two losses that count different things, added."""

    def loss(out: Tensor, b: Any) -> Any:
        of_tags = F.cross_entropy(out.transpose(1, 2), b["labels"])
        pooled = (out * b["mask"][..., None]).sum(1) / b["lengths"][:, None]
        return of_tags + 0.5 * F.cross_entropy(pooled, b["label"])

    return _tagged(loss)


@entry()
def weighted_classes() -> Training:
    """Class weights, smoothing and labels that are ignored."""
    criterion = nn.CrossEntropyLoss(
        weight=torch.linspace(0.2, 2, CLASSES), label_smoothing=0.1, ignore_index=-100
    )
    return _tagged(lambda out, b: criterion(out.flatten(0, 1), b["labels"].flatten()))


@entry()
def weights_of_classes_by_their_counts() -> Training:
    """Weights are computed from how often a class is in the batch."""

    def loss(out: Tensor, b: Any) -> Any:
        counts = torch.bincount(b["tags"].flatten(), minlength=CLASSES).float()
        weights = counts.sum() / (counts + 1) / CLASSES
        return F.cross_entropy(out.flatten(0, 1), b["tags"].flatten(), weight=weights)

    return _tagged(loss)


@entry()
def positive_weight_as_long_as_the_batch() -> Training:
    """`pos_weight` has an entry for each step, which are as many as samples."""

    def square(drawn: Drawn) -> dict[str, Tensor]:
        n = drawn.size
        return {
            "x": drawn.normal(n, n, 12),
            "y": (drawn.uniform(n, n) < 0.3).float(),
            "pos_weight": 1 + 3 * drawn.uniform(n),
        }

    def loss(model: Any, b: Any) -> Any:
        return F.binary_cross_entropy_with_logits(
            model(b["x"]).squeeze(-1), b["y"], pos_weight=b["pos_weight"]
        )

    return training(Sequence(1), loss, each(square, 3))


@entry()
def weights_of_samples() -> Training:
    """Each sample by its weight, divided by their sum."""

    def loss(out: Tensor, b: Any) -> Any:
        lost = F.cross_entropy(out.mean(1), b["label"], reduction="none")
        return torch.sum(lost * b["weight"]) / torch.sum(b["weight"])

    return _tagged(loss)


@entry()
def weights_of_samples_normalised_first() -> Training:
    """Weights are a softmax over the batch."""

    def loss(out: Tensor, b: Any) -> Any:
        lost = F.cross_entropy(out.mean(1), b["label"], reduction="none")
        return (lost * torch.softmax(b["weight"], dim=0)).sum()

    return _tagged(loss)


def _dice(probability: Tensor, target: Tensor, dims: tuple[int, ...]) -> Any:
    both = (probability * target).sum(dims)
    return 1 - ((2 * both + 1) / (probability.sum(dims) + target.sum(dims) + 1)).mean()


@entry()
def dice_over_the_batch() -> Training:
    """Sums over all samples, and their ratio."""
    return _regressed(lambda out, b: _dice(out.sigmoid().flatten(), b["positive"].flatten(), (0,)))


@entry()
def dice_of_each_sample() -> Training:
    """A ratio for each sample."""
    return _regressed(lambda out, b: _dice(out.sigmoid(), b["positive"], (1,)))


@entry()
def dice_and_cross_entropy() -> Training:
    """A ratio over the batch is a small part of the loss."""
    return _regressed(
        lambda out, b: (
            F.binary_cross_entropy_with_logits(out, b["positive"])
            + 0.01 * _dice(out.sigmoid().flatten(), b["positive"].flatten(), (0,))
        )
    )


@entry()
def tversky_with_focus() -> Training:
    """A ratio over the batch to a power."""

    def loss(out: Tensor, b: Any) -> Any:
        p, t = torch.sigmoid(out).view(-1), b["positive"].view(-1)
        hit, false, missed = (p * t).sum(), ((1 - t) * p).sum(), (t * (1 - p)).sum()
        return (1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)) ** 0.75

    return _regressed(loss)


@entry()
def focal_by_positives() -> Training:
    """A sum over steps by the number of positive ones, as detectors do it."""

    def loss(out: Tensor, b: Any) -> Any:
        t = b["positive"]
        p = torch.sigmoid(out)
        ce = F.binary_cross_entropy_with_logits(out, t, reduction="none")
        p_t = p * t + (1 - p) * (1 - t)
        lost = (0.25 * t + 0.75 * (1 - t)) * ce * (1 - p_t) ** 2
        return lost.sum() / max(1, t.sum())

    return _regressed(loss)


@entry()
def hard_examples() -> Training:
    """OHEM: the hardest quarter of all steps."""

    def loss(out: Tensor, b: Any) -> Any:
        lost = F.cross_entropy(out.flatten(0, 1), b["labels"].flatten(), reduction="none")
        return lost.topk(lost.numel() // 4)[0].mean()

    return _tagged(loss)


@entry()
def hard_examples_by_threshold() -> Training:
    """Pixels whose loss is above a threshold; at least some."""

    def loss(out: Tensor, b: Any) -> Any:
        lost, _ = torch.sort(
            F.cross_entropy(out.transpose(1, 2), b["tags"], reduction="none").view(-1),
            descending=True,
        )
        return torch.mean(lost[lost > 1.5] if lost[10] > 1.5 else lost[:10])

    return _tagged(loss)


@entry()
def confident_samples_alone() -> Training:
    """FixMatch: pseudo-labels where the model is sure."""

    def loss(out: Tensor, b: Any) -> Any:
        scores = out.mean(1)
        sure, guess = scores.detach().softmax(1).max(1)
        mask = sure.ge(0.18).float()
        return (F.cross_entropy(scores, guess, reduction="none") * mask).mean() + F.cross_entropy(
            out[:, 0], b["label"]
        )

    return _tagged(loss)


@entry()
def confident_samples_by_their_number() -> Training:
    """The same, divided by how many are sure."""

    def loss(out: Tensor, b: Any) -> Any:
        scores = out.mean(1)
        sure, guess = scores.detach().softmax(1).max(1)
        mask = sure.ge(0.18).float()
        lost = F.cross_entropy(scores, guess, reduction="none") * mask
        return lost.sum() / mask.sum().clamp(min=1)

    return _tagged(loss)


@entry()
def errors_by_the_spread_of_targets() -> Training:
    """A normalised error: divided by the variance of the batch's targets."""
    return _regressed(lambda out, b: ((out - b["y"]) ** 2).mean() / b["y"].var())


@entry()
def explained_variance() -> Training:
    """One minus R²: errors by the spread of targets around their mean."""

    def loss(out: Tensor, b: Any) -> Any:
        y = b["y"]
        return torch.sum((y - out) ** 2) / torch.sum((y - torch.mean(y)) ** 2)

    return _regressed(loss)


@entry()
def correlation_over_the_batch() -> Training:
    """One minus Pearson's correlation."""

    def loss(out: Tensor, b: Any) -> Any:
        x, y = out.flatten() - out.mean(), b["y"].flatten() - b["y"].mean()
        return 1 - (x * y).sum() / (x.norm() * y.norm() + 1e-8)

    return _regressed(loss)


@entry()
def root_of_the_mean() -> Training:
    """RMSE, which is no mean."""
    return _regressed(lambda out, b: torch.sqrt(F.mse_loss(out, b["y"]) + 1e-6))


@entry()
def logarithm_of_the_mean() -> Training:
    """The logarithm of a mean error."""
    return _regressed(lambda out, b: torch.log(torch.mean((out - b["y"]) ** 2)))


@entry()
def learned_weights_of_tasks() -> Training:
    """Kendall's uncertainties."""

    class Tasks(Sequence):
        def __init__(self) -> None:
            super().__init__(CLASSES + 1)
            self.log_vars = nn.Parameter(torch.zeros(2))

    def loss(model: Any, b: Any) -> Any:
        out = model(b["x"])
        losses = torch.stack(
            [
                F.mse_loss(out[..., -1], b["y"]),
                F.cross_entropy(out[..., :-1].transpose(1, 2), b["labels"]),
            ]
        )
        return (torch.exp(-model.log_vars) * losses + model.log_vars).sum()

    return training(Tasks(), loss, each(_steps), "adam")


@entry()
def terms_by_their_own_size() -> Training:
    """Each term is divided by its detached value."""

    def loss(out: Tensor, b: Any) -> Any:
        one, other = (out - b["y"]).pow(2).mean(), (out - b["y"]).abs().mean()
        return one / one.detach() + other / other.detach()

    return _regressed(loss)


class Adaptive:
    """Weights of terms by how they fell since the last steps (DWA)."""

    def __init__(self) -> None:
        self.history: list[list[float]] = []

    def __call__(self, model: Any, b: Any) -> Any:
        """The weighted sum."""
        out = model(b["x"]).squeeze(-1)
        terms = [F.mse_loss(out, b["y"]), F.l1_loss(out, b["y"])]
        weights = torch.ones(2)
        if len(self.history) > 1:
            falls = torch.tensor(
                [a / c for a, c in zip(self.history[-1], self.history[-2], strict=True)]
            )
            weights = 2 * F.softmax(falls / 2, -1)
        self.history.append([float(one) for one in terms])
        return weights[0] * terms[0] + weights[1] * terms[1]


@entry()
def weights_by_earlier_losses() -> Training:
    """The loss remembers its terms."""
    return training(Sequence(1), Adaptive(), each(_steps))


@entry()
def quantiles() -> Training:
    """The pinball loss of three quantiles."""

    def loss(model: Any, b: Any) -> Any:
        out, total = model(b["x"]), []
        for at, q in enumerate((0.1, 0.5, 0.9)):
            error = b["y"] - out[..., at]
            total.append(torch.max((q - 1) * error, q * error).unsqueeze(-1))
        return torch.mean(torch.sum(torch.cat(total, dim=-1), dim=-1))

    return training(Sequence(3), loss, each(_steps))


@entry()
def ordinal_classes() -> Training:
    """CORAL: each class is some thresholds that are passed."""

    def loss(out: Tensor, b: Any) -> Any:
        levels = (b["label"][:, None] > torch.arange(CLASSES)).float()
        scores = out.mean(1)
        lost = F.logsigmoid(scores) * levels + (F.logsigmoid(scores) - scores) * (1 - levels)
        return torch.mean(-torch.sum(lost, dim=1))

    return _tagged(loss)


@entry()
def survival_by_ranks() -> Training:
    """Cox: each death beside all who were still alive."""

    def loss(model: Any, b: Any) -> Any:
        risk = model(b["x"]).squeeze(1)
        order = torch.argsort(b["time"], descending=True)
        risk, died = risk[order], b["died"][order]
        return -((risk - torch.logcumsumexp(risk, 0)) * died).sum() / died.sum()

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {
            "x": drawn.normal(drawn.size, 16),
            "time": drawn.uniform(drawn.size),
            "died": (drawn.uniform(drawn.size) < 0.7).float(),
        }

    return training(encoder(outputs=1), loss, each(batch, 16))


@entry()
def distillation() -> Training:
    """A frozen teacher in the loss, `batchmean` and a temperature."""
    torch.manual_seed(3)
    teacher = Sequence().eval().requires_grad_(False)

    def loss(model: Any, b: Any) -> Any:
        out = model(b["x"])[:, 0]
        with torch.no_grad():
            wanted = F.softmax(teacher(b["x"])[:, 0] / 4, dim=1)
        soft = F.kl_div(F.log_softmax(out / 4, dim=1), wanted, reduction="batchmean") * 16
        return 0.7 * soft + 0.3 * F.cross_entropy(out, b["label"])

    return training(Sequence(), loss, each(_steps))


@entry()
def penalties_of_weights() -> Training:
    """L1 and L2 of all parameters in the loss."""

    def loss(model: Any, b: Any) -> Any:
        lost = F.mse_loss(model(b["x"]).squeeze(-1), b["y"], reduction="sum") / b["y"].numel()
        l2 = sum(p.pow(2).sum() for p in model.parameters())
        l1 = sum(p.abs().sum() for name, p in model.named_parameters() if "weight" in name)
        return lost + 1e-3 * l2 + 1e-4 * l1

    return training(Sequence(1), loss, each(_steps))


@entry()
def auxiliary_losses_on_attributes() -> Training:
    """Blocks leave penalties of their activations on themselves, which the loss collects."""

    class Sparse(Residual):
        penalty: Any = 0.0

        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            self.penalty = out.abs().mean()
            return out

    model = Sequence(1)
    model.blocks = nn.ModuleList([Sparse(WIDTH) for _ in range(4)])

    def loss(model: Any, b: Any) -> Any:
        lost = F.mse_loss(model(b["x"]).squeeze(-1), b["y"])
        return lost + 0.01 * sum(block.penalty for block in model.blocks)

    return training(model, loss, each(_steps))


@entry()
def consistency_of_neighbours() -> Training:
    """Neighbours in the batch are to be alike: frames of one film."""
    return _regressed(
        lambda out, b: F.mse_loss(out, b["y"]) + 0.1 * (out[1:] - out[:-1]).pow(2).mean()
    )


@entry()
def entropy_of_mean_predictions() -> Training:
    """A diversity term: the entropy of the mean over the batch."""

    def loss(out: Tensor, b: Any) -> Any:
        p = out.mean(1).softmax(1)
        mean = p.mean(0)
        return F.cross_entropy(out.mean(1), b["label"]) + (mean * mean.log()).sum()

    return _tagged(loss)


@entry()
def first_sample_counts_double() -> Training:
    """A weight by the place in the batch."""

    def loss(out: Tensor, b: Any) -> Any:
        lost = (out - b["y"]).pow(2).mean(1)
        weight = torch.ones_like(lost)
        weight[0] = 2
        return (lost * weight).mean()

    return _regressed(loss)


@entry()
def smooth_over_valid_neighbours() -> Training:
    """A penalty over pairs of steps, by how many pairs are valid."""

    def loss(out: Tensor, b: Any) -> Any:
        pairs = b["mask"][:, 1:] & b["mask"][:, :-1]
        smooth = ((out[:, 1:] - out[:, :-1]) ** 2)[pairs].sum() / pairs.sum()
        return F.l1_loss(out[b["mask"]], b["y"][b["mask"]]) + 0.1 * smooth

    return _regressed(loss)
