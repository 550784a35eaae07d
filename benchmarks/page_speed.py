"""How large the HTML report is, and how soon a browser shows it: `python -m benchmarks.page_speed`.

Needs chromium and its chromedriver. A page counts as open when all of it is drawn: its script has
run and two frames have passed. The bounds are those the project set itself for a 70 B rehearsal.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.browser import browsing

BOUND_S, BOUND_MB = 2.0, 3.0
MODELS = ("llama-3.2-1b", "llama-3.1-70b")
TIMES = 5
_DRAWN = "requestAnimationFrame(() => requestAnimationFrame(() => done(true)))"


def pages(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """The name, number of events and report of each model."""
    import oomph

    for model in MODELS:
        predicted = oomph.estimate(oomph.job_from_name(model, precision="bf16-mixed"), "h200")
        path = folder / f"{model}.html"
        predicted.save_html(path)
        yield model, predicted.timeline.events, path


def seconds_to_open(page: Path) -> float:
    """The median of several times, each in a fresh window of a browser that is there already."""
    with browsing() as browser:
        taken = []
        for _ in range(TIMES):
            browser.open(Path("/dev/null"))
            started = time.perf_counter()
            browser.open(page)
            browser.wait(_DRAWN)
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    """Print a line per report."""
    print("report, events, megabytes (bound), seconds to open (bound)")
    with tempfile.TemporaryDirectory() as folder:
        for name, events, page in pages(Path(folder)):
            size, seconds = page.stat().st_size / 1e6, seconds_to_open(page)
            miss = "" if size <= BOUND_MB and seconds <= BOUND_S else "  MISSED"
            print(f"{name}, {events:,}, {size:.2f} ({BOUND_MB}), {seconds:.2f} ({BOUND_S}){miss}")


if __name__ == "__main__":
    main()
