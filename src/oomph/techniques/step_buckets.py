"""Parameters in the order in which they are stepped, in buckets of about equal size.

If the optimizer is elementwise, a parameter that is larger than a bucket is cut into pieces. The
GPU memory of a step then depends only on the bucket size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

#: In bytes. With smaller buckets, launching copies and steps keeps the host too busy.
LARGEST_BUCKET = 64 << 20
#: Pieces begin at multiples of this many elements, which suits the vector loads of any kernel.
_ALIGNED = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A parameter of the model, and the tensor that the optimizer steps: itself or its master."""

    leaf: Tensor
    owned: Tensor
    group: int
    """The index of its optimizer group."""
    away: Tensor | None = None
    """For offloaded weights, whose leaf holds a placeholder: the weights on the host, or a tensor
    without data if they are on disk."""
    cuts: tuple[range, ...] = ()
    """For weights on disk: the elements of each of their pieces there, which are stepped one by
    one."""

    @property
    def like(self) -> Tensor:
        """A tensor with its shape, dtype and strides."""
        return self.leaf if self.away is None else self.away

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps a different tensor from the one the model computes with."""
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
        """The number of elements."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that has the parameter's shape, detached.

        For a whole parameter it is the tensor itself, if possible: views of many pieces take time.
        """
        plain = tensor.detach() if tensor.requires_grad else tensor
        if self.is_whole:
            return plain
        if tensor.is_contiguous():  # one op instead of two
            start = tensor.storage_offset() + self.start
            return plain.as_strided((self.numel,), (1,), start)
        return plain.reshape(-1)[self.start : self.stop]

    def cut(self, most: int) -> tuple[Piece, ...]:
        """Cut it into pieces of at most `most` elements; a non-contiguous one stays whole."""
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
        """This piece of a tensor as a new tensor object, which may have a gradient of its own."""
        piece = self.of(tensor)
        return piece.detach() if piece is tensor else piece


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Pieces that are fetched and stepped together."""

    pieces: tuple[Piece, ...]

    @property
    def parameters(self) -> list[Trained]:
        """The parameters of its pieces, each once."""
        return list(dict.fromkeys(piece.trained for piece in self.pieces))


def whole(trained: Trained) -> Piece:
    """A parameter as one piece."""
    count = trained.leaf.numel()
    return Piece(trained=trained, start=0, stop=count, is_whole=True, is_last=True)


def bucket_bytes(weights: int) -> int:
    """A bucket size for this many bytes of weights: efficient to copy, small against the total."""
    return min(max(weights // 64, 1 << 20), LARGEST_BUCKET)


def make_buckets(
    parameters: Iterable[Trained], nbytes: int, *, may_cut: bool = True
) -> list[Bucket]:
    """Cut parameters, in their order, into buckets of at most `nbytes` of stepped tensors."""
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
    """The index of the last bucket that has a piece of each parameter."""
    return {piece.trained: at for at, bucket in enumerate(buckets) for piece in bucket.pieces}


def pieces_of(trained: Trained, nbytes: int, *, may_cut: bool = True) -> list[Piece]:
    """Cut a parameter into pieces of at most `nbytes`, or keep it whole where it may not be cut."""
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
    """The elements of each piece of a parameter; each stepped element has `size` bytes."""
    most, count = nbytes // size, parameter.numel()
    step = max(most // _ALIGNED * _ALIGNED, _ALIGNED)
    if not may_cut or count <= max(most, step) or not parameter.is_contiguous():
        return (range(count),)
    return tuple(range(start, min(start + step, count)) for start in range(0, count, step))
