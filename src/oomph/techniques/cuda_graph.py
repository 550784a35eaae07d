"""Launch a micro-batch's kernels all at once: forward and backward captured as one CUDA graph.

A small micro-batch has kernels that take less time than launching them does. Here one micro-batch
is captured and then replayed for all that look like it: small ones cost what their kernels cost.

The first step runs as ever: it compiles, makes the optimizer's state and shows which parameters get
a gradient. Then one micro-batch is captured, which runs nothing but takes its memory for good. In a
replay everything has the place it had: the batch is copied in, and gradients add up in tensors that
last. What cannot be captured (it reads a number on the way, say) goes on running as ever.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from oomph.errors import CannotRehearse
from oomph.techniques.host_reads import HostReads
from oomph.techniques.micro_batch import Weigher

log = logging.getLogger("oomph")

#: Runs what was captured again.
Replay = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class PartOfStep:
    """One part of a batch, and what is done with it or with another that looks like it."""

    batch: Any
    share: float
    """Of the whole batch's samples."""
    weigher: Weigher | None
    work: Callable[[Any], Tensor]
    """Forward and backward; gives the loss."""
    look: Callable[[Any], None]
    """A forward that leaves everything as it is."""
    weights: Sequence[Tensor]
    """Everything but the batch that a forward may read and that changes."""


class Capture(Protocol):
    """Captures what a function would launch; a rehearsal has one that writes down its memory."""

    def __call__(
        self, work: Callable[[], Tensor], look: Callable[[], None], varying: Sequence[Tensor]
    ) -> tuple[Tensor, Replay]:
        """What `work` returns, which holds numbers after each replay, and the replay.

        `look` runs the forward alone; the numbers of `varying` may be others in each replay.
        """


def capture_on_the_card(
    work: Callable[[], Tensor], look: Callable[[], None], varying: Sequence[Tensor]
) -> tuple[Tensor, Replay]:
    """Capture what `work` launches on the current device, backward's threads included."""
    reads = HostReads.of(look, varying)
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    numbers = generator.clone_state()
    failures: list[Exception] = []
    # Libraries that notice a capture take other ways (transformers materialises its attention
    # mask), for which nothing is compiled; what they must not do in one fails by itself.
    unnoticed = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), unnoticed:
            try:
                with reads.told():
                    loss = work()
            except Exception as error:
                failures.append(error)
                raise
    except Exception as error:
        # The generator still believes in the capture, and would refuse to draw.
        generator.graphsafe_set_state(numbers)
        # What ends a broken capture complains of that alone.
        raise failures[0] if failures else error from None
    return loss, graph.replay


class CaptureRefused(Exception):
    """Nothing can be captured, and whoever was asked to has noted why."""


class GraphedParts:
    """Runs parts of a batch by replaying one that was captured, where they look like it."""

    def __init__(self, optimizer: torch.optim.Optimizer, capture: Capture) -> None:
        self._optimizer = optimizer
        self._capture = capture
        self._usable = True
        #: The tensors that get a gradient in each step; known after the first one.
        self._trained: list[Tensor] | None = None
        self._gradients: list[Tensor] = []
        self._captured: _Captured | None = None

    def begin(self) -> None:
        """A step begins: gradients are zero, in the tensors that replays add to."""
        if self._trained is None or not self._usable:
            return
        if not self._gradients:
            self._gradients = [torch.zeros_like(owned) for owned in self._trained]
        for owned, gradient in zip(self._trained, self._gradients, strict=True):
            owned.grad = gradient.zero_()

    def run(self, part: PartOfStep) -> Tensor:
        """The loss of a part, whose gradients are added; replayed where it can be."""
        if not self._usable or self._trained is None:
            return part.work(part.batch)
        if part.weigher is not None and part.weigher.asks_the_job:
            # What the job looks at would be the first batch in every replay.
            return part.work(part.batch)
        if self._captured is None:
            self._try_to_capture(part)
        if self._captured is None or not self._captured.fits(part):
            return part.work(part.batch)
        return self._captured.replay(part)

    def finish(self) -> None:
        """All parts were run: the gradients are those of the step."""
        if self._trained is None:
            owned = (p for group in self._optimizer.param_groups for p in group["params"])
            self._trained = [tensor for tensor in owned if tensor.grad is not None]

    def forget(self) -> None:
        """Something failed or is other than it was: the next step is like the first again.

        Nobody knows which tensors are still where they were, and what has to be compiled anew.
        """
        self._captured, self._gradients, self._trained = None, [], None

    def undo(self) -> None:
        """Give back the memory of the graph and the gradients."""
        self._captured, self._gradients, self._usable = None, [], False

    def _try_to_capture(self, part: PartOfStep) -> None:
        try:
            with _drawing_nothing():
                self._captured = _Captured(self._capture, part)
        except (torch.OutOfMemoryError, CannotRehearse):
            raise
        except Exception as error:
            self._usable = False
            if not isinstance(error, CaptureRefused):
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
                log.warning("micro-batches are not captured as a CUDA graph: %s", reason)
        if not self._usable:
            # A capture that broke off may have left something in them.
            for gradient in self._gradients:
                gradient.zero_()


class _Captured:
    """One part's forward and backward, with the tensors it reads and writes."""

    def __init__(self, capture: Capture, part: PartOfStep) -> None:
        leaves, self._spec = tree_flatten(part.batch)
        self._share = part.share
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inside = tree_unflatten(self._leaves, self._spec)
        places = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        #: By a mean's number: the targets in the batch, and those of the part.
        self._totals: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor] = {}
        with contextlib.ExitStack() as apart:
            if part.weigher is not None:
                totals = part.weigher.totals()
                self._totals = {number: total.clone() for number, total in totals.items()}
                self._seen = apart.enter_context(part.weigher.apart(self._totals))
            self._loss, self._replay = capture(
                lambda: part.work(inside), lambda: part.look(inside), [*part.weights, *places]
            )

    def fits(self, part: PartOfStep) -> bool:
        """Whether this part is like the one that was captured, but for its numbers."""
        leaves, spec = tree_flatten(part.batch)
        return (
            part.share == self._share
            and spec == self._spec
            and all(map(_alike, leaves, self._leaves))
        )

    def replay(self, part: PartOfStep) -> Tensor:
        """Copy the part in, and run."""
        for leaf, place in zip(tree_flatten(part.batch)[0], self._leaves, strict=True):
            if isinstance(place, Tensor):
                place.copy_(leaf, non_blocking=True)
        if part.weigher is not None:
            for number, total in part.weigher.totals().items():
                self._totals[number].copy_(total)
        self._replay()
        if part.weigher is not None:
            part.weigher.see(self._seen)
        return self._loss.clone()


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return type(one) is type(other) and bool(one == other)


@contextlib.contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Complain if Python's random numbers are drawn inside: each replay would have the same."""
    before = random.getstate()
    yield
    if random.getstate() != before:
        raise RuntimeError("the model draws random numbers in Python")
