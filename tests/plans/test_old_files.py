"""Files of earlier versions load, and mean what they meant (rule 11)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from old_jobs import build, loss_of, make_batch, make_optimizer
from switched_on import on

from oomph.errors import BadInput, StalePlan
from oomph.explaining.explanation import explain
from oomph.jobs.description import describe_job
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.migrations import SCHEMA_VERSION, choices_from_1, migrate_plan
from oomph.plans.plan import Plan
from oomph.runs.loading import Stored, load_checkpoint
from oomph.runs.run import apply

OLD = Path(__file__).parents[1] / "fixtures" / "version_1"
BLOCKS = {"blocks.0": "keep", "blocks.1": "recompute"}
#: What each of the plans chose when it was written.
PLANS: dict[str, Choices] = {
    "untouched": Choices(),
    "made": Choices(fused_optimizer=True),
    "channels_last": Choices(
        precision="bf16-mixed",
        blocks=BLOCKS,
        techniques=on("channels_last", "attention_rows"),
    ),
    "lossy": Choices(
        precision="bf16-mixed",
        compiled=True,
        techniques=on("fp8_products", "low_bit_state"),
        blocks=BLOCKS,
        allocator="expandable_segments:True",
    ),
    "no_cache": Choices(
        generation_cache=False, fused_optimizer=True, micro_batch=2, head="head", loss_chunk=16
    ),
    "on_the_host": Choices(
        optimizer_on="host",
        host_share=0.25,
        gradient_room=0,
        fused_optimizer=True,
        blocks=BLOCKS,
        weights="bf16 with fp32 masters",
        precision="bf16-mixed",
    ),
}
REPORTS = ("estimate", "train", "watch", *(f"plan_{name}" for name in PLANS))


def old(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((OLD / f"{name}.json").read_text())
    return values


def test_every_plan_there_is_has_its_meaning_here() -> None:
    assert {path.stem.removeprefix("plan_") for path in OLD.glob("plan_*.json")} == PLANS.keys()


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_loads_and_means_what_it_meant(name: str, tmp_path: Path) -> None:
    assert old(f"plan_{name}")["schema_version"] == 1
    plan = Plan.load(OLD / f"plan_{name}.json")
    assert plan.choices == PLANS[name]
    assert str(plan.budget) in (OLD / f"plan_{name}.json").read_text()
    plan.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["schema_version"] == SCHEMA_VERSION
    assert Plan.load(tmp_path / "again.json") == plan
    assert str(plan)  # it prints, too


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_today_is_not_migrated(name: str) -> None:
    today = json.loads(json.dumps(Plan.load(OLD / f"plan_{name}.json").as_dict()))
    assert migrate_plan(today) == today


def test_a_field_that_an_old_plan_does_not_name_is_off() -> None:
    values = old("plan_channels_last")
    del values["choices"]["attention_rows"], values["choices"]["state_early"]
    assert Plan.from_dict(values).choices == dataclasses.replace(
        PLANS["channels_last"], techniques=on("channels_last")
    )


def test_an_old_plan_that_was_edited_is_refused_in_words() -> None:
    values = old("plan_channels_last")
    values["choices"]["channels_last"] = "yes"
    with pytest.raises(BadInput, match=r"settings of channels_last .* cannot be 'yes'"):
        Plan.from_dict(values)
    values["choices"] = ["channels_last"]
    with pytest.raises(BadInput, match="changed into something else"):
        Plan.from_dict(values)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -1, None, "1", 1.0, True])
def test_a_plan_of_no_version_of_ours_is_refused_by_name(version: Any) -> None:
    with pytest.raises(StalePlan, match=f"the plan has schema {version!r}, and this oomph reads"):
        Plan.from_dict({**old("plan_untouched"), "schema_version": version})


def test_fields_of_version_1_are_no_fields_of_the_next() -> None:
    choices = old("plan_channels_last")["choices"]
    with pytest.raises(BadInput, match="'attention_rows' is no choice of a plan"):
        Choices.from_dict(choices)
    assert Choices.from_dict(choices_from_1(choices)) == PLANS["channels_last"]


def test_a_checkpoint_goes_on_as_the_saved_run_did() -> None:
    saved = Stored(OLD / "checkpoint").plan()
    assert saved.choices == Choices(
        blocks=BLOCKS, micro_batch=2, fused_optimizer=True, techniques=on("channels_last")
    )
    model = build()
    optimizer = make_optimizer(model)
    # It was made with another PyTorch, perhaps.
    made_for = describe_job("net", model, make_batch(0), optimizer, None)
    plan = dataclasses.replace(saved, made_for=made_for)
    run = apply(plan, Job(model, loss_of, optimizer, make_batch(0)), device="cpu")
    resumed = run.load(OLD / "checkpoint")
    assert (resumed.step, resumed.extra) == (2, {"epoch": 1})
    assert not [note for note in resumed.notes if "plan" in note]
    losses = [float(run.step(make_batch(seed))) for seed in (2, 3)]
    assert losses == pytest.approx(json.loads((OLD / "next_losses.json").read_text()), rel=1e-5)


def test_plain_pytorch_reads_an_old_checkpoint() -> None:
    stored = load_checkpoint(OLD / "checkpoint")
    build().load_state_dict(stored.model_state)
    assert Plan.from_dict(stored.plan).choices.blocks == BLOCKS


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_explained(name: str) -> None:
    found = explain(OLD / f"{name}.json")
    assert found.headline
    assert str(found)
