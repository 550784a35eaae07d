"""Findings as text: the answer in the first line, then advice, then tables."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from oomph.report.report import Table
from oomph.report.text import WIDTH, print_table

MOST_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The contents of a report about a file or an architecture, in the order they are printed."""

    headline: str
    advice: tuple[str, ...]
    tables: tuple[Table, ...]
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Titles with their sentences."""


def print_findings(findings: Findings, console: Console) -> None:
    """Write findings to a console, in the colours that it supports."""
    # One line however long it is: scripts read the first line, terminals wrap it.
    console.print(Text(findings.headline, style="bold"), soft_wrap=True)
    for sentence in findings.advice:
        console.print(Text(sentence), soft_wrap=True)
    for table in findings.tables:
        if table.rows:
            console.print()
            print_table(table, console)
    for title, sentences in findings.lists:
        if sentences:
            console.print()
            console.print(Text(title, style="bold"))
            for sentence in sentences:
                console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))


def render_findings(findings: Findings) -> str:
    """Findings as plain text."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, legacy_windows=False)
    print_findings(findings, console)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).rstrip()
