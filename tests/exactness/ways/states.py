"""What forwards and losses write to: buffers, statistics, attributes, counters."""

from __future__ import annotations

import functools
import itertools
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .losses import WHOLE
from .pieces import WIDTH, Block, Rows, numbers, regression, rows
from .training import Training, way

#: Recomputed blocks and parts of a batch would write once more: refused, or made good.
COUNTS = {
    **WHOLE,
    "recompute": "run again|counter|writes|written",
    "recompute_in_part": "run again|counter|writes|written",
}


@way(refusals=WHOLE)
def running_mean_by_hand() -> Training:
    """A buffer follows the mean of what comes by, in place, and is used."""

    class Centred(Block):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return super().forward(x - self.mean)

    return regression(Rows(Centred))


@way(refusals=WHOLE)
def buffers_that_are_replaced() -> Training:
    """A buffer is assigned anew in each forward, not written to; one is no part of the state."""

    class Scaled(Block):
        scale: Tensor
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().max()
            out = super().forward(x / self.scale + 0.1 * self.last)
            self.last = out.detach().mean(0)
            return out

    return regression(Rows(Scaled))


@way(refusals=COUNTS)
def a_step_counter_in_the_model() -> Training:
    """The forward counts its calls and warms a branch up by them."""

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x + min(self.calls / 4, 1.0) * (super().forward(x) - x)

    model = Rows(Counting)
    training = regression(model)
    training.state = lambda: [block.calls for block in model.blocks]
    return training


@way(refusals=COUNTS)
def a_global_step_as_a_buffer() -> Training:
    """The same as a tensor, whose number decides a coefficient of the loss."""

    class Counting(Rows):
        step: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return super().forward(x)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        weight = torch.clamp(model.step.double() / 3, max=1.0)
        return F.mse_loss(out, batch[1]) + weight * out.square().mean()

    return regression(Counting(), loss=loss)


@way(refusals=COUNTS)
def a_codebook_that_follows() -> Training:
    """Vector quantization: the codebook is an average over what was assigned to each code."""

    class Quantizer(nn.Module):
        codes: Tensor
        counts: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()
            self.register_buffer("codes", numbers(5, WIDTH, seed=3))
            self.register_buffer("counts", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            nearest = torch.cdist(x.detach(), self.codes).argmin(1)
            if self.training:
                chosen = F.one_hot(nearest, 5).to(x.dtype)
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                sums = chosen.T @ x.detach()
                self.codes.mul_(0.9).add_(sums / self.counts[:, None], alpha=0.1)
            return x + (self.codes[nearest] - x).detach()

    return regression(Rows(Quantizer))


@way(refusals=COUNTS)
def losses_left_on_modules() -> Training:
    """Blocks leave an auxiliary loss on themselves, and the loss gathers them."""

    class Leaving(Block):
        aux: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.aux = out.square().mean()
            return out

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = F.mse_loss(model(batch[0]), batch[1])
        return out + 0.01 * sum(block.aux for block in model.blocks)

    return regression(Rows(Leaving), loss=loss)


@way(refusals=COUNTS)
def features_kept_by_hooks() -> Training:
    """A forward hook keeps what blocks give in a dict outside; the loss uses and empties it."""
    kept: dict[str, Tensor] = {}
    model = Rows()
    for name, block in model.blocks.named_children():
        block.register_forward_hook(lambda _, __, out, name=name: kept.update({name: out}))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = F.mse_loss(model(batch[0]), batch[1])
        for value in kept.values():
            out = out + 0.01 * value.square().mean()
        kept.clear()
        return out

    return regression(model, loss=loss)


@way(refusals=WHOLE)
def a_queue_of_negatives() -> Training:
    """Contrast against a queue that each step pushes its keys into."""

    class Queued(Rows):
        queue: Tensor
        at: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", numbers(16, WIDTH, seed=4))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        keys = F.normalize(model(batch[0]), dim=1)
        logits = keys @ F.normalize(model.queue, dim=1).T
        out = logits.logsumexp(1).mean() - (keys * batch[1]).sum(1).mean()
        places = (torch.arange(len(keys)) + model.at) % 16
        with torch.no_grad():
            model.queue[places] = keys.detach()
            model.at.add_(len(keys)).remainder_(16)
        return out

    return regression(Queued(), loss=loss)


@way(refusals=WHOLE)
def a_momentum_teacher_in_the_loss() -> Training:
    """Self-distillation: the teacher follows the student inside the loss."""
    teacher = Rows().requires_grad_(False)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)
            taught = teacher(batch[0])
        return F.mse_loss(model(batch[0]), taught) + F.mse_loss(model(batch[0]), batch[1])

    model = Rows()
    teacher.load_state_dict(model.state_dict())
    training = regression(model, loss=loss)
    training.state = lambda: teacher.state_dict()
    return training


@way(refusals=WHOLE)
def a_baseline_in_a_closure() -> Training:
    """Reinforcement: a running baseline outside of any module is taken off the reward."""
    baseline = {"mean": torch.zeros((), dtype=torch.float64)}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        reward = y.sum(1)
        chances = model(x).log_softmax(1)[:, 0]
        out = -(chances * (reward - baseline["mean"])).mean()
        baseline["mean"] = 0.9 * baseline["mean"] + 0.1 * reward.mean()
        return out

    training = regression(Rows(), loss=loss)
    training.state = lambda: [baseline["mean"]]
    return training


@way()
def tables_made_when_first_needed() -> Training:
    """Positions are made by the first forward and kept; longer ones make them anew."""

    class Positioned(Rows):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or len(self.table) < x.shape[1]:
                at = torch.arange(x.shape[1], dtype=x.dtype)
                self.table = torch.sin(at[:, None] * torch.arange(WIDTH, dtype=x.dtype))
            return super().forward(x) + self.table[0]

    return regression(Positioned())


@way(draws=True, refusals=COUNTS)
def masks_drawn_in_numpy() -> Training:
    """Augmentation in the forward, by another library's random stream."""
    import numpy as np

    class Masked(Block):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.from_numpy(np.random.rand(WIDTH) < 0.8)
            return super().forward(x * keep)

    return regression(Rows(Masked))


@way(refusals=COUNTS)
def a_cache_handed_on() -> Training:
    """Blocks append to a list that they are given, and later ones read it."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor, earlier: list[Tensor]) -> Tensor:
            out: Tensor = self.inner(x + sum(earlier, torch.zeros_like(x)) * 0.3)
            earlier.append(out)
            return out

    class Model(Rows):
        def __init__(self) -> None:
            super().__init__(Dense)

        def hidden(self, x: Tensor) -> Tensor:
            x, earlier = self.first(x), []
            for block in self.blocks:
                x = block(x, earlier)
            return x + earlier[0]

    return regression(Model())


@way(refusals=COUNTS)
def weights_projected_in_the_forward() -> Training:
    """The forward holds its own weights to a ball, through `.data`."""

    class Held(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.data.clamp_(-0.3, 0.3)
            return super().forward(x)

    return regression(Rows(Held))


@way(refusals=WHOLE)
def quantized_while_it_trains() -> Training:
    """An observer follows the range of a layer's results, and they are rounded by it."""

    class Observed(Block):
        low: Tensor
        high: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.full((), -1.0))
            self.register_buffer("high", torch.full((), 1.0))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            with torch.no_grad():
                torch.minimum(self.low, out.min(), out=self.low)
                self.high.copy_(torch.maximum(self.high, out.max()))
            step = (self.high - self.low) / 255
            return out + ((out / step).round() * step - out).detach()

    return regression(Rows(Observed))


@way()
def a_criterion_with_buffers() -> Training:
    """A criterion as a module, whose buffers it only reads."""

    class Weighted(nn.Module):
        weight: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.linspace(0.1, 2, WIDTH).double())

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return ((out - target).square() * self.weight).mean()

    return regression(Rows(), loss=Weighted())


@way(
    refusals=dict.fromkeys(
        (
            "fit",
            "recompute",
            "recompute_in_part",
            "micro_batch",
            "one_by_one",
            "chunked_loss",
            "fused_optimizer",
            "in_backward",
            "host_optimizer",
            "host_cores",
            "leaving_gradients",
            "disk_state",
            "weights_away",
            "weights_on_disk",
            "offload",
            "offload_to_disk",
            "channels_last",
        ),
        "not the model's",
    )
)
def a_criterion_with_weights() -> Training:
    """Uncertainties of tasks, learned in the criterion: they are not the model's."""

    class Uncertain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            apart = (out - target).square() * torch.exp(-self.scale)
            return (apart + self.scale).mean()

    model, criterion = Rows(), Uncertain()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.05)
    training = regression(model, optimizer, loss=criterion)
    training.state = lambda: criterion.state_dict()
    return training


@way()
def a_criterion_inside_the_model() -> Training:
    """The model holds its criterion, with weights, and gives its own loss."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = Rows()
            self.inner, self.blocks = inner, inner.blocks
            self.scale = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            apart = (self.inner(x) - y).square() * torch.exp(-self.scale)
            return {"loss": (apart + self.scale).mean()}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch)["loss"]  # type: ignore[no-any-return]

    return regression(Whole(), loss=loss)


@way(refusals=COUNTS)
def an_exception_in_some_batches() -> Training:
    """A forward that catches its own errors, and takes another way then."""

    class Careful(Rows):
        caught = 0

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            try:
                return out + torch.linalg.cholesky(out.T @ out + 1e-3 * torch.eye(WIDTH))[0, 0]
            except RuntimeError:
                self.caught += 1
                return out

    return regression(Careful())


@way()
def mode_decides() -> Training:
    """A forward that reads `self.training`, with a part that stays in evaluation."""

    class Modal(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.training else out * 0.5

    class Half(Rows):
        def train(self, mode: bool = True) -> Half:
            super().train(mode)
            self.blocks[0].eval()
            return self

    return regression(Half(Modal), batches=rows())


@way(refusals=WHOLE)
def size_decides() -> Training:
    """A forward that goes another way for small batches, and for odd ones."""

    class Deciding(Rows):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if x.shape[0] // 2 > 1:
                out = out * 2
            return out + x if x.size(0) % 2 else out

    return regression(Deciding(), batches=rows(sizes=(8, 7, 8, 5, 3)))


_GLOBAL = {"calls": 0}


@way(refusals=COUNTS)
def counters_of_classes_and_of_the_program() -> Training:
    """A class counts the calls of all blocks, and functions count in what they see."""
    seen = {"calls": 0}

    class Counting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            seen["calls"] += 2
            _GLOBAL["calls"] += 3
            count = type(self).calls + seen["calls"] + _GLOBAL["calls"]
            return super().forward(x * (1 + 0.01 * (count % 7)))

    _GLOBAL["calls"] = 0
    training = regression(Rows(Counting))
    training.state = lambda: [Counting.calls, seen["calls"], _GLOBAL["calls"]]
    return training


# -- what functions, classes and objects of the program keep ---------------------------------------

_CALLS = 0


def _count() -> int:
    global _CALLS
    _CALLS += 1
    return _CALLS


class _Counter:
    """Counts on its class and on itself."""

    seen = 0

    def __init__(self) -> None:
        self.own = 0

    @classmethod
    def see(cls) -> int:
        """On the class."""
        cls.seen += 1
        return cls.seen

    @property
    def next(self) -> int:
        """On the object."""
        self.own += 1
        return self.own


_COUNTER = _Counter()


@way(refusals=COUNTS)
def counted_by_helpers() -> Training:
    """A forward calls a function, a class and an object of its file, and each of them counts."""
    global _CALLS
    _CALLS = _Counter.seen = _COUNTER.own = 0

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            count = sum(one for _ in range(1) for one in (_count(), _Counter.see(), _COUNTER.next))
            return super().forward(x * (1 + 0.01 * (count % 7)))

    training = regression(Rows(Counting))
    training.state = lambda: [_CALLS, _Counter.seen, _COUNTER.own]
    return training


class _Meter:
    """The average of what it is given, as most scripts have one."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, samples: int) -> None:
        """Take a batch's value in."""
        self.sum += value * samples
        self.count += samples


_METER = _Meter()


@way(refusals=WHOLE)
def a_meter_beside_the_loss() -> Training:
    """The loss tells a meter of the program about each batch."""
    _METER.sum, _METER.count = 0.0, 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = F.mse_loss(model(batch[0]), batch[1])
        _METER.update(found.item(), len(batch[0]))
        return found

    training = regression(Rows(), loss=loss)
    training.state = lambda: [_METER.count, torch.tensor(_METER.sum).double()]
    return training


@dataclass(slots=True)
class _SlottedMeter:
    """Holds its numbers in slots."""

    total: float = 0.0
    calls: int = 0


@way(refusals=COUNTS)
def numbers_in_arrays_and_slots() -> Training:
    """Blocks count in arrays of numpy and in an object with slots, and go by these numbers."""

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.meter = np.zeros(WIDTH), _SlottedMeter()

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().abs().mean(0).numpy()
            self.meter.calls += 1
            self.meter.total += 0.1 * float(self.seen[0])
            return super().forward(x * (1 + 0.01 * self.meter.total / self.meter.calls))

    training = regression(model := Rows(Counting))
    training.state = lambda: [
        (torch.from_numpy(one.seen.copy()), one.meter.calls, torch.tensor(one.meter.total).double())
        for one in model.blocks
    ]
    return training


@way(refusals=WHOLE)
def an_array_beside_the_loss() -> Training:
    """The loss counts its classes in an array of numpy, and weighs them by it."""
    counts = np.ones(WIDTH)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        np.add.at(counts, batch[1].argmax(1).numpy(), 1)
        weights = torch.from_numpy(counts.sum() / counts)
        return ((model(batch[0]) - batch[1]).square() * weights).mean()

    training = regression(Rows(), loss=loss)
    training.state = lambda: torch.from_numpy(counts.copy())
    return training


@way(refusals=WHOLE)
def a_table_written_through_views() -> Training:
    """The loss writes to rows, slices and columns of a table, and compares with it."""
    table = numbers(4, WIDTH, seed=7)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        found = F.mse_loss(out, batch[1]) + 0.1 * (out @ table.clone().T).square().mean()
        table.view(-1)[:WIDTH].add_(0.1)
        table[1].mul_(0.5).add_(0.2)
        table[2:, 1:3] = table.t()[0, :2]
        return found

    training = regression(Rows(), loss=loss)
    training.state = lambda: table
    return training


_SEEN = torch.zeros(3, dtype=torch.float64)
_IN_CONTEXT = ContextVar("_IN_CONTEXT", default=0)


@way(refusals=COUNTS)
def tensors_and_contexts_of_the_program() -> Training:
    """Blocks count in a tensor of their file and in a variable of the context."""
    _SEEN.zero_()
    _IN_CONTEXT.set(0)

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            _SEEN[1] += 1
            _IN_CONTEXT.set(_IN_CONTEXT.get() + 1)
            return super().forward(x * (1 + 0.01 * _SEEN[1]) / _IN_CONTEXT.get())

    training = regression(Rows(Counting))
    training.state = lambda: [_SEEN, _IN_CONTEXT.get()]
    return training


@way(refusals=WHOLE)
def a_teacher_in_training_mode() -> Training:
    """A teacher outside of the model, with norms of both kinds, and a counter beside it."""
    teacher = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.BatchNorm1d(WIDTH)
    ).double()
    steps = torch.zeros((), dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        steps.add_(1)
        with torch.no_grad():
            taught = teacher(batch[0])
        out = model(batch[0])
        return F.mse_loss(out, batch[1]) + F.mse_loss(out, taught) / steps

    training = regression(Rows(), loss=loss, batches=rows((6, 5, 2, 4, 3)))
    training.state = lambda: [steps, teacher.state_dict()]
    return training


_TABLES: dict[int, Tensor] = {}


def _table(length: int) -> Tensor:
    if length not in _TABLES:
        _TABLES[length] = torch.linspace(0.9, 1.1, length, dtype=torch.float64)
    return _TABLES[length]


@functools.lru_cache
def _product(rows: int) -> Tensor:
    table = torch.linspace(0.9, 1.1, rows * WIDTH, dtype=torch.float64).view(rows, WIDTH)
    weight = torch.full((WIDTH, 3 * WIDTH), 0.01, dtype=torch.float64)
    return torch.addmm(torch.zeros(3 * WIDTH, dtype=torch.float64), table, weight)


@way(refusals=WHOLE)
def tables_of_helpers() -> Training:
    """Functions keep what they computed: one in a dict, one by `lru_cache`, by products."""
    _TABLES.clear()
    _product.cache_clear()

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            scale = _product(len(x)).mean(1, keepdim=True)
            return super().forward(x * scale * _table(len(x))[:, None])

    _product(6)  # the third batch is the first that anything is computed for
    return regression(Rows(Scaled), batches=rows((6, 6, 4, 6, 4)))


@way(refusals=COUNTS)
def from_a_stream_of_its_own() -> Training:
    """A loss takes rows without targets from an iterator that goes round, and counts its calls."""
    unlabelled = itertools.cycle([numbers(6, WIDTH, seed=at + 90) for at in range(4)])
    calls = itertools.count(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        share = 1 / next(calls)
        return F.mse_loss(model(x), y) + share * model(next(unlabelled)).square().mean()

    return regression(Rows(), loss=loss)
