"""Measure the cases on a real GPU: `python -m benchmarks.measure OUT [NAME …]`.

Every case runs in a process of its own, so that no workspace or cached block of another is counted.
Several run at once where the card has room; the room a case needs is what oomph predicts. Writes
`cases.json` (peaks per phase) and `histories.json.gz` (allocation histories of some cases) into
OUT. With `--ops`, also what every op of the development cases allocated, for finding the cause of
a difference.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.cases import Case, all_cases
from benchmarks.memtracker import memtracker_peak
from oomph.engine.evaluating import evaluate_batch
from oomph.engine.step import Stage, train_step
from oomph.jobs.job import build_model, make_batch, make_optimizer
from oomph.rehearsal.estimation import estimate

#: A case that takes longer than this is given up.
PATIENCE_S = 90
#: Cases whose whole history is kept, to replay through the allocator.
HISTORIES = 12
#: One process at a time, to see the device memory beyond what PyTorch reserves.
ALONE = 10


class OpLog(TorchDispatchMode):
    """The time at which each op ran, to find the allocations it made in the history."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[list[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        record = [str(func), describe(args), time.time_ns() // 1000, 0]
        self.ops.append(record)
        out = func(*args, **(kwargs or {}))
        record[3] = time.time_ns() // 1000
        record.append(describe(out))
        return out


def describe(value: Any) -> Any:
    """An op's argument in a few letters."""
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f"s{list(value.stride())}"
        return f"{str(value.dtype)[6:]}{list(value.shape)}{strides}"
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value[:12]]
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


def run_case(case: Case, *, log_ops: bool) -> dict[str, Any]:
    """The measured peaks of one case, phase by phase, in this process."""
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = case.allocator
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10_000_000)
    job = case.make()
    phases: dict[str, Any] = {}

    def close(name: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        phases[name] = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "device": total - free,
            "reserved_now": torch.cuda.memory_reserved(),
        }
        torch.cuda.reset_peak_memory_stats()

    model = build_model(job).to("cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    optimizer = make_optimizer(str(job.optimizer))(
        [p for p in model.parameters() if p.requires_grad]
    )
    batch = tree_map(lambda x: x.to("cuda") if isinstance(x, Tensor) else x, make_batch(job))
    close("build")
    # A low first scale: an overflow would skip the optimizer step that is to be measured.
    scaler = torch.amp.GradScaler(init_scale=256.0) if job.precision == "fp16-mixed" else None
    stage = Stage(job=job, model=model, optimizer=optimizer, scaler=scaler)
    log = OpLog()
    for phase in ("first step", "step"):
        if log_ops:
            with log:
                train_step(stage, batch)
        else:
            train_step(stage, batch)
        close(phase)
    evaluate_batch(stage, batch)
    close("eval")
    for tensor in model.state_dict().values():
        tensor.cpu()
    close("save")
    history = [
        [event["action"], event["addr"], event["size"], event["stream"], event["time_us"]]
        for event in torch.cuda.memory._snapshot()["device_traces"][0]
    ]
    stats = torch.cuda.memory_stats()
    return {
        "name": case.name,
        "phases": phases,
        "segments": stats["segment.all.peak"],
        "retries": stats["num_alloc_retries"],
        "history": history,
        "ops": log.ops,
        "environment": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "transformers": transformers.__version__,
        },
    }


def _child(case: Case, what: str, pipe: Connection) -> None:
    try:
        if what == "memtracker":
            pipe.send({"name": case.name, "memtracker": memtracker_peak(case)})
        else:
            pipe.send(run_case(case, log_ops=what == "ops"))
    except BaseException:
        pipe.send({"name": case.name, "error": traceback.format_exc()[-2000:]})


def run_all(
    cases: list[Case], needs: dict[str, int], *, what: str = "", at_once: int = 6
) -> list[dict[str, Any]]:
    """Run the cases, several at once while the card has room for what they need.

    `what` is "ops" to log every op, or "memtracker" to ask PyTorch's predictor instead.
    """
    waiting = sorted(cases, key=lambda case: -needs[case.name])
    running: dict[str, tuple[Any, Connection, float]] = {}
    results: list[dict[str, Any]] = []
    context = multiprocessing.get_context("fork")
    room = 125 << 30
    while waiting or running:
        used = sum(needs[name] for name in running)
        for case in list(waiting):
            if len(running) < at_once and (used + needs[case.name] <= room or not running):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(case, what, theirs))
                process.start()
                theirs.close()
                running[case.name] = (process, ours, time.monotonic())
                used += needs[case.name]
                waiting.remove(case)
        for name, (process, pipe, since) in list(running.items()):
            result: dict[str, Any] | None = None
            if pipe.poll(0.02):
                try:
                    result = pipe.recv()
                except EOFError:
                    result = {"name": name, "error": "the process died"}
            elif time.monotonic() - since > PATIENCE_S:
                result = {"name": name, "error": f"gave up after {PATIENCE_S} s"}
            if result is not None:
                process.kill()
                process.join()
                del running[name]
                results.append(result)
                took = time.monotonic() - since
                print(f"{name}: {result.get('error', 'ok')[-300:]} ({took:.0f} s)", flush=True)
    return results


def predicted_need(name: str) -> int:
    """The device memory a case will take, to know how many fit beside each other."""
    case = next(case for case in all_cases() if case.name == name)
    return estimate(case.make(), gpu="h200", phases=("step",)).peak.device


def main(arguments: list[str]) -> None:
    """Measure everything and write the results."""
    log_ops = "--ops" in arguments
    out, *names = [argument for argument in arguments if argument != "--ops"]
    folder = Path(out)
    cases = [case for case in all_cases() if not names or case.name in names]
    # Predicted beforehand, where the file is there: minutes on the GPU are dear.
    predicted = folder / "needs.json"
    needs: dict[str, int] = json.loads(predicted.read_text()) if predicted.exists() else {}
    missing = [case.name for case in cases if case.name not in needs]
    if missing:
        # In processes of their own: torch counts devices in a rehearsal, after which a process
        # that forks can no longer give its children the GPU.
        with multiprocessing.get_context("spawn").Pool(4) as pool:
            needs |= dict(zip(missing, pool.map(predicted_need, missing), strict=True))
    started = time.monotonic()
    results = run_all(cases, needs)
    # A second time, alone: only then is all the device memory in use this process's own.
    alone = run_all(cases[:: max(len(cases) // ALONE, 1)], needs, at_once=1)
    tracked = run_all(cases, dict.fromkeys(needs, 0), what="memtracker", at_once=14)
    print(f"measured in {time.monotonic() - started:.0f} s", flush=True)
    write(folder, cases, results, alone, tracked)
    if log_ops:
        # Recurrent layers hang under a dispatch mode.
        developed = [c for c in cases if not c.held_out and c.family != "recurrent"]
        logs = run_all(developed, needs, what="ops")
        with gzip.open(folder / "ops.jsonl.gz", "wt") as file:
            for log in logs:
                file.write(json.dumps(log) + "\n")


def write(
    folder: Path,
    cases: list[Case],
    results: list[dict[str, Any]],
    alone: list[dict[str, Any]],
    tracked: list[dict[str, Any]],
) -> None:
    """The truth, as plain JSON."""
    by_name = {result["name"]: result for result in results}
    beyond = {
        result["name"]: result["phases"]["step"]["device"]
        - result["phases"]["step"]["reserved_now"]
        for result in alone
        if "error" not in result
    }
    memtracker = {result["name"]: result.get("memtracker") for result in tracked}
    rows = []
    for case in cases:
        result = by_name[case.name]
        row = {"name": case.name, "held_out": case.held_out, "allocator": case.allocator}
        if "error" in result:
            row["error"] = result["error"]
        else:
            row |= {key: result[key] for key in ("segments", "retries")}
            row["beyond_reserved"] = beyond.get(case.name)
            row["memtracker"] = memtracker.get(case.name)
            row["phases"] = {
                phase: {ledger: values[ledger] for ledger in ("allocated", "reserved")}
                for phase, values in result["phases"].items()
            }
        rows.append(row)
    good = [result for result in results if "error" not in result]
    document = {"schema": 1, **good[0]["environment"], "cases": rows}
    (folder / "cases.json").write_text(json.dumps(document, indent=1) + "\n")
    # Short histories first: they are many kinds of models, and small files.
    kept = sorted(good, key=lambda result: len(result["history"]))
    kept = kept[:: max(len(kept) // HISTORIES, 1)]
    with gzip.open(folder / "histories.json.gz", "wt") as file:
        json.dump(
            [
                {
                    "name": result["name"],
                    "allocator": next(c.allocator for c in cases if c.name == result["name"]),
                    "allocated": max(p["allocated"] for p in result["phases"].values()),
                    "reserved": max(p["reserved"] for p in result["phases"].values()),
                    "segments": result["segments"],
                    "events": [
                        event[:4]
                        for event in result["history"]
                        if event[0] in ("alloc", "free_completed")
                    ],
                }
                for result in kept
            ],
            file,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
