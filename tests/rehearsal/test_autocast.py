"""CUDA's autocast on fake CPU tensors: its lists, its weight cache, its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from oomph.hardware import find_gpu
from oomph.rehearsal.cuda.autocast import (
    _FULL_PRECISION,
    _FULL_PRECISION_BY_DTYPE,
    _LOWER_PRECISION,
    _REFUSED,
    _WIDEST_INPUT,
)
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend
from oomph.torch_compat.dispatch import all_op_names, has_kernel

# Importing PyTorch's test helpers forbids everybody to set flags such as those of TF32.
_were_frozen = torch.backends.flags_frozen()
from torch.testing._internal.autocast_test_lists import AutocastTestLists  # noqa: E402

torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = not _were_frozen

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


#: PyTorch's own lists, by which it tests CUDA's autocast, and what an op of each answers.
LISTS = {
    "torch_fp16": FP16,
    "methods_fp16": FP16,
    "linalg_fp16": FP16,
    "nn_fp16": FP16,
    "torch_fp32": FP32,
    "methods_fp32": FP32,
    "nn_fp32": FP32,
    "torch_need_autocast_promote": FP32,
    "torch_expect_builtin_promote": None,
    "methods_expect_builtin_promote": None,
}
#: Ops of cuDNN alone, which nobody calls by these names.
_CUDNN = ("cudnn_convolution", "cudnn_convolution_transpose")
#: Called otherwise than it is listed.
_EINSUM = "einsum"


def _listed() -> list[tuple[str, int, str]]:
    lists = AutocastTestLists(torch.device("cpu"))
    return [
        (name, at, case[0])
        for name in LISTS
        for at, case in enumerate(getattr(lists, name))
        if case[0] not in (*_CUDNN, _EINSUM)
    ]


@pytest.mark.parametrize(("name", "at", "op"), _listed(), ids=lambda one: str(one))
def test_ops_of_pytorchs_own_lists_answer_as_these_expect(
    gpu: Recorder, name: str, at: int, op: str
) -> None:
    torch.manual_seed(0)
    _, given, *rest = getattr(AutocastTestLists(torch.device("cpu")), name)[at]
    given, kwargs = given if isinstance(given, tuple) else (given,), {}
    expected = LISTS[name]
    for more in rest:  # keyword arguments, or what it answers
        if isinstance(more, dict):
            kwargs = more
        else:
            expected = more
    given, kwargs = tree_map(_on_the_gpu, (given, kwargs))
    homes = (Tensor,) if name.startswith("methods") else (torch, F, torch._C._nn, torch._C._linalg)
    found = next(one for home in homes if (one := getattr(home, op, None)) is not None)
    with torch.autocast("cuda", dtype=FP16):
        out = found(*given, **kwargs)
    answers = {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
    assert answers <= {expected} or expected is None


#: What PyTorch registers for CUDA and no list here has: ops of cuDNN, and one that only raises.
_NOT_CAST = set(_CUDNN)


def test_the_lists_name_the_ops_that_pytorch_registers_for_cuda() -> None:
    listed = [*_LOWER_PRECISION, *_FULL_PRECISION, *_FULL_PRECISION_BY_DTYPE, *_WIDEST_INPUT]
    listed += _REFUSED
    registered = {
        name.removeprefix("aten::")
        for name in all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    }
    assert sorted(listed) == sorted(registered - _NOT_CAST)


def test_what_cuda_refuses_under_autocast_is_refused(gpu: Recorder) -> None:
    chances, labels = on_gpu(FP32, 8).sigmoid(), on_gpu(FP32, 8)
    with torch.autocast("cuda", dtype=BF16):
        with pytest.raises(RuntimeError, match="unsafe under autocast on a GPU"):
            F.binary_cross_entropy(chances, labels)
        F.binary_cross_entropy_with_logits(chances, labels)
        with torch.autocast("cuda", enabled=False):
            F.binary_cross_entropy(chances, labels)


def _on_the_gpu(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cuda").requires_grad_(
        value.requires_grad
    )


@pytest.mark.parametrize("kept", [FP32, FP16])
def test_copies_of_leaves_in_fp32_alone_are_kept(gpu: Recorder, kept: torch.dtype) -> None:
    weight = on_gpu(kept, 64, 64).requires_grad_()
    x = on_gpu(FP32, 8, 64)
    first = len(gpu.timeline.blocks)
    with torch.autocast("cuda", dtype=BF16):
        F.linear(x, weight)
        F.linear(x, weight)
    copies = sum(b.size == 64 * 64 * 2 for b in gpu.timeline.blocks[first:])
    assert copies == (1 if kept is FP32 else 2)


def test_views_and_results_are_cast_anew_each_time(gpu: Recorder) -> None:
    leaf = on_gpu(FP32, 64, 64).requires_grad_()
    x = on_gpu(FP32, 8, 64)
    for given in (leaf.view(64, 64), leaf * 2, leaf.detach()):
        first = len(gpu.timeline.blocks)
        with torch.autocast("cuda", dtype=BF16):
            F.linear(x, given)
            F.linear(x, given)
        assert sum(b.size == 64 * 64 * 2 for b in gpu.timeline.blocks[first:]) == 2


def test_the_widest_input_decides_where_one_is_in_fp32(gpu: Recorder) -> None:
    half, full = on_gpu(BF16), on_gpu()
    with torch.autocast("cuda", dtype=BF16):
        assert torch.addcmul(half, half, half).dtype is BF16, "nothing is wider"
        assert torch.addcmul(half, full, half).dtype is FP32
        first = len(gpu.timeline.blocks)
        torch.addcmul(full, full, full)
        assert len(gpu.timeline.blocks) == first + 1, "nothing is cast"


def test_sums_in_half_precision_are_in_fp32_unless_a_dtype_is_given(gpu: Recorder) -> None:
    half = on_gpu(BF16)
    with torch.autocast("cuda", dtype=BF16):
        assert half.sum().dtype is FP32
        assert half.sum(dtype=BF16).dtype is BF16
        assert half.sum(0, dtype=FP16).dtype is FP16
        assert F.softmax(half, -1, dtype=BF16).dtype is BF16
        assert torch.arange(4, device="cuda").sum().dtype is torch.int64
        first = len(gpu.timeline.blocks)
        half.sum()
        assert len(gpu.timeline.blocks) == first + 1, "the kernel reads halves: there is no copy"


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
