"""A technique is one file: one that is registered from outside is planned, priced, applied, undone,
saved, loaded, printed and exported, and nothing else knows its name."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from old_jobs import build, loss_of, make_batch, make_optimizer
from small_plans import plan_with
from switched_on import on
from torch import nn
from transformers import TrainingArguments

import oomph
from oomph.engine.applying import Applied, apply_choices
from oomph.engine.step import train_step
from oomph.errors import BadInput, CannotRehearse, DoesNotFit, StalePlan
from oomph.hardware.timing.clock import Clock
from oomph.integrations.framework_plan import plan_for_framework
from oomph.integrations.transformers import arguments_diff
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.plans.techniques import (
    Settings,
    all_techniques,
    read_settings,
    register,
    technique_named,
    unregister,
)
from oomph.search.changes import to_be_priced
from oomph.search.checker import Checker
from oomph.search.survey import Survey, survey
from oomph.splitting import prove_split
from oomph.techniques.technique import SearchContext, Technique, Undo, techniques

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_technique.py"
SOURCE = ROOT / "src" / "oomph"
NAME = "saved_in_half"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that somebody wrote outside of oomph, which registers a technique."""
    path = tmp_path / "somebodys_module.py"
    path.write_text(EXAMPLE.read_text())
    spec = importlib.util.spec_from_file_location("somebodys_module", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "somebodys_module", module)
    spec.loader.exec_module(module)
    yield module
    unregister(NAME)


class Block(nn.Module):
    """A block whose products take far longer than to convert what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def blocks_job(**options: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    batch = (torch.ones(2048, 512), torch.ones(2048, 512))
    return Job(model, nn.MSELoss(), "sgd", batch, whole_batch=True, **options)


def halved(module: Any, **settings: Any) -> dict[str, Settings]:
    return {NAME: module.SavedInHalfSettings(dtype="bf16", **settings)}


# -- planned ---------------------------------------------------------------------------------------


def test_a_job_that_fits_only_with_it_is_planned_with_it(example: Any) -> None:
    made = oomph.plan(example.make_job(), budget="44MiB")
    assert made.choices.techniques[NAME] == halved(example)[NAME]
    assert made.predicted.peak.device <= made.budget
    (change,) = (one for one in made.changes if one.technique == "saved tensors")
    assert (change.before, change.after) == ("as they are", "in bf16")
    assert change.saves > 8 << 20
    assert 0 < change.costs < made.predicted.seconds / 4
    assert change.fidelity is made.fidelity is Fidelity.ROUNDING
    assert "saved tensors in bf16" in made.summary
    unregister(NAME)
    with pytest.raises(DoesNotFit):
        oomph.plan(example.make_job(), budget="44MiB")


def test_a_job_that_is_faster_with_it_is_planned_with_it(example: Any) -> None:
    """What it leaves goes to blocks that then need not be recomputed."""
    made = oomph.plan(blocks_job(), budget="90MiB")
    unregister(NAME)
    without = oomph.plan(blocks_job(), budget="90MiB")
    assert made.choices.techniques[NAME] == halved(example)[NAME]
    assert made.predicted.seconds < without.predicted.seconds
    assert len(made.choices.recomputed) < len(without.choices.recomputed)


def test_a_job_that_needs_nothing_of_it_is_planned_as_ever(example: Any) -> None:
    made = oomph.plan(blocks_job(), budget="1GiB")
    assert NAME not in made.choices.techniques
    assert made.fidelity is Fidelity.EXACT


def test_whoever_wants_exact_numbers_is_not_given_it(example: Any) -> None:
    with pytest.raises(DoesNotFit):
        oomph.plan(example.make_job(), budget="44MiB", allow="exact")


def test_it_costs_a_few_rehearsals_and_none_where_it_does_not_apply(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[Choices] = []
    check = Checker.check

    def counted(self: Checker, candidate: Any) -> Any:
        checks.append(candidate.choices)
        return check(self, candidate)

    monkeypatch.setattr(Checker, "check", counted)
    oomph.plan(blocks_job(), budget="90MiB")
    assert 0 < sum(NAME in choices.techniques for choices in checks) <= 3
    checks.clear()
    oomph.plan(blocks_job(precision="bf16-mixed"), budget="80MiB")
    assert checks and not any(NAME in choices.techniques for choices in checks)


# -- applied ---------------------------------------------------------------------------------------


def trained(choices: Choices) -> tuple[list[float], nn.Module]:
    model = build()
    optimizer = make_optimizer(model)
    job = Job(model, loss_of, optimizer, make_batch(0))
    stage, undo = apply_choices(choices, job, model, optimizer, device_type="cpu")
    assert ("forward" in vars(model)) is bool(choices.techniques)
    losses = [float(train_step(stage, make_batch(seed))) for seed in range(3)]
    undo()
    assert "forward" not in vars(model)
    return losses, model


def test_it_is_applied_and_taken_back(example: Any) -> None:
    plain, model = trained(Choices())
    losses, halved_model = trained(Choices(techniques=halved(example, at_least=1)))
    assert losses == pytest.approx(plain, rel=1e-2)
    assert losses != plain
    for one, other in zip(model.parameters(), halved_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=1e-2)
    # Nothing here is as large as that.
    assert trained(Choices(techniques=halved(example, at_least=1 << 20)))[0] == plain


def test_an_apply_that_fails_after_it_leaves_the_model_as_it_was(example: Any) -> None:
    model = build()
    optimizer = make_optimizer(model)
    job = Job(model, loss_of, optimizer, make_batch(0))
    choices = Choices(techniques=halved(example), blocks={"no.such.block": "recompute"})
    with pytest.raises(BadInput, match=r"no\.such\.block"):
        apply_choices(choices, job, model, optimizer, device_type="cpu")
    assert "forward" not in vars(model)


def test_a_run_trains_under_it_and_goes_on_from_a_checkpoint(example: Any, tmp_path: Path) -> None:
    model = build()
    optimizer = make_optimizer(model)
    job = Job(model, loss_of, optimizer, make_batch(0))
    choices = Choices(techniques=halved(example, at_least=1))
    run = oomph.apply(plan_with(choices, model, optimizer, make_batch(0)), job, device="cpu")
    run.step(make_batch(0))
    run.save(tmp_path)
    expected = float(run.step(make_batch(1)))
    model = build()
    job = Job(model, loss_of, make_optimizer(model), make_batch(0))
    again = oomph.resume(tmp_path, job, device="cpu")
    assert again.plan.choices == choices
    assert float(again.step(make_batch(1))) == expected


# -- saved, loaded, printed, exported --------------------------------------------------------------


@pytest.fixture
def plan(example: Any) -> Plan:
    return oomph.plan(example.make_job(), budget="44MiB")


def test_a_plan_with_it_is_saved_and_loaded(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    stored = json.loads(path.read_text())
    assert stored["choices"]["techniques"][NAME] == {"dtype": "bf16", "at_least": 1024}
    assert Plan.load(path) == plan
    # What a file does not name has its default.
    del stored["choices"]["techniques"][NAME]["at_least"]
    path.write_text(json.dumps(stored))
    assert Plan.load(path) == plan


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "fp8"}, r"settings of saved_in_half .* dtype cannot be 'fp8': own or bf16"),
        ({"dtype": "bf16", "at_least": "many"}, "at_least cannot be 'many': a whole number"),
        ({"dtype": "bf16", "at_least": 0}, "a tensor has at least one number, not 0"),
        ({"volume": 11}, "has 'volume', which is unknown"),
        ("bf16", "cannot be 'bf16': an object belongs there"),
    ],
)
def test_settings_that_make_no_sense_are_refused(plan: Plan, settings: Any, words: str) -> None:
    stored = copy.deepcopy(plan.as_dict())
    stored["choices"]["techniques"][NAME] = settings
    with pytest.raises(BadInput, match=words):
        Plan.from_dict(stored)


def test_a_plan_with_a_technique_that_is_not_there_is_refused_by_name(plan: Plan) -> None:
    unregister(NAME)
    with pytest.raises(StalePlan, match="uses the technique 'saved_in_half', which this oomph"):
        Plan.from_dict(plan.as_dict())


def test_a_plan_with_it_is_printed_and_paged(plan: Plan, tmp_path: Path) -> None:
    assert re.search(r"saved tensors +as they are → in", str(plan))
    plan.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "saved_in_half.dtype = &quot;bf16&quot;" in page


def test_a_loop_that_is_not_ours_is_planned_with_it_if_it_may(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned() -> Plan:
        job = example.make_job()
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
        job = dataclasses.replace(job, optimizer=optimizer)
        return plan_for_framework(job, device=torch.device("cpu"), budget="44MiB", allow="rounding")

    assert planned().choices.techniques[NAME] == halved(example)[NAME]
    monkeypatch.setattr(example.SavedInHalf, "runs_in_foreign_loops", False)
    with pytest.raises(DoesNotFit):
        planned()


def test_a_trainer_that_has_no_argument_for_it_is_told(
    plan: Plan, example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert "saved tensors in bf16" in arguments_diff(plan, arguments).left_out
    monkeypatch.setattr(
        example.SavedInHalf, "training_arguments", lambda *_: {"torch_empty_cache_steps": 4}
    )
    diff = arguments_diff(plan, arguments)
    assert diff.changes["torch_empty_cache_steps"] == (None, 4)
    assert "saved tensors in bf16" not in diff.left_out


# -- the registry ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSettings(Settings):
    """Nothing to set but this."""

    enabled: bool = False
    """Whether it is on."""


class Nothing(Technique[NoSettings]):
    """A technique that does nothing."""

    name = "nothing"
    title = "nothing"
    settings = NoSettings

    def say(self, settings: NoSettings) -> str:
        return "no"

    def fidelity(self, settings: NoSettings, precision: str) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, settings: NoSettings, context: Any) -> Any:
        raise NotImplementedError


def test_techniques_come_in_the_order_of_their_names(example: Any) -> None:
    names = [one.name for one in all_techniques()]
    assert names == sorted(names)
    assert {NAME, "channels_last", "attention_rows"} <= set(names)
    both = Choices(techniques={**on("channels_last"), **on("attention_rows")})
    assert list(both.techniques) == ["attention_rows", "channels_last"]


def test_a_name_is_taken_once() -> None:
    class Again(Nothing):
        name = "channels_last"

    class Spaced(Nothing):
        name = "channels last"

    with pytest.raises(BadInput, match="there is a technique 'channels_last' already"):
        register(Again)
    with pytest.raises(BadInput, match="'channels last' names no technique"):
        register(Spaced)
    assert type(technique_named("channels_last")).__name__ == "ChannelsLast"


def test_a_module_that_is_loaded_again_replaces_its_technique() -> None:
    try:
        register(Nothing)
        register(Nothing)
        assert isinstance(technique_named("nothing"), Nothing)
    finally:
        unregister("nothing")
    unregister("nothing")  # which is not there any more


def test_settings_that_are_off_are_as_if_they_were_not_named() -> None:
    off = Choices(techniques={"channels_last": read_settings("channels_last", {})})
    assert off == Choices()
    assert off.as_dict() == Choices().as_dict()
    assert not off.settings(technique_named("channels_last")).enabled
    settings = on("channels_last")["channels_last"]
    assert Choices().using("channels_last", settings).techniques == on("channels_last")


def test_settings_of_another_technique_are_refused() -> None:
    with pytest.raises(BadInput, match="the settings of channels_last are ChannelsLastSettings"):
        Choices(techniques={"channels_last": on("attention_rows")["attention_rows"]})


def test_what_belongs_with_a_technique_is_priced_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Choices(blocks={"a": KEEP})
    after = dataclasses.replace(before, compiled=True, techniques=on("channels_last"))
    channels = type(technique_named("channels_last"))
    monkeypatch.setattr(channels, "belongs_with", ("compiled",))
    assert before in to_be_priced(before, after)
    monkeypatch.setattr(channels, "belongs_with", ())
    assert before not in to_be_priced(before, after)


class Counted(Nothing):
    """Counts how often it is applied, and taken back."""

    applied = taken_back = 0

    def options(self, context: SearchContext) -> list[NoSettings]:
        return [NoSettings(enabled=True)]

    def apply(self, settings: NoSettings, context: Any) -> Undo:
        type(self).applied += 1

        def undo() -> None:
            type(self).taken_back += 1

        return undo


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counted]]:
    for name in ("applied", "taken_back"):
        monkeypatch.setattr(Counted, name, 0)
    register(Counted)
    yield Counted
    unregister("nothing")


@pytest.mark.parametrize("rests_on_all", [False, True])
def test_one_that_can_be_switched_comes_and_goes_while_a_run_goes_on(
    counted: type[Counted], rests_on_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    optimizer = make_optimizer(model)
    job = Job(model, loss_of, optimizer, make_batch(0))
    applied = Applied(Choices(), job, model, optimizer, device_type="cpu")
    with_it = Choices(techniques=on("nothing"))
    with pytest.raises(BadInput, match="cannot be switched while a run goes on"):
        applied.switch(with_it)
    monkeypatch.setattr(counted, "can_be_switched", True)
    monkeypatch.setattr(counted, "rests_on_all", rests_on_all)
    applied.switch(with_it)
    assert (counted.applied, counted.taken_back) == (1, 0)
    applied.switch(dataclasses.replace(with_it, micro_batch=2))
    assert (counted.applied, counted.taken_back) == ((2, 1) if rests_on_all else (1, 0))
    applied.switch(Choices())
    assert counted.taken_back == counted.applied
    applied.undo()


def test_one_that_changes_no_tensor_is_priced_without_a_rehearsal(
    counted: type[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    after = Choices(techniques=on("nothing"))
    assert to_be_priced(Choices(), after) == [Choices()]
    monkeypatch.setattr(counted, "concerns_tensors", False)
    assert to_be_priced(Choices(), after) == []
    assert after.concerning_tensors == Choices()


def test_one_that_alters_the_forward_is_there_when_the_model_is_looked_at(
    counted: type[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> Survey:
        return survey(blocks_job(), None, Clock.of(None), lambda *_: None)

    look()
    assert counted.applied == 0
    monkeypatch.setattr(counted, "alters_forward", True)
    assert "nothing" not in look().unsuited
    assert counted.applied == 1
    prove_split(blocks_job(), None, choices=Choices(techniques=on("nothing")))
    assert counted.applied > 1

    def refuse(*_: Any) -> Undo:
        raise CannotRehearse("the loss wants it")

    monkeypatch.setattr(counted, "apply", refuse)
    assert look().unsuited["nothing"] == "the loss wants it"


@pytest.mark.parametrize("technique", techniques(), ids=lambda one: one.name)
def test_every_technique_says_all_there_is_to_know(technique: Technique[Any]) -> None:
    off = technique.settings()
    assert off.are_off
    assert read_settings(technique.name, json.loads(json.dumps(off.as_dict()))) == off
    assert technique.title and technique.say(off)
    source = Path(sys.modules[type(technique).__module__].__file__ or "").read_text()
    for field in dataclasses.fields(technique.settings):
        assert re.search(rf'^    {field.name}: .*\n    """', source, re.MULTILINE), field.name
    on_the_cpu = SearchContext(gpu=None, choices=Choices())
    assert isinstance(technique.why_not(on_the_cpu), str)
    for option in technique.options(on_the_cpu):
        assert not option.are_off
        assert technique.say(option) != technique.say(off)
        assert technique.elsewhere(option)
        assert technique.fidelity(option, "fp32") in Fidelity


@pytest.mark.parametrize("technique", techniques(), ids=lambda one: one.name)
def test_nothing_outside_its_file_names_a_technique(technique: Technique[Any]) -> None:
    """But for the migration of old plans, where it was a field."""
    home = type(technique).__module__
    kinds = rf"\b{type(technique).__name__}\b|\b{technique.settings.__name__}\b"
    named = re.compile(rf"{kinds}|[\"']{technique.name}[\"']|choices\.{technique.name}\b")
    own = {SOURCE.joinpath(*home.split(".")[1:]).with_suffix(".py"), SOURCE / "plans/migrations.py"}
    others = [path for path in SOURCE.rglob("*.py") if path not in own]
    assert len(others) > 100
    assert [str(path) for path in others if named.search(path.read_text())] == []
