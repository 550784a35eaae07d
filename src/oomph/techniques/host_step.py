"""Steps by the host's cores: gradients are there already, weights come back when they are done.

The host steps its own copy of the weights, or the masters, with a twin of the optimizer. It runs
beside the thread that trains; an error in it is raised by whoever next waits for the weights.

Memory is what it waits for, and the copies of a step read and write the same memory. A gradient
that is scaled or converted first is taken a little at a time, so that what becomes of it stays in
the cores' caches until it is stepped.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.host.link import Copy, HostWork
from oomph.techniques.host_tensors import host_tensor
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.optimizer_twin import Group, OptimizerTwin, is_elementwise
from oomph.techniques.step_buckets import Bucket, Piece, Trained
from oomph.techniques.step_parts import StepParts

#: Numbers that a step of AdamW reads and writes of a parameter.
STEPPED = 7
#: The same for a gradient that is scaled or converted before, most of which stays in caches: with
#: 30 and 40 % of 3 B parameters stepped by the host, clipped steps beside an H200 took 0.938 and
#: 1.018 s, and 0.948 and 1.024 by this.
MADE = 1
#: Bytes at whose multiples a converted gradient begins: whole numbers of any type, and of vectors.
_ALIGNED = 64
#: Bytes of gradients that a core scales or converts at a time: about half of a fast cache.
_IN_CACHE = 1 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """A bucket that the host was given."""

    pieces: list[Piece]
    work: HostWork
    after: list[Copy]
    """What the work waits for."""
    back: Copy | None = None
    """Of the weights to the GPU, once begun."""


class HostStep:
    """Steps buckets on the host; weights that are there anyway are stepped in place."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._link = parts.link
        self._twin = OptimizerTwin(parts.optimizer, on_host=True)
        #: What goes back to the GPU: the host's weights, or what its masters round to.
        self._weights: dict[Trained, Tensor] = {}
        #: The version that a parameter had when the host's copy was made or sent back.
        self._versions: dict[Trained, int] = {}
        self._turns: dict[Bucket, _Turn] = {}
        self._scratch = _Scratch()
        self._may_cut = is_elementwise(parts.optimizer)
        #: The same parts each time: state remembers which it has.
        self._cuts: dict[Piece, tuple[Piece, ...]] = {}

    def make_room(self, trained: Trained) -> None:
        """Take the host memory that a parameter needs."""
        away = trained.away
        self._weights[trained] = host_tensor(self._link, trained.leaf) if away is None else away

    def begin(
        self,
        bucket: Bucket,
        gradients: LeavingGradients,
        groups: Sequence[Group],
        coefficient: tuple[Tensor, Copy] | None,
    ) -> None:
        """Have a bucket stepped, by those of its gradients that are on the host."""
        pieces = [piece for piece in bucket.pieces if piece.trained in gradients]
        if not pieces:
            return
        slots = {piece.trained: gradients.slot(piece.trained) for piece in pieces}
        after = [copy for _, copy in slots.values()]
        after += [copy for trained in slots for copy in self._before_work(trained)]
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
        """Begin to bring back what is stepped by now."""
        for turn in self._turns.values():
            if turn.back is None and turn.work.is_done():
                self._return(turn)

    def are_done(self, buckets: Iterable[Bucket]) -> bool:
        """Whether nobody would have to wait for the host's work on these."""
        return all(self._turns[b].work.is_done() for b in buckets if b in self._turns)

    def finish(self, buckets: Iterable[Bucket]) -> None:
        """Have the new weights of buckets on the GPU before whatever comes next."""
        turns = [self._turns[bucket] for bucket in buckets if bucket in self._turns]
        for turn in turns:
            if turn.back is None:
                self._return(turn)
        for turn in turns:
            assert turn.back is not None
            turn.back.wait()
            for trained in {piece.trained for piece in turn.pieces}:
                self._versions[trained] = trained.leaf._version
                if trained.has_master:
                    self._parts.rounded(trained.owned)
        self._turns = {bucket: t for bucket, t in self._turns.items() if t not in turns}

    @property
    def under_way(self) -> list[Bucket]:
        """The buckets whose new weights nobody waited for yet."""
        return list(self._turns)

    def close(self) -> None:
        """Wait for what is under way, forget it and give the host memory back."""
        for turn in self._turns.values():
            with contextlib.suppress(Exception):  # whoever closes it knows that something failed
                turn.work.finish()
            if turn.back is not None:
                turn.back.wait()
        self._turns.clear()
        self._weights.clear()
        self._versions.clear()
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
        """What must be done before a parameter is stepped.

        A parameter that somebody else wrote to, or that was not copied yet, is copied.
        """
        if trained.away is not None:
            assert self._parts.weights is not None
            return self._parts.weights.before_write(trained.leaf)
        if trained.has_master or self._versions.get(trained) == trained.leaf._version:
            return []
        self._versions[trained] = trained.leaf._version
        return [self._link.to_host(trained.leaf.detach(), self._weights[trained])]

    @torch.no_grad()
    def _work(
        self,
        pieces: Sequence[Piece],
        slots: Mapping[Trained, Tensor],
        groups: Sequence[Group],
        coefficient: Tensor | None,
    ) -> None:
        # A kernel takes tensors of a first step, or others, but not both.
        alike: dict[tuple[int, bool], list[Piece]] = {}
        for piece in pieces:
            is_first = not self._parts.state.has(piece)
            alike.setdefault((piece.trained.group, is_first), []).append(piece)
        for (group, is_first), own in alike.items():
            # What a first step makes of state, it makes of whole pieces.
            turns = [own] if is_first else self._turns_in_cache(own, slots, coefficient)
            for some in turns:
                gradients = [piece.of(slots[piece.trained]) for piece in some]
                self._step_together(groups[group], some, gradients, coefficient)

    def _turns_in_cache(
        self, pieces: Sequence[Piece], slots: Mapping[Trained, Tensor], coefficient: Tensor | None
    ) -> Iterator[list[Piece]]:
        """These pieces, those whose gradients are scaled or converted in parts that caches hold."""
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
        """Step pieces of a group in one go: between kernels this thread waits for its turn."""
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
        """Bytes that the cores read and write, those in their caches too."""
        traffic = 0
        for piece in pieces:
            dtype = self._stepped_tensor(piece.trained).dtype
            makes = scales or slots[piece.trained][0].dtype != dtype
            traffic += (STEPPED + (MADE if makes else 0)) * piece.numel * dtype.itemsize
        return traffic

    def _stepped_tensor(self, trained: Trained) -> Tensor:
        return self._parts.masters[trained] if trained.has_master else self._weights[trained]


class _Scratch:
    """Memory for gradients as they are stepped: new memory would cost more than the step itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def made(
        self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], coefficient: Tensor | None
    ) -> list[Tensor]:
        """Tensors in these types, multiplied, until the next call.

        Where that is all and they are too large for caches, they are so themselves: no memory.
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
            self._memory = torch.empty(begins[-1], dtype=torch.uint8)
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
    """A tensor's numbers in `room`, or itself, multiplied as `clip_grad_norm_` would."""
    if coefficient is None:
        return room.copy_(tensor) if room is not tensor else room
    if room.dtype == tensor.dtype:
        return torch.mul(tensor, coefficient, out=room)
    return room.copy_(tensor).mul_(coefficient)


def _in_caches() -> int:
    """Bytes of gradients that all cores have in their caches."""
    return _IN_CACHE * torch.get_num_threads()
