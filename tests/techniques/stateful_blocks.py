"""Blocks whose forward leaves something behind, as people write them; each in a model of three."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Base(nn.Module):
    """Two layers with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.between(torch.tanh(self.one(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class EMA(Base):
    """Divides by an average that it reads before it writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def between(self, h: Tensor) -> Tensor:
        h = h / self.scale.clone()
        self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return h


class EMAThroughData(EMA):
    def between(self, h: Tensor) -> Tensor:
        h = h / self.scale.data.clone()
        self.scale.data.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return h


class EMAReplaced(EMA):
    def between(self, h: Tensor) -> Tensor:
        h = h / self.scale
        self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        return h


class EMAOtherData(EMA):
    def between(self, h: Tensor) -> Tensor:
        h = h / self.scale.clone()
        self.scale.data = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        return h


class WritesThenReads(EMA):
    """What it divides by is saved for backward, as it is after the write."""

    def between(self, h: Tensor) -> Tensor:
        self.scale.mul_(0.9).add_(h.detach().abs().mean(0), alpha=0.1)
        return h * self.scale


class LateWrites(EMA):
    """Writes in every third call only, past version counters."""

    calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        h = h / self.scale.clone()
        if self.calls % 3 == 0:
            self.scale.data.mul_(0.7)
        return h


class Counts(Base):
    """Computes otherwise in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * 2 if self.calls % 2 else h.sin()


class CountsInATensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def between(self, h: Tensor) -> Tensor:
        self.step += 1
        return h * (1 / self.step)


class KeepsALoss(Base):
    """An auxiliary loss that the job's loss adds."""

    aux: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        self.aux = h.square().mean()
        return h


class ListsLosses(Base):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        self.losses.append(h.square().mean())
        return h


@dataclasses.dataclass
class Record:
    seen: int = 0
    losses: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class KeepsARecord(Base):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def between(self, h: Tensor) -> Tensor:
        self.record.seen += 1
        self.record.losses[f"call {self.record.seen}"] = h.square().mean()
        return h / self.record.seen


class Codebook(Base):
    """Vector quantization whose codebook follows by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 32).view(4, 8).clone())
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("begun", torch.tensor(False))

    def between(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, 8)
        if self.training and not self.begun:
            self.codes.data.copy_(flat[:4])
            self.begun.data.copy_(torch.tensor(True))
        chosen = torch.cdist(flat, self.codes).argmin(1)
        found = F.embedding(chosen, self.codes).view_as(h)
        if self.training:
            hot = F.one_hot(chosen, 4).to(h.dtype)
            self.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.data.mul_(0.9).add_(
                hot.t() @ flat.detach() / self.sizes.unsqueeze(1), alpha=0.1
            )
        return h + (found - h).detach() + 0.1 * (h - found.detach()).square()


class BatchStatistics(Base):
    """A batch renorm written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def between(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, 8)
        mean, var = flat.mean(0), flat.var(0, unbiased=False) + 1e-3
        r = (var.detach() / self.var).sqrt().clamp(0.5, 2)
        d = ((mean.detach() - self.mean) / self.var.sqrt()).clamp(-1, 1)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.var.lerp_(var, 0.1)
        return (h - mean) / var.sqrt() * r + d


class Norms(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class ReadsItsNorm(Norms):
    def between(self, h: Tensor) -> Tensor:
        return self.norm(h - self.norm.running_mean.clone())


class Instances(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h.view(-1, 2, 4)).reshape(-1, 8)


class Observed(Base):
    """Quantization-aware: an observer and a fake quantizer that follow what they see."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.quantize = FakeQuantize(observer=MovingAverageMinMaxObserver)

    def between(self, h: Tensor) -> Tensor:
        return self.quantize(h.float()).to(h.dtype)


class OldSpectral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.utils.spectral_norm(self.one)


class NewSpectral(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.utils.parametrizations.spectral_norm(self.one)


class WeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.utils.weight_norm(self.one)


class NormalizesItsWeight(Base):
    """As diffusion models of the second EDM do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.one.weight.copy_(F.normalize(self.one.weight, dim=1) * 1.1)
        return super().forward(x)


class NormalizesThroughData(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.one.weight.data.div_(self.one.weight.data.norm(dim=1, keepdim=True) * 1.1)
        return super().forward(x)


class CachesWeights(Base):
    """Standardizes its weight once for several calls; the optimizer's step makes it stale."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: Tensor | None = None
        self.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.cached is None or self.uses % 2 == 0:
            w = self.one.weight
            self.cached = (w - w.mean(1, keepdim=True)).detach() / w.std(1, keepdim=True).detach()
        self.uses += 1
        h = F.linear(x, self.one.weight * 0.5 + self.cached, self.one.bias)
        return x + self.two(h.tanh())


class DropsByPython(Base):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            return x + self.one(x).sin()[:, :WIDTH]
        return super().forward(x)


class DropsByNumpy(Base):
    def between(self, h: Tensor) -> Tensor:
        keep = torch.from_numpy(np.random.rand(*h.shape) < 0.7)
        return h * keep / 0.7


class OwnGenerators(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.numbers = np.random.default_rng(4)

    def between(self, h: Tensor) -> Tensor:
        noise = torch.rand(h.shape, generator=self.generator, dtype=h.dtype)
        return h * noise + float(self.numbers.random())


SHARED = torch.Generator()


class SharedGenerator(Base):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.rand(h.shape, generator=SHARED, dtype=h.dtype)


class InPlaceInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.9)
        return x + self.two(torch.tanh(self.one(x)))


class InPlaceRelu(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(self.act(x)))) + x


class Returns(Base):
    """A dict with a dataclass in it, and what is no tensor."""

    def forward(self, x: Any) -> Any:
        x = x["x"] if isinstance(x, dict) else x
        return {"x": super().forward(x), "record": Record(seen=1), "n": 3, "none": None}


class ViewOfInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.side = self.two(self.one(x).tanh())
        return x.view(-1, WIDTH) if x.requires_grad else x + self.side


class OwnCheckpoint(Counts):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: torch.tanh(self.one(y)).sin(), x, use_reentrant=self.reentrant)
        return x + self.two(self.between(h))


class OwnReentrantCheckpoint(OwnCheckpoint):
    reentrant = True


class PartlyWithoutGradient(EMA):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) * target.sigmoid()


class CallsFunctional(Base):
    """Runs a layer with other weights than its own."""

    def between(self, h: Tensor) -> Tensor:
        weights = {"weight": self.two.weight * 2, "bias": self.two.bias + 1}
        return h + torch.func.functional_call(self.two, weights, (h,)).mean(-1, keepdim=True)


class Autocasts(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.eye(8) + 0.1)

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = super().between(h.float() @ self.mixed.float())
        assert h.dtype is torch.bfloat16
        return h.double()


class MakesLater(Base):
    """Makes what it needs in its first call."""

    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "rate"):
            self.rate = torch.full((8,), 0.5, dtype=h.dtype)
            self.register_buffer("seen", torch.zeros(8, dtype=h.dtype))
        self.seen += h.detach().sum(0)
        return h * self.rate + self.seen.tanh()


class Plain(Base):
    """Writes to nothing, but drops some of what it computes."""

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.3, training=self.training)


SEEN: list[int] = []
COUNT = 0


class CountsGlobally(Base):
    def between(self, h: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        SEEN.append(COUNT)
        return h / math.sqrt(len(SEEN))


class Meter:
    """What a program keeps beside its model."""

    total = 0

    def update(self, value: int) -> None:
        """Add to it."""
        Meter.total += value
        self.last = value


METER = Meter()


def note(value: int) -> None:
    """Tell the meter, by way of its method."""
    METER.update(value)


class Chain(nn.Module):
    """Runs its blocks one behind the other."""

    def __init__(self, make: Callable[[], nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.stem(x)))

    def run(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x["x"] if isinstance(x, dict) else x


class Shared(Chain):
    """One block that runs three times, as in ALBERT; told before each which time it is."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make, depth=1)

    def run(self, x: Tensor) -> Tensor:
        for at in range(3):
            self.blocks[0].at = at
            x = self.blocks[0](x)
        return x


class AsksWhichTime(Base):
    def between(self, h: Tensor) -> Tensor:
        return h * (1 + self.at)


class WritesBetween(Chain):
    """Writes in place to what a block returned."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x.clamp_(-2, 2)
        return x


class Skips(Chain):
    """A list that half of the blocks add to and the others take from."""

    def run(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        assert len(kept) == 1
        return x


class TakesAList(Base):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        if len(kept) > 1:
            x = x + kept.pop() * kept.pop()
        kept.append(x.sin())
        return super().forward(x).tanh() + math.prod(one.mean() for one in kept)


class Cache:
    """Of an object that PyTorch knows nothing of."""

    def __init__(self) -> None:
        self.entries: list[Tensor] = []
        self.count = 0

    def update(self, x: Tensor) -> Tensor:
        self.entries.append(x)
        self.count += 1
        return torch.stack(self.entries).mean(0) * self.count


class WithACache(Chain):
    def run(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        assert cache.count == len(self.blocks)
        return x


class TakesACache(Base):
    def forward(self, x: Tensor, *, cache: Cache) -> Tensor:
        return super().forward(cache.update(x))


class ReadsAnother(Base):
    """Looks at the weights of a block that backward comes to before this one."""

    other: Callable[[], nn.Module]

    def between(self, h: Tensor) -> Tensor:
        other: Any = self.other()
        return h * other.two.weight.detach().square().mean() + other.one.bias.detach().sin()


class InAPair(Chain):
    """Each block reads the weights of the next, and the last those of the first."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        blocks = list(self.blocks)
        for block, other in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            block.other = functools.partial(get, self, other)


def get(_: nn.Module, other: nn.Module) -> nn.Module:
    return other


class StepsEarly(Base):
    """Its bias has its gradient before anything asks for what was saved, and is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(torch.tanh(self.one(x)))
        return h * (h + self.bias).detach() + self.bias


class TakesKeywords(Plain):
    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if scale is None else scale)


class WithKeywords(Chain):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x, scale=x.detach().sigmoid())
        return x


class FastWeights(Chain):
    """Runs all of it with weights that are no parameters, as meta-learning does."""

    def run(self, x: Tensor) -> Tensor:
        weights = {name: 0.9 * p for name, p in self.blocks.named_parameters()}
        for at, block in enumerate(self.blocks):
            own = {
                name.removeprefix(f"{at}."): p
                for name, p in weights.items()
                if name.startswith(f"{at}.")
            }
            x = torch.func.functional_call(block, own, (x,))
        return x


def hooked(chain: Chain) -> Chain:
    """With hooks that count, replace and look at arguments, on blocks and inside of them."""
    chain.seen = []  # type: ignore[assignment]
    calls = 0

    def count(module: nn.Module, args: Any, out: Any) -> Any:
        nonlocal calls
        calls += 1
        chain.seen.append(calls)  # type: ignore[operator,union-attr]
        return out * (1 + 1 / calls)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        module.before = getattr(module, "before", 0) + 1  # type: ignore[assignment]
        return (args[0] * module.before,), kwargs

    for block in chain.blocks:
        block.register_forward_hook(count)
        block.one.register_forward_hook(count)  # type: ignore[union-attr]
        block.two.register_forward_pre_hook(before, with_kwargs=True)  # type: ignore[union-attr]
    return chain


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: (lambda kind=kind: Chain(kind))  # type: ignore[misc]
        for kind in (
            Plain, EMA, EMAThroughData, EMAReplaced, EMAOtherData, WritesThenReads, LateWrites,
            Counts, CountsInATensor, KeepsALoss, ListsLosses, KeepsARecord, Codebook,
            BatchStatistics, Norms, ReadsItsNorm, Instances, Observed, OldSpectral, NewSpectral,
            WeightNorm, NormalizesItsWeight, NormalizesThroughData, CachesWeights, DropsByPython,
            DropsByNumpy, OwnGenerators, SharedGenerator, InPlaceInput, InPlaceRelu, Returns,
            ViewOfInput, OwnCheckpoint, OwnReentrantCheckpoint, PartlyWithoutGradient,
            CallsFunctional, Autocasts, MakesLater, CountsGlobally,
        )
    },
    "one EMA three times": lambda: Shared(EMA),
    "one counter three times": lambda: Shared(Counts),
    "told which time": lambda: Shared(AsksWhichTime),
    "one spectral norm three times": lambda: Shared(NewSpectral),
    "written between": lambda: WritesBetween(Counts),
    "skips": lambda: Skips(TakesAList),
    "a cache": lambda: WithACache(TakesACache),
    "reads another's weight": lambda: InAPair(ReadsAnother),
    "steps early": lambda: Chain(StepsEarly),
    "keywords": lambda: WithKeywords(TakesKeywords),
    "fast weights": lambda: FastWeights(Plain),
    "hooks": lambda: hooked(Chain(EMA)),
}  # fmt: skip


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """What the model learns, with what its blocks kept for it."""
    x, y = batch
    loss = F.mse_loss(model(x), y)
    for module in model.modules():
        if isinstance(module, KeepsALoss):
            loss = loss + 0.1 * module.aux
        elif isinstance(module, ListsLosses):
            loss = loss + 0.1 * sum(module.losses)
            module.losses.clear()
        elif isinstance(module, KeepsARecord):
            loss = loss + 0.1 * sum(module.record.losses.values())
            module.record.losses.clear()
    return loss


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of different numbers."""
    torch.manual_seed(7)
    return [(torch.randn(8, 4).double(), torch.randn(8, 2).double()) for _ in range(number)]


def remembered(model: nn.Module) -> dict[str, Any]:
    """Everything that a model keeps, weights, buffers and attributes alike."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = value.detach().clone()
            elif isinstance(value, (int, float, str, list)) and not name.startswith("_"):
                found[f"{path}.{name}"] = list(value) if isinstance(value, list) else value
            elif isinstance(value, Record):
                found[f"{path}.{name}"] = value.seen
            elif isinstance(value, torch.Generator):
                found[f"{path}.{name}"] = value.get_state()
    found["globals"] = (COUNT, list(SEEN))
    found["python"], found["numpy"] = random.getstate()[1], list(np.random.get_state()[1])
    found["torch"], found["shared"] = torch.get_rng_state(), SHARED.get_state()
    return found
