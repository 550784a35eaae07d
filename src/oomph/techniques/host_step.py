"""Steps by the host's cores: gradients are there already, weights come back when they are done.

The host steps its own copy of the weights, or the masters, with a twin of the optimizer. It runs
beside the thread that trains; an error in it is raised by whoever next waits for the weights.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.host.link import Copy, HostWork
from oomph.techniques.host_tensors import host_tensor
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.optimizer_twin import Group, OptimizerTwin
from oomph.techniques.step_buckets import Bucket, Piece, Trained
from oomph.techniques.step_parts import StepParts
from oomph.techniques.streamed_step import scale

#: Bytes at whose multiples a converted gradient begins: whole numbers of any type, and of vectors.
_ALIGNED = 64


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
        begun = self._link.host_work(work, _traffic(pieces, coefficient is not None), after)
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
            is_first = not self._parts.state.tensors(piece)
            alike.setdefault((piece.trained.group, is_first), []).append(piece)
        for (group, _), own in alike.items():
            gradients = [piece.of(slots[piece.trained]) for piece in own]
            self._step_together(groups[group], own, gradients, coefficient)

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
        gradients = self._scratch.converted(gradients, [tensor.dtype for tensor in stepped])
        scale(gradients, coefficient)
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

    def _stepped_tensor(self, trained: Trained) -> Tensor:
        return self._parts.masters[trained] if trained.has_master else self._weights[trained]


class _Scratch:
    """Memory for gradients in another type: new memory would cost more than the step itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def converted(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Tensors in these types, until the next call; those that have them are the same."""
        begins = [0]
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            size = tensor.numel() * dtype.itemsize if tensor.dtype != dtype else 0
            begins.append(begins[-1] + math.ceil(size / _ALIGNED) * _ALIGNED)
        if begins[-1] > self._memory.numel():
            self._memory = torch.empty(begins[-1], dtype=torch.uint8)
        return [
            tensor
            if tensor.dtype == dtype
            else self._memory[begin:end]
            .view(dtype)
            .as_strided(tensor.shape, tensor.stride())
            .copy_(tensor)
            for tensor, dtype, begin, end in zip(tensors, dtypes, begins, begins[1:], strict=False)
        ]


def _traffic(pieces: Sequence[Piece], clipped: bool) -> int:
    """Bytes that a step of AdamW reads and writes of them: seven numbers each, to clip two more."""
    numbers = 9 if clipped else 7
    return sum(numbers * piece.numel * piece.trained.owned.element_size() for piece in pieces)
