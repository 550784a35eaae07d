"""Try a loss on a few samples, as a whole and in parts: both must give the same value.

The trial proves nothing, and does not decide whether a batch is split (`oomph.splitting` does). It
checks a claim: the result of the analysis, in the first real step; a user's statement that the loss
may be split; a framework's loss, which the analysis does not see.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oomph.errors import BadInput, OomphError
from oomph.jobs.job import batch_size
from oomph.techniques.micro_batch import ADVICE, LossChanged, Weigher


def check_parts(
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[Any], Tensor],
    tolerance: float,
    weigher: Weigher | None = None,
) -> None:
    """Try a loss on two samples and refuse it if its parts do not add up (rule 6).

    The trial runs in evaluation mode, without dropout, and restores all random streams. A loss that
    draws random numbers even so, or fails outside training, cannot be tried. A loss that fails with
    a single sample is tried on two pairs. `weigher` must be used for this trial only and holds the
    result of the analysis; an analysed loss is not refused if it cannot be tried.
    """
    failed = None
    for size, words in ((1, "two samples is"), (2, "four samples is")):
        if failed is not None and batch_size(batch) < 2 * size:
            break
        found = _try_parts(model, batch, compute_loss, size, weigher or Weigher())
        if isinstance(found, Exception):
            failed = found
            continue
        if found is None:
            return
        whole, parts = found
        if math.isfinite(whole) and not math.isclose(whole, parts, rel_tol=tolerance, abs_tol=1e-6):
            raise BadInput(
                f"the loss of {words} {whole:.6g}, but {parts:.6g} if each part of {size} is"
                f" computed alone, so oomph cannot weigh micro-batches; {ADVICE}"
            )
        return
    if weigher is not None and weigher.split is not None:
        return
    reason = f"{type(failed).__name__}: {failed}".split("\n")[0]
    raise BadInput(
        f"the loss takes no parts of a batch ({reason}); give the job `whole_batch=True`"
    ) from failed


def _try_parts(
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[Any], Tensor],
    size: int,
    weigher: Weigher,
) -> tuple[float, float] | Exception | None:
    """The loss of two parts of this size at once, and their sum one by one; or a part's error.

    None if the trial tells nothing.
    """
    both, parts = weigher.parts(batch, 2 * size)[0], weigher.parts(batch, size)[:2]
    weigher.begin(both)
    # Eager, so that nothing is compiled for shapes that do not occur again.
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        in_evaluation(model),
        _random_streams(model) as was_drawn_from,
    ):
        try:
            whole = float(compute_loss(both))
        except OomphError:
            raise
        except Exception:  # also out of memory: two samples may be more than a part has
            return None
        try:
            computes = [functools.partial(compute_loss, part) for part in parts]
            weighed = [
                float(weigher.weigh(part, 0.5, compute))
                for part, compute in zip(parts, computes, strict=True)
            ]
        except LossChanged:
            return None  # the forward differs in evaluation; training was analysed
        except OomphError:
            raise
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            return error
        return None if was_drawn_from() else (whole, sum(weighed))


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """While active, the whole model is in evaluation mode; restores the training flags."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _random_streams(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Restores the random streams; yields a function that tells whether any was drawn from."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}

    def look() -> list[Any]:
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        _, key, position, *_ = np.random.get_state()
        return [*(state.tolist() for state in states), random.getstate(), list(key), position]

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        before = look()
        try:
            yield lambda: look() != before
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
