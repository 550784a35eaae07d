"""Give convolutions their images with channels last, as the kernels of Tensor Cores want them.

In PyTorch's own layout an image lies channel by channel. In half precision cuDNN converts it before
nearly every convolution and the result after it, and batch norm is several times slower. A result
has the layout of its input, and what stands between convolutions keeps it: only the first one
copies. Weights, and so the optimizer and saved files, stay as they are.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from oomph.techniques.recompute import replace_forward
from oomph.techniques.technique import Undo

#: Modules that take images, or one image without a batch, which is left alone.
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


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
