"""A plan for a loop that is not oomph's: the framework goes on stepping, logging and saving.

Modules are changed as the plan says, and a batch of the framework's loader is run in parts whose
losses and gradients add up to the whole batch's. The loader, the global batch, the optimizer's
steps, schedules and checkpoints stay as the user set them (rule 6).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from oomph.errors import BadInput
from oomph.job import AUTOCAST, Job, batch_size, split_batch
from oomph.planning.audition import Audition
from oomph.planning.choices import Choices
from oomph.planning.plan import Plan
from oomph.planning.planner import Planner, make_planner
from oomph.running.applying import apply_choices, refuse_applied
from oomph.running.random_state import random_state_kept
from oomph.running.run import enforce
from oomph.running.training import card_of
from oomph.techniques.autocast import autocast
from oomph.techniques.micro_batch import check_parts, why_whole
from oomph.techniques.technique import Fidelity
from oomph.units import parse_bytes

#: What can be done to modules and batches alone. Everything else needs oomph's own step.
_MODULE_LEVEL = (
    "precision",
    "micro_batch",
    "blocks",
    "compiled",
    "compiled_others",
    "head",
    "loss_chunk",
    "fused_optimizer",
    "cast_cache",
    "fp8",
    "attention_rows",
    "channels_last",
    "generation_cache",
    "allocator",
)
#: Samples that are looked at to find long ones.
_LOOKED_AT = 2048
_GIB = float(1 << 30)

Say = Callable[[str], None]


def say_it(words: str) -> None:
    """Where integrations tell what they do: the standard error stream."""
    print(f"oomph: {words}", file=sys.stderr)


# -- planning --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FrameworkPlanner(Planner):
    """Plans with what can be done to modules and batches, and leaves the step to its owner."""

    most: int | None = None
    """The largest micro-batch, where a framework's loader gives less than the global batch."""

    def _look(self) -> None:
        super()._look()
        # The framework steps its optimizer: all of it at once, on the GPU, after backward.
        self.found = dataclasses.replace(self.found, steps_per_parameter=False, can_low_bit=False)

    def _bases(self, size: int | None) -> list[Choices]:
        return [base for base in super()._bases(size) if base == _module_level(base)]

    def _hear(self, base: Choices) -> Audition | None:
        heard = super()._hear(base)
        return None if heard is None else dataclasses.replace(heard, graphed=None)

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
) -> Plan:
    """The fastest plan for a job whose batch is one of the framework's loader.

    `accumulated` is over how many such batches the framework adds up gradients. The plan's
    micro-batches are parts of one of them.
    """
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
    planner = FrameworkPlanner(**given, most=own if accumulated > 1 else None)
    with _step_unwrapped(job.optimizer):
        plan = planner.plan()
    choices = plan.choices
    if choices != _module_level(choices):
        raise BadInput("the plan needs oomph's own step: use oomph.fit for this one")
    if choices.micro_batch == own:
        # To the framework that is a whole batch.
        plan = dataclasses.replace(plan, choices=dataclasses.replace(choices, micro_batch=None))
    return plan


def _module_level(choices: Choices) -> Choices:
    return Choices(**{name: getattr(choices, name) for name in _MODULE_LEVEL})


@contextlib.contextmanager
def _step_unwrapped(optimizer: Any) -> Iterator[None]:
    """A scheduler's step is not to be rehearsed: it would step this optimizer, not its copy."""
    wrapped = vars(optimizer).pop("step", None)
    try:
        yield
    finally:
        if wrapped is not None:
            vars(optimizer)["step"] = wrapped


def resized(batch: Any, size: int) -> Any:
    """A batch of so many samples, made by taking those of `batch` over and over."""
    total = batch_size(batch)
    rows = torch.arange(size) % total

    def resize(leaf: Any) -> Any:
        per_sample = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        return leaf[rows.to(leaf.device)] if per_sample else leaf

    return tree_map(resize, dict(batch) if isinstance(batch, Mapping) else batch)


def _repeated(batch: Any, times: int) -> Any:
    return resized(batch, times * batch_size(batch))


# -- a sample batch --------------------------------------------------------------------------------


def sample_batch(loader: Any, device: torch.device) -> Any:
    """A batch as the loader makes it, of long samples; no random stream moves.

    A loader over an iterable dataset gives its first one.
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
    """A batch of the longest samples among those looked at, or of the first where all are alike."""
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
    """A plan applied to a framework's model and optimizer; `undo` makes both plain again."""

    def __init__(self, plan: Plan, job: Job, device: torch.device, *, enforced: bool) -> None:
        assert isinstance(job.model, nn.Module)
        assert isinstance(job.optimizer, torch.optim.Optimizer)
        self.plan = plan
        self.job = job
        self.device = device
        self._stage, self._undo = apply_choices(
            plan.choices, job, job.model, job.optimizer, device_type=device.type
        )
        self._planned_size = plan.choices.micro_batch or batch_size(job.batch)
        self._planned_length = _elements(job.batch)
        self._whole = why_whole(job.model)
        #: Whether parts' losses add up as they are, or must be weighed; None before it was tried.
        self._adds_up: bool | None = None
        #: The part that runs, and its share of the batch's samples.
        self._now: tuple[Any, float] | None = None
        if enforced:
            hold_to(plan.budget, device)

    def split(self, batch: Any) -> list[Any]:
        """The parts of a batch of the loader, none larger than was planned for.

        Where samples are longer than planned, fewer go together.
        """
        if self._whole:
            return [batch]
        size = self._planned_size
        length = _elements(batch)
        if length > self._planned_length:
            size = max(1, int(size * self._planned_length / length))
        return split_batch(batch, size) if batch_size(batch) > size else [batch]

    @property
    def settled(self) -> bool:
        """Whether it is known how the losses of parts make the whole's."""
        assert self._stage.weigher is not None
        return self._adds_up is not None or self._stage.weigher.trusted

    def settle(
        self, batch: Any, compute: Callable[[Any], Tensor], *, may_add_up: bool = False
    ) -> None:
        """Find out, on two samples, how the losses of parts make the whole's.

        Some losses are sums over a number that the framework has counted: they add up. Others are
        means, which are weighed. One that is neither is refused (rule 6).
        """
        if self._adds_up is not None:
            return
        model, total = self._stage.model, batch_size(batch)
        halves = {weight.dtype for weight in model.parameters()} & set(AUTOCAST.values())
        tolerance = 1e-2 if halves or self.plan.choices.precision in AUTOCAST else 1e-4
        if may_add_up:
            try:
                check_parts(
                    model, batch, lambda part: compute(part) * (total / batch_size(part)), tolerance
                )
                self._adds_up = True
                return
            except BadInput:
                pass  # it is a mean, then
        check_parts(model, batch, compute, tolerance)
        self._adds_up = False

    @contextlib.contextmanager
    def batch(self, batch: Any) -> Iterator[None]:
        """The parts that run inside are those of this batch."""
        weigher = self._stage.weigher
        assert weigher is not None
        weigher.begin(batch)
        yield
        weigher.finish()

    @contextlib.contextmanager
    def part(self, part: Any, share: float) -> Iterator[None]:
        """Losses weighed inside are those of this part."""
        self._now = part, share
        try:
            yield
        finally:
            self._now = None

    def weigh(self, compute: Callable[[], Tensor]) -> Tensor:
        """What the part that runs adds to its batch's loss; of a whole batch, its loss."""
        if self._now is None:
            return compute()
        part, share = self._now
        weigher = self._stage.weigher
        assert weigher is not None
        return weigher.weigh(part, 1.0 if self._adds_up else share, compute)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The region for a precision that the plan chose; the job's own is the framework's."""
        choices = self.plan.choices
        if choices.precision == self.job.precision and choices.cast_cache:
            return contextlib.nullcontext()
        return autocast(choices.precision, self.device.type, cast_cache=choices.cast_cache)

    def memory(self) -> dict[str, float]:
        """For the framework's logger: the peak of what PyTorch handed out, in GiB."""
        found = {"peak_gib_predicted": self.plan.predicted.peak.allocated / _GIB}
        if self.device.type == "cuda":
            found["peak_gib_measured"] = torch.cuda.max_memory_allocated(self.device) / _GIB
        return found

    def undo(self) -> None:
        """Take the plan back; model and optimizer keep what they learned."""
        self._undo()


def fit_framework(
    job: Job,
    *,
    device: torch.device,
    budget: str | int | None,
    allow: str | Fidelity,
    accumulated: int = 1,
) -> Fitted:
    """Plan for what the framework is about to train, and apply the plan."""
    plan = plan_for_framework(
        job, device=device, budget=budget, allow=allow, accumulated=accumulated
    )
    return Fitted(plan, job, device, enforced=budget is not None)


def twin_of(owner: Any) -> Any:
    """A shallow copy, for a trial: what it notes down in lists and dictionaries is not to stay."""
    twin = copy.copy(owner)
    shared = vars(nn.Module()).keys()
    for name, value in vars(owner).items():
        if type(value) in (dict, list) and name not in shared and "dataset" not in name:
            vars(twin)[name] = copy.deepcopy(value)
    return twin


def hold_to(budget: str | int, device: torch.device) -> None:
    """Let this process take no more of a GPU than the budget; nothing holds a CPU."""
    card = card_of(device)
    if card is not None:
        enforce(parse_bytes(budget), card, device)


def _elements(batch: Any) -> int:
    """Elements of a sample's longest tensor."""
    total = batch_size(batch)
    return max(
        (
            leaf.numel() // total
            for leaf in tree_leaves(batch)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        ),
        default=0,
    )
