"""The line of the user's program that called into this package."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

#: Folders whose code is not the user's.
_OTHERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def users_line() -> str:
    """The innermost line that is neither PyTorch's nor ours, as `train.py:12`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
