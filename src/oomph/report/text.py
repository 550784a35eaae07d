"""A report as text: plain for pipes and `str()`, coloured on a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from oomph.report.report import Report, Table, describe

if TYPE_CHECKING:
    from oomph.rehearsal.estimation import Estimate

WIDTH = 80
_VERDICT_STYLES = {"fits": "bold green", "does not fit": "bold red", "inconclusive": "bold yellow"}


def render_text(estimate: Estimate) -> str:
    """The estimate as plain text; its first line is the answer, the rest is 80 columns wide."""
    return render_report(describe(estimate))


def render_report(report: Report) -> str:
    """A report as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, legacy_windows=False)
    print_report(report, console)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).rstrip()


def print_estimate(estimate: Estimate, console: Console) -> None:
    """Write an estimate's report to a console."""
    print_report(describe(estimate), console)


def print_report(report: Report, console: Console) -> None:
    """Write a report to a console, in the colours that it supports."""
    _print_answer(report, console)
    for table in report.tables:
        console.print()
        print_table(table, console)
    for title, sentences in report.lists:
        console.print()
        console.print(Text(title, style="bold"))
        for sentence in sentences:
            console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Text(f"Predicted in {report.seconds:.1f} s; nothing was run.", style="dim"))


def _print_answer(report: Report, console: Console) -> None:
    answer = Text.assemble((report.verdict, _VERDICT_STYLES[report.verdict]), ": ", report.headline)
    # One line however long it is: scripts read the first line, terminals wrap it.
    console.print(answer, soft_wrap=True)
    for sentence in report.advice:
        console.print(Text(sentence), soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Write one table, indented under its title."""
    console.print(Text(table.title, style="bold"))
    grid = RichTable(box=None, padding=(0, 2, 0, 0), header_style="cyan", pad_edge=False)
    for column, name in enumerate(table.header):
        if table.is_text(column):
            grid.add_column(name, overflow="fold")
        else:
            grid.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text(cell) for cell in row))
    console.print(Padding(grid, (0, 0, 0, 2), expand=False))
