"""Times blocks for real: what each option of a menu takes on the model's device.

One micro-batch runs through the model until every kind of block has been called once; those calls
are recorded and repeated, forward and backward, under each option. This needs the memory of one
block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomph.engine.applying import apply_choices
from oomph.engine.step import Stage
from oomph.hardware.timing.step_time import StepTime
from oomph.jobs.job import Job, compute_loss, split_batch
from oomph.plans.choices import Choices
from oomph.techniques.autocast import autocast
from oomph.torch_compat import cuda
from oomph.torch_compat.pytree import tree_leaves, tree_map

#: Runs in a row; the GPU's launch queue holds that many.
ROW = 4
#: Least number of timed rows, and for how many seconds: a GPU lowers its clock after a while.
LEAST_ROWS, LEAST_SECONDS = 5, 0.5
#: The GPU is kept busy this many times the host's launching time before a row.
AHEAD = 1.5
#: Clock cycles per second of the fastest GPUs, rounded up.
CYCLES = 2.2e9

#: Times of a block's forward and backward, by its path and option.
Times = Mapping[tuple[str, str], StepTime]


@dataclass(frozen=True, kw_only=True)
class BlockTimer:
    """Times blocks of a real model for the planner, if there is one."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    """On the model's device."""

    def time(self, choices: Choices, menus: Mapping[str, Sequence[str]]) -> Times:
        """Time each option of each of these blocks under the other choices."""
        device = next(self.model.parameters()).device
        times: dict[tuple[str, str], StepTime] = {}
        calls = self._calls(choices, tuple(menus))
        for option in dict.fromkeys(option for menu in menus.values() for option in menu):
            paths = [path for path, menu in menus.items() if option in menu and path in calls]
            applied = dataclasses.replace(
                choices.without_switchable,
                blocks=dict.fromkeys(paths, option),
                optimizer_in_backward=False,
            )
            with self._applied(applied, device) as stage:
                for path in paths:
                    run = functools.partial(_run, self.model.get_submodule(path), *calls[path])
                    times[path, option] = _time(run, stage, device)
        self.optimizer.zero_grad(set_to_none=True)
        return times

    def _calls(self, choices: Choices, paths: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """The arguments of each block, recorded in a forward that stops at the last of them."""
        calls: dict[str, tuple[Any, Any]] = {}

        def keep(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(path, tree_map(_detached, (args, kwargs)))
            if len(calls) == len(paths):
                raise _Enough

        hooks = [
            self.model.get_submodule(path).register_forward_pre_hook(
                functools.partial(keep, path), with_kwargs=True
            )
            for path in paths
        ]
        part = self.batch
        if choices.micro_batch:
            part = split_batch(part, choices.micro_batch)[0]
        device = next(self.model.parameters()).device
        bare = dataclasses.replace(
            choices.without_switchable, blocks={}, optimizer_in_backward=False
        )
        try:
            with self._applied(bare, device) as stage, torch.no_grad(), _autocast(stage):
                compute_loss(self.job, self.model, part)
        except _Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    @contextlib.contextmanager
    def _applied(self, choices: Choices, device: torch.device) -> Iterator[Stage]:
        stage, undo = apply_choices(
            choices, self.job, self.model, self.optimizer, device_type=device.type
        )
        try:
            yield stage
        finally:
            undo()


class _Enough(Exception):
    """Raised once every block has been called."""


def _autocast(stage: Stage) -> Any:
    return autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _run(block: nn.Module, args: Any, kwargs: Any, stage: Stage) -> None:
    """Run the block's forward and backward, with a gradient of ones."""

    def fresh(leaf: Any) -> Any:
        wants = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().requires_grad_() if wants else leaf

    given, named = tree_map(fresh, (args, kwargs))
    with _autocast(stage):
        out = block(*given, **named)
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def _time(run: Callable[[Stage], None], stage: Stage, device: torch.device) -> StepTime:
    """The time of one run in a step, with the host running ahead of the GPU as far as it can."""
    run(stage)  # compiles the block
    if device.type != "cuda":
        return StepTime(_median(lambda: _row_seconds(run, stage)))
    wait = functools.partial(torch.cuda.synchronize, device)
    wait()
    launching = _median(lambda: _row_seconds(run, stage), then=wait)
    kernels = _median(lambda: _kernel_seconds(run, stage, ROW * launching, device))
    return StepTime(kernels, launching)


def _row_seconds(run: Callable[[Stage], None], stage: Stage) -> float:
    """Host seconds for one run."""
    began = time.perf_counter()
    for _ in range(ROW):
        run(stage)
    return (time.perf_counter() - began) / ROW


def _kernel_seconds(
    run: Callable[[Stage], None], stage: Stage, launching: float, device: torch.device
) -> float:
    """GPU seconds for one run, with its kernels queued before the GPU reaches them."""
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cuda.sleep(int(AHEAD * launching * CYCLES))
    begins.record()
    for _ in range(ROW):
        run(stage)
    ends.record()
    torch.cuda.synchronize(device)
    return float(begins.elapsed_time(ends)) / 1000 / ROW


def _median(row: Callable[[], float], then: Callable[[], None] = lambda: None) -> float:
    """The median over enough rows for the GPU to reach its clock of a long step."""
    rows: list[float] = []
    began = time.perf_counter()
    while len(rows) < LEAST_ROWS or time.perf_counter() - began < LEAST_SECONDS:
        rows.append(row())
        then()
    return statistics.median(rows)
