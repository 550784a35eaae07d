"""How long a prediction takes, and how much memory: `python -m benchmarks.rehearsal_speed`.

One process per model, timed after imports. The bounds are those the project set itself for two
cores: 5 s for 1 B parameters, 15 s for 8 B, 40 s for 70 B, 2 GiB of process memory.
"""

from __future__ import annotations

import multiprocessing
import resource
import time

BOUNDS_S = {"llama-3.2-1b": 5, "llama-3.1-8b": 15, "llama-3.1-70b": 40}
BOUND_GIB = 2


def run(model: str) -> tuple[float, float, int]:
    """Seconds, GiB of process memory and blocks of one estimate."""
    import oomph
    from oomph.jobs.models import find_model
    from oomph.jobs.models.building import build_config

    build_config(find_model(model))  # imports the model's own module
    job = oomph.job_from_name(
        model, batch=4, seq=2048, precision="bf16-mixed", optimizer="adamw-fused"
    )
    started = time.perf_counter()
    predicted = oomph.estimate(job, "h200")
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return seconds, memory, len(predicted.timeline.blocks)


def main() -> None:
    """Print a line per model."""
    print("model, seconds (bound), process memory (bound), blocks of memory predicted")
    for model, bound in BOUNDS_S.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, memory, blocks = pool.apply(run, (model,))
        miss = "" if seconds <= bound and memory <= BOUND_GIB else "  MISSED"
        print(f"{model}: {seconds:.1f} s ({bound}), {memory:.2f} GiB ({BOUND_GIB}), {blocks}{miss}")


if __name__ == "__main__":
    main()
