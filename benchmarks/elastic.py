"""A run that is squeezed: `python -m benchmarks.elastic --out OUT [--small]`.

Trains the same model on the same batches twice, each time in a process of its own: undisturbed, and
with a second process that takes half of the budget and gives it back, several times. Prints how far
the losses are apart, how many samples were lost, and how fast the run was outside the squeezes, and
writes `elastic.json` into OUT.

The other process asks first, for it cannot take what the run has cached; once it holds its memory,
and when it gives it back, the run sees that on the card by itself. `--small` runs on the CPU, where
the budget is cut by asking alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.hardware import find_gpu
from oomph.rehearsal.hidden import device_overhead
from oomph.runs.elastic import Elastic
from oomph.runs.run import Run, fit
from oomph.units import GIB, format_bytes, parse_bytes

#: Steps that compile and warm up, and count for nothing.
WARM_UP = 5
#: Steps for which more memory must have been there before the run uses it.
PATIENCE = 4
#: How far apart losses may be that differ by the order of sums alone.
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-4}
#: What the other process leaves of what it could take, for the driver.
MARGIN = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and when the budget is cut."""

    model: str
    batch: int
    seq: int
    budget: int
    steps: int
    squeezes: int
    device: str

    def squeezed(self, step: int) -> bool:
        """Whether the other process wants its memory in this step."""
        phases = 2 * self.squeezes + 1
        phase = (step - WARM_UP) // ((self.steps - WARM_UP) // phases)
        return step >= WARM_UP and min(phase, phases - 1) % 2 == 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step that was measured."""

    loss: float
    seconds: float
    squeezed: bool
    samples: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A whole training."""

    steps: list[Step]
    events: list[str]
    plans: int
    planning_seconds: float

    def rate(self, *, like: Sequence[Step]) -> float:
        """Samples a second over the steps that are not squeezed in `like`."""
        free = [
            step
            for step, other in list(zip(self.steps, like, strict=True))[WARM_UP:]
            if not other.squeezed
        ]
        return sum(step.samples for step in free) / sum(step.seconds for step in free)


class Small(nn.Module):
    """A model for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(3))
        )
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(ids)))
        return logits


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The next token's cross entropy, for models that return logits."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def make_run(setting: Setting, ask: Callable[[], int | None]) -> tuple[Run, int]:
    """The run, and the size of its vocabulary."""
    torch.manual_seed(0)
    if setting.device == "cpu":
        model: nn.Module = Small()
        vocabulary, loss, precision = 64, token_loss, "fp32"
    else:
        from benchmarks.real_steps import set_up
        from oomph.jobs.sources import job_from_name

        job = job_from_name(setting.model, batch=setting.batch, seq=setting.seq)
        model = set_up(job).model
        vocabulary, loss, precision = model.config.vocab_size, None, "bf16-mixed"  # type: ignore[union-attr,assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = fit(
        model,
        optimizer,
        loss,
        a_batch(setting, vocabulary, 0),
        budget=setting.budget,
        elastic=Elastic(ask=ask, patience=PATIENCE),
        precision=precision,
    )
    return run, vocabulary


def a_batch(setting: Setting, vocabulary: int, step: int) -> dict[str, Tensor]:
    """The batch of a step, the same in every training."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocabulary, (setting.batch, setting.seq), generator=generator)
    return {"input_ids": ids, "labels": ids}


class Other:
    """A second process that holds memory of the card; nothing on the CPU."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.holds = False
        if device == "cuda":
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=hold_memory, args=(theirs,), daemon=True)
            self._process.start()
            self._pipe.recv()

    def hold(self, leave: int) -> None:
        """Take all but what the run may still have, the first time this is called."""
        if self.holds or self._device != "cuda":
            return
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        gpu = find_gpu(torch.cuda.get_device_name())
        own = torch.cuda.memory_reserved() + device_overhead(gpu).expected
        self._say(free - max(leave - own, 0) - MARGIN)
        self.holds = True

    def let_go(self) -> None:
        """Give it all back."""
        if self.holds:
            self._say(0)
            self.holds = False

    def _say(self, nbytes: int) -> None:
        self._pipe.send(nbytes)
        self._pipe.recv()


def hold_memory(pipe: Connection) -> None:
    """What the second process does: hold as many bytes of the card as it is told."""
    held = torch.empty(1, device="cuda")
    pipe.send(0)
    while True:
        nbytes = pipe.recv()
        del held
        torch.cuda.empty_cache()
        held = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cuda")
        pipe.send(nbytes)


def train(
    setting: Setting, disturb: bool, wait_for_turn: Callable[[], Any] = lambda: None
) -> Outcome:
    """Train once, when it is its turn; with `disturb`, the budget is cut in half and restored."""
    asked: list[int | None] = [None]
    began = time.perf_counter()
    run, vocabulary = make_run(setting, lambda: asked[0])
    planning = time.perf_counter() - began
    wait_for_turn()
    other = Other(setting.device) if disturb else None
    half = setting.budget // 2
    steps, plans = [], set[str]()
    for number in range(setting.steps):
        squeezed = setting.squeezed(number)
        if other is not None:
            # Asked for in the first step of a squeeze; from then on the card itself is short.
            asked[0] = half if squeezed and (setting.device == "cpu" or not other.holds) else None
            if not squeezed:
                other.let_go()
        batch = a_batch(setting, vocabulary, number)
        began = time.perf_counter()
        loss = float(run.step(batch))  # waits for the device
        seconds = time.perf_counter() - began
        if other is not None and squeezed:
            other.hold(half)
        steps.append(Step(loss=loss, seconds=seconds, squeezed=squeezed, samples=setting.batch))
        plans.add(str(run.plan.choices))
    return Outcome(
        steps=steps,
        events=[str(event) for event in run.events],
        plans=len(plans),
        planning_seconds=planning,
    )


def _train_and_send(pipe: Connection, setting: Setting, disturb: bool, turn: Event) -> None:
    pipe.send(train(setting, disturb, turn.wait))


def one_after_the_other(setting: Setting) -> tuple[Outcome, Outcome]:
    """Undisturbed and squeezed, each in a process of its own; both plan at once."""
    context = multiprocessing.get_context("spawn")
    started = []
    for disturb in (False, True):
        ours, theirs = context.Pipe(duplex=False)
        turn = context.Event()
        process = context.Process(target=_train_and_send, args=(theirs, setting, disturb, turn))
        process.start()
        theirs.close()
        started.append((ours, turn, process))
    outcomes: list[Outcome] = []
    try:
        for ours, turn, process in started:
            turn.set()
            outcomes.append(ours.recv())
            process.join()  # its memory is free from here on
    finally:
        for _, _, process in started:
            process.kill()
    return outcomes[0], outcomes[1]


def compare(setting: Setting, undisturbed: Outcome, squeezed: Outcome) -> dict[str, Any]:
    """What the squeezes cost."""
    pairs = list(zip(undisturbed.steps, squeezed.steps, strict=True))
    apart = max(abs(a.loss - b.loss) / max(abs(a.loss), 1e-9) for a, b in pairs)
    rates = [one.rate(like=squeezed.steps) for one in (undisturbed, squeezed)]
    inside = [step.seconds for step in squeezed.steps[WARM_UP:] if step.squeezed]
    return {
        "setting": dataclasses.asdict(setting),
        "losses_apart": apart,
        "losses_equal": apart <= TOLERANCE[setting.device],
        "samples_lost": sum(s.samples for s in undisturbed.steps)
        - sum(s.samples for s in squeezed.steps),
        "samples_per_second": {"undisturbed": rates[0], "outside_squeezes": rates[1]},
        "lost_outside_squeezes": 1 - rates[1] / rates[0],
        "median_seconds_inside_squeezes": statistics.median(inside) if inside else None,
        "plans_used": squeezed.plans,
        "planning_seconds": squeezed.planning_seconds,
        "events": squeezed.events,
        "losses": {
            "undisturbed": [step.loss for step in undisturbed.steps],
            "squeezed": [step.loss for step in squeezed.steps],
        },
        "seconds": {
            "undisturbed": [step.seconds for step in undisturbed.steps],
            "squeezed": [step.seconds for step in squeezed.steps],
        },
    }


def describe(result: dict[str, Any]) -> str:
    """The comparison as a table; all numbers were measured."""
    setting, rates = result["setting"], result["samples_per_second"]
    words = "yes" if result["losses_equal"] else "no"
    rows = [
        ("budget", f"{format_bytes(setting['budget'])}, halved {setting['squeezes']} times"),
        ("losses equal", f"{words}, at most {result['losses_apart']:.2e} apart"),
        ("samples lost", str(result["samples_lost"])),
        ("undisturbed", f"{rates['undisturbed']:,.1f} samples/s"),
        ("outside the squeezes", f"{rates['outside_squeezes']:,.1f} samples/s"),
        ("lost outside them", f"{100 * result['lost_outside_squeezes']:.1f} %"),
        ("plans used", str(result["plans_used"])),
        ("changes of plan", str(len(result["events"]))),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both trainings, print the comparison, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a smoke test on the CPU")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--budget", type=parse_bytes, default=64 * GIB)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--squeezes", type=int, default=3)
    given = parser.parse_args(arguments)
    setting = Setting(
        model=given.model,
        batch=given.batch,
        seq=given.seq,
        budget=given.budget,
        steps=given.steps,
        squeezes=given.squeezes,
        device="cuda",
    )
    if given.small:
        setting = Setting(
            model="small", batch=16, seq=64, budget=4 << 20, steps=40, squeezes=2, device="cpu"
        )
    result = compare(setting, *one_after_the_other(setting))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "elastic.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(describe(result))


if __name__ == "__main__":
    main()
