"""A layer at a level of its own: in and out as without, backward and recomputation alike, and
nothing left behind."""

from __future__ import annotations

import copy
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.techniques.forward_call import Repeated
from oomph.techniques.layer_precision import LayerPrecision, tf32_settings_kept
from oomph.techniques.number_formats import Level
from oomph.techniques.recompute import recompute, replace_forward

#: Each run of a forward, with the TF32 setting it had. A queue, because a recomputed forward has no
#: effect on lists and attributes that can be reached from the model: they are put back.
RUNS: SimpleQueue[tuple[nn.Module, str]] = SimpleQueue()


def runs_of(module: nn.Module) -> list[str]:
    """The settings of a module's runs since this was asked last."""
    runs = [RUNS.get() for _ in range(RUNS.qsize())]
    return [how for ran, how in runs if ran is module]


class Middle(nn.Module):
    """Remembers the types and the TF32 setting that its product had, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(("forward", torch.get_float32_matmul_precision()))
        RUNS.put((self, torch.get_float32_matmul_precision()))
        out: Tensor = self.linear(x)
        self.seen.append((x.dtype, out.dtype))
        note: Tensor = _Note.apply(out, self.seen)
        return note


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(("backward", torch.get_float32_matmul_precision()))
        return gradient, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = Middle(), Middle(), Middle()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return out


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module, autocast: torch.dtype | None = None) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(X).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("level", ["bf16", "fp16", "fp8"])
def test_a_layer_goes_down_alone_in_an_fp32_model(level: str) -> None:
    model = Net()
    plain = gradients(model)
    for part in (model.first, model.middle, model.last):
        part.seen.clear()
    undo = LayerPrecision(model.middle, "cpu").apply(Level(level))
    lowered = gradients(model)
    half = torch.float16 if level == "fp16" else torch.bfloat16
    assert model.middle.seen[1] == (torch.float32, half)
    assert model.first.seen[1] == model.last.seen[1] == (torch.float32, torch.float32)
    assert not torch.equal(lowered[0], plain[0])
    torch.testing.assert_close(lowered, plain, rtol=0.1, atol=1e-3)
    undo()
    torch.testing.assert_close(gradients(model), plain, rtol=0, atol=0)


def test_fp8_is_coarser_than_bf16() -> None:
    model = Net()
    plain = gradients(model)[3]
    errors = []
    for level in (Level.BF16, Level.FP8):
        undo = LayerPrecision(model.middle, "cpu").apply(level)
        errors.append(float((gradients(model)[3] - plain).norm() / plain.norm()))
        undo()
    assert 0 < 3 * errors[0] < errors[1]


def test_a_layer_goes_up_alone_in_an_autocast_model() -> None:
    model = Net()
    LayerPrecision(model.middle, "cpu").apply(Level.FP32)
    gradients(model, torch.bfloat16)
    assert model.middle.seen[1] == (torch.float32, torch.float32)
    assert model.last.seen[1][1] is torch.bfloat16


def test_all_layers_up_is_the_fp32_model_and_all_down_the_autocast_one() -> None:
    model = Net()
    plain, half = gradients(model), gradients(model, torch.bfloat16)
    parts = (model.first, model.middle, model.last)
    undos = [LayerPrecision(part, "cpu").apply(Level.BF16) for part in parts]
    lowered = gradients(model)
    for undo in undos:
        undo()
    # Between the layers tanh is fp32 in one and bf16 in the other.
    torch.testing.assert_close(lowered, half, rtol=2e-2, atol=1e-3)
    linears = [part.linear for part in parts]
    for linear in linears:
        LayerPrecision(linear, "cpu").apply(Level.FP32)
    torch.testing.assert_close(gradients(model, torch.bfloat16), plain, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["tf32", "bf16", "fp8"])
@pytest.mark.parametrize("inside", [True, False], ids=["layer in block", "block is the layer"])
def test_recomputed_it_gives_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, level: str, inside: bool
) -> None:
    # The CPU's FP8 product rounds differently while ops are watched, as both runs are compared.
    monkeypatch.setattr(Repeated, "is_looked_at", lambda _: False)
    model = Net()
    layer = model.middle.linear if inside else model.middle
    plain = copy.deepcopy(model)
    other = plain.middle.linear if inside else plain.middle
    LayerPrecision(other, "cpu").apply(Level(level))
    recompute(model.middle)
    LayerPrecision(layer, "cpu").apply(Level(level))
    runs_of(model.middle)
    recomputed = gradients(model)
    assert len(runs_of(model.middle)) == 2
    torch.testing.assert_close(recomputed, gradients(plain), rtol=0, atol=0)


@pytest.mark.parametrize("recomputed", [False, True])
def test_tf32_is_set_for_its_layer_forward_and_backward(recomputed: bool) -> None:
    model = Net()
    if recomputed:
        recompute(model.middle)
    LayerPrecision(model.middle, "cpu").apply(Level.TF32)
    runs_of(model.middle)
    gradients(model)
    assert runs_of(model.middle) == ["high"] * (2 if recomputed else 1)

    def settings(part: Middle) -> set[Any]:
        return {how for what, how in part.seen if what in ("forward", "backward")}

    assert settings(model.middle) == {"high"}
    assert settings(model.first) == settings(model.last) == {"highest"}


def test_a_backward_that_ends_in_the_first_layer_leaves_no_setting() -> None:
    model = Net()
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    LayerPrecision(model.first, "cpu").apply(Level.TF32)
    with tf32_settings_kept():
        gradients(model)
        assert torch.get_float32_matmul_precision() == "high"
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_undo_leaves_nothing_on_the_modules() -> None:
    model = Net()
    before = [dict(vars(module)) for module in model.modules()]
    precision = LayerPrecision(model.middle, "cpu")
    for level in Level:
        precision.apply(level)()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_an_error_inside_leaves_autocast_and_tf32_as_they_were() -> None:
    model = Net()
    for level in (Level.BF16, Level.TF32):
        undo = LayerPrecision(model.middle, "cpu").apply(level)
        with pytest.raises(RuntimeError):
            model.middle(torch.ones(3, 5))
        undo()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_compiled_layer_is_compiled_once_for_each_level() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def compile_as_it_is(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    plain = copy.deepcopy(layer)
    compiled = torch.compile(layer.forward, backend=compile_as_it_is, dynamic=False)
    replace_forward(layer, compiled)
    both = LayerPrecision(layer, "cpu"), LayerPrecision(plain, "cpu")
    counts = []
    for level in (Level.FP32, Level.BF16, Level.FP8, Level.BF16, Level.FP8, Level.FP32):
        undos = [one.apply(level) for one in both]
        torch.testing.assert_close(gradients(layer), gradients(plain), rtol=0, atol=0)
        counts.append(len(graphs))
        for undo in undos:
            undo()
    assert counts[:3] == sorted(set(counts))
    assert counts[3:] == [counts[2]] * 3
