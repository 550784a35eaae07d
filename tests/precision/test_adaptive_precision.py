"""A run whose precision adapts: sensitive layers stay high, bad steps are taken back, what is saved
goes on to the bit, and without it nothing is different."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import WIDTH, Batch, Block, Net, batches, start
from switched_on import on
from torch import Tensor, nn

import oomph
from oomph.errors import BadInput, UnknownName, WrongCheckpoint
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.precision.controller import AdaptivePrecision, PrecisionController
from oomph.precision.probe import Probe
from oomph.precision.report import predict_step
from oomph.runs.run import Run
from oomph.techniques.forward_call import Repeated
from oomph.techniques.number_formats import Level

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
NEVER = 10**9


class Sensitive(Block):
    """Multiplies numbers far from zero and takes their common part away again: bf16 keeps nothing
    of what is left."""

    def forward(self, x: Tensor) -> Tensor:
        far = torch.full_like(x, 1000.0)
        return x + self.down((self.up(x + far) - self.up(far)).tanh())


class Fragile(Block):
    """Not finite in bf16 once it is broken: in its output, or in its gradient alone."""

    broken = ""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if torch.is_autocast_enabled("cpu"):
            if self.broken == "output":
                out = out * math.inf
            if self.broken == "gradient" and out.requires_grad:
                out.register_hook(lambda gradient: gradient * math.nan)
        return out


def net(block: type[Block] = Block, **options: Any) -> Net:
    model = Net(**options)
    if block is not Block:
        model.blocks[1] = block()
    return model


def adapting(**options: Any) -> AdaptivePrecision:
    return AdaptivePrecision(**{"every": 1, "patience": 2, "layers": BLOCKS, **options})


def lower(precision: PrecisionController, *paths: str, place: int = 1) -> None:
    """Put layers there as if they had gone down."""
    state = precision.state_dict()
    for path in paths:
        state["policy"]["layers"][path]["place"] = place
    precision.load_state_dict(state)


def weights(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def train(run: Run, some: list[Batch]) -> list[float]:
    return [float(run.step(batch)) for batch in some]


# -- what moves ------------------------------------------------------------------------------------


def test_without_it_or_before_anything_moved_a_run_is_the_same_to_the_bit() -> None:
    plain, adapted = start(net()), start(net())
    assert plain.precision is None
    adapted.adapt_precision(adapting(every=NEVER))
    assert train(plain, batches(4)) == train(adapted, batches(4))
    assert same(weights(plain), weights(adapted))


def test_probes_alone_change_no_number() -> None:
    plain, probed = start(net(dropout=0.2)), start(net(dropout=0.2))
    probed.adapt_precision(adapting(patience=NEVER))
    torch.manual_seed(5)
    losses = train(plain, batches(4))
    torch.manual_seed(5)
    assert train(probed, batches(4)) == losses
    assert probed.precision is not None
    assert probed.precision.report().spent.probes == 3


def test_a_sensitive_layer_stays_high_while_the_others_go_down() -> None:
    run = start(net(Sensitive))
    precision = run.adapt_precision(adapting(wait=64))
    train(run, batches(20))
    assert precision.levels == {
        "blocks.0": Level.BF16,
        "blocks.1": Level.FP32,
        "blocks.2": Level.BF16,
        "head": Level.BF16,
    }
    assert [event.layer for event in precision.events].count("blocks.1") == 0


def test_a_sensitive_layer_that_is_low_goes_up_and_no_other() -> None:
    run = start(net(Sensitive))
    precision = run.adapt_precision(adapting(patience=NEVER))
    lower(precision, *BLOCKS, "head")
    train(run, batches(3))
    (event,) = precision.events
    assert (event.step, event.layer, event.before, event.after) == (1, "blocks.1", "bf16", "fp32")
    assert "divergence" in event.why
    assert "after step 1, blocks.1: bf16 → fp32" in str(event)


def test_levels_below_bf16_are_reached_one_by_one() -> None:
    run = start(net())
    how = adapting(ladder=("fp32", "tf32", "bf16", "fp8"), demote_below=0.3, promote_above=0.5)
    precision = run.adapt_precision(how)
    train(run, batches(40))
    # FP8 has no kernel for the head's eight rows.
    assert set(precision.levels.values()) == {Level.FP8, Level.BF16}
    down = [event.after for event in precision.events if event.layer == "blocks.0"]
    assert down == ["tf32", "bf16", "fp8"]


def test_a_job_in_bf16_begins_there_and_goes_up() -> None:
    run = start(net(Sensitive), precision="bf16-mixed")
    precision = run.adapt_precision(adapting())
    assert set(precision.levels.values()) == {Level.BF16}
    train(run, batches(3))
    assert precision.levels["blocks.1"] is Level.FP32


def test_fp16_goes_up_where_it_diverges_and_its_scaler_keeps_its_own_business() -> None:
    run = start(net(Sensitive), precision="fp16-mixed")
    precision = run.adapt_precision(adapting(demote_below=0.01, promote_above=0.02))
    assert run._stage.scaler is not None
    losses = train(run, batches(16))
    assert all(map(math.isfinite, losses))
    assert precision.levels["blocks.1"] is Level.FP32
    assert precision.levels["blocks.2"] is Level.FP16
    # Gradients overflowed at the first scales: the scaler skipped those steps by itself.
    assert run._stage.scaler.get_scale() < 2.0**16
    assert precision.report().spent.taken_back == 0


def test_a_probe_at_too_large_a_scale_moves_nothing() -> None:
    run = start(net(Sensitive), precision="fp16-mixed")
    precision = run.adapt_precision(adapting(demote_below=0.01, promote_above=0.02))
    train(run, batches(1))
    assert run._stage.scaler is not None
    run._stage.scaler.update(2.0**40)
    precision.before_step(1, lambda: batches(1)[0])
    assert precision.events == []


def test_evaluation_is_at_the_levels_of_the_run() -> None:
    run, other = start(net()), start(net())
    lower(run.adapt_precision(adapting()), *BLOCKS)
    assert run.evaluate(batches(1)).loss != other.evaluate(batches(1)).loss


# -- steps that are not finite ---------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["output", "gradient"])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"micro_batch": 8},
        {"optimizer_in_backward": True},
        {"blocks": dict.fromkeys(BLOCKS, "recompute")},
        {"blocks": dict.fromkeys(BLOCKS, "keep, offloaded")},
    ],
    ids=["plain", "micro-batches", "optimizer in backward", "recomputed", "offloaded"],
)
def test_a_bad_step_is_taken_back_and_its_layer_goes_up(
    broken: str, choices: dict[str, Any]
) -> None:
    data = batches(6)
    run = start(net(Fragile, dropout=0.1), **choices)
    precision = run.adapt_precision(adapting(every=NEVER))
    lower(precision, *BLOCKS, "head")
    torch.manual_seed(3)
    train(run, data[:2])
    run.model.blocks[1].broken = broken
    losses = train(run, data[2:])

    other = start(net(Fragile, dropout=0.1), **choices)
    expected = other.adapt_precision(adapting(every=NEVER))
    lower(expected, *BLOCKS, "head")
    torch.manual_seed(3)
    train(other, data[:2])
    lower(expected, "blocks.1", place=0)
    assert losses == train(other, data[2:])
    assert same(weights(run), weights(other))
    (event,) = precision.events
    assert (event.step, event.layer, event.after) == (2, "blocks.1", "fp32")
    assert "not finite" in event.why or "loss is" in event.why
    assert precision.report().spent.taken_back == 1


def test_a_batch_that_is_not_finite_in_fp32_is_refused_and_nothing_moves() -> None:
    run = start(net())
    precision = run.adapt_precision(adapting(every=NEVER))
    lower(precision, *BLOCKS)
    x, y = batches(1)[0]
    before, levels = weights(run), precision.levels
    with pytest.raises(BadInput, match="not for want of precision"):
        run.step((x * math.nan, y))
    assert same(weights(run), before)
    assert precision.levels == levels
    assert math.isfinite(float(run.step((x, y))))


def test_with_nothing_lowered_a_loss_that_is_not_finite_is_refused_too() -> None:
    run = start(net())
    run.adapt_precision(adapting(every=NEVER))
    x, y = batches(1)[0]
    before = weights(run)
    with pytest.raises(BadInput, match="the loss is nan"):
        run.step((x * math.nan, y))
    assert same(weights(run), before)


# -- together with the rest ------------------------------------------------------------------------


# The CPU's FP8 product rounds otherwise where ops are watched, as where some are saved, and now
# and then to find out what a forward writes to.
@pytest.mark.parametrize(
    ("how", "place"), [("recompute", 1), ("recompute", 2), ("recompute saving product#0", 1)]
)
def test_recomputed_blocks_give_the_weights_of_kept_ones(
    monkeypatch: pytest.MonkeyPatch, how: str, place: int
) -> None:
    monkeypatch.setattr(Repeated, "is_looked_at", lambda _: False)
    found = []
    for blocks in ({}, dict.fromkeys(BLOCKS, how)):
        run = start(net(dropout=0.1), blocks=blocks)
        options = adapting(every=NEVER, ladder=("fp32", "bf16", "fp8"))
        lower(run.adapt_precision(options), "blocks.0", "blocks.2", place=place)
        torch.manual_seed(7)
        train(run, batches(3))
        found.append(weights(run))
    assert same(*found)


def test_a_plan_can_be_switched_while_layers_are_low() -> None:
    found = []
    for switched in (False, True):
        run = start(net(), blocks=dict.fromkeys(BLOCKS, "keep"))
        lower(run.adapt_precision(adapting(every=NEVER)), *BLOCKS)
        train(run, batches(2))
        if switched:
            applied = run._adapting._applied
            choices = oomph.Choices.from_dict(
                {**applied.choices.as_dict(), "blocks": dict.fromkeys(BLOCKS, "recompute")}
            )
            applied.switch(choices)
        train(run, batches(2))
        found.append(weights(run))
        run.undo()
        assert all("forward" not in vars(module) for module in run.model.modules())
    assert same(*found)


def test_undo_leaves_the_model_as_it_was() -> None:
    model = net()
    before = [set(vars(module)) for module in model.modules()]
    run = start(model)
    lower(run.adapt_precision(adapting()), *BLOCKS)
    train(run, batches(3))
    run.undo()
    assert [set(vars(module)) for module in model.modules()] == before
    assert run._stage.check is None


def test_a_probe_without_memory_takes_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = Probe.run_in_fp32

    def run_in_fp32(self: Probe, part: Batch, at_fp32: Any) -> Any:
        sizes.append(len(part[0]))
        if len(part[0]) > 4:
            raise torch.OutOfMemoryError("no memory")
        return plain(self, part, at_fp32)

    monkeypatch.setattr(Probe, "run_in_fp32", run_in_fp32)
    run = start(net())
    precision = run.adapt_precision(adapting(patience=1))
    train(run, batches(2))
    assert sizes == [16, 8, 4]
    assert len(precision.events) == 1


def test_a_probe_that_has_no_memory_at_all_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_in_fp32(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Probe, "run_in_fp32", run_in_fp32)
    run = start(net())
    precision = run.adapt_precision(adapting(patience=1))
    train(run, batches(3))
    assert precision.events == []


# -- saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_at", [2, 4, 7])
def test_a_resumed_run_goes_on_to_the_bit(saved_at: int, tmp_path: Path) -> None:
    data = batches(12)
    run = start(net(Sensitive, dropout=0.1))
    precision = run.adapt_precision(adapting(wait=2))
    train(run, data[:saved_at])
    run.save(tmp_path)
    losses = train(run, data[saved_at:])

    torch.manual_seed(99)
    again = start(net(Sensitive, dropout=0.1))
    again.load(tmp_path)
    resumed = again.adapt_precision(adapting(wait=2))
    assert train(again, data[saved_at:]) == losses
    assert same(weights(run), weights(again))
    assert resumed.events == precision.events
    assert resumed.state_dict() == precision.state_dict()
    assert precision.events


def test_a_run_that_adapts_already_loads_its_levels(tmp_path: Path) -> None:
    run, other = start(net()), start(net())
    lower(run.adapt_precision(adapting()), "blocks.2")
    run.save(tmp_path)
    precision = other.adapt_precision(adapting())
    other.load(tmp_path)
    assert precision.levels["blocks.2"] is Level.BF16


def test_another_ladder_than_was_saved_is_refused(tmp_path: Path) -> None:
    run, other = start(net()), start(net())
    run.adapt_precision(adapting())
    run.save(tmp_path)
    other.load(tmp_path)
    with pytest.raises(WrongCheckpoint, match="fp32, bf16 when saved"):
        other.adapt_precision(adapting(ladder=("fp32", "fp16")))
    assert other.precision is None


# -- what is refused -------------------------------------------------------------------------------


def test_a_level_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownName, match="bf16"):
        AdaptivePrecision(ladder=("fp32", "bf61"))


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadInput, match=r"demote_below=0\.5"):
        AdaptivePrecision(demote_below=0.5, promote_above=0.1)


def test_no_steps_between_probes_is_refused() -> None:
    with pytest.raises(BadInput, match="at least one step"):
        AdaptivePrecision(every=0)


def test_a_model_without_products_is_refused() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    run = start(Scale())
    with pytest.raises(BadInput, match="no layer that multiplies"):
        run.adapt_precision()
    assert run._stage.check is None


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"weights": "bf16 with fp32 masters"}, "the weights in bf16"),
        ({"techniques": on("fp8_products")}, "products in FP8 already"),
        ({"precision": "tf32"}, "not on the ladder"),
        ({"optimizer_on": "host"}, "optimizer on the host"),
    ],
)
def test_plans_that_leave_nothing_to_adapt_are_refused(choices: dict[str, Any], why: str) -> None:
    run = start(net(), **choices)
    with pytest.raises(BadInput, match=why):
        run.adapt_precision(AdaptivePrecision(ladder=("fp32", "bf16")))


def test_adapting_twice_is_refused() -> None:
    run = start(net())
    run.adapt_precision()
    with pytest.raises(BadInput, match="adapts already"):
        run.adapt_precision()


# -- what it bought --------------------------------------------------------------------------------


def test_the_report_says_what_was_measured() -> None:
    run = start(net())
    precision = run.adapt_precision(adapting())
    train(run, batches(12))
    text = str(precision.report())
    assert "4 layers: 4 in bf16, after 4 moves" in text
    assert "11 probes took" in text
    assert "measured on the cpu" in text
    assert "from fp32's" in text


def test_levels_can_be_rehearsed_for_a_card() -> None:
    x, y = batches(1, samples=4096)[0]
    gpu, everything = find_gpu("a100-80gb"), (*BLOCKS, "head")
    job = Job(net, nn.CrossEntropyLoss(), "adamw", (x.repeat(64, 1), y.repeat(64)))
    mixed = dataclasses.replace(job, precision="bf16-mixed")
    plain = predict_step(job, {}, gpu)
    lowered = predict_step(job, dict.fromkeys(everything, Level.BF16), gpu)
    raised = predict_step(mixed, dict.fromkeys(everything, Level.FP32), gpu)
    assert lowered.peak < plain.peak
    assert lowered.peak == predict_step(mixed, {}, gpu).peak
    assert raised == plain


def test_copies_of_a_run_do_not_share_levels() -> None:
    model = net()
    run = start(model)
    lower(run.adapt_precision(adapting(every=NEVER)), *BLOCKS)
    train(run, batches(1))
    copied = copy.deepcopy(model)
    assert all("forward" not in vars(module) for module in copied.modules())
