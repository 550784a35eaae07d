"""Norms, statistics, counters and chance inside a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, each, training

WIDTH = 16


def _pictures(drawn: Drawn) -> tuple[Tensor, Tensor]:
    return 1 + 2 * drawn.normal(drawn.size, 3, 16, 16), drawn.whole(5, drawn.size)


class Convolutions(nn.Module):
    """A small residual net around layers that are looked at."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer,
        depth: int = 4,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(wrap(nn.Conv2d(WIDTH, WIDTH, 3, padding=1)), norm(), nn.ReLU())
                for _ in range(depth)
            ]
        )
        self.fc = wrap(nn.Linear(WIDTH, 5))

    def forward(self, x: Tensor) -> Any:
        """Scores of classes."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.fc(x.mean((2, 3)))


def _with(norm: Callable[[], nn.Module], steps: str = "sgd") -> Training:
    return training(Convolutions(norm), nn.CrossEntropyLoss(), each(_pictures), steps)


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Training:
    return training(Convolutions(nn.Identity, wrap), nn.CrossEntropyLoss(), each(_pictures))


@entry()
def batch_norm() -> Training:
    """PyTorch's own."""
    return _with(lambda: nn.BatchNorm2d(WIDTH))


@entry()
def batch_norm_frozen() -> Training:
    """In training but for its norms, which its author set to evaluation."""
    made = _with(lambda: nn.BatchNorm2d(WIDTH))
    for module in made.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    made.model.train = lambda mode=True: made.model  # type: ignore[method-assign]
    return made


@entry()
def group_norm() -> Training:
    """Statistics within each sample."""
    return _with(lambda: nn.GroupNorm(4, WIDTH), "adam")


@entry()
def instance_norm_with_statistics() -> Training:
    """Each sample by itself, but running statistics are written."""
    return _with(lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True))


@entry()
def instance_norm() -> Training:
    """Each sample by itself."""
    return _with(lambda: nn.InstanceNorm2d(WIDTH))


class HandBatchNorm(nn.Module):
    """As in Dive into Deep Learning: moving averages are attributes, not buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, width, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, width, 1, 1))
        self.moving_mean = torch.zeros(1, width, 1, 1)
        self.moving_var = torch.ones(1, width, 1, 1)

    def forward(self, x: Tensor) -> Any:
        """By the mean of the batch."""
        if not self.training:
            return self.gamma * (x - self.moving_mean) / (self.moving_var + 1e-5).sqrt() + self.beta
        mean = x.mean(dim=(0, 2, 3), keepdim=True)
        var = ((x - mean) ** 2).mean(dim=(0, 2, 3), keepdim=True)
        self.moving_mean = 0.9 * self.moving_mean + 0.1 * mean.detach()
        self.moving_var = 0.9 * self.moving_var + 0.1 * var.detach()
        return self.gamma * (x - mean) / torch.sqrt(var + 1e-5) + self.beta


@entry()
def batch_statistics_by_hand() -> Training:
    """Averages over the batch that no class of PyTorch shows."""
    made = _with(lambda: HandBatchNorm(WIDTH))
    norms = [one for one in made.model.modules() if isinstance(one, HandBatchNorm)]
    made.state = lambda: [(one.moving_mean, one.moving_var) for one in norms]
    return made


class GhostBatchNorm(nn.Module):
    """Groups of three samples are normalised by themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(width, affine=False)

    def forward(self, x: Tensor) -> Any:
        """Chunk by chunk."""
        return torch.cat([self.bn(chunk) for chunk in x.split(3)], 0)


@entry()
def ghost_batch_norm() -> Training:
    """Norms over small groups of samples."""
    return _with(lambda: GhostBatchNorm(WIDTH))


class BatchRenorm(nn.Module):
    """Batch norm, corrected by its running statistics."""

    running_mean: Tensor
    running_std: Tensor
    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_std", torch.ones(width))
        self.register_buffer("seen", torch.tensor(0, dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Any:
        """By the batch, clipped towards what it is on average."""
        mean = x.mean((0, 2, 3))
        std = x.std((0, 2, 3), unbiased=False) + 1e-3
        bound = (2 / 35 * self.seen + 1).clamp(1.0, 3.0)
        r = torch.clamp(std.detach() / self.running_std, 1 / bound, bound)
        d = torch.clamp((mean.detach() - self.running_mean) / self.running_std, -1, 1)
        self.running_mean += 0.1 * (mean.detach() - self.running_mean)
        self.running_std += 0.1 * (std.detach() - self.running_std)
        self.seen += 1
        x = (x - mean[:, None, None]) / std[:, None, None] * r[:, None, None] + d[:, None, None]
        return x * self.weight[:, None, None]


@entry()
def batch_renorm() -> Training:
    """Statistics of the batch, running statistics and a counter."""
    return _with(lambda: BatchRenorm(WIDTH))


class SwitchableNorm(nn.Module):
    """A learned mixture of instance, layer and batch statistics."""

    running_mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.ones(1, width, 1, 1))
        self.register_buffer("running_mean", torch.zeros(1, width, 1))

    def forward(self, x: Tensor) -> Any:
        """By all three."""
        n, c, h, w = x.size()
        x = x.view(n, c, -1)
        mean_in, var_in = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        temp = var_in + mean_in**2
        mean_ln = mean_in.mean(1, keepdim=True)
        var_ln = temp.mean(1, keepdim=True) - mean_ln**2
        mean_bn = mean_in.mean(0, keepdim=True)
        var_bn = temp.mean(0, keepdim=True) - mean_bn**2
        self.running_mean.mul_(0.9)
        self.running_mean.add_(0.1 * mean_bn.data)
        a, b = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = a[0] * mean_in + a[1] * mean_ln + a[2] * mean_bn
        var = b[0] * var_in + b[1] * var_ln + b[2] * var_bn
        return ((x - mean) / (var + 1e-5).sqrt()).view(n, c, h, w) * self.weight


@entry()
def switchable_norm() -> Training:
    """Three kinds of statistics."""
    return _with(lambda: SwitchableNorm(WIDTH))


@entry()
def spectral_norm_of_old() -> Training:
    """By a hook that writes a buffer with each forward."""
    return _wrapped(lambda layer: nn.utils.spectral_norm(layer))


@entry()
def spectral_norm() -> Training:
    """By a parametrization that writes a buffer with each forward."""
    return _wrapped(lambda layer: nn.utils.parametrizations.spectral_norm(layer))


@entry()
def weight_norm() -> Training:
    """By a parametrization."""
    return _wrapped(lambda layer: nn.utils.parametrizations.weight_norm(layer))


@entry()
def orthogonal_weights() -> Training:
    """Square matrices that stay orthogonal."""

    def wrap(layer: nn.Module) -> nn.Module:
        return nn.utils.parametrizations.orthogonal(layer, orthogonal_map="cayley")

    layers = [m for _ in range(4) for m in (wrap(nn.Linear(32, 32)), nn.Tanh())]
    return training(
        nn.Sequential(*layers, nn.Linear(32, 1)),
        nn.MSELoss(),
        each(lambda d: (d.normal(d.size, 32), d.normal(d.size, 1)), 24),
    )


class StandardizedConv(nn.Conv2d):
    """Weight standardization."""

    def forward(self, x: Tensor) -> Any:
        """A convolution by normalised weights."""
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.view(w.size(0), -1).std(1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


@entry()
def weight_standardization() -> Training:
    """Weights are normalised in each forward."""

    def wrap(layer: nn.Module) -> nn.Module:
        is_conv = isinstance(layer, nn.Conv2d)
        return StandardizedConv(WIDTH, WIDTH, 3, padding=1) if is_conv else layer

    return training(
        Convolutions(lambda: nn.GroupNorm(4, WIDTH), wrap), nn.CrossEntropyLoss(), each(_pictures)
    )


class Counting(nn.Module):
    """A layer that counts its forwards, and goes by the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.steps = 0

    def forward(self, x: Tensor) -> Any:
        """Warmer with each call."""
        self.steps += 1
        self.calls += 1
        return x * min(1.0, self.steps / 4)


@entry()
def counters_in_forward() -> Training:
    """A buffer and a Python number count forwards, and the output depends on them."""
    made = _with(Counting)
    counters = [one for one in made.model.modules() if isinstance(one, Counting)]
    made.state = lambda: [one.steps for one in counters]
    return made


class MovingAverage(nn.Module):
    """Activations beside their average over all steps so far."""

    average: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Any:
        """What is new in it."""
        with torch.no_grad():
            self.average = self.average * 0.9 + x.mean((0, 2, 3)) * 0.1
        return x - self.average[:, None, None]


@entry()
def moving_average_in_forward() -> Training:
    """A buffer is put in another's place with each forward."""
    return _with(lambda: MovingAverage(WIDTH))


class DropPath(nn.Module):
    """Whole branches of samples are dropped by chance."""

    def forward(self, x: Tensor) -> Any:
        """Some samples are zero."""
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.8)
        return x.div(0.8) * keep


@entry(draws=True)
def stochastic_depth() -> Training:
    """Branches dropped for each sample."""
    return _with(DropPath)


@entry(draws=True)
def dropouts() -> Training:
    """Three kinds of dropout."""

    def norm() -> nn.Module:
        return nn.Sequential(nn.Dropout2d(0.1), nn.AlphaDropout(0.05), nn.Dropout(0.1))

    return _with(norm, "adam")


@entry()
def layer_skipped_by_python() -> Training:
    """A branch that Python's own chance decides for the whole batch."""
    import random

    class Skipped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 0 if random.random() < 0.3 else x

    return _with(Skipped)


class MixUp(nn.Module):
    """A net whose forward mixes each picture with another of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Convolutions(lambda: nn.GroupNorm(4, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """The mixed loss."""
        share = 0.7
        order = torch.arange(x.size(0) - 1, -1, -1)
        scores = self.net(share * x + (1 - share) * x[order])
        one, other = F.cross_entropy(scores, y), F.cross_entropy(scores, y[order])
        return share * one + (1 - share) * other


@entry()
def mixup_in_the_model() -> Training:
    """Each sample is mixed with the one at the other end of the batch; the loss is class means."""
    return training(MixUp(), lambda model, b: model(*b), each(_pictures))


@entry()
def cutmix_with_rolled_labels() -> Training:
    """A corner of the picture before; written in place."""

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        x = x.clone()
        x[:, :, :6, :6] = x.roll(1, 0)[:, :, :6, :6]
        scores = model(x)
        share = 1 - 36 / 256
        return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y.roll(1))

    return training(Convolutions(lambda: nn.GroupNorm(4, WIDTH)), loss, each(_pictures))


class Whitening(nn.Module):
    """Features decorrelated over the batch."""

    def forward(self, x: Tensor) -> Any:
        """By the Cholesky factor of their covariance."""
        x = x - x.mean(0)
        covariance = x.t() @ x / (x.size(0) - 1) + 1e-1 * torch.eye(x.size(1))
        factor = torch.linalg.cholesky(covariance)
        return torch.linalg.solve_triangular(factor, x.t(), upper=False).t()


@entry()
def whitening_over_the_batch() -> Training:
    """A covariance of samples inside the model."""
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh(), Whitening())]
    return training(
        nn.Sequential(*layers, nn.Linear(32, 1)),
        nn.MSELoss(),
        each(lambda d: (d.normal(d.size, 32), d.normal(d.size, 1)), 24),
    )
