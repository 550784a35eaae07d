"""Plans against reality: `python -m benchmarks.plans --out OUT [--time-limit SECONDS]`.

For many models and budgets a plan is made, with no use of the GPU, and then run in a process of its
own under a cap that is the plan's budget; before they run, the machine is measured. Prints how far
measured peaks and seconds are from the predicted ones, and which plans ran out. Writes `plans.json`
into OUT after each pair; a second call goes on where the first one stopped. Anywhere: `--table
FILE` prints what a file holds, `--foretell FILE` adds the seconds that are predicted by what its
machine was measured to reach, `--clock FILE` predicts the seconds of its plans again, by the clock
of today, and compares them with the measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from benchmarks.accuracy import statistics_line
from benchmarks.real_steps import (
    OK,
    OUT_OF_MEMORY,
    attempt,
    begin,
    clock,
    environment,
    made_here,
    peaks,
    run_steps,
    set_up,
)
from benchmarks.side_by_side import (
    FAILED,
    OUT_OF_HOST_MEMORY,
    TIMED_OUT,
    Seat,
    SharedCard,
    Task,
)
from benchmarks.stored_choices import stored_choices
from oomph.errors import DoesNotFit
from oomph.hardware import find_gpu
from oomph.hardware.measuring import measure_machine
from oomph.hardware.profile import Profile, save_profile
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.jobs.sources import job_from_name
from oomph.plans.choices import Choices
from oomph.plans.plan import Plan
from oomph.rehearsal.estimation import estimate
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.step_cost import step_cost
from oomph.runs.run import apply
from oomph.search.option_profiles import count_parts
from oomph.search.planner import plan as make_plan

GPU = "h200"
#: Ways to end that say nothing about the plan.
OTHER_ENDS = (FAILED, TIMED_OUT, OUT_OF_HOST_MEMORY)
DOES_NOT_FIT = "does not fit"

#: Processes that plan at a time, and the seconds they all have together.
PLANNERS, PLANNING_S = 16, 300
A_DAY_S = 86_400
#: Seconds for measuring the machine.
MEASURING_S = 25
#: Plans that run at a time, and the seconds each has.
AT_ONCE, PATIENCE_S = 9, 150
#: Parts of the untouched job's memory that are given as budgets.
SHARES = (0.9, 0.6, 0.4)

#: model, batch, seq, precision, optimizer
_JOBS = """
llama-3.2-1b 4 2048 bf16-mixed adamw-fused
tinyllama-1.1b 4 2048 bf16-mixed adamw
qwen2.5-0.5b 4 2048 bf16-mixed adamw-fused
qwen3-0.6b 4 2048 bf16-mixed adamw
gpt2-large 8 1024 bf16-mixed adamw-fused
gpt2-medium 16 1024 bf16-mixed adamw
pythia-1b 4 2048 bf16-mixed adamw
opt-1.3b 8 1024 bf16-mixed sgd-momentum
smollm2-360m 8 2048 bf16-mixed adamw-fused
gemma-3-1b 4 1024 bf16-mixed adamw-fused
olmoe-1b-7b 4 1024 bf16 sgd
bert-large 32 512 bf16-mixed adamw
roberta-large 16 512 bf16-mixed adamw-fused
modernbert-base 16 1024 bf16-mixed adamw
deberta-v3-base 16 512 bf16-mixed adamw
t5-base 16 512 bf16-mixed adamw
t5-large 8 512 bf16-mixed adamw-fused
bart-large 8 1024 bf16-mixed adamw
vit-large 64 224 bf16-mixed adamw-fused
dinov2-large 64 224 bf16-mixed adamw
convnext-base 64 224 bf16-mixed adamw
swin-base 64 224 bf16-mixed adamw-fused
resnet-50 128 224 fp32 sgd-momentum
whisper-small 8 128 bf16-mixed adamw
wav2vec2-base 16 48000 bf16-mixed adamw-fused
"""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A job, and the part of its memory that it may have."""

    model: str
    batch: int
    seq: int
    precision: str
    optimizer: str
    share: float

    @property
    def name(self) -> str:
        """Names the pair in files."""
        shape = f"{self.batch}x{self.seq}"
        return f"{self.model}/{shape}/{self.precision}/{self.optimizer}/{100 * self.share:.0f}%"

    def job(self) -> Job:
        """The job as a user has it, untouched."""
        return job_from_name(
            self.model,
            batch=self.batch,
            seq=self.seq,
            precision=self.precision,
            optimizer=self.optimizer,
        )


def all_pairs() -> list[Pair]:
    """Every job with the largest share first, so that a run cut short has seen all models."""
    jobs = [row.split() for row in _JOBS.strip().split("\n")]
    return [
        Pair(
            model=model,
            batch=int(batch),
            seq=int(seq),
            precision=precision,
            optimizer=optimizer,
            share=share,
        )
        for share in SHARES
        for model, batch, seq, precision, optimizer in jobs
    ]


# -- planning, with no use of the GPU ----------------------------------------------------------


def plan_or_refusal(job: Job, budget: int | None, host: int | None = None) -> Entry:
    """The plan as plain JSON; or a status and the reason why there is none."""
    try:
        return make_plan(job, budget=budget, host=host, gpu=GPU).as_dict()
    except DoesNotFit as error:
        return {"status": DOES_NOT_FIT, "smallest": error.smallest, "error": str(error)}
    except Exception:
        return {"status": FAILED, "error": traceback.format_exc()[-1500:]}


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)


def in_parallel(
    work: Callable[[_Item], _Result], items: Sequence[_Item], *, seconds: float
) -> Iterator[_Result]:
    """Results in the order they come, from processes of their own; none after `seconds`."""
    deadline = time.monotonic() + seconds
    if not items:
        return
    # Spawned: a process that rehearsed can no longer give a forked child the GPU.
    with multiprocessing.get_context("spawn").Pool(
        min(PLANNERS, os.cpu_count() or 1, len(items)), initializer=_be_quiet
    ) as pool:
        results = pool.imap_unordered(work, items)
        for _ in items:
            try:
                yield results.next(timeout=max(deadline - time.monotonic(), 0))
            except multiprocessing.TimeoutError:
                return


def plan_pair(pair: Pair) -> tuple[str, Entry]:
    """A plan for the pair's budget; or, where none fits, for the smallest that is said to do."""
    job = pair.job()
    untouched = estimate(job, gpu=GPU).peak.device
    budget = int(pair.share * untouched)
    answer = plan_or_refusal(job, budget)
    if answer.get("status") == DOES_NOT_FIT:
        budget = answer["smallest"]
        answer = plan_or_refusal(job, budget)
    entry = {"untouched": untouched, "budget": budget}
    return pair.name, entry | (answer if "status" in answer else {"plan": answer})


# -- running ---------------------------------------------------------------------------------------


def run_pair(pair: Pair, entry: Entry, seat: Seat) -> Entry:
    """Train under the plan and its cap, evaluate and save: all that the plan made promises for."""
    plan = made_here(Plan.from_dict(entry["plan"]))
    job = pair.job()
    training = set_up(job)
    if plan.choices.leaves:
        training.model.cpu()  # it comes to the card as far as the plan says
    begin(training, plan.budget)
    planned = dataclasses.replace(
        job, model=training.model, optimizer=training.optimizer, batch=training.batch
    )
    run = apply(plan, planned, device=training.device)
    step = functools.partial(run.step, training.batch)
    found: Entry = {"losses": run_steps(step, 2)}
    with seat.alone():
        found["seconds"] = clock(step, 3)
    run.evaluate([training.batch])
    for tensor in run.model.state_dict().values():
        tensor.cpu()
    return found | peaks() | {"environment": environment()}


def task_of(pair: Pair, entry: Entry, finish: Callable[[Pair, Entry], None]) -> Task:
    """A planned pair as work for a process."""

    def work(seat: Seat) -> None:
        seat.tell(attempt(functools.partial(run_pair, pair, entry, seat)))

    def end(how: Entry) -> None:
        if how:
            finish(pair, how)

    return Task(needs=entry["budget"], work=work, hear=functools.partial(finish, pair), end=end)


# -- saying it -------------------------------------------------------------------------------------


def render(document: Entry) -> str:
    """What the pairs show, as markdown."""
    pairs: dict[str, Entry] = document["pairs"]
    ran = {name: entry for name, entry in pairs.items() if entry.get("status") == OK}
    lines = [f"{len(pairs)} pairs planned, {len(ran)} ran; measured against predicted:", ""]
    for ledger in ("allocated", "reserved"):
        errors = [100 * (entry[ledger] / _predicted(entry, ledger) - 1) for entry in ran.values()]
        lines.append(f"- {statistics_line(ledger, errors)}")
    timed = [entry for entry in ran.values() if "seconds" in entry]
    as_planned = [entry["seconds"] / entry["plan"]["predicted"]["seconds"] for entry in timed]
    here = [e["seconds"] / e["predicted_here"] for e in timed if "predicted_here" in e]
    lines += [
        *_seconds_line("seconds, measured ÷ predicted", as_planned),
        *_seconds_line("the same ÷ predicted by the machine's own profile", here),
        _listed("ran out of memory", _with_status(pairs, OUT_OF_MEMORY)),
        _listed("took more than the interval", [n for n, entry in ran.items() if overran(entry)]),
        _listed("allocator gave cache back", [n for n, entry in ran.items() if entry["retries"]]),
        _listed("refused the budget they named", _with_status(pairs, DOES_NOT_FIT)),
        _listed("failed otherwise", _with_status(pairs, *OTHER_ENDS)),
        "",
        "| pair | untouched GiB | budget GiB | reserved GiB | error % | retries | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_row(name, entry) for name, entry in pairs.items()]) + "\n"


def _seconds_line(what: str, ratios: list[float]) -> Iterator[str]:
    if ratios:
        yield (
            f"- {what}, {len(ratios)} timed: median {statistics.median(ratios):.2f}, from"
            f" {min(ratios):.2f} to {max(ratios):.2f}, {_near(ratios)} within 25 %"
        )


def _near(ratios: Iterable[float]) -> int:
    return sum(abs(ratio - 1) <= 0.25 for ratio in ratios)


def overran(entry: Entry) -> bool:
    """Whether a plan took more than the end of its interval."""
    device = entry["reserved"] + device_overhead(find_gpu(GPU)).expected
    return bool(device > entry["plan"]["predicted"]["high"])


def _predicted(entry: Entry, ledger: str) -> int:
    return int(entry["plan"]["predicted"]["peak"][ledger])


def _with_status(pairs: dict[str, Entry], *statuses: str) -> list[str]:
    return [name for name, entry in pairs.items() if entry.get("status") in statuses]


def _listed(what: str, names: list[str]) -> str:
    return f"- {what}: {len(names)}" + (f" ({', '.join(names)})" if names else "")


def _row(name: str, entry: Entry) -> str:
    cells = [name, f"{entry['untouched'] / 2**30:.2f}", f"{entry['budget'] / 2**30:.2f}"]
    if entry.get("status") == OK:
        error = 100 * (entry["reserved"] / _predicted(entry, "reserved") - 1)
        cells += [f"{entry['reserved'] / 2**30:.2f}", f"{error:+.2f}", str(entry["retries"])]
    else:
        cells += ["", "", ""]
    return f"| {' | '.join([*cells, entry.get('status', 'not run')])} |"


# -- predicting again ------------------------------------------------------------------------------


def predicted_again(pair: Pair, choices: Choices) -> float:
    """Seconds of a step by today's clock."""
    job, gpu = pair.job(), find_gpu(GPU)
    clock = Clock.of(gpu)
    timeline = rehearse(job, gpu, ("build", "first step", "step"), choices=choices, clock=clock)
    return step_cost(timeline, count_parts(job, choices.micro_batch)).seconds(clock)


def _predict_again(named: tuple[str, Entry]) -> tuple[str, float]:
    name, entry = named
    pair = next(pair for pair in all_pairs() if pair.name == name)
    return name, predicted_again(pair, stored_choices(entry["plan"]["choices"]))


def _predict_by(profile: Entry, named: tuple[str, Entry]) -> tuple[str, float]:
    with timed_by(profile):
        return _predict_again(named)


@contextlib.contextmanager
def timed_by(profile: Entry) -> Iterator[None]:
    """While active, clocks go by this profile of a machine and not by one that is kept on it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CONFIG_HOME=folder),
    ):
        save_profile(Profile.from_dict(profile))
        yield


def measure_here(document: Entry, path: Path, *, deadline: float) -> None:
    """Find out what this machine reaches, once."""
    if "profile" in document:
        return
    # In a process of its own: those that run plans are given the card by this one.
    for profile in in_parallel(_measured, [MEASURING_S], seconds=deadline - time.monotonic()):
        document["profile"] = profile
    save(path, document)


def foretell(document: Entry, path: Path) -> None:
    """Predict the seconds of all plans by what their machine was measured to reach."""
    entries: dict[str, Entry] = document["pairs"]
    planned = [(name, entry) for name, entry in entries.items() if "plan" in entry]
    work = functools.partial(_predict_by, document["profile"])
    for name, seconds in in_parallel(work, planned, seconds=A_DAY_S):
        entries[name]["predicted_here"] = seconds
    save(path, document)


def _measured(seconds: float) -> Entry:
    return measure_machine(seconds=seconds).as_dict()


def check_clock(document: Entry) -> str:
    """Measured seconds over those predicted today, as text."""
    timed = [(name, entry) for name, entry in document["pairs"].items() if "seconds" in entry]
    again = dict(in_parallel(_predict_again, timed, seconds=A_DAY_S))
    ratios = {name: entry["seconds"] / again[name] for name, entry in timed}
    middle = statistics.median(ratios.values())
    lines = [f"{_near(ratios.values())} of {len(ratios)} within 25 %, median {middle:.2f}", ""]
    return "\n".join(lines + [f"{ratio:.2f} {name}" for name, ratio in sorted(ratios.items())])


# -- all together ----------------------------------------------------------------------------------


def load(path: Path, empty: Entry) -> Entry:
    """What a file of results holds, or what it begins with."""
    return dict(json.loads(path.read_text())) if path.exists() else empty


def save(path: Path, document: Entry) -> None:
    """Replace the file by a whole one: who is killed while writing keeps the old."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def measure(
    out: Path, *, deadline: float, only_plans: bool = False, only_runs: bool = False
) -> Entry:
    """Plan and run what the file in `out` does not hold yet; or do one of both."""
    path = out / "plans.json"
    document = load(path, {"schema": 1, "pairs": {}})
    entries = document["pairs"]
    unplanned = [pair for pair in all_pairs() if pair.name not in entries and not only_runs]
    seconds = min(A_DAY_S if only_plans else PLANNING_S, deadline - time.monotonic())
    for name, entry in in_parallel(plan_pair, unplanned, seconds=seconds):
        entries[name] = entry
        save(path, document)
        print(f"{name}: {entry.get('status', 'planned')}", flush=True)
    if not only_plans:
        measure_here(document, path, deadline=deadline)
        card = SharedCard(at_once=AT_ONCE, patience=PATIENCE_S, deadline=deadline)
        card.run(tasks_of(document, path))
    return document


def tasks_of(document: Entry, path: Path) -> list[Task]:
    """What was planned and is not run yet, the largest first; the outcomes go into the file."""
    entries: dict[str, Entry] = document["pairs"]

    def finish(pair: Pair, found: Entry) -> None:
        document.update(found.pop("environment", {}))
        entries[pair.name] |= found
        save(path, document)
        print(f"{pair.name}: {found['status']} {found.get('error', '')[-300:]}", flush=True)

    waiting = _not_run(document)
    left = [pair for pair in all_pairs() if pair.name in waiting]
    left.sort(key=lambda pair: -int(entries[pair.name]["budget"]))
    return [task_of(pair, entries[pair.name], finish) for pair in left]


def _not_run(document: Entry) -> set[str]:
    entries: dict[str, Entry] = document["pairs"]
    return {name for name, entry in entries.items() if "plan" in entry and "status" not in entry}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.plans", description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder for plans.json")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--only-plans", action="store_true", help=f"make plans for {GPU}, no more")
    parser.add_argument(
        "--only-runs", action="store_true", help="run plans that are there, no more"
    )
    parser.add_argument("--table", type=Path, help="print this file and measure nothing")
    parser.add_argument("--foretell", type=Path, help="predict by this file's own machine")
    parser.add_argument("--clock", type=Path, help="predict this file's seconds again")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(render(json.loads(options.table.read_text())))
    elif options.foretell is not None:
        document = json.loads(options.foretell.read_text())
        if "profile" not in document:
            parser.error("the machine of this file was not measured: use --clock")
        foretell(document, options.foretell)
        print(render(document))
    elif options.clock is not None:
        print(check_clock(json.loads(options.clock.read_text())))
    elif options.out is not None:
        deadline = time.monotonic() + options.time_limit
        document = measure(
            options.out,
            deadline=deadline,
            only_plans=options.only_plans,
            only_runs=options.only_runs,
        )
        print(render(document))
    else:
        parser.error("give --out to measure, or --table to print")


if __name__ == "__main__":
    main()
