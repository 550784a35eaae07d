"""A Job: the model to run, its loss, its optimizer, and one sample batch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, CannotRehearse, UnknownName
from oomph.jobs.blocks import repeated_blocks
from oomph.jobs.dataclass_batches import is_closed, opened
from oomph.jobs.preexisting_settings import uncompiled
from oomph.plans.precisions import Precision
from oomph.torch_compat.pytree import (
    keystr,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)

Checkpointing = Literal["none", "full"]
Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: The dtype in which autocast runs matrix products; jobs without autocast are not listed.
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


@dataclass(frozen=True)
class Job:
    """What to run: `loss(model, batch)`, backward, and a step of `optimizer`."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it (then its weights are never materialised). If it
    was returned by `torch.compile`, the original is used: plans compile blocks themselves."""
    loss: Loss | nn.Module | None = None
    """`loss(model, batch)`; or a criterion such as `nn.CrossEntropyLoss()` for batches of
    `(inputs, targets)`; or None for models that return their own `.loss`."""
    optimizer: str | MakeOptimizer | torch.optim.Optimizer | None = "adamw"
    """A name (`adamw`, `adamw-fused`, `sgd-momentum` …), a function of the parameters, an optimizer
    made for `model`, or None for a job that is only evaluated."""
    batch: Any = None
    """One global batch, as the loss takes it, with the batch as its tensors' first dimension;
    or a function that makes one."""
    precision: Precision = field(default="fp32", kw_only=True)
    micro_batch: int | None = field(default=None, kw_only=True)
    """Samples per forward; gradients are accumulated over the parts of a batch."""
    checkpointing: Checkpointing = field(default="none", kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    """Limit on the gradients' global norm; None does not clip."""
    normalizer: Callable[[Any], Tensor] | None = field(default=None, kw_only=True)
    """Counts what the loss averages over in a batch, such as valid tokens; None detects it."""
    whole_batch: bool | None = field(default=None, kw_only=True)
    """Whether a batch must stay whole because the loss compares its samples; None reads it from the
    graph of the forward. With False the loss is taken to be splittable, unchecked."""
    sample_tensors: tuple[str, ...] | None = field(default=None, kw_only=True)
    """The tensors of a batch with an entry for each sample, by path, such as `['x']` or `[0]`; None
    takes all that are as long as the batch, if the forward's graph agrees."""
    items: Callable[[Any], Tensor] | None = field(default=None, kw_only=True)
    """Deprecated name of `normalizer`."""
    name: str = field(default="model", kw_only=True)

    def __post_init__(self) -> None:
        if self.items is not None and self.normalizer is None:
            object.__setattr__(self, "normalizer", self.items)
        object.__setattr__(self, "items", None)
        if self.precision not in get_args(Precision):
            raise UnknownName("precision", self.precision, get_args(Precision), "as --precision")
        if self.checkpointing not in get_args(Checkpointing):
            raise BadInput(f"checkpointing is none or full, not {self.checkpointing!r}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise BadInput(f"a micro-batch has at least one sample, not {self.micro_batch}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"gradients are clipped to a positive norm, not {self.clip_norm}")
        if isinstance(self.model, nn.Module):
            object.__setattr__(self, "model", uncompiled(self.model))
        if not callable(self.model):
            raise BadInput("the model must be an nn.Module or a function that returns one")
        if isinstance(self.optimizer, str):
            make_optimizer(self.optimizer)
        if self.batch is None:
            raise BadInput("a job needs a sample batch; its shapes decide the memory")


def build_model(job: Job, *, as_given: bool = False) -> nn.Module:
    """The job's model, ready to train, with its dtype and checkpointing set.

    With `as_given`, the user's own model keeps its mode: it may be trained in evaluation mode.
    """
    model = job.model if isinstance(job.model, nn.Module) else job.model()
    if not isinstance(model, nn.Module):
        raise BadInput(f"the model function returned {type(model).__name__}, not an nn.Module")
    model = uncompiled(model)
    if job.precision == "bf16":
        model.to(torch.bfloat16)
    if job.checkpointing == "full":
        checkpoint_blocks(model)
    if as_given and isinstance(job.model, nn.Module):
        return model
    # A model in training mode may have parts that the user set to evaluation.
    return model if model.training else model.train()


def make_batch(job: Job) -> Any:
    """One global batch of the job, with floats in the model's dtype if it has only one."""
    batch = plain_batch(job.batch() if callable(job.batch) else job.batch)
    if job.precision != "bf16":
        return batch

    def cast(leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if floats else leaf

    return tree_map(cast, batch)


def plain_batch(batch: Any) -> Any:
    """The batch with what pytrees look into in the place of what they do not.

    Those are dicts for other mappings, such as a tokenizer's, and for dataclasses their like.
    """
    return tree_map(_plain, batch, is_leaf=_is_foreign_mapping)


def _is_foreign_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and tree_is_leaf(value)


def _plain(leaf: Any) -> Any:
    if _is_foreign_mapping(leaf):
        return {key: plain_batch(value) for key, value in leaf.items()}
    return opened(leaf, plain_batch) if is_closed(leaf) else leaf


def compute_loss(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """The scalar that the job minimises."""
    if job.loss is None:
        output = model(**batch) if isinstance(batch, Mapping) else model(batch)
        loss = getattr(output, "loss", output)
    elif isinstance(job.loss, nn.Module):
        inputs, targets = batch
        loss = job.loss(model(inputs), targets)
    else:
        loss = job.loss(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise BadInput(f"the loss must be one number, not {kind}; give the job a loss function")
    return loss


def batch_size(batch: Any, sample_tensors: Sequence[str] | None = None) -> int:
    """Number of samples in a batch: the length of its tensors' first dimension.

    If `sample_tensors` is given, of those tensors; otherwise the most common length.
    """
    sizes = [
        leaf.shape[0]
        for path, leaf in tree_flatten_with_path(batch)[0]
        if isinstance(leaf, Tensor)
        and leaf.dim()
        and (not sample_tensors or keystr(path) in sample_tensors)
    ]
    if not sizes:
        raise BadInput(f"the batch holds no tensor with a batch dimension{_unseen(batch)}")
    size = max(sizes, key=sizes.count)
    if size == 0:
        raise BadInput("the batch is empty: it holds no samples")
    return size


def _unseen(batch: Any) -> str:
    """Names the first object of a batch that may hold tensors where nobody looks for them."""
    plain = (Tensor, str, bytes, int, float, complex, type(None))
    unseen = [type(leaf).__name__ for leaf in tree_leaves(batch) if not isinstance(leaf, plain)]
    if not unseen:
        return ""
    return (
        f": nobody can look into its {unseen[0]}; have it be a tuple, a dict or a dataclass, or"
        " have the loss make such an object of these"
    )


def as_long_as(batch: Any, samples: int) -> frozenset[str]:
    """The paths of a batch's tensors whose first dimension has `samples` entries."""
    return frozenset(
        keystr(path)
        for path, leaf in tree_flatten_with_path(batch)[0]
        if is_per_sample(path, leaf, samples, None)
    )


def is_per_sample(path: Any, leaf: Any, samples: int, named: Sequence[str] | None) -> bool:
    """Whether a leaf of a batch is a tensor with an entry for each sample."""
    is_long = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples
    return is_long and (named is None or keystr(path) in named)


def split_batch(batch: Any, size: int, sample_tensors: Sequence[str] | None = None) -> list[Any]:
    """Split into parts of at most `size` samples; what is not per sample goes to every part."""
    total = batch_size(batch, sample_tensors)

    def part(start: int, path: Any, leaf: Any) -> Any:
        per_sample = is_per_sample(path, leaf, total, sample_tensors)
        return leaf[start : start + size] if per_sample else leaf

    return [
        tree_map_with_path(functools.partial(part, start), batch) for start in range(0, total, size)
    ]


def make_optimizer(name: str) -> MakeOptimizer:
    """A named optimizer: a class of `torch.optim` in lower case, with `-fused` or `-momentum`."""
    classes = {cls.__name__.lower(): cls for cls in _optimizer_classes()}
    base, _, variant = name.lower().partition("-")
    options: dict[str, dict[str, Any]] = {
        "": {},
        "fused": {"fused": True},
        "momentum": {"momentum": 0.9},
    }
    takes = inspect.signature(classes[base]).parameters if base in classes else {}
    if base not in classes or variant not in options or not options[variant].keys() <= takes.keys():
        known = [*classes, "adamw-fused", "adam-fused", "sgd-momentum"]
        raise UnknownName("optimizer", name, known, "names are those of torch.optim")
    check_optimizer(classes[base])
    make = functools.partial(classes[base], **options[variant])
    return functools.partial(make, lr=1e-3) if base == "sgd" else make


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a model with TorchScript parts, which cannot be inspected or changed."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise BadInput(
                f"{path or 'the model'} was made by torch.jit.script or torch.jit.trace, which"
                " cannot be rehearsed: plan for the module that it was made of (functions may be"
                " scripted)"
            )


def check_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Refuse optimizers whose step cannot be rehearsed."""
    for cls, why in _NOT_REHEARSED.items():
        if issubclass(kind, cls):
            raise CannotRehearse(f"{kind.__name__} {why}; choose another optimizer")


_NOT_REHEARSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "computes the loss as often in one step as the data make it",
    torch.optim.SparseAdam: "wants sparse gradients, whose size only real data can tell",
}


def _optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    found = vars(torch.optim).values()
    return [
        cls
        for cls in found
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    ]


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute every repeated block in backward, as gradient checkpointing does."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", True):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise BadInput(f"{type(model).__name__} has no repeated blocks to checkpoint")
    for block in blocks:
        block.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
        )


def check_count(what: str, value: float, most: float = 1e9) -> int:
    """Check that a number of samples or tokens is whole and plausible."""
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= most:
        raise BadInput(f"{what} must be a whole number from 1 to {most:,.0f}, not {value}")
    return int(value)
