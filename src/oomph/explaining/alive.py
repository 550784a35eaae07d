"""Determines what is alive on a device at one moment, as far as Python can see it.

Parameters, gradients and optimizer state are found through the modules and optimizers that own
them. What forward saved for backward belongs to no Python object; it is found by walking the
autograd graphs of living tensors. Nothing is computed, and tensors packed by saved-tensor hooks are
not unpacked.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from oomph.explaining.holders import Holder, find_holders
from oomph.explaining.logbook import find_roots, instances
from oomph.explaining.meters import Meter, Refusal
from oomph.rehearsal.storages import storage_key, tensors_in
from oomph.rehearsal.timeline import Category
from oomph.techniques.watched_tensors import own_work
from oomph.torch_compat.autograd import SAVED
from oomph.torch_compat.compiler import ORIGINAL
from oomph.torch_compat.dispatch import is_traceable_wrapper_subclass
from oomph.torch_compat.fake_tensors import FakeTensor
from oomph.torch_compat.modules import PARAMETERS, own_buffers, own_parameters

#: Held by Python alone: outputs in a list, a batch, a copy of the weights.
KEPT = "kept"
#: Allocated but not found: memory in use by a running kernel or backward, and workspaces.
UNSEEN = "unseen"
#: Outputs of a layer at least this wide are scores over a vocabulary.
LARGE_VOCABULARY = 8192
MOST_HELD = 8


@dataclass(frozen=True, kw_only=True)
class Held:
    """Tensors kept by one holder."""

    name: str
    kind: str
    """The holder's Python type."""
    place: str
    count: int
    what: str
    """The largest of them: `float32 64×1000`."""
    size: int
    """Bytes that would be freed with the holder, including saved activations."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Alive:
    """Bytes alive, by purpose."""

    categories: dict[str, int]
    modules: dict[str, int]
    held: tuple[Held, ...]
    logits: int
    """Bytes in tensors as wide as a vocabulary."""
    vocabularies: tuple[int, ...]
    weight_copies: int
    """Bytes in tensors that look like copies of weights, judging by their shapes."""
    asks_for_weight: bool
    """Whether the failed request was as large as one of the weights."""
    expected_state: int
    """Bytes that the optimizers will hold once each has made a step."""


@own_work()  # otherwise looking would bring weights back and complete a step
def look_around(meter: Meter, frames: Sequence[FrameType], refusal: Refusal) -> Alive:
    """Classify everything alive on the meter's device; `frames` are the program's."""
    allocated = refusal.reading.allocated
    objects = gc.get_objects()
    tensors = _on(meter, instances(Tensor, objects))
    roots = find_roots(objects)
    optimizers = instances(torch.optim.Optimizer, objects)
    del objects
    ledger = _Ledger(meter)
    for root in roots:
        _file_model(root, ledger)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            module = ledger.module_of(parameter) if isinstance(parameter, Tensor) else ""
            ledger.file(tensors_in(state), Category.OPTIMIZER, module)
    rest = [tensor for tensor in tensors if not ledger.knows(tensor)]
    held = _weigh_holders(find_holders(rest, frames), ledger)
    for tensor in rest:
        ledger.file_graph(tensor)
    vocabularies = _vocabularies(roots)
    logits = _unique_bytes(t for t in rest if t.dim() > 1 and t.shape[-1] in vocabularies)
    logits += ledger.saved_as_wide_as(vocabularies, rest)
    ledger.file(rest, KEPT, "")
    categories = ledger.categories()
    seen = sum(categories.values())
    if allocated > seen:
        categories[UNSEEN] = allocated - seen
    return Alive(
        categories=_largest_first(categories),
        modules=_largest_first(ledger.modules()),
        held=tuple(sorted(held, key=lambda one: -one.size)[:MOST_HELD]),
        logits=logits,
        vocabularies=tuple(sorted(vocabularies)),
        weight_copies=_copies(rest, roots),
        asks_for_weight=refusal.asked in _weight_sizes(roots),
        expected_state=sum(expected_state(one, meter) for one in optimizers),
    )


class _Ledger:
    """Storages, each filed once: under the first category and module that claims it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._filed: dict[int, tuple[str, str, int]] = {}
        self._nodes: set[Any] = set()
        self._saved: dict[int, Tensor] = {}

    def knows(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._filed

    def module_of(self, tensor: Tensor) -> str:
        filed = (self._filed.get(storage_key(part)) for part in _parts(tensor))
        return next((module for _, module, _ in filter(None, filed)), "")

    def file(self, tensors: Iterable[Tensor], category: str, module: str) -> int:
        """File the tensors on the device that are not filed yet; returns their bytes."""
        added = 0
        for tensor in _on(self._meter, (part for whole in tensors for part in _parts(whole))):
            key = storage_key(tensor)
            if key not in self._filed:
                size = tensor.untyped_storage().nbytes()
                self._filed[key] = (str(category), module, size)
                added += size
        return added

    def file_graph(self, tensor: Tensor) -> int:
        """File what the graph of a tensor saved for backward; returns its bytes."""
        added = 0
        stack = [(tensor.grad_fn, "")] if tensor.grad_fn is not None else []
        while stack:
            node, module = stack.pop()
            if node in self._nodes:
                continue
            self._nodes.add(node)
            below = [one for one, _ in node.next_functions if one is not None]
            module = next(filter(None, map(self._module_of_node, below)), module)
            saved = _on(self._meter, (part for one in _saved(node) for part in _parts(one)))
            self._saved.update((storage_key(one), one) for one in saved)
            added += self.file(saved, Category.ACTIVATION, module)
            stack += [(one, module) for one in below]
        return added

    def saved_as_wide_as(self, widths: set[int], apart_from: Sequence[Tensor]) -> int:
        """Bytes of saved tensors of these widths that are not in `apart_from`."""
        counted = {storage_key(tensor) for tensor in apart_from}
        return sum(
            saved.untyped_storage().nbytes()
            for key, saved in self._saved.items()
            if key not in counted
            and self._filed[key][0] == Category.ACTIVATION
            and saved.dim() > 1
            and saved.shape[-1] in widths
        )

    def categories(self) -> dict[str, int]:
        return _sum((category, size) for category, _, size in self._filed.values())

    def modules(self) -> dict[str, int]:
        return _sum(
            (_anonymous(module), size) for _, module, size in self._filed.values() if module
        )

    def _module_of_node(self, node: Any) -> str:
        """The module whose parameter a node takes, directly or transposed."""
        for one in (node, *(below for below, _ in node.next_functions)):
            parameter = getattr(one, "variable", None)
            if parameter is not None:
                return self.module_of(parameter)
        return ""


def _file_model(root: nn.Module, ledger: _Ledger) -> None:
    if PARAMETERS not in vars(root):
        return
    for path, module in root.named_modules():
        path = path.replace(ORIGINAL, "").strip(".") or type(root).__name__
        parameters = own_parameters(module)
        ledger.file(parameters, Category.PARAMETER, path)
        ledger.file((p.grad for p in parameters if p.grad is not None), Category.GRADIENT, path)
        ledger.file(own_buffers(module), Category.BUFFER, path)


def _weigh_holders(holders: Sequence[Holder], ledger: _Ledger) -> list[Held]:
    """What each holder keeps, the fullest first: shared tensors count for the fuller one."""
    held = []
    for holder in sorted(holders, key=lambda one: -len(one.tensors)):
        size = sum(ledger.file_graph(tensor) for tensor in holder.tensors)
        # Each tensor is filed with its own holder, so that no other holder counts it again.
        size += ledger.file(holder.tensors, KEPT, "")
        largest = max(holder.tensors, key=torch.Tensor.numel)
        shape = "×".join(map(str, largest.shape)) or "one number"
        what = f"{str(largest.dtype).removeprefix('torch.')} {shape}"
        if size:
            held.append(
                Held(
                    name=holder.name,
                    kind=holder.kind,
                    place=holder.place,
                    count=len(holder.tensors),
                    what=what,
                    size=size,
                )
            )
    return held


def expected_state(optimizer: torch.optim.Optimizer, meter: Meter) -> int:
    """Bytes of state once every parameter has as much per byte as the one with most has now."""
    total, most = 0, 0.0
    for group in optimizer.param_groups:
        for parameter in _on(meter, group["params"]):
            if not parameter.requires_grad:
                continue
            size = parameter.numel() * parameter.element_size()
            total += size
            state = [one for one in tensors_in(optimizer.state.get(parameter, {})) if one.dim()]
            own = sum(one.numel() * one.element_size() for one in state)
            most = max(most, own / max(size, 1))
    # Before there is any state: Adam and its kin are known to keep two numbers per element.
    return int(total * (most or (2 if "Adam" in type(optimizer).__name__ else 1)))


def _saved(node: Any) -> Iterator[Tensor]:
    """The tensors that a node saved; those packed by a hook are not unpacked."""
    for name in dir(node):
        if not name.startswith(SAVED):
            continue
        value = getattr(node, name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            data = getattr(one, "data", None)
            if isinstance(data, Tensor):
                yield data


def _vocabularies(roots: Sequence[nn.Module]) -> set[int]:
    """Widths of output layers that compute scores over a vocabulary."""
    linear = (
        module
        for root in roots
        if PARAMETERS in vars(root)
        for module in root.modules()
        if isinstance(module, nn.Linear)
    )
    return {
        module.out_features
        for module in linear
        if module.out_features >= max(LARGE_VOCABULARY, 4 * module.in_features)
    }


def _weight_sizes(roots: Sequence[nn.Module]) -> set[int]:
    return {
        parameter.numel() * parameter.element_size()
        for root in roots
        if PARAMETERS in vars(root)
        for parameter in root.parameters()
    }


def _copies(tensors: Sequence[Tensor], roots: Sequence[nn.Module]) -> int:
    """Bytes of tensors that look like weights, counting each weight once."""
    weights: dict[Any, int] = defaultdict(int)
    for root in roots:
        for parameter in root.parameters() if PARAMETERS in vars(root) else ():
            weights[tuple(parameter.shape), parameter.dtype] += 1
    size = 0
    for tensor in tensors:
        look = tuple(tensor.shape), tensor.dtype
        if weights[look] and not tensor.requires_grad:
            weights[look] -= 1
            size += tensor.untyped_storage().nbytes()
    return size


def _on(meter: Meter, tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if _is_on(meter, tensor)]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or the tensors inside if it is only a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _is_on(meter: Meter, tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return False  # it shows a size that it does not occupy itself
    try:
        return meter.holds(tensor) and tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):
        return False  # sparse, or otherwise without a storage


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _sum(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    for name, size in pairs:
        totals[name] += size
    return totals


def _largest_first(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _anonymous(module: str) -> str:
    """`layers.*.mlp`: blocks that differ only in their number are counted together."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
