"""`--html` and `--export`: an answer, written to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oomph.errors import BadInput

if TYPE_CHECKING:
    from oomph.estimation import Estimate
    from oomph.reporting.page.contents import Page


def check_files(html: str | None, export: Sequence[str] | None, *, many: bool = False) -> None:
    """Say now, not after the work is done, that a file cannot be meant.

    `many` says that the answer is about many cards, which no page shows.
    """
    if html is None and not export:
        return
    from oomph.reporting.exports.formats import export_of
    from oomph.reporting.writing import check_writable

    if many:
        option = "--html" if html is not None else "--export"
        raise BadInput(f"{option} shows one card, not any; name the card with --gpu")
    for path in export or ():
        export_of(path)
    for path in (*([html] if html is not None else []), *(export or ())):
        check_writable(path)


def save_html(html: str | None, make_page: Callable[[], Page]) -> None:
    """Write the report, where one was asked for."""
    if html is not None:
        from oomph.reporting.page.document import save_page

        save_page(make_page(), html)


def save_exports(export: Sequence[str] | None, estimate: Estimate | None) -> None:
    """Write memory over time, where it was asked for and is known."""
    if estimate is not None:
        for path in export or ():
            estimate.export(path)


def save_estimate(estimate: Estimate, html: str | None, export: Sequence[str] | None) -> None:
    """Write what was asked for about an estimate."""
    from oomph.reporting.page.sources import page_of_estimate

    save_html(html, lambda: page_of_estimate(estimate))
    save_exports(export, estimate)
