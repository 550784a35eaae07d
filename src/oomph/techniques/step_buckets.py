"""Parameters in the order in which they are stepped, in buckets of about one size.

A parameter that is larger than a bucket is cut into pieces, where the optimizer looks at each
element by itself: what a step has on the GPU at once is then a matter of buckets alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

#: Bytes: smaller ones keep the host too busy to begin copies and steps.
LARGEST_BUCKET = 64 << 20
#: Pieces begin at multiples of so many elements, where vectors of any kernel begin as well.
_ALIGNED = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A parameter of the model, and what the optimizer has for it: itself, or its master."""

    leaf: Tensor
    owned: Tensor
    group: int
    """Which of the optimizer's groups it is in."""
    away: Tensor | None = None
    """The weights themselves, where they are on the host and the leaf shows none of them; a tensor
    without numbers where they are on the disk."""
    cuts: tuple[range, ...] = ()
    """Where its weights are on the disk: the elements of each of their pieces there, which are
    stepped one by one."""

    @property
    def like(self) -> Tensor:
        """A tensor of its shape and type that lies in memory as it does."""
        return self.leaf if self.away is None else self.away

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps another tensor than the model computes with."""
        return self.owned is not self.leaf


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A parameter, or some of its elements."""

    trained: Trained
    start: int
    stop: int
    is_whole: bool
    is_last: bool
    """Whether it is the last piece of its parameter."""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that has the parameter's shape, without history.

        Where that is all of it, the tensor itself: there are many pieces.
        """
        plain = tensor.detach() if tensor.requires_grad else tensor
        if self.is_whole:
            return plain
        if tensor.is_contiguous():  # one op in place of two
            start = tensor.storage_offset() + self.start
            return plain.as_strided((self.numel,), (1,), start)
        return plain.reshape(-1)[self.start : self.stop]

    def cut(self, most: int) -> tuple[Piece, ...]:
        """The same in parts of at most so many elements, or whole where it lies in no one row."""
        step = max(most // _ALIGNED * _ALIGNED, _ALIGNED)
        if self.numel <= step or not self.trained.like.is_contiguous():
            return (self,)
        return tuple(
            Piece(
                trained=self.trained,
                start=start,
                stop=min(start + step, self.stop),
                is_whole=False,
                is_last=self.is_last and start + step >= self.stop,
            )
            for start in range(self.start, self.stop, step)
        )

    def apart(self, tensor: Tensor) -> Tensor:
        """The same as a tensor of its own, which may have another gradient."""
        piece = self.of(tensor)
        return piece.detach() if piece is tensor else piece


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Pieces that are fetched and stepped together."""

    pieces: tuple[Piece, ...]

    @property
    def parameters(self) -> list[Trained]:
        """The parameters it has pieces of, each once."""
        return list(dict.fromkeys(piece.trained for piece in self.pieces))


def whole(trained: Trained) -> Piece:
    """A parameter as one piece."""
    count = trained.leaf.numel()
    return Piece(trained=trained, start=0, stop=count, is_whole=True, is_last=True)


def bucket_bytes(weights: int) -> int:
    """A size of bucket for so many bytes of weights: enough for the link, little beside all."""
    return min(max(weights // 64, 1 << 20), LARGEST_BUCKET)


def make_buckets(
    parameters: Iterable[Trained], nbytes: int, *, may_cut: bool = True
) -> list[Bucket]:
    """Cut parameters, in their order, into buckets of at most `nbytes` of what is stepped."""
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    room = nbytes
    for trained in parameters:
        size = trained.owned.element_size()
        for piece in pieces_of(trained, nbytes, may_cut=may_cut):
            if pieces and piece.numel * size > room:
                buckets.append(Bucket(pieces=tuple(pieces)))
                pieces, room = [], nbytes
            pieces.append(piece)
            room -= piece.numel * size
    if pieces:
        buckets.append(Bucket(pieces=tuple(pieces)))
    return buckets


def last_of(buckets: Sequence[Bucket]) -> dict[Trained, int]:
    """By parameter: the last bucket that has a piece of it."""
    return {piece.trained: at for at, bucket in enumerate(buckets) for piece in bucket.pieces}


def pieces_of(trained: Trained, nbytes: int, *, may_cut: bool = True) -> list[Piece]:
    """A parameter in pieces of at most `nbytes`, or whole where it may not be cut."""
    size = trained.owned.element_size()
    cuts = trained.cuts or cuts_of(trained.like, size, nbytes, may_cut=may_cut)
    return [
        Piece(
            trained=trained,
            start=elements.start,
            stop=elements.stop,
            is_whole=len(cuts) == 1,
            is_last=elements is cuts[-1],
        )
        for elements in cuts
    ]


def cuts_of(
    parameter: Tensor, size: int, nbytes: int, *, may_cut: bool = True
) -> tuple[range, ...]:
    """The elements of each piece of a parameter, whose elements are stepped as `size` bytes."""
    most, count = nbytes // size, parameter.numel()
    step = max(most // _ALIGNED * _ALIGNED, _ALIGNED)
    if not may_cut or count <= max(most, step) or not parameter.is_contiguous():
        return (range(count),)
    return tuple(range(start, min(start + step, count)) for start in range(0, count, step))
