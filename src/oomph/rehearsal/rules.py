"""The interface for how a device's kernels differ from fake ones, and a plain device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol


class Burst:
    """Scratch blocks that a kernel holds at the same time and frees before it returns."""

    __slots__ = ("after", "doubtful", "sizes")

    def __init__(self, *sizes: int, doubtful: bool = False, after: int | None = None) -> None:
        self.sizes = sizes
        #: How many of the op's outputs are allocated before this burst; None: all of them.
        self.after = after
        #: Whether a library chooses the size by itself, so that the true size may differ.
        self.doubtful = doubtful


class Rules(Protocol):
    """The differences between a device's kernels and the fake ones."""

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The outputs of an op whose shape or dtype differs on this device, or NotImplemented."""

    def scratch(self, func: Any, args: Sequence[Any], out: Any) -> Sequence[Burst]:
        """The scratch memory that the real kernel takes and frees inside the op, by burst."""

    def fixed_part(
        self, func: Any, args: Sequence[Any], in_backward: bool
    ) -> Sequence[tuple[str, int]]:
        """(key, size) of workspaces that stay allocated after the first op that needs them."""

    def output_order(self, func: Any) -> Sequence[int] | None:
        """The order in which the kernel allocates its outputs; None for their own order."""

    def host_outputs(self, func: Any) -> Collection[int]:
        """The indices of outputs that are on the host although the op's inputs are not."""


class PlainKernels:
    """Rules of a device whose kernels allocate nothing but their outputs."""

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """No op differs."""
        return NotImplemented

    def scratch(self, func: Any, args: Sequence[Any], out: Any) -> Sequence[Burst]:
        """No op needs scratch."""
        return ()

    def fixed_part(
        self, func: Any, args: Sequence[Any], in_backward: bool
    ) -> Sequence[tuple[str, int]]:
        """No op needs a workspace."""
        return ()

    def output_order(self, func: Any) -> Sequence[int] | None:
        """Outputs are allocated in the order they are returned."""
        return None

    def host_outputs(self, func: Any) -> Collection[int]:
        """No output is on the host."""
        return ()
