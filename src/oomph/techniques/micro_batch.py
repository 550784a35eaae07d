"""Micro-batches: parts of a batch, weighed so that their losses add up to the loss of the whole.

A loss that averages over tokens averages over a different number of them in each part. The mean of
such means is not the mean (rule 6), and a part without any valid token has none. So while a part's
loss is computed, a mean over class targets becomes their sum divided by the number of valid targets
in the *whole* batch. That number must be known before the first part's backward; it is counted in
the batch itself, by a rule that is found by trying on the first batch and held to account on every
one after it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path

from oomph.errors import BadInput

Count = Callable[[Any], Tensor]

_SIGNATURES = {f: inspect.signature(f) for f in (F.cross_entropy, F.nll_loss)}


class Weigher:
    """Counts what the loss averages over, in a batch and in its parts."""

    def __init__(self, count: Count | None = None) -> None:
        self._count = count
        self._given = count is not None
        self._total: Tensor | None = None
        #: Valid targets seen in the parts of this batch, and in the batch before it.
        self._seen: list[Tensor] = []
        self._owed: Tensor | None = None
        self._batch: Any = None

    def begin(self, batch: Any) -> None:
        """Count the whole batch; complain if the last one did not add up."""
        self._settle()
        self._batch = batch
        self._total = self._count(batch) if self._count is not None else None
        self._seen = []

    @contextlib.contextmanager
    def weighing(self, part: Any, share: float) -> Iterator[None]:
        """While active, means over targets are shares of the whole batch's mean.

        The caller multiplies the loss by `share`, the part's share of samples, which is right for
        every other term; here that factor is taken out again.
        """
        with _Means(self, part, share):
            yield

    def scale(self, part: Any, target: Tensor, ignored: int) -> Tensor:
        """What a sum over this part's valid targets is to be divided by."""
        valid = (target != ignored).sum()
        if self._count is None:
            self._count = _find_count(part, valid, ignored)
            self._total = self._count(self._batch)
        assert self._total is not None
        self._seen.append(valid)
        return self._total

    def _settle(self) -> None:
        """Compare what the rule counted with what the parts held: a step ago, so nobody waits."""
        if self._owed is not None and bool(self._owed != 0):
            raise BadInput(
                "the loss averages over a number of targets that oomph counted wrongly in the last"
                " batch; give the job `items=lambda batch: …` that counts them"
            )
        self._owed = None
        if self._seen and not self._given and self._total is not None:
            self._owed = torch.stack(self._seen).sum() - self._total


class _Means(TorchFunctionMode):
    """Turns a mean over class targets into the part's share of the whole batch's mean."""

    def __init__(self, weigher: Weigher, part: Any, share: float) -> None:
        super().__init__()
        self._weigher = weigher
        self._part = part
        self._share = share

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            call = _SIGNATURES[func].bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            target = given["target"]
            if given["reduction"] == "mean" and not target.is_floating_point():
                return self._sum_over_total(func, given, target)
        return func(*args, **kwargs)

    def _sum_over_total(self, func: Any, given: dict[str, Any], target: Tensor) -> Tensor:
        if given["weight"] is not None or given.get("label_smoothing"):
            raise BadInput(
                "a loss with class weights or label smoothing averages over weights, which oomph"
                " does not split into micro-batches; keep the batch whole, or let the loss sum"
            )
        legacy = ("size_average", "reduce")
        options = {name: value for name, value in given.items() if name not in legacy}
        total = self._weigher.scale(self._part, target, given["ignore_index"])
        summed: Tensor = func(**{**options, "reduction": "sum"})
        return summed / (total * self._share)


def _find_count(part: Any, valid: Tensor, ignored: int) -> Count:
    """The rule by which the batch's own tensors give the number of valid targets."""
    wanted = int(valid)
    for path, leaf in _likely_targets(part):
        for shift in (0, 1):
            if int(_valid(leaf, shift, ignored)) == wanted:
                return functools.partial(_count_at, path, shift, ignored)
    raise BadInput(
        "oomph cannot tell from the batch how many targets the loss averages over, so it cannot"
        " weigh micro-batches; give the job `items=lambda batch: …` that counts them"
    )


def _likely_targets(part: Any) -> list[tuple[Any, Tensor]]:
    """Whole numbers in the batch: those called labels or targets first, then from the last on."""
    leaves = [
        (path, leaf)
        for path, leaf in reversed(tree_flatten_with_path(part)[0])
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    ]
    return sorted(leaves, key=lambda at: not re.search("label|target", str(at[0]), re.IGNORECASE))


def _count_at(path: Any, shift: int, ignored: int, batch: Any) -> Tensor:
    return _valid(dict(tree_flatten_with_path(batch)[0])[path], shift, ignored)


def _valid(targets: Tensor, shift: int, ignored: int) -> Tensor:
    """How many are not to be ignored; a causal model has no use for each sequence's first."""
    shifted = targets[..., 1:] if shift and targets.dim() > 1 else targets
    return (shifted != ignored).sum()


def why_whole(model: nn.Module) -> str:
    """Why a batch of this model must not be split; empty where it may."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return (
                f"{path} ({type(module).__name__}) averages over the batch it sees: in parts its"
                " outputs and statistics would be others"
            )
    return ""
