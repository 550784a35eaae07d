"""Launch a micro-batch's kernels all at once: forward and backward captured as one CUDA graph.

The kernels of a small micro-batch take less time than launching them does. Here one micro-batch is
captured and then replayed for all that look like it, so that a small one costs only its kernels.

The first step runs uncaptured: it compiles, makes the optimizer's state and shows which parameters
get a gradient. Then one micro-batch is captured; that runs nothing, but takes its memory for good.
A replay uses the same addresses: the batch is copied in, and gradients accumulate in persistent
tensors. A micro-batch that cannot be captured (say, because it reads a number on the host) keeps
running uncaptured.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from oomph.errors import BadInput, CannotRehearse
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.techniques import Settings, Target, register
from oomph.techniques.host_reads import HostReads
from oomph.techniques.micro_batch import Weigher
from oomph.techniques.technique import ApplyContext, SearchContext, Technique, Tried, Undo
from oomph.torch_compat.pytree import tree_flatten, tree_unflatten

log = logging.getLogger("oomph")

#: Replays a capture.
Replay = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class CUDAGraphSettings(Settings):
    """How kernels are launched."""

    enabled: bool = False
    """Whether the kernels of a micro-batch are launched all at once."""


@register
class CUDAGraph(Technique[CUDAGraphSettings]):
    """A micro-batch is captured, and replayed for all that look like it."""

    name = "cuda_graph"
    title = "CUDA graph"
    words = ("no", "over a micro-batch")
    settings = CUDAGraphSettings
    changes = Target.LAUNCHES
    tried = Tried.AS_ONE_LAUNCH
    can_be_switched = True
    rests_on_all = True
    launches_at_once = True

    def fidelity(self, settings: CUDAGraphSettings, precision: str) -> Fidelity:
        return Fidelity.EXACT

    def check(self, settings: CUDAGraphSettings, choices: Choices) -> None:
        if choices.optimizer_on == "host":
            raise BadInput(
                "an optimizer on the host is stepped in its own time, and not beside a CUDA graph"
            )
        if choices.offloaded_to == "disk":
            raise BadInput("a captured micro-batch cannot wait for the disk: offload to the host")
        if choices.optimizer_in_backward:
            raise BadInput("a captured micro-batch cannot step the optimizer in its backward")

    def why_not(self, context: SearchContext) -> str:
        if context.gpu is None:
            return "the CPU launches nothing"
        if context.choices.precision == "fp16-mixed":
            return "a loss scaler's numbers have no lasting place"
        return "copies beside the GPU wait for the host" if context.choices.leaves else ""

    def apply(self, settings: CUDAGraphSettings, context: ApplyContext) -> Undo:
        stage = context.stage
        assert stage is not None
        if context.device_type == "cpu" or stage.scaler is not None:
            return lambda: None
        graph = GraphedParts(context.optimizer, context.capture or capture_on_the_card)
        stage.graph = graph

        def undo() -> None:
            stage.graph = None
            graph.undo()

        return undo


@dataclass(frozen=True, kw_only=True)
class PartOfStep:
    """One part of a batch, and the work to do on it or on another part that looks like it."""

    batch: Any
    share: float
    """Its share of the whole batch's samples."""
    weigher: Weigher | None
    work: Callable[[Any], Tensor]
    """Runs forward and backward; returns the loss."""
    look: Callable[[Any], None]
    """Runs a forward without side effects."""
    weights: Sequence[Tensor]
    """All changing tensors, besides the batch, that a forward may read."""


class Capture(Protocol):
    """Captures the kernels a function would launch; a rehearsal's version records its memory."""

    def __call__(
        self, work: Callable[[], Tensor], look: Callable[[], None], varying: Sequence[Tensor]
    ) -> tuple[Tensor, Replay]:
        """Returns the result of `work`, which each replay fills, and the replay.

        `look` runs the forward alone; the values of `varying` may differ between replays.
        """


def capture_on_the_card(
    work: Callable[[], Tensor], look: Callable[[], None], varying: Sequence[Tensor]
) -> tuple[Tensor, Replay]:
    """Capture what `work` launches on the current device, including from backward's threads."""
    reads = HostReads.of(look, varying)
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    numbers = generator.clone_state()
    failures: list[Exception] = []
    # Libraries that notice a capture take other code paths (transformers materialises its attention
    # mask), which were never compiled. Operations illegal in a capture fail in any case.
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
        # The generator still thinks a capture is on, and would refuse to draw.
        generator.graphsafe_set_state(numbers)
        # Ending a broken capture raises an error of its own: prefer the original one.
        raise failures[0] if failures else error from None
    return loss, graph.replay


class CaptureRefused(Exception):
    """Nothing can be captured; the `Capture` that raised this has already reported why."""


class GraphedParts:
    """Runs parts of a batch, replaying a captured one for those that look like it."""

    def __init__(self, optimizer: torch.optim.Optimizer, capture: Capture) -> None:
        self._optimizer = optimizer
        self._capture = capture
        self._usable = True
        #: The tensors that get a gradient in each step; known after the first one.
        self._trained: list[Tensor] | None = None
        self._gradients: list[Tensor] = []
        self._captured: _Captured | None = None

    def begin(self) -> None:
        """Begin a step: zero the gradients, in the tensors that replays add to."""
        if self._trained is None or not self._usable:
            return
        if not self._gradients:
            self._gradients = [torch.zeros_like(owned) for owned in self._trained]
        for owned, gradient in zip(self._trained, self._gradients, strict=True):
            owned.grad = gradient.zero_()

    def run(self, part: PartOfStep) -> Tensor:
        """Accumulate a part's gradients, by a replay if possible; returns its loss."""
        if not self._usable or self._trained is None:
            return part.work(part.batch)
        if part.weigher is not None and part.weigher.asks_the_job:
            # In every replay the job would be asked about the first batch.
            return part.work(part.batch)
        if self._captured is None:
            self._try_to_capture(part)
        if self._captured is None or not self._captured.fits(part):
            return part.work(part.batch)
        return self._captured.replay(part)

    def finish(self) -> None:
        """End a step: after the first one, note which tensors got a gradient."""
        if self._trained is None:
            owned = (p for group in self._optimizer.param_groups for p in group["params"])
            self._trained = [tensor for tensor in owned if tensor.grad is not None]

    def forget(self) -> None:
        """Something failed or changed: treat the next step like the first again.

        Tensors may have moved and code may need to be recompiled.
        """
        self._captured, self._gradients, self._trained = None, [], None

    def undo(self) -> None:
        """Free the memory of the graph and the gradients."""
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
            # An aborted capture may have written to them.
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
        #: By a mean's index: the number of targets in the batch, and in the part.
        self._totals: dict[Hashable, Tensor] = {}
        self._seen: dict[Hashable, Tensor] = {}
        with contextlib.ExitStack() as apart:
            if part.weigher is not None:
                totals = part.weigher.totals()
                self._totals = {number: total.clone() for number, total in totals.items()}
                self._seen = apart.enter_context(part.weigher.apart(self._totals))
            self._loss, self._replay = capture(
                lambda: part.work(inside), lambda: part.look(inside), [*part.weights, *places]
            )

    def fits(self, part: PartOfStep) -> bool:
        """Whether this part is like the captured one in all but its tensors' values."""
        leaves, spec = tree_flatten(part.batch)
        return (
            part.share == self._share
            and spec == self._spec
            and all(map(_alike, leaves, self._leaves))
        )

    def replay(self, part: PartOfStep) -> Tensor:
        """Copy the part's tensors in and replay the graph."""
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
    """Raise if Python's random numbers are drawn inside: every replay would reuse the same ones."""
    before = random.getstate()
    yield
    if random.getstate() != before:
        raise RuntimeError("the model draws random numbers in Python")
