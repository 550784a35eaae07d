"""Ops that PyTorch decomposes differently on a GPU than on a CPU.

These are decomposed above autograd, so a fake CPU tensor would record the CPU's backward: another
dropout, another batch norm, attention with its whole score matrix. While a GPU is rehearsed they
are replaced in the dispatcher by calls of the op the GPU would run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.hardware import GPU
from oomph.rehearsal.cuda.attention import Attention, attend
from oomph.rehearsal.cuda.recurrent import run_recurrent
from oomph.rehearsal.dispatching import find_operator, replaced_kernels
from oomph.rehearsal.packed_sequences import batch_sizes_of
from oomph.torch_compat.dispatch import DispatchKey

aten = torch.ops.aten

#: Keys above the backend's own kernel, with autograd on or off; inference mode skips the first.
_KEYS = ("AutogradCPU", "CPU")


@contextlib.contextmanager
def cuda_composites(
    gpu: GPU, on_gpu: Callable[[Tensor], bool], is_traced: Callable[[], bool]
) -> Iterator[None]:
    """While active, composite ops on GPU tensors become the ops CUDA would run.

    `is_traced` tells whether a block is being traced for compilation.
    """
    depending = _DependingOnDevice(gpu=gpu, on_gpu=on_gpu)
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": depending.attention,
        "linear": _linear,
        "dropout": depending.dropout,
        "batch_norm": depending.batch_norm,
        "rms_norm": _rms_norm,
        "softmax.int": functools.partial(depending.softmax, aten._softmax),
        "log_softmax.int": functools.partial(depending.softmax, aten._log_softmax),
    }
    for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        kernels[f"{mode}.input"] = functools.partial(_recurrent, mode)
        kernels[f"{mode}.data"] = functools.partial(_recurrent_packed, mode)
    with replaced_kernels() as replace:
        for name, kernel in kernels.items():
            for key in _KEYS:
                replace(name, _as_traced(name, kernel, is_traced), key)
        yield


@dataclass(frozen=True, kw_only=True)
class _DependingOnDevice:
    """Composite ops of which CUDA and the CPU run different kernels."""

    gpu: GPU
    on_gpu: Callable[[Tensor], bool]

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not self.on_gpu(query):
            return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale
            )[0]
        call = Attention(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            causal=is_causal,
            scale=scale,
            grouped=enable_gqa,
        )
        return attend(self.gpu, call)

    def dropout(self, input: Tensor, p: float, train: bool) -> Tensor:
        if self.on_gpu(input) and train and 0 < p < 1 and input.numel() > 0:
            return aten.native_dropout(input, p, True)[0]  # type: ignore[no-any-return]
        if not train or p == 0 or input.numel() == 0:
            return input
        if p == 1:
            return input * torch.zeros((), dtype=input.dtype, device="cpu")
        return input * torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)

    def batch_norm(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        cudnn = (
            self.on_gpu(input)
            and cudnn_enabled
            and training
            and input.dtype in (torch.float32, torch.float16, torch.float64)
            and weight is not None
            and bias is not None
            and (running_mean is None) == (running_var is None)
            and input.dim() <= 5
            and (input.dtype is torch.float16 or weight.dtype is input.dtype)
        )
        run = aten.cudnn_batch_norm if cudnn else aten.native_batch_norm
        return run(  # type: ignore[no-any-return]
            input, weight, bias, running_mean, running_var, training, momentum, eps
        )[0]

    def softmax(
        self,
        run: Callable[..., Tensor],
        input: Tensor,
        dim: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        # CUDA reads fp16 and writes fp32 in one kernel; all other inputs are converted first.
        fused = dtype is torch.float32 and input.dtype is torch.float16 and self.on_gpu(input)
        if not fused and dtype is not None:
            input = input.to(dtype)
        return run(input, dim, fused)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is not None and bias.dim() == 1 and input.dim() > 1 and input.is_contiguous():
        rows = input.flatten(0, -2) if input.dim() > 2 else input
        out = torch.addmm(bias, rows, weight.t())
        return out.unflatten(0, input.shape[:-1]) if input.dim() > 2 else out
    if bias is not None and input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    out = torch.matmul(input, weight.t())
    # In place: PyTorch only avoids that because a mode is active.
    return out.add_(bias) if bias is not None else out


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    return aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]  # type: ignore[no-any-return]


def _recurrent(
    mode: str, input: Tensor, states: Any, params: Any, *options: Any
) -> tuple[Tensor, ...]:
    states = [states] if isinstance(states, Tensor) else states
    dtype = torch.get_autocast_dtype("cpu")
    if torch.is_autocast_enabled("cpu") and input.dtype is torch.float32:
        # Autocast casts the whole buffer of weights at once, and does not cache it.
        flat = torch.cat([weight.flatten().to(dtype) for weight in params])
        parts = flat.split([weight.numel() for weight in params])
        params = [p.view(w.shape) for p, w in zip(parts, params, strict=True)]
        input, states = input.to(dtype), [state.to(dtype) for state in states]
    return run_recurrent(mode, input, states, params, *options)


def _recurrent_packed(
    mode: str, data: Tensor, batch_sizes: Tensor, states: Any, params: Any, *options: Any
) -> tuple[Tensor, ...]:
    sizes = batch_sizes_of(batch_sizes)
    return _recurrent(mode, data, states, params, *options, False, sizes)


def _as_traced(
    name: str, kernel: Callable[..., Any], is_traced: Callable[[], bool]
) -> Callable[..., Any]:
    """Use the tracer's own kernel, if there is one, while a block is traced; else `kernel`."""
    traced = find_operator(name).py_kernels.get(DispatchKey.CompositeImplicitAutograd)
    if traced is None:
        return kernel

    def run(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if is_traced() else kernel(*args, **kwargs)

    return run
