"""Micro-batches: parts of a batch, weighed so that their losses add up to the loss of the whole.

A loss that averages over tokens averages over a different number of them in each part. The mean of
such means is not the mean (rule 6), and a part without any valid token has none. So while a part's
loss is computed, a mean over class targets becomes their sum divided by the number of valid targets
in the *whole* batch. That number must be known before the first part's backward; it is counted in
the batch itself, by a rule that finds the first part's targets among its tensors and is held to
account on every batch. Everything else in a loss counts by samples; where there is anything else,
it is tried on two samples whether that adds up.

A job that says itself what its loss averages over (`Job.items`) is believed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path

from oomph.errors import BadInput, OomphError
from oomph.job import batch_size, split_batch

Count = Callable[[Any], Tensor]

#: Functions that average over class targets, but for ignored ones; not every torch has the last.
_SIGNATURES = {
    function: inspect.signature(function)
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if (function := getattr(F, name, None)) is not None
}
#: Their older ways to ask for something else than a mean.
_LEGACY = ("size_average", "reduce")
#: What they ignore where nothing is named.
_IGNORED = -100

ADVICE = (
    "give the job `items=lambda batch: …` that counts what its loss averages over (1 for a sum), or"
    " `whole_batch=True` where it compares samples with each other"
)


@dataclass(frozen=True, kw_only=True)
class _Mean:
    """One mean over class targets, in the loss of one part."""

    number: int
    """In the order of the loss's means."""
    part: Any
    target: Tensor
    ignored: int

    def count(self) -> Tensor:
        return (self.target != self.ignored).sum()


class Weigher:
    """Weighs the losses of a batch's parts, one batch after the other."""

    def __init__(self, items: Count | None = None) -> None:
        #: Whether parts are known to add up: by what they are, by trial, or by the job's word.
        self.trusted = items is not None
        self._items = items
        self._batch: Any = None
        #: By a mean's number: how its targets are counted, how many the batch has, and how many
        #: its parts had so far.
        self._rules: dict[int, Count] = {}
        self._totals: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor] = {}
        #: What the last batch's parts had more than was counted; nothing, if the rules are right.
        self._owed: list[Tensor] = []
        self._searched = False

    def begin(self, batch: Any) -> None:
        """The parts that follow are those of `batch`; complain if the last one did not add up."""
        self._settle()
        self._batch, self._totals, self._seen, self._searched = batch, {}, {}, False

    def weigh(self, part: Any, share: float, compute_loss: Callable[[], Tensor]) -> Tensor:
        """What a part, with this share of the samples, adds to the loss of the batch."""
        means = _Means(self, part, share)
        with means:
            loss = compute_loss()
        # A mean over targets adds up; of what else may be in a loss nobody can tell by looking.
        self.trusted = self.trusted or any(loss is mean for mean in means.results)
        if self._items is None:
            return loss * share
        return loss * (_number(self._items(part)) / _number(self._items(self._batch)))

    def finish(self) -> None:
        """All parts of the batch were weighed."""
        self._owed = [self._seen[number] - total for number, total in self._totals.items()]
        self._batch = None
        if self._searched:
            self._settle()  # not a step later, when nobody would wait: the rules are new

    def counted(self) -> Tensor | None:
        """The targets that the first mean of the batch's loss averaged over; None without one."""
        return self._seen.get(0)

    @property
    def asks_the_job(self) -> bool:
        """Whether it is the job that counts what its loss averages over."""
        return self._items is not None

    def totals(self) -> dict[int, Tensor]:
        """By a mean's number: the targets in the batch, where a rule tells."""
        for number, rule in self._rules.items():
            if number not in self._totals:
                self._totals[number] = rule(self._batch)
        return self._totals

    @contextlib.contextmanager
    def apart(self, totals: dict[int, Tensor]) -> Iterator[dict[int, Tensor]]:
        """What is weighed inside is so by these totals, and counted in what this gives."""
        kept = self._totals, self._seen
        self._totals, self._seen = totals, {}
        try:
            yield self._seen
        finally:
            self._totals, self._seen = kept

    def see(self, counts: dict[int, Tensor]) -> None:
        """A part was weighed elsewhere, and had so many targets."""
        for number, count in counts.items():
            self._seen[number] = self._seen.get(number, 0) + count

    def divide(self, summed: Tensor, mean: _Mean, share: float) -> Tensor:
        """The sum over a part's targets, as what `weigh` makes its share of the batch's mean."""
        valid = mean.count()
        if self._items is not None:
            return summed / valid.clamp(min=1)  # the part's mean; 0 where it has no target
        self._seen[mean.number] = self._seen.get(mean.number, 0) + valid
        if mean.number not in self._totals:
            rule = self._rules.get(mean.number)
            if rule is None:
                return summed / self._search(mean) / share
            self._totals[mean.number] = rule(self._batch)
        return summed / self._totals[mean.number] / share

    def refuse_class_weights(self) -> None:
        """Complain of a mean that is one over the weights of targets, unless the job counts."""
        if self._items is None:
            raise BadInput(
                "a loss with class weights averages over the weights of its targets, which oomph"
                " does not count by itself: give the job `items=lambda batch: …` that sums them"
            )

    def _settle(self) -> None:
        owed, self._owed = self._owed, []
        if any(map(bool, owed)):
            self._rules = {}
            raise BadInput(
                "the loss averaged over another number of targets than oomph had counted in the"
                f" batch; {ADVICE}"
            )

    def _search(self, mean: _Mean) -> Tensor:
        """The targets in the batch, by all rules that are true of this part."""
        self._searched = True
        rules = _find_rules(mean)
        totals = [rule(self._batch) for rule in rules]
        if not mean.count():
            return max(totals)  # any number does for a sum of nothing: the next part tells more
        if any(bool(total != totals[0]) for total in totals):
            raise _cannot_tell()
        if len(rules) == 1:
            self._rules[mean.number] = rules[0]
        self._totals[mean.number] = totals[0]
        return totals[0]


class _MeansOverTargets(TorchFunctionMode):
    """Sees every mean over class targets that is computed inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SIGNATURES:
            call = _SIGNATURES[func].bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            asked = [given.pop(name, None) for name in _LEGACY]
            classes = not given["target"].is_floating_point()
            if given["reduction"] == "mean" and asked == [None, None] and classes:
                return self.mean(func, given)
        return func(*args, **kwargs)

    def mean(self, func: Any, given: dict[str, Any]) -> Tensor:
        """What becomes of a mean: this function with these arguments."""
        raise NotImplementedError


class _Means(_MeansOverTargets):
    """Turns means over class targets into the part's share of the whole batch's mean."""

    def __init__(self, weigher: Weigher, part: Any, share: float) -> None:
        super().__init__()
        self.results: list[Tensor] = []
        self._weigher = weigher
        self._part = part
        self._share = share

    def mean(self, func: Any, given: dict[str, Any]) -> Tensor:
        if given["weight"] is not None:
            self._weigher.refuse_class_weights()
            return func(**given)  # type: ignore[no-any-return]
        mean = _Mean(
            number=len(self.results),
            part=self._part,
            target=given["target"],
            ignored=_ignored(given),
        )
        summed: Tensor = func(**{**given, "reduction": "sum"})
        self.results.append(self._weigher.divide(summed, mean, self._share))
        return self.results[-1]


def _ignored(given: dict[str, Any]) -> int:
    ignored: int | None = given["ignore_index"]
    return _IGNORED if ignored is None else ignored


class _Counted(_MeansOverTargets):
    """Counts what means over class targets average over, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Tensor] = []

    def mean(self, func: Any, given: dict[str, Any]) -> Tensor:
        target, weight = given["target"], given["weight"]
        valid = target != _ignored(given)
        self.counts.append(valid.sum() if weight is None else weight[target[valid]].sum())
        return func(**given)  # type: ignore[no-any-return]


def count_targets(compute_loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """A loss, and what its first mean over class targets averages over; None without one."""
    with _Counted() as counted:
        loss = compute_loss()
    return loss, counted.counts[0] if counted.counts else None


# -- where targets come from -----------------------------------------------------------------------


def _find_rules(mean: _Mean) -> list[Count]:
    """Ways to count in a batch that are true of this mean's targets in its part.

    The part may lie elsewhere than its targets: a loss may move them, as an evaluation does.
    """
    targets = mean.target.flatten()
    for only_valid in (False, True):
        for path, leaf in _likely_targets(mean.part):
            rules: list[Count] = [
                functools.partial(_count_at, path, shift, mean.ignored)
                for shift in (0, 1)
                if any(
                    _alike(form.flatten(), targets, mean.ignored, only_valid)
                    for form in _forms(leaf.to(targets.device), shift, mean.ignored)
                )
            ]
            if rules:
                return rules
    raise _cannot_tell()


def _likely_targets(part: Any) -> list[tuple[Any, Tensor]]:
    """Whole numbers in the batch: those called labels or targets first, then from the last on."""
    leaves = [
        (path, leaf.long())
        for path, leaf in reversed(tree_flatten_with_path(part)[0])
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    ]
    return sorted(leaves, key=lambda at: not re.search("label|target", str(at[0]), re.IGNORECASE))


def _forms(labels: Tensor, shift: int, ignored: int) -> list[Tensor]:
    """What a loss may make of labels: a causal model has no use for each sequence's first."""
    if not shift:
        return [labels]
    shifted = labels[..., 1:]
    return [shifted, F.pad(shifted, (0, 1), value=ignored)] if labels.dim() > 1 else []


def _alike(one: Tensor, other: Tensor, ignored: int, only_valid: bool) -> bool:
    if only_valid:
        one, other = one[one != ignored], other[other != ignored]
    return torch.equal(one, other)


def _count_at(path: Any, shift: int, ignored: int, batch: Any) -> Tensor:
    labels = dict(tree_flatten_with_path(batch)[0])[path].long()
    return (_forms(labels, shift, ignored)[0] != ignored).sum()


def _cannot_tell() -> BadInput:
    return BadInput(
        "oomph cannot tell from the batch how many targets the loss averages over, so it cannot"
        f" weigh micro-batches; {ADVICE}"
    )


def _number(count: Any) -> Tensor:
    return torch.as_tensor(count).double()


# -- what must stay whole --------------------------------------------------------------------------


def check_parts(
    model: nn.Module, batch: Any, compute_loss: Callable[[Any], Tensor], tolerance: float
) -> None:
    """Refuse a loss that its parts do not add up to, by trying it on two samples (rule 6).

    It is tried in evaluation, without dropout, and leaves all random streams where they were. A
    loss that draws random numbers even so, or fails outside training, cannot be tried. One that
    fails with a sample alone is tried on two pairs.
    """
    failed = None
    for size, words in ((1, "two samples is"), (2, "four samples is")):
        if failed is not None and batch_size(batch) < 2 * size:
            break
        found = _try_parts(model, batch, compute_loss, size)
        if isinstance(found, Exception):
            failed = found
            continue
        if found is None:
            return
        whole, parts = found
        if math.isfinite(whole) and not math.isclose(whole, parts, rel_tol=tolerance, abs_tol=1e-6):
            raise BadInput(
                f"the loss of {words} {whole:.6g}, but {parts:.6g} if each part of {size} is"
                f" computed alone, so oomph cannot weigh micro-batches; {ADVICE}"
            )
        return
    reason = f"{type(failed).__name__}: {failed}".split("\n")[0]
    raise BadInput(
        f"the loss takes no parts of a batch ({reason}); give the job `whole_batch=True`"
    ) from failed


def _try_parts(
    model: nn.Module, batch: Any, compute_loss: Callable[[Any], Tensor], size: int
) -> tuple[float, float] | Exception | None:
    """The loss of two parts of this size at once, and one by one; or what a part failed with.

    None where neither can be told.
    """
    both, parts = split_batch(batch, 2 * size)[0], split_batch(batch, size)[:2]
    weigher = Weigher()
    weigher.begin(both)
    # Nothing is compiled for shapes that do not come again.
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        in_evaluation(model),
        _random_streams(model) as was_drawn_from,
    ):
        try:
            whole = float(compute_loss(both))
        except OomphError:
            raise
        except Exception:  # out of memory too: two samples may be more than a part has
            return None
        try:
            computes = [functools.partial(compute_loss, part) for part in parts]
            weighed = [
                float(weigher.weigh(part, 0.5, compute))
                for part, compute in zip(parts, computes, strict=True)
            ]
        except OomphError:
            raise
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            return error
        return None if was_drawn_from() else (whole, sum(weighed))


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """The whole model evaluates; afterwards each part of it trains that did before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _random_streams(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Puts random streams back; says whether one was drawn from."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}

    def look() -> list[Any]:
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        _, key, position, *_ = np.random.get_state()
        return [*(state.tolist() for state in states), random.getstate(), list(key), position]

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        before = look()
        try:
            yield lambda: look() != before
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def why_whole(model: nn.Module) -> str:
    """Why a batch of this model must not be split; empty where it may."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return (
                f"{path} ({type(module).__name__}) averages over the batch it sees: in parts its"
                " outputs and statistics would be others"
            )
    return ""
