"""Inference with offloaded weights: only as many blocks are streamed as the budget requires.

Streamed blocks are spread over the model, so that each is copied while the blocks between it and
the previous streamed one run. Their weights are kept in host memory; if that is too small, as few
as possible are on disk. The same code places the weights in a rehearsal and on the GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import BadInput, CannotRehearse, DoesNotFit, HostTooSmall, OomphError, UnknownName
from oomph.hardware import GPU, find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.blocks import repeated_blocks
from oomph.jobs.job import Job, build_model, make_batch
from oomph.memory.disk_store import NumberedDiskStore
from oomph.memory.limits import check_disk, check_host_memory, host_limits
from oomph.memory.link import Link
from oomph.memory.open_link import open_link
from oomph.memory.scratch_file import default_folder
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate, judge
from oomph.rehearsal.link import RehearsedLink
from oomph.rehearsal.phases import fake_actors
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.stores import RehearsedStore
from oomph.rehearsal.world import pretend
from oomph.runs.empty_model import (
    check_buffers,
    faked,
    has_no_numbers,
    parameters_without_numbers,
    read_instead,
)
from oomph.runs.run import free_host_memory
from oomph.runs.weight_files import WeightFiles
from oomph.techniques.autocast import autocast, use_tf32
from oomph.techniques.disk_weights import BUFFERS, OnDisk
from oomph.techniques.parts_trial import in_evaluation
from oomph.techniques.placing import PlacedWeights
from oomph.techniques.streamed_weights import Source
from oomph.torch_compat.pytree import tree_map
from oomph.units import format_bytes, parse_bytes

_PHASES = ("build", "eval")


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """Where each weight is placed, and the predicted needs."""

    streamed: tuple[str, ...]
    """Blocks whose weights are off the GPU; all other weights are on it."""
    on_disk: tuple[str, ...]
    """Streamed blocks whose weights are on disk rather than in host memory."""
    ahead: int
    """Number of blocks prefetched while one runs."""
    estimate: Estimate
    """For a forward over the sample batch; does not include the later growth of a cache."""
    forward_seconds: float
    """Predicted for such a forward that follows another one."""
    host_bytes: int
    """Includes the buffers before the disk and a block being moved there."""
    disk_bytes: int


class InferenceRun:
    """A model that runs without gradients; `run(batch)` returns its outputs.

    The model itself, `run.model`, can still be called and used to generate. `undo` moves it back to
    where it was.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        streamed: Sequence[str],
        link: Link,
        *,
        device: torch.device,
        ahead: int = 1,
        on_disk: OnDisk | None = None,
        files: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self.model = model
        self._job = job
        self._device = device
        with contextlib.ExitStack() as undos:
            undos.callback(link.close)
            if job.precision == "tf32":
                undos.callback(use_tf32())
            undos.enter_context(in_evaluation(model))
            source: Source | None = None
            if files is not None:
                source, undo = read_instead(model, files)
                undos.callback(undo)
            self._placed = PlacedWeights(
                model,
                streamed,
                link,
                device=device,
                ahead=ahead,
                on_disk=on_disk,
                source=source,
            )
            undos.callback(self._placed.undo)
            self._undos = undos.pop_all()

    @property
    def on_disk(self) -> tuple[str, ...]:
        """The blocks whose weights are on disk."""
        return self._placed.streamed.on_disk if self._placed.streamed is not None else ()

    def __call__(self, batch: Any) -> Any:
        """The model's output for a batch, or the result of the job's loss function, if any."""
        job = self._job
        batch = tree_map(
            lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf,
            make_batch(dataclasses.replace(job, batch=batch)),
        )
        with torch.no_grad(), autocast(job.precision, self._device.type):
            if job.loss is not None and not isinstance(job.loss, nn.Module):
                return job.loss(self.model, batch)
            if isinstance(job.loss, nn.Module):
                batch = batch[0]  # only the criterion uses the targets
            return self.model(**batch) if isinstance(batch, Mapping) else self.model(batch)

    def undo(self) -> None:
        """Move every weight back to where it was, and free all host memory.

        Raises `HostMemoryFull`, and changes nothing, if the host has no room for what is on disk.
        """
        self._placed.undo()
        self._undos.close()

    def __enter__(self) -> InferenceRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def plan_inference(
    job: Job,
    *,
    gpu: str | GPU,
    budget: str | int | None = None,
    ahead: int = 1,
    host: str | int | None = None,
) -> InferencePlan:
    """The fewest streamed blocks with which a forward over the job's batch fits the budget.

    `DoesNotFit` says what it takes with all of them streamed. `host` limits the host memory for
    them; by default it is the free memory, if `gpu` is this machine's. As few blocks as possible go
    to disk; `HostTooSmall` says what is missing with all of them there.
    """
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    limit = parse_bytes(budget) if budget is not None else card.memory
    if isinstance(job.model, nn.Module) and has_no_numbers(job.model):
        job = dataclasses.replace(job, model=functools.partial(faked, job.model))
    rehearsed = functools.partial(_rehearsed, job, card, limit, ahead)
    as_it_is, blocks = rehearsed(0, 0)
    if as_it_is.estimate.fits:
        return as_it_is
    # With fewer, all streamed blocks would be on the GPU anyway.
    counts = range(2 + ahead, blocks + 1)
    plans: dict[int, InferencePlan] = {}

    def fits(count: int) -> bool:
        plans[count], _ = rehearsed(count, 0)
        return plans[count].estimate.fits

    at = bisect.bisect_left(counts, True, key=fits)
    if at == len(counts):
        least = plans[counts[-1]] if counts else as_it_is
        smallest = least.estimate.smallest_budget
        raise DoesNotFit(
            f"{job.name} needs {format_bytes(smallest)} on {card.name} even with the weights of"
            f" {len(least.streamed)} of its {blocks} blocks on the host, and the budget is"
            f" {format_bytes(limit)}: raise it, or take a smaller batch",
            smallest,
        )
    plan = plans[counts[at]]
    room = parse_bytes(host) if host is not None else _free_beside(card, job)
    if room is None or plan.host_bytes <= room:
        return plan
    return _with_disk(job, plan, room, rehearsed, as_it_is.estimate.smallest_budget)


def _with_disk(
    job: Job,
    start: InferencePlan,
    room: int,
    rehearsed: Callable[[int, int], tuple[InferencePlan, int]],
    without: int,
) -> InferencePlan:
    """The plan with as few blocks on disk as host memory requires."""
    streamed = len(start.streamed)

    @functools.cache
    def tried(count: int) -> InferencePlan:
        return rehearsed(streamed, count)[0]

    least = min(start, tried(streamed), key=lambda plan: plan.host_bytes)
    missing = least.host_bytes - room
    if missing > 0:
        raise HostTooSmall(
            f"{job.name} needs {format_bytes(least.host_bytes)} of host memory even with"
            f" {len(least.on_disk)} of its {streamed} streamed blocks on the disk, and there is"
            f" {format_bytes(room)}: {format_bytes(missing)} of host memory is missing (that much"
            f" more, or {format_bytes(without)} on the GPU, where nothing has to leave it, would"
            " do)",
            without,
            missing,
        )
    # Blocks are nearly alike: each takes about the same host memory.
    count = streamed - (-missing * streamed // start.host_bytes)
    while count < streamed and tried(count).host_bytes > room:
        count += 1
    while count > 1 and tried(count - 1).host_bytes <= room:
        count -= 1
    return tried(count)


def _free_beside(card: GPU, job: Job) -> int | None:
    """Host memory for offloaded weights if the GPU is this machine's; else None."""
    if not torch.cuda.is_available():
        return None
    try:
        here = find_gpu(torch.cuda.get_device_name())
    except UnknownName:
        return None
    return free_host_memory(job.model, torch.device("cuda")) if here.name == card.name else None


def apply_inference(
    plan: InferencePlan,
    job: Job,
    *,
    device: str | torch.device | None = None,
    disk: str | Path | None = None,
    checkpoint: str | Path | None = None,
) -> InferenceRun:
    """Place the weights of the job's own model as planned, on the GPU if there is one.

    A model that does not fit the GPU must be on the CPU, or given as a function that builds it
    there. Weights that the plan keeps on disk go to the folder `disk`, by default $TMPDIR, or else
    /var/tmp.

    A model that does not fit the host is given as a function, or on the meta device, with its
    weights in a `checkpoint`: a safetensors file, or a folder with one or with shards and their
    index. Weights are read and placed one at a time; after `undo` the model has none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    without = parameters_without_numbers() if checkpoint is not None else contextlib.nullcontext()
    with without:
        model = build_model(dataclasses.replace(job, checkpointing="none"))
    files = _numbers_for(model, Path(checkpoint) if checkpoint is not None else None)
    missing = [path for path in plan.streamed if path not in dict(model.named_modules())]
    if missing:
        raise BadInput(f"the plan streams {missing[0]}, which {type(model).__name__} has not")
    folder = Path(disk) if disk is not None else default_folder()
    if plan.on_disk:
        check_disk(plan.disk_bytes, folder, "the plan")
    check_host_memory(_host_bytes_to_take(model, plan, folder), "keeping weights on the host")
    link = open_link(target)

    def open_store(largest: int, buffers: int) -> NumberedDiskStore:
        return NumberedDiskStore(link, folder, largest=largest, buffers=buffers)

    return InferenceRun(
        job,
        model,
        plan.streamed,
        link,
        device=target,
        ahead=plan.ahead,
        on_disk=OnDisk(blocks=plan.on_disk, open_store=open_store),
        files=files,
    )


def _numbers_for(model: nn.Module, checkpoint: Path | None) -> dict[Tensor, Tensor] | None:
    """The weights to load into a model without any; refuses models and files that do not match."""
    if checkpoint is None:
        if has_no_numbers(model):
            raise BadInput(
                f"weights of this {type(model).__name__} are on the meta device, without numbers:"
                " name the checkpoint that has them"
            )
        return None
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            raise BadInput(
                f"{name} has numbers of its own: build the model on the meta device, or give no"
                " checkpoint"
            )
    check_buffers(model)
    return WeightFiles(checkpoint).match(model)


def _rehearsed(
    job: Job, gpu: GPU, budget: int, ahead: int, count: int, on_disk: int
) -> tuple[InferencePlan, int]:
    """Rehearse streaming `count` blocks, some from disk; also returns the number of blocks."""
    began = time.perf_counter()
    with pretend(gpu) as recorder:
        recorder.clock = Clock.of(gpu)
        try:
            with recorder.phase("build"):
                actors = fake_actors(dataclasses.replace(job, checkpointing="none"))
                recorder.adopt([*actors.model.parameters(), *actors.model.buffers()])
                blocks = _block_paths(actors.model)
                streamed = _spread(blocks, count)
                link = RehearsedLink(recorder, gpu)
                cuda = torch.device("cuda", 0)
                open_store = functools.partial(_rehearsed_store, recorder, link, gpu)
                run = InferenceRun(
                    job,
                    actors.model,
                    streamed,
                    link,
                    device=cuda,
                    ahead=ahead,
                    on_disk=OnDisk(blocks=_spread(streamed, on_disk), open_store=open_store),
                )
            with recorder.phase("eval"):
                run(actors.batch)
                begin = recorder.seconds
                run(actors.batch)
                seconds = recorder.seconds - begin
        except OomphError:
            raise
        except Exception as error:
            where = recorder.failed_in or recorder.current_module or "the model"
            raise CannotRehearse(
                f"the forward failed in {where}: {type(error).__name__}: {error}"
            ) from error
    estimate = judge(
        recorder.timeline,
        job=job.name,
        gpu=gpu,
        budget=budget,
        settings=AllocatorSettings(),
        phases=_PHASES,
        seconds=time.perf_counter() - began,
    )
    plan = InferencePlan(
        streamed=streamed,
        on_disk=run.on_disk,
        ahead=ahead,
        estimate=estimate,
        forward_seconds=seconds,
        host_bytes=recorder.timeline.host_bytes,
        disk_bytes=recorder.timeline.disk_bytes,
    )
    return plan, len(blocks)


def _block_paths(model: nn.Module) -> list[str]:
    """The repeated parts of a model, in order."""
    paths = {module: path for path, module in model.named_modules()}
    return [paths[block] for block in repeated_blocks(model)]


def _spread(blocks: Sequence[str], count: int) -> tuple[str, ...]:
    """`count` of the blocks, spread as evenly as possible."""
    return tuple(blocks[at * len(blocks) // count] for at in range(count))


def _host_bytes_to_take(model: nn.Module, plan: InferencePlan, folder: Path) -> int:
    """Host memory for offloaded weights, buffers before the disk, and the block being moved."""
    blocks = {path: set(model.get_submodule(path).parameters()) for path in plan.streamed}
    in_memory = set(blocks) - set(plan.on_disk)
    if plan.on_disk and host_limits(folder).disk_is_memory:
        in_memory = set(blocks)
    leaving = {p for path in in_memory for p in blocks[path] if p.device.type != "cpu"}
    largest = max((sum(p.nbytes for p in each) for each in blocks.values()), default=0)
    at_a_time = 1 + (BUFFERS if plan.on_disk else 0)
    return sum(p.nbytes for p in leaving) + at_a_time * largest


def _rehearsed_store(
    recorder: Recorder, link: RehearsedLink, gpu: GPU, largest: int, buffers: int
) -> RehearsedStore:
    return RehearsedStore(recorder, link, gpu, largest=largest, buffers=buffers)
