"""Rules that each look for one cost of an architecture, and suggest a change.

If the change can be made to a rehearsed model, it is, and the two rehearsals are compared.
Otherwise the numbers are computed from sizes. Both are predictions; a suggestion says which it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from oomph.advising.anatomy import Anatomy
from oomph.advising.costs import Cost, Edit, cost_of, edited
from oomph.errors import OomphError
from oomph.hardware import GPU
from oomph.jobs.blocks import repeated_blocks
from oomph.jobs.job import Job
from oomph.torch_compat.modules import parameters_of
from oomph.units import format_bytes

#: Number of matrix rows whose multiples suit Tensor Cores best.
FRIENDLY_ROWS = 64
#: An embedding with more than this share of all parameters is worth a suggestion.
LARGE_EMBEDDING = 0.25
#: Window to suggest, for sequences at least this many times as long.
WINDOW, LONG = 1024, 2
EXPERTS, ACTIVE = 8, 2
ADAPTER_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change that would affect what a model costs."""

    topic: str
    finding: str
    """What the model has now."""
    change: str
    """The suggested change."""
    saves: int
    """Bytes of peak memory saved, predicted; negative if it costs memory."""
    parameters: int
    """Parameters saved; negative if it adds some."""
    flops: float
    """Operations per step saved; negative if it adds some."""
    how: Literal["rehearsed", "computed"]
    alters: Literal["nothing", "training", "model"]
    """What it affects: `nothing` leaves the numbers as they are."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Input for the rules."""

    job: Job
    gpu: GPU | None
    cost: Cost
    anatomy: Anatomy
    samples: int
    tokens: int
    """Tokens per sample; 0 if the batch is not made of tokens."""

    @property
    def trained_bytes(self) -> float:
        """Bytes per trained parameter, with its gradient and optimizer state."""
        state = self.cost.state_bytes / max(self.anatomy.trainable, 1)
        return 2 * self.anatomy.weight_bytes + state

    def rehearse(self, edit: Edit) -> Cost | None:
        """The cost of the edited job; None if it cannot be rehearsed."""
        given = isinstance(self.job.optimizer, torch.optim.Optimizer)
        if given and isinstance(self.job.model, nn.Module):
            return None  # the optimizer would still hold what the change removes
        try:
            with edited(self.job, edit) as job:
                return cost_of(job, self.gpu)[0]
        except OomphError:
            return None


def find_suggestions(case: Case) -> tuple[Suggestion, ...]:
    """The suggestions of all rules, largest savings first."""
    found = [one for rule in _RULES for one in rule(case) if _is_worth_saying(one)]
    return tuple(sorted(found, key=lambda one: (-one.saves, -one.flops)))


def _is_worth_saying(suggestion: Suggestion) -> bool:
    """Drop suggestions that save nothing according to a rehearsal."""
    gains = suggestion.saves > 0 or suggestion.flops > 0
    return gains or suggestion.how == "computed"


# --- embeddings -----------------------------------------------------------------------------------


def _untied(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    if not parts.head or not parts.embedding or parts.tied:
        return

    def tie(model: nn.Module) -> Callable[[], None]:
        head, embedding = model.get_submodule(parts.head), model.get_submodule(parts.embedding)
        own = head.weight
        head.weight = embedding.weight

        def untie() -> None:
            head.weight = own

        return untie

    size = parts.vocabulary * parts.width
    yield _compared(
        case,
        case.rehearse(tie),
        topic="untied embeddings",
        finding=f"{parts.embedding} and {parts.head} hold {size:,} parameters each",
        change="tie them: tie_word_embeddings=True in a config, or one weight for both",
        saves=int(size * case.trained_bytes),
        parameters=size,
        alters="model",
    )


def _oversized(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    tables = 1 if parts.tied or not parts.head else 2
    size = parts.vocabulary * parts.width
    if not size or size * tables < LARGE_EMBEDDING * parts.parameters:
        return
    share = 100 * size * tables / parts.parameters
    half = parts.vocabulary // 2 * parts.width * tables
    flops = 6.0 * (parts.vocabulary // 2) * parts.width * case.samples * case.tokens
    yield Suggestion(
        topic="oversized embeddings",
        finding=(
            f"a vocabulary of {parts.vocabulary:,} holds {share:.0f} % of all parameters, in"
            f" {tables} table{'s' if tables > 1 else ''}"
        ),
        change="half the vocabulary: a tokenizer trained on your data often needs no more",
        saves=int(half * case.trained_bytes),
        parameters=half,
        flops=flops if parts.head else 0.0,
        how="computed",
        alters="model",
    )


def _unpadded(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    half = case.job.precision in ("bf16", "bf16-mixed", "fp16-mixed")
    missing = -parts.vocabulary % FRIENDLY_ROWS
    if not parts.head or not missing or not half:
        return
    tables = 1 if parts.tied else 2
    added = missing * parts.width * tables
    yield Suggestion(
        topic="vocabulary padding",
        finding=(
            f"a vocabulary of {parts.vocabulary:,} is no multiple of {FRIENDLY_ROWS}, so the"
            " largest matrix product misses the Tensor Cores' best shapes"
        ),
        change=(
            f"pad it to {parts.vocabulary + missing:,}:"
            f" resize_token_embeddings(pad_to_multiple_of={FRIENDLY_ROWS});"
            " the chunked loss of a plan pads it by itself"
        ),
        saves=-int(added * case.trained_bytes),
        parameters=-added,
        flops=-6.0 * missing * parts.width * case.samples * case.tokens,
        how="computed",
        alters="model",
    )


# --- attention ------------------------------------------------------------------------------------


def _not_fused(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    if not case.cost.scores:
        return

    def use_sdpa(model: nn.Module) -> Callable[[], None]:
        config: Any = model.config
        before = config._attn_implementation
        config._attn_implementation = "sdpa"

        def back() -> None:
            config._attn_implementation = before

        return back

    can = parts.attention == "eager" and parts.can_use_sdpa
    yield _compared(
        case,
        case.rehearse(use_sdpa) if can else None,
        topic="attention without a fused kernel",
        finding="softmaxes over all pairs of tokens are kept for backward",
        change=(
            'attn_implementation="sdpa"'
            if can
            else "torch.nn.functional.scaled_dot_product_attention in place of matmul and softmax"
        ),
        saves=case.cost.scores,
        parameters=0,
        alters="nothing",
    )


def _full_attention(case: Case) -> Iterator[Suggestion]:
    parts, tokens = case.anatomy, case.tokens
    if not parts.heads or parts.window or tokens < LONG * WINDOW:
        return
    # Two products for each pair that a causal mask leaves, once in forward and twice in backward.
    per_pair = 12.0 * parts.width * parts.layers * case.samples
    full, windowed = tokens * tokens / 2, tokens * WINDOW - WINDOW * WINDOW / 2
    saved = int(case.cost.scores * (1 - 2 * windowed / tokens**2)) if case.cost.scores else 0
    yield Suggestion(
        topic="full attention",
        finding=f"every token attends to all {tokens:,} before it, in all {parts.layers} layers",
        change=f"a window of {WINDOW:,} tokens, in some of the layers or in all: sliding_window",
        saves=saved,
        parameters=0,
        flops=per_pair * (full - windowed),
        how="computed",
        alters="model",
    )


# --- blocks ---------------------------------------------------------------------------------------


def _not_shared(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    if parts.blocks < 4:
        return
    pairs = parts.blocks // 2

    def share(model: nn.Module) -> Callable[[], None]:
        blocks = repeated_blocks(model)
        undos: list[Callable[[], None]] = []
        for first, second in zip(blocks[::2], blocks[1::2], strict=False):
            if type(first) is type(second):
                undos += _share_parameters(first, second)

        def back() -> None:
            for undo in undos:
                undo()

        return back

    size = pairs * parts.block_parameters
    yield _compared(
        case,
        case.rehearse(share),
        topic="layers that could share parameters",
        finding=f"{parts.blocks} blocks have {parts.block_parameters:,} parameters each",
        change="every block run twice in a row with one set of weights",
        saves=int(size * case.trained_bytes),
        parameters=size,
        alters="model",
    )


def _share_parameters(first: nn.Module, second: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the second module the parameters of the first, where shapes match."""
    for (_, one), (_, other) in zip(first.named_modules(), second.named_modules(), strict=False):
        for name, parameter in list(parameters_of(other).items()):
            shared = parameters_of(one).get(name)
            if shared is None or parameter is None or shared.shape != parameter.shape:
                continue
            parameters_of(other)[name] = shared
            yield _putting_back(other, name, parameter)


def _putting_back(module: nn.Module, name: str, parameter: nn.Parameter) -> Callable[[], None]:
    def back() -> None:
        parameters_of(module)[name] = parameter

    return back


def _dense(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    if parts.has_experts or not case.tokens or parts.feed_forward < parts.parameters / 4:
        return
    flops = 6.0 * parts.feed_forward * case.samples * case.tokens
    yield Suggestion(
        topic="dense feed-forward",
        finding=(
            f"feed-forward layers hold {parts.feed_forward:,} parameters, and every token goes"
            " through all of them"
        ),
        change=(
            f"the same parameters as {EXPERTS} experts, of which each token takes {ACTIVE}:"
            " memory stays, arithmetic falls"
        ),
        saves=0,
        parameters=0,
        flops=flops * (1 - ACTIVE / EXPERTS),
        how="computed",
        alters="model",
    )


# --- training -------------------------------------------------------------------------------------


def _unfrozen(case: Case) -> Iterator[Suggestion]:
    parts = case.anatomy
    if parts.trainable < parts.parameters:
        return
    if parts.embedding and parts.trains_embedding:

        def freeze(model: nn.Module) -> Callable[[], None]:
            weight = model.get_submodule(parts.embedding).weight
            assert isinstance(weight, nn.Parameter)
            weight.requires_grad_(False)

            def thaw() -> None:
                weight.requires_grad_(True)

            return thaw

        size = parts.vocabulary * parts.width
        yield _compared(
            case,
            case.rehearse(freeze),
            topic="unfrozen embeddings",
            finding=f"{parts.embedding} trains {size:,} parameters, of which a batch uses few",
            change=f"freeze {parts.embedding} in fine-tuning: weight.requires_grad_(False)",
            saves=int(size * (case.trained_bytes - parts.weight_bytes)),
            parameters=0,
            alters="training",
        )
    adapters = sum(ADAPTER_RANK * (rows + columns) for rows, columns in parts.linear)
    if adapters and adapters < parts.parameters / 4:
        saved = (parts.trainable - adapters) * (case.trained_bytes - parts.weight_bytes)
        yield Suggestion(
            topic="all weights train",
            finding=f"gradients and optimizer state are kept for {parts.trainable:,} parameters",
            change=(
                f"in fine-tuning, adapters of rank {ADAPTER_RANK} beside the blocks' linear layers"
                f" (LoRA) train {adapters:,} instead"
            ),
            saves=int(saved - adapters * parts.weight_bytes),
            parameters=-adapters,
            flops=0.0,
            how="computed",
            alters="training",
        )


def _optimizer(case: Case) -> Iterator[Suggestion]:
    optimizer = case.job.optimizer
    if not isinstance(optimizer, str) or not optimizer.startswith("adam"):
        return
    choices = {
        "adamw-fused": ("one kernel, and no copy of the parameters on the way", "nothing"),
        "adafactor": ("a row and a column of second moments instead of all", "training"),
        "sgd-momentum": ("one number a parameter instead of two", "training"),
    }
    for name, (why, alters) in choices.items():
        if name == optimizer:
            continue
        try:
            changed = cost_of(dataclasses.replace(case.job, optimizer=name), case.gpu)[0]
        except OomphError:
            continue
        if changed.peak < case.cost.peak:
            yield _compared(
                case,
                changed,
                topic="optimizer",
                finding=f"{optimizer} keeps {format_bytes(case.cost.state_bytes)} of state",
                change=f"{name}: {why}",
                saves=0,
                parameters=0,
                alters=alters,  # type: ignore[arg-type]
            )


def _compared(
    case: Case,
    changed: Cost | None,
    *,
    topic: str,
    finding: str,
    change: str,
    saves: int,
    parameters: int,
    alters: Literal["nothing", "training", "model"],
) -> Suggestion:
    """Compare two rehearsals, or use the computed bytes if only one was possible."""
    if changed is not None:
        saves = case.cost.peak - changed.peak
        parameters = case.cost.parameters - changed.parameters
    return Suggestion(
        topic=topic,
        finding=finding,
        change=change,
        saves=saves,
        parameters=parameters,
        flops=case.cost.flops - changed.flops if changed is not None else 0.0,
        how="rehearsed" if changed is not None else "computed",
        alters=alters,
    )


_RULES: tuple[Callable[[Case], Iterator[Suggestion]], ...] = (
    _untied,
    _oversized,
    _unpadded,
    _not_fused,
    _full_attention,
    _not_shared,
    _dense,
    _unfrozen,
    _optimizer,
)
