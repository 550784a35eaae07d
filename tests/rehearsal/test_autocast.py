"""CUDA's autocast on fake CPU tensors: its lists, its weight cache, its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.gpus import find_gpu
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    with pretend(find_gpu("h200")) as recorder:
        yield recorder


def on_gpu(dtype: torch.dtype = FP32, *shape: int) -> Tensor:
    return torch.empty(shape or (4, 4), dtype=dtype, device="cuda")


#: What CUDA's documentation lists, op by op: from these dtypes to that one.
CASTS: list[tuple[str, Callable[..., Tensor], tuple[torch.dtype, ...], torch.dtype]] = [
    ("matmul", torch.matmul, (FP32, FP32), BF16),
    ("mm mixed", torch.mm, (FP32, BF16), BF16),
    ("linear", F.linear, (FP32, FP32), BF16),
    ("einsum", lambda x, y: torch.einsum("ij,jk->ik", x, y), (FP32, FP32), BF16),
    ("layer_norm", lambda x: F.layer_norm(x, (4,)), (BF16,), FP32),
    ("softmax", lambda x: F.softmax(x, -1), (BF16,), FP32),
    ("log_softmax", lambda x: F.log_softmax(x, -1), (BF16,), FP32),
    ("exp", torch.exp, (BF16,), FP32),
    ("rsqrt", torch.rsqrt, (BF16,), FP32),
    ("pow", lambda x: x.pow(2), (BF16,), FP32),
    ("sum", torch.sum, (BF16,), FP32),
    ("cumsum", lambda x: x.cumsum(0), (BF16,), FP32),
    ("norm", torch.linalg.vector_norm, (BF16,), FP32),
    ("mse_loss", F.mse_loss, (BF16, BF16), FP32),
    ("gelu is left alone", F.gelu, (BF16,), BF16),
    ("relu is left alone", F.relu, (FP32,), FP32),
    ("mean is left alone", torch.mean, (BF16,), BF16),
    ("add promotes", torch.add, (BF16, FP32), FP32),
    ("cat promotes by itself", lambda x, y: torch.cat([x, y]), (BF16, FP32), FP32),
    ("cat of one dtype is left alone", lambda x, y: torch.cat([x, y]), (BF16, BF16), BF16),
    ("addcmul takes the widest", torch.addcmul, (BF16, FP32, BF16), FP32),
]


@pytest.mark.parametrize(("name", "op", "given", "expected"), CASTS, ids=[c[0] for c in CASTS])
def test_ops_answer_in_cudas_dtype(
    gpu: Recorder,
    name: str,
    op: Callable[..., Tensor],
    given: tuple[torch.dtype, ...],
    expected: torch.dtype,
) -> None:
    with torch.autocast("cuda", dtype=BF16):
        assert op(*(on_gpu(dtype) for dtype in given)).dtype is expected


def test_nothing_is_cast_outside_the_region_or_on_the_host(gpu: Recorder) -> None:
    x = on_gpu()
    assert torch.mm(x, x).dtype is FP32
    with torch.autocast("cuda", dtype=BF16):
        host = torch.empty(4, 4)
        assert torch.mm(host, host).dtype is FP32
        with torch.autocast("cuda", enabled=False):
            assert torch.mm(x, x).dtype is FP32
        assert torch.mm(x, x).dtype is BF16


def test_float64_is_never_cast(gpu: Recorder) -> None:
    x = on_gpu(torch.float64)
    with torch.autocast("cuda", dtype=BF16):
        assert torch.mm(x, x).dtype is torch.float64


def test_the_default_dtype_is_cudas(gpu: Recorder) -> None:
    with torch.autocast("cuda"):
        assert torch.mm(on_gpu(), on_gpu()).dtype is FP16
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is FP16


def test_a_copy_of_each_weight_lives_until_the_region_ends(gpu: Recorder) -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("cuda")
    x = on_gpu(FP32, 8, 64)
    weights = sum(p.numel() for p in layers.parameters())
    with torch.no_grad():
        before = gpu.allocated
        with torch.autocast("cuda", dtype=BF16):
            layers(x)
    assert gpu.allocated == before + _workspace(gpu)

    before = gpu.allocated
    with torch.autocast("cuda", dtype=BF16):
        layers(x)
        assert gpu.allocated == before + weights * 2, "the outputs are gone, the copies are kept"
        layers(x)
        assert gpu.allocated == before + weights * 2, "a second use takes no second copy"
    assert gpu.allocated == before


def _workspace(recorder: Recorder) -> int:
    """cuBLAS takes its workspace at the first product and keeps it."""
    return sum(b.size for b in recorder.timeline.blocks if b.category == "workspace")


def test_the_copies_outlive_the_region_where_backward_needs_them(gpu: Recorder) -> None:
    layer = nn.Linear(64, 64, bias=False).to("cuda")
    x = on_gpu(FP32, 8, 64).requires_grad_()
    with torch.autocast("cuda", dtype=BF16):
        loss = layer(x).sum()
    copies = [b for b in gpu.timeline.blocks if b.death is None and b.size == 64 * 64 * 2]
    assert len(copies) == 1
    loss.backward()
    assert copies[0].death is not None
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is FP32


def test_without_the_cache_every_use_makes_a_copy(gpu: Recorder) -> None:
    layer = nn.Linear(64, 64, bias=False).to("cuda")
    x = on_gpu(FP32, 8, 64)
    for cache, copies in ((True, 1), (False, 2)):
        first = len(gpu.timeline.blocks)
        with torch.autocast("cuda", dtype=BF16, cache_enabled=cache):
            layer(x)
            layer(x)
        made = gpu.timeline.blocks[first:]
        assert sum(b.size == 64 * 64 * 2 for b in made) == copies


def test_recomputation_in_backward_is_cast_as_the_forward_was(gpu: Recorder) -> None:
    seen: list[torch.dtype] = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return torch.tanh(out)

    layer = Layer(64, 64).to("cuda")
    x = on_gpu(FP32, 8, 64).requires_grad_()
    with torch.autocast("cuda", dtype=BF16):
        loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum()
    loss.backward()
    assert seen == [BF16, BF16]
