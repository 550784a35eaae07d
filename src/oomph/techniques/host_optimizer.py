"""Keep the optimizer's state, and fp32 masters, in host memory, and step from there (exact).

Two ways, of which each takes a share of the parameters:

- *streamed*: state comes to the GPU bucket by bucket, is stepped there by the optimizer's own
  kernels and leaves again. Weights have the bits that the plain optimizer gives them.
- *on the host* (`host_share`): gradients leave, the host's cores step their own copy of the weights
  and the new weights come back. Equal to the plain optimizer but for the last bits.

What has no room in host memory, state and masters alike, waits on the disk (`disk_share`), and is
streamed. What has room on the GPU stays there (`gpu_share`), and nothing waits for it.

When a parameter is stepped depends on the job. Without clipping and without a GradScaler a bucket
is stepped inside backward, as soon as its gradients are complete. With either, all gradients must
be known first: then `step` only begins the step, and each part of the model waits for its own
parameters when the next forward reaches it. Gradients for which there is no room leave meanwhile,
for the host or for the disk (`gradients_to_disk`).

How it is called, in each step:

    for part in parts:
        loss = …
        with host.backward(last=part is parts[-1]):
            loss.backward()
    host.step()

Weights that are on the host or on the disk themselves (`StreamedWeights`) come and go as masters
do: nothing of them is written on the GPU. With masters it is the GPU that rounds them. A block is
fetched for the next forward when its weights have been stepped and have arrived; where they are
stepped only then, they are put in place on the GPU, and not fetched. Those on the disk are never
stepped by the host's cores.

`step` clips, unscales, updates the scaler and forgets the gradients. Before anybody else looks at
weights or state, `settle` completes what is under way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput
from oomph.host.limits import check_host_memory
from oomph.host.link import Copy, Link
from oomph.host.slots import OpenSlots
from oomph.job import repeated_blocks
from oomph.techniques.disk_gradients import DiskGradients, open_disk_gradients
from oomph.techniques.disk_state import DiskState, choose_for_disk, open_disk_state
from oomph.techniques.first_use import FirstUse
from oomph.techniques.gradient_norm import clip_coefficient, gradient_norm
from oomph.techniques.host_masters import HostMasters
from oomph.techniques.host_state import HostState
from oomph.techniques.host_step import HostStep
from oomph.techniques.host_tensors import host_tensor
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.low_bit_state import has_low_bit_state
from oomph.techniques.master_weights import AwayWeights, KeptMasters
from oomph.techniques.optimizer_in_backward import (
    Masters,
    check_per_parameter,
    foreign_step_hooks,
    weakly,
)
from oomph.techniques.optimizer_twin import (
    Group,
    OptimizerTwin,
    State,
    frozen_groups,
    is_elementwise,
)
from oomph.techniques.partial_steps import tell_followers
from oomph.techniques.step_buckets import Bucket, Trained
from oomph.techniques.step_order import StepOrder, arrange
from oomph.techniques.step_parts import StepParts
from oomph.techniques.streamed_step import StreamedStep
from oomph.techniques.streamed_weights import StreamedWeights

#: The part of all elements that a parameter has at most for its state to stay: biases and norms are
#: most of a model's parameters, and copies of so little cost the host more than they free.
LITTLE = 1e-4
#: Buckets that backward completes for each that comes early: weights use the same way.
EARLY_PACE = 3


class RoundedMasters(Masters, Protocol):
    """Masters that somebody else may round into the model; see `MasterWeights`."""

    away: AwayWeights | None
    """Where the model's weights are that are not on the GPU."""
    kept: KeptMasters | None
    """Where the masters are, which the optimizer does not show at all times."""

    def note_rounded(self, owned: Tensor) -> None:
        """A master was stepped and rounded into its parameter."""


@dataclass(frozen=True, kw_only=True)
class HostPlacement:
    """What of the optimizer is where."""

    host_share: float = 0.0
    """The part of all elements that the host's cores step: those that forward needs last."""
    disk_share: float = 0.0
    """The part of all elements whose state, and masters, wait on the disk; the GPU steps them."""
    gpu_share: float = 0.0
    """The part of all elements whose state, and masters, stay on the GPU: the optimizer's first,
    beside those of the smallest parameters."""
    keep_gradients: int | None = None
    """Bytes of gradients that may wait on the GPU, those that forward needs first; None is all."""
    gradients_to_disk: bool = False
    """Whether the others wait on the disk, but for those that the host's cores step."""
    bucket: int = 64 << 20
    """Bytes of weights, or of their masters, that are stepped together."""
    ahead: int = 2
    """Buckets that may be on their way to the GPU at a time, and as many on their way back."""
    early: int = 0
    """Buckets that come as backward ends, before the norm of all gradients is known, if these are
    more; as many may be on their way back in the forward that follows."""


class HostOptimizer:
    """Steps `optimizer` with its state on the host; see the top of this file.

    `blocks` are the modules before which all their parameters must be ready, and inside which no
    hook is wanted; the model's repeated blocks if none are given. `weights` are those that are on
    the host. `clip_norm` and `scaler` are what the job uses. `home` says where the state and the
    master of a parameter go in the end, if that is not where the parameter is or was. `disk` opens
    slots on the disk, where some of it goes there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        link: Link,
        placement: HostPlacement = HostPlacement(),
        *,
        blocks: Collection[nn.Module] | None = None,
        masters: RoundedMasters | None = None,
        weights: StreamedWeights | None = None,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        home: Callable[[Tensor], torch.device] | None = None,
        disk: OpenSlots | None = None,
    ) -> None:
        _check(optimizer, masters, placement)
        self._weights = weights
        self._home = home
        self._optimizer = optimizer
        self._link = link
        self._placement = placement
        self._early = max(placement.early, placement.ahead)
        self._masters = masters
        self._clip_norm = clip_norm
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        #: Whether steps are only begun: all gradients must be known before the first is used.
        self.defers = clip_norm is not None or self._scaler is not None
        #: Whether the host's cores still make a step when the next one has begun.
        self.steps_on_host = placement.host_share > 0
        #: Whether a step broke off after some parameters had been stepped: weights and state are
        #: then partly those of the next step, and no further step is made.
        self.dirty = False
        self._trained = _find_trained(optimizer, masters, weights)
        self._by_leaf = {trained.leaf: trained for trained in self._trained}
        #: Whose state and masters are on the GPU as ever.
        self._staying = _staying(self._trained, placement.gpu_share)
        leaving = [trained for trained in self._trained if trained not in self._staying]
        self._disk = _open_disk(disk, optimizer, leaving, placement)
        self._state = HostState(link, optimizer, self._disk, self._staying)
        self._host_masters = HostMasters(link, self._disk, self._staying)
        self._shows_disk = True
        self._gradients = LeavingGradients(link, placement.bucket * placement.ahead)
        parts = StepParts(
            link=link,
            optimizer=optimizer,
            state=self._state,
            masters=self._host_masters.in_memory,
            weights=weights,
            rounded=self._note_rounded,
        )
        self._streamed = StreamedStep(parts, inside=not self.defers)
        self._host = HostStep(parts)
        self._first_use = FirstUse(
            model, repeated_blocks(model) if blocks is None else blocks, self._before_unit
        )
        self._order = StepOrder([], [], set(), (), set())
        #: Each device has its own backward thread.
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = []
        self._begin_batch()
        self._backward_is_last: bool | None = None
        #: Parameters that were not stepped yet when backward began: nobody waited for them.
        self._late: set[Trained] = set()
        #: A step that was begun: gradients on the GPU, and the next bucket to be stepped.
        self._pending: dict[Trained, Tensor] = {}
        self._pending_coefficient: Tensor | None = None
        self._next: int | None = None
        self._groups: list[Group] = []
        self._host_groups: list[Group] = []
        #: By place in the optimizer: the state that is being loaded.
        self._loading: dict[int, State] = {}
        self._sent_coefficient: tuple[Tensor, Copy] | None = None
        self._coefficient_room: Tensor | None = None
        try:
            self._gradients.disk = _open_disk_gradients(disk, self._trained, placement)
            self._leave_gpu()
            self._add_hooks()
        except BaseException:
            self.undo()
            raise

    # -- what a step calls ------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, *, last: bool = True) -> Iterator[None]:
        """The backward of one micro-batch runs inside; `last` says that no other follows.

        If it fails inside, the gradients of the batch are dropped and its error passes. Parameters
        that were stepped by then stay stepped: `dirty` says whether there are any.
        """
        if self._backward_is_last is not None:
            raise BadInput("one backward runs already: begin the next one when it is over")
        self._begin_backward(last)
        try:
            yield
            self._complete_late()
            if last:
                self._complete_rest()
        except BaseException:
            self.dirty = self.dirty or self._stepped_inside
            self.abandon()
            raise
        finally:
            self._backward_is_last = None
            self._late = set()

    def step(self) -> None:
        """Make the step of the gradients so far, or begin it; they are forgotten."""
        self._check_whole()
        if not self._complete:
            if not self._gradients.is_empty or any(t.owned.grad is not None for t in self._trained):
                raise BadInput("no backward was the last: say backward(last=True) for one of them")
            return
        if self._scaler is not None and self._skips():
            self.abandon()
            return
        # What schedulers look at.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        if self.defers:
            self._begin_step()
        else:
            self._begin_batch()
        tell_followers(self._optimizer)

    def settle(self) -> None:
        """Complete the step that was begun; weights and state may be read and written then."""
        self._check_whole()
        self._complete_step()
        self._streamed.settle()
        self._gradients.release()
        self._host_masters.show()

    @contextlib.contextmanager
    def state_left_on_disk(self) -> Iterator[None]:
        """While active, state dicts have stand-ins for what is on the disk; see `numbers`.

        That of the optimizer, and that of the model where weights are there.
        """
        self._shows_disk = False
        weights = self._weights
        try:
            with weights.left_on_disk() if weights is not None else contextlib.nullcontext():
                yield
        finally:
            self._shows_disk = True

    def numbers(self, tensor: Tensor) -> Tensor:
        """What a tensor of a state dict, or a master, stands for: itself, if not on the disk."""
        found = self._weights.stands_for(tensor) if self._weights is not None else None
        if self._weights is not None and found is not None:
            return self._weights.numbers(found)
        return self._disk.numbers(tensor) if self._disk is not None else tensor

    def lies_as(self, tensor: Tensor) -> Tensor:
        """A tensor that lies in memory as what a tensor of the model's state dict stands for."""
        found = self._weights.stands_for(tensor) if self._weights is not None else None
        if self._weights is not None and found is not None:
            return self._weights.host_weight(found)
        return tensor

    def _show_all(self) -> None:
        self.settle()
        if self._disk is not None and self._shows_disk:
            check_host_memory(self._hidden_bytes, "showing what the optimizer has on the disk")
            self._state.show()
            self._host_masters.show_numbers()

    @property
    def _hidden_bytes(self) -> int:
        """Host memory that it takes to show what the optimizer has on the disk."""
        return self._state.hidden_bytes + self._host_masters.hidden_bytes

    def abandon(self) -> None:
        """Drop the gradients of a batch that is not to be stepped; a step under way goes on."""
        self._streamed.drop()  # whoever ran out of memory needs it; it can come again
        if self._weights is not None:
            self._weights.leave_gpu()
        self._gradients.forget(but=self._not_stepped_yet())
        for trained in self._trained:
            trained.owned.grad = trained.leaf.grad = None
        self._begin_batch()

    def check_undo(self) -> None:
        """Refuse, before anything is undone, to bring back what host memory has no room for."""
        needed = self._weights.back_bytes if self._weights is not None else 0
        if self._disk is not None and any(self._home_of(t).type == "cpu" for t in self._trained):
            needed += self._hidden_bytes
        if needed:
            check_host_memory(needed, "undoing what is on the disk (saving it does not)")

    def undo(self) -> None:
        """State and masters are where the plain optimizer has them; to be called before `weights`'.

        Weights that are on the host stay there.
        """
        if not self.dirty:
            self._complete_step()
        self._host.close()
        self._streamed.settle()
        self._gradients.close()
        for trained in self._trained:
            home = self._home_of(trained)
            self._state.move_in(trained, home)
            self._place_counter(trained, home)
            self._host_masters.move_in(trained, home)
        self._state.forget()
        self._state.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._first_use.remove()
        self._be_asked(False)
        self._trained, self._by_leaf, self._pending = [], {}, {}
        self._order = StepOrder([], [], set(), (), set())
        self._begin_batch()
        self._sent_coefficient = self._coefficient_room = self._next = None

    def make_state(self) -> None:
        """Have state as if after a first step, but without its numbers: for a rehearsal."""
        made = _made_states(self._optimizer)
        for trained in self._trained:
            self._state.make(trained, made(trained.group, trained.owned.dtype))
            self._place_counter(trained, trained.leaf.device)

    # -- setting up -------------------------------------------------------------------------------

    def _leave_gpu(self) -> None:
        made = _made_states(self._optimizer) if is_elementwise(self._optimizer) else None
        for trained in self._trained:
            self._state.move_out(trained)
            self._place_counter(trained, trained.leaf.device)
            if made is not None:
                self._state.reserve(trained, made(trained.group, trained.owned.dtype))
            self._host_masters.move_out(trained)

    def _home_of(self, trained: Trained) -> torch.device:
        """Where the plain optimizer has the state of a parameter."""
        if self._home is not None:
            return self._home(trained.leaf)
        if trained.away is not None:
            assert self._weights is not None
            return self._weights.origin(trained.leaf)
        return trained.leaf.device

    def _be_asked(self, asked: bool) -> None:
        """Have whoever reads weights or masters of the host ask first, or nobody any more."""
        if self._masters is not None:
            self._masters.away = self._weights if asked else None
            self._masters.kept = self._host_masters if asked else None
        if self._weights is not None:
            self._weights.ask_before_reading(self._may_read if asked else None)

    def _add_hooks(self) -> None:
        self._be_asked(True)
        for trained in self._trained:
            hook = trained.leaf.register_post_accumulate_grad_hook(weakly(self._arrived))
            self._handles.append(hook)
        optimizer = self._optimizer
        self._handles += [
            optimizer.register_state_dict_pre_hook(lambda _: self._show_all()),
            optimizer.register_load_state_dict_pre_hook(lambda _, state: self._before_load(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._after_load()),
        ]

    def _arrange(self) -> None:
        """Make the buckets, in the order that the first forward showed."""
        unit_of = self._first_use.freeze()
        on_gpu_or_disk = (self._staying, self._disk or ())
        placement = self._placement
        order = arrange(
            self._trained,
            unit_of,
            host_share=placement.host_share,
            bound={t for t in self._trained if t.cuts or any(t in some for some in on_gpu_or_disk)},
            keep_gradients=placement.keep_gradients,
            bucket=placement.bucket,
            may_cut=is_elementwise(self._optimizer),
        )
        if self._gradients.disk is not None:
            leaving = order.leaving - order.host_stepped
            self._gradients.disk.reserve(one for one in self._trained if one in leaving)
        for trained in self._trained:
            if trained in order.host_stepped:
                self._host.make_room(trained)
                self._place_counter(trained, torch.device("cpu"))
        self._order = order

    def _place_counter(self, trained: Trained, device: torch.device) -> None:
        """A step counter is where the kernel that steps the parameter wants it."""
        state = self._optimizer.state.get(trained.owned, {})
        group = self._optimizer.param_groups[trained.group]
        counter = state.get("step")
        if isinstance(counter, Tensor) and (group.get("fused") or group.get("capturable")):
            state["step"] = counter.to(device)

    # -- backward ---------------------------------------------------------------------------------

    def _begin_batch(self) -> None:
        """No gradient of the batch is there yet."""
        self._is_first = True
        #: Parameters whose gradients are complete, with their norms where they are clipped.
        self._complete: dict[Trained, Tensor | None] = {}
        #: Complete gradients that wait on the GPU.
        self._kept: dict[Trained, Tensor] = {}
        self._found_inf: Tensor | None = None
        self._inverse_scale: Tensor | None = None
        self._stepped_inside = False
        #: By bucket: the parameters whose gradients are not complete.
        self._missing: dict[Bucket, set[Trained]] = {}
        self._upcoming: list[Bucket] = []

    def _begin_backward(self, last: bool) -> None:
        self._check_whole()
        if not self._order.buckets:
            self._arrange()
        self._late = self._not_stepped_yet()
        if not self._late:
            self._complete_step()
        self._streamed.release()
        self._host_masters.hide()
        self._state.hide()
        self._gradients.begin_backward()
        self._check_groups()
        self._backward_is_last = last
        if last:
            if not self.defers:
                self._freeze_groups()
            self._missing = {b: set(b.parameters) for b in self._order.buckets}
            self._upcoming = list(self._order.streamed)
            following = self._upcoming if self.defers else reversed(self._upcoming)
            self._state.announce(piece for bucket in following for piece in bucket.pieces)
        self._wires_leaf_dtype = self._is_first and last and self._scaler is None
        self._is_first = False

    def _arrived(self, leaf: Tensor) -> None:
        trained = self._by_leaf.get(leaf)
        if trained is None or self._backward_is_last is None:
            return
        with self._lock, torch.no_grad():
            self._check_arrival(trained)
            gradient = trained.owned.grad
            if gradient is None:
                return  # as the plain optimizer: somebody took the gradient away
            leaves = trained in self._order.leaving
            if leaves:
                self._gradients.add_to(trained, gradient)
            if self._backward_is_last:
                self._take(trained, gradient)
            elif leaves:
                trained.owned.grad = None
                self._gradients.send(trained, gradient, gradient.dtype)

    def _complete_late(self) -> None:
        """Step what this forward did not use: not before backward has shown that it did not."""
        if self._late:
            self._complete_step()
            self._late = set()

    def _complete_rest(self) -> None:
        """Gradients that earlier micro-batches made and the last one did not reach."""
        with torch.no_grad():
            for trained in self._trained:
                if trained in self._complete:
                    continue
                gradient = trained.owned.grad
                if trained in self._gradients:
                    gradient = self._gradients.take_back(trained)
                if gradient is not None:
                    self._take(trained, gradient)
            if not self.defers:
                rest, self._missing = list(self._missing), {}
                for bucket in rest:
                    self._step_inside([bucket])

    def _take(self, trained: Trained, gradient: Tensor) -> None:
        """A gradient is complete."""
        trained.owned.grad = None
        if self._scaler is not None:
            self._unscale(gradient)
        self._complete[trained] = gradient_norm(gradient) if self._clip_norm is not None else None
        leaves = trained in self._order.leaving
        if leaves and (self.defers or trained in self._order.host_stepped):
            dtype = trained.leaf.dtype if self._wires_leaf_dtype else gradient.dtype
            self._gradients.send(trained, gradient, dtype)
        else:
            self._kept[trained] = gradient
        complete = self._arrived_in_buckets(trained)
        if not self.defers:
            self._step_inside(complete)
            self._prefetch_inside()
        else:
            # Backward is nearly over: there is room, as much as what it completes leaves behind.
            others = max(len(self._missing) - self._order.at_once, 0)
            self._prefetch(0, self._early - others // EARLY_PACE)

    def _arrived_in_buckets(self, trained: Trained) -> list[Bucket]:
        """Note it in its buckets; those of them that are complete now."""
        complete = []
        for bucket in self._order.buckets_of[trained]:
            if (missing := self._missing.get(bucket)) is not None:
                missing.discard(trained)
                if not missing:
                    complete.append(bucket)
                    del self._missing[bucket]
        return complete

    def _prefetch_inside(self) -> None:
        """Have those come in that backward will complete next: it goes the forward's way back."""
        while self._upcoming and self._upcoming[-1] not in self._missing:
            self._upcoming.pop()
        for bucket in self._upcoming[-self._placement.ahead :]:
            if bucket in self._missing:
                self._streamed.fetch(bucket)

    def _step_inside(self, buckets: list[Bucket]) -> None:
        """Step buckets inside backward."""
        for at, bucket in enumerate(buckets):
            if not any(t in self._complete for t in bucket.parameters):
                continue
            if bucket in self._order.streamed_set:
                for following in buckets[at : at + 1 + self._placement.ahead]:
                    self._streamed.fetch(following)
                self._stepped_inside = True
                self._streamed.step(bucket, self._kept, self._groups, None)
                self._used(bucket, self._kept)
                self._streamed.release(self._placement.ahead)
            else:
                self._stepped_inside = True
                self._host.begin(bucket, self._gradients, self._host_groups, None)
                self._used(bucket, self._kept)
                self._next = len(self._order.streamed)

    # -- the step that was begun ------------------------------------------------------------------

    @torch.no_grad()
    def _begin_step(self) -> None:
        self._freeze_groups()
        self._pending, self._pending_coefficient = self._kept, self._coefficient()
        self._next = 0
        self._begin_batch()
        with self._or_dirty():
            for bucket in self._order.on_host:
                self._host.begin(
                    bucket, self._gradients, self._host_groups, self._coefficient_on_host()
                )
                self._used(bucket, self._pending)
        self._gradients.release()
        self._advance(self._order.stop_of_unused)
        self._prefetch(self._next, self._placement.ahead)

    def _before_unit(self, unit: int) -> None:
        """A part of the model is about to be used: have its parameters ready."""
        if self._next is None or self._backward_is_last is not None:
            return  # nothing is under way, or this is a recomputation
        self._check_whole()
        # Weights that are away are asked for when they are fetched.
        parameters = [
            trained
            for leaf in self._first_use.parameters_of(unit)
            if (trained := self._by_leaf.get(leaf)) is not None and trained.away is None
        ]
        self._advance(max((self._order.stop.get(t, 0) for t in parameters), default=0))
        with self._or_dirty():
            # What is streamed is needed first: the way in is free for the host's share after it.
            if self._next + self._placement.ahead >= len(self._order.streamed):
                self._host.return_done()
            self._host.finish(
                bucket
                for trained in parameters
                if trained in self._order.host_stepped
                for bucket in self._order.buckets_of[trained]
            )

    def _may_read(self, leaves: Sequence[Tensor], now: bool) -> bool:
        """A block's weights are about to be read: have them stepped, if that can be done now."""
        trained = [self._by_leaf[leaf] for leaf in leaves if leaf in self._by_leaf]
        if self._backward_is_last is not None:
            # What this backward is done with is fetched for the next forward, once it is stepped.
            return not any(t in self._complete and self._is_to_step(t) for t in trained)
        if self._next is None:
            return True
        self._check_whole()
        on_host = [
            bucket
            for t in trained
            if t in self._order.host_stepped
            for bucket in self._order.buckets_of[t]
        ]
        stop = max((self._order.stop.get(t, 0) for t in trained), default=0)
        if not now and (stop > self._next or not self._host.are_done(on_host)):
            return False  # what the GPU steps is put in place when the block runs
        self._advance(stop)
        with self._or_dirty():
            self._host.finish(on_host)
        return True

    def _is_to_step(self, trained: Trained) -> bool:
        return self.defers or any(b in self._missing for b in self._order.buckets_of[trained])

    def _complete_step(self) -> None:
        if self._next is None:
            return
        self._advance(len(self._order.streamed))
        with self._or_dirty():
            self._host.finish(self._order.on_host)
        if self._sent_coefficient is not None:
            self._sent_coefficient[1].wait()
        self._pending, self._pending_coefficient = {}, None
        self._sent_coefficient, self._next = None, None

    def _advance(self, stop: int) -> None:
        """Step the buckets before number `stop`."""
        assert self._next is not None
        while self._next < stop:
            bucket = self._order.streamed[self._next]
            self._prefetch(self._next, self._placement.ahead)
            with self._or_dirty(), torch.autocast(self._device_type, enabled=False):
                self._streamed.step(bucket, self._pending, self._groups, self._pending_coefficient)
            self._used(bucket, self._pending)
            self._next += 1
            self._streamed.release(self._early)
            self._prefetch(self._next, self._placement.ahead)

    def _prefetch(self, start: int, count: int) -> None:
        """Have the next buckets come in; their gradients too, once a step has begun."""
        for bucket in self._order.streamed[start : start + max(count, 0)]:
            self._streamed.fetch(bucket)
            if self._next is not None:
                self._streamed.fetch_gradients(bucket, self._gradients)

    def _used(self, bucket: Bucket, kept: dict[Trained, Tensor]) -> None:
        for piece in bucket.pieces:
            if piece.is_last:
                kept.pop(piece.trained, None)
                self._gradients.used(piece.trained)

    def _not_stepped_yet(self) -> set[Trained]:
        if self._next is None:
            return set()
        waiting = [*self._order.streamed[self._next :], *self._host.under_way]
        return {trained for bucket in waiting for trained in bucket.parameters}

    # -- clipping and scaling ---------------------------------------------------------------------

    def _coefficient(self) -> Tensor | None:
        if self._clip_norm is None:
            return None
        # In the order in which the optimizer has them, as they would be clipped.
        norms = [
            (norm, trained.owned.dtype)
            for trained in self._trained
            if (norm := self._complete.get(trained)) is not None
        ]
        return clip_coefficient(norms, self._clip_norm)

    def _coefficient_on_host(self) -> tuple[Tensor, Copy] | None:
        coefficient = self._pending_coefficient
        if coefficient is not None and self._sent_coefficient is None:
            if self._coefficient_room is None:
                self._coefficient_room = host_tensor(self._link, coefficient)
            copy = self._link.to_host(coefficient, self._coefficient_room)
            self._sent_coefficient = self._coefficient_room, copy
        return self._sent_coefficient

    def _unscale(self, gradient: Tensor) -> None:
        """As the scaler does, one gradient at a time."""
        assert self._scaler is not None and self._scaler._scale is not None
        if self._found_inf is None:
            self._found_inf = torch.zeros((), dtype=torch.float32, device=gradient.device)
            self._inverse_scale = self._scaler._scale.double().reciprocal().float()
        assert self._inverse_scale is not None
        torch._amp_foreach_non_finite_check_and_unscale_(
            [gradient], self._found_inf, self._inverse_scale
        )

    def _skips(self) -> bool:
        """Whether a gradient overflowed; the scaler learns of it."""
        assert self._scaler is not None and self._found_inf is not None
        record = self._scaler._per_optimizer_states[id(self._optimizer)]
        record["found_inf_per_device"] = {self._found_inf.device: self._found_inf}
        overflowed = bool(self._found_inf.item())
        self._scaler.update()
        return overflowed

    # -- masters ----------------------------------------------------------------------------------

    def _note_rounded(self, owned: Tensor) -> None:
        if self._masters is not None:
            self._masters.note_rounded(owned)

    # -- state dicts ------------------------------------------------------------------------------

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """State is loaded by hand: PyTorch would bring all of it to the GPU first."""
        self.settle()
        saved = itertools.chain(*(group["params"] for group in state_dict["param_groups"]))
        places = {number: at for at, number in enumerate(saved)}
        self._loading = {places[number]: state for number, state in state_dict["state"].items()}
        return {**state_dict, "state": {}}

    def _after_load(self) -> None:
        loading, self._loading = self._loading, {}
        self._state.forget()
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        by_owned = {trained.owned: trained for trained in self._trained}
        for at, parameter in enumerate(owned):
            if at not in loading:
                continue
            trained = by_owned.get(parameter)
            self._optimizer.state[parameter] = {
                name: self._loaded(name, value, parameter, trained)
                for name, value in loading[at].items()
            }
            if trained is not None:
                on_host = trained in self._order.host_stepped
                stepped_on = torch.device("cpu") if on_host else trained.leaf.device
                self._place_counter(trained, stepped_on)
                self._state.adopt(trained)

    def _loaded(self, name: str, value: Any, parameter: Tensor, trained: Trained | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "step":
            return value.clone()
        if value.dim() and trained is not None and trained in (self._disk or ()):
            return value.to(parameter.dtype)  # from where it is to the disk
        if trained in self._staying:
            return value.to(device=trained.leaf.device, dtype=parameter.dtype, copy=True)
        if value.dim() and trained is not None:
            # It lies as its parameter does, which has another shape where it is a part of state.
            like = trained.like if trained.like.shape == value.shape else value
            here = host_tensor(self._link, like, parameter.dtype)
            here.copy_(value)
            return here
        device = trained.leaf.device if trained is not None else parameter.device
        return value.to(device=device, dtype=parameter.dtype, copy=True)

    # -- checks -----------------------------------------------------------------------------------

    @property
    def _device_type(self) -> str:
        return self._trained[0].leaf.device.type

    def _freeze_groups(self) -> None:
        """The hyper-parameters of this step, whatever a scheduler does before it is complete."""
        self._groups = frozen_groups(self._optimizer)
        if self._order.on_host:
            self._host_groups = frozen_groups(self._optimizer, on_host=True)

    @contextlib.contextmanager
    def _or_dirty(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.dirty = True
            raise

    def _check_whole(self) -> None:
        if self.dirty:
            raise BadInput(
                "an optimizer step broke off halfway: weights and state are partly those of the "
                "next step; load a checkpoint, or undo and go on with what there is"
            )

    def _check_arrival(self, trained: Trained) -> None:
        shape = list(trained.leaf.shape)
        if trained in self._late:
            raise BadInput(
                f"a parameter {shape} was used before its step was complete, as its module was not "
                "called: name the module that uses it among the blocks"
            )
        if trained in self._complete:
            raise BadInput(
                f"a parameter {shape} got a second gradient after it was complete: run one "
                "backward only inside backward(last=True), and use checkpoint(…, "
                "use_reentrant=False) for weights used more than once"
            )
        gradient = trained.owned.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise BadInput(
                f"the gradient of a parameter {shape} is sparse: use sparse=False, or leave the "
                "optimizer on the GPU"
            )

    def _check_groups(self) -> None:
        """Whatever the optimizer would step is known here."""
        at = {t.owned: t.group for t in self._trained}
        for number, group in enumerate(self._optimizer.param_groups):
            for owned in group["params"]:
                if at.get(owned, number) != number or (
                    owned not in at and (owned.requires_grad or owned.grad is not None)
                ):
                    raise BadInput(
                        f"the optimizer got a new parameter {list(owned.shape)}, or has it in "
                        "another group: undo the optimizer on the host before parameters are "
                        "added or unfrozen, and apply it again afterwards"
                    )


def _check(
    optimizer: torch.optim.Optimizer, masters: RoundedMasters | None, placement: HostPlacement
) -> None:
    check_per_parameter(optimizer, "the optimizer on the host")
    if foreign_step_hooks(optimizer, masters):
        raise BadInput(
            "the optimizer's step has hooks, which would not run with its state on the host: "
            "remove them, or leave the optimizer on the GPU"
        )
    if has_low_bit_state(optimizer):
        raise BadInput("state in 8 bits cannot go to the host: choose one or the other")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadInput("a differentiable optimizer cannot go to the host: leave it on the GPU")
    for share in (placement.host_share, placement.disk_share, placement.gpu_share):
        if not 0 <= share <= 1:
            raise BadInput(f"a share is between 0 and 1, not {share}")
    if placement.bucket <= 0 or placement.ahead < 1:
        raise BadInput("buckets have a size, and at least one comes ahead of the one in use")


def _find_trained(
    optimizer: torch.optim.Optimizer,
    masters: RoundedMasters | None,
    weights: StreamedWeights | None,
) -> list[Trained]:
    """The optimizer's parameters that get gradients, in its order."""
    away: dict[Tensor, Tensor] = {}
    if weights is not None:
        away.update((p, weights.host_weight(p)) for p in weights.parameters)
    found = [
        Trained(
            leaf=leaf,
            owned=owned,
            group=at,
            away=away.get(leaf),
            cuts=weights.cuts(leaf) if weights is not None else (),
        )
        for at, group in enumerate(optimizer.param_groups)
        for owned in group["params"]
        if (leaf := masters.leaf_of(owned) if masters is not None else owned).requires_grad
    ]
    if not found:
        raise BadInput("no parameter of the optimizer is trained: there is nothing to step")
    if len({trained.leaf.device for trained in found}) > 1:
        raise BadInput("the optimizer on the host needs all parameters on one device")
    return found


def _staying(trained: Sequence[Trained], share: float) -> set[Trained]:
    """The first ones, up to this share of all elements, and those that have hardly any.

    The first are mostly those that forward uses first: backward completes them last, when nothing
    is left to compute beside which their state could come. Where weights are away, all of a block
    comes and goes, or is the host's.
    """
    total = sum(one.leaf.numel() for one in trained)
    little = (one for one in trained if one.leaf.numel() <= LITTLE * total)
    staying = {one for one in little if one.away is None}
    left = share * total
    for one in trained:
        left -= one.leaf.numel()
        if left < 0:
            break
        staying.add(one)
    return staying


def _open_disk(
    open_slots: OpenSlots | None,
    optimizer: torch.optim.Optimizer,
    trained: Sequence[Trained],
    placement: HostPlacement,
) -> DiskState | None:
    """Room on the disk for what goes there of its share."""
    chosen = choose_for_disk(trained, placement.disk_share)
    if not chosen:
        return None
    if not is_elementwise(optimizer):
        raise BadInput(
            f"the state of {type(optimizer).__name__} is not in pieces as its parameters are, and "
            "cannot go to the disk: keep it in host memory"
        )
    assert open_slots is not None, "there is no disk to put state on"
    made = _made_states(optimizer)
    return open_disk_state(
        open_slots,
        chosen,
        lambda one: made(one.group, one.owned.dtype),
        bucket=placement.bucket,
        ahead=placement.ahead,
    )


def _open_disk_gradients(
    open_slots: OpenSlots | None, trained: Sequence[Trained], placement: HostPlacement
) -> DiskGradients | None:
    """Room on the disk for gradients that leave."""
    if not placement.gradients_to_disk or placement.keep_gradients is None:
        return None
    assert open_slots is not None, "there is no disk to put gradients on"
    return open_disk_gradients(open_slots, trained, bucket=placement.bucket, ahead=placement.ahead)


def _made_states(optimizer: torch.optim.Optimizer) -> Callable[[int, torch.dtype], State]:
    """What state the first step makes, by group and type: tried out on something tiny."""
    twin = OptimizerTwin(optimizer, on_host=True)
    groups = frozen_groups(optimizer, on_host=True)

    @functools.cache
    def made(group: int, dtype: torch.dtype) -> State:
        tensor = torch.zeros(2, dtype=dtype, device="cpu")
        tensor.grad = torch.zeros(2, dtype=dtype, device="cpu")
        (state,) = twin.step(groups[group], [tensor], [{}])
        return state

    return made
