"""Derivatives inside losses, functions with their own backward, layers that solve for something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, jacrev, vmap
from torch.func import grad as func_grad
from torch.nn import functional as F
from torch.nn.utils import prune

from benchmarks.courses import Training
from benchmarks.zoo.contrastive import encoder
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, perceptron, training

WIDTH = 24


def _table(drawn: Drawn) -> tuple[Tensor, Tensor]:
    return drawn.normal(drawn.size, 16), drawn.whole(5, drawn.size)


def _classes(model: nn.Module, loss: Any = None, times: int = 16) -> Training:
    return training(
        model, loss or (lambda m, b: F.cross_entropy(m(b[0]), b[1])), each(_table, times)
    )


@entry()
def heat_equation() -> Training:
    """A PINN: first and second derivatives, three terms over points of three kinds."""
    model = perceptron(2, WIDTH, WIDTH, WIDTH, WIDTH, 1, between=nn.Tanh)

    def loss(model: Any, b: Any) -> Any:
        x = b["inside"][:, 0:1].requires_grad_()
        t = b["inside"][:, 1:2].requires_grad_()
        u = model(torch.cat([x, t], 1))
        ones = torch.ones_like(u)
        u_t = grad(u, t, ones, create_graph=True)[0]
        u_x = grad(u, x, ones, create_graph=True)[0]
        u_xx = grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        rim, start = model(b["rim"]), model(b["start"])
        return (
            torch.mean((u_t - 0.1 * u_xx) ** 2)
            + 10 * torch.mean(rim**2)
            + nn.MSELoss()(start, torch.sin(3.14 * b["start"][:, :1]))
        )

    return training(
        model,
        loss,
        each(lambda d: {n: d.uniform(d.size, 2) for n in ("inside", "rim", "start")}, 16),
        "adam",
    )


@entry()
def equation_with_other_points_at_its_rim() -> Training:
    """Fewer points at the rim than inside: two kinds of samples in one batch."""
    model = perceptron(2, WIDTH, WIDTH, WIDTH, WIDTH, 1, between=nn.Tanh)

    def loss(model: Any, b: Any) -> Any:
        points = b["inside"].clone().requires_grad_(True)
        u = model(points)
        slope = grad(u.sum(), points, create_graph=True)[0]
        curve = sum(
            grad(slope[:, at].sum(), points, create_graph=True)[0][:, at] for at in range(2)
        )
        return (curve + 1).pow(2).mean() + 5 * model(b["rim"]).pow(2).mean()

    return training(
        model,
        loss,
        each(lambda d: {"inside": d.uniform(d.size, 2), "rim": d.uniform(d.size // 2, 2)}, 16),
    )


@entry()
def forces_of_molecules() -> Training:
    """Energies and their derivatives by positions, both with errors of their own."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron(1, WIDTH, WIDTH, 1, between=nn.SiLU)

        def forward(self, r: Tensor) -> Any:
            off = r[:, :, None] - r[:, None] + 1e-3
            return self.net(off.pow(2).sum(-1, keepdim=True).sqrt()).sum((1, 2, 3))

    def loss(model: Any, b: Any) -> Any:
        r = b["r"].requires_grad_()
        energy = model(r)
        force = -grad(energy.sum(), r, create_graph=True, retain_graph=True)[0]
        return 0.01 * F.mse_loss(energy, b["energy"]) + 0.1 * F.mse_loss(force, b["force"])

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        n = drawn.size
        return {
            "r": drawn.normal(n, 5, 3),
            "energy": drawn.normal(n),
            "force": drawn.normal(n, 5, 3),
        }

    return training(Energy(), loss, each(batch, 8))


@entry()
def maml() -> Training:
    """One inner step for each task, by functional_call in a loop."""

    def loss(model: Any, b: Any) -> Any:
        losses = []
        for x, y, x2, y2 in zip(b["x"], b["y"], b["x2"], b["y2"], strict=True):
            weights = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, weights, (x,)), y)
            slopes = grad(inner, tuple(weights.values()), create_graph=True)
            moved = {
                name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)
            }
            losses.append(F.mse_loss(functional_call(model, moved, (x2,)), y2))
        return torch.stack(losses).mean()

    return training(perceptron(1, WIDTH, WIDTH, 1), loss, each(_tasks, 1), "adam")


def _tasks(drawn: Drawn) -> dict[str, Tensor]:
    return {name: drawn.normal(drawn.size, 10, 1) for name in ("x", "y", "x2", "y2")}


@entry()
def maml_by_vmap() -> Training:
    """All tasks at once, by torch.func."""

    def loss(model: Any, b: Any) -> Any:
        weights = dict(model.named_parameters())

        def fit(weights: Any, x: Tensor, y: Tensor) -> Any:
            return F.mse_loss(functional_call(model, weights, (x,)), y)

        def of_task(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> Any:
            slopes = func_grad(fit)(weights, x, y)
            moved = {name: w - 0.1 * slopes[name] for name, w in weights.items()}
            return fit(moved, x2, y2)

        return vmap(of_task)(b["x"], b["y"], b["x2"], b["y2"]).mean()

    return training(perceptron(1, WIDTH, WIDTH, 1), loss, each(_tasks, 4))


@entry()
def slopes_of_each_sample() -> Training:
    """A penalty on the Jacobian of each sample, by vmap and jacrev."""

    def loss(model: Any, b: Any) -> Any:
        jacobian = vmap(jacrev(lambda x: model(x)))(b[0])
        return F.cross_entropy(model(b[0]), b[1]) + 0.01 * jacobian.pow(2).sum((1, 2)).mean()

    return _classes(perceptron(16, WIDTH, WIDTH, 5, between=nn.Tanh), loss, 8)


@entry()
def fgsm_inside_the_loss() -> Training:
    """Adversarial samples of one step, by the sign of a slope of the batch's mean."""

    def loss(model: Any, b: Any) -> Any:
        x, y = b
        moved = x.clone().detach().requires_grad_(True)
        clean = F.cross_entropy(model(moved), y)
        slope = grad(clean, moved, retain_graph=True)[0]
        return 0.5 * clean + 0.5 * F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)

    return _classes(encoder(outputs=5), loss)


@entry()
def pgd_by_norms() -> Training:
    """Several steps along slopes that are normalised for each sample."""

    def loss(model: Any, b: Any) -> Any:
        x, y = b
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            slope = grad(F.cross_entropy(model(x + delta), y), delta)[0]
            slope = slope / (slope.norm(dim=1, keepdim=True) + 1e-12)
            delta = (delta + 0.1 * slope).detach().requires_grad_()
        return F.cross_entropy(model(x + delta.detach()), y)

    return _classes(encoder(outputs=5), loss)


@entry()
def adversarial_by_the_size_of_slopes() -> Training:
    """Steps along plain slopes of the mean: their size depends on how large the batch is."""

    def loss(model: Any, b: Any) -> Any:
        x, y = b
        moved = x.clone().requires_grad_(True)
        slope = grad(F.cross_entropy(model(moved), y), moved)[0]
        return F.cross_entropy(model(x + 5 * slope), y)

    return _classes(encoder(outputs=5), loss)


@entry()
def virtual_adversarial_training() -> Training:
    """A divergence along the direction in which it grows most, from noise of the batch."""

    def loss(model: Any, b: Any) -> Any:
        x, y, noise = b
        scores = model(x)
        with torch.no_grad():
            p = scores.softmax(1)
        d = F.normalize(noise, dim=1).requires_grad_()
        divergence = F.kl_div(model(x + 0.1 * d).log_softmax(1), p, reduction="batchmean")
        d = F.normalize(grad(divergence, d)[0], dim=1)
        far = F.kl_div(model(x + d.detach()).log_softmax(1), p, reduction="batchmean")
        return F.cross_entropy(scores, y) + far

    return training(
        encoder(outputs=5),
        loss,
        each(lambda d: (*_table(d), d.normal(d.size, 16)), 16),
    )


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Any:
        """The same."""
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        """The opposite."""
        return slopes[0].neg() * ctx.scale, None


@entry()
def domain_adversarial() -> Training:
    """A gradient that is turned around; the target's samples have no label."""

    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.label = encoder(outputs=WIDTH), nn.Linear(WIDTH, 5)
            self.domain = perceptron(WIDTH, WIDTH, 2)

    def loss(model: Any, b: Any) -> Any:
        source, target = model.features(b["source"]), model.features(b["target"])
        both = Reverse.apply(torch.cat([source, target]), 0.5)
        domains = torch.cat([torch.zeros(len(source)), torch.ones(len(target))]).long()
        return F.cross_entropy(model.label(source), b["y"]) + F.cross_entropy(
            model.domain(both), domains
        )

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {
            "source": drawn.normal(drawn.size, 16),
            "target": drawn.normal(drawn.size, 16) + 1,
            "y": drawn.whole(5, drawn.size),
        }

    return training(Domains(), loss, each(batch, 12))


class Swish(torch.autograd.Function):
    """An activation that saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        """`x * sigmoid(x)`."""
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        """By hand."""
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return slopes[0] * (s * (1 + x * (1 - s)))


@entry()
def own_activation() -> Training:
    """A custom function in each block."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return x + Swish.apply(self.fc(x))

    layers = [Layer() for _ in range(4)]
    return _classes(nn.Sequential(nn.Linear(16, WIDTH), *layers, nn.Linear(WIDTH, 5)))


class NormalisedBackward(torch.autograd.Function):
    """The gradient of the whole batch is brought to one size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        """The same."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        """Of length one."""
        return slopes[0] / (slopes[0].norm() + 1e-8)


@entry()
def gradient_normalised_in_backward() -> Training:
    """A custom function whose backward mixes samples."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.fc = encoder(outputs=WIDTH), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Any:
            return self.fc(NormalisedBackward.apply(self.features(x)))

    return _classes(Net())


@entry()
def gradient_clipped_by_a_tensor_hook() -> Training:
    """A hook on activations that normalises their gradient over the batch."""

    def loss(model: Any, b: Any) -> Any:
        h = model[:3](b[0])
        h.register_hook(lambda slope: slope / (slope.norm() + 1e-6) * 0.1)
        return F.cross_entropy(model[3:](h), b[1])

    return _classes(encoder(outputs=5), loss)


class Binary(nn.Linear):
    """Weights of plus and minus one, with a straight-through gradient."""

    def forward(self, x: Tensor) -> Any:
        """By signs, scaled by the mean of each row."""
        scale = self.weight.abs().mean(1, keepdim=True).detach()
        binary = (self.weight.sign() * scale - self.weight).detach() + self.weight
        return F.linear(x, binary, self.bias)


@entry()
def binary_weights() -> Training:
    """Straight-through estimators."""
    layers = [one for _ in range(4) for one in (Binary(WIDTH, WIDTH), nn.Hardtanh())]
    return _classes(nn.Sequential(nn.Linear(16, WIDTH), *layers, nn.Linear(WIDTH, 5)))


class Observer(nn.Module):
    """The range of activations so far, and their values in 8 bits."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Any:
        """Rounded, with a straight-through gradient."""
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().min()))
            self.high.copy_(torch.maximum(self.high, x.detach().max()))
        scale = (self.high - self.low).clamp(min=1e-6) / 255
        return x + (torch.round(x / scale) * scale - x).detach()


@entry()
def quantization_aware() -> Training:
    """Observers of ranges in each block, by hand."""
    layers = [one for _ in range(4) for one in (Residual(WIDTH), Observer())]
    return _classes(nn.Sequential(nn.Linear(16, WIDTH), *layers, nn.Linear(WIDTH, 5)))


@entry()
def fake_quantize_of_pytorch() -> Training:
    """PyTorch's own observers, which follow averages of ranges."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    layers: list[nn.Module] = []
    for _ in range(3):
        quantize = FakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
        )
        layers += [Residual(WIDTH), quantize]
    return _classes(nn.Sequential(nn.Linear(16, WIDTH), *layers, nn.Linear(WIDTH, 5)))


@entry()
def pruned() -> Training:
    """Masks by torch.nn.utils.prune."""
    model = encoder(outputs=5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.random_unstructured(module, "weight", amount=0.3)
    return _classes(model)


@entry()
def complex_weights() -> Training:
    """Complex linear layers, and the absolute values of what comes out."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 6)

        def forward(self, z: Tensor) -> Any:
            z = z @ self.weight
            return torch.complex(torch.relu(z.real), torch.relu(z.imag))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, WIDTH)
            self.blocks = nn.ModuleList([Layer() for _ in range(4)])
            self.last = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Any:
            z = torch.complex(self.first(x), torch.zeros(len(x), WIDTH))
            for block in self.blocks:
                z = block(z)
            return self.last(z.abs())

    return _classes(Net())


class Spectral(nn.Module):
    """FNO: products of low frequencies with complex weights, kept as pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 6, 2) / 16)
        self.plain = nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        frequencies = torch.fft.rfft(x)
        out = torch.zeros_like(frequencies)
        weight = torch.view_as_complex(self.weight)
        out[:, :, :6] = torch.einsum("bix,iox->box", frequencies[:, :, :6], weight)
        return F.gelu(torch.fft.irfft(out, n=x.size(-1)) + self.plain(x))


@entry()
def fourier_operator() -> Training:
    """Relative errors of each sample, as in the paper's code."""
    model = nn.Sequential(nn.Conv1d(1, 16, 1), *[Spectral() for _ in range(4)], nn.Conv1d(16, 1, 1))

    def loss(model: Any, b: Any) -> Any:
        n = b[0].size(0)
        off = torch.norm(model(b[0]).reshape(n, -1) - b[1].reshape(n, -1), 2, 1)
        return torch.mean(off / torch.norm(b[1].reshape(n, -1), 2, 1))

    return training(
        model, loss, each(lambda d: (d.normal(d.size, 1, 32), d.normal(d.size, 1, 32))), "adam"
    )


@entry()
def double_precision() -> Training:
    """Everything in float64."""
    model = encoder(outputs=5).double()
    return training(
        model,
        lambda m, b: F.cross_entropy(m(b[0].double()), b[1]),
        each(_table, 16),
    )


@entry()
def neural_ode() -> Training:
    """Runge-Kutta steps of one small net, in a loop."""

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.out = perceptron(17, WIDTH, 16, between=nn.Tanh), nn.Linear(16, 5)

        def slope(self, t: float, x: Tensor) -> Any:
            return self.f(torch.cat([x, torch.full((x.size(0), 1), t)], 1))

        def forward(self, x: Tensor) -> Any:
            h = 0.2
            for step in range(5):
                t = step * h
                k1 = self.slope(t, x)
                k2 = self.slope(t + h / 2, x + h / 2 * k1)
                k3 = self.slope(t + h / 2, x + h / 2 * k2)
                k4 = self.slope(t + h, x + h * k3)
                x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            return self.out(x)

    return _classes(Ode())


@entry()
def equilibrium() -> Training:
    """A fixed point found without gradients until the whole batch is near, then one step more."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.w = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Any:
            u = self.u(x)
            with torch.no_grad():
                z = torch.zeros_like(u)
                for _ in range(30):
                    following = torch.tanh(0.5 * self.w(z) + u)
                    if (following - z).norm() < 1e-3:
                        break
                    z = following
            return self.out(torch.tanh(0.5 * self.w(z) + u))

    return _classes(Equilibrium())


@entry()
def hyper_network() -> Training:
    """Weights of a layer for each sample, made by another net."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.out = encoder(outputs=16 * 12), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Any:
            weights = self.make(x).view(-1, 16, 12)
            return self.out(torch.relu(torch.bmm(x.unsqueeze(1), weights).squeeze(1)))

    return _classes(Hyper())


@entry()
def tied_autoencoder() -> Training:
    """Decoding by the transposed weights of encoding, and a contractive penalty."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
            self.biases = nn.ParameterList([nn.Parameter(torch.zeros(16)) for _ in range(4)])

        def forward(self, x: Tensor) -> Any:
            for layer in self.blocks:
                x = torch.sigmoid(layer(x))
            h = x
            backwards: list[Any] = list(self.blocks)[::-1]
            for layer, bias in zip(backwards, self.biases, strict=True):
                x = F.linear(x, layer.weight.t(), bias)
            return x, h

    def loss(model: Any, b: Any) -> Any:
        out, h = model(b[0])
        w = model.blocks[-1].weight
        contractive = ((h * (1 - h)) ** 2 @ (w**2).sum(1, keepdim=True)).sum()
        return F.mse_loss(out, b[0], reduction="sum") / 100 + 1e-3 * contractive

    return _classes(Tied(), loss)


@entry()
def sharpness_aware() -> Training:
    """Two passes in one loss: weights are moved uphill, and moved back."""

    def loss(model: Any, b: Any) -> Any:
        weights = [p for p in model.parameters() if p.requires_grad]
        slopes = grad(F.cross_entropy(model(b[0]), b[1]), weights)
        norm = torch.stack([g.norm() for g in slopes]).norm()
        moved = {
            name: p + 0.05 * g / (norm + 1e-12)
            for (name, p), g in zip(model.named_parameters(), slopes, strict=True)
        }
        return F.cross_entropy(functional_call(model, moved, (b[0],)), b[1])

    return _classes(perceptron(16, WIDTH, WIDTH, WIDTH, 5), loss)
