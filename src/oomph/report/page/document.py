"""A page as HTML. All text is escaped, and the page's content security policy forbids requests."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from oomph.files.writing import write_whole
from oomph.report.page.contents import Figure, Gauge, Line, Page
from oomph.report.page.data import STRETCHES, memory_data
from oomph.report.page.plan_diff import render_diff
from oomph.report.page.samples import extremes
from oomph.report.report import Report, Table
from oomph.units import format_bytes

_SCRIPTS = ("basics.js", "timeline.js", "chart.js", "alive.js", "treemap.js", "table.js", "page.js")
#: Symbols beside the colours, for readers who cannot tell the colours apart.
_SIGNS = {"fits": "✓", "does not fit": "✗", "out of memory": "✗", "inconclusive": "?"}


def save_page(page: Page, path: str | Path) -> None:
    """Write a page as one file."""
    write_whole(path, render_page(page).encode())


def render_page(page: Page) -> str:
    """The page as one HTML document."""
    memory = memory_data(page.history, page.peak) if page.history is not None else {}
    if memory:
        memory |= {"budget": page.budget, "lines": [_line(line) for line in page.lines]}
    sections = [
        ("verdict", "", _verdict(page)),
        ("plan", "The plan", render_diff(page.plan) if page.plan and page.plan.changes else ""),
        ("memory", f"Memory over time, {page.found}", _MEMORY if memory else ""),
        ("modules", "By module", _MODULES if memory else ""),
        ("compared", "Compared", _comparison(page.comparison)),
        ("allocations", "Allocations", _ALLOCATIONS if memory else ""),
        ("numbers", "In numbers", _numbers(page.report)),
        ("notes", "What else to know", _lists(page.report)),
    ]
    style, script = _asset("page.css"), _script()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(page.title)}: {escape(page.report.verdict)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the answer</a>\n'
        f"{_header(page, sections)}\n"
        f'<main id="main" tabindex="-1">{"".join(_section(*one) for one in sections)}</main>\n'
        f"<footer><p>{escape(page.closing)} oomph {escape(version('oomph'))}</p></footer>\n"
        f"{_embed('facts', page.facts)}\n{_embed('memory-data', memory)}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _header(page: Page, sections: Iterable[tuple[str, str, str]]) -> str:
    links = "".join(
        f'<a href="#{name}">{escape(title.partition(",")[0])}</a>'
        for name, title, content in sections
        if title and content
    )
    return (
        f'<header><p class="brand">oomph</p><h1>{escape(page.title)}</h1>'
        f'<nav aria-label="Sections">{links}</nav>'
        '<button id="theme" type="button" hidden>Dark</button></header>'
    )


def _section(name: str, title: str, content: str) -> str:
    if not content:
        return ""
    if not title:
        return f'<section id="{name}" aria-label="{name}">{content}</section>'
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{content}</section>'


def _verdict(page: Page) -> str:
    report = page.report
    kind = report.verdict.replace(" ", "-")
    sign = _SIGNS.get(report.verdict, "•")
    advice = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.advice)
    figures = "".join(map(_figure, page.figures))
    return (
        f'<div class="verdict {escape(kind)}"><p class="answer">'
        f'<span aria-hidden="true">{sign}</span> {escape(report.verdict)}</p>'
        f"<p>{escape(report.headline)}</p>{advice}</div>"
        f"{_gauge(page.gauge) if page.gauge else ''}"
        f"{f'<dl class=figures>{figures}</dl>' if figures else ''}"
    )


def _figure(figure: Figure) -> str:
    words = f"<small>{escape(figure.words)}</small>" if figure.words else ""
    return (
        f'<div><dt>{escape(figure.name)}</dt><dd><data value="{figure.value}"'
        f' data-key="{escape(figure.key)}">{escape(figure.text)}</data>{words}</dd></div>'
    )


def _gauge(gauge: Gauge) -> str:
    """A bar with the prediction, its interval and the budget's limit."""
    full = max(gauge.high, gauge.budget) * 1.04

    def place(size: int) -> str:
        return f"{1000 * size / full:.1f}"

    over = "over" if gauge.value > gauge.budget else "close" if gauge.high > gauge.budget else ""
    exact = gauge.low == gauge.high
    interval = "" if exact else f" ({format_bytes(gauge.low)} to {format_bytes(gauge.high)})"
    words = f"{format_bytes(gauge.value)}{interval} of {format_bytes(gauge.budget)}"
    return (
        f'<figure class="gauge"><svg class="{over}" viewBox="0 0 1000 28"'
        f' preserveAspectRatio="none" role="img" aria-label="{words}">'
        f'<rect class="track" y="6" width="{place(gauge.budget)}" height="16"/>'
        f'<rect class="amount" y="6" width="{place(gauge.value)}" height="16"/>'
        f'<rect class="interval" x="{place(gauge.low)}" y="10"'
        f' width="{1000 * (gauge.high - gauge.low) / full:.1f}" height="8"/>'
        f'<path class="limit" d="M{place(gauge.budget)} 0V28"/>'
        f"</svg><figcaption>{words}</figcaption></figure>"
    )


def _comparison(table: Table | None) -> str:
    return _table(table) if table is not None else ""


def _numbers(report: Report) -> str:
    tables = "".join(_table(table) for table in report.tables)
    return f'<div class="tables">{tables}</div>' if tables else ""


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col"{"" if table.is_text(column) else " class=number"}>{escape(name)}</th>'
        for column, name in enumerate(table.header)
    )
    rows = "".join(f"<tr>{_cells(table, row)}</tr>" for row in table.rows)
    return (
        f'<div class="wide"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(table: Table, row: tuple[str, ...]) -> str:
    first = f'<th scope="row">{escape(row[0])}</th>'
    return first + "".join(
        f"<td{'' if table.is_text(column) else ' class=number'}>{escape(cell)}</td>"
        for column, cell in enumerate(row[1:], start=1)
    )


def _lists(report: Report) -> str:
    return "".join(
        f"<h3>{escape(title)}</h3><ul>"
        + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        + "</ul>"
        for title, sentences in report.lists
    )


def _line(line: Line) -> dict[str, Any]:
    points = line.points
    if len(points) > 4 * STRETCHES:
        sizes = np.array([size for _, size in points], np.int64)
        kept = extremes(sizes, STRETCHES) | {0, len(points) - 1}
        points = tuple(points[place] for place in sorted(kept))
    return {"name": line.name, "points": points}


def _embed(name: str, value: Mapping[str, Any]) -> str:
    """JSON that cannot close its script element, because names come from the user's code."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@functools.cache
def _script() -> str:
    parts = "\n".join(map(_asset, _SCRIPTS))
    return f'(() => {{\n"use strict";\n{parts}\n}})();'


@functools.cache
def _asset(name: str) -> str:
    return resources.files("oomph.report.page").joinpath("assets", name).read_text("utf-8")


# Sections that the script fills. Without JavaScript, the answer, plan and tables still show.
_MEMORY = """
<noscript><p>The charts need JavaScript; the tables below do not.</p></noscript>
<div class="controls" hidden>
<label>Show <select id="window"></select></label>
<button id="to-peak" type="button">Go to the peak</button>
<span class="together"><button id="zoom-in" type="button" aria-label="Zoom in">+</button>
<button id="zoom-out" type="button" aria-label="Zoom out">−</button></span>
<p class="hint" id="chart-hint">Click a moment, or use the arrow keys. Drag to zoom.</p>
</div>
<div class="beside">
<div id="chart" role="slider" tabindex="0" aria-label="Moment of the timeline"
 aria-describedby="chart-hint"></div>
<div id="alive"></div>
</div>
<details id="phase-details"><summary>The chart as a table</summary>
<div class="wide" id="phase-table"></div></details>
"""
_MODULES = """
<div class="controls" hidden>
<nav id="crumbs" aria-label="Module"></nav>
<label><input id="together" type="checkbox" checked> Repeated blocks together</label>
</div>
<div id="treemap" role="group" aria-labelledby="modules-title"></div>
<details><summary>The map as a table</summary><div class="wide" id="module-table"></div></details>
"""
_ALLOCATIONS = """
<div class="controls" hidden>
<label>Search <input id="search" type="search" placeholder="module, op, category, phase"
 autocomplete="off" spellcheck="false"></label>
<label><input id="only-alive" type="checkbox"> Only those alive at the chosen moment</label>
<p id="found" role="status"></p>
</div>
<div id="allocation-table" tabindex="0" role="region" aria-label="Allocations, scrollable"></div>
"""
