"""Losses that compare samples with each other, and teachers that follow their students."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, perceptron, training

WIDTH = 24


def encoder(inputs: int = 16, outputs: int = 12) -> nn.Sequential:
    """Residual blocks between two linear layers."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), *[Residual(WIDTH) for _ in range(4)], nn.Linear(WIDTH, outputs)
    )


def _views(drawn: Drawn) -> dict[str, Tensor]:
    x = drawn.normal(drawn.size, 16)
    return {
        "one": x + 0.1 * drawn.normal(drawn.size, 16),
        "other": x + 0.1 * drawn.normal(drawn.size, 16),
        "label": drawn.whole(5, drawn.size),
    }


def _compared(loss: Callable[[Tensor, Tensor, Tensor], Any], steps: str = "sgd") -> Training:
    return training(
        encoder(),
        lambda model, b: loss(model(b["one"]), model(b["other"]), b["label"]),
        each(_views, 16),
        steps,
    )


@entry()
def info_nce() -> Training:
    """Each sample among all others of the batch."""

    def loss(one: Tensor, other: Tensor, _: Tensor) -> Any:
        scores = F.normalize(one, dim=1) @ F.normalize(other, dim=1).t() / 0.1
        return F.cross_entropy(scores, torch.arange(one.size(0), device=one.device))

    return _compared(loss)


@entry()
def nt_xent_as_in_simclr() -> Training:
    """Both views of all samples in one matrix, without its diagonal."""

    def loss(one: Tensor, other: Tensor, _: Tensor) -> Any:
        n = one.size(0)
        z = F.normalize(torch.cat([one, other]), dim=1)
        scores = (z @ z.T / 0.5).fill_diagonal_(-1e9)
        positives = torch.cat([scores.diagonal(n), scores.diagonal(-n)])
        return (torch.logsumexp(scores, 1) - positives).sum() / (2 * n)

    return _compared(loss, "adam")


class Clip(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = encoder(), encoder()
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, one: Tensor, other: Tensor, label: Tensor) -> Any:
        """The mean of both directions."""
        a = self.image(one)
        b = self.text(other)
        a = a / a.norm(dim=-1, keepdim=True)
        b = b / b.norm(dim=-1, keepdim=True)
        scores = self.logit_scale.exp() * a @ b.t()
        target = torch.arange(len(a))
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2


@entry()
def clip_by_hand() -> Training:
    """The loss is computed in forward, with two towers."""
    return training(Clip(), None, each(_views, 16), "adamw")


@entry()
def supervised_contrastive() -> Training:
    """Samples of one class are drawn together."""

    def loss(one: Tensor, other: Tensor, label: Tensor) -> Any:
        z = F.normalize(torch.cat([one, other]), dim=1)
        labels = torch.cat([label, label]).view(-1, 1)
        same = torch.eq(labels, labels.T).float()
        others = torch.scatter(
            torch.ones_like(same), 1, torch.arange(len(z)).view(-1, 1), torch.zeros(len(z), 1)
        )
        scores = z @ z.T / 0.2
        scores = scores - scores.max(dim=1, keepdim=True)[0].detach()
        log_prob = scores - torch.log((scores.exp() * others).sum(1, keepdim=True))
        same = same * others
        return -((same * log_prob).sum(1) / same.sum(1)).mean()

    return _compared(loss)


@entry()
def hard_triplets() -> Training:
    """The farthest of the own class, the nearest of others, for each sample."""

    def loss(one: Tensor, other: Tensor, label: Tensor) -> Any:
        distances = torch.cdist(one, other)
        same = label[:, None] == label[None, :]
        farthest = (distances * same).max(1).values
        nearest = distances.masked_fill(same, float("inf")).min(1).values
        return F.relu(farthest - nearest + 0.5).mean()

    return _compared(loss)


@entry()
def semi_hard_triplets_in_a_loop() -> Training:
    """Triplets are looked for in Python."""

    def loss(one: Tensor, other: Tensor, label: Tensor) -> Any:
        losses = []
        for at in range(one.size(0)):
            for negative in range(one.size(0)):
                if label[at].item() != label[negative].item():
                    losses.append(F.triplet_margin_loss(one[at], other[at], one[negative]))
                    break
        return torch.stack(losses).mean()

    return training(
        encoder(),
        lambda model, b: loss(model(b["one"]), model(b["other"]), b["label"]),
        each(_views, 2),
    )


@entry()
def triplets_of_the_batch() -> Training:
    """Anchors, positives and negatives come with the batch: nothing is compared across."""

    def loss(model: Any, batch: Any) -> Any:
        a, p, n = (model(one) for one in batch.unbind(1))
        return nn.TripletMarginLoss(margin=1.0)(a, p, n)

    return training(encoder(), loss, each(lambda d: d.normal(d.size, 3, 16), 16))


@entry()
def barlow_twins() -> Training:
    """The correlation of features over the batch is to be the identity."""

    def loss(one: Tensor, other: Tensor, _: Tensor) -> Any:
        a = (one - one.mean(0)) / one.std(0)
        b = (other - other.mean(0)) / other.std(0)
        c = a.T @ b / one.size(0)
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        off = c.flatten()[:-1].view(c.size(0) - 1, c.size(0) + 1)[:, 1:].pow_(2).sum()
        return on + 0.005 * off

    return _compared(loss)


@entry()
def vicreg() -> Training:
    """Invariance, variance and covariance."""

    def loss(one: Tensor, other: Tensor, _: Tensor) -> Any:
        total = 25 * F.mse_loss(one, other)
        for z in (one, other):
            z = z - z.mean(dim=0)
            total = total + 12.5 * torch.mean(F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)))
            covariance = z.T @ z / (len(z) - 1)
            off = covariance - torch.diag(torch.diag(covariance))
            total = total + off.pow(2).sum() / z.size(1)
        return total / 25

    return _compared(loss, "adam")


class SimSiam(nn.Module):
    """A predictor of one view by the other, which is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder(), perceptron(12, 8, 12)

    def forward(self, batch: Any) -> Any:
        """The mean of both directions."""
        z1, z2 = self.encoder(batch["one"]), self.encoder(batch["other"])
        p1, p2 = self.predictor(z1), self.predictor(z2)
        similar = nn.CosineSimilarity(dim=1)
        return -(similar(p1, z2.detach()).mean() + similar(p2, z1.detach()).mean()) * 0.5


@entry()
def simsiam() -> Training:
    """No sample is compared with another."""
    return training(SimSiam(), lambda model, b: model(b), each(_views, 16))


class BYOL(nn.Module):
    """A target that follows in forward, as the best known file does it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = encoder()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = perceptron(12, 8, 12)

    @torch.no_grad()
    def follow(self) -> None:
        """The target goes a hundredth of the way."""
        for mine, theirs in zip(self.online.parameters(), self.target.parameters(), strict=True):
            theirs.data = theirs.data * 0.99 + mine.data * 0.01

    def forward(self, batch: Any) -> Any:
        """The error of the prediction."""
        self.follow()
        p = F.normalize(self.predictor(self.online(batch["one"])), dim=-1)
        with torch.no_grad():
            z = F.normalize(self.target(batch["other"]), dim=-1)
        return (2 - 2 * (p * z).sum(dim=-1)).mean()


@entry()
def byol_that_follows_in_forward() -> Training:
    """Each forward writes to a target network."""
    return training(BYOL(), lambda model, b: model(b), each(_views, 16))


@entry()
def teacher_that_follows_after_steps() -> Training:
    """A mean teacher in the loss; the loop moves it after each step."""
    model = encoder()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: Any, batch: Any) -> Any:
        scores = model(batch["one"])
        with torch.no_grad():
            wanted = teacher(batch["other"])
        supervised = F.cross_entropy(scores[:, :5], batch["label"])
        return supervised + F.mse_loss(scores.softmax(1), wanted.softmax(1))

    def follow() -> None:
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), teacher.parameters(), strict=True):
                theirs.lerp_(mine, 0.1)

    made = training(model, loss, each(_views, 16))
    made.after_step = follow
    made.state = lambda: [p.detach().clone() for p in teacher.parameters()]
    return made


class MoCo(nn.Module):
    """A queue of keys, written with each batch."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(12, 256), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, batch: Any) -> Any:
        """The loss of queries among keys of earlier batches."""
        q = F.normalize(self.query(batch["one"]), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.query.parameters(), self.key.parameters(), strict=True):
                theirs.data.mul_(0.99).add_(mine.data, alpha=0.01)
            k = F.normalize(self.key(batch["other"]), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        start = int(self.pointer)
        places = (start + torch.arange(len(k))) % self.queue.size(1)
        self.queue[:, places] = k.T
        self.pointer[0] = (start + len(k)) % self.queue.size(1)
        scores = torch.cat([positive, negative], dim=1) / 0.2
        return F.cross_entropy(scores, torch.zeros(scores.size(0), dtype=torch.long))


@entry()
def moco_queue() -> Training:
    """Each forward writes keys to a queue, and moves its pointer."""
    return training(MoCo(), lambda model, b: model(b), each(_views, 16))


@entry()
def siamese_with_margin() -> Training:
    """Pairs with a label: one trunk twice."""

    def loss(model: Any, batch: Any) -> Any:
        distance = F.pairwise_distance(model(batch["one"]), model(batch["other"]), keepdim=True)
        differs = (batch["label"] > 2).float().unsqueeze(1)
        return torch.mean(
            (1 - differs) * distance.pow(2) + differs * torch.clamp(2.0 - distance, min=0.0).pow(2)
        )

    return training(encoder(), loss, each(_views, 16))


@entry()
def prototypes_of_an_episode() -> Training:
    """Prototypical networks: the first half of the batch are examples of three classes."""

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        half = drawn.size // 2
        return {
            "x": drawn.normal(2 * half, 16),
            "y": torch.cat([torch.arange(half) % 3, drawn.whole(3, half)]),
        }

    def loss(model: Any, batch: Any) -> Any:
        z, y = model(batch["x"]), batch["y"]
        half = len(z) // 2
        prototypes = torch.stack([z[:half][y[:half] == c].mean(0) for c in range(3)])
        return F.cross_entropy(-torch.cdist(z[half:], prototypes), y[half:])

    return training(encoder(), loss, each(batch, 8))


def _kernel(x: Tensor, y: Tensor) -> Any:
    return torch.exp(-torch.cdist(x, y).pow(2) / 8)


@entry()
def maximum_mean_discrepancy() -> Training:
    """Two distributions by their kernels over the batch."""

    def loss(one: Tensor, other: Tensor, _: Tensor) -> Any:
        return (
            _kernel(one, one).mean()
            + _kernel(other, other + 1).mean()
            - 2 * _kernel(one, other + 1).mean()
        )

    return _compared(loss)


@entry()
def sinkhorn_distance() -> Training:
    """Optimal transport between two halves of a batch, by twenty iterations."""

    def loss(one: Tensor, other: Tensor, _: Tensor) -> Any:
        cost = torch.cdist(one, other.detach()) ** 2
        u = v = torch.zeros(len(one))
        for _step in range(5):
            u = -torch.logsumexp(-cost + v[None, :], 1)
            v = -torch.logsumexp(-cost + u[:, None], 0)
        plan = torch.exp(-cost + u[:, None] + v[None, :])
        return (plan * cost).sum() / len(one)

    return _compared(loss)


@entry()
def gaussian_process() -> Training:
    """The likelihood of all targets under a kernel of learned features."""

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        z = model(x)
        k = _kernel(z, z) + 0.1 * torch.eye(len(z))
        factor = torch.linalg.cholesky(k)
        solved = torch.cholesky_solve(y[:, None], factor)
        return (0.5 * y @ solved.squeeze(1) + factor.diagonal().log().sum()) / len(y)

    return training(encoder(), loss, each(lambda d: (d.normal(d.size, 16), d.normal(d.size)), 12))


@entry()
def centre_loss() -> Training:
    """Distances to learned centres of classes, halved and by the number of samples."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = encoder()
            self.centres = nn.Parameter(torch.randn(5, 12))
            self.fc = nn.Linear(12, 5)

    def loss(model: Any, batch: Any) -> Any:
        z = model.features(batch["one"])
        centres = model.centres[batch["label"]]
        off = (z - centres).pow(2).sum(1).clamp(1e-12, 1e12).sum() / 2.0 / z.size(0)
        return F.cross_entropy(model.fc(z), batch["label"]) + 0.003 * off

    return training(Centred(), loss, each(_views, 16))


@entry()
def angular_margin() -> Training:
    """ArcFace: a margin for the right class alone."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = encoder()
            self.weight = nn.Parameter(torch.randn(5, 12))

        def forward(self, x: Tensor, label: Tensor) -> Any:
            cosine = F.linear(F.normalize(self.features(x)), F.normalize(self.weight))
            sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
            phi = torch.where(cosine > -0.8, cosine * 0.87 - sine * 0.48, cosine - 0.24)
            one_hot = torch.zeros(cosine.size(), device=x.device)
            one_hot.scatter_(1, label.view(-1, 1).long(), 1)
            return 16 * (one_hot * phi + (1.0 - one_hot) * cosine)

    return training(
        Head(),
        lambda model, b: F.cross_entropy(model(b["one"], b["label"]), b["label"]),
        each(_views, 16),
    )
