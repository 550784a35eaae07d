"""The ways to run a job that a search may look into: all that is chosen but for the blocks.

Weights, precision and kernels follow from the job, the card and what its user allows; the size of
micro-batches and what leaves the GPU are tried from the most to the least that a card may hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from oomph.gpus import GPU
from oomph.job import Job, batch_size
from oomph.planning.audition import buckets_of_a_block
from oomph.planning.changes import fusing_rounds
from oomph.planning.choices import MASTERS, Choices, Weights
from oomph.planning.survey import Survey
from oomph.techniques.technique import Fidelity

#: Rows of logits with which a chunked loss is heard; other chunks follow from it.
HEARD_CHUNK = 2048
#: Buckets of state that are on their way at least.
LEAST_AHEAD = 2
#: Bytes of a parameter and its state, as Adam has it, that a run copies to step inside backward.
UNDO_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class Ways:
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
            loss_chunk=min(HEARD_CHUNK, self.rows(size)) if head else None,
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
        plain = Choices(
            precision=precision,
            fused_optimizer=self.found.can_fuse,
            attention_rows=self._may_fuse(precision) and self.found.attention_has_gaps,
            channels_last=self._may_have_channels_last(precision),
            generation_cache=not self.found.can_drop_cache,
        )
        base = self.with_size(plain, size)
        own = self._compiled(base)
        ways = [own]
        if precision in ("bf16-mixed", "fp16-mixed") and rounds and not own.compiled:
            ways.append(dataclasses.replace(own, cast_cache=False))
        if precision == "bf16-mixed" and rounds:
            # First, so that they are heard here: what leaves the GPU later is like them.
            ways.insert(0, self._compiled(dataclasses.replace(base, weights=MASTERS)))
        if weights is not None:
            ways = [one for one in ways if one.weights == weights]
        if self.allow.allows(Fidelity.LOSSY) and self.found.can_low_bit:
            ways += [dataclasses.replace(one, low_bit_state=True) for one in ways]
        ways += [dataclasses.replace(one, fp8=True) for one in ways if self._may_have_fp8(one)]
        return ways

    def _compiled(self, base: Choices) -> Choices:
        """With compiled blocks, where they can be."""
        may = self.compiles and base.weights not in self.uncompiled
        if not (may and self._may_fuse(base.precision) and self.found.can_compile):
            return base
        return dataclasses.replace(base, compiled=True, compiled_others=self.found.others)

    def _away(self, base: Choices) -> list[Choices]:
        """The same with the optimizer on the host, then with more and more beside it."""
        if base.low_bit_state:
            return []
        away = [
            dataclasses.replace(
                base,
                optimizer_on="host",
                optimizer_in_backward=False,
                state_ahead=max(buckets_of_a_block(self.found, base), LEAST_AHEAD),
            )
        ]
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
        rounds = fusing_rounds(precision)
        return self.gpu is not None and (not rounds or self.allow.allows(Fidelity.ROUNDING))

    def _may_have_channels_last(self, precision: str) -> bool:
        """Where Tensor Cores convolve: their kernels for half precision have no other layout."""
        capability = self.gpu.compute_capability if self.gpu is not None else None
        return (
            self.found.convolves_images
            and capability is not None
            and capability >= (7, 0)
            and precision not in ("fp32", "tf32")
        )

    def _may_have_fp8(self, way: Choices) -> bool:
        """Only compiled blocks are faster for it."""
        return (
            self.allow.allows(Fidelity.LOSSY)
            and self.gpu is not None
            and "fp8" in self.gpu.rates
            and way.compiled
            and way.precision in ("bf16", "bf16-mixed")
        )

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
