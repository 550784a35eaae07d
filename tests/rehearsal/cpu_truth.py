"""The memory a job really takes on the CPU, beside what its rehearsal says.

The truth comes from PyTorch's profiler, which reports every request to the CPU's allocator and
every free, in bytes as asked for, without rounding. Both runs fire *flares*: tensors of a size that
nothing else has, made and dropped at once. They cut either stream of allocations into the same
stretches, so that the two can be compared without any knowledge of each other.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map

from oomph.engine.step import Stage, train_step
from oomph.jobs.job import Job, build_model, compute_loss, make_batch, make_optimizer
from oomph.rehearsal.phases import rehearse

STEPS = 2
MARKS = ("before forward", "after forward", "after backward", "after step")
_FLARE = 7_654_321
_WRAPPED_NUMBER = 8


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of tensors at each mark of each step, and the most there were on the way to it."""

    alive: dict[str, int]
    peaks: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the profiler saw, in two ways."""

    all: Memory
    """Every byte."""
    tensors: Memory
    """Without what a kernel takes and gives back inside its op, and without Python's numbers
    (`x * 2.0` makes a tensor of 8 bytes out of the 2.0), which no dispatched op makes."""


def measure(job: Job) -> Truth:
    """What the job's build and steps take for real."""
    job = _with_flares(job)
    gc.collect()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small kernels only get slower with more, above all on busy cores
    config = _ExperimentalConfig(capture_overload_names=True)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=config
    ) as profiler:
        _run(job)
    torch.set_num_threads(threads)
    requests = list(_requests(profiler.profiler.kineto_results.experimental_event_tree()))
    return Truth(
        all=_between_flares(request.size for request in requests),
        tensors=_between_flares(_only_tensors(requests)),
    )


def predict(job: Job) -> Memory:
    """What the rehearsal says of the same."""
    timeline = rehearse(_with_flares(job), None, ("build", "first step", "step"))
    return _between_flares(
        block.size if is_birth else -block.size
        for _, block, is_birth in timeline.stream_of_events()
    )


def _with_flares(job: Job) -> Job:
    """The job, firing a flare around its forward and around its optimizer's step."""
    make = make_optimizer(job.optimizer) if isinstance(job.optimizer, str) else job.optimizer

    def loss(model: nn.Module, batch: Any) -> Tensor:
        _fire(0)
        result = compute_loss(job, model, batch)
        _fire(1)
        return result

    def flaring_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        assert callable(make)
        optimizer = make(parameters)
        optimizer.register_step_pre_hook(lambda *_: _fire(2))
        optimizer.register_step_post_hook(lambda *_: _fire(3))
        return optimizer

    return dataclasses.replace(job, loss=loss, optimizer=flaring_optimizer)


def _fire(mark: int) -> None:
    torch.empty(_FLARE + mark, dtype=torch.uint8)


def _run(job: Job) -> None:
    if isinstance(job.model, nn.Module):
        job = dataclasses.replace(job, model=copy.deepcopy(job.model))
    model = build_model(job)
    assert callable(job.optimizer)
    optimizer = job.optimizer(p for p in model.parameters() if p.requires_grad)
    batch = make_batch(job)
    if not callable(job.batch):
        batch = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
    stage = Stage(job=job, model=model, optimizer=optimizer, device_type="cpu")
    for _ in range(STEPS):
        train_step(stage, batch)


@dataclasses.dataclass(frozen=True)
class _Request:
    """A request to the allocator, or a free where the size is negative."""

    time: int
    size: int
    address: int
    op: int | None
    """The dispatched op it happened in: the outermost one that is not taken apart."""
    in_aten: bool


def _requests(tree: Iterable[Any]) -> list[_Request]:
    found: list[_Request] = []

    def walk(event: Any, op: int | None, in_aten: bool) -> None:
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append(_Request(event.start_time_ns, fields.alloc_size, fields.ptr, op, in_aten))
            return
        in_aten = event.name.startswith("aten::")
        if op is None and in_aten and not _is_taken_apart(event.name, event.overload_name):
            op = event.id
        for child in event.children:
            walk(child, op, in_aten)

    for root in tree:
        walk(root, None, False)
    return sorted(found, key=lambda request: request.time)


@functools.cache
def _is_taken_apart(name: str, overload: str) -> bool:
    full_name = f"{name}.{overload}" if overload else name
    return torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CompositeImplicitAutograd")


def _only_tensors(requests: list[_Request]) -> Iterator[int]:
    """Sizes of the requests that a dispatched op left behind, and of all before the first step."""
    live: dict[int, int] = {}
    dropped: set[int] = set()
    building = True
    for at, request in enumerate(requests):
        building = building and request.size != _FLARE
        if request.size > 0:
            live[request.address] = at
            outside = not building and request.op is None and not request.in_aten
            if outside and request.size == _WRAPPED_NUMBER:
                dropped.add(at)
        elif request.address in live:
            birth = live.pop(request.address)
            is_scratch = request.op is not None and requests[birth].op == request.op
            if is_scratch or birth in dropped:
                dropped |= {birth, at}
    return (request.size for at, request in enumerate(requests) if at not in dropped)


def _between_flares(sizes: Iterable[int]) -> Memory:
    """The highest values at and before each mark; micro-batches pass some marks several times."""
    alive: dict[str, int] = {}
    peaks: dict[str, int] = {}
    now = peak = 0
    step, last = 1, -1
    for size in sizes:
        mark = abs(size) - _FLARE
        if not 0 <= mark < len(MARKS):
            now += size
            peak = max(peak, now)
        elif size > 0:
            step += mark == 0 and last == len(MARKS) - 1
            name = f"step {step}, {MARKS[mark]}"
            alive[name] = max(now, alive.get(name, 0))
            if last >= 0:  # how the model and the batch are made is not part of the step
                peaks[f"until {name}"] = max(peak, peaks.get(f"until {name}", 0))
            peak, last = now, mark
    assert len(alive) == STEPS * len(MARKS), f"flares were seen at {list(alive)} only"
    return Memory(alive, peaks)
