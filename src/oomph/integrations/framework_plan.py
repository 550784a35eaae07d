"""Plan for a framework's training loop, which keeps stepping, logging and saving itself.

The plan changes the modules, and runs each batch of the framework's loader in parts whose losses
and gradients add up to the whole batch's. The loader, the global batch, the optimizer's steps,
schedules and checkpoints stay as the user set them (rule 6).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from oomph.engine.applying import apply_choices, refuse_applied
from oomph.errors import BadInput
from oomph.jobs.job import AUTOCAST, Job, batch_size
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.process.random_state import random_state_kept
from oomph.runs.run import enforce
from oomph.runs.training import card_of
from oomph.search.option_profiles import OptionProfiles
from oomph.search.planner import Planner, make_planner
from oomph.splitting import prove_split_of_another
from oomph.techniques.autocast import autocast
from oomph.techniques.gradient_hooks import why_whole_for_hooks
from oomph.techniques.loss_split import LossSplit
from oomph.techniques.micro_batch import LossChanged, Weigher, why_whole
from oomph.techniques.parts_trial import check_parts
from oomph.techniques.technique import Technique, techniques_of
from oomph.torch_compat.pytree import tree_leaves, tree_map
from oomph.units import parse_bytes

#: Choices that only change modules and batches. All others need oomph's own step.
_MODULE_LEVEL = (
    "precision",
    "micro_batch",
    "blocks",
    "compiled",
    "compiled_others",
    "head",
    "loss_chunk",
)
#: Number of samples to check for long ones.
_LOOKED_AT = 2048
_GIB = float(1 << 30)

Say = Callable[[str], None]
T = TypeVar("T")


def say_it(words: str) -> None:
    """Print a message to stderr; the default `say` of the integrations."""
    print(f"oomph: {words}", file=sys.stderr)


# -- planning --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FrameworkPlanner(Planner):
    """Plans only changes to modules and batches, and leaves the step to the framework."""

    most: int | None = None
    """The largest micro-batch, if the framework's loader gives less than the global batch."""
    stays_whole: str = ""
    """Why a batch of the loader must not be split, if the user's own step needs whole batches."""

    def _look(self) -> None:
        super()._look()
        # The framework steps its optimizer itself: the whole optimizer, on the GPU, after backward.
        because = "the framework steps it"
        self.found = dataclasses.replace(self.found, stepped_whole_because=because)
        assert isinstance(self.job.model, nn.Module)
        # The framework also runs a separate backward for each part.
        why = self.stays_whole or why_whole_for_hooks(self.job.model, in_parts=True)
        if why and not self.found.whole_because:
            self._keep_whole(why)

    def _bases(self, size: int | None) -> list[Choices]:
        return [base for base in super()._bases(size) if base == _module_level(base)]

    def _techniques(self) -> list[Technique[Any]]:
        return [one for one in super()._techniques() if one.runs_in_foreign_loops]

    def _profile(self, base: Choices) -> OptionProfiles | None:
        profiles = super()._profile(base)
        return None if profiles is None else dataclasses.replace(profiles, graphed=None)

    def _micro_batches(self) -> list[int | None]:
        sizes = super()._micro_batches()
        if self.most is None:
            return sizes
        fitting = [size for size in sizes if size is not None and size <= self.most]
        return list(dict.fromkeys([self.most, *fitting]))

    def _advice(self) -> str:
        return (
            "a shorter sequence or a smaller model would do; oomph.fit has more ways to need less"
        )


def plan_for_framework(
    job: Job,
    *,
    device: torch.device,
    budget: str | int | None,
    allow: str | Fidelity,
    accumulated: int = 1,
    stays_whole: str = "",
) -> Plan:
    """The fastest plan for a job whose batch comes from the framework's loader.

    `accumulated` is the number of such batches over which the framework accumulates gradients. The
    plan's micro-batches are parts of one of them.
    """
    plan, _ = plan_and_split(
        job,
        device=device,
        budget=budget,
        allow=allow,
        accumulated=accumulated,
        stays_whole=stays_whole,
    )
    return plan


def plan_and_split(
    job: Job,
    *,
    device: torch.device,
    budget: str | int | None,
    allow: str | Fidelity,
    accumulated: int = 1,
    stays_whole: str = "",
) -> tuple[Plan, LossSplit | None]:
    """The plan, and how the losses of parts combine to the batch's loss, if that is known."""
    assert isinstance(job.model, nn.Module)
    refuse_applied(job.model)
    own = batch_size(job.batch)
    if accumulated > 1:
        job = dataclasses.replace(job, batch=_repeated(job.batch, accumulated), micro_batch=own)
    made = make_planner(job, budget=budget, gpu=card_of(device), allow=allow)
    given = {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if field.init and not field.name.startswith("_")
    }
    most = own if accumulated > 1 else None
    planner = FrameworkPlanner(**given, most=most, stays_whole=stays_whole)
    plan = planner.plan()
    choices = plan.choices
    if choices != _module_level(choices):
        raise BadInput("the plan needs oomph's own step: use oomph.fit for this one")
    if choices.micro_batch == own:
        # For the framework this is a whole batch.
        plan = dataclasses.replace(plan, choices=dataclasses.replace(choices, micro_batch=None))
    return plan, planner.found.split


def _module_level(choices: Choices) -> Choices:
    fields = {name: getattr(choices, name) for name in _MODULE_LEVEL}
    return Choices(
        **fields,
        techniques={
            technique.name: settings
            for technique, settings in techniques_of(choices)
            if technique.runs_in_foreign_loops
        },
    )


def resized(batch: Any, size: int) -> Any:
    """A batch of `size` samples, made by repeating those of `batch`."""
    total = batch_size(batch)
    rows = torch.arange(size, device="cpu") % total

    def resize(leaf: Any) -> Any:
        per_sample = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        return leaf[rows.to(leaf.device)] if per_sample else leaf

    return tree_map(resize, dict(batch) if isinstance(batch, Mapping) else batch)


def _repeated(batch: Any, times: int) -> Any:
    return resized(batch, times * batch_size(batch))


# -- a sample batch --------------------------------------------------------------------------------


def sample_batch(loader: Any, device: torch.device) -> Any:
    """A batch of long samples, collated by the loader; random streams stay where they are.

    With an iterable dataset, it is the loader's first batch.
    """
    with random_state_kept(device):
        size = getattr(loader, "batch_size", None)
        size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and size
        ):
            return collate_longest(loader.dataset, loader.collate_fn, size)
        batches = iter(loader)
        if batches is loader:
            raise BadInput(
                "looking at the loader's first batch would use it up: give one like the largest"
                " there will be, as batch="
            )
        for batch in batches:
            return batch
    raise BadInput("the loader gives no batch to plan for")


def collate_longest(dataset: Any, collate: Callable[[Any], Any], size: int) -> Any:
    """A batch of the longest samples among those checked, or of the first without `input_ids`."""
    count = len(dataset)
    if not count:
        raise BadInput("the dataset is empty: there is no batch to plan for")
    chosen: Sequence[int] = range(count)
    if _length(dataset[0]) is not None:
        looked_at = range(0, count, max(1, -(-count // _LOOKED_AT)))
        chosen = sorted(looked_at, key=lambda index: -(_length(dataset[index]) or 0))
    return collate([dataset[chosen[at % len(chosen)]] for at in range(size)])


def _length(sample: Any) -> int | None:
    tokens = sample.get("input_ids") if isinstance(sample, Mapping) else None
    return len(tokens) if tokens is not None else None


# -- running ---------------------------------------------------------------------------------------


class Fitted:
    """A plan applied to a framework's model and optimizer; `undo` restores both."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        device: torch.device,
        *,
        split: LossSplit | None,
        enforced: bool,
    ) -> None:
        assert isinstance(job.model, nn.Module)
        assert isinstance(job.optimizer, torch.optim.Optimizer)
        self.plan = plan
        self.job = job
        self.device = device
        #: Differences from the analysed batch or loss that were analysed since.
        self._looked_at: frozenset[Hashable] = frozenset()
        if plan.choices.micro_batch is not None:
            _refuse_whole(split)
        self._apply(split)
        self._planned_size = plan.choices.micro_batch or batch_size(job.batch)
        self._planned_length = _elements(job.batch)
        self._whole = why_whole(job.model)
        #: The running part, and its share of the batch's samples.
        self._now: tuple[Any, float] | None = None
        #: While active, the integration's patches are removed from the model.
        self.plain_model: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        #: How many parts of the running batch were weighed; their backward may have begun.
        self._weighed = 0
        if enforced:
            hold_to(plan.budget, device)

    def _apply(self, split: LossSplit | None) -> None:
        job = self.job
        assert isinstance(job.model, nn.Module)
        assert isinstance(job.optimizer, torch.optim.Optimizer)
        self._stage, self._undo = apply_choices(
            self.plan.choices, job, job.model, job.optimizer, device_type=self.device.type
        )
        assert self._stage.weigher is not None
        self._weigher = self._stage.weigher
        self._weigher.split = split
        self._weigher.accept(self._looked_at)

    @property
    def loss_split(self) -> LossSplit | None:
        """How the losses of parts combine to the batch's loss, if that is known."""
        return self._weigher.split

    def split(self, batch: Any) -> list[Any]:
        """Split a batch of the loader into parts, none larger than planned.

        If the samples are longer than planned, a part has fewer of them.
        """
        split = self._weigher.split
        if self._whole or (split is not None and split.whole_because):
            return [batch]
        if why_whole_for_hooks(self._stage.model, in_parts=True):
            return [batch]
        size = self._planned_size
        length = _elements(batch)
        if length > self._planned_length:
            size = max(1, int(size * self._planned_length / length))
        return self._weigher.parts(batch, size) if self._weigher.samples(batch) > size else [batch]

    def share(self, part: Any, batch: Any) -> float:
        """The share of a batch's samples in a part."""
        return self._weigher.samples(part) / self._weigher.samples(batch)

    @property
    def is_settled(self) -> bool:
        """Whether a trial showed that the losses of parts add up to the batch's."""
        return self._weigher.trusted

    def settle(self, batch: Any, compute: Callable[[Any], Tensor]) -> None:
        """Try the loss on two samples, and refuse it if its parts, weighed according to the
        analysis, do not add up (rule 6)."""
        if self._weigher.trusted:
            return
        model = self._stage.model
        halves = {weight.dtype for weight in model.parameters()} & set(AUTOCAST.values())
        tolerance = 1e-2 if halves or self.plan.choices.precision in AUTOCAST else 1e-4
        check_parts(model, batch, compute, tolerance, Weigher(split=self._weigher.split))
        self._weigher.trusted = True

    def in_parts(self, batch: Any, run: Callable[[list[Any]], T]) -> T:
        """Call `run` with the parts of a batch. If the loss turns out to be computed in another way
        than when it was analysed, analyse it again and repeat the call."""
        has_looked = False
        while True:
            try:
                return self._in_parts(batch, run)
            except LossChanged as changed:
                # Once parts were weighed, their gradients may exist already.
                if self._weighed or (has_looked and not changed.doubts):
                    raise
                self._looked_at |= changed.doubts
            self._look_again(batch)
            has_looked = True

    def _in_parts(self, batch: Any, run: Callable[[list[Any]], T]) -> T:
        self._weighed = 0
        self._weigher.watches = True
        self._weigher.begin(batch)
        made = run(self.split(batch))
        self._weigher.finish()
        return made

    def _look_again(self, batch: Any) -> None:
        split = self._weigher.split
        self._undo()
        try:
            job = dataclasses.replace(self.job, batch=batch)
            with self.plain_model():
                split = prove_split_of_another(
                    job, card_of(self.device), split, choices=self.plan.choices
                )
        finally:
            self._apply(split)
        _refuse_whole(split)

    @contextlib.contextmanager
    def part(self, part: Any, share: float) -> Iterator[None]:
        """While active, `weigh` treats losses as this part's."""
        self._now = part, share
        try:
            yield
        finally:
            self._now = None

    def weigh(self, compute: Callable[[], Tensor]) -> Tensor:
        """The running part's contribution to its batch's loss; for a whole batch, its loss."""
        if self._now is None:
            return compute()
        part, share = self._now
        loss = self._weigher.weigh(part, share, compute)
        self._weighed += 1
        self._weigher.watches = False  # a new branch found after the first part comes too late
        return loss

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region of the plan's precision; the framework handles the job's own."""
        choices = self.plan.choices
        cast_cache = self._stage.cast_cache
        if choices.precision == self.job.precision and cast_cache:
            return contextlib.nullcontext()
        return autocast(choices.precision, self.device.type, cast_cache=cast_cache)

    def memory(self) -> dict[str, float]:
        """The peak of PyTorch's allocated memory in GiB, for the framework's logger."""
        found = {"peak_gib_predicted": self.plan.predicted.peak.allocated / _GIB}
        if self.device.type == "cuda":
            found["peak_gib_measured"] = torch.cuda.max_memory_allocated(self.device) / _GIB
        return found

    def undo(self) -> None:
        """Undo the plan; model and optimizer keep their trained state."""
        self._undo()


def fit_framework(
    job: Job,
    *,
    device: torch.device,
    budget: str | int | None,
    allow: str | Fidelity,
    accumulated: int = 1,
    stays_whole: str = "",
) -> Fitted:
    """Plan for the training that the framework is about to run, and apply the plan."""
    plan, split = plan_and_split(
        job,
        device=device,
        budget=budget,
        allow=allow,
        accumulated=accumulated,
        stays_whole=stays_whole,
    )
    if stays_whole:
        split = LossSplit(whole_because=stays_whole)
    return Fitted(plan, job, device, split=split, enforced=budget is not None)


def _refuse_whole(split: LossSplit | None) -> None:
    if split is not None and split.whole_because:
        raise BadInput(
            f"the batch must not be split into parts: {split.whole_because}; a larger budget, or a"
            " smaller batch of the loader, would do"
        )


def twin_of(owner: Any) -> Any:
    """A shallow copy for a trial, with its own lists and dicts, so that no trace of it stays."""
    twin = copy.copy(owner)
    shared = vars(nn.Module()).keys()
    for name, value in vars(owner).items():
        if type(value) in (dict, list) and name not in shared and "dataset" not in name:
            # Tensors are not copied: that is impossible in a rehearsal.
            tensors = {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}
            vars(twin)[name] = copy.deepcopy(value, tensors)
    return twin


def hold_to(budget: str | int, device: torch.device) -> None:
    """Limit this process to the budget on a GPU; on a CPU nothing is enforced."""
    card = card_of(device)
    if card is not None:
        enforce(parse_bytes(budget), card, device)


def _elements(batch: Any) -> int:
    """Number of elements per sample in the batch's largest tensor."""
    total = batch_size(batch)
    return max(
        (
            leaf.numel() // total
            for leaf in tree_leaves(batch)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        ),
        default=0,
    )
