"""Step on the GPU with state that lives on the host: fetch it, step, and write it back.

While one bucket is stepped, the next ones are fetched and the last ones are written back, without
blocking the host. The GPU memory of a bucket that was written back is reused by a later one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oomph.errors import OomphError
from oomph.memory.link import Copies, Copy, DoneCopy, Pairs
from oomph.techniques.disk_state import MASTER
from oomph.techniques.host_tensors import gpu_like
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.optimizer_twin import Group, OptimizerTwin
from oomph.techniques.step_buckets import Bucket, Piece, Trained
from oomph.techniques.step_parts import StepParts
from oomph.torch_compat.optimizers import foreach_mul_, has_foreach


@dataclass(slots=True, kw_only=True)
class _Visit:
    """What was fetched to the GPU for a bucket."""

    state: dict[Piece, dict[str, Tensor]] = field(default_factory=dict)
    stepped: dict[Piece, Tensor] = field(default_factory=dict)
    """Masters, and offloaded weights that have no master."""
    copy: Copy = field(default_factory=DoneCopy)


class StreamedStep:
    """Steps buckets on the GPU; stepped weights of the host are written back there.

    If steps are made `inside` backward, disk weights are already on the GPU with their block.
    """

    def __init__(self, parts: StepParts, *, inside: bool = False) -> None:
        self._parts = parts
        self._inside = inside
        self._link = parts.link
        self._twin = OptimizerTwin(parts.optimizer)
        self._visits: dict[Bucket, _Visit] = {}
        self._gradients: dict[Bucket, tuple[dict[Piece, Tensor], Copy]] = {}
        #: For each stepped bucket: the copy back to the host.
        self._leaving: deque[Copy] = deque()
        self._last_copy: Copy | None = None

    def fetch(self, bucket: Bucket) -> None:
        """Start to fetch a bucket's state to the GPU, unless that was started before."""
        if bucket in self._visits:
            return
        visit = _Visit()
        pairs: list[tuple[Tensor, Tensor]] = []
        from_disk: dict[Piece, dict[str, Tensor]] = {}
        for piece in bucket.pieces:
            device = piece.trained.leaf.device
            on_host = self._parts.state.tensors(piece)
            visit.state[piece] = {name: gpu_like(t, device) for name, t in on_host.items()}
            pairs += zip(on_host.values(), visit.state[piece].values(), strict=True)
            if (home := self._home(piece.trained)) is not None:
                source = piece.of(home)
                visit.stepped[piece] = gpu_like(source, device)
                pairs.append((source, visit.stepped[piece]))
            elif _steps_disk_weights(piece):
                visit.stepped[piece] = gpu_like(piece.of(piece.trained.like), device)
            from_disk[piece] = self._parts.state.room_from_disk(piece, device)
            visit.state[piece] |= from_disk[piece]
            if MASTER in visit.state[piece]:
                visit.stepped[piece] = visit.state[piece].pop(MASTER)
        # All memory is allocated: from here on nothing can fail while copies are under way.
        begun = [
            copy
            for piece, room in from_disk.items()
            for copy in self._parts.state.from_disk(piece, room)
        ]
        if not self._inside:
            begun += self._bring_weights(visit, bucket.pieces)
        visit.copy = _together(self._link.to_gpu_all(pairs), begun)
        self._visits[bucket] = visit

    def fetch_gradients(self, bucket: Bucket, gradients: LeavingGradients) -> None:
        """Start to fetch a bucket's offloaded gradients, unless that was started before."""
        if bucket in self._gradients:
            return
        there = {
            piece: gpu_like(piece.of(trained.like), trained.leaf.device, gradients.dtype(trained))
            for piece in bucket.pieces
            if (trained := piece.trained) in gradients
        }
        self._gradients[bucket] = there, gradients.bring(there)

    @torch.no_grad()
    def step(
        self,
        bucket: Bucket,
        gradients: Mapping[Trained, Tensor],
        groups: Sequence[Group],
        coefficient: Tensor | None,
    ) -> None:
        """Step a fetched bucket with its fetched gradients and with the given ones."""
        visit = self._visits.pop(bucket)
        came, copy = self._gradients.pop(bucket, ({}, DoneCopy()))
        visit.copy.wait()
        copy.wait()
        given = {p: p.of(gradients[p.trained]) for p in bucket.pieces if p.trained in gradients}
        given |= came
        if self._inside:
            for brought in self._bring_weights(visit, given):
                brought.wait()
        stepped: dict[Piece, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        sent: list[Copy] = []
        for group, pieces in _by_group(given):
            dtypes = [piece.trained.owned.dtype for piece in pieces]
            scaled = [
                given.pop(piece).to(dtype) for piece, dtype in zip(pieces, dtypes, strict=True)
            ]
            scale(scaled, coefficient)
            # Fetched masters or weights, or the resident tensor, which is the owned one.
            tensors = [
                visit.stepped[piece] if piece in visit.stepped else piece.apart(piece.trained.owned)
                for piece in pieces
            ]
            for tensor, gradient in zip(tensors, scaled, strict=True):
                tensor.grad = gradient
            before = [{**self._parts.state.resident(p), **visit.state.pop(p)} for p in pieces]
            after = self._twin.step(groups[group], tensors, before)
            del before
            for piece, tensor, state in zip(pieces, tensors, after, strict=True):
                tensor.grad = None
                stepped[piece] = tensor
                for name, target in self._parts.state.store(piece, state).items():
                    pairs.append((state[name], target))
                sent += self._parts.state.to_disk(piece, {**state, MASTER: tensor})
        self._leaving.append(_together(self._leave(stepped, pairs), sent))

    def _bring_weights(self, visit: _Visit, pieces: Iterable[Piece]) -> list[Copy]:
        """Start to fetch the disk weights that have no master."""
        cold = [piece for piece in pieces if _steps_disk_weights(piece)]
        if not cold:
            return []
        bring = self._parts.away_weights.bring
        return [bring(piece.trained.leaf, piece.start, visit.stepped[piece]) for piece in cold]

    def _leave(self, stepped: Mapping[Piece, Tensor], state: Pairs) -> Copy:
        """Write stepped tensors back to where they belong."""
        pairs, reads, sent = list(state), [], []
        away: dict[Piece, Tensor] = {}
        for piece, tensor in stepped.items():
            trained = piece.trained
            if trained.has_master:
                if (master := self._parts.masters.get(trained)) is not None:
                    pairs.append((tensor, piece.of(master)))
                if trained.away is None:
                    piece.of(trained.leaf).copy_(tensor)
                self._parts.rounded(trained.owned)
            if trained.away is not None:
                away[piece] = tensor.to(trained.leaf.dtype)
                if trained.cuts:
                    sent.append(
                        self._parts.away_weights.send(trained.leaf, piece.start, away[piece])
                    )
                else:
                    pairs.append((away[piece], piece.of(trained.away)))
                    reads += self._parts.away_weights.before_write(trained.leaf)
        copy: Copy = DoneCopy()
        if pairs:
            copy = self._last_copy = self._link.to_host_all(pairs, reads)
        for piece, rounded in away.items():
            # This copy also implies all earlier ones; the disk keeps its own order.
            after = [copy] if not piece.trained.cuts else []
            self._parts.away_weights.written(piece.trained.leaf, after)
            self._parts.away_weights.put(piece.trained.leaf, piece.of, rounded)
        return _together(copy, sent)

    def _home(self, trained: Trained) -> Tensor | None:
        """The stepped tensor of a parameter in host memory, its master or its weights, if any."""
        if trained.has_master:
            return self._parts.masters.get(trained)
        return trained.away if not trained.cuts else None

    def release(self, most: int = 0) -> None:
        """Wait for the buckets on their way to the host, except the last `most`."""
        while len(self._leaving) > most:
            self._leaving.popleft().wait()

    def drop(self) -> None:
        """Drop what was fetched and not stepped; the host still has it."""
        coming = [copy for _, copy in self._gradients.values()]
        coming += [visit.copy for visit in self._visits.values()]
        for copy in coming:
            with contextlib.suppress(OomphError):  # the next fetch of it will raise again
                copy.wait()
        self._visits.clear()
        self._gradients.clear()

    def settle(self) -> None:
        """Free all GPU memory and finish all copies, so that the host may read the state."""
        self.drop()
        self.release()
        if self._last_copy is not None:  # implies all earlier copies
            self._last_copy.finish()
            self._last_copy = None
        self._parts.state.finish()
        if self._parts.weights is not None:
            self._parts.weights.finish_puts()


def _steps_disk_weights(piece: Piece) -> bool:
    return bool(piece.trained.cuts) and not piece.trained.has_master


def _together(copy: Copy, others: list[Copy]) -> Copy:
    return Copies([copy, *others]) if others else copy


def scale(gradients: Sequence[Tensor], coefficient: Tensor | None) -> None:
    """Multiply gradients in place, by the op that `clip_grad_norm_` would use."""
    if coefficient is None or not gradients:
        return
    if has_foreach(list(gradients), gradients[0].device):
        for _, same in itertools.groupby(gradients, key=lambda gradient: gradient.dtype):
            foreach_mul_(list(same), coefficient)
    else:
        for gradient in gradients:
            gradient.mul_(coefficient)


def _by_group(given: Mapping[Piece, Tensor]) -> list[tuple[int, list[Piece]]]:
    groups: dict[int, list[Piece]] = {}
    for piece in given:
        groups.setdefault(piece.trained.group, []).append(piece)
    return list(groups.items())
