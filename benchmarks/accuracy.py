"""Predicted against measured: `python -m benchmarks.accuracy [--markdown] [NAME …]`.

Needs no GPU: what an H200 measured is kept under `truth/`. Prints a row per case and, for the cases
used in development and the held-out ones apart, the signed error of each ledger beside that of
PyTorch's own MemTracker. Exits with 1 if a measured peak lies outside its predicted interval.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, all_cases
from oomph.hardware import GPU
from oomph.rehearsal.estimation import Estimate, estimate

TRUTH = Path(__file__).parent / "truth"
LEDGERS = ("allocated", "reserved")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case: what was measured, and what was predicted."""

    case: Case
    measured: dict[str, int]
    predicted: Estimate
    memtracker: int | None

    def error(self, ledger: str) -> float:
        """Signed, in percent of what was measured."""
        return 100 * (self.predicted.peak.as_dict()[ledger] / self.measured[ledger] - 1)

    def outside(self, ledger: str) -> bool:
        """Whether the measured peak lies outside the predicted interval."""
        interval = self.predicted.interval[ledger]
        return not interval.low <= self.measured[ledger] <= interval.high


def truth(name: str = "h200-torch-2.11-cases.json") -> dict[str, Any]:
    """What was measured, with the machine it was measured on."""
    document: dict[str, Any] = json.loads((TRUTH / name).read_text())
    return document


def measured_peaks(record: dict[str, Any]) -> dict[str, int]:
    """The peak over all phases, by ledger."""
    return {ledger: max(phase[ledger] for phase in record["phases"].values()) for ledger in LEDGERS}


def compare(case: Case, record: dict[str, Any], gpu: str | GPU = "h200") -> Row:
    """Rehearse a case and put it beside its truth."""
    phases = tuple(record["phases"])  # two steps were measured, and none after them
    return Row(
        case=case,
        measured=measured_peaks(record),
        predicted=estimate(case.make(), gpu=gpu, phases=phases, allocator=case.allocator),
        memtracker=record.get("memtracker"),
    )


def describe(row: Row) -> str:
    """A line of the table."""
    cells = []
    for ledger in LEDGERS:
        mark = "!" if row.outside(ledger) else " "
        cells.append(f"{row.measured[ledger] / 2**30:8.3f} {row.error(ledger):+8.3f} %{mark}")
    return f"{row.case.name:78s} {' '.join(cells)} {row.predicted.seconds:6.1f} s"


def summarise(rows: list[Row]) -> list[tuple[str, list[float]]]:
    """(what, signed errors) for each ledger, and for MemTracker."""
    summary = [(ledger, [row.error(ledger) for row in rows]) for ledger in LEDGERS]
    tracked = [
        100 * (row.memtracker / row.measured["allocated"] - 1) for row in rows if row.memtracker
    ]
    return [*summary, ("MemTracker, allocated", tracked)]


def statistics_line(what: str, errors: list[float]) -> str:
    """Median, 95th percentile and worst of the errors' sizes."""
    if not errors:
        return f"{what}: not measured"
    sizes = sorted(abs(error) for error in errors)
    at_95 = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    worst = max(errors, key=abs)
    exact = sum(error == 0 for error in errors)
    return (
        f"{what}: median {statistics.median(sizes):.3f} %, 95 % {at_95:.3f} %, "
        f"worst {worst:+.3f} %, exact to the byte {exact} of {len(errors)}"
    )


def main(arguments: list[str]) -> int:
    """Compare everything, print it, say whether all is inside its interval."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    markdown = "--markdown" in arguments
    names = [argument for argument in arguments if not argument.startswith("-")]
    document = truth()
    records = {record["name"]: record for record in document["cases"]}
    rows = []
    header = "case (batch × length, precision, optimizer): GiB measured, error predicted"
    print(f"{header}; allocated, then reserved; {document['gpu']}, torch {document['torch']}")
    if markdown:
        print(
            "\n| case | allocated GiB | error % | reserved GiB | error % |\n|---|---|---|---|---|"
        )
    for case in all_cases():
        record = records.get(case.name)
        if record is None or "error" in record or (names and case.name not in names):
            continue
        row = compare(case, record)
        rows.append(row)
        if markdown:
            name = f"{case.name}{' (held out)' if case.held_out else ''}"
            cells = [
                f"{row.measured[ledger] / 2**30:.3f} | {row.error(ledger):+.3f}"
                for ledger in LEDGERS
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        else:
            print(describe(row), flush=True)
    for title, held_out in (("development", False), ("held out", True)):
        part = [row for row in rows if row.case.held_out is held_out]
        print(f"\n{title}, {len(part)} cases")
        for what, errors in summarise(part):
            print(f"- {statistics_line(what, errors)}")
    outside = [(row.case.name, led) for row in rows for led in LEDGERS if row.outside(led)]
    print(f"\noutside their interval: {len(outside)}")
    for name, ledger in outside:
        print(f"- {name}: {ledger}")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
