"""Speed at every budget, oomph's and its peers': `python -m benchmarks.frontier --suite S --out O`.

A suite is a model with a global batch, a precision and an optimizer. Every peer and oomph train it
at each budget of device memory, one after the other in processes of their own, under the same cap.
Writes `frontier-S.json` into O after every cell, and oomph's plans into `O/plans`; a second call
runs only what is missing. `--table FILE …` prints the tables of such files anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import LLAMA_PEERS, Peer, generic_peers
from benchmarks.plans import (
    DOES_NOT_FIT,
    GPU,
    PLANNING_S,
    TIMED_OUT,
    in_parallel,
    load,
    plan_or_refusal,
    save,
)
from benchmarks.real_steps import (
    FAILED,
    OK,
    Step,
    Training,
    attempt,
    begin,
    clock,
    environment,
    peaks,
    run_steps,
    set_up,
)
from oomph.gpus import find_gpu
from oomph.job import Job, build_model
from oomph.job_sources import job_from_name
from oomph.planning.plan import Plan
from oomph.rehearsal.hidden import device_overhead
from oomph.running.run import apply
from oomph.units import GIB

OOMPH = "oomph"
NOT_INSTALLED = "not installed"
UNLIMITED = "unlimited"

#: Seconds for all budgets of a peer, or for one of oomph's.
PATIENCE_S = 150
TIMED_STEPS = 3

Cell = dict[str, Any]
#: GiB of device memory; None is all the card has.
Budget = int | None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A job that everybody trains, and who does."""

    name: str
    batch: int
    seq: int
    precision: str = "bf16-mixed"
    optimizer: str = "adamw-fused"
    counts: str = "tokens"
    """What its speed is given in: `tokens` or `samples`."""
    budgets: tuple[Budget, ...] = (None, 64, 40, 24, 16)
    peers: tuple[Peer, ...]

    def job(self) -> Job:
        """The job as a user has it, untouched."""
        return job_from_name(
            self.name,
            batch=self.batch,
            seq=self.seq,
            precision=self.precision,
            optimizer=self.optimizer,
        )

    @property
    def items(self) -> int:
        """Tokens or samples in a step."""
        return self.batch * self.seq if self.counts == "tokens" else self.batch

    @property
    def settings(self) -> str:
        """What was chosen, for the table."""
        return f"{self.batch} × {self.seq}, {self.precision}, {self.optimizer}"


SUITES = {
    suite.name: suite
    for suite in (
        Suite(name="llama-3.2-1b", batch=16, seq=2048, peers=LLAMA_PEERS),
        Suite(
            name="vit-large", batch=512, seq=224, counts="samples", peers=generic_peers(batch=512)
        ),
        Suite(name="t5-large", batch=32, seq=512, peers=generic_peers(batch=32)),
        # Weights, gradients and AdamW's state of 6.9 G parameters take 52 GiB in bf16.
        Suite(
            name="olmoe-1b-7b",
            batch=8,
            seq=2048,
            precision="bf16",
            budgets=(None, 96, 80, 64, 48),
            peers=generic_peers(batch=8),
        ),
    )
}


# -- what is known already -------------------------------------------------------------------------


def results_path(out: Path, suite: Suite) -> Path:
    """Where a suite's results are kept."""
    return out / f"frontier-{suite.name}.json"


def plan_path(out: Path, suite: Suite, budget: Budget) -> Path:
    """Where oomph's plan for a budget is kept, or why there is none."""
    return out / "plans" / f"{suite.name}-{key(budget)}.json"


def key(budget: Budget) -> str:
    """A budget as JSON and the command line have it."""
    return UNLIMITED if budget is None else str(budget)


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """`24,40,unlimited`, the largest first."""
    budgets = [None if word == UNLIMITED else int(word) for word in text.split(",")]
    return tuple(sorted(set(budgets), key=_size, reverse=True))


def _size(budget: Budget) -> float:
    return float("inf") if budget is None else budget


def cap(budget: Budget) -> float:
    """Bytes that PyTorch may reserve: the budget less what no tensor shows."""
    return _size(budget) * GIB - device_overhead(find_gpu(GPU)).expected


def put(path: Path, suite: Suite, row: str, budget: Budget, cell: Cell, **more: Any) -> None:
    """Write a cell into the results; `more` goes beside them."""
    document = load(path, _empty(suite)) | more
    document["rows"].setdefault(row, {})[key(budget)] = cell
    save(path, document)
    rate = f"{cell['rate']:,.1f} {suite.counts}/s" if cell["status"] == OK else cell["status"]
    print(
        f"{suite.name}: {row} at {key(budget)}: {rate} {cell.get('error', '')[-300:]}", flush=True
    )


def _empty(suite: Suite) -> dict[str, Any]:
    return {
        "schema": 1,
        "suite": suite.name,
        "settings": suite.settings,
        "counts": suite.counts,
        "rows": {},
    }


def missing(document: Mapping[str, Any], row: str, budgets: Sequence[Budget]) -> list[Budget]:
    """The budgets at which a row was not run yet."""
    cells = document["rows"].get(row, {})
    done = [name for name, cell in cells.items() if cell["status"] != NOT_INSTALLED]
    return [budget for budget in budgets if key(budget) not in done]


def follows(cells: Mapping[str, Cell], budget: Budget) -> Cell | None:
    """What the same code does at `budget`, where runs with more memory tell; else None.

    A run that never reserved more than the cap goes the same way under it; what ran out with more
    memory runs out with less.
    """
    for name, cell in cells.items():
        if _size(_parse_key(name)) <= _size(budget) or cell["status"] == NOT_INSTALLED:
            continue
        if cell["status"] != OK or cell["reserved"] <= cap(budget):
            return {**cell, "copied": True}
    return None


def _parse_key(name: str) -> Budget:
    return None if name == UNLIMITED else int(name)


# -- one row, in a process of its own --------------------------------------------------------------


def run_peer(suite: Suite, peer: Peer, budgets: Sequence[Budget], out: Path) -> None:
    """Fill a peer's cells; budgets come with the largest first."""
    path = results_path(out, suite)
    ready = functools.cache(functools.partial(_prepare, suite, peer))

    def run(budget: Budget) -> Cell:
        training, step = ready()
        begin(training, _bytes(budget))
        return _measure(suite, step, warm_up=2)

    for budget in budgets:
        cells = load(path, _empty(suite))["rows"].get(peer.name, {})
        cell = follows(cells, budget) or attempt(functools.partial(run, budget))
        put(path, suite, peer.name, budget, cell, environment=environment())


def _prepare(suite: Suite, peer: Peer) -> tuple[Training, Step]:
    training = set_up(suite.job())
    return training, peer.make_step(training, suite.precision)


def run_oomph(suite: Suite, budget: Budget, out: Path) -> None:
    """Fill one of oomph's cells, by the plan that was made for it."""
    path = results_path(out, suite)
    plan = Plan.load(plan_path(out, suite, budget))
    promised = {
        "choices": plan.choices.as_dict(),
        "summary": "; ".join(f"{change.technique}: {change.after}" for change in plan.changes),
        "predicted": plan.as_dict()["predicted"],
        "planning_seconds": plan.planning_seconds,
    }

    def run() -> Cell:
        job = suite.job()
        training = set_up(job)
        begin(training, _bytes(budget))
        planned = dataclasses.replace(
            job, model=training.model, optimizer=training.optimizer, batch=training.batch
        )
        applied = apply(plan, planned)
        return _measure(suite, functools.partial(applied.step, training.batch), warm_up=3)

    cells = load(path, _empty(suite))["rows"].get(OOMPH, {})
    alike = {k: cell for k, cell in cells.items() if cell.get("choices") == promised["choices"]}
    cell = follows(alike, budget) or attempt(run)
    put(path, suite, OOMPH, budget, cell | promised, environment=environment())


def _measure(suite: Suite, step: Step, *, warm_up: int) -> Cell:
    losses = run_steps(step, warm_up)
    seconds = clock(step, TIMED_STEPS)
    return {"rate": suite.items / seconds, "seconds": seconds, "losses": losses, **peaks()}


def _bytes(budget: Budget) -> int | None:
    return None if budget is None else budget * GIB


# -- all rows, one after the other -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one process runs."""

    suite: Suite
    row: str
    budgets: tuple[Budget, ...]


def plan_all(suites: Sequence[Suite], budgets: Sequence[Budget], out: Path, seconds: float) -> None:
    """Make the plans that are not there yet, side by side, before anything is timed."""
    orders = [
        (suite, budget, out)
        for suite in suites
        for budget in budgets_of(suite, budgets)
        if not plan_path(out, suite, budget).exists()
    ]
    for line in in_parallel(_plan, orders, seconds=seconds):
        print(line, flush=True)


def _plan(order: tuple[Suite, Budget, Path]) -> str:
    suite, budget, out = order
    answer = plan_or_refusal(suite.job(), _bytes(budget))
    save(plan_path(out, suite, budget), answer)
    return f"{suite.name} at {key(budget)}: {answer.get('error', 'planned')}"


def budgets_of(suite: Suite, chosen: Sequence[Budget]) -> tuple[Budget, ...]:
    """The budgets that were asked for, or else the suite's own."""
    return tuple(chosen) or suite.budgets


def turns_of(suite: Suite, chosen: Sequence[Budget], only: str | None, out: Path) -> list[Turn]:
    """What is left to run; what needs no run is written at once."""
    path = results_path(out, suite)
    document = load(path, _empty(suite))
    budgets = budgets_of(suite, chosen)
    turns = []
    if only != "peers":
        for budget in missing(document, OOMPH, budgets):
            answer = load(plan_path(out, suite, budget), {})
            if "status" in answer:
                put(path, suite, OOMPH, budget, answer)
            elif answer:
                turns.append(Turn(suite=suite, row=OOMPH, budgets=(budget,)))
    if only != "oomph":
        for peer in suite.peers:
            left = missing(document, peer.name, budgets)
            if left and peer.is_installed:
                turns.append(Turn(suite=suite, row=peer.name, budgets=tuple(left)))
            for budget in left if not peer.is_installed else ():
                put(path, suite, peer.name, budget, {"status": NOT_INSTALLED})
    return turns


def take_turns(turns: Sequence[Turn], out: Path, deadline: float) -> None:
    """Run them one at a time. The next process loads its libraries meanwhile, and waits."""
    waiting: subprocess.Popen[str] | None = None
    for turn, following in itertools.zip_longest(turns, turns[1:]):
        process = waiting or _start(turn, out)
        waiting = _start(following, out) if following else None
        left = deadline - time.monotonic()
        code = _finish(process, max(min(PATIENCE_S, left), 0))
        if code is None and left <= PATIENCE_S:
            break  # the time limit's doing, not the row's
        path = results_path(out, turn.suite)
        ended = {"status": TIMED_OUT} if code is None else _crash(code)
        for budget in missing(load(path, _empty(turn.suite)), turn.row, turn.budgets):
            put(path, turn.suite, turn.row, budget, ended)
    if waiting is not None:
        _kill(waiting)


def _start(turn: Turn, out: Path) -> subprocess.Popen[str]:
    options = {
        "--suite": turn.suite.name,
        "--row": turn.row,
        "--budgets": ",".join(key(budget) for budget in turn.budgets),
        "--out": str(out),
    }
    command = [sys.executable, "-m", "benchmarks.frontier", *itertools.chain(*options.items())]
    # A group of its own, so that a compiler's workers can be ended with it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, process_group=0)


def _finish(process: subprocess.Popen[str], seconds: float) -> int | None:
    """The exit code of a process that may begin now; None where the time was not enough."""
    try:
        process.communicate("go\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        return None
    return process.returncode


def _kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _crash(code: int) -> Cell:
    return {"status": FAILED, "error": f"the process ended with {code}"}


# -- tables ----------------------------------------------------------------------------------------


def fastest_peer(document: Mapping[str, Any], budget: str) -> tuple[str, float] | None:
    """The fastest of those that fit a budget, and its speed."""
    rates = {
        row: cells[budget]["rate"]
        for row, cells in document["rows"].items()
        if row != OOMPH and budget in cells and cells[budget]["status"] == OK
    }
    return max(rates.items(), key=lambda one: one[1]) if rates else None


def ratio(document: Mapping[str, Any], budget: str, against: str) -> float | None:
    """oomph's speed at a budget by that of the fastest peer at another."""
    cell = document["rows"].get(OOMPH, {}).get(budget, {})
    peer = fastest_peer(document, against)
    return cell["rate"] / peer[1] if cell.get("status") == OK and peer else None


def render(document: Mapping[str, Any]) -> str:
    """A suite's tables as markdown."""
    rows: dict[str, dict[str, Cell]] = document["rows"]
    # As they came, oomph last.
    names = sorted(rows, key=lambda row: row == OOMPH)
    known = {_parse_key(name) for cells in rows.values() for name in cells}
    budgets = [key(budget) for budget in sorted(known, key=_size)]
    where = document.get("environment", {})
    machine = ", ".join(
        [
            str(where.get("gpu")),
            *(f"{name} {where.get(name)}" for name in ("torch", "transformers")),
        ]
    )
    titles = [f"{budget} GiB" if budget != UNLIMITED else "no limit" for budget in budgets]
    speeds = [
        [row, *(_speed(document, rows[row].get(budget)) for budget in budgets), *_peaks(rows[row])]
        for row in names
    ]
    shares = [
        ["÷ fastest peer that fits", *(_share(document, budget, budget) for budget in budgets)],
        ["÷ fastest peer, no limit", *(_share(document, budget, UNLIMITED) for budget in budgets)],
        ["fastest peer that fits", *((fastest_peer(document, b) or ("none",))[0] for b in budgets)],
    ]
    promises = [
        [title, *_promise(document, cell)]
        for title, budget in zip(titles, budgets, strict=True)
        if "predicted" in (cell := rows.get(OOMPH, {}).get(budget, {}))
    ]
    speed = f"{document['counts']}/s"
    return "\n".join(
        [
            f"### {document['suite']}, {document['settings']}",
            f"{speed} by budget of device memory; {machine}.",
            "",
            _table([speed, *titles, "peak GiB, no limit", "reserved GiB"], speeds),
            _table(["oomph", *titles], shares),
            _table(
                [
                    "oomph at",
                    f"{speed} predicted",
                    "measured",
                    "reserved GiB predicted",
                    "measured",
                    "planned in s",
                    "how",
                ],
                promises,
            ),
        ]
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _speed(document: Mapping[str, Any], cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["status"] == OK:
        return _rate(document, cell["rate"])
    if cell["status"] == DOES_NOT_FIT:
        return f"needs {cell['smallest'] / GIB:.1f} GiB"
    return str(cell["status"])


def _rate(document: Mapping[str, Any], rate: float) -> str:
    return f"{rate:,.0f}" if document["counts"] == "tokens" else f"{rate:,.1f}"


def _peaks(cells: Mapping[str, Cell]) -> list[str]:
    cell = cells.get(UNLIMITED, {})
    return [f"{cell[name] / GIB:.2f}" if name in cell else "" for name in ("allocated", "reserved")]


def _share(document: Mapping[str, Any], budget: str, against: str) -> str:
    share = ratio(document, budget, against)
    return f"{share:.3f}" if share is not None else ""


def _promise(document: Mapping[str, Any], cell: Cell) -> list[str]:
    predicted = cell["predicted"]
    count = predicted["tokens"] or predicted["samples"]
    reserved = f"{cell['reserved'] / GIB:.2f}" if "reserved" in cell else ""
    return [
        _rate(document, count / predicted["seconds"]),
        _speed(document, cell),
        f"{predicted['peak']['reserved'] / GIB:.2f}",
        reserved,
        f"{cell['planning_seconds']:.1f}",
        cell["summary"],
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run suites, or one row of a suite, or print what was run."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="benchmarks.frontier", description=__doc__)
    parser.add_argument("--suite", help=f"of {', '.join(SUITES)}; several with commas between")
    parser.add_argument("--out", type=Path, help="the folder for results")
    parser.add_argument("--only", choices=["oomph", "peers"])
    parser.add_argument("--budgets", type=parse_budgets, default=(), help="as 24,40,unlimited")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--row", help="run this row here, once a line is read from the input")
    parser.add_argument("--table", type=Path, nargs="+", help="print these files and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(render(json.loads(file.read_text())) for file in options.table))
        return
    names = (options.suite or "").split(",")
    if options.out is None or not set(names) <= SUITES.keys():
        parser.error(f"give --out, and a --suite of {', '.join(SUITES)}")
    suites = [SUITES[name] for name in names]
    if options.row:
        _wait_for_turn(suites[0])
        run_row(suites[0], options.row, options.budgets, options.out)
        return
    deadline = time.monotonic() + options.time_limit
    if options.only != "peers":
        plan_all(suites, options.budgets, options.out, min(PLANNING_S, options.time_limit))
    turns = [
        turn
        for suite in suites
        for turn in turns_of(suite, options.budgets, options.only, options.out)
    ]
    take_turns(turns, options.out, deadline)
    for suite in suites:
        print(render(load(results_path(options.out, suite), _empty(suite))))


def run_row(suite: Suite, row: str, budgets: Sequence[Budget], out: Path) -> None:
    """Fill a row's cells in this process."""
    if row == OOMPH:
        for budget in budgets:
            run_oomph(suite, budget, out)
    else:
        peer = next(peer for peer in suite.peers if peer.name == row)
        run_peer(suite, peer, budgets, out)


def _wait_for_turn(suite: Suite) -> None:
    """Import what the model needs, then wait; the end of input means that nobody wants the row."""
    with torch.device("meta"):
        build_model(suite.job())
    if not sys.stdin.readline():
        sys.exit("nothing was asked for")


if __name__ == "__main__":
    main()
