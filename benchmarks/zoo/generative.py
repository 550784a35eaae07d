"""Models that generate: autoencoders, adversaries, flows, diffusion, energies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal, kl_divergence
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, perceptron, training


class VAE(nn.Module):
    """As in PyTorch's examples, a little deeper."""

    def __init__(self, width: int = 32, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(100, width), *[Residual(width) for _ in range(3)])
        self.mu = nn.Linear(width, latent)
        self.log_var = nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), *[Residual(width) for _ in range(3)])
        self.out = nn.Linear(width, 100)

    def reparameterize(self, mu: Tensor, log_var: Tensor) -> Any:
        """A point near the mean."""
        return mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)

    def forward(self, x: Tensor) -> Any:
        """The picture again, and where its point lies."""
        h = self.encoder(x.view(-1, 100))
        mu, log_var = self.mu(h), self.log_var(h)
        z = self.reparameterize(mu, log_var)
        return torch.sigmoid(self.out(self.decoder(z))), mu, log_var


class MeanVAE(VAE):
    """The same without chance."""

    def reparameterize(self, mu: Tensor, log_var: Tensor) -> Any:
        """A point at a fixed distance of the mean."""
        return mu + 0.5 * torch.exp(0.5 * log_var)


def _digits(drawn: Drawn) -> Any:
    return drawn.uniform(drawn.size, 1, 10, 10)


@entry()
def vae_with_summed_loss() -> Training:
    """Errors and divergence are summed over all: the example that everyone copies."""

    def loss(model: Any, x: Any) -> Any:
        out, mu, log_var = model(x)
        bce = F.binary_cross_entropy(out, x.view(-1, 100), reduction="sum")
        kld = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())
        return (bce + kld) / 1000

    return training(MeanVAE(), loss, each(_digits, 24), "adam")


@entry()
def vae_sum_plus_mean() -> Training:
    """A mean of errors with a sum of divergences: people do mix them."""

    def loss(model: Any, x: Any) -> Any:
        out, mu, log_var = model(x)
        kld = -0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())
        return F.mse_loss(out, x.flatten(1)) + 1e-3 * kld

    return training(MeanVAE(), loss, each(_digits, 24), "adam")


@entry(draws=True)
def beta_vae() -> Training:
    """Divergences are weighed, and averaged over pictures; points are drawn."""

    def loss(model: Any, x: Any) -> Any:
        out, mu, log_var = model(x)
        error = F.mse_loss(out, x.flatten(1), reduction="none").sum(1)
        kld = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1)
        return (error + 4 * kld).mean(dim=0)

    return training(VAE(), loss, each(_digits, 24), "adam")


class Annealed:
    """A loss that knows how many steps it has seen."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, model: Any, x: Any) -> Any:
        """The weight of the divergence grows from step to step."""
        out, mu, log_var = model(x)
        weight = min(1.0, self.step / 4)
        self.step += 1
        kld = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1).mean()
        return F.binary_cross_entropy(out, x.flatten(1)) + weight * kld


@entry()
def vae_with_annealing() -> Training:
    """The loss counts its own calls."""
    return training(MeanVAE(), Annealed(), each(_digits, 24), "adam")


@entry(draws=True)
def vae_by_distributions() -> Training:
    """With torch.distributions, whose arguments are validated."""

    def loss(model: Any, x: Any) -> Any:
        h = model.encoder(x.flatten(1))
        q = Normal(model.mu(h), F.softplus(model.log_var(h)) + 1e-3)
        z = q.rsample()
        p = Normal(model.out(model.decoder(z)), 1.0)
        prior = Normal(torch.zeros_like(z), torch.ones_like(z))
        elbo = p.log_prob(x.flatten(1)).sum(1) - kl_divergence(q, prior).sum(1)
        return -elbo.mean() / 100

    return training(VAE(), loss, each(_digits, 24), "adam")


@entry(draws=True)
def importance_weighted_vae() -> Training:
    """Five points for each picture, and the logarithm of their mean."""

    def loss(model: Any, x: Any) -> Any:
        h = model.encoder(x.flatten(1))
        mu, std = model.mu(h), torch.exp(0.5 * model.log_var(h))
        z = mu + std * torch.randn(5, *mu.shape, device=mu.device)
        out = model.out(model.decoder(z))
        error = -((out - x.flatten(1)) ** 2).sum(-1)
        log_p = error - 0.5 * (z**2).sum(-1)
        log_q = -0.5 * (((z - mu) / std) ** 2).sum(-1) - std.log().sum(-1)
        return -(torch.logsumexp(log_p - log_q, 0) - math.log(5)).mean() / 100

    return training(VAE(), loss, each(_digits, 8), "adam")


class Quantizer(nn.Module):
    """The nearest entry of a codebook; entries follow what they are given as moving averages."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        codes = torch.randn(count, width)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(count))
        self.register_buffer("sums", codes.clone())

    def forward(self, z: Tensor) -> Any:
        """Entries in the place of what was given, and how far that was off."""
        flat = z.reshape(-1, z.shape[-1])
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t()
        nearest = (distances + self.codes.pow(2).sum(1)).argmin(1)
        one_hot = F.one_hot(nearest, len(self.codes)).type(flat.dtype)
        quantized = (one_hot @ self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.99).add_(one_hot.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(one_hot.t() @ flat, alpha=0.01)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    """Convolutions around a codebook."""

    def __init__(self, quantizer: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 4, 2, 1), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.quantizer = quantizer
        self.up = nn.ConvTranspose2d(width, 1, 4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        """The picture again, and the codebook's part of the loss."""
        h = self.down(x)
        for conv in self.blocks:
            h = h + F.relu(conv(h))
        q, extra = self.quantizer(h.permute(0, 2, 3, 1))
        return self.up(q.permute(0, 3, 1, 2)), extra


def _restored(model: Any, x: Any) -> Any:
    out, extra = model(x)
    return F.mse_loss(out, x) + 0.25 * extra


@entry()
def vqvae_with_moving_codes() -> Training:
    """The forward writes three buffers with statistics of the batch."""
    return training(
        VQVAE(Quantizer(32, 16)), _restored, each(lambda d: d.normal(d.size, 1, 16, 16))
    )


class LearnedCodes(nn.Module):
    """A codebook that is learned by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(32, 16)

    def forward(self, z: Tensor) -> Any:
        """Entries in the place of what was given, and both parts of the loss."""
        nearest = torch.cdist(z.flatten(0, -2), self.codes.weight).argmin(-1)
        q = self.codes(nearest).view(z.shape)
        extra = ((q.detach() - z) ** 2).mean() + 0.25 * ((q - z.detach()) ** 2).mean()
        return z + (q - z).detach(), extra


@entry()
def vqvae_with_learned_codes() -> Training:
    """The codebook is an embedding."""
    return training(VQVAE(LearnedCodes()), _restored, each(lambda d: d.normal(d.size, 1, 16, 16)))


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 100))


def _critic() -> nn.Module:
    return nn.Sequential(
        nn.Linear(100, 32), *[nn.Sequential(nn.Linear(32, 32), nn.LeakyReLU(0.2)) for _ in range(4)]
    ).append(nn.Linear(32, 1))


@entry()
def generator_step() -> Training:
    """A generator against a critic that is in the loss, and stays as it is."""
    torch.manual_seed(1)
    critic = _critic().requires_grad_(False)

    def loss(generator: Any, noise: Any) -> Any:
        valid = torch.ones(noise.size(0), 1)
        return F.binary_cross_entropy_with_logits(critic(generator(noise)), valid)

    return training(_generator(), loss, each(lambda d: d.normal(d.size, 16), 24), "adam")


@entry()
def gradient_penalty() -> Training:
    """A critic's loss has the norm of its slope between real and made pictures."""

    def loss(critic: Any, batch: Any) -> Any:
        real, fake, mix = batch["real"], batch["fake"], batch["mix"]
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        scores = critic(between)
        slope = torch.autograd.grad(
            outputs=scores,
            inputs=between,
            grad_outputs=torch.ones_like(scores),
            create_graph=True,
            retain_graph=True,
        )[0]
        penalty = ((slope.view(slope.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {
            "real": drawn.normal(drawn.size, 100),
            "fake": drawn.normal(drawn.size, 100),
            "mix": drawn.uniform(drawn.size, 1),
        }

    return training(_critic(), loss, each(batch, 24), "adam")


@entry()
def relativistic_hinge() -> Training:
    """Each score beside the mean of the others': samples are compared over the batch."""

    def loss(critic: Any, batch: Any) -> Any:
        real, fake = critic(batch["real"]), critic(batch["fake"])
        return (
            F.relu(1 - (real - fake.mean())).mean() + F.relu(1 + (fake - real.mean())).mean()
        ) / 2

    return training(
        _critic(),
        loss,
        each(lambda d: {"real": d.normal(d.size, 100), "fake": d.normal(d.size, 100)}, 24),
    )


class StandardDeviationOfBatch(nn.Module):
    """The layer of progressive GANs that shows a critic how alike its batch is."""

    def forward(self, x: Tensor) -> Any:
        """One more feature, the same for all samples."""
        std = torch.sqrt(x.var(0, unbiased=False) + 1e-8).mean().view(1, 1)
        return torch.cat([x, std.expand(x.size(0), 1)], 1)


@entry()
def critic_that_sees_the_batch() -> Training:
    """Its last layer is given the standard deviation over the batch."""
    model = nn.Sequential(
        nn.Linear(100, 32), *[Residual(32) for _ in range(4)], StandardDeviationOfBatch()
    ).append(nn.Linear(33, 1))
    return training(
        model,
        lambda model, x: F.softplus(model(x)).mean(),
        each(lambda d: d.normal(d.size, 100), 24),
    )


class Coupling(nn.Module):
    """Half of the numbers move the other half."""

    mask: Tensor

    def __init__(self, width: int, odd: bool) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(width) % 2 == int(odd)).float())
        self.net = perceptron(width, 32, 32, 2 * width, between=nn.Tanh)

    def forward(self, x: Tensor) -> Any:
        """Where a point goes, and the logarithm of how much space is stretched."""
        kept = x * self.mask
        scale, shift = self.net(kept).chunk(2, -1)
        scale = torch.tanh(scale) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * scale.exp() + shift), scale.sum(-1)


class RealNVP(nn.Module):
    """Couplings behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Coupling(16, at % 2 == 1) for at in range(6)])

    def log_prob(self, x: Tensor) -> Any:
        """How likely points are."""
        total = x.new_zeros(x.size(0))
        for block in self.blocks:
            x, stretched = block(x)
            total += stretched
        return total - 0.5 * (x**2 + math.log(2 * math.pi)).sum(1)


@entry()
def normalizing_flow() -> Training:
    """The likelihood of points under couplings; the loss calls a method, not forward."""
    return training(
        RealNVP(),
        lambda model, x: -model.log_prob(x).mean(),
        each(lambda d: d.normal(d.size, 16), 24),
        "adam",
    )


class ActNorm(nn.Module):
    """Scales that are set by the first batch, as in Glow."""

    initialized: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.log_scale = nn.Parameter(torch.zeros(width))
        self.register_buffer("initialized", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        """Each number moved and scaled."""
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.log_scale.data.copy_(-torch.log(x.std(0) + 1e-6))
                self.initialized.fill_(1)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum().expand(x.size(0))


@entry()
def flow_set_by_its_first_batch() -> Training:
    """The first forward writes parameters by the batch it sees."""
    model = RealNVP()
    model.blocks = nn.ModuleList([one for block in model.blocks for one in (ActNorm(16), block)])
    return training(
        model,
        lambda model, x: -model.log_prob(x).mean(),
        each(lambda d: 2 * d.normal(d.size, 16) + 1, 24),
        "adam",
    )


class Denoiser(nn.Module):
    """Noise in pictures by their time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(36, width)
        self.time = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(4)])
        self.last = nn.Linear(width, 36)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        """The noise that is in it."""
        h = self.first(x) + self.time(t)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class Diffusion(nn.Module):
    """The schedule around a denoiser, as in lucidrains' file that everyone starts from."""

    alphas: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

    def forward(self, x: Tensor, t: Tensor | None = None, noise: Tensor | None = None) -> Any:
        """The mean error of the noise."""
        if t is None:
            t = torch.randint(0, 50, (x.shape[0],), device=x.device).long()
        if noise is None:
            noise = torch.randn_like(x)
        a = self.alphas.gather(-1, t).reshape(-1, 1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        error = F.mse_loss(self.model(noisy, t), noise, reduction="none").mean(1)
        weight = (a / (1 - a)).clamp(max=5).squeeze(1)
        return (error * weight).mean()


@entry(draws=True)
def diffusion_with_random_times() -> Training:
    """Times and noise are drawn in the model, which returns its loss."""
    return training(Diffusion(), None, each(lambda d: d.normal(d.size, 36), 24), "adam")


@entry()
def diffusion_with_times_of_the_batch() -> Training:
    """Times and noise come with the batch."""
    return training(
        Diffusion(),
        lambda model, b: model(b["x"], b["t"], b["noise"]),
        each(
            lambda d: {
                "x": d.normal(d.size, 36),
                "t": d.whole(50, d.size),
                "noise": d.normal(d.size, 36),
            },
            8,
        ),
        "adam",
    )


@entry(draws=True)
def sliced_score_matching() -> Training:
    """Slopes of a score along random directions."""
    model = perceptron(16, 32, 32, 32, 32, 16, between=nn.Softplus)

    def loss(model: Any, x: Any) -> Any:
        x = x.clone().requires_grad_()
        direction = torch.randn_like(x)
        score = model(x)
        along = (score * direction).sum()
        slope = torch.autograd.grad(along, x, create_graph=True)[0]
        return ((slope * direction).sum(1) + 0.5 * (score**2).sum(1)).mean()

    return training(model, loss, each(lambda d: d.normal(d.size, 16), 24))


@entry()
def exact_score_matching() -> Training:
    """The trace of a Jacobian, one derivative after the other."""
    model = perceptron(4, 32, 32, 32, 4, between=nn.Tanh)

    def loss(model: Any, x: Any) -> Any:
        x.requires_grad_(True)
        score = model(x)
        trace = 0
        for at in range(x.shape[1]):
            trace = trace + torch.autograd.grad(score[:, at].sum(), x, create_graph=True)[0][:, at]
        return (trace + 0.5 * score.square().sum(1)).mean()

    return training(model, loss, each(lambda d: d.normal(d.size, 4), 24))


@entry()
def energy_model() -> Training:
    """Made points go downhill in the loss; a penalty on energies keeps them small."""
    model = perceptron(8, 32, 32, 32, 32, 1, between=nn.SiLU)

    def loss(model: Any, batch: Any) -> Any:
        fake = batch["start"].clone().detach()
        for at in range(4):
            fake.requires_grad_(True)
            slope = torch.autograd.grad(model(fake).sum(), fake)[0]
            fake = (fake - 0.1 * slope + 0.01 * batch["noise"][:, at]).detach()
        low, high = model(batch["x"]), model(fake)
        return (low - high).mean() + 0.1 * (low**2 + high**2).mean()

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {
            "x": drawn.normal(drawn.size, 8),
            "start": drawn.uniform(drawn.size, 8),
            "noise": drawn.normal(drawn.size, 4, 8),
        }

    return training(model, loss, each(batch, 24), "adam")


@entry()
def mixture_density() -> Training:
    """A mixture of normal distributions for each sample, by torch.distributions."""
    model = nn.Sequential(nn.Linear(8, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 15))

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        weights, means, spreads = model(x).chunk(3, -1)
        mixture = MixtureSameFamily(
            Categorical(logits=weights), Normal(means, F.softplus(spreads) + 1e-2)
        )
        return -mixture.log_prob(y).mean()

    return training(
        model, loss, each(lambda d: (d.normal(d.size, 8), d.normal(d.size)), 24), "adam"
    )


@entry()
def masked_autoregressive_density() -> Training:
    """Linear layers whose weights are masked; the loss is summed and divided by hand."""

    class Masked(nn.Linear):
        mask: Tensor

        def __init__(self, inputs: int, outputs: int, strict: bool) -> None:
            super().__init__(inputs, outputs)
            into, out = torch.arange(inputs) % 7, torch.arange(outputs) % 7
            allowed = out[:, None] > into if strict else out[:, None] >= into
            self.register_buffer("mask", allowed.float())

        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.mask * self.weight, self.bias)

    layers: list[nn.Module] = [Masked(8, 32, False), nn.ReLU()]
    for _ in range(3):
        layers += [Masked(32, 32, False), nn.ReLU()]
    model = nn.Sequential(*layers, Masked(32, 16, True))

    def loss(model: Any, x: Any) -> Any:
        mu, alpha = model(x).chunk(2, 1)
        u = (x - mu) * torch.exp(-alpha.clamp(-3, 3))
        negative = 0.5 * (u.pow(2) + math.log(2 * math.pi)).sum(1, keepdim=True)
        return (negative + alpha.sum(1, keepdim=True)).sum() / x.size(0)

    return training(model, loss, each(lambda d: d.normal(d.size, 8), 24))
