"""Keep the optimizer's state, and fp32 masters, in host memory, and step from there (exact).

There are two variants, each for a share of the parameters:

- *streamed*: state is copied to the GPU bucket by bucket, stepped there by the optimizer's own
  kernels and copied back. The weights are bitwise those of the plain optimizer.
- *on the host* (`host_share`): gradients are offloaded, the host's cores step their own copy of the
  weights and the new weights are copied back. Equal to the plain optimizer up to the last bits.

State and masters that do not fit in host memory are kept on the disk (`disk_share`) and streamed.
State and masters that fit on the GPU stay there (`gpu_share`) and need no transfers.

When a parameter is stepped depends on the job. Without clipping and without a GradScaler, a bucket
is stepped inside backward, as soon as its gradients are complete. With either, all gradients must
be known first: then `step` only begins the step, and each part of the model waits for its own
parameters when the next forward reaches it. In the meantime, gradients that do not fit on the GPU
are offloaded to the host or to the disk (`gradients_to_disk`). A backward that runs a recomputed
block again for the first time steps at its end, too: if the block does something else, the step can
be rolled back.

How to call it, in each step:

    for part in parts:
        loss = …
        with host.backward(last=part is parts[-1]):
            loss.backward()
    host.step()

Offloaded weights (`StreamedWeights`) are streamed like masters: a step does not write to their
copies on the GPU. With masters, the GPU rounds them to weights. A block is fetched for the next
forward once its weights have been stepped and have arrived on the host. Weights that are stepped
only when that forward needs them are put in place on the GPU instead. Weights on the disk are never
stepped by the host's cores.

`step` clips, unscales, updates the scaler and drops the gradients. If it only begins the step, each
use of a weight or of the state completes as much of it as that use needs (`BegunStep`); `settle`
completes all of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from oomph.errors import BadInput, StepBroken
from oomph.jobs.blocks import repeated_blocks
from oomph.memory.limits import check_host_memory, host_limits
from oomph.memory.link import Link
from oomph.memory.numbered_store import OpenStore
from oomph.process.interrupts import interrupts
from oomph.techniques.begun_step import BegunStep, WatchedState
from oomph.techniques.first_use import FirstUse
from oomph.techniques.forward_call import Repeated, is_awaited, untried_blocks
from oomph.techniques.gradient_norm import clip_coefficient, gradient_norm
from oomph.techniques.gradient_scaling import CoefficientOnHost, GradientScaling
from oomph.techniques.host_masters import HostMasters
from oomph.techniques.host_placement import (
    HostPlacement,
    check_model,
    check_placement,
    choose_staying,
    find_trained,
    made_states,
    place_gradients_on_disk,
    place_state_on_disk,
)
from oomph.techniques.host_state import HostState
from oomph.techniques.host_step import HostStep
from oomph.techniques.later_reads import LaterReads
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.loaded_state import LoadedState
from oomph.techniques.master_weights import AwayWeights, KeptMasters
from oomph.techniques.optimizer_in_backward import weakly
from oomph.techniques.optimizer_steps import Masters, check_per_parameter
from oomph.techniques.optimizer_twin import (
    Group,
    frozen_groups,
    is_elementwise,
)
from oomph.techniques.partial_steps import tell_followers
from oomph.techniques.step_buckets import Bucket, Trained
from oomph.techniques.step_order import StepOrder, arrange
from oomph.techniques.step_parts import StepParts
from oomph.techniques.streamed_step import StreamedStep
from oomph.techniques.streamed_weights import (
    StreamedWeights,
    is_compiled,
)
from oomph.techniques.watched_tensors import aliases, own_work
from oomph.techniques.weight_owners import note_stepped_on_host
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.optimizers import mark_stepped

#: The share of free host memory that gradients may take which wait for the end of a backward.
MOST_OF_HOST = 0.5
#: Buckets that backward completes for each one fetched early, as weights use the same link.
EARLY_PACE = 3


class RoundedMasters(Masters, Protocol):
    """Masters that this optimizer steps and rounds itself; see `MasterWeights`."""

    away: AwayWeights | None
    """Access to the model's offloaded weights."""
    kept: KeptMasters | None
    """Access to the masters, which the optimizer does not show at all times."""

    def note_rounded(self, owned: Tensor) -> None:
        """Note that a master was stepped and rounded into its parameter."""


class HostOptimizer:
    """Steps `optimizer` with its state on the host; see the top of this file.

    `blocks` are the modules whose parameters must all be ready before they run, and inside which
    there are no hooks; default: the model's repeated blocks. `weights` are the offloaded weights.
    `clip_norm` and `scaler` are the job's. `home` returns the device to which a parameter's state
    and master go on undo, if that is not the parameter's own or original device. `disk` opens slots
    on the disk, if the placement uses it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        link: Link,
        placement: HostPlacement | None = None,
        *,
        blocks: Collection[nn.Module] | None = None,
        masters: RoundedMasters | None = None,
        weights: StreamedWeights | None = None,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        home: Callable[[Tensor], torch.device] | None = None,
        disk: OpenStore | None = None,
    ) -> None:
        placement = placement or HostPlacement()
        check_placement(optimizer, masters, placement)
        check_model(model)
        self._weights = weights
        self._home = home
        self._optimizer = optimizer
        self._link = link
        self._placement = placement
        self._early = max(placement.early, placement.ahead)
        self._masters = masters
        self._clip_norm = clip_norm
        self._scaling: GradientScaling | None = None
        if scaler is not None and scaler.is_enabled():
            self._scaling = GradientScaling(scaler, optimizer)
        #: Whether `step` only begins a step: all gradients must be known before the first is used.
        self.defers = clip_norm is not None or self._scaling is not None
        #: Whether the host's cores may still be stepping when the next step has begun.
        self.steps_on_host = placement.host_share > 0
        #: Whether a step was aborted after some parameters had been stepped: weights and state are
        #: then partly those of the next step, and no further step is made.
        self.dirty = False
        self._trained = find_trained(optimizer, masters, weights)
        self._by_leaf = {trained.leaf: trained for trained in self._trained}
        self._open_stores(disk)
        self._first_use = FirstUse(
            model, repeated_blocks(model) if blocks is None else blocks, self._before_unit
        )
        self._order = StepOrder([], [], set(), (), set())
        self._later = LaterReads([])
        #: Steps so far, and whether the next forward is watched for writes to parameters.
        self._steps, self._looks = 0, False
        #: Complete buckets with a weight that backward still reads.
        self._held: list[Bucket] = []
        #: Blocks that this backward runs again for the first time: it steps only at its end then.
        self._untried: list[Repeated] = []
        #: Complete buckets that wait for the end of this backward.
        self._waiting: list[Bucket] = []
        #: For gradient hooks: each device has its own backward thread.
        self._lock = threading.Lock()
        #: For continuing a begun step: any thread that uses a weight does so.
        self._stepping = threading.RLock()
        self._begun = BegunStep(self._have_stepped, self._may_have_changed)
        self._handles: list[RemovableHandle] = []
        self._end_of_note: Callable[[], None] = _nothing
        self._begin_batch()
        self._backward_is_last: bool | None = None
        #: Parameters not stepped yet when backward began, because the forward did not use them.
        self._late: set[Trained] = set()
        #: For a begun step: gradients on the GPU, and the next bucket to be stepped.
        self._pending: dict[Trained, Tensor] = {}
        self._pending_coefficient: Tensor | None = None
        self._coefficient_on_host = CoefficientOnHost(link)
        self._next: int | None = None
        self._groups: list[Group] = []
        self._host_groups: list[Group] = []
        try:
            self._end_of_note = note_stepped_on_host(self._by_leaf, weights)
            self._gradients.disk = place_gradients_on_disk(disk, self._trained, placement)
            self._leave_gpu()
            self._add_hooks()
            self._watch_state()
            self._later = LaterReads(t.leaf for t in self._trained if t.away is None)
        except BaseException:
            self.undo()
            raise

    # -- what a step calls ------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, *, last: bool = True) -> Iterator[None]:
        """The context for the backward of one micro-batch; `last` says that no other follows.

        If backward fails, the gradients of the batch are dropped and the error propagates.
        Parameters that were stepped by then stay stepped: `dirty` says whether there are any.
        """
        if self._backward_is_last is not None:
            raise BadInput("one backward runs already: begin the next one when it is over")
        with self._at_work():
            self._begin_backward(last)
        try:
            yield
            with self._at_work():
                self._complete_late()
                if last:
                    self._complete_rest()
        except BaseException:
            self.dirty = self.dirty or self._stepped_inside
            self.abandon()
            raise
        finally:
            self._later.end()
            self._backward_is_last = None
            self._late = set()

    def step(self) -> None:
        """Make or begin the step with the gradients so far, which are dropped afterwards."""
        with self._at_work():
            self._make_step()

    def _make_step(self) -> None:
        self._check_whole()
        if not self._complete:
            if not self._gradients.is_empty or any(t.owned.grad is not None for t in self._trained):
                raise BadInput("no backward was the last: say backward(last=True) for one of them")
            return
        if self._scaling is not None and self._scaling.skips():
            self.abandon()
            return
        # Schedulers check this mark.
        mark_stepped(self._optimizer)
        # Reads through tensors that share a weight's memory go unseen: step those weights at once.
        shared = [t.leaf for t in self._trained if t.away is None and aliases(t.leaf)]
        if self.defers:
            self._begin_step()
        else:
            self._begin_batch()
        self._have_stepped(shared)
        self._steps += 1
        self._looks = self._steps & (self._steps - 1) == 0
        copied = [t for t in self._order.host_stepped if t.away is None and not t.has_master]
        self._begun.watch(self._begun_leaves(), [trained.leaf for trained in copied])
        tell_followers(self._optimizer)

    @property
    def has_stepped(self) -> bool:
        """Whether the current or last backward stepped parameters with its batch's gradients."""
        return self._stepped_inside

    def has_gradient(self, leaf: Tensor) -> bool:
        """Whether the backwards so far made a gradient for this parameter."""
        trained = self._by_leaf.get(leaf)
        if trained is None:
            return leaf.grad is not None
        return trained in self._gradients or trained.owned.grad is not None

    def take_gradient(self, leaf: Tensor) -> Tensor:
        """Return the sum of a parameter's gradients so far and give up ownership of it."""
        trained = self._by_leaf.get(leaf)
        if trained is not None and trained in self._gradients:
            return self._gradients.take_back(trained)
        owned = trained.owned if trained is not None else leaf
        gradient, owned.grad = owned.grad, None
        assert gradient is not None
        return gradient

    def holds_weight(self, leaf: Tensor) -> bool:
        """Whether the parameter itself is offloaded."""
        return self._weights is not None and self._weights.holds(leaf)

    def settle(self) -> None:
        """Complete a begun step; afterwards weights and state may be read and written."""
        with self._at_work(), interrupts.held():
            self._check_whole()
            self._complete_step()
            self._streamed.settle()
            self._gradients.release()
            self._host_masters.show()

    @contextlib.contextmanager
    def state_left_on_disk(self) -> Iterator[None]:
        """While active, state dicts have stand-ins for tensors on the disk; see `numbers`.

        This holds for the optimizer's state dict, and for the model's if weights are on the disk.
        """
        self._shows_disk = False
        weights = self._weights
        try:
            with weights.left_on_disk() if weights is not None else contextlib.nullcontext():
                yield
        finally:
            self._shows_disk = True

    def numbers(self, tensor: Tensor) -> Tensor:
        """The values of a state dict's tensor, or of a master, read from the disk if need be."""
        found = self._weights.stands_for(tensor) if self._weights is not None else None
        if self._weights is not None and found is not None:
            return self._weights.numbers(found)
        return self._disk.numbers(tensor) if self._disk is not None else tensor

    def lies_as(self, tensor: Tensor) -> Tensor:
        """A tensor with the memory layout of the weight that a model's state dict tensor shows."""
        found = self._weights.stands_for(tensor) if self._weights is not None else None
        if self._weights is not None and found is not None:
            return self._weights.host_weight(found)
        return tensor

    def _show_all(self) -> None:
        if self._backward_is_last is not None:
            return  # a backward may be stepping it
        with self._at_work():
            self.settle()
            if self._disk is not None and self._shows_disk:
                check_host_memory(self._hidden_bytes, "showing what the optimizer has on the disk")
                self._state.show()
                self._host_masters.show_numbers()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """While active, only this thread uses weights and state, and its uses trigger no step."""
        with self._stepping, own_work():
            yield

    @property
    def _hidden_bytes(self) -> int:
        """Bytes of host memory needed to show the state and masters that are on the disk."""
        return self._state.hidden_bytes + self._host_masters.hidden_bytes

    def abandon(self) -> None:
        """Drop the gradients of a batch without a step; a step under way goes on."""
        with self._at_work():
            self._abandon()

    def _abandon(self) -> None:
        self._streamed.drop()  # frees memory after an out-of-memory error; can be fetched again
        if self._weights is not None:
            self._weights.leave_gpu()
        self._gradients.forget(but=self._not_stepped_yet())
        for trained in self._trained:
            trained.owned.grad = trained.leaf.grad = None
        self._begin_batch()

    def forget_step(self) -> None:
        """Drop an aborted step: all weights and state are about to be overwritten."""
        with self._at_work():
            self._host.forget()
            self._pending, self._pending_coefficient = {}, None
            self._coefficient_on_host.forget()
            self._next = None
            self._begun.forward(t.leaf for t in self._trained if t.away is None)
            self.abandon()
        self.dirty = False

    def check_undo(self) -> None:
        """Raise, before anything is undone, if undoing needs more host memory than there is."""
        needed = self._weights.back_bytes if self._weights is not None else 0
        if self._disk is not None and any(self._home_of(t).type == "cpu" for t in self._trained):
            needed += self._hidden_bytes
        if needed:
            check_host_memory(needed, "undoing what is on the disk (saving it does not)")

    def undo(self) -> None:
        """Move state and masters back to where the plain optimizer has them.

        To be called before the undo of `weights`; offloaded weights stay offloaded.
        """
        with self._at_work():
            self._undo()

    def _undo(self) -> None:
        if not self.dirty:
            self._complete_step()
        self._begun.forward(trained.leaf for trained in self._trained if trained.away is None)
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
        if isinstance(self._optimizer.state, WatchedState):
            self._optimizer.state = self._optimizer.state.plain()
        self._end_of_note()
        self._first_use.remove()
        self._be_asked(False)
        self._trained, self._by_leaf, self._pending = [], {}, {}
        self._order = StepOrder([], [], set(), (), set())
        self._begin_batch()
        self._coefficient_on_host.close()
        self._next = None

    def make_state(self) -> None:
        """Create state as if after a first step, with undefined values: for a rehearsal."""
        made = made_states(self._optimizer)
        with self._at_work():
            for trained in self._trained:
                self._state.make(trained, made(trained.group, trained.owned.dtype))
                self._place_counter(trained, trained.leaf.device)

    # -- setting up -------------------------------------------------------------------------------

    def _open_stores(self, disk: OpenStore | None) -> None:
        """Make what holds state, masters and gradients outside the GPU, and what steps them."""
        #: Parameters whose state and masters stay on the GPU.
        self._staying = choose_staying(self._trained, self._placement.gpu_share)
        leaving = [trained for trained in self._trained if trained not in self._staying]
        self._disk = place_state_on_disk(disk, self._optimizer, leaving, self._placement)
        self._state = HostState(self._link, self._optimizer, self._disk, self._staying)
        self._host_masters = HostMasters(self._link, self._disk, self._staying)
        self._shows_disk = True
        self._gradients = LeavingGradients(
            self._link, self._placement.bucket * self._placement.ahead
        )
        parts = StepParts(
            link=self._link,
            optimizer=self._optimizer,
            state=self._state,
            masters=self._host_masters.in_memory,
            weights=self._weights,
            rounded=self._note_rounded,
        )
        self._streamed = StreamedStep(parts, inside=not self.defers)
        self._host = HostStep(parts)
        self._loading = LoadedState(
            link=self._link,
            optimizer=self._optimizer,
            state=self._state,
            staying=self._staying,
            on_disk=self._disk or (),
        )

    def _leave_gpu(self) -> None:
        made = made_states(self._optimizer) if is_elementwise(self._optimizer) else None
        for trained in self._trained:
            self._state.move_out(trained)
            self._place_counter(trained, trained.leaf.device)
            if made is not None:
                self._state.reserve(trained, made(trained.group, trained.owned.dtype))
            self._host_masters.move_out(trained)

    def _home_of(self, trained: Trained) -> torch.device:
        """The device where the plain optimizer has the state of a parameter."""
        if self._home is not None:
            return self._home(trained.leaf)
        if trained.away is not None:
            assert self._weights is not None
            return self._weights.origin(trained.leaf)
        return trained.leaf.device

    def _be_asked(self, asked: bool) -> None:
        """Have readers of host weights and masters call this optimizer first, or stop doing so."""
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

    def _watch_state(self) -> None:
        """Have the state brought up to date before each use."""
        self._optimizer.state = WatchedState(self._optimizer.state, self._show_all)

    def _arrange(self) -> None:
        """Make the buckets, in the order of the first forward."""
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
        """Move a step counter to the device where the parameter is stepped, if kernels need it."""
        state = self._optimizer.state.get(trained.owned, {})
        group = self._optimizer.param_groups[trained.group]
        counter = state.get("step")
        if isinstance(counter, Tensor) and (group.get("fused") or group.get("capturable")):
            state["step"] = counter.to(device)

    # -- backward ---------------------------------------------------------------------------------

    def _begin_batch(self) -> None:
        """Begin a batch: it has no gradients yet."""
        self._is_first = True
        #: Parameters whose gradients are complete, with the gradients' norms if clipping is on.
        self._complete: dict[Trained, Tensor | None] = {}
        #: Complete gradients that stay on the GPU.
        self._kept: dict[Trained, Tensor] = {}
        if self._scaling is not None:
            self._scaling.begin_batch()
        self._stepped_inside = False
        #: By bucket: the parameters whose gradients are not complete.
        self._missing: dict[Bucket, set[Trained]] = {}
        self._held, self._waiting = [], []
        self._upcoming: list[Bucket] = []

    def _begin_backward(self, last: bool) -> None:
        self._check_whole()
        check_per_parameter(self._optimizer, "the optimizer on the host", self._masters)
        if not self._order.buckets:
            self._arrange()
        self._late = self._not_stepped_yet()
        if not self._late:
            self._complete_step()
        self._begun.forward(t.leaf for t in self._trained if t.away is None and t not in self._late)
        self._streamed.release()
        self._host_masters.hide()
        self._state.hide()
        self._gradients.begin_backward()
        self._check_groups()
        self._backward_is_last = last
        if last:
            if not self.defers:
                self._freeze_groups()
                self._untried = self._find_untried()
            self._missing = {b: set(b.parameters) for b in self._order.buckets}
            self._upcoming = list(self._order.streamed)
            following = self._upcoming if self.defers else reversed(self._upcoming)
            self._state.announce(piece for bucket in following for piece in bucket.pieces)
        self._wires_leaf_dtype = self._is_first and last and self._scaling is None
        self._is_first = False

    def _arrived(self, leaf: Tensor) -> None:
        trained = self._by_leaf.get(leaf)
        if trained is None or self._backward_is_last is None:
            return
        with self._lock, own_work(), torch.no_grad():
            self._check_arrival(trained)
            gradient = trained.owned.grad
            if gradient is None:
                return  # a hook removed the gradient: no step, as with the plain optimizer
            leaves = trained in self._order.leaving
            if leaves:
                self._gradients.add_to(trained, gradient)
            if self._backward_is_last:
                self._take(trained, gradient)
            elif leaves:
                trained.owned.grad = None
                self._gradients.send(trained, gradient, gradient.dtype)

    def _complete_late(self) -> None:
        """Step parameters that this forward did not use, now that backward has confirmed it."""
        if self._late:
            self._complete_step()
            self._late = set()

    def _complete_rest(self) -> None:
        """Complete the gradients that earlier micro-batches made and the last one did not reach."""
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
                for block in self._untried:
                    block.ran_again = True
                waiting, self._waiting = self._waiting, []
                rest, self._missing = [*waiting, *self._held, *self._missing], {}
                self._held = []
                for bucket in rest:
                    self._step_inside([bucket])
                if self._untried:
                    self._gradients.free_all_but(self._order.leaving)
                    self._untried = []

    def _take(self, trained: Trained, gradient: Tensor) -> None:
        """Handle a complete gradient: keep or offload it, and step the buckets it completes."""
        trained.owned.grad = None
        if self._scaling is not None:
            self._scaling.unscale(gradient)
        self._complete[trained] = gradient_norm(gradient) if self._clip_norm is not None else None
        leaves = trained in self._order.leaving
        if self._untried or (leaves and (self.defers or trained in self._order.host_stepped)):
            dtype = trained.leaf.dtype if self._wires_leaf_dtype else gradient.dtype
            self._gradients.send(trained, gradient, dtype)
        else:
            self._kept[trained] = gradient
        complete = self._arrived_in_buckets(trained)
        if not self.defers:
            self._step_unless_read(complete)
            self._prefetch_inside()
        else:
            # As backward ends it frees memory: prefetch as much as the completed buckets allow.
            others = max(len(self._missing) - self._order.at_once, 0)
            self._prefetch(0, self._early - others // EARLY_PACE)

    def _arrived_in_buckets(self, trained: Trained) -> list[Bucket]:
        """Note the gradient in its buckets; returns the buckets that are complete now."""
        complete = []
        for bucket in self._order.buckets_of[trained]:
            if (missing := self._missing.get(bucket)) is not None:
                missing.discard(trained)
                if not missing:
                    complete.append(bucket)
                    del self._missing[bucket]
        return complete

    def _prefetch_inside(self) -> None:
        """Fetch the buckets that backward will complete next, in reverse forward order."""
        if self._untried:
            return
        while self._upcoming and self._upcoming[-1] not in self._missing:
            self._upcoming.pop()
        for bucket in self._upcoming[-self._placement.ahead :]:
            if bucket in self._missing:
                self._streamed.fetch(bucket)

    def _step_unless_read(self, complete: list[Bucket]) -> None:
        """Step buckets inside backward, except those whose weights it has yet to read."""
        due, self._held = [*self._held, *complete], []
        read = {t for bucket in due for t in bucket.parameters if self._is_still_read(t)}
        if read:
            self._held = [bucket for bucket in due if not read.isdisjoint(bucket.parameters)]
            due = [bucket for bucket in due if read.isdisjoint(bucket.parameters)]
        if self._untried:
            self._waiting += due
        else:
            self._step_inside(due)
        stepped = (piece.trained for bucket in due for piece in bucket.pieces if piece.is_last)
        self._later.stepped(trained.leaf for trained in stepped if trained.away is None)

    def _is_still_read(self, trained: Trained) -> bool:
        if trained.away is None:
            return self._later.are_expected(trained.leaf)
        assert self._weights is not None
        return is_awaited(trained.leaf) or self._weights.is_noted(trained.leaf)

    def _step_inside(self, buckets: list[Bucket]) -> None:
        """Step buckets inside backward."""
        for at, bucket in enumerate(buckets):
            if not any(t in self._complete for t in bucket.parameters):
                continue
            if bucket in self._order.streamed_set:
                for following in buckets[at : at + 1 + self._placement.ahead]:
                    self._streamed.fetch(following)
                if self._untried:
                    self._streamed.fetch_gradients(bucket, self._gradients)
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
                coefficient = self._coefficient_on_host.of(self._pending_coefficient)
                self._host.begin(bucket, self._gradients, self._host_groups, coefficient)
                self._used(bucket, self._pending)
        self._gradients.release()
        self._advance(self._order.stop_of_unused)
        self._prefetch(self._next, self._placement.ahead)

    def _before_unit(self, unit: int) -> None:
        """Make the parameters of a part of the model ready, right before it runs."""
        if self._backward_is_last is not None:
            return  # this is a recomputation
        # Offloaded weights are made ready when they are fetched.
        parameters = [
            trained
            for leaf in self._first_use.parameters_of(unit)
            if (trained := self._by_leaf.get(leaf)) is not None and trained.away is None
        ]
        self._go_on_to(parameters, returns=True)
        leaves = [trained.leaf for trained in parameters]
        if self._looks and not is_compiled(self._first_use.module_of(unit)):
            self._begun.look_at_forward(leaves)
        else:
            self._begun.forward(leaves)

    def _have_stepped(self, leaves: Collection[Tensor]) -> None:
        """Complete the steps of some parameters, and of those before them in order."""
        self._go_on_to([self._by_leaf[leaf] for leaf in leaves if leaf in self._by_leaf])

    def _go_on_to(self, parameters: Collection[Trained], *, returns: bool = False) -> None:
        """Continue the step up to and including these parameters.

        With `returns`, also begin to copy back all that the host's cores have stepped.
        """
        with self._at_work():
            if self._next is None:
                return
            self._check_whole()
            self._advance(max((self._order.stop.get(t, 0) for t in parameters), default=0))
            # Streamed buckets are needed first: the link is free for the host's share after them.
            if returns and self._next + self._placement.ahead >= len(self._order.streamed):
                with self._or_dirty():
                    self._host.return_done()
            self._finish_on_host(self._buckets_on_host(parameters))

    def _buckets_on_host(self, some: Collection[Trained]) -> list[Bucket]:
        return [
            bucket
            for trained in some
            if trained in self._order.host_stepped
            for bucket in self._order.buckets_of[trained]
        ]

    def _finish_on_host(self, buckets: Collection[Bucket]) -> None:
        """Wait for the new weights of buckets that the host's cores step."""
        with self._or_dirty():
            self._host.finish(buckets)
        self._note_stepped(buckets)

    def _note_stepped(self, buckets: Collection[Bucket]) -> None:
        last = (piece.trained for bucket in buckets for piece in bucket.pieces if piece.is_last)
        self._begun.stepped(trained.leaf for trained in last if trained.away is None)

    def _may_have_changed(self, leaf: Tensor, in_forward: bool) -> None:
        self._host.may_have_changed(self._by_leaf[leaf], always=in_forward)

    def _begun_leaves(self) -> list[Tensor]:
        """The parameters that are not stepped yet, except offloaded ones."""
        return [trained.leaf for trained in self._not_stepped_yet() if trained.away is None]

    def _may_read(self, leaves: Sequence[Tensor], now: bool) -> bool:
        """Whether a block's weights may be read; steps them first, if that can be done now."""
        trained = [self._by_leaf[leaf] for leaf in leaves if leaf in self._by_leaf]
        if self._backward_is_last is not None:
            # Weights with complete gradients are fetched for the next forward, once stepped.
            return not any(t in self._complete and self._is_to_step(t) for t in trained)
        with self._at_work():
            if self._next is None:
                return True
            self._check_whole()
            on_host = self._buckets_on_host(trained)
            stop = max((self._order.stop.get(t, 0) for t in trained), default=0)
            if not now and (stop > self._next or not self._host.are_done(on_host)):
                return False  # weights that the GPU steps are put in place when the block runs
            self._advance(stop)
            self._finish_on_host(on_host)
            return True

    def _is_to_step(self, trained: Trained) -> bool:
        if self.defers:
            return True
        own = self._order.buckets_of[trained]
        return any(bucket in self._missing or bucket in self._waiting for bucket in own)

    def _find_untried(self) -> list[Repeated]:
        """Blocks that were not run again yet, if the host has room for all gradients meanwhile.

        One that cannot be recomputed ends its step, which can be rolled back as long as nothing was
        stepped.
        """
        leaves = list(self._by_leaf)
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return []  # waiting takes more memory on the host only
        found = untried_blocks(leaves)
        others = [trained for trained in self._trained if trained not in self._order.leaving]
        needed = sum(trained.owned.nbytes for trained in others) if found else 0
        return found if needed <= MOST_OF_HOST * host_limits().memory else []

    def _complete_step(self) -> None:
        if self._next is None:
            return
        self._advance(len(self._order.streamed))
        self._finish_on_host(self._order.on_host)
        self._coefficient_on_host.wait()
        self._pending, self._pending_coefficient = {}, None
        self._next = None

    def _advance(self, stop: int) -> None:
        """Step the buckets before number `stop`."""
        assert self._next is not None
        while self._next < stop:
            bucket = self._order.streamed[self._next]
            self._prefetch(self._next, self._placement.ahead)
            with self._or_dirty(), torch.autocast(self._device_type, enabled=False):
                self._streamed.step(bucket, self._pending, self._groups, self._pending_coefficient)
            self._used(bucket, self._pending)
            self._note_stepped([bucket])
            self._next += 1
            self._streamed.release(self._early)
            self._prefetch(self._next, self._placement.ahead)

    def _prefetch(self, start: int, count: int) -> None:
        """Fetch the next buckets; their gradients too, once a step has begun."""
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

    # -- clipping ---------------------------------------------------------------------------------

    def _coefficient(self) -> Tensor | None:
        if self._clip_norm is None:
            return None
        # In the optimizer's order, in which plain clipping would take them.
        norms = [
            (norm, trained.owned.dtype)
            for trained in self._trained
            if (norm := self._complete.get(trained)) is not None
        ]
        return clip_coefficient(norms, self._clip_norm)

    # -- masters ----------------------------------------------------------------------------------

    def _note_rounded(self, owned: Tensor) -> None:
        if self._masters is not None:
            self._masters.note_rounded(owned)

    # -- state dicts ------------------------------------------------------------------------------

    def _before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.settle()
        return self._loading.hold_back(state_dict)

    def _after_load(self) -> None:
        self._watch_state()  # PyTorch made a new dictionary
        with self._at_work():
            for trained in self._loading.take(self._trained):
                on_host = trained in self._order.host_stepped
                stepped_on = torch.device("cpu") if on_host else trained.leaf.device
                self._place_counter(trained, stepped_on)
                self._state.adopt(trained)

    # -- checks -----------------------------------------------------------------------------------

    @property
    def _device_type(self) -> str:
        return self._trained[0].leaf.device.type

    def _freeze_groups(self) -> None:
        """Freeze this step's hyperparameters: a scheduler may change them before it is complete."""
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
            raise StepBroken(
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
        """Raise if the optimizer would step a parameter that is not known here."""
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


def _nothing() -> None:
    """Do nothing."""
