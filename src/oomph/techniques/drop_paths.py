"""Stochastic depth whose rate is a tensor: blocks that differ only in the rate compile once.

Later blocks drop their branch more often, so each has its own rate. PyTorch's compiler treats the
rate as a constant and recompiles for each block. A tensor avoids that; the random draws and the
results stay the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MethodType

import torch
from torch import Tensor, nn

from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo
from oomph.torch_compat.dispatch import disable_current_modes
from oomph.torch_compat.function_modes import DisableTorchFunction

#: A non-persistent buffer: the fraction of samples that keep the branch.
_KEEP = "oomph_keep"

#: By class: whether it drops paths exactly as `_drop` does.
_known: dict[type[nn.Module], bool] = {}


def drop_paths(block: nn.Module) -> Iterator[nn.Module]:
    """The modules in a block that drop a branch for some samples, like Hugging Face's."""
    for module in block.modules():
        if (
            0 < _rate(module) < 1
            and not [*module.parameters(), *module.buffers(), *module.children()]
            and "forward" not in vars(module)
            and _drops_as_known(module)
        ):
            yield module


def rate_as_tensor(module: nn.Module, device: torch.device) -> Undo:
    """Have such a module read its rate from a tensor on the device."""
    module.register_buffer(_KEEP, _keep(module, device), persistent=False)
    put_back = replace_forward(module, MethodType(_drop, module))

    def undo() -> None:
        put_back()
        if hasattr(module, _KEEP):
            delattr(module, _KEEP)

    return undo


def _rate(module: nn.Module) -> float:
    rate = getattr(module, "drop_prob", None)
    return rate if isinstance(rate, float) else 0.0


def _keep(module: nn.Module, device: torch.device) -> Tensor:
    return torch.tensor(1 - _rate(module), dtype=torch.float64, device=device)


def _drop(module: nn.Module, x: Tensor) -> Tensor:
    if not module.training:
        return x
    return _dropped(x, getattr(module, _KEEP))


def _dropped(x: Tensor, keep: Tensor) -> Tensor:
    """Drop with a tensor rate, rounding exactly where ops with a Python number would."""
    wide = torch.promote_types(x.dtype, torch.float32)
    keep = keep.to(wide)
    drawn = torch.rand((len(x), *[1] * (x.dim() - 1)), dtype=x.dtype, device=x.device)
    is_kept = (drawn.to(wide) + keep).to(x.dtype).floor()
    return (x.to(wide) / keep).to(x.dtype) * is_kept


def _drops_as_known(module: nn.Module) -> bool:
    kind = type(module)
    if kind not in _known:
        _known[kind] = _drops_alike(module)
    return _known[kind]


def _drops_alike(module: nn.Module) -> bool:
    """Whether the module and `_dropped` agree for the same draws, tested on a small CPU tensor.

    The test runs outside of any rehearsal.
    """
    twin = copy.copy(module)
    twin.training = True
    with (
        DisableTorchFunction(),
        disable_current_modes(),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        x = torch.arange(1.0, 193.0, device="cpu").view(64, 3, 1)
        keep = _keep(module, torch.device("cpu"))
        torch.default_generator.manual_seed(0)
        ours = _dropped(x, keep)
        torch.default_generator.manual_seed(0)
        try:
            theirs = twin(x)
        except Exception:
            return False
        return isinstance(theirs, Tensor) and torch.equal(theirs, ours)
