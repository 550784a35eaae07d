"""What a forward writes to is found by path, on real and fake tensors, and nothing of it stays."""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stateful_blocks
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from oomph.techniques.tensor_writes import TensorWrites
from oomph.techniques.written_state import Written, find_written


class Block(nn.Module):
    """Writes what `write` writes, in each forward."""

    def __init__(self, write: Callable[[Block, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(4))
        self.calls = 0
        self.kept: Tensor | None = None
        self.losses: list[Tensor] = []
        self.table: dict[str, Any] = {}
        self.recent: deque[int] = deque(maxlen=2)
        self.hidden = [torch.zeros(4)]
        self.pair = (torch.zeros(4), {"n": 0})
        self.generator = torch.Generator()
        self.draws = np.random.default_rng(0)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.write(self, y.detach())
        return y


def assign(name: str, value: Callable[[Block, Tensor], Any]) -> Callable[[Block, Tensor], None]:
    return lambda block, y: setattr(block, name, value(block, y))


WRITES: dict[str, tuple[Callable[[Block, Tensor], Any], dict[str, tuple[str, ...]]]] = {
    "nothing": (lambda block, y: y.add(1).mul_(2), {}),
    "a buffer": (lambda b, y: b.ema.mul_(0.9).add_(y.mean(0)), {"buffers": ("0.ema",)}),
    "a view of one": (lambda b, y: b.ema[1:].zero_(), {"buffers": ("0.ema",)}),
    "through data": (lambda b, y: b.ema.data.copy_(y[0]), {"buffers": ("0.ema",)}),
    "other data": (lambda b, y: setattr(b.ema, "data", y[0]), {"buffers": ("0.ema",)}),
    "a new buffer": (assign("ema", lambda b, y: b.ema + y[0]), {"buffers": ("0.ema",)}),
    "a weight": (lambda b, y: b.linear.weight.data.mul_(2), {"parameters": ("0.linear.weight",)}),
    "a counter": (assign("calls", lambda b, y: b.calls + 1), {"attributes": ("0.calls",)}),
    "the same again": (assign("calls", lambda b, y: int(str(b.calls))), {}),
    "a tensor it keeps": (assign("kept", lambda b, y: y), {"attributes": ("0.kept",)}),
    "an attribute": (assign("other", lambda b, y: 1), {"attributes": ("0.other",)}),
    "a list": (lambda b, y: b.losses.append(y), {"attributes": ("0.losses[]",)}),
    "a dict": (lambda b, y: b.table.update(y=y), {"attributes": ("0.table[]",)}),
    "a deque": (lambda b, y: b.recent.append(1), {"attributes": ("0.recent[]",)}),
    "a tensor in a list": (lambda b, y: b.hidden[0].add_(1), {"tensors": ("0.hidden[]",)}),
    "inside a tuple": (lambda b, y: b.pair[0].add_(1), {"tensors": ("0.pair[0]",)}),
    "a dict in a tuple": (lambda b, y: b.pair[1].update(n=1), {"attributes": ("0.pair[1][]",)}),
    "a generator": (
        lambda b, y: torch.rand(2, generator=b.generator),
        {"attributes": ("0.generator",)},
    ),
    "numpy's generator": (lambda b, y: b.draws.random(), {"attributes": ("0.draws",)}),
    "somebody's generator": (
        lambda b, y: torch.rand(2, generator=torch.Generator()),
        {"draws": ("generator",)},
    ),
    "python's stream": (lambda b, y: random.random(), {"draws": ("python",)}),
    "numpy's stream": (lambda b, y: np.random.rand(), {"draws": ("numpy",)}),
}


def held(model: nn.Module) -> list[Any]:
    block: Any = model[0]  # type: ignore[index]
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        block.calls,
        block.kept,
        list(block.losses),
        dict(block.table),
        list(block.recent),
        block.hidden[0].clone(),
        (block.pair[0].clone(), dict(block.pair[1])),
        block.generator.get_state(),
        block.draws.bit_generator.state["state"]["state"],
        hasattr(block, "other"),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_is_found_and_nothing_of_it_stays(what: str) -> None:
    write, expected = WRITES[what]
    model = nn.Sequential(Block(write), nn.Dropout())
    before = held(model)
    ema = model[0].ema
    assert find_written(model, lambda: model(torch.randn(2, 4))) == Written(**expected)
    torch.testing.assert_close(held(model), before, rtol=0, atol=0)
    assert model[0].ema is ema


@pytest.mark.parametrize("what", WRITES)
def test_fake_tensors_tell_the_same(what: str) -> None:
    write, expected = WRITES[what]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(Block(write))
        assert find_written(model, lambda: model(torch.randn(2, 4))) == Written(**expected)


NETS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, ...]]]] = {
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        {"buffers": ("1.num_batches_tracked", "1.running_mean", "1.running_var")},
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)
        ),
        {"buffers": ("1.running_mean", "1.running_var")},
    ),
    "old spectral norm": (
        lambda: nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 4))),
        {"buffers": ("0.weight_u", "0.weight_v"), "attributes": ("0.weight",)},
    ),
    "new spectral norm": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))),
        {"buffers": ("0.parametrizations.weight.0._u", "0.parametrizations.weight.0._v")},
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), {}),
}


@pytest.mark.parametrize("what", NETS)
def test_layers_that_write_are_known_by_their_ops(what: str) -> None:
    make, expected = NETS[what]
    model = make()
    before = copy.deepcopy(model.state_dict())
    assert find_written(model, lambda: model(torch.randn(3, 4))) == Written(**expected)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_what_hooks_close_over_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[int] = []
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        seen.append(calls)

    model[0].register_forward_hook(count)
    found = find_written(model, lambda: model(torch.randn(2, 4)))
    assert len(found.attributes) == 2
    assert all(place.startswith("0._forward_hooks") for place in found.attributes)
    assert (calls, seen) == (0, [])


def test_what_the_programs_own_modules_keep_is_found() -> None:
    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for value in (len(y) for y in [x]):
                stateful_blocks.note(value)
            return super().forward(x)

    model = Noting(4, 4)
    found = find_written(model, lambda: model(torch.randn(2, 4)))
    assert found.attributes == ("Meter.total", "stateful_blocks.METER.last")
    assert stateful_blocks.Meter.total == 0
    assert not vars(stateful_blocks.METER)


def test_a_write_to_an_input_is_nobody_s() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True))
    x = torch.randn(2, 4)
    assert find_written(model, lambda: model(x)).elsewhere == ("aten.relu_.default",)


def test_the_part_of_one_module() -> None:
    write, _ = WRITES["a buffer"]
    model = nn.Sequential(Block(write), Block(write))
    found = find_written(model, lambda: model(torch.randn(2, 4)))
    assert found.inside("1") == Written(buffers=("1.ema",))
    assert found and not found.inside("1.linear")


def test_a_forward_that_fails_leaves_no_trace_either() -> None:
    def write(block: Block, _: Tensor) -> None:
        block.calls += 1
        block.ema.add_(1)
        raise ValueError("no")

    model = nn.Sequential(Block(write))
    with pytest.raises(ValueError, match="no"):
        find_written(model, lambda: model(torch.randn(2, 4)))
    assert model[0].calls == 0 and not model[0].ema.any()


def test_a_weight_of_others_that_is_read_twice_is_found_once() -> None:
    weight = nn.Parameter(torch.ones(3))
    with TensorWrites([]) as writes:
        torch.add(weight, 1)
        torch.mul(weight, 2)
    assert len(writes.foreign) == 1 and writes.foreign[0] is weight


def test_a_view_of_a_real_tensor_is_that_tensor_in_a_rehearsal_too() -> None:
    table, untouched, foreign = torch.zeros(4, 4), torch.zeros(4), torch.zeros(4)

    def loss() -> Tensor:
        table[1:].t()[0].add_(1)
        made = untouched[1:].clone()
        return made.mul_(2).sum() + untouched.view(2, 2).sum()

    def run() -> None:
        loss()
        foreign[1:].zero_()

    with FakeTensorMode(allow_non_fake_inputs=True):
        written = find_written(nn.Linear(4, 4), run, [("the loss", loss)])
    assert written == Written(tensors=("the loss.table",), elsewhere=("aten.zero_.default",))


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    count = [0]

    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        count[0] += 1
        return function(*args)

    return counted


def test_what_a_decorator_keeps_is_seen() -> None:
    class Decorated(nn.Linear):
        @_counting
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Decorated(2, 2)
    (place,) = find_written(model, lambda: model(torch.ones(1, 2))).attributes
    assert "count" in place


def test_a_method_that_wraps_one_of_a_tensor_is_looked_at_like_any_other() -> None:
    class Wrapping(nn.Linear):
        @functools.wraps(Tensor.sum)
        def total(self, x: Tensor) -> Tensor:
            return x.sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.total(super().forward(x))

    model = Wrapping(2, 2)
    assert not find_written(model, lambda: model(torch.ones(1, 2)))
