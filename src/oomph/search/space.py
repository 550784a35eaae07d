"""The ways to run a job that a search may look into: all that is chosen but for the blocks.

Weights, precision and kernels follow from the job, the card and what its user allows; the size of
micro-batches and what leaves the GPU are tried from the most to the least that a card may hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oomph.errors import BadInput
from oomph.hardware import GPU
from oomph.jobs.job import Job, batch_size
from oomph.plans.choices import MASTERS, Choices, Weights
from oomph.plans.fidelity import Fidelity, of_fused_kernels
from oomph.plans.techniques import S
from oomph.search.option_profiles import buckets_of_a_block
from oomph.search.survey import Survey
from oomph.techniques.technique import SearchContext, Technique, Tried, allowed_options
from oomph.torch_compat.pytree import tree_leaves

#: Rows of logits with which a chunked loss is heard; other chunks follow from it.
PROFILED_CHUNK = 2048
#: Buckets of state that are on their way at least.
LEAST_AHEAD = 2
#: Bytes of a parameter and its state, as Adam has it, that a run copies to step inside backward.
UNDO_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Which ways there are for a job on a card."""

    job: Job
    gpu: GPU | None
    batch: Any
    found: Survey
    allow: Fidelity
    compiles: bool
    uncompiled: Collection[Weights]
    """Ways to hold the weights with which blocks cannot be compiled."""
    host: int | None
    """Host memory that a plan may take; None where there is no limit."""
    techniques: Sequence[Technique[Any]]
    """Those that whoever runs the step may use."""

    @property
    def sizes(self) -> list[int | None]:
        """Samples in a micro-batch, the most first; None is the whole batch."""
        if self.found.whole_because:
            return [self.job.micro_batch]
        total = batch_size(self.batch)
        powers = range((total - 1).bit_length() + 1)
        sizes = [math.ceil(total / 2**power) for power in powers]
        return [None if size == total else size for size in dict.fromkeys(sizes)]

    def staying(self, size: int | None, weights: Weights | None) -> list[Choices]:
        """With all on the GPU; `weights` are those that were found to be better, if any were."""
        return [later for one in self._here(size, weights) for later in stepping_later(one)]

    def leaving(self, size: int | None, weights: Weights | None) -> list[Choices]:
        """With the optimizer on the host, and more and more beside it."""
        here = self._here(size, weights)
        # Where the GPU is too small, weights of half the bytes are better to have and to copy.
        halved = [one for one in here if one.weights == MASTERS]
        return [away for one in halved or here for away in self._away(one)]

    def with_size(self, plain: Choices, size: int | None) -> Choices:
        """The same with micro-batches of this size, and what goes with that."""
        head = next(iter(self.found.heads), "")
        return dataclasses.replace(
            plain,
            micro_batch=size,
            head=head,
            loss_chunk=min(PROFILED_CHUNK, self.rows(size)) if head else None,
            optimizer_in_backward=size is None and self._may_step_in_backward(plain),
        )

    def rows(self, size: int | None) -> int:
        """Rows of logits in a micro-batch, at most."""
        numbers = (leaf for leaf in tensors_of(self.batch) if not leaf.is_floating_point())
        longest = max((math.prod(leaf.shape[1:2]) for leaf in numbers), default=1)
        return int((size or batch_size(self.batch)) * longest)

    def gradients_wait(self, base: Choices) -> bool:
        """Whether gradients are complete late, as those that are added up or clipped."""
        clips = self.job.clip_norm is not None or base.precision == "fp16-mixed"
        return clips or base.micro_batch is not None

    def gradient_bytes(self, choices: Choices) -> int:
        """Of all parameters."""
        return (2 if choices.precision == "bf16" else 4) * self.found.trainable

    def _here(self, size: int | None, weights: Weights | None) -> list[Choices]:
        precision = self.job.precision
        rounds = self.allow.allows(Fidelity.ROUNDING)
        if precision == "fp32" and self.gpu is not None and rounds:
            precision = "bf16-mixed" if self.gpu.has_bf16 else "fp16-mixed"
        plain = Choices(precision=precision)
        for technique in self.suited(Tried.ALWAYS):
            for option in self.options(technique, plain)[:1]:
                plain = plain.using(technique.name, option)
        base = self.with_size(plain, size)
        own = self._compiled(base)
        variants = [own]
        if precision == "bf16-mixed" and rounds and self.found.steps_per_parameter:
            # First, so that they are heard here: what leaves the GPU later is like them.
            variants.insert(0, self._compiled(dataclasses.replace(base, weights=MASTERS)))
        if weights is not None:
            variants = [one for one in variants if one.weights == weights]
        for technique in self.suited(Tried.AS_VARIANT):
            variants += [
                one.using(technique.name, option)
                for one in variants
                for option in self.options(technique, one)
            ]
        return variants

    def suited(self, tried: Tried) -> list[Technique[Any]]:
        """The techniques that are tried so, and that this model can have."""
        return [
            one
            for one in self.techniques
            if one.tried is tried and one.name not in self.found.unsuited
        ]

    def options(self, technique: Technique[S], choices: Choices) -> Sequence[S]:
        """Its settings that may be added to these choices, the most promising first."""
        context = SearchContext(gpu=self.gpu, choices=choices)
        return allowed_options(technique, context, self.allow)

    def disallowed(self) -> str:
        """What would need less, were another fidelity allowed, and how to say so; empty if
        nothing."""
        context = SearchContext(gpu=self.gpu, choices=Choices(precision=self.job.precision))
        for technique in self.techniques:
            if not technique.advice or technique.name in self.found.unsuited:
                continue
            if technique.why_not(context):
                continue
            for option in technique.options(context):
                needed = technique.fidelity(option, context.choices.precision)
                if not self.allow.allows(needed):
                    return f"{technique.advice}: --allow {needed}"
        return ""

    def _compiled(self, base: Choices) -> Choices:
        """With compiled blocks, where they can be."""
        may = self.compiles and base.weights not in self.uncompiled
        if not (may and self._may_fuse(base.precision) and self.found.can_compile):
            return base
        return dataclasses.replace(base, compiled=True, compiled_others=self.found.others)

    def _away(self, base: Choices) -> list[Choices]:
        """The same with the optimizer on the host, then with more and more beside it."""
        try:
            on_host = dataclasses.replace(base, optimizer_on="host", optimizer_in_backward=False)
        except BadInput:
            return []  # a technique that keeps the optimizer where it is
        ahead = max(buckets_of_a_block(self.found, base), LEAST_AHEAD)
        away = [dataclasses.replace(on_host, state_ahead=ahead)]
        if self.gradients_wait(base):  # here or there
            away.append(dataclasses.replace(away[0], gradient_room=0))
        paths = tuple(block.path for block in self.found.blocks)
        away += [dataclasses.replace(one, weights_away=paths) for one in away if paths]
        if paths and away[-1].gradient_room is not None:
            # Weights that are away leave room for gradients, which come when others are gone.
            half = self.gradient_bytes(base) // 2
            away.insert(-1, dataclasses.replace(away[-1], gradient_room=half))
        most = away[-1].state_ahead
        fewer = dict.fromkeys((max(2 * most // 3, LEAST_AHEAD), LEAST_AHEAD))
        return away + [dataclasses.replace(away[-1], state_ahead=n) for n in fewer if n < most]

    def _may_fuse(self, precision: str) -> bool:
        """Whether fused kernels are near enough to what they replace."""
        return self.gpu is not None and self.allow.allows(of_fused_kernels(precision))

    def _may_step_in_backward(self, plain: Choices) -> bool:
        return (
            self.found.steps_per_parameter
            and self.job.clip_norm is None
            and plain.precision != "fp16-mixed"
            and plain.optimizer_on == "gpu"
            # What is stepped there is copied to the host first.
            and (self.host is None or UNDO_BYTES * self.found.trainable <= self.host)
        )


def stepping_later(choices: Choices) -> list[Choices]:
    """The same with the step after backward, too, where it is inside."""
    if not choices.optimizer_in_backward:
        return [choices]
    return [choices, dataclasses.replace(choices, optimizer_in_backward=False)]


def tensors_of(batch: Any) -> list[Tensor]:
    """What of a batch is numbers."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
