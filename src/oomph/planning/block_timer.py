"""Blocks, timed for real: what each option of a menu takes on the device the model is on.

One micro-batch runs through the model until every kind of block has been called once; those calls
are kept and repeated, forward and backward, under each option. It needs the memory of one block.
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
from torch.utils._pytree import tree_leaves, tree_map

from oomph.job import Job, compute_loss, split_batch
from oomph.planning.choices import Choices
from oomph.planning.pace import Pace
from oomph.running.applying import apply_choices
from oomph.running.step import Stage
from oomph.techniques.autocast import autocast

#: Runs in a row, which the card's queue of launches holds.
ROW = 4
#: Rows that are timed, at least, and for how many seconds: a card slows its clock after a while.
LEAST_ROWS, LEAST_SECONDS = 5, 0.5
#: How much longer than the host takes to launch a row the card is kept busy before it.
AHEAD = 1.5
#: Cycles of the clock in a second of the fastest cards, and more.
CYCLES = 2.2e9

#: Of a block's forward and backward, by its path and its option.
Times = Mapping[tuple[str, str], Pace]


@dataclass(frozen=True, kw_only=True)
class BlockTimer:
    """Times blocks of a real model; the planner asks it where there is one."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    """On the model's device."""

    def time(self, choices: Choices, menus: Mapping[str, Sequence[str]]) -> Times:
        """What each option of each of these blocks takes, under the other choices."""
        device = next(self.model.parameters()).device
        times: dict[tuple[str, str], Pace] = {}
        calls = self._calls(choices, tuple(menus))
        for option in dict.fromkeys(option for menu in menus.values() for option in menu):
            paths = [path for path, menu in menus.items() if option in menu and path in calls]
            applied = dataclasses.replace(
                choices,
                blocks=dict.fromkeys(paths, option),
                optimizer_in_backward=False,
                cuda_graph=False,
                allocator="",
            )
            with self._applied(applied, device) as stage:
                for path in paths:
                    run = functools.partial(_run, self.model.get_submodule(path), *calls[path])
                    times[path, option] = _time(run, stage, device)
        self.optimizer.zero_grad(set_to_none=True)
        return times

    def _calls(self, choices: Choices, paths: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """The arguments each block is called with, from a forward that ends at the last of them."""
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
            choices, blocks={}, optimizer_in_backward=False, cuda_graph=False, allocator=""
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
    """Every block has been called."""


def _autocast(stage: Stage) -> Any:
    return autocast(stage.job.precision, stage.device_type, cast_cache=stage.cast_cache)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _run(block: nn.Module, args: Any, kwargs: Any, stage: Stage) -> None:
    """The block's forward and backward, with a gradient of ones."""

    def fresh(leaf: Any) -> Any:
        wants = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().requires_grad_() if wants else leaf

    given, named = tree_map(fresh, (args, kwargs))
    with _autocast(stage):
        out = block(*given, **named)
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def _time(run: Callable[[Stage], None], stage: Stage, device: torch.device) -> Pace:
    """What one run takes in a step, where the host runs ahead of the card as far as it can."""
    run(stage)  # compiles
    if device.type != "cuda":
        return Pace(_median(lambda: _row_seconds(run, stage)))
    wait = functools.partial(torch.cuda.synchronize, device)
    wait()
    launching = _median(lambda: _row_seconds(run, stage), then=wait)
    kernels = _median(lambda: _kernel_seconds(run, stage, ROW * launching, device))
    return Pace(kernels, launching)


def _row_seconds(run: Callable[[Stage], None], stage: Stage) -> float:
    """Seconds of the host for one run."""
    began = time.perf_counter()
    for _ in range(ROW):
        run(stage)
    return (time.perf_counter() - began) / ROW


def _kernel_seconds(
    run: Callable[[Stage], None], stage: Stage, launching: float, device: torch.device
) -> float:
    """Seconds of the card for one run, whose kernels wait in its queue when it comes to them."""
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(AHEAD * launching * CYCLES))
    begins.record()
    for _ in range(ROW):
        run(stage)
    ends.record()
    torch.cuda.synchronize(device)
    return float(begins.elapsed_time(ends)) / 1000 / ROW


def _median(row: Callable[[], float], then: Callable[[], None] = lambda: None) -> float:
    """The median of as many rows as it takes for the card to run as in a step that lasts."""
    rows: list[float] = []
    began = time.perf_counter()
    while len(rows) < LEAST_ROWS or time.perf_counter() - began < LEAST_SECONDS:
        rows.append(row())
        then()
    return statistics.median(rows)
