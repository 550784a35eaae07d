"""A report as an HTML fragment for notebooks: loads nothing, readable on light and dark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from oomph.report.report import Table, describe

if TYPE_CHECKING:
    from oomph.rehearsal.estimation import Estimate

# Mid tones, which are readable on both white and black.
_VERDICT_COLOURS = {"fits": "#2a9d4e", "does not fit": "#d64545", "inconclusive": "#b7791f"}
_CELL = "padding:1px 12px 1px 0;border:0;background:none;color:inherit;text-align:"


def render_html(estimate: Estimate) -> str:
    """The estimate as HTML; all text is escaped."""
    report = describe(estimate)
    colour = _VERDICT_COLOURS[report.verdict]
    parts = [
        f'<p><b style="color:{colour}">{escape(report.verdict)}</b>: {escape(report.headline)}</p>'
    ]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in report.advice]
    parts += [_table(table) for table in report.tables]
    for title, sentences in report.lists:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        parts.append(f"<p><b>{escape(title)}</b></p><ul>{items}</ul>")
    return f'<div style="max-width:60em">{"".join(parts)}</div>'


def _table(table: Table) -> str:
    def row(tag: str, cells: tuple[str, ...]) -> str:
        columns = []
        for column, cell in enumerate(cells):
            side = "left" if table.is_text(column) else "right"
            columns.append(f'<{tag} style="{_CELL}{side}">{escape(cell)}</{tag}>')
        return f"<tr>{''.join(columns)}</tr>"

    rows = "".join(row("td", cells) for cells in table.rows)
    head = row("th", table.header)
    return (
        f"<p><b>{escape(table.title)}</b></p>"
        f'<table style="border-collapse:collapse">{head}{rows}</table>'
    )
