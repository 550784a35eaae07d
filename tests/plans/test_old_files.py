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
from oomph.plans.migrations import SCHEMA_VERSION, migrate_choices, migrate_plan
from oomph.plans.plan import Plan
from oomph.runs.loading import Stored, load_checkpoint
from oomph.runs.run import apply

FIXTURES = Path(__file__).parents[1] / "fixtures"
BLOCKS = {"blocks.0": "keep", "blocks.1": "recompute"}
MADE = Choices(techniques=on("fused_optimizer"))
NO_CACHE = Choices(
    micro_batch=2,
    head="head",
    loss_chunk=16,
    techniques=on("fused_optimizer", generation_cache={"dropped": True}),
)
ON_THE_HOST = Choices(
    optimizer_on="host",
    host_share=0.25,
    gradient_room=0,
    blocks=BLOCKS,
    weights="bf16 with fp32 masters",
    precision="bf16-mixed",
    techniques=on("fused_optimizer"),
)
#: By the version it was written in, and its name: what a plan chose.
PLANS: dict[tuple[int, str], Choices] = {
    (1, "untouched"): Choices(),
    (1, "made"): MADE,
    (1, "channels_last"): Choices(
        precision="bf16-mixed",
        blocks=BLOCKS,
        techniques=on("channels_last", "attention_rows"),
    ),
    (1, "lossy"): Choices(
        precision="bf16-mixed",
        compiled=True,
        blocks=BLOCKS,
        techniques=on(
            "fp8_products", "low_bit_state", cuda_allocator={"conf": "expandable_segments:True"}
        ),
    ),
    (1, "no_cache"): NO_CACHE,
    (1, "on_the_host"): ON_THE_HOST,
    (2, "untouched"): Choices(),
    (2, "made"): MADE,
    (2, "captured"): Choices(
        precision="bf16-mixed",
        micro_batch=2,
        blocks=BLOCKS,
        techniques=on(
            "channels_last", "fused_optimizer", "cuda_graph", cast_cache={"dropped": True}
        ),
    ),
    (2, "compiled"): Choices(
        precision="bf16-mixed",
        compiled=True,
        compiled_others=("mix",),
        blocks=BLOCKS,
        techniques=on(
            "fp8_products", "low_bit_state", cuda_allocator={"conf": "expandable_segments:True"}
        ),
    ),
    (2, "no_cache"): NO_CACHE,
    (2, "on_the_host"): ON_THE_HOST,
}
#: The choices of the run that each version's checkpoint is of.
CHECKPOINTS = {
    1: Choices(blocks=BLOCKS, micro_batch=2, techniques=on("channels_last", "fused_optimizer")),
    2: Choices(
        blocks=BLOCKS,
        micro_batch=2,
        head="head",
        loss_chunk=16,
        techniques=on("channels_last", "fused_optimizer"),
    ),
}
REPORTS = [path for path in sorted(FIXTURES.glob("*/*.json")) if path.stem != "next_losses"]


def path_of(version: int, name: str) -> Path:
    return FIXTURES / f"version_{version}" / f"plan_{name}.json"


def old(version: int, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path_of(version, name).read_text())
    return values


def test_every_plan_there_is_has_its_meaning_here() -> None:
    assert set(FIXTURES.glob("*/plan_*.json")) == {path_of(*key) for key in PLANS}


@pytest.mark.parametrize(("version", "name"), PLANS)
def test_a_plan_of_today_is_not_migrated(version: int, name: str) -> None:
    today = json.loads(json.dumps(Plan.load(path_of(version, name)).as_dict()))
    assert migrate_plan(today) == today


def test_a_field_that_an_old_plan_does_not_name_is_off() -> None:
    values = old(1, "channels_last")
    del values["choices"]["attention_rows"], values["choices"]["state_early"]
    assert Plan.from_dict(values).choices == dataclasses.replace(
        PLANS[1, "channels_last"], techniques=on("channels_last")
    )


def test_an_old_plan_that_was_edited_is_refused_in_words() -> None:
    values = old(1, "channels_last")
    values["choices"]["channels_last"] = "yes"
    with pytest.raises(BadInput, match=r"settings of channels_last .* cannot be 'yes'"):
        Plan.from_dict(values)
    values["choices"] = ["channels_last"]
    with pytest.raises(BadInput, match="changed into something else"):
        Plan.from_dict(values)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -1, None, "1", 1.0, True])
def test_a_plan_of_no_version_of_ours_is_refused_by_name(version: Any) -> None:
    with pytest.raises(StalePlan, match=f"the plan has schema {version!r}, and this oomph reads"):
        Plan.from_dict({**old(1, "untouched"), "schema_version": version})


def test_fields_of_version_1_are_no_fields_of_the_next() -> None:
    choices = old(1, "channels_last")["choices"]
    with pytest.raises(BadInput, match="'allocator' is no choice of a plan"):
        Choices.from_dict(choices)
    assert Choices.from_dict(migrate_choices(choices, 1)) == PLANS[1, "channels_last"]


@pytest.mark.parametrize("version", CHECKPOINTS)
def test_a_checkpoint_goes_on_as_the_saved_run_did(version: int) -> None:
    folder = FIXTURES / f"version_{version}"
    saved = Stored(folder / "checkpoint").plan()
    assert saved.choices == CHECKPOINTS[version]
    model = build()
    optimizer = make_optimizer(model)
    # It was made with another PyTorch, perhaps.
    made_for = describe_job("net", model, make_batch(0), optimizer, None)
    plan = dataclasses.replace(saved, made_for=made_for)
    run = apply(plan, Job(model, loss_of, optimizer, make_batch(0)), device="cpu")
    resumed = run.load(folder / "checkpoint")
    assert (resumed.step, resumed.extra) == (2, {"epoch": 1})
    assert not [note for note in resumed.notes if "plan" in note]
    losses = [float(run.step(make_batch(seed))) for seed in (2, 3)]
    assert losses == pytest.approx(json.loads((folder / "next_losses.json").read_text()), rel=1e-5)


@pytest.mark.parametrize("version", CHECKPOINTS)
def test_plain_pytorch_reads_an_old_checkpoint(version: int) -> None:
    stored = load_checkpoint(FIXTURES / f"version_{version}" / "checkpoint")
    build().load_state_dict(stored.model_state)
    assert Plan.from_dict(stored.plan).choices.blocks == BLOCKS


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_report_is_explained(path: Path) -> None:
    found = explain(path)
    assert found.headline
    assert str(found)
