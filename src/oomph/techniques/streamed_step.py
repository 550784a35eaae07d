"""Steps on the GPU with state that lives on the host: it comes in, is stepped, and leaves again.

While one bucket is stepped the next ones come in and the last ones leave; nothing of this has the
host wait. The memory of a bucket that left is used again by one that comes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._foreach_utils import _has_foreach_support

from oomph.errors import OomphError
from oomph.host.link import Copies, Copy, DoneCopy, Pairs
from oomph.techniques.disk_state import MASTER
from oomph.techniques.host_tensors import gpu_like
from oomph.techniques.leaving_gradients import LeavingGradients
from oomph.techniques.optimizer_twin import Group, OptimizerTwin
from oomph.techniques.step_buckets import Bucket, Piece, Trained
from oomph.techniques.step_parts import StepParts


@dataclass(slots=True, kw_only=True)
class _Visit:
    """What came to the GPU for a bucket."""

    state: dict[Piece, dict[str, Tensor]] = field(default_factory=dict)
    stepped: dict[Piece, Tensor] = field(default_factory=dict)
    """Masters, and weights that are on the host or on the disk themselves."""
    copy: Copy = field(default_factory=DoneCopy)


class StreamedStep:
    """Steps buckets on the GPU; what was stepped of weights on the host goes back there.

    Where steps are made `inside` backward, weights of the disk are there already with their block.
    """

    def __init__(self, parts: StepParts, *, inside: bool = False) -> None:
        self._parts = parts
        self._inside = inside
        self._link = parts.link
        self._twin = OptimizerTwin(parts.optimizer)
        self._visits: dict[Bucket, _Visit] = {}
        self._gradients: dict[Bucket, tuple[dict[Piece, Tensor], Copy]] = {}
        #: By bucket that was stepped: the copy of what is leaving.
        self._leaving: deque[Copy] = deque()
        self._last_copy: Copy | None = None

    def fetch(self, bucket: Bucket) -> None:
        """Begin to bring a bucket's state to the GPU, if nobody did yet."""
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
            elif _steps_cold_weights(piece):
                visit.stepped[piece] = gpu_like(piece.of(piece.trained.like), device)
            from_disk[piece] = self._parts.state.room_from_disk(piece, device)
            visit.state[piece] |= from_disk[piece]
            if MASTER in visit.state[piece]:
                visit.stepped[piece] = visit.state[piece].pop(MASTER)
        # All memory is there: from here on nothing can fail with copies under way.
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
        """Begin to bring those of its gradients that left, if nobody did yet."""
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
        """Step a fetched bucket: by the gradients that came with it, and by these."""
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
            # Masters and weights that came, or those that are here: the owned one is the master.
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
        """Begin to bring what is on the disk of weights that are stepped themselves."""
        cold = [piece for piece in pieces if _steps_cold_weights(piece)]
        if not cold:
            return []
        bring = self._parts.away_weights.bring
        return [bring(piece.trained.leaf, piece.start, visit.stepped[piece]) for piece in cold]

    def _leave(self, stepped: Mapping[Piece, Tensor], state: Pairs) -> Copy:
        """Put what was stepped where it belongs."""
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
            # And all before it; what is on the disk keeps its own order.
            after = [copy] if not piece.trained.cuts else []
            self._parts.away_weights.written(piece.trained.leaf, after)
            self._parts.away_weights.put(piece.trained.leaf, piece.of, rounded)
        return _together(copy, sent)

    def _home(self, trained: Trained) -> Tensor | None:
        """What of a parameter is in host memory and is stepped: its master, or its weights."""
        if trained.has_master:
            return self._parts.masters.get(trained)
        return trained.away if not trained.cuts else None

    def release(self, most: int = 0) -> None:
        """Wait for the buckets on their way to the host, but for the last `most`."""
        while len(self._leaving) > most:
            self._leaving.popleft().wait()

    def drop(self) -> None:
        """Forget what came in and was not stepped; it is on the host all the same."""
        coming = [copy for _, copy in self._gradients.values()]
        coming += [visit.copy for visit in self._visits.values()]
        for copy in coming:
            with contextlib.suppress(OomphError):  # whoever needs it hears of it when it comes
                copy.wait()
        self._visits.clear()
        self._gradients.clear()

    def settle(self) -> None:
        """Nothing of it is on the GPU any more; the host may read its state from here on."""
        self.drop()
        self.release()
        if self._last_copy is not None:  # and with it all before it
            self._last_copy.finish()
            self._last_copy = None
        self._parts.state.finish()
        if self._parts.weights is not None:
            self._parts.weights.finish_puts()


def _steps_cold_weights(piece: Piece) -> bool:
    return bool(piece.trained.cuts) and not piece.trained.has_master


def _together(copy: Copy, others: list[Copy]) -> Copy:
    return Copies([copy, *others]) if others else copy


def scale(gradients: Sequence[Tensor], coefficient: Tensor | None) -> None:
    """Multiply gradients in place, by the op that `clip_grad_norm_` would use."""
    if coefficient is None or not gradients:
        return
    if _has_foreach_support(list(gradients), gradients[0].device):
        for _, same in itertools.groupby(gradients, key=lambda gradient: gradient.dtype):
            torch._foreach_mul_(list(same), coefficient)
    else:
        for gradient in gradients:
            gradient.mul_(coefficient)


def _by_group(given: Mapping[Piece, Tensor]) -> list[tuple[int, list[Piece]]]:
    groups: dict[int, list[Piece]] = {}
    for piece in given:
        groups.setdefault(piece.trained.group, []).append(piece)
    return list(groups.items())
