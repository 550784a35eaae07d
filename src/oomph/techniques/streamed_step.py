"""Steps on the GPU with state that lives on the host: it comes in, is stepped, and leaves again.

While one bucket is stepped the next ones come in and the last ones leave; nothing of this has the
host wait. The memory of a bucket that left is used again by one that comes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._foreach_utils import _has_foreach_support

from oomph.host.link import Copy
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
    """Masters, and weights that are on the host themselves."""
    copies: list[Copy] = field(default_factory=list)


class StreamedStep:
    """Steps buckets on the GPU; what was stepped of weights on the host goes back there."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._link = parts.link
        self._twin = OptimizerTwin(parts.optimizer)
        self._visits: dict[Bucket, _Visit] = {}
        self._gradients: dict[Bucket, tuple[dict[Piece, Tensor], list[Copy]]] = {}
        #: By bucket that was stepped: the copies of what is leaving.
        self._leaving: deque[list[Copy]] = deque()
        self._last_copy: Copy | None = None

    def fetch(self, bucket: Bucket) -> None:
        """Begin to bring a bucket's state to the GPU, if nobody did yet."""
        if bucket in self._visits:
            return
        visit = _Visit()
        pairs: list[tuple[Tensor, Tensor]] = []
        for piece in bucket.pieces:
            device = piece.trained.leaf.device
            on_host = self._parts.state.tensors(piece)
            visit.state[piece] = {name: gpu_like(t, device) for name, t in on_host.items()}
            pairs += zip(on_host.values(), visit.state[piece].values(), strict=True)
            if (home := self._home(piece.trained)) is not None:
                visit.stepped[piece] = gpu_like(piece.of(home), device)
                pairs.append((piece.of(home), visit.stepped[piece]))
        # All memory is there: from here on nothing can fail with copies under way.
        visit.copies = [self._link.to_gpu(source, target) for source, target in pairs]
        self._visits[bucket] = visit

    def fetch_gradients(self, bucket: Bucket, gradients: LeavingGradients) -> None:
        """Begin to bring those of its gradients that are on the host, if nobody did yet."""
        if bucket in self._gradients:
            return
        there: dict[Piece, Tensor] = {}
        origins: list[tuple[Tensor, Copy]] = []
        for piece in bucket.pieces:
            if piece.trained in gradients:
                slot, copy = gradients.slot(piece.trained)
                origins.append((piece.of(slot), copy))
                there[piece] = gpu_like(origins[-1][0], piece.trained.leaf.device)
        copies = [
            self._link.to_gpu(source, target, after=[copy])
            for (source, copy), target in zip(origins, there.values(), strict=True)
        ]
        self._gradients[bucket] = there, copies

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
        came, copies = self._gradients.pop(bucket, ({}, []))
        for copy in (*visit.copies, *copies):
            copy.wait()
        given = {p: p.of(gradients[p.trained]) for p in bucket.pieces if p.trained in gradients}
        given |= came
        leaving: list[Copy] = []
        self._leaving.append(leaving)
        for group, pieces in _by_group(given):
            dtypes = [piece.trained.owned.dtype for piece in pieces]
            scaled = [
                given.pop(piece).to(dtype) for piece, dtype in zip(pieces, dtypes, strict=True)
            ]
            scale(scaled, coefficient)
            stepped = [
                visit.stepped[piece] if piece in visit.stepped else piece.of(piece.trained.leaf)
                for piece in pieces
            ]
            for tensor, gradient in zip(stepped, scaled, strict=True):
                tensor.grad = gradient
            before = [{**self._parts.state.scalars(p), **visit.state.pop(p)} for p in pieces]
            after = self._twin.step(groups[group], stepped, before)
            del before
            for piece, tensor, state in zip(pieces, stepped, after, strict=True):
                tensor.grad = None
                for name, target in self._parts.state.store(piece, state).items():
                    leaving.append(self._link.to_host(state[name], target))
                leaving += self._return(piece, tensor)
        if leaving:
            self._last_copy = leaving[-1]

    def _return(self, piece: Piece, stepped: Tensor) -> list[Copy]:
        """Put what was stepped where it belongs."""
        trained, copies = piece.trained, []
        if trained.has_master:
            copies.append(self._link.to_host(stepped, piece.of(self._parts.masters[trained])))
            if trained.away is None:
                piece.of(trained.leaf).copy_(stepped)
            self._parts.rounded(trained.owned)
        if trained.away is not None:
            assert self._parts.weights is not None
            weights = stepped.to(trained.leaf.dtype)
            reads = self._parts.weights.before_write(trained.leaf)
            copies.append(self._link.to_host(weights, piece.of(trained.away), reads))
            self._parts.weights.written(trained.leaf, copies[-1:])  # and all of this way before it
            self._parts.weights.put(trained.leaf, piece.of, weights)
        return copies

    def _home(self, trained: Trained) -> Tensor | None:
        """What of a parameter is on the host and is stepped: its master, or its weights."""
        return self._parts.masters.get(trained, trained.away)

    def release(self, most: int = 0) -> None:
        """Wait for the buckets on their way to the host, but for the last `most`."""
        while len(self._leaving) > most:
            for copy in self._leaving.popleft():
                copy.wait()

    def drop(self) -> None:
        """Forget what came in and was not stepped; it is on the host all the same."""
        fetched = [copies for _, copies in self._gradients.values()]
        fetched += [visit.copies for visit in self._visits.values()]
        for copy in itertools.chain(*fetched):
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
