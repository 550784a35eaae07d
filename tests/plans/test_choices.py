"""Choices survive JSON, and what is no choice is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from switched_on import on

from oomph.errors import BadInput
from oomph.plans.choices import KEEP, RECOMPUTE, Choices, saved_ops, saving

ALL = Choices(
    precision="bf16-mixed",
    micro_batch=4,
    blocks={"a.0": KEEP, "a.1": RECOMPUTE, "a.2": "recompute saving attention#0 product#2"},
    compiled=True,
    compiled_others=("norm",),
    head="head",
    loss_chunk=512,
    optimizer_in_backward=True,
    weights="bf16 with fp32 masters",
    techniques=on(
        "channels_last",
        "low_bit_state",
        "fused_optimizer",
        cast_cache={"dropped": True},
        cuda_allocator={"conf": "expandable_segments:True"},
    ),
)


AWAY = Choices(optimizer_on="host", host_share=0.35, disk_share=0.65)
ON_DISK = Choices(blocks={"a": "recompute, offloaded"}, offloaded_to="disk")
GRADIENTS = Choices(optimizer_on="host", gradient_room=0, gradients_on="disk")


@pytest.mark.parametrize("choices", [Choices(), ALL, AWAY, ON_DISK, GRADIENTS])
def test_choices_come_back_from_json_as_they_were(choices: Choices) -> None:
    assert Choices.from_dict(json.loads(json.dumps(choices.as_dict()))) == choices


def test_the_defaults_leave_a_job_as_it_is() -> None:
    nothing = Choices()
    assert nothing.recomputed == []
    assert (nothing.weights, nothing.precision) == ("own", "fp32")
    assert not (nothing.compiled or nothing.techniques or nothing.optimizer_in_backward)


def test_blocks_that_run_twice_are_those_not_kept() -> None:
    assert ALL.recomputed == ["a.1", "a.2"]


def test_where_state_waits_lasts_as_long_as_a_run() -> None:
    assert AWAY.fixed_part.disk_share == 0.65
    assert AWAY.leaves


def test_where_gradients_wait_lasts_as_long_as_a_run() -> None:
    assert GRADIENTS.fixed_part == GRADIENTS
    assert GRADIENTS.waits_on_disk
    none_leave = dataclasses.replace(GRADIENTS, gradient_room=None)
    assert none_leave.leaves and not none_leave.waits_on_disk


def test_techniques_last_as_long_as_a_run_but_for_those_that_can_be_switched() -> None:
    lasting = on("channels_last", "low_bit_state", "fused_optimizer", cast_cache={"dropped": True})
    assert ALL.fixed_part.techniques == ALL.without_switchable.techniques == lasting
    assert ALL.techniques.keys() - lasting.keys() == {"cuda_allocator"}


def test_what_changes_no_tensor_can_be_left_out() -> None:
    assert ALL.concerning_tensors == dataclasses.replace(ALL, techniques=ALL.fixed_part.techniques)


def test_where_blocks_are_offloaded_to_can_be_switched() -> None:
    assert ON_DISK.leaves
    assert ON_DISK.fixed_part == Choices()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"precision": "fp8"}, "precision is one of"),
        ({"blocks": {"a": "forget"}}, "a can be kept or recomputed, not 'forget'"),
        ({"blocks": {"a": "recompute saving"}}, "a can be kept or recomputed"),
        ({"blocks": {"a": "recompute saving product"}}, "a can be kept or recomputed"),
        ({"head": "head"}, "belongs to a head"),
        ({"loss_chunk": 3}, "belongs to a head"),
        ({"head": "head", "loss_chunk": 0}, "at least one row, not 0"),
        ({"micro_batch": 0}, "at least one sample, not 0"),
        ({"weights": "int8"}, "weights are own or"),
        ({"offloaded_to": "gpu"}, "offloaded to host or disk, not to 'gpu'"),
        ({"gradients_on": "tape"}, "gradients wait on host or disk, not on 'tape'"),
        ({"offloaded_to": "disk", "techniques": on("cuda_graph")}, "cannot wait for the disk"),
        ({"disk_share": 0.5}, "the disk has no share of an optimizer that is on the GPU"),
        ({"gpu_share": 0.5}, "all of an optimizer on the GPU is there"),
        ({"optimizer_on": "host", "gpu_share": 1.01}, "the GPU's share is between 0 and 1"),
        ({"optimizer_on": "host", "disk_share": 1.01}, "between 0 and 1, not 1.01"),
        ({"optimizer_on": "host", "disk_share": -0.1}, "between 0 and 1, not -0.1"),
        ({"optimizer_on": "host", "disk_share": math.nan}, "between 0 and 1, not nan"),
        (
            {"optimizer_on": "host", "host_share": 0.5, "disk_share": 0.6},
            "50% of all there, 60% on the disk and 0% on the GPU are more",
        ),
    ],
)
def test_what_is_no_choice_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Choices(**wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compiled", "yes"),
        ("micro_batch", True),
        ("micro_batch", 2.5),
        ("blocks", ["a"]),
        ("compiled_others", "norm"),
        ("techniques", None),
        ("offloaded_to", None),
        ("gradients_on", None),
        ("disk_share", "half"),
        ("disk_share", True),
    ],
)
def test_a_value_of_another_kind_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"the plan's {name} cannot be"):
        Choices.from_dict({**ALL.as_dict(), name: value})


def test_unknown_choices_are_named() -> None:
    with pytest.raises(BadInput, match="'magic' is no choice"):
        Choices.from_dict({**ALL.as_dict(), "magic": True})


def test_what_is_not_chosen_is_off() -> None:
    assert Choices.from_dict({}) == Choices()
    without = {name: value for name, value in ALL.as_dict().items() if name != "compiled"}
    assert Choices.from_dict(without) == dataclasses.replace(ALL, compiled=False)


@pytest.mark.parametrize("ops", [(), ("product#0",), ("attention#0", "product#12")])
def test_what_a_block_saves_is_in_its_name(ops: tuple[str, ...]) -> None:
    how = saving(ops)
    assert saved_ops(how) == set(ops)
    assert Choices(blocks={"a": how}).recomputed == ["a"]


def test_keeping_and_recomputing_all_save_no_ops() -> None:
    assert saved_ops(KEEP) == saved_ops(RECOMPUTE) == frozenset()
