"""Adaptive precision of a run: probes now and then, moves layers, rolls back non-finite steps."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from oomph.engine.out_of_memory import free_what_is_left, ran_out_of_memory
from oomph.engine.step import Stage
from oomph.errors import BadInput, WrongCheckpoint
from oomph.jobs.job import batch_size, split_batch
from oomph.plans.choices import Choices
from oomph.precision.layers import find_layers
from oomph.precision.policy import Move, Places, Policy, Thresholds
from oomph.precision.probe import Divergence, Outcome, Probe
from oomph.precision.report import PrecisionReport, Spent
from oomph.techniques.layer_precision import LayerPrecision, tf32_settings_kept
from oomph.techniques.micro_batch import why_whole
from oomph.techniques.number_formats import LEVELS, Level, ladder_of, make_ladder
from oomph.techniques.technique import techniques_of

log = logging.getLogger("oomph")


@dataclass(frozen=True, kw_only=True)
class AdaptivePrecision:
    """How the precision of layers follows the model's behaviour."""

    every: int = 100
    """Steps from one probe to the next."""
    ladder: Sequence[str] | None = None
    """Levels from fp32 down, as ("fp32", "bf16"); None takes those that the device runs faster."""
    layers: Sequence[str] | None = None
    """Paths of the modules that have their own precision. None takes the plan's blocks. Modules
    outside them that multiply are layers of their own."""
    demote_below: float = 0.05
    """Layers go down if the gradients of all layers, and the loss, differ from fp32 by less than
    this share of their norm."""
    promote_above: float = 0.2
    """Layers go up if the gradients of one differ this much from fp32."""
    patience: int = 3
    """Number of consecutive probes in which going down must have looked safe."""
    wait: int = 8
    """Probes before a layer that went up is tried again; doubled each time."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BadInput(f"there is at least one step from probe to probe, not {self.every}")
        self.thresholds  # noqa: B018  # checks itself
        if self.ladder is not None:
            make_ladder(self.ladder)

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds for moving layers down and up."""
        return Thresholds(
            demote_below=self.demote_below,
            promote_above=self.promote_above,
            patience=self.patience,
            wait=self.wait,
        )


@dataclass(frozen=True, kw_only=True)
class PrecisionEvent:
    """A change of a layer's level."""

    step: int
    """Steps completed before it."""
    layer: str
    before: Level
    after: Level
    why: str

    def __str__(self) -> str:
        return f"after step {self.step}, {self.layer}: {self.before} → {self.after}, {self.why}"


class NotFinite(Exception):
    """A step's loss or gradients are not finite; everything that was stepped can be rolled back."""


class PrecisionController:
    """The levels of a run's layers: applied in each step, moved by probes, saved with the run."""

    def __init__(
        self, how: AdaptivePrecision, stage: Stage, device: torch.device, choices: Choices
    ) -> None:
        _refuse(choices)
        if stage.host is not None:
            raise BadInput(
                "the plan has the optimizer on the host, where gradients go one by one: nobody can"
                " look at them all before they are stepped. Plan with a larger budget"
            )
        self._every = how.every
        self._stage = stage
        self._device = device
        #: The level of layers to which nothing is applied.
        self._own = LEVELS[choices.precision]
        self._ladder = (
            make_ladder(how.ladder)
            if how.ladder is not None
            else ladder_of(device, self._own, compiled=choices.compiled)
        )
        if self._own not in self._ladder:
            raise BadInput(
                f"the job runs in {choices.precision}, which is not on the ladder"
                f" {', '.join(self._ladder)}; layers begin where the job is"
            )
        blocks = how.layers if how.layers is not None else choices.blocks
        head = [choices.head] if choices.head else []
        self._layers = find_layers(stage.model, blocks, self._ladder, leave=head)
        self._precisions = {
            layer.path: LayerPrecision(layer.module, stage.device_type, cast_cache=stage.cast_cache)
            for layer in self._layers
        }
        begin = self._ladder.index(self._own)
        lowest = {layer.path: max(layer.lowest, begin) for layer in self._layers}
        self._policy = Policy(how.thresholds, lowest, dict.fromkeys(lowest, begin))
        self.events: list[PrecisionEvent] = []
        #: The result of the last probe, for the model at that time.
        self.divergence: Divergence | None = None
        self._spent = Spent()
        stage.check = self._check_finite

    @property
    def levels(self) -> dict[str, Level]:
        """By a layer's path: the precision of its products."""
        return {path: self._ladder[place] for path, place in self._policy.places.items()}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run the layers at their levels inside."""
        started = time.perf_counter()
        with tf32_settings_kept(), self._at(self._policy.places):
            yield
        self._spent.in_steps += time.perf_counter() - started

    def before_step(self, step: int, batch: Callable[[], Any]) -> None:
        """Probe, if it is due."""
        if step == 0 or (step % self._every and not self._policy.restless):
            return
        started = time.perf_counter()
        part = self._samples(batch())
        while part is not None:
            moves, failure = self._try_probe(part)
            if not failure:
                self._carry_out(step, moves)
                break
            # Outside the `except`, so that the error's traceback is gone (rule 5).
            free_what_is_left(self._device)
            part = _half(part)
            if part is None:
                log.info("after step %d, no probe: %s", step, failure)
        self._spent.probing(time.perf_counter() - started)

    def recover(self, step: int, batch: Any, why: str) -> None:
        """After a non-finite step was rolled back, raise the layers that caused it, or say why."""
        moves = self._policy.recover(self._finder(batch, why), why)
        if not moves:
            raise _not_for_want_of_precision(why)
        self._spent.taken_back += 1
        self._carry_out(step, moves)

    def report(self) -> PrecisionReport:
        """Savings and costs so far."""
        return PrecisionReport(
            levels=self.levels,
            moves=len(self.events),
            divergence=self.divergence,
            spent=self._spent,
            device=self._device.type,
        )

    def stop(self) -> None:
        """Stop adapting; layers go back to the plan's precision."""
        self._stage.check = None

    # -- probing ----------------------------------------------------------------------------------

    def _try_probe(self, part: Any) -> tuple[list[Move], str]:
        """The moves that a probe decides; or none, and the error message when memory ran out."""
        before = self._policy.state_dict()
        try:
            return self._probe(part), ""
        except BaseException as error:
            self._policy.load_state_dict(before)
            if not ran_out_of_memory(error):
                raise
            return [], f"{type(error).__name__}: {error}"

    def _probe(self, part: Any) -> list[Move]:
        probe = Probe(self._stage, self._device, self._layers)
        reference = self._in_fp32(probe, part)
        if not reference.finite:
            return []  # samples without information, such as a part with no valid target
        places = self._policy.places
        present = probe.run(part, self._at(places))
        if self._stage.scaler is not None and math.isfinite(present.loss) and not present.finite:
            return []  # the loss scale is too large, which the scaler will find out by itself
        self.divergence = probe.compare(present, reference)
        self._spent.compared(present.cost, reference.cost)
        known = self.divergence.worst

        def measure(others: Places) -> float:
            if others == places:
                return known
            return probe.compare(probe.run(part, self._at(others)), reference).worst

        return self._policy.probe(measure)

    def _finder(self, batch: Any, why: str) -> Callable[[Places], bool]:
        """A function that tells whether the step is finite for given places, on a part that fails.

        If no part fails, or memory runs out, no layer is taken to be at fault by itself.
        """
        size = self._stage.job.micro_batch
        probe = Probe(self._stage, self._device, self._layers)
        try:
            for part in split_batch(batch, size) if size else [batch]:
                if probe.run(part, self._at(self._policy.places)).finite:
                    continue
                if not self._in_fp32(probe, part).finite:
                    raise _not_for_want_of_precision(why)
                return lambda places: probe.run(part, self._at(places)).finite
        except BaseException as error:
            if not ran_out_of_memory(error):
                raise
        free_what_is_left(self._device)
        return lambda places: True

    def _in_fp32(self, probe: Probe, part: Any) -> Outcome:
        # If the job's own level is fp32, layers in the highest place are left alone.
        return probe.run_in_fp32(part, self._at(dict.fromkeys(self._precisions, 0)))

    def _samples(self, batch: Any) -> Any:
        """Half of the samples of a step's forward: in fp32 they take up to twice the memory."""
        if why_whole(self._stage.model):
            return batch
        size = self._stage.job.micro_batch or batch_size(batch)
        return split_batch(batch, math.ceil(size / 2))[0]

    @contextlib.contextmanager
    def _at(self, places: Places) -> Iterator[None]:
        with contextlib.ExitStack() as undos:
            for path, place in places.items():
                if self._ladder[place] is not self._own:
                    undos.callback(self._precisions[path].apply(self._ladder[place]))
            yield

    def _carry_out(self, step: int, moves: Sequence[Move]) -> None:
        for move in moves:
            before, after = self._ladder[move.before], self._ladder[move.after]
            event = PrecisionEvent(
                step=step, layer=move.layer, before=before, after=after, why=move.why
            )
            self.events.append(event)
            log.info("%s", event)
        if moves and self._stage.graph is not None:
            self._stage.graph.forget()  # it was captured at other levels

    # -- steps ------------------------------------------------------------------------------------

    def _check_finite(self, loss: Tensor | None) -> None:
        """Called when a step has its loss and gradients, before the optimizer uses them."""
        stage = self._stage
        if loss is not None and not bool(loss.isfinite()):
            raise NotFinite(f"the loss is {float(loss)}")
        if stage.scaler is not None:
            return  # the scaler checks the gradients itself, and adjusts its scale
        weights = list(stage.model.parameters())
        # With a step inside backward the gradients are gone, but their effect on the weights is
        # not.
        stepped = stage.in_backward is not None
        found = [w.detach() if stepped else w.grad for w in weights]
        norm = get_total_norm([one for one in found if one is not None])
        if not bool(norm.isfinite()):
            raise NotFinite("a gradient is not finite")

    # -- saved ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Levels, the current trial, and all events."""
        return {
            "ladder": list(map(str, self._ladder)),
            "policy": self._policy.state_dict(),
            "events": [asdict(event) for event in self.events],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if state["ladder"] != list(self._ladder):
            raise WrongCheckpoint(
                f"precision was adapted on the ladder {', '.join(state['ladder'])} when saved, and"
                f" is now on {', '.join(self._ladder)}; adapt it on the same one"
            )
        self._policy.load_state_dict(state["policy"])
        self.events = [
            PrecisionEvent(**{**one, "before": Level(one["before"]), "after": Level(one["after"])})
            for one in state["events"]
        ]
        if self._stage.graph is not None:
            self._stage.graph.forget()


def _refuse(choices: Choices) -> None:
    if choices.weights != "own":
        raise BadInput(
            "the plan keeps the weights in bf16, so there is no more precision to go back to; plan"
            ' with allow="exact", and let layers go down'
        )
    if choices.precision not in LEVELS:
        raise BadInput(
            f"the job runs in {choices.precision}, so there is no more precision to go back to:"
            f" adapting is for jobs in {', '.join(LEVELS)}"
        )
    for technique, settings in techniques_of(choices):
        if technique.decides_precision:
            raise BadInput(
                f"the plan has {technique.elsewhere(settings)} already; plan without, and let"
                " layers go down"
            )


def _not_for_want_of_precision(why: str) -> BadInput:
    return BadInput(
        f"{why}, and would be with all layers in fp32: it is not for want of precision. Look at the"
        " batch and the learning rate; nothing of the step was kept"
    )


def _half(part: Any) -> Any:
    """The first half of the samples; None if there is only one."""
    size = batch_size(part)
    return split_batch(part, size // 2)[0] if size > 1 else None
