"""Real training steps on a GPU, capped and clocked: what the benchmarks of plans have in common.

All of them train the same weights on the same batch, made from one seed on the card itself.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.side_by_side import FAILED
from oomph.hardware import find_gpu
from oomph.jobs.description import torch_version
from oomph.jobs.job import Job, build_model, make_batch, make_optimizer
from oomph.plans.plan import Plan
from oomph.runs.run import enforce

OK = "ok"
OUT_OF_MEMORY = "out of memory"
#: How often steps are timed at least, before the round that has to be no shorter.
ROUNDS = 2

Step = Callable[[], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model with real numbers, its optimizer and a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any

    @property
    def device(self) -> torch.device:
        """Where it runs; the model may wait elsewhere."""
        return next(leaf.device for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor))


def set_up(job: Job, device: str = "cuda") -> Training:
    """The job's model, optimizer and batch with numbers that training could have."""
    torch.manual_seed(0)
    with torch.device(device):
        model = build_model(job)
    model.to(device)
    fill_weights(model)
    optimizer = make_optimizer(str(job.optimizer))(
        [p for p in model.parameters() if p.requires_grad]
    )
    batch = tree_map(lambda leaf: leaf.to(device), make_batch(job))
    return Training(model=model, optimizer=optimizer, batch=fill_batch(batch, model.config))


def load_plan(path: Path) -> Plan:
    """A plan that was made here or elsewhere, by another PyTorch: what it says is tried here."""
    return made_here(Plan.load(path))


def summary(plan: Plan) -> str:
    """What a plan does, in a line."""
    return "; ".join(f"{change.technique}: {change.after}" for change in plan.changes)


def made_here(plan: Plan) -> Plan:
    """The same, as if this PyTorch had made it."""
    here = dataclasses.replace(plan.made_for, torch=torch_version())
    return dataclasses.replace(plan, made_for=here)


@torch.no_grad()
def fill_weights(model: nn.Module) -> None:
    """Initialise what was built without: a card's clock depends on the numbers it multiplies."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def fill_batch(batch: Any, config: Any) -> Any:
    """Random tokens, labels and pixels in the place of the catalogue's placeholders."""

    def fill(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return torch.randn_like(leaf)
        # Low numbers stand for padding and the like, which some models treat by other rules.
        top = config.vocab_size if leaf.dim() > 1 else config.num_labels
        return torch.randint_like(leaf, top // 2, top)

    return tree_map(fill, batch)


def begin(training: Training, budget: int | None) -> None:
    """Let PyTorch have what a budget of device memory leaves it, and count from here on.

    After an earlier run, weights and optimizer state first move into segments of their own, as in a
    new process: left where they are, they would hold on to the segments of its activations.
    """
    torch.cuda.set_per_process_memory_fraction(1.0)
    if training.optimizer.state:
        torch.cuda.empty_cache()
        for tensor, data in [(tensor, tensor.data.clone()) for tensor in _lasting(training)]:
            tensor.data = data
    torch.cuda.empty_cache()
    if budget is not None:
        device = torch.device("cuda", torch.cuda.current_device())
        enforce(budget, find_gpu(torch.cuda.get_device_name(device)), device)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def _lasting(training: Training) -> Iterator[Tensor]:
    for module in training.model.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
    for state in training.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def run_steps(step: Step, count: int) -> list[float]:
    """The losses of some steps."""
    losses = [step() for _ in range(count)]
    return [float(loss) for loss in losses if loss is not None]


def clock(step: Step, count: int) -> float:
    """Seconds of a step, over some of them; measured `ROUNDS` times, then until it gets no shorter.

    What other processes gave the card before they stood still takes a while, and a host that has
    other work now and then is slow for a round.
    """
    best, seconds = math.inf, min(_clock_once(step, count) for _ in range(ROUNDS))
    while seconds < 0.97 * best:
        best, seconds = seconds, _clock_once(step, count)
    return min(best, seconds)


def _clock_once(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def peaks() -> dict[str, int]:
    """The most memory since `begin`, and how often the allocator gave its cache back for more.

    `device` is everybody's: it means something only where no other process uses the card.
    """
    reserved = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": reserved,
        "device": total - free + reserved - torch.cuda.memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` found, or how it ended."""
    try:
        return {"status": OK, **work()}
    except Exception as error:
        if _is_out_of_memory(error):
            return {"status": OUT_OF_MEMORY}
        return {"status": FAILED, "error": traceback.format_exc()[-1500:]}


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Compilers wrap the error they stumble on."""
    if error is None or isinstance(error, torch.OutOfMemoryError):
        return error is not None
    return _is_out_of_memory(error.__cause__ or error.__context__)


def environment() -> dict[str, str | None]:
    """What a measurement is true of."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }
