"""Plans fit, are as fast as their budget allows, and say so where there is none."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from switched_on import allocator_conf, on
from tiny_models import llama, tokens
from torch import Tensor, nn

from oomph.errors import BadInput, CannotRehearse, DoesNotFit
from oomph.hardware import GPU, find_gpu
from oomph.jobs.job import Job
from oomph.plans.choices import KEEP, MASTERS, Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.plan import Plan
from oomph.plans.precisions import Precision
from oomph.rehearsal.allocator import AllocatorSettings
from oomph.rehearsal.estimation import Estimate, estimate, judge
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.search.candidates import Candidate, PartTimes, Verdict, kind_of, least_seconds
from oomph.search.planner import Planner, plan
from oomph.search.refining import Tried

WIDTH, DEPTH, SAMPLES, ROWS = 256, 4, 4, 1024
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.down(torch.relu(self.up(x))))
        return x + hidden


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.flatten(0, 1)).view_as(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).float().pow(2).mean()
    return out


def job(model: Any = Model, rows: int = ROWS, samples: int = SAMPLES, **options: Any) -> Job:
    options = {"optimizer": "adamw", **options}
    return Job(model, loss, batch=lambda: torch.ones(samples, rows, WIDTH), **options)


def language_model() -> Job:
    return llama(layers=2, vocabulary=8192, batch=tokens(2, 1024), precision="bf16-mixed")


@functools.cache
def natural() -> int:
    return estimate(job()).peak.allocated


@functools.cache
def planned(part: float) -> Plan:
    return plan(job(), budget=int(natural() * part))


def judged(made: Plan, for_job: Job, gpu: GPU | None = None) -> Estimate:
    """The plan's choices, rehearsed and judged by nobody who made them."""
    return judge(
        rehearse(for_job, gpu, PHASES, choices=made.choices),
        job="again",
        gpu=gpu,
        budget=made.budget,
        settings=AllocatorSettings.parse(allocator_conf(made.choices)),
        phases=PHASES,
        seconds=0.0,
    )


#: From just above the leanest plan there is to more than the untouched job needs.
PARTS = (0.37, 0.4, 0.42, 0.43, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)


@pytest.mark.parametrize("part", [0.37, 0.5, 0.8, 1.2])
def test_a_plan_passes_the_check_by_anyone(part: float) -> None:
    made = planned(part)
    again = judged(made, job())
    assert again.fits
    assert again.peak == made.predicted.peak


def test_a_larger_budget_is_never_slower() -> None:
    seconds = [planned(part).predicted.seconds for part in PARTS]
    assert all(more <= less + 1e-9 for less, more in itertools.pairwise(seconds))
    assert len(set(seconds)) >= 5


@functools.cache
def natural_on_card() -> int:
    return estimate(language_model(), "h200").smallest_budget


@pytest.mark.parametrize("allow", ["exact", "rounding"])
def test_a_plan_for_a_card_passes_the_check_by_anyone(allow: str) -> None:
    made = plan(language_model(), gpu="h200", budget=natural_on_card() - 30 * MIB, allow=allow)
    again = judged(made, language_model(), find_gpu("h200"))
    assert again.fits and again.peak == made.predicted.peak
    assert list(Fidelity).index(made.fidelity) <= list(Fidelity).index(Fidelity(allow))


def test_a_larger_budget_on_a_card_is_never_slower() -> None:
    need = estimate(job(), "h200").smallest_budget
    plans = [
        plan(job(), gpu="h200", budget=need - spare * MIB, allow="exact", compile_blocks=False)
        for spare in (45, 30, 15, 0)
    ]
    seconds = [made.predicted.seconds for made in plans]
    assert all(more <= less + 1e-9 for less, more in itertools.pairwise(seconds))
    assert seconds[0] > seconds[-1]


def test_with_enough_memory_nothing_is_recomputed_or_split() -> None:
    choices = planned(1.2).choices
    assert set(choices.blocks.values()) == {KEEP} and choices.micro_batch is None


def test_the_smallest_budget_that_an_error_names_is_feasible() -> None:
    with pytest.raises(DoesNotFit, match="no plan fits") as refused:
        plan(job(), budget=natural() // 20)
    assert plan(job(), budget=refused.value.smallest).predicted.peak.allocated <= (
        refused.value.smallest
    )


def test_without_blocks_batch_and_optimizer_are_planned() -> None:
    def layers() -> nn.Module:
        widths = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
        return nn.Sequential(*(nn.Linear(*width) for width in widths))

    peak = estimate(job(layers)).peak.allocated
    made = plan(job(layers), budget=int(peak * 0.6))
    assert made.choices.blocks == {}
    assert made.choices.micro_batch is not None
    on_card = plan(job(layers), gpu="h200", budget="1GiB")
    assert not on_card.choices.compiled  # there is nothing to compile


def test_on_a_card_a_compiled_plan_fits_and_allow_bounds_its_fidelity() -> None:
    rounding = plan(job(), gpu="h200", budget="2GiB")
    assert rounding.choices.precision == "bf16-mixed" and rounding.choices.compiled
    assert rounding.fidelity is Fidelity.ROUNDING
    assert rounding.predicted.high <= rounding.budget
    exact = plan(job(), gpu="h200", budget="2GiB", allow="exact")
    assert exact.choices.precision == "fp32"
    assert exact.choices.weights == "own" and exact.fidelity is Fidelity.EXACT


def test_a_card_without_bf16_gets_fp16_and_no_step_in_backward() -> None:
    choices = plan(job(), gpu="t4", budget="4GiB").choices
    assert choices.precision == "fp16-mixed" and not choices.optimizer_in_backward


def test_clipping_excludes_steps_in_backward() -> None:
    few_rows = functools.partial(
        job, rows=16, samples=1
    )  # weights and their gradients are all there is
    tight = int(estimate(few_rows()).peak.allocated * 0.9)
    assert plan(few_rows(), budget=tight).choices.optimizer_in_backward
    with pytest.raises(DoesNotFit):
        plan(few_rows(clip_norm=1.0), budget=tight)
    enough = estimate(few_rows()).peak.allocated
    assert not plan(few_rows(clip_norm=1.0), budget=enough).choices.optimizer_in_backward


def test_batch_norm_keeps_the_batch_whole_and_says_so() -> None:
    made = plan(job(functools.partial(Model, norm=True)), budget=int(natural() * 0.8))
    assert made.choices.micro_batch is None
    assert any("BatchNorm1d" in note for note in made.notes)


def test_a_loss_that_fails_with_parts_keeps_the_batch_whole_and_says_so() -> None:
    def better_half(model: nn.Module, batch: Tensor) -> Tensor:
        # As one does that compares chosen answers with rejected ones.
        if len(batch) < SAMPLES:
            raise ValueError("an answer is missing")
        chosen, rejected = model(batch).float().pow(2).mean((1, 2)).chunk(2)
        worse: Tensor = (chosen - rejected).exp().mean()
        return worse

    made = plan(Job(Model, better_half, batch=job().batch), budget=int(natural() * 0.7))
    assert made.choices.micro_batch is None
    assert made.choices.recomputed
    (note,) = [note for note in made.notes if note.startswith("the batch is not split")]
    assert "an answer is missing" in note
    assert not any("no block" in note for note in made.notes)


def test_a_job_may_keep_its_batch_whole() -> None:
    made = plan(job(whole_batch=True), budget=int(natural() * 0.7))
    assert made.choices.micro_batch is None
    assert "the batch is not split: the job says so" in made.notes


def test_a_block_on_whose_result_nothing_depends_is_left_alone() -> None:
    class Early(Model):
        """Takes what the last block but one gives, as models do that look at images."""

        def forward(self, x: Tensor) -> Tensor:
            before = x
            for block in self.blocks:
                before, x = x, block(x)
            return before

    made = plan(job(Early, samples=1), budget=int(natural() * 0.28))
    assert list(made.choices.blocks) == [f"blocks.{at}" for at in range(DEPTH - 1)]
    assert made.choices.recomputed
    assert not made.notes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "1GiB", "allow": "anything"}, "allow is exact, rounding, lossy"),
        ({}, "give one, as 16GiB"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        plan(job(), **options)


def test_a_job_that_is_only_evaluated_has_no_plan() -> None:
    evaluated = Job(Model, loss, None, lambda: torch.randn(4, WIDTH))
    with pytest.raises(BadInput, match="for training"):
        plan(evaluated, budget="1GiB")


def test_every_change_is_priced_by_leaving_it_out() -> None:
    made = plan(job(), gpu=find_gpu("h200"), budget="2GiB", allow="exact")
    names = [change.technique for change in made.changes]
    assert len(names) == len(set(names))
    assert {change.fidelity for change in made.changes} <= {Fidelity.EXACT}


# -- what is said ---------------------------------------------------------------------------------


def test_micro_batches_with_dropout_are_said_to_draw_other_numbers() -> None:
    words = "micro-batches draw other random numbers than the whole batch would; each is as random"
    tight = int(natural() * 0.45)
    made = plan(job(functools.partial(Model, dropout=0.1)), budget=tight)
    assert made.choices.micro_batch is not None and words in made.notes
    assert planned(0.45).choices.micro_batch is not None and words not in planned(0.45).notes


def test_the_jobs_own_micro_batch_draws_the_jobs_own_numbers() -> None:
    own = job(functools.partial(Model, dropout=0.1, norm=True), micro_batch=2)
    made = plan(own, budget=2 * natural())
    assert made.choices.micro_batch == 2
    assert not any("random numbers" in note for note in made.notes)


def test_a_block_with_a_hook_inside_is_left_alone_and_named() -> None:
    def hooked() -> nn.Module:
        model = Model()
        model.blocks[1].up.register_forward_hook(lambda *_: None)
        return model

    made = plan(job(hooked), budget=int(natural() * 0.7))
    assert list(made.choices.blocks) == ["blocks.0", "blocks.2", "blocks.3"]
    assert "blocks.1 has a hook inside, which recompute would call twice" in made.notes


class Branches(Block):
    """A block that asks what its numbers are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Writes(Block):
    """A block that writes to what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Chain(nn.Module):
    def __init__(self, block: Callable[[float], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(0.0) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("block", [Branches, Writes])
def test_what_cannot_be_compiled_stays_as_it_is_and_says_so(
    block: Callable[[float], nn.Module],
) -> None:
    made = plan(job(lambda: Chain(block), rows=16, samples=1), gpu="h200", budget="2GiB")
    assert not made.choices.compiled
    assert any(note.startswith("blocks are not compiled: ") for note in made.notes)


class BranchesInFull(Block):
    """A block that asks what its numbers are where its weights are in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        if self.up.weight.dtype is torch.float32 and x.sum() <= 0:
            return x
        return super().forward(x)


def test_what_can_be_compiled_with_some_weights_only_is_with_these() -> None:
    """As experts of Hugging Face's, which are multiplied otherwise in fp32."""
    heavy = job(lambda: Chain(BranchesInFull), rows=2**14, samples=1)
    made = plan(heavy, gpu="h200", budget="24GiB")
    assert made.choices.compiled and made.choices.weights == MASTERS
    assert not any("not compiled" in note for note in made.notes)
    (masters,) = (change for change in made.changes if change.technique == "weights")
    assert masters.costs < 0  # without them nothing would be compiled


def test_what_cannot_be_recomputed_is_kept_and_says_so() -> None:
    calls = ctypes.c_int(0)  # where nothing looks for what a forward writes to

    class Counts(Block):
        """A block that is not the same a second time."""

        def forward(self, x: Tensor) -> Tensor:
            calls.value += 1
            return super().forward(x) if calls.value % 2 else x

    made = plan(job(lambda: Chain(Counts), rows=16, samples=1), budget="1GiB")
    assert made.choices.blocks == {}
    assert any(note.startswith("no block is recomputed: ") for note in made.notes)


def test_a_job_that_checkpoints_already_is_compared_with_that() -> None:
    made = plan(job(checkpointing="full"), budget=2 * natural())
    (recompute,) = [change for change in made.changes if change.technique == "recompute"]
    assert (recompute.before, recompute.after) == ("4 of 4 blocks", "none")
    assert recompute.saves < 0 and recompute.costs < 0


def test_an_optimizer_that_calls_the_loss_itself_is_refused() -> None:
    with pytest.raises(CannotRehearse, match="LBFGS"):
        plan(job(optimizer=lambda p: torch.optim.LBFGS(p)), budget="1GiB")


# -- fidelity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
def test_exact_compiles_nothing_in_half_precision(precision: Precision) -> None:
    exact = plan(
        job(precision=precision, rows=16, samples=1), gpu="h200", budget="1GiB", allow="exact"
    )
    assert not exact.choices.compiled and exact.choices.weights == "own"
    assert exact.choices.precision == precision
    assert exact.fidelity is Fidelity.EXACT
    rounding = plan(job(precision=precision, rows=16, samples=1), gpu="h200", budget="1GiB")
    assert rounding.choices.compiled and rounding.fidelity is Fidelity.ROUNDING


def test_exact_may_compile_in_full_precision() -> None:
    exact = plan(job(rows=16, samples=1), gpu="h200", budget="1GiB", allow="exact")
    assert exact.choices.compiled and exact.fidelity is Fidelity.EXACT


def test_only_lossy_shortens_the_optimizers_state() -> None:
    few_rows = job(rows=2, samples=1)
    with pytest.raises(DoesNotFit, match="--allow lossy") as refused:
        plan(few_rows, budget=1 * MIB)
    with pytest.raises(DoesNotFit) as lossy:
        plan(few_rows, budget=1 * MIB, allow="lossy")
    assert lossy.value.smallest < refused.value.smallest
    made = plan(few_rows, budget=lossy.value.smallest, allow="lossy")
    assert "low_bit_state" in made.choices.techniques and made.fidelity is Fidelity.LOSSY


# -- which sizes are tried ------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [8, 6])
def test_the_smallest_micro_batch_is_tried_before_giving_up(samples: int) -> None:
    def batch() -> Tensor:
        return torch.ones(samples, ROWS, WIDTH)

    said: list[str] = []
    with pytest.raises(DoesNotFit) as refused:
        plan(Job(lambda: Chain(Block), loss, "sgd", batch), budget=1 * MIB, say=said.append)
    assert "trying micro-batches of 1" in said
    plan(Job(lambda: Chain(Block), loss, "sgd", batch), budget=refused.value.smallest)


def test_more_parts_take_no_less_and_larger_parts_need_no_less_memory() -> None:
    known = {1: PartTimes(fastest=10.0, solved=20.0), 4: PartTimes(fastest=13.0, solved=14.0)}
    assert least_seconds(1, {}) == 0.0
    assert least_seconds(4, {1: known[1]}) == 10.0
    assert least_seconds(16, known) == 13.0 + 12.0
    # In two parts at least what four parts give for memory, in one part not: it can do more.
    assert least_seconds(2, known) == 10.0 + 1.0
    assert least_seconds(1, {4: known[4]}) == 0.0
    assert least_seconds(2, {4: PartTimes(fastest=13.0, solved=math.inf)}) == math.inf


def test_what_leaves_the_gpu_costs_more_in_parts_but_not_with_each_of_them() -> None:
    known = {n: PartTimes(fastest=t, solved=math.inf) for n, t in {1: 10.0, 4: 13.0}.items()}
    assert least_seconds(16, known, leaves=True) == 13.0
    known[16] = PartTimes(fastest=16.0, solved=math.inf)
    assert least_seconds(32, known, leaves=True) == 16.0 + 16 * 3 / 12


def test_with_room_for_everything_no_parts_are_tried() -> None:
    said: list[str] = []
    plan(job(rows=16), gpu="h200", budget="10GiB", say=said.append)
    assert {line for line in said if line.startswith("trying")} == {"trying micro-batches of 4"}


LIMIT = 100


class QuickChecked:
    """Plans that a quick check passed, from the fastest on, and what full checks find of them."""

    def __init__(self, fits: set[float], leaner: dict[float, float], taken: int = 1) -> None:
        self.checked: list[float] = []
        self._fits, self._lean = fits, leaner
        self._taken = taken
        # The planner's checker and trials, too.
        self._checker = self
        self.limit = LIMIT

    def confirmed(self, host: int | None = None, known: Collection[float] = ()) -> float | None:
        self._known = known
        planner: Any = self
        found = Planner._confirmed(planner, planner, planner, host)
        return None if found is None else found[1].seconds

    def fastest_first(self, best: Tried, host: int | None) -> list[Tried]:
        choices = [Choices(optimizer_on="host", gpu_share=share) for share in (0.1, 0.2, 0.3, 0.4)]
        return [Tried(choices=one, seconds=one.gpu_share) for one in choices]

    def who_has(self, choices: Choices) -> tuple[Verdict, Candidate]:
        return self._verdict(True, 0), self._candidate(choices.gpu_share)

    def was_checked(self, candidate: Candidate) -> bool:
        return candidate.seconds in self._known

    def _check_and_price(self, candidate: Candidate) -> tuple[Verdict, Candidate]:
        self.checked.append(candidate.seconds)
        lean = candidate.seconds in self._lean.values()
        fits = lean or candidate.seconds in self._fits
        return self._verdict(fits, self._taken if lean else 0), candidate

    def _leaner(self, candidate: Candidate, missing: int) -> Candidate | None:
        assert missing == 7
        seconds = self._lean.get(candidate.seconds)
        return None if seconds is None else self._candidate(seconds)

    def _rehearsed_seconds(self, verdict: Verdict, candidate: Candidate) -> float:
        return candidate.seconds

    def _verdict(self, fits: bool, host: int) -> Verdict:
        return Verdict(fits, LIMIT + 7, 0, host, 1.0, "", False)

    def _candidate(self, seconds: float) -> Candidate:
        nothing: Any = None
        choices = Choices(optimizer_on="host", gpu_share=seconds)
        return Candidate(
            seconds=seconds, number=0, profiles=nothing, solution=nothing, choices=choices
        )


class TestPlansThatAQuickCheckPassed:
    def test_the_next_is_taken_where_the_whole_job_does_not_fit(self) -> None:
        quick = QuickChecked({0.2, 0.3}, {})
        assert quick.confirmed() == 0.2
        assert quick.checked == [0.1, 0.2]

    def test_what_was_checked_as_a_whole_is_not_checked_again(self) -> None:
        quick = QuickChecked({0.2}, {})
        assert quick.confirmed(known={0.1}) == 0.1
        assert quick.checked == []

    def test_none_is_taken_where_none_fits_and_few_are_looked_at(self) -> None:
        quick = QuickChecked({0.4}, {})
        assert quick.confirmed() is None
        assert quick.checked == [0.1, 0.2, 0.3]

    def test_one_with_leaner_blocks_is_taken_where_it_is_faster_than_the_next(self) -> None:
        quick = QuickChecked({0.2}, {0.1: 0.15})
        assert quick.confirmed() == 0.15
        assert quick.checked == [0.1, 0.15], "what is slower is not looked at"

    def test_and_the_next_is_taken_where_that_is_faster(self) -> None:
        assert QuickChecked({0.2}, {0.1: 0.25}).confirmed() == 0.2
        assert QuickChecked(set(), {0.1: 0.35, 0.2: 0.32}).confirmed() == 0.32

    def test_leaner_blocks_may_take_no_more_host_memory_than_there_is(self) -> None:
        quick = QuickChecked({0.2}, {0.1: 0.15}, taken=50)
        assert quick.confirmed(host=49) == 0.2
        assert quick.confirmed(host=50) == 0.15


def candidate(seconds: float, **choices: Any) -> Candidate:
    nothing: Any = None
    return Candidate(
        seconds=seconds,
        number=int(seconds),
        profiles=nothing,
        solution=nothing,
        choices=Choices(**choices),
    )


class Profiled:
    """A planner that has these candidates, and gets one more with each size it profiles."""

    def __init__(self, *candidates: Candidate, more: dict[int | None, Candidate]) -> None:
        self.profiles = [SimpleNamespace(choices=Choices())]
        self._candidates, self._more = list(candidates), more
        self._leaving = self._refuses_capture = False
        self._like = None
        self._put_off: dict[int | None, float] = {None: 1.0, 8: 2.0}
        self._unprofiled: list[int | None] = [4, 2, 1]

    def _solutions(self, profiles: Any, rooms: Any) -> list[Candidate]:
        return self._candidates

    def _expected(self, one: Candidate) -> float:
        return one.seconds

    def _has_no_room_for_gradients(self, size: int | None) -> bool:
        return size == 4

    def _profile_size(self, size: int | None) -> None:
        assert size != 4
        self._candidates += [self._more[size]] if size in self._more else []

    def _fastest(self, rooms: Any, without: set[str], but: Any = None) -> Candidate | None:
        planner: Any = self
        return Planner._fastest(planner, rooms, without, but)

    def of_more(self) -> Candidate | None:
        planner: Any = self
        return Planner._fastest_of_more(planner, {}, set())


class TestTheFastestCandidate:
    fast, slow = candidate(1, compiled=True), candidate(3)
    split, graph = candidate(2, micro_batch=2), candidate(0, techniques=on("cuda_graph"))

    def test_is_one_that_was_not_checked(self) -> None:
        planner = Profiled(self.slow, self.fast, more={})
        assert planner._fastest({}, set()) is self.fast
        assert planner._fastest({}, {str(self.fast.choices)}) is self.slow
        assert planner._fastest({}, {str(one.choices) for one in (self.fast, self.slow)}) is None

    def test_is_of_another_kind_where_that_is_asked_for(self) -> None:
        planner = Profiled(self.slow, self.fast, self.graph, more={})
        but = kind_of(self.graph.choices)
        assert planner._fastest({}, set(), but=but) is self.fast
        assert planner._fastest({}, set(), but=kind_of(self.fast.choices)) is self.graph
        assert planner._fastest({}, {str(self.fast.choices)}, but=but) is self.slow

    def test_captures_no_forward_that_refuses_it(self) -> None:
        planner = Profiled(self.graph, self.fast, more={})
        assert planner._fastest({}, set()) is self.graph
        planner._refuses_capture = True
        assert planner._fastest({}, set()) is self.fast

    def test_is_found_among_sizes_that_were_left_out_where_there_is_no_other(self) -> None:
        planner = Profiled(more={2: self.split, 1: self.slow})
        assert planner.of_more() is self.split
        assert planner._unprofiled == [1], "one size after the other, but for those put off"
        assert Profiled(more={8: self.slow}).of_more() is self.slow
        assert Profiled(more={}).of_more() is None
