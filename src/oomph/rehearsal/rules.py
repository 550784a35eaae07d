"""What a device's kernels do that fake ones do not, and a device without surprises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol


class Burst:
    """Scratch blocks that a kernel holds at the same time, and frees before it returns."""

    __slots__ = ("after", "doubtful", "sizes")

    def __init__(self, *sizes: int, doubtful: bool = False, after: int | None = None) -> None:
        self.sizes = sizes
        #: How many of the op's outputs are allocated before this; None: all of them.
        self.after = after
        #: A library chooses the size by itself; the true one may differ.
        self.doubtful = doubtful


class Rules(Protocol):
    """What a device's kernels do that the fake ones do not."""

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The outputs of an op whose shape or dtype differs on this device, or NotImplemented."""

    def scratch(self, func: Any, args: Sequence[Any], out: Any) -> Sequence[Burst]:
        """What the real kernel allocates and frees inside the op, one burst after the other."""

    def lasting(
        self, func: Any, args: Sequence[Any], in_backward: bool
    ) -> Sequence[tuple[str, int]]:
        """(key, size) of workspaces that stay after the first op that needs them."""

    def output_order(self, func: Any) -> Sequence[int] | None:
        """The order in which the kernel allocates its outputs, None if it is theirs."""

    def host_outputs(self, func: Any) -> Collection[int]:
        """Which of the op's outputs are on the host although its inputs are not."""


class PlainKernels:
    """Rules of a device whose kernels take nothing but their outputs."""

    def replace(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """No op is different."""
        return NotImplemented

    def scratch(self, func: Any, args: Sequence[Any], out: Any) -> Sequence[Burst]:
        """No scratch."""
        return ()

    def lasting(
        self, func: Any, args: Sequence[Any], in_backward: bool
    ) -> Sequence[tuple[str, int]]:
        """No workspaces."""
        return ()

    def output_order(self, func: Any) -> Sequence[int] | None:
        """Theirs."""
        return None

    def host_outputs(self, func: Any) -> Collection[int]:
        """None."""
        return ()
