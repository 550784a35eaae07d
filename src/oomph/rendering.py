"""Let results print themselves without importing the package that renders them.

An estimate or a plan is in a layer below `oomph.report`, which prints it, and must not import it.
So a result calls the functions here, and the report package registers a renderer for each class of
result. `oomph` itself sets the function that loads that package, so nothing of it is loaded before
a result is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _nothing_to_load() -> None:
    """The placeholder until `load_with` is called."""


_load: Callable[[], object] = _nothing_to_load


def load_with(load: Callable[[], object]) -> None:
    """Set the function that loads the package of the renderers, when the first one is needed."""
    global _load
    _load = load


@functools.singledispatch
def text_of(result: Any) -> str:
    """A result as text for the terminal."""
    raise TypeError(f"nothing prints a {type(result).__name__}")


@functools.singledispatch
def notebook_html_of(result: Any) -> str:
    """A result as HTML for a notebook."""
    raise TypeError(f"nothing shows a {type(result).__name__} in a notebook")


@functools.singledispatch
def write_page(result: Any, path: str | Path) -> None:
    """Write a result as one self-contained HTML file."""
    raise TypeError(f"there is no page for a {type(result).__name__}")


@functools.singledispatch
def write_export(result: Any, path: str | Path) -> None:
    """Write a result's memory over time for other programs; the file's suffix gives the format."""
    raise TypeError(f"nothing exports a {type(result).__name__}")


class Printed:
    """A result that `print` shows as the command line does."""

    def __str__(self) -> str:
        _load()
        return text_of(self)


class Paged(Printed):
    """A printed result that can also be saved as a page."""

    def save_html(self, path: str | Path) -> None:
        """Write a report as one self-contained HTML file."""
        _load()
        write_page(self, path)


class Exported(Paged):
    """A result that other programs and notebooks can also show."""

    def export(self, path: str | Path) -> None:
        """Write memory over time for other programs: .csv, .json, .perfetto.json or .pickle."""
        _load()
        write_export(self, path)

    def _repr_html_(self) -> str:
        _load()
        return notebook_html_of(self)
