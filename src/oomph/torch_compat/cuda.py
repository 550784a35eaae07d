"""A GPU's streams and its allocator. Builds without CUDA lack some of these names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._C._cuda_getCurrentStream",
        used_for="which stream computes, asked with every copy",
        without_it="weights and activations cannot be moved while the card computes",
        has_cuda=True,
    ),
    PrivateName(
        "torch._C._cuda_isCurrentStreamCapturing",
        used_for="whether a CUDA graph is being captured, in which no number may be read",
        without_it="forwards of captured blocks fail",
        has_cuda=True,
    ),
    PrivateName(
        "torch._C._cuda_attach_out_of_memory_observer",
        used_for="sees every refusal of the allocator",
        without_it="`oomph run` does not say what was asked for when memory ran out",
        has_cuda=True,
    ),
    PrivateName(
        "torch._C._host_emptyCache",
        used_for="pinned memory of one measurement is given back before the next",
        without_it="`oomph gpus measure` needs more memory of the host",
        has_cuda=True,
    ),
    PrivateName(
        "torch._C._accelerator_setAllocatorSettings",
        used_for="applies a plan's allocator settings",
        without_it="plans' allocator settings need a new process",
        is_optional=True,
    ),
    PrivateName(
        "torch.cuda.memory._set_allocator_settings",
        used_for="the same in older versions",
        without_it="plans' allocator settings need a new process",
        is_optional=True,
    ),
    PrivateName(
        "torch.cuda._sleep",
        used_for="keeps the card busy while work queues up: launches are not measured",
        without_it="blocks and cards are measured with the time of launches",
    ),
    PrivateName(
        "torch.cuda._is_compiled",
        used_for="answered as if the build had CUDA",
        without_it="nothing can be rehearsed for a card on builds without CUDA",
        is_optional=True,
    ),
    PrivateName(
        "torch.cuda._exchange_device",
        used_for="answered as if there were the card",
        without_it="scripts that select a device cannot be rehearsed",
        is_optional=True,
    ),
    PrivateName(
        "torch.cuda._maybe_exchange_device",
        used_for="answered as if there were the card",
        without_it="scripts that select a device cannot be rehearsed",
        is_optional=True,
    ),
    PrivateName(
        "torch.cuda.memory._record_memory_history",
        used_for="answered as if there were the card",
        without_it="scripts that record memory cannot be rehearsed",
        is_optional=True,
    ),
    PrivateName(
        "torch.cuda._lazy_init",
        used_for="does nothing in a rehearsal",
        without_it="rehearsals for a card fail on machines without one",
        is_optional=True,
    ),
    PrivateName(
        "torch._C._accelerator_exchangeDevice",
        used_for="answered as if there were the card",
        without_it="`torch.accelerator.device_index` cannot be rehearsed",
        is_optional=True,
    ),
    PrivateName(
        "torch._C._accelerator_maybeExchangeDevice",
        used_for="answered as if there were the card",
        without_it="`torch.accelerator.device_index` cannot be rehearsed",
        is_optional=True,
    ),
    PrivateName(
        "torch._use_cudnn_rnn_flatten_weight",
        used_for="answered as on a card",
        without_it="recurrent layers are rehearsed with scattered weights",
        is_optional=True,
    ),
)

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
#: Busy-waits on the GPU for this many cycles.
sleep: Callable[[int], None] = torch.cuda._sleep

# Names that a rehearsal replaces; the last two constants are for `torch._C` and for `torch`.
IS_COMPILED = "_is_compiled"
EXCHANGE_DEVICE = ("_exchange_device", "_maybe_exchange_device")
RECORD_HISTORY = "_record_memory_history"
LAZY_INIT = "_lazy_init"
EXCHANGE_ACCELERATOR = ("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice")
FLATTENS_WEIGHTS = "_use_cudnn_rnn_flatten_weight"
#: The `torch._C` module.
bindings = torch._C


def raw_stream(index: int) -> Any:
    """An identifier of a device's current stream, without creating a stream object."""
    return _current_stream(index)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured; oomph's captures hide that from `torch.cuda`."""
    return torch._C._cuda_isCurrentStreamCapturing()


def empty_host_cache() -> None:
    """Free the pinned memory that PyTorch caches."""
    torch._C._host_emptyCache()


def set_allocator_settings(text: str) -> None:
    """Apply allocator settings as `PYTORCH_ALLOC_CONF` would."""
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(text)


def on_out_of_memory(observer: Callable[..., None]) -> None:
    """Make the allocator call the observer at every out of memory, for the rest of the process."""
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
    attach(observer)
