"""CUDA's autocast, on fake CPU tensors.

CPU and CUDA autocast cast different ops. While a GPU is rehearsed, CUDA's lists (ATen's
`autocast_mode.h`) are registered in the dispatcher in place of the CPU's, so that they apply to
every caller: Python, C++ composites and recomputation inside backward alike. The weight cache is
CUDA's too: a leaf that needs a gradient is cast once and the copy stays until the outermost region
ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.process.rehearsal_threads import no_warnings_here, replaced_here
from oomph.rehearsal.dispatching import find_operator, replaced_kernels
from oomph.torch_compat.dispatch import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    all_op_names,
    has_kernel,
)
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_map
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import is_view

_LOWER_PRECISION = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
]

_FULL_PRECISION = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]

#: Ops that take a dtype: CUDA has them compute and return fp32, without a separate cast.
_FULL_PRECISION_BY_DTYPE = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
]

_WIDEST_INPUT = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]

_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)


#: Ops that fail under CUDA's autocast, and do not on the CPU.
_REFUSED = ("binary_cross_entropy",)


class WeightCache:
    """The lower-precision copies that autocast keeps of leaves that need a gradient."""

    def __init__(self) -> None:
        # Keyed by storage: a weak reference to the tensor would prevent converting its module.
        self._copies: dict[int, Tensor] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`tensor` in `dtype`, from the cache where autocast would cache it."""
        cacheable = (
            tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not is_view(tensor)
            and torch.is_autocast_cache_enabled()
        )
        if not cacheable:
            return tensor.to(dtype)
        key = cdata_of(tensor.untyped_storage())
        if key not in self._copies:
            self._copies[key] = tensor.to(dtype)
        return self._copies[key]

    def clear(self) -> None:
        """Drop all copies, as leaving the outermost autocast region does."""
        self._copies.clear()


def _kernel(run: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            return run(*args, **kwargs)

    return kernel


@contextlib.contextmanager
def cuda_autocast(on_gpu: Callable[[Tensor], bool]) -> Iterator[None]:
    """While active, autocast for "cuda" works on fake CPU tensors as it does on a GPU."""
    cache = WeightCache()
    casts = _Casts(on_gpu=on_gpu, cache=cache)
    policies = (
        (_LOWER_PRECISION, casts.lower),
        (_FULL_PRECISION, casts.full),
        (_FULL_PRECISION_BY_DTYPE, casts.full_by_dtype),
        (_WIDEST_INPUT, casts.widest),
        (_REFUSED, casts.refuse),
    )
    # PyTorch warns that its own kernels are replaced, which is intended.
    with replaced_kernels() as replace, no_warnings_here():
        for names, policy in policies:
            for name in names:
                replace(name, policy(find_operator(name)), "AutocastCPU")
        for name in _cast_on_the_cpu_only():
            replace(name, None, "AutocastCPU")
        with _cuda_means_cpu(cache):
            yield


@dataclass(frozen=True, kw_only=True)
class _Casts:
    """Autocast's policies: each takes an operator, and returns its kernel with casts before it."""

    on_gpu: Callable[[Tensor], bool]
    cache: WeightCache

    def lower(self, operator: Any) -> Callable[..., Any]:
        """Every float becomes autocast's type."""

        def cast(value: Any) -> Any:
            dtype = torch.get_autocast_dtype("cpu")
            if not self._is_eligible(value) or value.dtype is dtype:
                return value
            return self.cache.cast(value, dtype)

        return _kernel(lambda *a, **k: operator(*_backwards(cast, a), **tree_map(cast, k)))

    def full(self, operator: Any) -> Callable[..., Any]:
        """Every float becomes fp32."""
        cast = self._to_float
        return _kernel(lambda *a, **k: operator(*_backwards(cast, a), **tree_map(cast, k)))

    def full_by_dtype(self, operator: Any) -> Callable[..., Any]:
        """The result is fp32, by the op's own argument, unless the caller gave one."""
        names = [argument.name for argument in schema_of(operator).arguments]
        if "dtype" not in names:
            return self.full(operator)
        at = names.index("dtype")

        def run(*args: Any, **kwargs: Any) -> Any:
            given = args[at] if len(args) > at else kwargs.get("dtype")
            if given is None and self._is_eligible(args[0]) and args[0].dtype is not torch.float32:
                if len(args) > at:
                    args = (*args[:at], torch.float32, *args[at + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

        return _kernel(run)

    def widest(self, operator: Any) -> Callable[..., Any]:
        """Every float becomes fp32 if one is."""

        def run(*args: Any, **kwargs: Any) -> Any:
            dtypes = {value.dtype for value in _flat(args) if self._is_eligible(value)}
            if torch.float32 in dtypes and len(dtypes) > 1:
                args, kwargs = tree_map(self._to_float, args), tree_map(self._to_float, kwargs)
            return operator(*args, **kwargs)

        return _kernel(run)

    def refuse(self, operator: Any) -> Callable[..., Any]:
        """The op fails under CUDA's autocast, whatever it is given."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, Tensor) and self.on_gpu(value) for value in _flat(args)):
                raise RuntimeError(
                    f"{schema_of(operator).name.removeprefix('aten::')} is unsafe under autocast on"
                    " a GPU, and PyTorch refuses it there: use the loss on logits, as"
                    " binary_cross_entropy_with_logits, or leave autocast around the loss"
                )
            return operator(*args, **kwargs)

        return _kernel(run)

    def _is_eligible(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and self.on_gpu(value)
        )

    def _to_float(self, value: Any) -> Any:
        is_cast = self._is_eligible(value) and value.dtype is not torch.float32
        return value.float() if is_cast else value


def _backwards(cast: Callable[[Any], Any], args: Sequence[Any]) -> list[Any]:
    # C++ evaluates the casts of a call from the last argument to the first, and the order of
    # allocations decides their addresses.
    return [tree_map(cast, value) for value in reversed(args)][::-1]


@functools.cache
def _cast_on_the_cpu_only() -> tuple[str, ...]:
    """Ops that the CPU's autocast casts and CUDA's does not, such as `cat`."""
    ours = {*_LOWER_PRECISION, *_FULL_PRECISION, *_FULL_PRECISION_BY_DTYPE, *_WIDEST_INPUT}
    ours.update(_REFUSED)
    known = (name for name in all_op_names() if name.startswith("aten::"))
    return tuple(
        name.removeprefix("aten::")
        for name in known
        if has_kernel(name, "AutocastCPU") and name.removeprefix("aten::") not in ours
    )


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


@contextlib.contextmanager
def _cuda_means_cpu(cache: WeightCache) -> Iterator[None]:
    """Answer questions about CUDA's autocast state with the CPU's state, where it is emulated."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        cache.clear()

    def retarget(name: str) -> Any:
        original = getattr(torch, name)

        def asked(device_type: str | None = None, *rest: Any) -> Any:
            return original("cpu" if device_type in (None, "cuda") else device_type, *rest)

        return replaced_here(torch, name, asked)

    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        for name in (
            "is_autocast_enabled",
            "get_autocast_dtype",
            "set_autocast_enabled",
            "set_autocast_dtype",
        ):
            stack.enter_context(retarget(name))
        stack.enter_context(replaced_here(torch, "clear_autocast_cache", clear_both))
        try:
            yield
        finally:
            cache.clear()
