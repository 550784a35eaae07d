"""Stochastic depth with its rate in a tensor: the same numbers, from one compiled block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import SwinConfig, SwinModel
from transformers.models.convnext.modeling_convnext import ConvNextDropPath
from transformers.models.swin.modeling_swin import SwinDropPath

from oomph.techniques.drop_paths import drop_paths, rate_as_tensor

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """Has a rate as well, and does something else with it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return x * self.drop_prob


class Failing(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("only images")


class Drawing(Scaled):
    """Drops as well, by other draws."""

    def forward(self, x: Tensor) -> Tensor:
        keep = 1 - self.drop_prob
        return x * torch.empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(keep) / keep


def run(module: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(50, 3, 7, dtype=dtype, requires_grad=True)
    out = module(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, torch.rand(1)]


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [SwinDropPath, ConvNextDropPath])
def test_numbers_and_draws_are_the_same(
    kind: type[nn.Module], dtype: torch.dtype, rate: float
) -> None:
    module = kind(rate)
    expected = run(module, dtype)
    (found,) = drop_paths(module)
    rate_as_tensor(found, CPU)
    assert found is module
    torch.testing.assert_close(run(module, dtype), expected, rtol=0, atol=0)


def test_nothing_is_dropped_in_evaluation() -> None:
    module = SwinDropPath(0.5).eval()
    rate_as_tensor(module, CPU)
    x = torch.randn(9, 2)
    assert module(x) is x


@pytest.mark.parametrize(
    "module",
    [
        SwinDropPath(0.0),
        SwinDropPath(1.0),
        nn.Dropout(0.5),
        Scaled(0.5),
        Failing(0.5),
        Drawing(0.5),
    ],
    ids=["never drops", "always drops", "another module", "scales", "fails", "draws otherwise"],
)
def test_what_does_something_else_is_left_alone(module: nn.Module) -> None:
    assert list(drop_paths(module)) == []


def test_looking_for_them_draws_nothing() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert list(drop_paths(nn.Sequential(SwinDropPath(0.2), Scaled(0.2))))
    assert torch.equal(torch.get_rng_state(), before)


def test_undo_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(SwinDropPath(0.2))
    before = {name: str(value) for name, value in vars(module[0]).items()}
    undo = rate_as_tensor(module[0], CPU)
    assert not module.state_dict(), "nothing more is saved"
    undo()
    undo()
    assert {name: str(value) for name, value in vars(module[0]).items()} == before


def count_compiled(blocks: int, *, tensors: bool) -> int:
    """Graphs of a stage as Swin's, whose windows are shifted in every second block."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = {"image_size": 16, "embed_dim": 16, "num_heads": [2], "window_size": 2}
    model = SwinModel(SwinConfig(**sizes, depths=[blocks], drop_path_rate=0.3)).train()
    images = torch.randn(4, 3, 16, 16)

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        out = model(images).last_hidden_state
        out.square().sum().backward()
        found = [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    expected = step()
    backend = CompileCounterWithBackend("aot_eager")
    for block in model.encoder.layers[0].blocks:
        for drop_path in drop_paths(block) if tensors else ():
            rate_as_tensor(drop_path, CPU)
        block.forward = torch.compile(block.forward, dynamic=False, backend=backend)
    torch.testing.assert_close(step(), expected)
    torch._dynamo.reset()
    return backend.frame_count


def test_blocks_that_differ_in_their_rate_alone_are_compiled_once() -> None:
    # The first one drops nothing; then there are shifted ones and others.
    assert count_compiled(3, tensors=True) == count_compiled(6, tensors=True)
    assert count_compiled(6, tensors=False) > count_compiled(3, tensors=False)
