"""Plans inside the host's memory: no more on the disk than must be, and nothing that is dear."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_leaving_plans import WIDTH, model
from torch import nn

from oomph.errors import BadInput, HostTooSmall
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.memory import evicted_to_disk as parked_on_disk
from oomph.memory.limits import HostLimits
from oomph.plans.choices import Choices
from oomph.plans.plan import Plan
from oomph.rehearsal.hidden import device_overhead
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.search import attempt, planner
from oomph.search.attempt import NoPlan
from oomph.search.changes import say_place, say_weights_away, settings_shown
from oomph.search.host_room import make_host_room
from oomph.search.planner import make_planner, plan
from oomph.search.refining import Tried
from oomph.search.space import SearchSpace
from oomph.techniques.step_buckets import bucket_bytes
from oomph.units import MIB

AWAY = Choices(optimizer_on="host")
SHARED = dataclasses.replace(AWAY, host_share=0.3)

# -- with made-up machines -------------------------------------------------------------------------

STATE, REST, RING, COPIES = 10_000, 3_000, 400, 5_000


@dataclasses.dataclass
class Machine:
    """Where state goes to the disk by so many parameters of one size, through a ring of buffers."""

    parameters: int = 1_000_000
    refuses: Callable[[Choices], bool] = lambda _: False
    """What has no room on the GPU."""
    tried: list[Choices] = dataclasses.field(default_factory=list)

    def attempt(self, choices: Choices) -> Tried | None:
        self.tried.append(choices)
        if self.refuses(choices):
            return None
        gone = math.floor(choices.disk_share * self.parameters) / self.parameters
        host = REST + STATE * (1 - gone) + COPIES * choices.host_share + RING * bool(gone)
        seconds = 2 + 10 * gone - choices.host_share
        return Tried(choices=choices, seconds=seconds, host=int(host))

    def make_room(self, host: int, start: Choices = AWAY) -> Tried:
        best = self.attempt(start)
        assert best is not None
        self.tried.clear()
        return make_host_room(best, start, self.attempt, host)


def test_a_plan_that_fits_is_left_alone() -> None:
    machine = Machine()
    assert machine.make_room(REST + STATE).choices == AWAY
    assert not machine.tried


@pytest.mark.parametrize("parameters", [6, 40, 1_000_000], ids="{} parameters".format)
@pytest.mark.parametrize("host", [3_500, 4_000, 7_777, 12_000, 12_999])
def test_the_smallest_share_that_makes_room_is_chosen(host: int, parameters: int) -> None:
    machine = Machine(parameters)
    found = machine.make_room(host)
    assert found.host <= host
    share = found.choices.disk_share
    less = machine.attempt(dataclasses.replace(found.choices, disk_share=round(share - 0.01, 2)))
    assert less is not None and less.host > host


def test_few_are_tried() -> None:
    for host in range(REST + RING, REST + STATE, 100):
        for parameters, most in ((1_000_000, 5), (6, 12), (1, 12)):
            machine = Machine(parameters)
            machine.make_room(host)
            assert len(machine.tried) <= most


@pytest.mark.parametrize("parameters", [6, 1_000_000], ids="{} parameters".format)
def test_more_memory_never_means_a_larger_share(parameters: int) -> None:
    hosts = range(REST + RING, REST + STATE + 200, 200)
    shares = [Machine(parameters).make_room(host).choices.disk_share for host in hosts]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1 and shares[-1] == 0


def test_what_the_hosts_cores_step_stays_in_memory() -> None:
    machine = Machine(refuses=lambda choices: not choices.host_share)
    found = machine.make_room(host=8_000, start=SHARED)
    assert (found.choices.host_share, found.choices.disk_share) == (0.3, 0.69)
    assert max(choices.disk_share for choices in machine.tried) == 0.7


def test_where_that_is_too_much_nothing_steps_there() -> None:
    found = Machine().make_room(host=4_000, start=SHARED)
    assert found.host <= 4_000
    assert (found.choices.host_share, found.choices.disk_share) == (0, 0.94)


BLOCKS = {f"blocks.{at}": "recompute, offloaded" for at in range(4)}
OFFLOADED = dataclasses.replace(AWAY, blocks=BLOCKS, weights_away=tuple(BLOCKS))
KEPT = dataclasses.replace(OFFLOADED, blocks=dict.fromkeys(BLOCKS, "recompute"))
LAST_TWO = ("blocks.2", "blocks.3")


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ((0.1, 0.1), dataclasses.replace(KEPT, weights_away=())),
        ((0.1, 0.48), dataclasses.replace(KEPT, weights_away=LAST_TWO, disk_share=0.09)),
        ((0.1, 0.7), dataclasses.replace(KEPT, disk_share=0.19)),
        ((3.0, 0.1), dataclasses.replace(OFFLOADED, weights_away=(), disk_share=0.09)),
        ((3.0, 9.0), dataclasses.replace(OFFLOADED, disk_share=0.29)),
    ],
    ids=["both", "half of the weights", "blocks", "weights", "neither"],
)
def test_what_else_the_host_keeps_stays_on_the_gpu_where_that_costs_less_than_the_disk(
    costs: tuple[float, float], expected: Choices
) -> None:
    """To keep what blocks save there costs the one, to keep a block's weights there the other."""

    def attempt(choices: Choices) -> Tried:
        away, offloaded = len(choices.weights_away), len(choices.offloaded)
        host = 500 * away + 250 * offloaded + 10_000 * (1 - choices.disk_share)
        host += 400 * bool(choices.disk_share)
        gone = (4 - offloaded) / 4 * costs[0] + (4 - away) * costs[1]
        return Tried(choices=choices, seconds=1 + gone + 10 * choices.disk_share, host=round(host))

    assert make_host_room(attempt(OFFLOADED), KEPT, attempt, 10_500).choices == expected


ON_DISK = dataclasses.replace(OFFLOADED, offloaded_to="disk")


@pytest.mark.parametrize(
    ("cost", "host", "expected"),
    [
        (0.2, 11_500, ON_DISK),
        (2.0, 11_500, dataclasses.replace(OFFLOADED, disk_share=0.19)),
        (2.0, 4_000, dataclasses.replace(OFFLOADED, disk_share=0.94)),
        (2.0, 3_000, dataclasses.replace(ON_DISK, disk_share=0.86)),
        (0.2, 6_000, dataclasses.replace(ON_DISK, disk_share=0.56)),
        (0.2, 100, dataclasses.replace(ON_DISK, disk_share=1.0)),
    ],
    ids=["blocks", "state", "much state", "not state alone", "both are faster", "nothing helps"],
)
def test_what_blocks_save_goes_to_the_disk_where_it_must_or_where_that_is_faster(
    cost: float, host: int, expected: Choices
) -> None:
    """Each block's takes 500 of host memory; the buffers before the disk take 200 for them."""

    def attempt(choices: Choices) -> Tried | None:
        if choices.blocks != BLOCKS or choices.weights_away != OFFLOADED.weights_away:
            return None  # they have no room on the GPU
        on_disk = choices.offloaded_to == "disk"
        host = 10_000 * (1 - choices.disk_share) + 400 * bool(choices.disk_share)
        host += 200 if on_disk else 2_000
        seconds = 1 + 10 * choices.disk_share + cost * on_disk
        return Tried(choices=choices, seconds=seconds, host=round(host + 1000))

    best = attempt(OFFLOADED)
    assert best is not None
    assert make_host_room(best, KEPT, attempt, host).choices == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (4_000, {"disk_share": 0.84}),
        (2_400, {"disk_share": 1.0}),
        (2_300, {"disk_share": 0.87, "weights_away_on": "disk"}),
        (1_000, {"disk_share": 1.0, "weights_away_on": "disk"}),
        (900, {"disk_share": 1.0, "weights_away_on": "disk"}),
    ],
)
def test_weights_go_to_the_disk_where_all_of_the_state_is_not_enough(
    host: int, expected: dict[str, Any]
) -> None:
    """State takes 10,000 bytes, weights 2,000, and each has buffers before the disk."""

    def attempt(choices: Choices) -> Tried | None:
        if len(choices.weights_away) < 4 or choices.offloaded:
            return None  # no room for it on the GPU
        cold = choices.weights_away_on == "disk"
        taken = 10_000 * (1 - choices.disk_share) + 400 * bool(choices.disk_share)
        taken += 600 if cold else 500 * len(choices.weights_away)
        taken += 5_000 * choices.host_share
        seconds = 1 + 10 * choices.disk_share + 5 * cold - choices.host_share
        return Tried(choices=choices, seconds=seconds, host=round(taken))

    start = attempt(dataclasses.replace(KEPT, host_share=0.2))
    assert start is not None
    found = make_host_room(start, start.choices, attempt, host)
    assert found.choices == dataclasses.replace(KEPT, **expected)
    assert found.host <= host or host < 1_000, "the one that lacks least"


CLIPPED = dataclasses.replace(OFFLOADED, gradient_room=0)
GRADIENTS = dataclasses.replace(CLIPPED, gradients_on="disk")


@pytest.mark.parametrize(
    ("costs", "host", "expected"),
    [
        ((0.5, 5.0), 13_000, GRADIENTS),
        ((0.5, 5.0), 12_000, dataclasses.replace(GRADIENTS, disk_share=0.14)),
        ((5.0, 5.0), 13_000, dataclasses.replace(CLIPPED, disk_share=0.31)),
        ((5.0, 0.5), 13_000, dataclasses.replace(CLIPPED, offloaded_to="disk", disk_share=0.13)),
        ((0.5, 0.3), 11_200, dataclasses.replace(GRADIENTS, offloaded_to="disk")),
        ((5.0, 5.0), 1_700, dataclasses.replace(GRADIENTS, offloaded_to="disk", disk_share=0.99)),
    ],
    ids=["alone", "with state", "state is faster", "so are blocks", "both", "all"],
)
def test_gradients_go_to_the_disk_where_they_must_or_where_that_is_faster(
    costs: tuple[float, float], host: int, expected: Choices
) -> None:
    """They take 3,000 of host memory, what blocks save 2,000; each has buffers before the disk."""

    def attempt(choices: Choices) -> Tried | None:
        if choices.blocks != BLOCKS or choices.weights_away != CLIPPED.weights_away:
            return None  # they have no room on the GPU
        gradients, saved = choices.gradients_on == "disk", choices.offloaded_to == "disk"
        host = 10_000 * (1 - choices.disk_share) + 400 * bool(choices.disk_share)
        host += (300 if gradients else 3_000) + (200 if saved else 2_000)
        host += 700 if choices.weights_away_on == "host" else 600
        seconds = 1 + 10 * choices.disk_share + costs[0] * gradients + costs[1] * saved
        seconds += 50 * (choices.weights_away_on == "disk")
        return Tried(choices=choices, seconds=seconds, host=round(host))

    best = attempt(CLIPPED)
    assert best is not None
    kept = dataclasses.replace(KEPT, gradient_room=0)
    assert make_host_room(best, kept, attempt, host).choices == expected


def test_what_has_no_room_on_the_gpu_is_not_chosen() -> None:
    machine = Machine(refuses=lambda choices: 0.3 < choices.disk_share < 0.8)
    assert machine.make_room(host=8_000).choices.disk_share == 0.8


def test_where_nothing_makes_room_the_one_that_lacks_least_is_found() -> None:
    found = Machine().make_room(host=1_000, start=SHARED)
    assert found == Tried(
        choices=dataclasses.replace(AWAY, disk_share=1.0), seconds=12, host=REST + RING
    )


def test_a_disk_that_cannot_help_is_not_used() -> None:
    everything = dataclasses.replace(AWAY, host_share=1.0)
    machine = Machine(refuses=lambda choices: not choices.host_share)
    assert machine.make_room(host=1_000, start=everything).choices == everything


def test_the_report_says_how_much_of_the_state_is_on_the_disk() -> None:
    assert say_place(dataclasses.replace(AWAY, disk_share=0.4)) == (
        "state on the host, 40% of the state on the disk"
    )
    with_masters = dataclasses.replace(AWAY, weights="bf16 with fp32 masters", disk_share=0.4)
    assert say_place(with_masters) == "state on the host, 40% of the state and masters on the disk"
    everywhere = dataclasses.replace(SHARED, gradient_room=0, disk_share=0.07)
    assert say_place(everywhere) == (
        "state on the host, 30% stepped there, gradients too, 7% of the state on the disk"
    )


def test_the_report_says_where_gradients_wait() -> None:
    assert say_place(dataclasses.replace(AWAY, gradient_room=MIB)) == (
        "state on the host, gradients too beyond 1.00 MiB"
    )
    on_disk = dataclasses.replace(AWAY, gradients_on="disk")
    assert say_place(on_disk) == "state on the host", "none leave"
    assert say_place(dataclasses.replace(on_disk, gradient_room=0)) == (
        "state on the host, gradients on the disk"
    )
    assert say_place(dataclasses.replace(on_disk, gradient_room=MIB, disk_share=0.4)) == (
        "state on the host, gradients on the disk beyond 1.00 MiB, 40% of the state on the disk"
    )
    assert "gradients_on" in settings_shown("optimizer", Choices())


def test_the_report_says_where_weights_wait() -> None:
    assert say_weights_away(OFFLOADED) == "4 of 4 on the host"
    assert say_weights_away(dataclasses.replace(OFFLOADED, weights_away_on="disk")) == (
        "4 of 4 on the disk"
    )


# -- with the planner ------------------------------------------------------------------------------

CARD = find_gpu("rtx-3060")
WEIGHTS = 4 * sum(p.numel() for p in model().parameters())
#: With a budget of so many times the weights, the state has to leave.
TIGHT = 4.6


def job(length: int = 2048, clip: float | None = None) -> Job:
    batch = torch.ones(1, length, WIDTH), torch.ones(1, length, WIDTH)
    return Job(model, nn.MSELoss(), "adamw", batch, clip_norm=clip)


def budget(times_the_weights: float) -> int:
    return device_overhead(CARD).high + int(times_the_weights * WEIGHTS)


@functools.cache
def planned(
    times_the_weights: float,
    host: int | None = None,
    length: int = 2048,
    clip: float | None = None,
) -> Plan:
    return plan(
        job(length, clip),
        gpu=CARD,
        budget=budget(times_the_weights),
        allow="exact",
        compile_blocks=False,
        host=host,
    )


def test_with_no_limit_on_host_memory_nothing_is_on_the_disk() -> None:
    made = planned(TIGHT)
    assert made.choices.optimizer_on == "host"
    assert made.choices.disk_share == made.predicted.disk == 0


def test_state_without_room_in_host_memory_goes_to_the_disk() -> None:
    free = planned(TIGHT)
    host = free.predicted.host - 40 * MIB
    made = planned(TIGHT, host)
    assert made.predicted.host <= host
    assert made.predicted.disk >= 40 * MIB
    assert made.predicted.seconds > free.predicted.seconds
    assert 0 < made.choices.disk_share < 0.5
    (change,) = (one for one in made.changes if one.technique == "optimizer")
    assert f"{made.choices.disk_share:.0%} of the state on the disk" in change.after
    assert change.saves > WEIGHTS
    assert "disk_share" in settings_shown("optimizer", Choices())
    assert Plan.from_dict(json.loads(json.dumps(made.as_dict()))).predicted == made.predicted


def test_such_a_plan_is_what_its_choices_are_rehearsed_to_take() -> None:
    made = planned(TIGHT, planned(TIGHT).predicted.host - 40 * MIB)
    timeline = rehearse(job(), CARD, PHASES, choices=made.choices)
    assert timeline.host_bytes == made.predicted.host
    assert timeline.disk_bytes == made.predicted.disk
    share = made.choices.disk_share
    less = dataclasses.replace(made.choices, disk_share=round(share - 0.01, 2))
    most = planned(TIGHT).predicted.host - 40 * MIB
    assert rehearse(job(), CARD, PHASES, choices=less).host_bytes > most


#: So long that blocks save much, within a budget in which one of their inputs has to leave.
LONG, TIGHT_FOR_LONG = 16384, 12.6
INPUT = LONG * WIDTH * 4


@pytest.fixture
def _few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked_on_disk, "PIECE", 8 * MIB)
    monkeypatch.setattr(parked_on_disk, "BUFFERS", 2)


@pytest.mark.usefixtures("_few_buffers")
def test_so_does_what_blocks_save_where_all_of_the_state_is_not_enough() -> None:
    made = planned(TIGHT_FOR_LONG, INPUT, LONG)
    assert made.choices.offloaded_to == "disk"
    assert made.predicted.host < INPUT < made.predicted.disk
    (change,) = (one for one in made.changes if one.technique == "recompute")
    assert f"what {len(made.choices.offloaded)} of 4 save is on the disk" in change.after
    assert Plan.from_dict(json.loads(json.dumps(made.as_dict()))).choices == made.choices
    timeline = rehearse(job(LONG), CARD, PHASES, choices=made.choices)
    assert timeline.host_bytes == made.predicted.host
    assert timeline.disk_bytes == made.predicted.disk
    all_state = dataclasses.replace(made.choices, offloaded_to="host", disk_share=1.0)
    assert rehearse(job(LONG), CARD, PHASES, choices=all_state).host_bytes > INPUT


@pytest.mark.usefixtures("_few_buffers")
def test_smaller_plans_of_a_run_have_what_blocks_save_on_the_disk_where_they_must() -> None:
    first = planned(TIGHT_FOR_LONG, INPUT, LONG)
    one = make_planner(
        job(LONG), gpu=CARD, budget=first.budget, allow="exact", compile_blocks=False
    )
    smaller = first.budget - 30 * MIB
    assert one.plan_like(first, smaller).choices.offloaded_to == "host"
    one.host = INPUT
    inside = one.plan_like(first, smaller)
    assert inside.choices.offloaded_to == "disk"
    assert inside.choices.fixed_part == first.choices.fixed_part
    assert inside.predicted.host < INPUT
    assert inside.predicted.peak.device <= smaller


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_masters_go_to_the_disk_with_the_state(share: float) -> None:
    def took(choices: Choices) -> tuple[int, int]:
        timeline = rehearse(job(), CARD, PHASES, choices=choices)
        return timeline.host_bytes, timeline.disk_bytes

    own = dataclasses.replace(AWAY, disk_share=share)
    rounded = dataclasses.replace(AWAY, weights="bf16 with fp32 masters", precision="bf16-mixed")
    _, state = took(own)
    host, disk = took(dataclasses.replace(rounded, disk_share=share))
    assert disk * 8 == state * 12
    all_of_it, _ = took(rounded)
    ring = host + disk - all_of_it  # for buckets that come, one that is stepped, one that leaves
    assert 0 < ring <= (rounded.state_ahead + 2) * 3 * bucket_bytes(WEIGHTS // 2)
    assert all_of_it - host > state


def test_weights_go_there_too_where_that_is_not_enough() -> None:
    leaner = 2.6  # the weights of blocks have to leave, too
    made = planned(leaner, 100 * MIB)
    choices = made.choices
    assert (len(choices.weights_away), choices.weights_away_on) == (4, "disk")
    assert made.predicted.host <= 100 * MIB < WEIGHTS
    assert made.predicted.disk > WEIGHTS
    (change,) = (one for one in made.changes if one.technique == "weights of blocks")
    assert change.after == "4 of 4 on the disk"
    assert "weights_away_on" in settings_shown("weights of blocks", Choices())
    assert Plan.from_dict(json.loads(json.dumps(made.as_dict()))).choices == choices
    timeline = rehearse(job(), CARD, PHASES, choices=choices)
    assert timeline.host_bytes == made.predicted.host
    assert timeline.disk_bytes == made.predicted.disk


def test_so_do_gradients_that_wait_for_the_norm_of_all() -> None:
    leaner = 2.6  # the weights of blocks have to leave, and gradients beside them
    host = int(3.3 * WEIGHTS)  # for state, weights, and some of the gradients
    made = planned(leaner, host, clip=1.0)
    choices = made.choices
    assert (choices.gradients_on, choices.disk_share) == ("disk", 0.0)
    assert choices.gradient_room is not None
    assert 3 * WEIGHTS < made.predicted.host <= host
    (change,) = (one for one in made.changes if one.technique == "optimizer")
    assert "gradients on the disk" in change.after
    assert Plan.from_dict(json.loads(json.dumps(made.as_dict()))).choices == choices
    timeline = rehearse(job(clip=1.0), CARD, PHASES, choices=choices)
    assert timeline.host_bytes == made.predicted.host
    assert 0 < timeline.disk_bytes == made.predicted.disk
    in_memory = dataclasses.replace(choices, gradients_on="host")
    assert rehearse(job(clip=1.0), CARD, PHASES, choices=in_memory).host_bytes > host


def test_what_the_planning_machine_has_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = HostLimits(memory=100, memory_limit="a small machine", lockable=None)
    monkeypatch.setattr("oomph.memory.limits.host_limits", lambda *_: tiny)
    paths = ("0", "1", "2", "3")
    choices = dataclasses.replace(AWAY, disk_share=1.0, weights_away=paths, weights_away_on="disk")
    assert rehearse(job(), CARD, PHASES, choices=choices).disk_bytes > 2.9 * WEIGHTS


def test_a_host_too_small_even_so_says_how_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "describe_changes", lambda *_: ())
    with pytest.raises(HostTooSmall, match="of host memory is missing") as refused:
        planned(TIGHT, 1 * MIB)
    enough = planned(TIGHT, 1 * MIB + refused.value.missing)
    assert enough.predicted.host == 1 * MIB + refused.value.missing
    alone = plan(
        job(),
        gpu=CARD,
        budget=refused.value.smallest,
        allow="exact",
        compile_blocks=False,
        host=1 * MIB,
    )
    assert not alone.choices.leaves


def test_the_gpu_alone_is_the_answer_where_the_host_is_too_small_or_the_disk_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "LEAVE_FROM", 1.0)  # both are looked for
    monkeypatch.setattr(planner, "describe_changes", lambda *_: ())
    # A step inside backward would be copied to the host first.
    monkeypatch.setattr(SearchSpace, "_may_step_in_backward", lambda *_: False)
    large, small, too_small = (planned(5.6, host) for host in (None, 150 * MIB, 1 * MIB))
    assert large.choices.leaves
    assert not small.choices.leaves, "some of the state on the disk would be slower"
    assert not too_small.choices.leaves
    seconds = [made.predicted.seconds for made in (large, small, too_small)]
    assert seconds == sorted(seconds)
    assert too_small.predicted.host == 0


def test_smaller_plans_of_a_run_stay_inside_host_memory_too() -> None:
    first = planned(TIGHT, planned(TIGHT).predicted.host - 40 * MIB)
    make = functools.partial(
        make_planner, job(), gpu=CARD, budget=first.budget, allow="exact", compile_blocks=False
    )
    smaller = first.budget - 30 * MIB
    one = make()
    beyond = one.plan_like(first, smaller)
    assert beyond.choices.offloaded, "what blocks save takes host memory, too"
    one.host = beyond.predicted.host - 1
    inside = one.plan_like(first, smaller)
    assert inside.predicted.host <= one.host
    assert inside.choices.disk_share == beyond.choices.disk_share == first.choices.disk_share
    one.host = 1 * MIB
    with pytest.raises(HostTooSmall) as refused:
        one.plan_like(first, smaller)
    assert refused.value.smallest >= first.budget, "no smaller rung is worth a look"


def test_an_attempt_says_that_host_memory_is_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, host: str, **__: object) -> Plan:
        raise HostTooSmall(f"{host} is too little", 3, 7)

    monkeypatch.setattr(attempt, "plan", refuse)
    answer = attempt.try_plan(job(), gpu=CARD, host="1MiB")
    assert isinstance(answer, NoPlan)
    assert answer.reason == "1MiB is too little"
    assert answer.as_dict()["host_missing"] == answer.host_missing == 7
    assert answer.smallest_budget == 3


def test_on_the_cpu_there_is_no_host_beside_the_budget() -> None:
    with pytest.raises(BadInput, match="host memory is the budget"):
        plan(job(), budget="1GiB", host="1GiB")


def test_less_host_memory_is_a_slower_plan_and_no_refusal() -> None:
    """Even where the fastest that was found fails its check, and all that is made of it would."""
    made = [planned(3.0, host, clip=1.0) for host in (None, 300 * MIB, 200 * MIB)]
    assert all(one.choices.leaves for one in made)
    assert made[0].predicted.host > 300 * MIB >= made[1].predicted.host
    assert made[2].predicted.host <= 200 * MIB
    assert made[2].predicted.disk > made[1].predicted.disk > made[0].predicted.disk == 0
    seconds = [one.predicted.seconds for one in made]
    assert seconds == sorted(seconds)
