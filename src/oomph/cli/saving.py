"""`--html` and `--export`: write an answer to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oomph.errors import BadInput

if TYPE_CHECKING:
    from oomph.rehearsal.estimation import Estimate
    from oomph.report.page.contents import Page


def check_files(html: str | None, export: Sequence[str] | None, *, many: bool = False) -> None:
    """Refuse unusable files before the work is done.

    `many` means that the answer is about many cards, which a page cannot show.
    """
    if html is None and not export:
        return
    from oomph.files.writing import check_writable
    from oomph.report.exports.formats import export_of

    if many:
        option = "--html" if html is not None else "--export"
        raise BadInput(f"{option} shows one card, not any; name the card with --gpu")
    for path in export or ():
        export_of(path)
    for path in (*([html] if html is not None else []), *(export or ())):
        check_writable(path)


def save_html(html: str | None, make_page: Callable[[], Page]) -> None:
    """Write the report if it was requested."""
    if html is not None:
        from oomph.report.page.document import save_page

        save_page(make_page(), html)


def save_exports(export: Sequence[str] | None, estimate: Estimate | None) -> None:
    """Write memory over time if it was requested and is known."""
    if estimate is not None:
        for path in export or ():
            estimate.export(path)


def save_estimate(estimate: Estimate, html: str | None, export: Sequence[str] | None) -> None:
    """Write the requested files about an estimate."""
    from oomph.report.page.sources import page_of_estimate

    save_html(html, lambda: page_of_estimate(estimate))
    save_exports(export, estimate)
