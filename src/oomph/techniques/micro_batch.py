"""Micro-batches: parts of a batch, weighed so that their losses add up to the loss of the whole.

A loss that averages over tokens averages over a different number of them in each part. The mean of
such means is not the mean (rule 6), and a part without any valid token has no mean. So every number
that a loss counts in its batch is counted in the whole batch before the first part's backward, and
used in every part. The analysis of the job's forward graph found these numbers and the factors that
each part needs beside them (`LossSplit`); while a part runs, its calls are compared with those of
that graph.

If the job itself says what its loss averages over (`Job.normalizer`), that is used unchecked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.errors import BadInput
from oomph.jobs.job import as_long_as, batch_size, split_batch
from oomph.techniques.batch_calls import BatchCalls, Derived, name_of
from oomph.techniques.loss_split import LossSplit
from oomph.torch_compat.modules import BatchNorm

Count = Callable[[Any], Tensor]

#: Functions that average over the class targets that are not ignored; older PyTorch versions lack
#: the last.
AVERAGES_OVER_TARGETS = {
    function: inspect.signature(function)
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if (function := getattr(F, name, None)) is not None
}
#: Their deprecated arguments that can ask for another reduction than a mean.
_LEGACY = ("size_average", "reduce")
#: The default of `ignore_index`.
_IGNORED = -100
#: After this many batches, a trial on a few samples checks again that the parts add up.
TRIED_EVERY = 500
#: Functions that fill the elements selected by a mask, in order.
FILLS = frozenset(("masked_scatter", "masked_scatter_"))
#: Counts for which the parts' must add up to the batch's; that is checked.
_ADD_UP = frozenset(("sum", "count_nonzero"))

#: Marks a doubt about a tensor of the batch.
TENSOR = "tensor"

_CHANGED = (
    "the loss is computed otherwise than when oomph looked at how it may be split;"
    " plan again, or give the job `whole_batch=True`"
)
_ANOTHER_BATCH = (
    "the batch is another than those that oomph looked at, in which of its tensors have an entry"
    " for each sample; plan again with it, or give the job `sample_tensors=…`"
)
ADVICE = (
    "give the job `normalizer=lambda batch: …` that counts what its loss averages over (1 for a"
    " sum), or `whole_batch=True` where it compares samples with each other"
)


class LossChanged(BadInput):
    """A part's forward made other calls than the analysed one, or the batch is of another kind."""

    def __init__(self, words: str, doubts: frozenset[Hashable] = frozenset()) -> None:
        super().__init__(words)
        #: The differences, which may turn out to change nothing; see `Weigher.accept`.
        self.doubts = doubts


@dataclass(frozen=True, kw_only=True)
class _Mean:
    """One mean over class targets, in the loss of one part."""

    number: int
    """Its index among the loss's means."""
    target: Tensor
    derived: Derived | None
    ignored: int
    weight: Tensor | None

    def count(self, target: Tensor | None = None) -> Tensor:
        """The mean's divisor: the number of targets that count, or the sum of their weights."""
        target = self.target if target is None else target
        valid = target != self.ignored
        if self.weight is None:
            return valid.sum()
        weight = self.weight.to(target.device)
        return (weight[target.where(valid, 0)] * valid).sum()


class Weigher:
    """Weighs the losses of a batch's parts, one batch after the other."""

    def __init__(self, normalizer: Count | None = None, split: LossSplit | None = None) -> None:
        #: The result of the loss analysis; None where the loss was not analysed.
        self.split = split
        #: Whether a trial in a real step showed that the parts add up, and the batches since then.
        self.trusted = normalizer is not None
        self._untried = 0
        #: Whether differences from the analysed batch and calls raise `LossChanged`.
        self.watches = False
        self._accepted: frozenset[Hashable] = frozenset()
        self._normalizer = normalizer
        self._batch: Any = None
        #: By counted quantity: the rule that counts it, the batch's total, the sum of parts so far.
        self._rules: dict[Hashable, Count] = {}
        self._totals: dict[Hashable, Tensor] = {}
        self._seen: dict[Hashable, Tensor] = {}
        #: For each count of the last batch: the sum of its parts minus the total, and the total.
        #: The differences are zero if the rules are right.
        self._owed: list[tuple[Tensor, Tensor]] = []

    def look_again(self, split: LossSplit) -> None:
        """Take over a new analysis, because the loss is computed in another way now."""
        self.split, self.trusted, self._rules = split, False, {}

    def accept(self, doubts: frozenset[Hashable]) -> None:
        """Raise no error for these differences from now on; the next trial checks again that the
        parts add up."""
        self._accepted |= doubts
        self.trusted = self.trusted and not doubts

    def doubt(self, doubts: Iterable[Hashable], words: str) -> None:
        """Raise `LossChanged` if any of these was not accepted yet."""
        if self.watches and self.split is not None and not self.asks_the_job:
            new = frozenset(doubts) - self._accepted
            if new:
                raise LossChanged(words, new)

    def parts(self, batch: Any, size: int) -> list[Any]:
        """Split the batch into parts of at most `size` samples."""
        return split_batch(batch, size, self.split.leaves if self.split is not None else None)

    def samples(self, batch: Any) -> int:
        """How many samples there are in a batch, or in a part of one."""
        return batch_size(batch, self.split.leaves if self.split is not None else None)

    def begin(self, batch: Any) -> None:
        """Start a new batch; raise an error if the parts of the last one did not add up."""
        self._settle()
        self._batch, self._totals, self._seen = batch, {}, {}
        self._doubt_batch(batch)
        self._untried += 1
        if self._untried > TRIED_EVERY and self._normalizer is None:
            self.trusted, self._untried = False, 0

    def _doubt_batch(self, batch: Any) -> None:
        """Doubt a batch with more samples than the analysed one, which the loss may treat in
        another way, and tensors that may have become per-sample."""
        if self.split is None:
            return
        samples = self.samples(batch)
        if samples > self.split.samples:
            self.doubt([("samples", samples)], _ANOTHER_BATCH)
        known = {*self.split.leaves, *self.split.others}
        new = ((TENSOR, path) for path in as_long_as(batch, samples) - known)
        self.doubt(new, _ANOTHER_BATCH)

    def weigh(self, part: Any, share: float, compute_loss: Callable[[], Tensor]) -> Tensor:
        """The contribution of a part, which has this share of the samples, to the batch's loss."""
        watched = _Part(self, part, share)
        with watched:
            loss = compute_loss()
        watched.check()
        if self._normalizer is not None:
            return loss * (_number(self._normalizer(part)) / _number(self._normalizer(self._batch)))
        if self.split is not None:
            return loss * share**self.split.power
        # A mean over targets adds up; other terms of a loss may not, and cannot be checked here.
        self.trusted = self.trusted or any(loss is mean for mean in watched.means)
        return loss * share

    def finish(self) -> None:
        """End the batch, after all its parts were weighed."""
        self._owed = [
            (self._seen[what] - total, total)
            for what, total in self._totals.items()
            if what in self._seen
        ]
        self._batch = None

    def counted(self) -> Tensor | None:
        """The targets that the first mean of the batch's loss averaged over; None without one."""
        return self._seen.get(("targets", 0))

    @property
    def asks_the_job(self) -> bool:
        """Whether the job's own normalizer counts what the loss averages over."""
        return self._normalizer is not None

    def totals(self) -> dict[Hashable, Tensor]:
        """The batch's total of each counted quantity for which there is a rule."""
        for what, rule in self._rules.items():
            if what not in self._totals:
                self._totals[what] = rule(self._batch)
        return self._totals

    @contextlib.contextmanager
    def apart(self, totals: dict[Hashable, Tensor]) -> Iterator[dict[Hashable, Tensor]]:
        """While active, parts are weighed by these totals; yields the counts of those parts."""
        kept = self._totals, self._seen
        self._totals, self._seen = totals, {}
        try:
            yield self._seen
        finally:
            self._totals, self._seen = kept

    def see(self, counts: dict[Hashable, Tensor]) -> None:
        """Add the counts of a part."""
        for what, count in counts.items():
            self._seen[what] = self._seen.get(what, 0) + count

    def divide(self, summed: Tensor, mean: _Mean, share: float) -> Tensor:
        """Divide a sum over a part's targets; `weigh` makes it a share of the batch's mean."""
        valid = mean.count()
        if self._normalizer is not None:
            # The part's mean; 0 where it has no target.
            return summed / torch.where(valid == 0, torch.ones_like(valid), valid)
        what = ("targets", mean.number)
        self.see({what: valid})
        if what not in self._totals:
            if mean.derived is None:
                raise BadInput(
                    "oomph cannot tell from the batch how many targets the loss averages over, so"
                    f" it cannot weigh micro-batches; {ADVICE}"
                )
            self._count(what, mean.derived, mean.count)
        return summed / self._totals[what] / share

    def total(self, what: Hashable, derived: Derived | None, own: Tensor, name: str) -> Tensor:
        """The whole batch's total of a quantity of which a part has `own`."""
        if name in _ADD_UP:
            self.see({what: own.detach()})
        if what not in self._totals:
            if derived is None:
                raise LossChanged("a number that the loss counts in its batch comes from elsewhere")
            self._count(what, derived, lambda counted: counted)
        return self._totals[what].to(own)

    def _count(self, what: Hashable, derived: Derived, count: Callable[[Tensor], Tensor]) -> None:
        def rule(batch: Any) -> Tensor:
            return count(derived.of(batch, self.samples(batch)))

        self._rules[what] = rule
        try:
            self._totals[what] = rule(self._batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise BadInput(
                "oomph cannot count in the whole batch what the loss counts in a part"
                f" ({str(error).splitlines()[0]}); {ADVICE}"
            ) from error

    def _settle(self) -> None:
        owed, self._owed = self._owed, []
        if any(not _is_nothing(*one) for one in owed):
            self._rules = {}
            raise BadInput(
                "the loss averaged over another number of targets than oomph had counted in the"
                f" batch; {ADVICE}"
            )


def _is_nothing(owed: Tensor, total: Tensor) -> bool:
    """Whether two counts are the same; sums of fractions may differ in their last digits."""
    if not owed.is_floating_point():
        return not bool(owed)
    return bool(owed.abs() <= 1e-2 * total.abs())


def mean_over_targets(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a call that averages over class targets, by name; None for all others."""
    if func not in AVERAGES_OVER_TARGETS:
        return None
    call = AVERAGES_OVER_TARGETS[func].bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    asked = [given.pop(name, None) for name in _LEGACY]
    classes = not given["target"].is_floating_point()
    is_mean = given["reduction"] == "mean" and asked == [None, None] and classes
    return dict(given) if is_mean else None


class _MeansOverTargets(BatchCalls):
    """Intercepts every mean over class targets that is computed while it is active."""

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Let `mean` compute means over class targets."""
        given = mean_over_targets(func, args, kwargs)
        return func(*args, **kwargs) if given is None else self.mean(func, given)

    def mean(self, func: Any, given: dict[str, Any]) -> Tensor:
        """Compute a mean, which is a call of this function with these arguments."""
        raise NotImplementedError


class _Part(_MeansOverTargets):
    """Runs a part's forward with the whole batch's counts in place of the part's."""

    def __init__(self, weigher: Weigher, part: Any, share: float) -> None:
        super().__init__(part, weigher.samples(part))
        self.means: list[Tensor] = []
        self._weigher = weigher
        self._share = share
        #: Our position in the expected calls, and in those that take sizes.
        self._expected = self._sizes = 0
        self._masks: list[Tensor] = []

    def mean(self, func: Any, given: dict[str, Any]) -> Tensor:
        """The part's share of the whole batch's mean."""
        target = given["target"]
        mean = _Mean(
            number=len(self.means),
            target=target,
            derived=self.derived(target),
            ignored=_ignored(given),
            weight=given["weight"],
        )
        split = self._weigher.split
        is_plain = split is not None and mean.number in split.plain_means
        if is_plain and mean.derived is None and not self._weigher.asks_the_job:
            self.means.append(func(**given))
        else:
            summed: Tensor = func(**{**given, "reduction": "sum"})
            self.means.append(self._weigher.divide(summed, mean, self._share))
        return self.means[-1]

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record the masks that select elements, for means over these, and check masked fills."""
        split = self._weigher.split
        if split is not None and split.picked and name_of(func) in ("__getitem__", "masked_select"):
            mask = args[1]
            if isinstance(mask, Tensor) and mask.dtype is torch.bool and self.derived(mask):
                self._masks.append(mask)
        if split is not None and name_of(func) in FILLS and not self._weigher.asks_the_job:
            self._check_filled(*args[:3])
        if split is not None and split.finite and name_of(func) == "nan_to_num":
            self._check_finite(args[0] if args else kwargs["input"])
        return super().call(func, args, kwargs)

    def _check_finite(self, summed: Tensor) -> None:
        """Refuse a part's loss that is not finite: in the whole batch, the loss would not be."""
        if not summed.dim() and not self._weigher.asks_the_job and not bool(summed.isfinite()):
            raise BadInput(
                "nan_to_num replaces the loss of a part of the batch, which is not finite, where it"
                f" would replace that of the whole batch; {ADVICE}"
            )

    def _check_filled(self, filled: Tensor, mask: Tensor, source: Tensor) -> None:
        """Refuse a fill whose source has more or fewer elements than the part's mask selects: in
        the whole batch, samples would be filled from other samples' elements."""
        if int(mask.expand_as(filled).count_nonzero()) != source.numel():
            raise BadInput(
                "masked_scatter leaves room in a part of the batch, or has something left over, so"
                f" that samples are filled with what others bring; {ADVICE}"
            )

    def growing(self, name: str, args: Sequence[Any]) -> tuple[int, ...]:
        """The growing sizes that the analysis found for this call."""
        split = self._weigher.split
        if split is None or self._weigher.asks_the_job:
            return ()
        while self._sizes < len(split.sizes):
            expected, growing, may_be_missing = split.sizes[self._sizes]
            self._sizes += 1
            if expected == name:
                return growing
            if not may_be_missing:
                break
        raise _changed()

    def number(self, at: int, out: Tensor) -> Tensor:
        """Replace a count by the whole batch's; rescale terms that the analysis marked."""
        split, weigher = self._weigher.split, self._weigher
        if split is None or weigher.asks_the_job:
            return out
        name = self.numbers[-1]
        while self._expected < len(split.calls) and split.calls[self._expected][0] != name:
            if not split.calls[self._expected][1]:
                raise _changed()
            self._expected += 1
        if self._expected == len(split.calls):
            raise _changed()
        at, self._expected = self._expected, self._expected + 1
        if at in split.totals:
            derived = self.derived(out)
            if derived is not None and at in split.grown:
                derived = dataclasses.replace(derived, grown=split.grown[at])
            return weigher.total(("total", at), derived, out, name)
        if at in split.picked:
            out = self._share_of_picked(at, split.picked[at], out)
        if at in split.rescaled:
            out = out * self._share ** split.rescaled[at]
        return out

    def _share_of_picked(self, at: int, which: int, out: Tensor) -> Tensor:
        """A mean over what a mask selects in the part, as a share of the whole batch's."""
        mask = self._masks[which]
        own = mask.count_nonzero()
        weigher, derived = self._weigher, self.derived(mask)
        what = ("picked", at)
        weigher.see({what: own})
        if what not in weigher._totals:
            assert derived is not None
            weigher._count(what, derived, torch.count_nonzero)
        share = own.to(out.dtype) / weigher._totals[what].to(out)
        return torch.where(own > 0, out, torch.zeros_like(out)) * (share / self._share)

    def check(self) -> None:
        """Raise `LossChanged` if an expected call did not come."""
        split = self._weigher.split
        if split is None or self._weigher.asks_the_job:
            return
        if any(not may_be_missing for _, may_be_missing in split.calls[self._expected :]):
            raise _changed()
        self._weigher.doubt(self.sites - split.sites, _CHANGED)


def _changed() -> LossChanged:
    return LossChanged(_CHANGED)


def _ignored(given: dict[str, Any]) -> int:
    ignored: int | None = given["ignore_index"]
    return _IGNORED if ignored is None else ignored


class _Counted(_MeansOverTargets):
    """Counts what means over class targets average over, and changes nothing."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.counts: list[Tensor] = []

    def mean(self, func: Any, given: dict[str, Any]) -> Tensor:
        """Count, and return the function's own result."""
        target, weight = given["target"], given["weight"]
        valid = target != _ignored(given)
        self.counts.append(valid.sum() if weight is None else weight[target[valid]].sum())
        return func(**given)  # type: ignore[no-any-return]


def count_targets(compute_loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """A loss, and the number (or weight) of targets that its first mean averages over, if any."""
    with _Counted() as counted:
        loss = compute_loss()
    return loss, counted.counts[0] if counted.counts else None


def _number(count: Any) -> Tensor:
    number = count if isinstance(count, Tensor) else torch.as_tensor(count, device="cpu")
    return number.double()


# -- models whose batch must stay whole ------------------------------------------------------------


def why_whole(model: nn.Module) -> str:
    """Why a batch of this model must not be split; empty where it may be."""
    for path, module in model.named_modules():
        if isinstance(module, BatchNorm) and module.training:
            return (
                f"{path} ({type(module).__name__}) averages over the batch it sees: in parts its"
                " outputs and statistics would be others"
            )
    return ""
