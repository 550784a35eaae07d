"""Optimizer steps on the host's cores: gradients are offloaded before, new weights sent back after.

The host steps its own copy of the weights, or the masters, with a twin of the optimizer. It runs in
a thread beside training; an error in it is raised when training next waits for the weights.

The step is bound by memory bandwidth, which it shares with the copies to and from the GPU. A
gradient that must be scaled or converted first is processed in small parts, so that the result
stays in the cores' caches until it is stepped.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.memory.link import Copy, HostWork
from oomph.techniques.host_tensors import host_tensor
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.optimizer_twin import Group, OptimizerTwin, is_elementwise
from oomph.techniques.step_buckets import Bucket, Piece, Trained
from oomph.techniques.step_parts import StepParts
from oomph.techniques.watched_tensors import aliases, own_work
from oomph.torch_compat.storages import cdata_of
from oomph.torch_compat.tensors import version_of

#: Values that a step of AdamW reads and writes per element.
STEPPED = 7
#: The extra for a gradient that is scaled or converted first, most of which stays in caches. With
#: 30 and 40 % of 3 B parameters stepped by the host, clipped steps beside an H200 took 0.938 and
#: 1.018 s; this constant predicts 0.948 and 1.024.
MADE = 1
#: Alignment of converted gradients in bytes, for any dtype and for vector instructions.
_ALIGNED = 64
#: Bytes of gradients that a core scales or converts at a time: about half of a fast cache.
_IN_CACHE = 1 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """A bucket that the host is to step."""

    pieces: list[Piece]
    work: HostWork
    after: list[Copy]
    """The copies that the work waits for."""
    back: Copy | None = None
    """The copy of the new weights to the GPU, once begun."""


class HostStep:
    """Steps buckets on the host; offloaded weights are stepped in place."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._link = parts.link
        self._twin = OptimizerTwin(parts.optimizer, on_host=True)
        #: The tensors copied back to the GPU: the host's weights, or its rounded masters.
        self._weights: dict[Trained, Tensor] = {}
        #: A parameter's version and storage when the host's copy was made or sent back.
        self._versions: dict[Trained, tuple[int, int]] = {}
        self._turns: dict[Bucket, _Turn] = {}
        #: Parameters with a piece under way, for which the host's copy is the newer one.
        self._begun: set[Trained] = set()
        #: Parameters that their module's forward writes to.
        self._written: set[Trained] = set()
        self._scratch = _Scratch()
        self._may_cut = is_elementwise(parts.optimizer)
        #: Reused in every step, because the state remembers which pieces were stepped.
        self._cuts: dict[Piece, tuple[Piece, ...]] = {}

    def make_room(self, trained: Trained) -> None:
        """Allocate the host memory that a parameter needs."""
        away = trained.away
        self._weights[trained] = host_tensor(self._link, trained.leaf) if away is None else away

    def begin(
        self,
        bucket: Bucket,
        gradients: LeavingGradients,
        groups: Sequence[Group],
        coefficient: tuple[Tensor, Copy] | None,
    ) -> None:
        """Begin to step those pieces of a bucket whose gradients are on the host."""
        pieces = [piece for piece in bucket.pieces if piece.trained in gradients]
        if not pieces:
            return
        slots = {piece.trained: gradients.slot(piece.trained) for piece in pieces}
        after = [copy for _, copy in slots.values()]
        after += [copy for trained in slots for copy in self._before_work(trained)]
        self._begun.update(slots)
        if coefficient is not None:
            after.append(coefficient[1])
        work = functools.partial(
            self._work,
            pieces,
            {trained: slot for trained, (slot, _) in slots.items()},
            groups,
            coefficient[0] if coefficient is not None else None,
        )
        is_first = not all(map(self._parts.state.has, pieces))
        traffic = self._traffic(pieces, slots, scales=coefficient is not None)
        begun = self._link.host_work(work, traffic, after, only_numbers=not is_first)
        self._turns[bucket] = _Turn(pieces=pieces, work=begun, after=after)
        for trained in slots:
            if trained.away is not None:
                assert self._parts.weights is not None
                self._parts.weights.written(trained.leaf, [begun])

    def return_done(self) -> None:
        """Begin to copy back the buckets that are stepped by now."""
        for turn in self._turns.values():
            if turn.back is None and turn.work.is_done():
                self._return(turn)

    def are_done(self, buckets: Iterable[Bucket]) -> bool:
        """Whether the host's work on these buckets is done."""
        return all(self._turns[b].work.is_done() for b in buckets if b in self._turns)

    def finish(self, buckets: Iterable[Bucket]) -> None:
        """Have the new weights of buckets on the GPU before any later GPU work."""
        turns = [self._turns[bucket] for bucket in buckets if bucket in self._turns]
        for turn in turns:
            if turn.back is None:
                self._return(turn)
        for turn in turns:
            assert turn.back is not None
            turn.back.wait()
            for trained in {piece.trained for piece in turn.pieces}:
                self._begun.discard(trained)
                self._versions[trained] = _version_of(trained.leaf)
                if trained.has_master:
                    self._parts.rounded(trained.owned)
        self._turns = {bucket: t for bucket, t in self._turns.items() if t not in turns}

    def may_have_changed(self, trained: Trained, *, always: bool) -> None:
        """Copy a parameter to the host again before its step: it may have had an uncounted write.

        With `always` (its module's forward writes to it), before every step.
        """
        self._versions.pop(trained, None)
        if always:
            self._written.add(trained)

    @property
    def under_way(self) -> list[Bucket]:
        """The buckets whose new weights have not been waited for yet."""
        return list(self._turns)

    def forget(self) -> None:
        """Wait for all work under way and drop it; weights are copied again before their step."""
        for turn in self._turns.values():
            with contextlib.suppress(Exception):  # the caller knows that something failed
                turn.work.finish()
            if turn.back is not None:
                turn.back.wait()
        self._turns.clear()
        self._versions.clear()
        self._begun.clear()

    def close(self) -> None:
        """Wait for all work under way, drop it and free the host memory."""
        self.forget()
        self._weights.clear()
        self._cuts.clear()
        self._scratch = _Scratch()

    def _return(self, turn: _Turn) -> None:
        turn.work.finish()
        turn.after = []
        turn.back = self._link.to_gpu_all(
            [
                (piece.of(self._weights[piece.trained]), piece.of(piece.trained.leaf))
                for piece in turn.pieces
                if piece.trained.away is None
            ]
        )

    def _before_work(self, trained: Trained) -> list[Copy]:
        """The copies to wait for before a parameter is stepped.

        A parameter that was not copied yet, or was written to elsewhere since, is copied here.
        """
        if trained.away is not None:
            assert self._parts.weights is not None
            return self._parts.weights.before_write(trained.leaf)
        version = _version_of(trained.leaf)
        # Writes through tensors that share its memory are not counted.
        known = self._versions.get(trained) == version and not aliases(trained.leaf)
        known = known and trained not in self._written
        if trained.has_master or known or trained in self._begun:
            return []
        self._versions[trained] = version
        return [self._link.to_host(trained.leaf.detach(), self._weights[trained])]

    @torch.no_grad()
    def _work(
        self,
        pieces: Sequence[Piece],
        slots: Mapping[Trained, Tensor],
        groups: Sequence[Group],
        coefficient: Tensor | None,
    ) -> None:
        with own_work():  # this thread must not trigger watches, which may wait for it
            self._step_pieces(pieces, slots, groups, coefficient)

    def _step_pieces(
        self,
        pieces: Sequence[Piece],
        slots: Mapping[Trained, Tensor],
        groups: Sequence[Group],
        coefficient: Tensor | None,
    ) -> None:
        # A kernel cannot mix tensors at their first step with others.
        alike: dict[tuple[int, bool], list[Piece]] = {}
        for piece in pieces:
            is_first = not self._parts.state.has(piece)
            alike.setdefault((piece.trained.group, is_first), []).append(piece)
        for (group, is_first), own in alike.items():
            # A first step creates state for whole pieces.
            turns = [own] if is_first else self._turns_in_cache(own, slots, coefficient)
            for some in turns:
                gradients = [piece.of(slots[piece.trained]) for piece in some]
                self._step_together(groups[group], some, gradients, coefficient)

    def _turns_in_cache(
        self, pieces: Sequence[Piece], slots: Mapping[Trained, Tensor], coefficient: Tensor | None
    ) -> Iterator[list[Piece]]:
        """Yield the pieces; those with gradients to scale or convert, in parts that fit caches."""
        if not self._may_cut:
            yield list(pieces)
            return
        made: list[Piece] = []
        as_they_are: list[Piece] = []
        for piece in pieces:
            dtype = self._stepped_tensor(piece.trained).dtype
            same = coefficient is None and slots[piece.trained].dtype == dtype
            (as_they_are if same else made).append(piece)
        if as_they_are:
            yield as_they_are
        most = room = _in_caches()
        turn: list[Piece] = []
        for piece in made:
            size = self._stepped_tensor(piece.trained).element_size()
            if piece not in self._cuts:
                self._cuts[piece] = piece.cut(most // size)
            for part in self._cuts[piece]:
                if turn and part.numel * size > room:
                    yield turn
                    turn, room = [], most
                turn.append(part)
                room -= part.numel * size
        if turn:
            yield turn

    def _step_together(
        self,
        group: Group,
        pieces: Sequence[Piece],
        gradients: Sequence[Tensor],
        coefficient: Tensor | None,
    ) -> None:
        """Step pieces of a group in one call: between calls this thread would wait for the GIL."""
        state = self._parts.state
        stepped = [piece.apart(self._stepped_tensor(piece.trained)) for piece in pieces]
        gradients = self._scratch.made(gradients, [t.dtype for t in stepped], coefficient)
        for tensor, gradient in zip(stepped, gradients, strict=True):
            tensor.grad = gradient
        on_host = [state.tensors(piece) for piece in pieces]
        before = [{**state.resident(p), **own} for p, own in zip(pieces, on_host, strict=True)]
        after = self._twin.step(group, stepped, before)
        for piece, tensor, old, new in zip(pieces, stepped, on_host, after, strict=True):
            tensor.grad = None
            for name, target in state.store(piece, new).items():
                if new[name] is not old.get(name):
                    target.copy_(new[name])
            if piece.trained.has_master:
                piece.of(self._weights[piece.trained]).copy_(tensor)

    def _traffic(
        self, pieces: Sequence[Piece], slots: Mapping[Trained, tuple[Tensor, Copy]], scales: bool
    ) -> int:
        """Bytes that the cores read and write, including those in their caches."""
        traffic = 0
        for piece in pieces:
            dtype = self._stepped_tensor(piece.trained).dtype
            makes = scales or slots[piece.trained][0].dtype != dtype
            traffic += (STEPPED + (MADE if makes else 0)) * piece.numel * dtype.itemsize
        return traffic

    def _stepped_tensor(self, trained: Trained) -> Tensor:
        return self._parts.masters[trained] if trained.has_master else self._weights[trained]


def _version_of(leaf: Tensor) -> tuple[int, int]:
    return version_of(leaf), cdata_of(leaf.untyped_storage())


class _Scratch:
    """Reused memory for converted gradients: new memory would cost more than the step itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def made(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], coefficient: Tensor | None
    ) -> list[Tensor]:
        """The tensors, converted and multiplied; valid until the next call.

        Tensors that only need multiplying and are too large for caches are multiplied in place.
        """
        pairs = list(zip(tensors, dtypes, strict=True))
        large = sum(tensor.numel() * dtype.itemsize for tensor, dtype in pairs) > _in_caches()
        multiplies = coefficient is not None and not large
        wanted = [multiplies or tensor.dtype != dtype for tensor, dtype in pairs]
        begins = [0]
        for tensor, dtype, makes in zip(tensors, dtypes, wanted, strict=True):
            size = tensor.numel() * dtype.itemsize if makes else 0
            begins.append(begins[-1] + math.ceil(size / _ALIGNED) * _ALIGNED)
        if begins[-1] > self._memory.numel():
            self._memory = torch.empty(begins[-1], dtype=torch.uint8, device="cpu")
        return [
            _filled(
                self._memory[begin:end].view(dtype).as_strided(tensor.shape, tensor.stride())
                if makes
                else tensor,
                tensor,
                coefficient,
            )
            for tensor, dtype, makes, begin, end in zip(
                tensors, dtypes, wanted, begins, begins[1:], strict=False
            )
        ]


def _filled(room: Tensor, tensor: Tensor, coefficient: Tensor | None) -> Tensor:
    """Copy a tensor into `room` (or use it in place), multiplied as `clip_grad_norm_` would."""
    if coefficient is None:
        return room.copy_(tensor) if room is not tensor else room
    if room.dtype == tensor.dtype:
        return torch.mul(tensor, coefficient, out=room)
    return room.copy_(tensor).mul_(coefficient)


def _in_caches() -> int:
    """Bytes of gradients that fit in the caches of all cores."""
    return _IN_CACHE * torch.get_num_threads()
