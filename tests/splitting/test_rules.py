"""Rules of ops against real numbers: where a loss may be split, its parts give that of the batch.

Each case is a loss written with one op or a few. Whatever the analysis says of it is held against
what the parts really compute; and for each it is written down whether it is to be split at all, so
that a rule which vouches for nothing any more is noticed, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.errors import BadInput
from oomph.jobs.job import Job, compute_loss
from oomph.splitting import prove_split
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.micro_batch import Weigher

SAMPLES, LENGTH, WIDTH = 6, 4, 8
Batch = dict[str, Tensor]
#: Given what the model makes of the batch, the batch, and the model.
Tail = Callable[[Tensor, Batch, "Net"], Tensor]


class Net(nn.Module):
    """Rows of numbers for each sample, and weights of several shapes for losses to use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(10, WIDTH)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.vector = nn.Parameter(torch.randn(WIDTH))
        self.kernel = nn.Parameter(torch.randn(5, LENGTH, 3))
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


def make_batch(seed: int = 0, samples: int = SAMPLES) -> Batch:
    """Masks that leave out more from sample to sample, so that no two parts are alike."""
    torch.manual_seed(seed)
    lengths = 1 + torch.arange(samples) % LENGTH
    return {
        "x": torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64),
        "y": torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64),
        "ids": torch.randint(10, (samples, LENGTH)),
        "kind": torch.randint(WIDTH, (samples,)),
        "lengths": lengths,
        "mask": torch.arange(LENGTH) < lengths[:, None],
        "weight": torch.rand(samples, dtype=torch.float64) + 0.1,
    }


def loss_of(tail: Tail) -> Callable[[nn.Module, Batch], Tensor]:
    """The job's loss: what the tail makes of the model's output."""

    def loss(model: Any, batch: Batch) -> Tensor:
        return tail(model(batch["x"]), batch, model)

    return loss


def split_of(tail: Tail) -> LossSplit:
    model = Net()
    job = Job(model, loss_of(tail), torch.optim.SGD(model.parameters(), 1.0), make_batch())
    return prove_split(job, None)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def assert_parts_give_the_whole(tail: Tail, split: LossSplit, size: int, batch: Batch) -> None:
    whole, parted = Net(), Net()
    job = Job(whole, loss_of(tail), None, batch)
    expected = compute_loss(job, whole, batch)
    expected.backward()
    weigher = Weigher(split=split)
    weigher.begin(batch)
    total = torch.zeros((), dtype=torch.float64)
    for part in weigher.parts(batch, size):
        share = len(part["x"]) / len(batch["x"])
        loss = weigher.weigh(part, share, lambda part=part: compute_loss(job, parted, part))
        loss.backward()
        total += loss.detach()
    weigher.finish()
    weigher.begin(batch)  # which complains of counts that did not add up
    torch.testing.assert_close(total, expected.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(parted), gradients(whole), rtol=1e-8, atol=1e-10)


def each(out: Tensor) -> Tensor:
    """One number for each sample."""
    return out.square().mean((1, 2))


def few(batch: Batch) -> Tensor:
    """A mask that selects nothing of some samples."""
    return batch["mask"] & (batch["lengths"] > 2)[:, None]


SPLIT: dict[str, Tail] = {
    "mean": lambda o, b, m: o.square().mean(),
    "sum": lambda o, b, m: o.square().sum(),
    "whole division": lambda o, b, m: (o * (b["lengths"] // 2)[:, None, None]).mean(),
    "mean of means": lambda o, b, m: o.square().mean(2).mean(1).mean(0),
    "mean of sums": lambda o, b, m: o.square().sum((1, 2)).mean(),
    "sum of means": lambda o, b, m: each(o).sum(),
    "sum over len": lambda o, b, m: each(o).sum() / len(b["x"]),
    "sum over shape": lambda o, b, m: o.square().sum() / (o.shape[0] * o.shape[1]),
    "sum over a tensor of the size": lambda o, b, m: each(o).sum() / torch.tensor(float(len(o))),
    "mean twice": lambda o, b, m: each(o).mean() / o.shape[0],
    "mean and sum": lambda o, b, m: o.square().mean() + 0.1 * o.sum(),
    "sum and mean": lambda o, b, m: 0.1 * o.sum() - o.square().mean(),
    "three terms": lambda o, b, m: o.sum() + o.mean() + o.square().sum() / b["mask"].sum(),
    "mean and penalty": lambda o, b, m: o.square().mean() + m.square.square().sum(),
    "sum and penalty": lambda o, b, m: o.square().sum() + 3 * m.vector.abs().sum(),
    "mean and a number": lambda o, b, m: o.square().mean() + 1.5,
    "stacked terms": lambda o, b, m: torch.stack([o.sum(), o.square().mean()]).sum(),
    "mean and classes of a weight": lambda o, b, m: (
        o.square().mean() + F.cross_entropy(m.square, torch.arange(len(m.square)))
    ),
    "classes of a weight and of samples": lambda o, b, m: (
        F.cross_entropy(m.square, torch.arange(len(m.square)))
        + F.cross_entropy(o.flatten(0, 1), b["ids"].flatten() % WIDTH)
    ),
    "masked mean": lambda o, b, m: (o.square().sum(2) * b["mask"]).sum() / b["mask"].sum(),
    "masked mean of floats": lambda o, b, m: (
        (o.sum(2) * b["mask"].double()).mean() / b["mask"].double().mean()
    ),
    "masked mean, clamped": lambda o, b, m: (
        (o.sum(2) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
    ),
    "masked mean, read in Python": lambda o, b, m: (
        (o.sum(2) * b["mask"]).sum() / b["mask"].sum().item()
    ),
    "masked mean of lengths": lambda o, b, m: (o.sum(2) * b["mask"]).sum() / b["lengths"].sum(),
    "masked per sample": lambda o, b, m: ((o.sum(2) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
    "normalised by the largest": lambda o, b, m: (o.sum((1, 2)) / b["weight"].max()).sum(),
    "weights normalised": lambda o, b, m: (each(o) * (b["weight"] / b["weight"].sum())).sum(),
    "weights normalised, then averaged": lambda o, b, m: (
        each(o) * (b["weight"] / b["weight"].mean())
    ).mean(),
    "selected mean": lambda o, b, m: (o[b["mask"]] - b["y"][b["mask"]]).square().mean(),
    "selected sum": lambda o, b, m: o[b["mask"]].square().sum(),
    "selected sum over its count": lambda o, b, m: o[b["mask"]].square().sum() / b["mask"].sum(),
    "selected error": lambda o, b, m: F.mse_loss(o[b["mask"]], b["y"][b["mask"]]),
    "selected classes": lambda o, b, m: F.cross_entropy(o[b["mask"]], b["ids"][b["mask"]] % WIDTH),
    "selected sum over len": lambda o, b, m: o[b["mask"]].square().sum() / len(o[b["mask"]]),
    "sum of few over their number": lambda o, b, m: (
        o[few(b)].square().sum() / o[few(b)].shape[0] + o.square().mean()
    ),
    "selected kl batchmean": lambda o, b, m: F.kl_div(
        o[b["mask"]].log_softmax(1), b["y"][b["mask"]].softmax(1), reduction="batchmean"
    ),
    "finite mean": lambda o, b, m: torch.nan_to_num(o.square().mean()),
    "finite sum over a count": lambda o, b, m: torch.nan_to_num(
        (o.square().sum(2) * b["mask"]).sum() / b["mask"].sum(), nan=0.0
    ),
    "masked select": lambda o, b, m: o.sum(2).masked_select(b["mask"]).square().mean(),
    "where": lambda o, b, m: torch.where(b["mask"][..., None], o, b["y"]).square().mean(),
    "masked fill": lambda o, b, m: o.masked_fill(~b["mask"][..., None], 0).square().mean(),
    "mse": lambda o, b, m: F.mse_loss(o, b["y"]),
    "mse sum": lambda o, b, m: F.mse_loss(o, b["y"], reduction="sum"),
    "mse none": lambda o, b, m: F.mse_loss(o, b["y"], reduction="none").mean(2).sum(),
    "l1": lambda o, b, m: F.l1_loss(o, b["y"]),
    "huber": lambda o, b, m: F.huber_loss(o, b["y"]),
    "smooth l1": lambda o, b, m: F.smooth_l1_loss(o, b["y"]),
    "bce": lambda o, b, m: F.binary_cross_entropy(o.sigmoid(), b["y"].sigmoid()),
    "bce logits": lambda o, b, m: F.binary_cross_entropy_with_logits(o, b["y"].sigmoid()),
    "bce with weights": lambda o, b, m: F.binary_cross_entropy_with_logits(
        o, b["y"].sigmoid(), pos_weight=m.scale
    ),
    "kl batchmean": lambda o, b, m: F.kl_div(
        o.log_softmax(2), b["y"].softmax(2), reduction="batchmean"
    ),
    "kl mean": lambda o, b, m: F.kl_div(o.log_softmax(2), b["y"].softmax(2), reduction="mean"),
    "classes": lambda o, b, m: F.cross_entropy(o[:, -1], b["kind"]),
    "classes of tokens": lambda o, b, m: F.cross_entropy(o.flatten(0, 1), b["ids"].flatten() % 8),
    "classes, some ignored": lambda o, b, m: F.cross_entropy(
        o.mT, (b["ids"] % 8).masked_fill(~b["mask"], -100)
    ),
    "classes with weights": lambda o, b, m: F.cross_entropy(o[:, 0], b["kind"], weight=m.scale),
    "classes, smoothed, with weights": lambda o, b, m: F.cross_entropy(
        o[:, 0], b["kind"], weight=m.scale, label_smoothing=0.1
    ),
    "classes, summed": lambda o, b, m: F.cross_entropy(o[:, 0], b["kind"], reduction="sum"),
    "classes and a mean": lambda o, b, m: (
        F.cross_entropy(o.mT, (b["ids"] % 8).masked_fill(~b["mask"], -100)) + o.square().mean()
    ),
    "classes and a sum": lambda o, b, m: (
        F.cross_entropy(o.mT, (b["ids"] % 8).masked_fill(~b["mask"], -100))
        + 0.01 * o.square().sum()
    ),
    "probable classes": lambda o, b, m: F.cross_entropy(o[:, 0], b["y"][:, 0].softmax(1)),
    "nll": lambda o, b, m: F.nll_loss(o[:, 0].log_softmax(1), b["kind"]),
    "margin": lambda o, b, m: F.multi_margin_loss(o[:, 0], b["kind"]),
    "hinge of pairs": lambda o, b, m: F.margin_ranking_loss(
        o[:, 0, 0], o[:, 1, 0], b["y"][:, 0, 0].sign(), margin=1.0
    ),
    "cosine": lambda o, b, m: 1 - F.cosine_similarity(o, b["y"], dim=2).mean(),
    "cosine embedding": lambda o, b, m: F.cosine_embedding_loss(
        o[:, 0], b["y"][:, 0], b["y"][:, 0, 0].sign()
    ),
    "triplets": lambda o, b, m: F.triplet_margin_loss(o[:, 0], o[:, 1], b["y"][:, 0], margin=9.0),
    "poisson": lambda o, b, m: F.poisson_nll_loss(o, b["y"].exp()),
    "gaussian": lambda o, b, m: F.gaussian_nll_loss(o, b["y"], o.exp()),
    "ctc": lambda o, b, m: F.ctc_loss(
        o.log_softmax(2).transpose(0, 1),
        1 + b["ids"][:, :2] % 7,
        torch.full((len(o),), LENGTH),
        torch.full((len(o),), 1),
    ),
    "ctc with lengths of the batch": lambda o, b, m: F.ctc_loss(
        o.log_softmax(2).transpose(0, 1),
        1 + b["ids"][:, :2] % 7,
        b["mask"].sum(1) // 2 + 2,
        b["lengths"].clamp(max=2),
        zero_infinity=True,
    ),
    "linear": lambda o, b, m: F.linear(o, m.square, m.vector).square().mean(),
    "steps one by one": lambda o, b, m: sum(step.square().mean() for step in o.unbind(1)),
    "numbers one by one": lambda o, b, m: torch.stack(o.unbind(2)[::2]).square().mean(),
    "matmul": lambda o, b, m: (o @ m.square).square().mean(),
    "matmul from the left": lambda o, b, m: (m.kernel[:, :, 0] @ o).square().mean(),
    "bmm of a sample with itself": lambda o, b, m: torch.bmm(o, b["y"].mT).square().mean(),
    "bmm with the samples in the middle": lambda o, b, m: (
        torch.bmm(o.transpose(0, 1), m.square.expand(LENGTH, WIDTH, WIDTH)).square().mean()
    ),
    "bmm with the samples at the end": lambda o, b, m: (
        torch.bmm(m.square.expand(LENGTH, WIDTH, WIDTH), o.permute(1, 2, 0)).square().mean()
    ),
    "bmm over the samples": lambda o, b, m: torch.bmm(
        o.permute(1, 2, 0), b["y"].transpose(0, 1)
    ).sum(),
    "baddbmm of a sample with itself": lambda o, b, m: (
        torch.baddbmm(o @ o.mT, o, b["y"].mT).square().mean()
    ),
    "baddbmm with the samples in the middle": lambda o, b, m: (
        torch.baddbmm(b["y"].transpose(0, 1), o.transpose(0, 1), m.square.expand(LENGTH, -1, -1))
        .square()
        .mean()
    ),
    "baddbmm with the samples at the end": lambda o, b, m: (
        torch.baddbmm(b["y"].permute(1, 2, 0), m.square.expand(LENGTH, -1, -1), o.permute(1, 2, 0))
        .square()
        .mean()
    ),
    "mm": lambda o, b, m: torch.mm(o.sum(1), m.square).square().mean(),
    "mm from the left": lambda o, b, m: torch.mm(m.square, o.sum(1).mT).square().mean(),
    "mm over the samples": lambda o, b, m: torch.mm(o.sum(1).mT, b["y"].sum(1)).sum(),
    "addmm": lambda o, b, m: torch.addmm(b["y"].sum(1), o.sum(1), m.square).square().mean(),
    "addmm from the left": lambda o, b, m: (
        torch.addmm(b["y"].sum(1).mT, m.square, o.sum(1).mT).square().mean()
    ),
    "mv": lambda o, b, m: torch.mv(o.sum(1), m.vector).square().mean(),
    "mv over the samples": lambda o, b, m: torch.mv(o.sum(1).mT, b["weight"]).sum(),
    "addmv": lambda o, b, m: torch.addmv(b["weight"], o.sum(1), m.vector).square().mean(),
    "dot": lambda o, b, m: torch.dot(each(o), b["weight"]),
    "vdot": lambda o, b, m: torch.vdot(b["weight"], each(o)),
    "addr": lambda o, b, m: torch.addr(o.sum(1), b["weight"], m.vector).square().mean(),
    "addr with the samples at the end": lambda o, b, m: (
        torch.addr(o.sum(1).mT, m.vector, b["weight"]).square().mean()
    ),
    "einsum": lambda o, b, m: torch.einsum("btw,vw->btv", o, m.square).square().mean(),
    "einsum of a sample": lambda o, b, m: torch.einsum("btw,bsw->bts", o, b["y"]).tanh().sum(),
    "einsum that sums": lambda o, b, m: torch.einsum("btw,btw->", o, b["y"]),
    "matrix vector": lambda o, b, m: (o @ m.vector).square().mean(),
    "product that sums over samples": lambda o, b, m: (
        o.flatten(0, 1).T @ b["y"].flatten(0, 1)
    ).sum(),
    "vector dot": lambda o, b, m: torch.dot(each(o), b["weight"]),
    "conv": lambda o, b, m: F.conv1d(o, m.kernel, padding=1).square().mean(),
    "pool": lambda o, b, m: F.avg_pool1d(o, 2).square().mean(),
    "max pool": lambda o, b, m: F.max_pool1d(o, 2).square().mean(),
    "adaptive pool": lambda o, b, m: F.adaptive_avg_pool1d(o, 2).square().mean(),
    "interpolate": lambda o, b, m: F.interpolate(o, size=5).square().mean(),
    "layer norm": lambda o, b, m: F.layer_norm(o, (WIDTH,), m.vector).square().mul(b["y"]).mean(),
    "layer norm of all of a sample": lambda o, b, m: (
        F.layer_norm(o, (LENGTH, WIDTH)).mul(b["y"]).mean()
    ),
    "group norm": lambda o, b, m: F.group_norm(o, 2).mul(b["y"]).mean(),
    "instance norm": lambda o, b, m: F.instance_norm(o).mul(b["y"]).mean(),
    "rms norm": lambda o, b, m: F.rms_norm(o, (WIDTH,)).mul(b["y"]).mean(),
    "softmax": lambda o, b, m: o.softmax(2).mul(b["y"]).mean(),
    "softmax over time": lambda o, b, m: o.softmax(1).mul(b["y"]).mean(),
    "attention": lambda o, b, m: (
        F.scaled_dot_product_attention(
            o[:, None], b["y"][:, None], b["x"][:, None], attn_mask=b["mask"][:, None, None]
        )
        .square()
        .mean()
    ),
    "causal attention": lambda o, b, m: (
        F.scaled_dot_product_attention(o[:, None], o[:, None], b["x"][:, None], is_causal=True)
        .square()
        .mean()
    ),
    "embedding": lambda o, b, m: (m.table(b["ids"]) * o).mean(),
    "entries of a table that is the same for all": lambda o, b, m: (
        m.scale.gather(0, b["kind"]) * each(o)
    ).mean(),
    "one hot": lambda o, b, m: (F.one_hot(b["kind"], WIDTH) * o[:, 0]).sum(1).mean(),
    "gather": lambda o, b, m: o.gather(2, (b["ids"] % WIDTH)[..., None]).mean(),
    "last of each": lambda o, b, m: o[torch.arange(len(o)), b["lengths"] - 1].square().mean(),
    "class of each": lambda o, b, m: o[:, 0][torch.arange(len(o)), b["kind"]].mean(),
    "table by class": lambda o, b, m: (m.scale[b["kind"]] * each(o)).mean(),
    "scatter": lambda o, b, m: (
        torch.zeros_like(o).scatter(2, (b["ids"] % WIDTH)[..., None], o[..., :1]).square().mean()
    ),
    "topk of a sample": lambda o, b, m: o.flatten(1).topk(3, 1).values.mean(),
    "sorted sample": lambda o, b, m: o.sort(1).values.mul(b["y"]).mean(),
    "sums along time": lambda o, b, m: o.cumsum(1).mul(b["y"]).mean(),
    "largest of a sample": lambda o, b, m: o.amax((1, 2)).mean(),
    "norm of a sample": lambda o, b, m: o.flatten(1).norm(dim=1).mean(),
    "variance within a sample": lambda o, b, m: o.flatten(1).var(1).mean(),
    "logsumexp of a sample": lambda o, b, m: o.flatten(1).logsumexp(1).mean(),
    "reshaped": lambda o, b, m: o.reshape(-1, 2, WIDTH).mul(m.vector).square().sum(2).mean(),
    "time first": lambda o, b, m: o.transpose(0, 1).mul(b["y"].transpose(0, 1)).mean(),
    "time first, flattened": lambda o, b, m: (
        (o.transpose(0, 1).reshape(-1, WIDTH) @ m.square)
        .reshape(LENGTH, -1, WIDTH)
        .transpose(0, 1)
        .mul(b["y"])
        .mean()
    ),
    "concatenated": lambda o, b, m: torch.cat([o, b["y"]], 1).square().mean(),
    "both sides through one model": lambda o, b, m: (
        (m(torch.cat([b["x"], b["y"]])).chunk(2)[0] - m(torch.cat([b["x"], b["y"]])).chunk(2)[1])
        .square()
        .mean()
    ),
    "stacked": lambda o, b, m: torch.stack([o, b["y"]], 1).square().mean(),
    "repeated": lambda o, b, m: (o.repeat(1, 2, 1) * torch.cat([b["y"], b["x"]], 1)).mean(),
    "repeated samples": lambda o, b, m: o.repeat_interleave(3, 0).square().mean(),
    "expanded": lambda o, b, m: (m.vector.expand(len(o), LENGTH, WIDTH) * o).mean(),
    "slices": lambda o, b, m: (o[:, 1:] - o[:, :-1]).square().mean(),
    "padded": lambda o, b, m: F.pad(o, (1, 1)).square().mean(),
    "unbound in time": lambda o, b, m: torch.stack(list(o.unbind(1)), 1).mul(b["y"]).mean(),
    "a loop over time": lambda o, b, m: _loop(o, m).mean(),
    "in place": lambda o, b, m: o.clone().mul_(b["y"]).add_(1).square_().mean(),
    "written in parts": lambda o, b, m: _written(o, b).mul(b["y"]).mean(),
    "fourier": lambda o, b, m: torch.fft.rfft(o, dim=1).abs().mean(),
    "distances within a sample": lambda o, b, m: torch.cdist(o, b["y"]).mean(),
    "distances to a table": lambda o, b, m: (
        torch.cdist(o, m.table.weight).amin(2).mean()
        + torch.cdist(o.flatten(0, 1), m.table.weight, compute_mode="use_mm_for_euclid_dist").mean()
    ),
    "bins": lambda o, b, m: (torch.bucketize(b["weight"], m.scale)[:, None, None] * o).mean(),
    "whole parts": lambda o, b, m: (o * (b["ids"] // 2)[..., None]).mean(),
    "cut without a check": lambda o, b, m: torch.unsafe_chunk(o, 2, 2)[1].square().mean(),
    "missing numbers are asked for": lambda o, b, m: (
        o.square().mean() * (2.0 if torch.isnan(_with_gaps(b)).any() else 1.0)
    ),
    "inverse of a sample": lambda o, b, m: torch.linalg.inv(
        o[:, :, :4] + 9 * torch.eye(4, dtype=o.dtype)
    ).mean(),
    "clamped rows": lambda o, b, m: o.clamp(-0.5, 0.5).mul(b["y"]).mean(),
    "derivative by the input": lambda o, b, m: _slope(b, m).square().mean(),
    "detached": lambda o, b, m: (o - o.mean((1, 2), keepdim=True).detach()).square().mean(),
    "a scale that is learned": lambda o, b, m: o.square().mean() * m.vector.exp().sum(),
    "a table that is written, counted with the batch": lambda o, b, m: (
        o.sum() / (_first_column(len(o)) * b["weight"][:, None]).sum()
    ),
    "places that are shown to each sample where there are several": lambda o, b, m: (
        (o * _places(len(o))[..., None]).square().mean()
    ),
    "labels written over a copy": lambda o, b, m: F.cross_entropy(
        o[:, 0], _without(b["kind"], 1), ignore_index=-1
    ),
}

WHOLE: dict[str, Tail] = {
    "over a sum of a list": lambda o, b, m: o.square().sum() / sum(b["lengths"].tolist()),
    "over a sum in numpy": lambda o, b, m: o.square().sum() / float(b["lengths"].numpy().sum()),
    "selected sum over another number": lambda o, b, m: (
        o[b["mask"]].sum() / (len(o[b["mask"]]) + 1)
    ),
    "selected sum over what another mask selects": lambda o, b, m: (
        o[b["mask"]].sum() / len(o[few(b)])
    ),
    "selected sum over the number's square": lambda o, b, m: (
        o[b["mask"]].sum() / len(o[b["mask"]]) ** 2
    ),
    "finite root": lambda o, b, m: torch.nan_to_num(o.square().mean()).sqrt(),
    "samples one by one, put together": lambda o, b, m: torch.cat(list(o.unbind(0))).mean(),
    "root of a mean": lambda o, b, m: o.square().mean().sqrt(),
    "log of a sum": lambda o, b, m: o.exp().sum().log(),
    "product of means": lambda o, b, m: o.mean() * o.square().mean(),
    "ratio of sums": lambda o, b, m: o.square().sum() / (1 + o.exp().sum()),
    "largest of all": lambda o, b, m: o.amax(),
    "variance over samples": lambda o, b, m: o.var(0).mean(),
    "softmax over samples": lambda o, b, m: o.softmax(0).mul(b["y"]).sum(),
    "contrastive": lambda o, b, m: F.cross_entropy(o[:, 0] @ b["y"][:, 0].T, torch.arange(len(o))),
    "differences between samples": lambda o, b, m: (each(o)[:, None] - each(o)).square().mean(),
    "rolled": lambda o, b, m: (o * o.roll(1, 0)).mean(),
    "flipped": lambda o, b, m: (o * o.flip(0)).mean(),
    "halves": lambda o, b, m: (o[: len(o) // 2] - o[len(o) // 2 :]).square().mean(),
    "first sample": lambda o, b, m: o[0].square().mean(),
    "every second sample": lambda o, b, m: o[::2].square().mean(),
    "shuffled": lambda o, b, m: (o * o[torch.randperm(len(o))]).mean(),
    "weighed by place": lambda o, b, m: (each(o) * torch.arange(len(o))).sum(),
    "hardest half": lambda o, b, m: each(o).topk(len(o) // 2).values.mean(),
    "sorted samples": lambda o, b, m: (each(o).sort().values * b["weight"]).sum(),
    "confident samples": lambda o, b, m: o[o.sum(2) > 0].square().mean(),
    "divided by what is confident": lambda o, b, m: o.square().sum() / (o > 0).sum(),
    "centred on the batch": lambda o, b, m: (o - o.mean(0)).square().mean(),
    "batch norm": lambda o, b, m: (
        F.batch_norm(o.flatten(1), None, None, training=True).square().mul(b["y"].flatten(1)).mean()
    ),
    "dice over the batch": lambda o, b, m: (
        1 - 2 * (o.sigmoid() * b["mask"][..., None]).sum() / (o.sigmoid().sum() + b["mask"].sum())
    ),
    "gram matrix": lambda o, b, m: (o.flatten(1).T @ o.flatten(1)).square().mean(),
    "distances between samples": lambda o, b, m: torch.cdist(o.flatten(1), o.flatten(1)).sum(),
    "distances between samples, by products": lambda o, b, m: torch.cdist(
        o.flatten(1), b["y"].flatten(1), compute_mode="use_mm_for_euclid_dist"
    ).mean(),
    "ctc with lengths from elsewhere": lambda o, b, m: F.ctc_loss(
        o.log_softmax(2).transpose(0, 1),
        1 + b["ids"][:, :2] % 7,
        _LENGTHS[: 99 if len(o) else 0],
        b["lengths"].clamp(max=2),
    ),
    "a mask of sizes, counted with the batch": lambda o, b, m: (
        o.sum() / (torch.arange(LENGTH).expand(len(o), LENGTH) < b["lengths"][:, None]).sum()
    ),
    "a mask that is written through a view, and counted": lambda o, b, m: (
        o.sum() / _without_first(b["mask"]).sum()
    ),
    "filled with what others bring": lambda o, b, m: (
        o.masked_scatter(b["mask"][..., None].expand_as(o), b["y"]).mul(b["x"]).mean()
    ),
    "samples in a row": lambda o, b, m: o.flatten(0, 1).cumsum(0).mean(),
    "mixed by a reshape": lambda o, b, m: o.reshape(2, -1, WIDTH).amax(1).mean(),
    "one sample at a time": lambda o, b, m: torch.stack(
        [o[at].square().mean() for at in range(len(o))]
    ).mean(),
    "a hook on what is in between": lambda o, b, m: _hooked(o).square().mean(),
    "a function with its own backward": lambda o, b, m: _Clipped.apply(o).square().mean(),
    "lengths read in Python": lambda o, b, m: o[:, : int(b["lengths"][0])].mean(),
    "a branch on what the model makes": lambda o, b, m: (
        o.square().mean() if o.mean() > 0 else o.abs().mean()
    ),
    "a branch on a number the model makes": lambda o, b, m: (
        o.square().mean() if 2 * o.mean().item() < 50 else o.abs().mean()
    ),
    "a number that is cut off": lambda o, b, m: o.square().mean() * int(o.exp().mean().item()),
    "the larger of a number and another": lambda o, b, m: (
        o.square().sum() / max((o > 0).sum().item(), 1)
    ),
    "a count the model makes": lambda o, b, m: o.square().sum() * (o > 0).sum().item(),
    "a list of numbers": lambda o, b, m: o.square().mean() * sum(b["lengths"].tolist()),
}


#: As many as the batch has samples, but none of its tensors.
_LENGTHS = torch.full((SAMPLES,), LENGTH)


def _with_gaps(batch: Batch) -> Tensor:
    return batch["weight"].masked_fill(batch["lengths"] < 3, torch.nan)


def _places(samples: int) -> Tensor:
    places = torch.arange(LENGTH)[None]
    return places if len(places) == samples else places.expand(samples, -1)


def _without(kinds: Tensor, gone: int) -> Tensor:
    labels = kinds.clone()
    labels[labels == gone] = -1
    return labels


def _without_first(mask: Tensor) -> Tensor:
    copy = mask.clone()
    copy.view(-1)[(copy.cumsum(1) == 1).view(-1)] = False
    return copy


def _first_column(samples: int) -> Tensor:
    table = torch.ones(samples, LENGTH, dtype=torch.float64)
    table[:, 1:] = 0
    return table


#: Losses that use how many samples there are, or how many a mask selects, as a plain number. They
#: are split right or not at all, whether or not the batch that was looked at was padded.
NUMBERS: dict[str, Tail] = {
    "a share for each": lambda o, b, m: (
        each(o) * torch.full((len(o),), 1 / len(o), dtype=o.dtype)
    ).sum(),
    "a share for each, like others": lambda o, b, m: (
        each(o) * torch.full_like(each(o), 1 / len(o))
    ).sum(),
    "a share for each, new": lambda o, b, m: (each(o) * o.new_full((len(o),), 1 / len(o))).sum(),
    "a share that is written": lambda o, b, m: (
        o * torch.zeros_like(o).scatter(2, (b["ids"] % WIDTH)[..., None], 1 / len(o))
    ).sum(),
    "a share of a product": lambda o, b, m: (
        torch.addmm(m.vector, o.flatten(0, 1), m.square, alpha=1 / len(o)).square().sum()
    ),
    "a column": lambda o, b, m: o.flatten(1)[:, len(o) - 3].square().mean(),
    "columns": lambda o, b, m: o.flatten(1)[:, len(o) - 3 : len(o)].square().mean(),
    "counting from it": lambda o, b, m: (o * torch.arange(len(o), len(o) + WIDTH)).mean(),
    "rolled so far": lambda o, b, m: (o.roll(len(o), 2) * b["y"]).mean(),
    "a triangle": lambda o, b, m: m.square.tril(len(o) - 4).sum() + o.mean(),
    "padding": lambda o, b, m: F.pad(o, (1, 1), value=1 / len(o)).square().sum(),
    "a norm's power": lambda o, b, m: o.norm(p=len(o), dim=2).mean(),
    "a correction": lambda o, b, m: o.var((1, 2), correction=len(o)).mean(),
    "an epsilon": lambda o, b, m: (F.layer_norm(o, (WIDTH,), eps=1 / len(o)) * b["y"]).sum(),
    "smoothing": lambda o, b, m: F.cross_entropy(o[:, 0], b["kind"], label_smoothing=1 / len(o)),
    "where a loss turns": lambda o, b, m: F.huber_loss(o, b["y"], delta=1 / len(o)),
    "a scale of attention": lambda o, b, m: (
        F.scaled_dot_product_attention(o, b["y"], b["x"], scale=1 / len(o)).square().mean()
    ),
    "a number elsewhere": lambda o, b, m: torch.where(b["mask"][..., None], o, 1 / len(o)).mean(),
    "the larger": lambda o, b, m: o.square().sum() / max(len(o), 4),
    "the smaller": lambda o, b, m: o.square().sum() / min(len(o), 2),
    "another for few": lambda o, b, m: o.square().sum() / (len(o) if len(o) > 2 else 7),
    "odd and even": lambda o, b, m: o.square().mean() * (2.0 if len(o) % 2 else 1.0),
    "half": lambda o, b, m: o.square().sum() / (len(o) // 2 + 1),
    "a third, rounded up": lambda o, b, m: o.square().sum() / -(-len(o) // 3),
    "no spread of one": lambda o, b, m: (
        o.square().mean() if len(o) == 1 else o.square().mean() + o.abs().mean()
    ),
    "how many are selected": lambda o, b, m: o[b["mask"]].square().sum() / len(o[b["mask"]]),
    "how many words are selected": lambda o, b, m: (
        o[b["mask"]].square().sum() / b["ids"][b["mask"]].numel()
    ),
    "how many are selected in a line": lambda o, b, m: (
        o.sum(2).masked_select(b["mask"]).sum() / b["ids"].masked_select(b["mask"]).shape[0]
    ),
    "how many are not zero": lambda o, b, m: (
        (o.sum(2) * b["mask"]).sum() / len(b["mask"].nonzero())
    ),
    "a state of others": lambda o, b, m: _in_another_order(o, b),
}


def _in_another_order(out: Tensor, batch: Batch) -> Tensor:
    torch.manual_seed(1)
    layer = nn.GRU(WIDTH, WIDTH, batch_first=True).double().requires_grad_(False)
    state = torch.repeat_interleave(batch["y"][:, 0], 2, 0)[None]
    return (layer(torch.cat([out, out]), state)[0] * torch.cat([batch["y"], batch["x"]])).mean()


def _loop(out: Tensor, model: Net) -> Tensor:
    state = torch.zeros(len(out), WIDTH, dtype=out.dtype)
    for at in range(LENGTH):
        state = torch.tanh(out[:, at] + state @ model.square)
    return state


def _written(out: Tensor, batch: Batch) -> Tensor:
    written = torch.zeros_like(out)
    written[:, 0] = out[:, 1]
    written[:, 1:] = batch["y"][:, 1:] * 2
    written[~batch["mask"]] = 0.5
    return written


def _slope(batch: Batch, model: Net) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope


def _hooked(out: Tensor) -> Tensor:
    out = out * 1.0
    out.register_hook(lambda gradient: gradient / gradient.norm())
    return out


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


@pytest.mark.parametrize("name", SPLIT)
def test_a_loss_is_split_and_its_parts_give_that_of_the_batch(name: str) -> None:
    split = split_of(SPLIT[name])
    assert not split.whole_because
    for size, seed, samples in ((1, 0, 6), (2, 1, 5), (4, 2, 6)):
        assert_parts_give_the_whole(SPLIT[name], split, size, make_batch(seed, samples))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", NUMBERS)
def test_plain_numbers_are_followed_or_keep_the_batch_whole(name: str, padded: bool) -> None:
    model, batch = Net(), make_batch()
    if not padded:
        batch["mask"] = torch.ones_like(batch["mask"])
        batch["lengths"] = torch.full_like(batch["lengths"], LENGTH)
    split = prove_split(Job(model, loss_of(NUMBERS[name]), "sgd", batch), None)
    if not split.whole_because:
        for size, seed, samples in ((1, 0, 6), (2, 1, 5), (4, 2, 6), (3, 3, 7)):
            assert_parts_give_the_whole(NUMBERS[name], split, size, make_batch(seed, samples))


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_that_compares_samples_keeps_its_batch_whole(name: str) -> None:
    assert split_of(WHOLE[name]).whole_because


#: From rows to rows, for losses that hypothesis puts together.
STEPS: list[Callable[[Tensor, Batch, Net], Tensor]] = [
    lambda o, b, m: o * b["y"],
    lambda o, b, m: o @ m.square,
    lambda o, b, m: o - o.mean(0, keepdim=True),
    lambda o, b, m: o.softmax(1),
    lambda o, b, m: o.transpose(0, 1).contiguous().view(LENGTH, -1, WIDTH).transpose(0, 1),
    lambda o, b, m: o * b["mask"][..., None],
    lambda o, b, m: o / b["mask"].sum(),
    lambda o, b, m: o / len(o),
    lambda o, b, m: o.roll(1, 0),
    lambda o, b, m: o + m.table(b["ids"]),
    lambda o, b, m: torch.cat([o, o]).tanh().chunk(2)[1],
    lambda o, b, m: F.layer_norm(o, (WIDTH,)),
    lambda o, b, m: o * b["weight"][:, None, None] / b["weight"].sum(),
    lambda o, b, m: o.flatten(0, 1).view(-1, LENGTH, WIDTH),
    lambda o, b, m: o.reshape(LENGTH, -1, WIDTH).transpose(0, 1),
    lambda o, b, m: torch.einsum("btw,bsw,bsv->btv", o, b["y"], b["x"]),
    lambda o, b, m: o + o.amax(0),
    lambda o, b, m: o[torch.arange(len(o))],
]
ENDS: list[Tail] = [
    lambda o, b, m: o.mean(),
    lambda o, b, m: o.square().sum(),
    lambda o, b, m: o.square().sum() / b["mask"].sum(),
    lambda o, b, m: o.mean() + o.square().sum(),
    lambda o, b, m: o.square().mean().sqrt(),
    lambda o, b, m: F.cross_entropy(o.mT, (b["ids"] % 8).masked_fill(~b["mask"], -100)),
    lambda o, b, m: o[b["mask"]].square().mean(),
    lambda o, b, m: (each(o) * b["weight"]).sum() / b["weight"].sum(),
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.integers(0, len(STEPS) - 1), max_size=4),
    ends=st.lists(st.integers(0, len(ENDS) - 1), min_size=1, max_size=2),
    size=st.integers(1, 4),
)
def test_whatever_is_split_gives_the_numbers_of_the_whole(
    steps: list[int], ends: list[int], size: int
) -> None:
    def tail(out: Tensor, batch: Batch, model: Net) -> Tensor:
        for at in steps:
            out = STEPS[at](out, batch, model)
        terms = [ENDS[at](out, batch, model) for at in ends]
        return terms[0] if len(terms) == 1 else terms[0] + 0.5 * terms[1]

    split = split_of(tail)
    if not split.whole_because:
        assert_parts_give_the_whole(tail, split, size, make_batch(3, 7))


def test_a_part_that_is_filled_with_what_others_bring_is_refused() -> None:
    def tail(out: Tensor, batch: Batch, model: Net) -> Tensor:
        filled = out.masked_scatter(batch["mask"][..., None].expand_as(out), batch["y"])
        return filled.mul(batch["x"]).mean()

    full, padded = make_batch(), make_batch()
    full["mask"] = torch.ones_like(full["mask"])
    split = prove_split(Job(Net(), loss_of(tail), "sgd", full), None)
    assert not split.whole_because
    assert_parts_give_the_whole(tail, split, 2, full)
    with pytest.raises(BadInput, match="masked_scatter"):
        assert_parts_give_the_whole(tail, split, 2, padded)


def test_a_part_whose_loss_is_not_finite_is_refused_where_nan_to_num_would_hide_it() -> None:
    def tail(out: Tensor, batch: Batch, model: Net) -> Tensor:
        return torch.nan_to_num((out / batch["weight"][:, None, None]).sum())

    split, batch = split_of(tail), make_batch()
    assert_parts_give_the_whole(tail, split, 2, batch)
    batch["weight"][3] = 0
    with pytest.raises(BadInput, match="nan_to_num replaces the loss of a part"):
        assert_parts_give_the_whole(tail, split, 2, batch)
