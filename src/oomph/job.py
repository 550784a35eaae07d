"""A Job: what the user wants to run. The model, its loss, its optimizer, and one sample batch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import BadInput, CannotRehearse, UnknownName
from oomph.techniques.own_choices import uncompiled

Precision = Literal["fp32", "tf32", "bf16-mixed", "fp16-mixed", "bf16"]
Checkpointing = Literal["none", "full"]
Loss = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: What autocast runs matrix products in; None where there is no autocast.
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


@dataclass(frozen=True)
class Job:
    """What is to run: `loss(model, batch)`, backward, and a step of `optimizer`."""

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it (then its weights are never materialised). One that
    `torch.compile` returned counts as what is inside: plans compile blocks by themselves."""
    loss: Loss | nn.Module | None = None
    """`loss(model, batch)`; or a criterion such as `nn.CrossEntropyLoss()` for batches of
    `(inputs, targets)`; or None for models that return their own `.loss`."""
    optimizer: str | MakeOptimizer | torch.optim.Optimizer | None = "adamw"
    """A name (`adamw`, `adamw-fused`, `sgd-momentum` …), a function of the parameters, an optimizer
    made for `model`, or None for a job that is only evaluated."""
    batch: Any = None
    """One global batch, as the loss takes it: tensors first along the batch. Or a function that
    makes one."""
    precision: Precision = field(default="fp32", kw_only=True)
    micro_batch: int | None = field(default=None, kw_only=True)
    """Samples per forward; gradients of the parts of a batch are accumulated."""
    checkpointing: Checkpointing = field(default="none", kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    """The most the gradients' global norm may be; None does not clip."""
    items: Callable[[Any], Tensor] | None = field(default=None, kw_only=True)
    """Counts what the loss averages over in a batch, such as valid tokens; None finds it out."""
    whole_batch: bool = field(default=False, kw_only=True)
    """Whether the loss compares samples of a batch with each other, so that no plan splits it."""
    name: str = field(default="model", kw_only=True)

    def __post_init__(self) -> None:
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


def build_model(job: Job) -> nn.Module:
    """The job's model, ready to train: its dtype and checkpointing set."""
    model = job.model if isinstance(job.model, nn.Module) else job.model()
    if not isinstance(model, nn.Module):
        raise BadInput(f"the model function returned {type(model).__name__}, not an nn.Module")
    model = uncompiled(model)
    if job.precision == "bf16":
        model.to(torch.bfloat16)
    if job.checkpointing == "full":
        checkpoint_blocks(model)
    # One that trains already may hold parts that its user set to evaluate.
    return model if model.training else model.train()


def make_batch(job: Job) -> Any:
    """One global batch of the job, its numbers in the dtype of a model that has but one."""
    batch = job.batch() if callable(job.batch) else job.batch
    if isinstance(batch, Mapping):
        batch = dict(batch)  # a tokenizer's own kind of mapping would hide its tensors
    if job.precision != "bf16":
        return batch

    def cast(leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if floats else leaf

    return tree_map(cast, batch)


def compute_loss(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """The scalar the job minimises."""
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


def batch_size(batch: Any) -> int:
    """Samples in a batch: the length of its tensors' first dimension."""
    sizes = [
        leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()
    ]
    if not sizes:
        raise BadInput("the batch holds no tensor with a batch dimension")
    size = max(sizes, key=sizes.count)
    if size == 0:
        raise BadInput("the batch is empty: it holds no samples")
    return size


def split_batch(batch: Any, size: int) -> list[Any]:
    """The batch in parts of at most `size` samples; what is not per sample goes to every part."""
    total = batch_size(batch)

    def part(start: int, leaf: Any) -> Any:
        per_sample = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == total
        return leaf[start : start + size] if per_sample else leaf

    return [tree_map(functools.partial(part, start), batch) for start in range(0, total, size)]


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
    """Recompute every repeated block in backward, as "gradient checkpointing" does."""
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


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of one class that follow each other in a list, outermost lists first."""
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        children = list(module.children())
        alike = len({type(child) for child in children}) == 1 and len(children) > 1
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and alike:
            found.extend(children)
            return
        for child in children:
            search(child)

    search(model)
    return found


def check_count(what: str, value: float, most: float = 1e9) -> int:
    """A whole number of samples or tokens that somebody can mean."""
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= most:
        raise BadInput(f"{what} must be a whole number from 1 to {most:,.0f}, not {value}")
    return int(value)
