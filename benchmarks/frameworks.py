"""The framework examples, each in three ways: unlimited, inside a budget, and there with oomph.

python -m benchmarks.frameworks --budget 3GiB --out frameworks.json   # on a GPU
python -m benchmarks.frameworks --smoke                               # on the CPU, in a minute

On a GPU the plain run inside the budget has to run out of memory, and the one with oomph to finish
in it with the batch and the losses of the unlimited one. A CPU enforces no budget, so the middle
run is left out there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oomph.units import format_bytes, parse_bytes

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("plain_fit", "lightning_fit", "hf_trainer_fit")
#: A run that takes longer has gone wrong.
PATIENCE = 600
#: How far a loss may be from the unlimited run's: sums are added up in another order.
TOLERANCE = 1e-3
SMALL = [
    *("--vocab-size", "4096", "--seq", "16", "--layers", "2", "--width", "32"),
    *("--batch-size", "4", "--steps", "3"),
]
SMALL_BUDGET = "6MiB"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run of an example ended."""

    ended: str
    """`done`, `out of memory` or `failed`."""
    losses: tuple[float, ...] = ()
    batch: int | None = None
    reserved: int | None = None
    """Bytes that PyTorch took from the driver at most; None on the CPU."""
    predicted_gib: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An example in its three ways."""

    example: str
    budget: int
    unlimited: Outcome
    plain: Outcome | None
    """Inside the budget; None where nothing enforces it."""
    oomph: Outcome

    @property
    def loss_difference(self) -> float:
        """The largest difference to the unlimited run's losses, relative to them."""
        pairs = list(zip(self.unlimited.losses, self.oomph.losses, strict=False))
        if not pairs or len(self.unlimited.losses) != len(self.oomph.losses):
            return math.inf
        return max(abs(a - b) / abs(a) for a, b in pairs)

    @property
    def complaints(self) -> list[str]:
        """What is not as it should be."""
        found = []
        for name, outcome in (("unlimited", self.unlimited), ("with oomph", self.oomph)):
            if outcome.ended != "done":
                found.append(f"{name}: {outcome.ended} {outcome.error}".strip())
        if self.plain is not None and self.plain.ended != "out of memory":
            found.append(f"plain inside the budget: {self.plain.ended}, not out of memory")
        if self.oomph.batch != self.unlimited.batch:
            found.append(f"the batch is {self.oomph.batch}, not {self.unlimited.batch}")
        if not self.loss_difference <= TOLERANCE:
            found.append(f"losses differ by up to {self.loss_difference:.1e}")
        if self.oomph.reserved is not None and self.oomph.reserved > self.budget:
            found.append(f"it took {format_bytes(self.oomph.reserved)}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The row as plain JSON."""
        difference = self.loss_difference
        return {
            **asdict(self),
            "loss_difference": difference if math.isfinite(difference) else None,
            "complaints": self.complaints,
        }


Run = Callable[[Sequence[str]], Outcome]


def run_example(command: Sequence[str]) -> Outcome:
    """Run an example in a process of its own, and read the last line it prints."""
    try:
        ended = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Outcome(ended="failed", error=f"took longer than {PATIENCE} s")
    return read_outcome(ended.returncode, ended.stdout, ended.stderr)


def read_outcome(code: int, printed: str, errors: str) -> Outcome:
    """What a process that ended so had to say."""
    if code == 0:
        return Outcome(ended="done", **_tuples(json.loads(printed.strip().splitlines()[-1])))
    # A traceback ends with the error; notes and warnings may follow it.
    raised = re.findall(r"^[\w.]+(?:Error|Exception|Fit|Input)\b.*", errors, re.MULTILINE)
    error = raised[-1] if raised else f"ended with {code}"
    kind = "out of memory" if "OutOfMemoryError" in error.partition(":")[0] else "failed"
    return Outcome(ended=kind, error=error)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "losses": tuple(values["losses"])}


def compare(
    example: str, budget: str, sizes: Sequence[str], *, enforced: bool, run: Run = run_example
) -> Row:
    """Run an example in its three ways."""
    script = [str(EXAMPLES / f"{example}.py"), *sizes]
    limited = [*script, "--budget", budget]
    return Row(
        example=example,
        budget=parse_bytes(budget),
        unlimited=run([*script, "--no-oomph"]),
        plain=run([*limited, "--no-oomph"]) if enforced else None,
        oomph=run(limited),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as people read them."""
    lines = [
        f"{'example':<16}{'budget':>10}  {'unlimited':<18}{'plain in budget':<18}"
        f"{'with oomph':<18}{'losses differ':>14}"
    ]
    for row in rows:
        plain = "not enforced" if row.plain is None else _say(row.plain)
        lines.append(
            f"{row.example:<16}{format_bytes(row.budget):>10}  {_say(row.unlimited):<18}"
            f"{plain:<18}{_say(row.oomph):<18}{row.loss_difference:>14.1e}"
        )
        lines += [f"  ! {complaint}" for complaint in row.complaints]
    return "\n".join(lines)


def _say(outcome: Outcome) -> str:
    if outcome.ended != "done" or outcome.reserved is None:
        return outcome.ended
    return f"done, {format_bytes(outcome.reserved)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all examples; 1 where one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="3GiB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=NAMES, action="append", help="leave out the others")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    arguments = parser.parse_args(argv)
    sizes = SMALL if arguments.smoke else ["--steps", str(arguments.steps)]
    budget = SMALL_BUDGET if arguments.smoke else arguments.budget
    rows = []
    for name in arguments.only or NAMES:
        rows.append(compare(name, budget, sizes, enforced=not arguments.smoke))
        if arguments.out is not None:
            written = {"schema_version": 1, "rows": [row.as_dict() for row in rows]}
            arguments.out.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(table(rows))
    return int(any(row.complaints for row in rows))


if __name__ == "__main__":
    sys.exit(main())
