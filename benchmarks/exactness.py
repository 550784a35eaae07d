"""Plans called exact, beside the untouched trainings of the zoo: `python -m benchmarks.exactness`.

Each model is fitted at shares of its natural peak, trained for some steps, given back, and trained
for two more; losses, weights, buffers and optimizer state are compared with those of the training
that its user wrote. A share for which no plan fits is tried again with the least budget that was
named. Every case runs in a process of its own, on the card where there is one.

    python -m benchmarks.exactness [NAME …] [--shares 0.6,0.4] [--out FILE] [--jobs 2]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import oomph
from benchmarks.courses import Course, Snapshot, Training, train_untouched, train_with
from benchmarks.zoo import ZOO, Entry
from oomph.errors import DoesNotFit, OomphError
from oomph.hardware import find_gpu

EQUAL, WRONG, REFUSED, CRASHED = "equal", "wrong", "refused", "crashed"
CHANGED, OVER, SLOW, UNUSABLE = "changed after a refusal", "over its budget", "slow", "unusable"
#: How far a loss may be off, and the weights' movement, each beside its own size. Sums in another
#: order move them by 1e-7 in a step; Adam's division makes more of that where gradients are tiny.
LOSS_APART, MOVEMENT_APART = 2e-4, 5e-3
LIMIT_S = 400
#: With the least budget that was named, a plan is asked for again: it may be some bytes off.
FITS = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one case ended."""

    name: str
    share: float
    status: str
    detail: str = ""
    apart: float = 0.0
    """How far the weights' movement is off, beside its size."""
    planned: str = ""
    """What the plan does."""
    planning_s: float = 0.0
    budget: int = 0
    predicted: int = 0
    measured: int = 0
    """Device memory; measured on a card alone."""


def make(entry: Entry, device: str, dtype: torch.dtype | None = None) -> Training:
    """The training before its first step; all its floats in another type, if one is named."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    training = entry.make()
    training.model.train()
    if device != "cpu":
        training.model.to(device)
        training.batches = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, training.batches
        )
    if dtype is not None:
        training.model.to(dtype)
        training.batches = tree_map(
            lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, list(training.batches)
        )
    return training


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def try_case(entry: Entry, share: float, device: str, allow: str) -> Result:
    """One model at one share of its natural peak."""
    result = _try_in(entry, share, device, allow, None)
    if result.status != WRONG:
        return result
    # Rounding is nothing in fp64, and a mistake as large as before. Where a gradient is zero, as
    # that of a bias before batch norm, Adam makes whole steps of fp32's rounding.
    again = _try_in(entry, share, device, allow, torch.float64)
    if again.status != EQUAL:
        return result
    return dataclasses.replace(again, detail=f"in fp64; in fp32 {result.detail}")


def _try_in(
    entry: Entry, share: float, device: str, allow: str, dtype: torch.dtype | None
) -> Result:
    result = Result(name=entry.name, share=share, status=EQUAL)
    try:
        expected = train_untouched(make(entry, device, dtype))
    except Exception as error:
        return _ended(result, UNUSABLE, error)
    start = _snapshot_before(make(entry, device, dtype))
    found: dict[str, Any] = {}

    def fitted(training: Training) -> oomph.Run:
        job = oomph.Job(
            training.model,
            training.loss,
            training.optimizer,
            training.batches[0],
            **training.options,
        )
        began = time.process_time()
        gpu = None if device == "cpu" else find_gpu(torch.cuda.get_device_name())
        natural = oomph.estimate(job, gpu=gpu).peak.device
        run = _fit(training, int(share * natural), allow)
        found.update(run=run, seconds=time.process_time() - began)
        return run

    try:
        course = train_with(make(entry, device, dtype), fitted)
        if entry.draws and course.part is not None:
            expected = train_untouched(make(entry, device, dtype), course.part)
    except Exception as error:
        return _ended(result, CRASHED, error)
    if "run" in found:
        plan = found["run"].plan
        result = dataclasses.replace(
            result,
            planned=", ".join(f"{c.technique}: {c.after}" for c in plan.changes),
            planning_s=round(found["seconds"], 1),
            budget=plan.budget,
            predicted=plan.predicted.peak.device,
        )
    return _judge(result, course, expected, start)


def _fit(training: Training, budget: int, allow: str) -> oomph.Run:
    def fit(budget: int) -> oomph.Run:
        return oomph.fit(
            training.model,
            training.optimizer,
            training.loss,
            training.batches[0],
            budget=budget,
            allow=allow,
            **training.options,
        )

    for _ in range(FITS - 1):
        try:
            return fit(budget)
        except DoesNotFit as error:
            budget = error.smallest
    return fit(budget)


def _snapshot_before(training: Training) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


def _judge(result: Result, course: Course, expected: Course, start: Mapping[str, Tensor]) -> Result:
    apart, what = 0.0, ""
    for step, (one, other) in enumerate(zip(course.snapshots, expected.snapshots, strict=True)):
        off = _apart_in_loss(one, other)
        if not off <= LOSS_APART:
            what = what or f"the loss of step {step + 1} is {off:.2g} off"
        moved = _apart_in_weights(one, other, start)
        apart = max(apart, moved)
        if not moved <= MOVEMENT_APART:
            what = what or f"the weights after step {step + 1} are {moved:.2g} off"
        what = what or _apart_elsewhere(one, other, step)
    result = dataclasses.replace(result, apart=apart, detail=what)
    if course.refusal is not None:
        status = CHANGED if what else REFUSED
        said = f"{type(course.refusal).__name__}: {course.refusal}"
        return dataclasses.replace(result, status=status, detail=f"{what} {said}".strip())
    return dataclasses.replace(result, status=WRONG if what else EQUAL)


def _apart_in_loss(one: Snapshot, other: Snapshot) -> float:
    mine, theirs = float(one["loss"]), float(other["loss"])
    if not np.isfinite(theirs):
        return 0.0 if not np.isfinite(mine) else np.inf
    return abs(mine - theirs) / max(abs(theirs), 1e-2)


def _apart_in_weights(one: Snapshot, other: Snapshot, start: Mapping[str, Tensor]) -> float:
    off = moved = 0.0
    for name, before in start.items():
        mine, theirs = one["weights"].get(name), other["weights"].get(name)
        if mine is None or theirs is None:
            continue  # kept out of the state by the model itself
        off += float((mine - theirs).abs().double().square().sum())
        moved += float((theirs - before).abs().double().square().sum())
    return float(np.sqrt(off / moved)) if moved else float(off > 0)


def _apart_elsewhere(one: Snapshot, other: Snapshot, step: int) -> str:
    mine, theirs = one["buffers"], other["buffers"]
    if mine.keys() != theirs.keys():
        return f"there are other buffers after step {step + 1}"
    for name, buffer in theirs.items():
        if not torch.allclose(mine[name].double(), buffer.double(), 1e-3, 1e-5, equal_nan=True):
            return f"the buffer {name} is another after step {step + 1}"
    counts = [len(tree_leaves(taken["optimizer"]["state"])) for taken in (one, other)]
    return "" if counts[0] == counts[1] else f"the optimizer's state after step {step + 1}"


def _ended(result: Result, status: str, error: Exception) -> Result:
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).strip().split("\n")[0]
    place = f"{Path(last.filename).name}:{last.lineno}"
    if isinstance(error, OomphError):
        status = REFUSED
    return dataclasses.replace(
        result, status=status, detail=f"{type(error).__name__}: {said} ({place})"
    )


# -- processes -------------------------------------------------------------------------------------


def _child(pipe: Connection, name: str, share: float, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    entry = ZOO[name]
    result = try_case(entry, share, options.device, options.allow)
    if options.device != "cpu":
        result = _with_measured(result)
    pipe.send(result)


def _with_measured(result: Result) -> Result:
    """What the card's allocator took from the driver, and whether that is more than the budget."""
    reserved = torch.cuda.max_memory_reserved()
    over = result.budget and reserved > result.budget
    status = OVER if over and result.status == EQUAL else result.status
    return dataclasses.replace(result, measured=reserved, status=status)


def run_cases(cases: Sequence[tuple[str, float]], options: argparse.Namespace) -> Iterator[Result]:
    """Every case in a process of its own, some at a time; as they end."""
    context: Any = multiprocessing.get_context("fork")  # what is imported here is imported there
    waiting = list(cases)
    running: dict[Connection, tuple[Any, str, float, float]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name, share = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(there, name, share, options))
            process.start()
            there.close()
            running[here] = process, name, share, time.monotonic()
        ready = set(wait(list(running), timeout=1))
        for pipe in list(running):
            process, name, share, began = running[pipe]
            late = time.monotonic() - began > options.limit
            if pipe not in ready and not late:
                continue
            result = Result(name=name, share=share, status=SLOW if late else CRASHED)
            with contextlib.suppress(EOFError):
                if pipe in ready:
                    result = pipe.recv()
            process.kill() if late else process.join()
            if result.status == CRASHED and not result.detail:
                died = f"its process ended with {process.exitcode}"
                result = dataclasses.replace(result, detail=died)
            del running[pipe]
            yield result


def _said(result: Result) -> str:
    line = f"{result.status:<24} {result.name} at {result.share:.0%}"
    apart = f" ({result.apart:.1e} apart)" if result.apart else ""
    detail = f": {result.detail}" if result.detail else ""
    return f"{line}{apart}{detail}  [{result.planned or 'no plan'}; {result.planning_s:.0f} s]"


def main(words: Iterable[str] | None = None) -> None:
    """Run the cases that are asked for, and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; a part of a name selects all with it")
    parser.add_argument("--shares", default="0.6,0.4")
    parser.add_argument("--allow", default="exact")
    parser.add_argument("--device", default="cuda" if torch.accelerator.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="where all results are written as JSON lines")
    options = parser.parse_args(None if words is None else list(words))
    chosen = [
        name
        for name, entry in ZOO.items()
        if entry.is_installed and (not options.names or any(p in name for p in options.names))
    ]
    cases = [(name, float(share)) for name in chosen for share in options.shares.split(",")]
    counts: Counter[str] = Counter()
    models: dict[str, set[str]] = {}
    out = options.out.open("a", encoding="utf-8") if options.out else None
    for at, result in enumerate(run_cases(cases, options)):
        counts[result.status] += 1
        models.setdefault(result.status, set()).add(result.name)
        print(f"{at + 1}/{len(cases)} {_said(result)}", flush=True)
        if out is not None:
            print(json.dumps(dataclasses.asdict(result)), file=out, flush=True)
    print(f"\n{len(chosen)} models, {len(cases)} fits")
    for status, count in counts.most_common():
        print(f"  {status}: {count} fits of {len(models[status])} models")


if __name__ == "__main__":
    main()
