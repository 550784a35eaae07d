"""Give convolutions their images with channels last, as the kernels of Tensor Cores want them.

In PyTorch's own layout an image lies channel by channel. In half precision cuDNN converts it before
nearly every convolution and the result after it, and batch norm is several times slower. A result
has the layout of its input, and what stands between convolutions keeps it: only the first one
copies. Weights, and so the optimizer and saved files, stay as they are.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from oomph.jobs.job import Job
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, register
from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import (
    ApplyContext,
    Inspection,
    SearchContext,
    Technique,
    Tried,
    Undo,
)

#: Modules that take images, or one image without a batch, which is left alone.
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
#: Images of so many channels were made by the model; those of a batch have fewer.
MADE_CHANNELS = 8


@dataclass(frozen=True, kw_only=True)
class ChannelsLastSettings(Settings):
    """The layout of images."""

    enabled: bool = False
    """Whether convolutions are given their images with channels last."""


@register
class ChannelsLast(Technique[ChannelsLastSettings]):
    """Convolutions get images with channels last."""

    name = "channels_last"
    title = "channels"
    words = ("as they are", "last")
    settings = ChannelsLastSettings
    tried = Tried.ALWAYS
    runs_in_foreign_loops = True

    def elsewhere(self, settings: ChannelsLastSettings) -> str:
        return "images with channels last; model.to(memory_format=torch.channels_last)"

    def fidelity(self, settings: ChannelsLastSettings, precision: str) -> Fidelity:
        return Fidelity.EXACT

    def inspect(self, job: Job) -> Inspection:
        return _Convolutions()

    def why_not(self, context: SearchContext) -> str:
        """Only Tensor Cores: their kernels for half precision have no other layout."""
        capability = context.gpu.compute_capability if context.gpu is not None else None
        if capability is None or capability < (7, 0):
            return "the card has no Tensor Cores"
        if context.choices.precision in ("fp32", "tf32"):
            return "in full precision convolutions keep the layout they have"
        return ""

    def apply(self, settings: ChannelsLastSettings, context: ApplyContext) -> Undo:
        with contextlib.ExitStack() as undos:
            for convolution in filter(takes_images, context.model.modules()):
                undos.callback(channels_last(convolution))
            return undos.pop_all().close


class _Convolutions(Inspection):
    """Whether convolutions go over what the model made, not only over a batch, to cut it up."""

    def __init__(self) -> None:
        self._feed_one_another = False

    @property
    def why_not(self) -> str:
        return "" if self._feed_one_another else "no convolutions over images feed one another"

    def built(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        channels = [one.in_channels for one in model.modules() if takes_images(one)]
        self._feed_one_another = sum(number >= MADE_CHANNELS for number in channels) >= 2


def channels_last(convolution: nn.Module) -> Undo:
    """Give one convolution its images with channels last."""
    return replace_forward(convolution, MethodType(_convolve, convolution))


def takes_images(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.ConvTranspose2d]:
    """Whether a module is a convolution over images that computes as PyTorch's own."""
    own = [kind.forward for kind in _CONVOLUTIONS]
    # A forward of the instance's own is somebody's technique: what it wants is not known.
    return type(module).forward in own and "forward" not in vars(module)


def _convolve(convolution: nn.Module, images: Tensor, *args: Any, **kwargs: Any) -> Any:
    if images.dim() == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return type(convolution).forward(convolution, images, *args, **kwargs)
