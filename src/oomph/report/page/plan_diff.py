"""A plan as a diff: the savings and costs of each change, and its setting."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING

from oomph.report.plans import format_seconds
from oomph.units import format_bytes

if TYPE_CHECKING:
    from oomph.plans.plan import Change, Plan

#: Longer settings (in characters) are folded.
_LONG = 60


def render_diff(plan: Plan) -> str:
    """The changes as a table."""
    most = max((abs(change.saves) for change in plan.changes), default=0) or 1
    rows = "".join(_row(change, plan, most) for change in plan.changes)
    header = "".join(
        f'<th scope="col"{" class=number" if numeric else ""}>{name}</th>'
        for name, numeric in (
            ("Technique", False),
            ("Before → after", False),
            ("Memory saved", True),
            ("Time a step", True),
            ("Fidelity", False),
            ("Setting", False),
        )
    )
    caption = "What changes, and what each change is worth beside the others (predicted)"
    return (
        f'<div class="wide"><table class="diff"><caption>{caption}</caption>'
        f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(change: Change, plan: Plan, most: int) -> str:
    sign = "saves" if change.saves >= 0 else "takes"
    bar = (
        f'<svg class="bar {sign}" viewBox="0 0 100 6" preserveAspectRatio="none"'
        f' aria-hidden="true"><rect width="{100 * abs(change.saves) / most:.1f}" height="6"/></svg>'
    )
    return (
        f'<tr><th scope="row">{escape(change.technique)}</th>'
        f'<td><del>{escape(change.before)}</del> <span aria-hidden="true">→</span>'
        f" <ins>{escape(change.after)}</ins></td>"
        f'<td class="number"><data value="{change.saves}">{format_bytes(change.saves)}</data>'
        f"{bar}</td>"
        f'<td class="number"><data value="{change.costs}">'
        f"{format_seconds(change.costs, sign=True)}</data></td>"
        f'<td><span class="tag {change.fidelity}">{change.fidelity}</span></td>'
        f"<td>{_settings(change, plan)}</td></tr>"
    )


def _settings(change: Change, plan: Plan) -> str:
    from oomph.search.changes import settings_shown, typed_elsewhere

    if typed := typed_elsewhere(change.technique, plan.choices):
        return f"<code>{escape(typed)}</code>"
    parts = []
    for name, value in settings_shown(change.technique, plan.choices).items():
        if value in ("", []):
            continue
        text = f"{name} = {json.dumps(value)}"
        code = f"<code>{escape(text)}</code>"
        if len(text) > _LONG:
            code = f"<details><summary><code>{escape(name)}</code></summary>{code}</details>"
        parts.append(code)
    return " ".join(parts)
