"""The plan as a diff: what each change saves and costs, by rehearsing the plan without it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oomph.hardware import GPU
from oomph.hardware.timing.clock import Clock
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, MASTERS, RECOMPUTE, Choices, on_the_gpu
from oomph.plans.fidelity import Fidelity, of_fused_kernels
from oomph.plans.plan import Change
from oomph.plans.techniques import Target, TechniqueInfo, all_techniques
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.step_cost import peak_taken, step_cost
from oomph.rehearsal.timeline import Timeline
from oomph.search.option_profiles import Marks, count_parts, with_even_parts
from oomph.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """Choices that belong together, how to say them, and how true they are."""

    technique: str
    field: str = ""
    info: TechniqueInfo[Any] | None = None
    """The registered technique that it is, in the place of a field."""
    with_it: tuple[str, ...] = ()
    """Choices that make no sense without it."""
    fidelity: Fidelity = Fidelity.EXACT


#: The most bytes alive in a step, and its seconds.
Price = tuple[int, float]
#: What each of these would take.
PriceAll = Callable[[Sequence[Choices]], Sequence[Price]]


def describe_changes(
    job: Job,
    gpu: GPU | None,
    clock: Clock,
    before: Choices,
    after: Choices,
    rehearsed: Timeline,
    price_all: PriceAll | None = None,
) -> tuple[Change, ...]:
    """Every difference between the two, with the memory it saves and the time it costs.

    `rehearsed` is the job with all of `after`, by the same clock; `price_all` says what others
    take, where somebody has a quicker way than one rehearsal after the other.
    """
    with_all = _taken(job, clock, after, rehearsed)
    if with_even_parts(job, after.micro_batch) is not job:
        # Timed as the others are: by parts of one size.
        with_all = price(job, gpu, clock, after)
    others = to_be_priced(before, after)
    one_by_one = (price(job, gpu, clock, choices) for choices in others)
    found = one_by_one if price_all is None else price_all(others)
    prices = {str(choices): one for choices, one in zip(others, found, strict=True)}
    prices[str(after)] = with_all
    changes = []
    for one in _changed(before, after):
        without, beside = (prices[str(choices)] for choices in _compared(one, before, after))
        changes.append(
            Change(
                technique=one.technique,
                before=_say(one, before),
                after=_say(one, after),
                saves=without[0] - beside[0],
                costs=beside[1] - without[1],
                fidelity=one.fidelity,
            )
        )
    return tuple(changes)


def to_be_priced(before: Choices, after: Choices) -> list[Choices]:
    """What has to be rehearsed, besides `after`, to say what each of its differences is worth."""
    pairs = (_compared(one, before, after) for one in _changed(before, after))
    by_name = {str(choices): choices for pair in pairs for choices in pair if choices != after}
    return list(by_name.values())


def price(job: Job, gpu: GPU | None, clock: Clock, choices: Choices) -> Price:
    """What a step takes with these choices, by a rehearsal of it."""
    timeline = rehearse(
        job,
        gpu,
        ("build", "step"),
        choices=choices,
        watch=Marks(tuple(choices.blocks)).watch,
        clock=clock,
        skip_first_step=True,
    )
    return _taken(job, clock, choices, timeline)


def _taken(job: Job, clock: Clock, choices: Choices, timeline: Timeline) -> Price:
    parts = count_parts(job, choices.micro_batch)
    return peak_taken(timeline), step_cost(timeline, parts).seconds(clock)


def _changed(before: Choices, after: Choices) -> list[_Difference]:
    return [one for one in _differences(after) if _value(one, before) != _value(one, after)]


def _value(one: _Difference, choices: Choices) -> Any:
    return choices.settings(one.info) if one.info is not None else getattr(choices, one.field)


def _compared(one: _Difference, before: Choices, after: Choices) -> tuple[Choices, Choices]:
    """Two that differ in nothing else: without a difference, and with it."""
    if one.info is not None and one.info.alters_forward:
        alone = Choices(precision=before.precision, micro_batch=before.micro_batch)
        return alone, _taken_over(one, after, alone)
    if one.info is not None and not one.info.concerns_tensors:
        return after, after
    return _taken_over(one, before, after), after


def _taken_over(one: _Difference, given: Choices, to: Choices) -> Choices:
    """`to`, but what the difference is about, and what makes no sense without, is as in `given`."""
    key = one.info.name if one.info is not None else one.field
    about = {info.name for info in all_techniques() if key in (info.name, *info.belongs_with)}
    techniques = {name: settings for name, settings in to.techniques.items() if name not in about}
    techniques |= {name: given.techniques[name] for name in about & given.techniques.keys()}
    names = (one.field, *one.with_it) if one.field else one.with_it
    return dataclasses.replace(
        to, **{name: getattr(given, name) for name in names}, techniques=techniques
    )


def typed_elsewhere(technique: str, choices: Choices) -> str:
    """What a technique of a plan's diff is told, as people type it; empty if they cannot."""
    for info in all_techniques():
        if info.title == technique:
            return info.typed(choices.settings(info))
    return ""


def settings_shown(technique: str, choices: Choices) -> dict[str, Any]:
    """What a technique of a plan's diff is told, by name, as plain JSON."""
    for one in _differences(choices):
        if one.technique == technique:
            if one.info is not None:
                settings = choices.settings(one.info).as_dict()
                return {f"{one.info.name}.{name}": value for name, value in settings.items()}
            values = choices.as_dict()
            return {name: values[name] for name in (one.field, *one.with_it)}
    return {}


def _differences(after: Choices) -> list[_Difference]:
    return [
        _Difference(
            technique="precision",
            field="precision",
            with_it=("weights",),
            fidelity=Fidelity.ROUNDING,
        ),
        _Difference(technique="micro-batch", field="micro_batch"),
        _Difference(technique="recompute", field="blocks", with_it=("offloaded_to",)),
        _Difference(
            technique="compile",
            field="compiled",
            with_it=("compiled_others",),
            fidelity=of_fused_kernels(after.precision),
        ),
        _Difference(technique="loss", field="loss_chunk", with_it=("head",)),
        _Difference(technique="optimizer in backward", field="optimizer_in_backward"),
        *_registered(Target.OPTIMIZER, after),
        _Difference(technique="weights", field="weights", fidelity=Fidelity.ROUNDING),
        *_registered(Target.PRECISION, after),
        _Difference(
            technique="optimizer",
            field="optimizer_on",
            with_it=(
                "host_share",
                "disk_share",
                "gpu_share",
                "gradient_room",
                "gradients_on",
                "state_ahead",
                "state_early",
                "weights_away",
                "weights_away_on",
            ),
            # The host's kernels differ from the GPU's in the last bits.
            fidelity=Fidelity.ROUNDING if after.host_share else Fidelity.EXACT,
        ),
        _Difference(
            technique="weights of blocks", field="weights_away", with_it=("weights_away_on",)
        ),
        *_registered(Target.MODEL, after),
        *_registered(Target.LAUNCHES, after),
        *_registered(Target.PROCESS, after),
    ]


def _registered(changes: Target, after: Choices) -> list[_Difference]:
    """The registered techniques that change this."""
    return [
        _Difference(
            technique=info.title,
            info=info,
            fidelity=info.fidelity(after.settings(info), after.precision),
        )
        for info in all_techniques()
        if info.changes == changes
    ]


def _say(one: _Difference, choices: Choices) -> str:
    """A choice in the words of the report."""
    if one.info is not None:
        return one.info.say(choices.settings(one.info))
    match one.technique:
        case "precision":
            return choices.precision
        case "micro-batch":
            return f"{choices.micro_batch} samples" if choices.micro_batch else "whole batch"
        case "recompute":
            return say_blocks(choices)
        case "compile":
            return "each block" if choices.compiled else "no"
        case "loss":
            return f"{choices.loss_chunk:,} rows at a time" if choices.loss_chunk else "all logits"
        case "optimizer in backward":
            return "yes" if choices.optimizer_in_backward else "no"
        case "weights":
            return choices.weights
        case "optimizer":
            return say_place(choices)
        case "weights of blocks":
            return say_weights_away(choices)
        case _:
            raise AssertionError(one.technique)


def say_place(choices: Choices) -> str:
    """Where the optimizer is, and who steps it."""
    if choices.optimizer_on == "gpu":
        return "on the GPU"
    words = "state on the host"
    if choices.gpu_share:
        words += f", but for {choices.gpu_share:.0%} of it"
    if choices.host_share:
        words += f", {choices.host_share:.0%} stepped there"
    if (room := choices.gradient_room) is not None:
        words += ", gradients on the disk" if choices.gradients_on == "disk" else ", gradients too"
        words += f" beyond {format_bytes(room)}" if room else ""
    if choices.disk_share:
        what = "state and masters" if choices.weights == MASTERS else "state"
        words += f", {choices.disk_share:.0%} of the {what} on the disk"
    return words


def say_weights_away(choices: Choices) -> str:
    """Where the weights of blocks wait."""
    away, total = len(choices.weights_away), len(choices.blocks)
    return f"{away} of {total} on the {choices.weights_away_on}" if away else "on the GPU"


def say_blocks(choices: Choices) -> str:
    """How many blocks are recomputed, and how many of them but in part."""
    counts = Counter(map(on_the_gpu, choices.blocks.values()))
    total, kept = len(choices.blocks), counts[KEEP]
    whole = counts[RECOMPUTE]
    partly = total - kept - whole
    if not total:
        return "no blocks"
    words = [f"{whole} of {total} blocks"] if whole else []
    words += [f"{partly} of {total} in part"] if partly else []
    away = len(choices.offloaded)
    words += [f"what {away} of {total} save is on the {choices.offloaded_to}"] if away else []
    return ", ".join(words) or "none"
