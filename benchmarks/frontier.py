"""Speed at every budget, oomph's and its peers': `python -m benchmarks.frontier --suite S --out O`.

A suite is a model with a global batch, a precision and an optimizer. Every peer and oomph train it
at each budget of device memory, in processes of their own, under the same cap, and are timed one at
a time. Writes `frontier-S.json` into O after every cell, and oomph's plans into `O/plans`; a second
call runs only what is missing. `--table FILE …` prints the tables of such files anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import LLAMA_PEERS, Peer, checkpoint, generic_peers
from benchmarks.plans import (
    DOES_NOT_FIT,
    GPU,
    PLANNING_S,
    in_parallel,
    load,
    plan_or_refusal,
    save,
)
from benchmarks.real_steps import (
    OK,
    OUT_OF_MEMORY,
    Step,
    Training,
    attempt,
    begin,
    clock,
    environment,
    load_plan,
    peaks,
    run_steps,
    set_up,
    summary,
)
from benchmarks.side_by_side import ROOM, Seat, SharedCard, Task
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.jobs.sources import job_from_name
from oomph.plans.plan import Plan
from oomph.rehearsal.estimation import estimate
from oomph.rehearsal.hidden import device_overhead
from oomph.runs.run import apply
from oomph.units import GIB

OOMPH = "oomph"
NOT_INSTALLED = "not installed"
UNLIMITED = "unlimited"
#: What ran out of its place beside others, not out of its budget.
CROWDED = "crowded"

#: Rows that run at a time, and seconds for all budgets of a peer, or for one of oomph's.
AT_ONCE, PATIENCE_S = 3, 150
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
        Suite(
            name="llama-3.2-1b",
            batch=16,
            seq=2048,
            budgets=(None, 64, 40, 24, 16, 12, 8),
            peers=LLAMA_PEERS,
        ),
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


def places_path(out: Path, suite: Suite) -> Path:
    """Where the memory that peers are thought to need is kept."""
    return out / "plans" / f"{suite.name}-places.json"


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

    A run that never reserved more than the cap goes the same way under it; one whose tensors took
    more runs out, and so does what ran out with more memory.
    """
    # The least memory above the budget tells most.
    for name, cell in sorted(cells.items(), key=lambda one: _size(_parse_key(one[0]))):
        if _size(_parse_key(name)) <= _size(budget) or cell["status"] == NOT_INSTALLED:
            continue
        if cell["status"] != OK or cell["reserved"] <= cap(budget):
            return {**cell, "copied": True}
        if cell["allocated"] > cap(budget):
            return {"status": OUT_OF_MEMORY, "copied": True}
    return None


def _parse_key(name: str) -> Budget:
    return None if name == UNLIMITED else int(name)


# -- one row, in a process of its own --------------------------------------------------------------

#: Budgets with what was found at each.
Found = Iterator[tuple[Budget, Cell]]


def run_peer(
    suite: Suite,
    peer: Peer,
    budgets: Sequence[Budget],
    known: Mapping[str, Cell],
    seat: Seat,
    place: int = ROOM,
) -> Found:
    """A peer's cells at budgets with the largest first; `known` are those it has already."""
    ready = functools.cache(functools.partial(_prepare, suite, peer))
    cells = dict(known)

    def run(budget: Budget) -> Cell:
        training, step = ready()
        begin(training, _limit(budget, place))
        return _measure(suite, step, seat, warm_up=2)

    for budget in budgets:
        cell = follows(cells, budget) or _in_place(functools.partial(run, budget), budget, place)
        yield budget, cell
        if cell["status"] == CROWDED:
            return
        cells[key(budget)] = cell


def _prepare(suite: Suite, peer: Peer) -> tuple[Training, Step]:
    training = set_up(suite.job())
    return training, peer.make_step(training, suite.precision)


def run_oomph(
    suite: Suite,
    plan: Plan,
    budget: Budget,
    known: Mapping[str, Cell],
    seat: Seat,
    place: int = ROOM,
) -> Found:
    """One of oomph's cells, by the plan that was made for it."""
    promised = {
        "choices": plan.choices.as_dict(),
        "summary": summary(plan),
        "predicted": plan.as_dict()["predicted"],
        "planning_seconds": plan.planning_seconds,
    }

    def run() -> Cell:
        job = suite.job()
        training = set_up(job)
        if plan.choices.leaves:
            training.model.cpu()  # it comes to the card as far as the plan says
        begin(training, _limit(budget, place))
        planned = dataclasses.replace(
            job, model=training.model, optimizer=training.optimizer, batch=training.batch
        )
        applied = apply(plan, planned, device=training.device)
        step = functools.partial(applied.step, training.batch)
        return _measure(suite, step, seat, warm_up=3)

    alike = {k: cell for k, cell in known.items() if cell.get("choices") == promised["choices"]}
    cell = follows(alike, budget) or _in_place(run, budget, place)
    yield budget, cell | promised


def _in_place(run: Callable[[], Cell], budget: Budget, place: int) -> Cell:
    """What a run finds. Where its place and not its budget was the limit, that says nothing."""
    cell = attempt(run)
    narrow = place < min(_size(budget) * GIB, ROOM)
    if narrow and (cell["status"] == OUT_OF_MEMORY or cell.get("retries")):
        return {"status": CROWDED}
    return cell


def _limit(budget: Budget, place: int) -> int | None:
    """Device memory that a run may have; a place of all the room does not limit it."""
    limit = min(_size(budget) * GIB, place if place < ROOM else _size(None))
    return None if limit == _size(None) else int(limit)


def _measure(suite: Suite, step: Step, seat: Seat, *, warm_up: int) -> Cell:
    losses = run_steps(step, warm_up)
    with seat.alone():
        seconds = clock(step, TIMED_STEPS)
    return {"rate": suite.items / seconds, "seconds": seconds, "losses": losses, **peaks()}


def _bytes(budget: Budget) -> int | None:
    return None if budget is None else budget * GIB


# -- all rows --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one process runs."""

    suite: Suite
    row: str
    budgets: tuple[Budget, ...]
    place: int
    """Device memory that it may have beside others."""


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


def find_places(suites: Sequence[Suite], out: Path, seconds: float) -> None:
    """Estimate the device memory of every peer, so that those that fit side by side run so."""
    orders = [
        (suite, peer)
        for suite in suites
        for peer in suite.peers
        if peer.name not in load(places_path(out, suite), {})
    ]
    for suite, peer, place in in_parallel(_place, orders, seconds=seconds):
        path = places_path(out, suite)
        save(path, load(path, {}) | {peer.name: place})


def _place(order: tuple[Suite, Peer]) -> tuple[Suite, Peer, int]:
    """A tenth more than the peer would need eagerly; if that is not enough, it is tried again."""
    suite, peer = order
    job = dataclasses.replace(
        suite.job(),
        micro_batch=peer.micro_batch if peer.micro_batch < suite.batch else None,
        checkpointing="full" if checkpoint in peer.changes else "none",
    )
    return suite, peer, int(1.1 * estimate(job, gpu=GPU).peak.device)


def _plan(order: tuple[Suite, Budget, Path]) -> str:
    suite, budget, out = order
    answer = plan_or_refusal(suite.job(), _bytes(budget))
    save(plan_path(out, suite, budget), answer)
    return f"{suite.name} at {key(budget)}: {answer.get('error', 'planned')}"


def budgets_of(suite: Suite, chosen: Sequence[Budget]) -> tuple[Budget, ...]:
    """The budgets that were asked for, or else the suite's own."""
    return tuple(chosen) or suite.budgets


def turns_of(
    suite: Suite,
    chosen: Sequence[Budget],
    only: str | None,
    out: Path,
    peers: Sequence[str] = (),
) -> list[Turn]:
    """What is left to run; what needs no run is written at once."""
    path = results_path(out, suite)
    document = load(path, _empty(suite))
    budgets = budgets_of(suite, chosen)
    places = load(places_path(out, suite), {})
    turns = []
    if only != "peers":
        for budget in missing(document, OOMPH, budgets):
            answer = load(plan_path(out, suite, budget), {})
            if "status" in answer:
                put(path, suite, OOMPH, budget, answer)
            elif answer:
                # A limit leaves its plan no more; without one there may be some fragmentation.
                place = min(_bytes(budget) or int(1.2 * answer["predicted"]["high"]), ROOM)
                turns.append(Turn(suite=suite, row=OOMPH, budgets=(budget,), place=place))
    if only != "oomph":
        for peer in suite.peers:
            if peers and peer.name not in peers:
                continue
            left = missing(document, peer.name, budgets)
            if left and peer.is_installed:
                place = min(places.get(peer.name, ROOM), ROOM)
                turns.append(Turn(suite=suite, row=peer.name, budgets=tuple(left), place=place))
            for budget in left if not peer.is_installed else ():
                put(path, suite, peer.name, budget, {"status": NOT_INSTALLED})
    return turns


def task_of(turn: Turn, tasks: list[Task], out: Path) -> Task:
    """A turn as work for a process; one that found its place too small comes back with all room."""
    suite, row = turn.suite, turn.row
    path = results_path(out, suite)

    def work(seat: Seat) -> None:
        for budget, cell in run_row(turn, out, seat):
            seat.tell((budget, cell, environment()))

    def hear(told: tuple[Budget, Cell, dict[str, Any]]) -> None:
        budget, cell, where = told
        if cell["status"] == CROWDED:
            left = turn.budgets[turn.budgets.index(budget) :]
            wide = dataclasses.replace(turn, budgets=left, place=ROOM)
            tasks.append(task_of(wide, tasks, out))
        else:
            put(path, suite, row, budget, cell, environment=where)

    def end(how: dict[str, str]) -> None:
        for budget in missing(load(path, _empty(suite)), row, turn.budgets) if how else ():
            put(path, suite, row, budget, how)

    return Task(needs=turn.place, work=work, hear=hear, end=end)


def run_row(turn: Turn, out: Path, seat: Seat) -> Found:
    """A turn's cells, in this process."""
    suite = turn.suite
    known = load(results_path(out, suite), _empty(suite))["rows"].get(turn.row, {})
    if turn.row == OOMPH:
        for budget in turn.budgets:
            plan = load_plan(plan_path(out, suite, budget))
            yield from run_oomph(suite, plan, budget, known, seat, turn.place)
    else:
        peer = next(peer for peer in suite.peers if peer.name == turn.row)
        yield from run_peer(suite, peer, turn.budgets, known, seat, turn.place)


def take_turns(turns: Sequence[Turn], out: Path, deadline: float) -> None:
    """Run them, some side by side."""
    tasks: list[Task] = []
    tasks += [task_of(turn, tasks, out) for turn in turns]
    SharedCard(at_once=AT_ONCE, patience=PATIENCE_S, deadline=deadline).run(tasks)


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
    parser.add_argument("--peer", action="append", default=[], help="leave out the other peers")
    parser.add_argument("--only-plans", action="store_true", help=f"get ready for {GPU}, no more")
    parser.add_argument("--budgets", type=parse_budgets, default=(), help="as 24,40,unlimited")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--table", type=Path, nargs="+", help="print these files and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(render(json.loads(file.read_text())) for file in options.table))
        return
    names = (options.suite or "").split(",")
    if options.out is None or not set(names) <= SUITES.keys():
        parser.error(f"give --out, and a --suite of {', '.join(SUITES)}")
    suites = [SUITES[name] for name in names]
    deadline = time.monotonic() + options.time_limit
    planning = min(PLANNING_S, options.time_limit)
    if options.only != "peers":
        plan_all(suites, options.budgets, options.out, planning)
    if options.only != "oomph":
        find_places(suites, options.out, planning)
    if options.only_plans:
        return
    turns = [
        turn
        for suite in suites
        for turn in turns_of(suite, options.budgets, options.only, options.out, options.peer)
    ]
    take_turns(turns, options.out, deadline)
    for suite in suites:
        print(render(load(results_path(options.out, suite), _empty(suite))))


if __name__ == "__main__":
    main()
