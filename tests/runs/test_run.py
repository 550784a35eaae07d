"""A run trains as the untouched job does, inside its budget; what does not fit together is refused,
in words, and leaves the model alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from switched_on import on

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

import oomph
from benchmarks.profiler_memory import measure_cpu_peak
from oomph.errors import BadInput, OomphError, StalePlan
from oomph.files import writing
from oomph.jobs.description import describe_job
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.migrations import SCHEMA_VERSION
from oomph.plans.plan import Change, Plan, Predicted
from oomph.runs.run import Run, apply, fit
from oomph.search.planner import Planner
from oomph.search.planner import plan as make_plan

Batch = dict[str, Tensor]
VOCABULARY = 32


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors on many threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- small jobs ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def ragged(samples: int = 4, length: int = 8, seed: int = 1) -> Batch:
    ids = torch.randint(
        VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed)
    )
    labels = ids.clone()
    for at in range(samples):
        labels[at, at + 1 :] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [ragged(seed=seed) for seed in (1, 2, 3)]
RECOMPUTE = dict.fromkeys((f"blocks.{at}" for at in range(4)), "recompute")
IN_BACKWARD = Choices(blocks=RECOMPUTE, optimizer_in_backward=True)
IN_PARTS = Choices(blocks=RECOMPUTE, micro_batch=1)


def a_plan(model: nn.Module, choices: Choices, **made_for: Any) -> Plan:
    """A plan as the planner would make it for this model, `BATCHES` and AdamW."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    made = describe_job("net", model, BATCHES[0], optimizer, None)
    return Plan(
        made_for=dataclasses.replace(made, **made_for),
        budget=1 << 20,
        choices=choices,
        predicted=Predicted(
            peak=Ledgers(allocated=900_000, reserved=900_000, device=900_000),
            high=1_000_000,
            categories_at_peak={"parameter": 500_000, "activation": 400_000},
            seconds=0.5,
            unlimited_seconds=0.4,
            samples=4,
            tokens=32,
        ),
        fidelity=Fidelity.EXACT,
        gap=0.01,
        changes=(
            Change(
                technique="recompute",
                before="none",
                after="4 of 4 blocks",
                saves=1000,
                costs=0.1,
                fidelity=Fidelity.EXACT,
            ),
        ),
        notes=("a note",),
        planning_seconds=1.5,
    )


def net_job(loss: Any = token_loss, **options: Any) -> Job:
    model = Net()
    return Job(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), BATCHES[0], **options)


def net_run(choices: Choices, loss: Any = token_loss, **options: Any) -> Run:
    job = net_job(loss, **options)
    assert isinstance(job.model, nn.Module)
    return apply(a_plan(job.model, choices), job)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    batches: list[Any],
    before_step: Callable[[], Any] = lambda: None,
) -> list[Tensor]:
    """What the user would have written."""
    losses = []
    for batch in batches:
        loss = loss_of(batch)
        losses.append(loss.detach())
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def untouched(**options: Any) -> tuple[list[Tensor], nn.Module]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = plain_loop(model, optimizer, functools.partial(token_loss, model), BATCHES, **options)
    return losses, model


def assert_same_weights(one: nn.Module, other: nn.Module, rtol: float = 0.0) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=rtol, atol=rtol / 10)


# -- the whole way ---------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=4096,
        n_positions=32,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return GPT2LMHeadModel(config)


def gpt2_batch() -> Batch:
    ids = torch.randint(4096, (6, 32), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0] = -100
    labels[1, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def wide_batch() -> Batch:
    return ragged(samples=32, length=32)


@pytest.mark.parametrize(
    ("build", "loss", "batch", "part"),
    [
        pytest.param(gpt2, None, gpt2_batch(), 0.3, id="transformers"),
        pytest.param(Net, token_loss, wide_batch(), 0.6, id="own model"),
    ],
)
def test_fit_trains_inside_a_part_of_the_memory_with_the_same_losses(
    build: Callable[[], nn.Module], loss: Any, batch: Batch, part: float
) -> None:
    job = Job(build, loss, "adamw", batch)
    natural = oomph.estimate(job, phases=("build", "first step", "step")).peak.allocated
    model, plain = build().train(), build().train()
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters()) for m in (model, plain))

    run = fit(model, optimizer, loss, batch, budget=int(part * natural))

    def plain_loss(batch: Batch) -> Tensor:
        return plain(**batch).loss if loss is None else loss(plain, batch)

    expected = plain_loop(plain, plain_optimizer, plain_loss, [batch] * 3)
    losses = [run.step(batch) for _ in range(3)]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert run.steps == 3
    assert run.model is model
    assert run.optimizer is optimizer
    assert run.measured() is None

    def train() -> None:
        with apply(run.plan, job, device="cpu") as again:
            for _ in range(3):
                again.step(batch)

    assert measure_cpu_peak(train) <= run.plan.budget < natural


def test_a_loss_that_calls_the_model_twice_is_planned_and_trained() -> None:
    def consistency(model: nn.Module, batch: Batch) -> Tensor:
        logits, flipped = model(batch["ids"]), model(batch["ids"].flip(1)).flip(1)
        tokens = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return tokens + F.mse_loss(logits, flipped)

    model, plain = Net(), Net()
    optimizer, plain_optimizer = (torch.optim.AdamW(m.parameters()) for m in (model, plain))
    job = Job(model, consistency, optimizer, BATCHES[0])
    natural = oomph.estimate(job, phases=("build", "first step", "step")).peak.allocated
    run = fit(model, optimizer, consistency, BATCHES[0], budget=int(0.9 * natural))
    losses = [run.step(batch) for batch in BATCHES]
    expected = plain_loop(plain, plain_optimizer, functools.partial(consistency, plain), BATCHES)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_a_block_with_a_hook_inside_is_left_alone_and_that_is_said() -> None:
    model = Net()
    calls: list[int] = []
    inner = model.blocks[1].up  # type: ignore[union-attr]
    inner.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    run = fit(model, optimizer, token_loss, BATCHES[0], budget="1GiB")
    assert "blocks.1 has a hook inside, which recompute would call twice" in run.plan.notes
    assert set(run.plan.choices.blocks) == {"blocks.0", "blocks.2", "blocks.3"}
    calls.clear()
    run.step(BATCHES[0])
    assert calls == [1]


def test_a_batch_norm_keeps_the_batch_whole_and_that_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    job = Job(model, nn.MSELoss(), "sgd", (torch.ones(8, 4), torch.ones(8, 1)))
    plan = make_plan(job, budget="1MiB")
    assert plan.choices.micro_batch is None
    assert any("not split: 1 (BatchNorm1d) averages over" in note for note in plan.notes)


# -- a loop around it ------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [Choices(), IN_BACKWARD], ids=["plain", "in backward"])
def test_a_learning_rate_schedule_goes_on_working(choices: Choices) -> None:
    run = net_run(choices)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    losses = []
    for batch in BATCHES:
        losses.append(run.step(batch))
        schedule.step()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    expected = []
    for batch in BATCHES:
        expected += plain_loop(model, optimizer, functools.partial(token_loss, model), [batch])
        plain.step()
    assert losses == expected
    assert_same_weights(run.model, model)
    assert run.optimizer.param_groups[0]["lr"] == 1e-2 / 8


def test_clipping_is_pytorchs_to_the_bit() -> None:
    run = net_run(Choices(blocks=RECOMPUTE), clip_norm=0.01)
    losses = [run.step(batch) for batch in BATCHES]
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[Tensor] = []

    def clip() -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))

    loss_of = functools.partial(token_loss, model)
    assert losses == plain_loop(model, optimizer, loss_of, BATCHES, clip)
    assert_same_weights(run.model, model)
    assert min(norms) > 0.01


def test_gradients_that_were_there_before_do_not_count() -> None:
    job = net_job()
    assert isinstance(job.model, nn.Module)
    token_loss(job.model, BATCHES[2]).backward()
    run = apply(a_plan(job.model, IN_BACKWARD), job)
    losses = [run.step(batch) for batch in BATCHES]
    expected, model = untouched()
    assert losses == expected
    assert_same_weights(run.model, model)


def test_a_run_ends_with_its_context_or_with_undo() -> None:
    with net_run(IN_BACKWARD) as run:
        run.step(BATCHES[0])
    with pytest.raises(BadInput, match="this run is over: its plan was undone"):
        run.step(BATCHES[0])
    assert "forward" not in vars(run.model.get_submodule("blocks.0"))
    run.undo()
    with pytest.raises(ZeroDivisionError), net_run(IN_BACKWARD) as failed:
        raise ZeroDivisionError
    assert "forward" not in vars(failed.model.get_submodule("blocks.0"))


def test_after_undo_what_was_learned_loads_into_plain_ones_and_trains_on() -> None:
    expected, plain = untouched()
    with net_run(IN_BACKWARD) as run:
        losses = [run.step(batch) for batch in BATCHES[:2]]
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(run.model.state_dict())
    optimizer.load_state_dict(run.optimizer.state_dict())
    loss_of = functools.partial(token_loss, model)
    losses += plain_loop(model, optimizer, loss_of, BATCHES[2:])
    assert losses == expected
    assert_same_weights(model, plain)


# -- errors on the way -----------------------------------------------------------------------------


class Faulty:
    """A loss that raises an error when it is told to: in the last of so many calls."""

    def __init__(self) -> None:
        self.calls_left: list[None] = []
        self.in_backward = False
        self.hook: RemovableHandle | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self.calls_left:
            return token_loss(model, batch)
        self.calls_left.pop()
        if self.calls_left:
            return token_loss(model, batch)
        if not self.in_backward:
            raise ZeroDivisionError("the loss is broken")
        weight = model.get_parameter("blocks.1.up.weight")
        self.hook = weight.register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]
        return token_loss(model, batch)


@pytest.mark.parametrize(
    "choices",
    [IN_BACKWARD, IN_PARTS, dataclasses.replace(IN_PARTS, optimizer_in_backward=True)],
    ids=["in backward", "in parts", "both"],
)
def test_after_an_error_in_the_loss_the_run_goes_on_as_if_nothing_had_been(
    choices: Choices,
) -> None:
    faulty = Faulty()
    run = net_run(choices, faulty)
    losses = [run.step(BATCHES[0])]
    weights = copy.deepcopy(run.model.state_dict())
    # In the second of several parts, or in the only one.
    faulty.calls_left = [None] * (2 if choices.micro_batch else 1)
    with pytest.raises(ZeroDivisionError, match="the loss is broken"):
        run.step(BATCHES[1])
    torch.testing.assert_close(run.model.state_dict(), weights, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    losses += [run.step(batch) for batch in BATCHES[1:]]
    expected, model = untouched()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert_same_weights(run.model, model, rtol=1e-4)
    assert run.steps == 3


def test_a_step_that_breaks_off_halfway_through_the_weights_is_taken_back() -> None:
    faulty = Faulty()
    run = net_run(IN_BACKWARD, faulty)
    losses = [run.step(BATCHES[0])]
    weights = copy.deepcopy(run.model.state_dict())
    faulty.calls_left, faulty.in_backward = [None], True
    with pytest.raises(ZeroDivisionError):
        run.step(BATCHES[1])
    torch.testing.assert_close(run.model.state_dict(), weights, rtol=0, atol=0)
    assert faulty.hook is not None
    faulty.hook.remove()
    losses += [run.step(batch) for batch in BATCHES[1:]]
    expected, model = untouched()
    assert losses == expected
    assert_same_weights(run.model, model)
    assert run.host_bytes > 0


@pytest.mark.parametrize(
    ("choices", "batch", "words"),
    [
        (IN_BACKWARD, ragged(length=9), r"batches of up to \(4, 8\), and this one is \(4, 9\)"),
        (IN_BACKWARD, ragged(samples=5), r"batches of up to \(4, 8\), and this one is \(5, 8\)"),
        (IN_PARTS, ragged(length=9), "plan with the largest batch there will be"),
        (IN_PARTS, {"ids": ragged()["ids"][0]}, "batches of 2 tensors, and this one has 1"),
        (IN_PARTS, {k: v[0] for k, v in ragged().items()}, "batches of up to"),
        (IN_PARTS, {**ragged(), "mask": torch.ones(4, 8)}, "batches of 2 tensors"),
    ],
)
def test_a_batch_that_was_not_planned_for_is_refused(
    choices: Choices, batch: Batch, words: str
) -> None:
    run = net_run(choices)
    with pytest.raises(StalePlan, match=words):
        run.step(batch)
    run.step(BATCHES[0])


@pytest.mark.parametrize(
    ("lengths", "is_welcome"),
    [([5, 4], True), ([3], True), ([6, 2], False), ([5, 4, 1, 1], False)],
)
def test_lists_of_fewer_and_shorter_samples_are_welcome(
    lengths: list[int], is_welcome: bool
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, rows: Any) -> Any:
        return model(torch.cat(rows)).square().mean()

    def listed(*lengths: int) -> list[Tensor]:
        return [torch.ones(n, 3) for n in lengths]

    run = oomph.fit(model, optimizer, loss, listed(5, 4, 4), budget="1 GiB")
    if is_welcome:
        run.step(listed(*lengths))
    else:
        with pytest.raises(StalePlan, match="batches of"):
            run.step(listed(*lengths))


def test_shorter_batches_are_welcome_and_in_parts_larger_ones_too() -> None:
    run = net_run(IN_BACKWARD)
    run.step(ragged(samples=2, length=5))
    run = net_run(IN_PARTS)
    larger = ragged(samples=7)
    expected = token_loss(run.model, larger)
    torch.testing.assert_close(run.step(larger), expected.detach(), rtol=1e-5, atol=0)


# -- what is refused before anything is touched ----------------------------------------------------


def untouched_by(model: nn.Module, attempt: Callable[[], Any], error: type, words: str) -> None:
    """The attempt is refused, and the model is in no way another."""
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    with pytest.raises(error, match=words):
        attempt()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes


def test_a_plan_is_applied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "plan", lambda *_: pytest.fail("planned first"))
    masters = Choices(precision="bf16-mixed", weights="bf16 with fp32 masters")
    for choices in (IN_BACKWARD, masters):
        job = net_job()
        model, optimizer = job.model, job.optimizer
        assert isinstance(model, nn.Module)
        plan = a_plan(model, choices)
        run = apply(plan, job)
        for attempt in (
            lambda plan=plan, job=job: apply(plan, job),
            lambda m=model, o=optimizer: fit(m, o, token_loss, BATCHES[0], budget="1GiB"),  # type: ignore[misc]
        ):
            untouched_by(model, attempt, BadInput, "applied to this model already; undo it first")
        run.undo()
        apply(plan, job).undo()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "other"}, r"a model of [\d,]+ parameters, and this one, of [\d,]+, has other"),
        ({"batch": ((4, 9), (4, 9))}, "for batches of 4×9 and 4×9, and this is 4×8 and 4×8"),
        ({"optimizer": "SGD"}, "for the optimizer SGD, and this is AdamW"),
        ({"torch": "1.13"}, r"for torch 1\.13, and this is 2\.\d+"),
        ({"gpu": "NVIDIA H200"}, "for the NVIDIA H200, and this is CPU"),
    ],
)
def test_a_plan_for_something_else_is_stale_and_says_for_what(
    changes: dict[str, Any], words: str
) -> None:
    job = net_job()
    assert isinstance(job.model, nn.Module)
    job.model.eval()
    plan = a_plan(job.model, IN_BACKWARD, **changes)
    untouched_by(job.model, lambda: apply(plan, job), StalePlan, words)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.requires_grad_(False).head.requires_grad_(),
        lambda model: setattr(model, "head", nn.Linear(16, VOCABULARY + 1)),
        lambda model: setattr(model, "extra", nn.Linear(2, 2)),
    ],
    ids=["another type", "frozen", "another shape", "more"],
)
def test_a_model_with_other_weights_needs_another_plan(change: Callable[[Any], Any]) -> None:
    plan = a_plan(Net(), IN_BACKWARD)
    job = net_job()
    assert isinstance(job.model, nn.Module)
    change(job.model)
    optimizer = torch.optim.AdamW(p for p in job.model.parameters() if p.requires_grad)
    job = dataclasses.replace(job, optimizer=optimizer)
    untouched_by(job.model, lambda: apply(plan, job), StalePlan, "has other weights")  # type: ignore[arg-type]


def test_an_optimizer_must_own_what_is_trained_and_nothing_else() -> None:
    model, other = Net(), Net()
    plan = a_plan(model, IN_BACKWARD)
    some = torch.optim.AdamW(model.blocks.parameters())
    one = torch.optim.AdamW(p for path, p in model.named_parameters() if path != "head.bias")
    foreign = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    for optimizer, words in (
        (some, "does not own embed.weight and 2 more parameters; give it all"),
        (one, "does not own head.bias; give it all"),
        (foreign, "owns parameters that are not the model's"),
    ):
        job = Job(model, token_loss, optimizer, BATCHES[0])
        untouched_by(model, functools.partial(apply, plan, job), BadInput, words)
        attempt = functools.partial(fit, model, optimizer, token_loss, BATCHES[0], budget="1GiB")
        untouched_by(model, attempt, BadInput, words)


def test_frozen_parameters_need_no_owner() -> None:
    model = Net()
    model.embed.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    run = apply(a_plan(model, IN_BACKWARD), Job(model, token_loss, optimizer, BATCHES[0]))
    before = model.embed.weight.clone()
    losses = [run.step(BATCHES[0]) for _ in range(2)]
    assert losses[1] < losses[0]
    assert torch.equal(model.embed.weight, before)


def test_a_run_needs_an_optimizer_and_one_device() -> None:
    job = net_job()
    assert isinstance(job.model, nn.Module)
    plan = a_plan(job.model, IN_BACKWARD)
    with pytest.raises(BadInput, match="a run is for training: give the job an optimizer"):
        apply(plan, dataclasses.replace(job, optimizer=None))
    job.model.head.to("meta")
    with pytest.raises(BadInput, match="must be on one device to be planned for, not on cpu, meta"):
        apply(plan, job)


def test_a_job_in_bf16_takes_the_batches_it_was_planned_with() -> None:
    batch = torch.randn(4, 8), torch.randn(4, 1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model.register_buffer("scale", torch.ones(2))
    optimizer = torch.optim.AdamW(model.parameters())
    job = Job(model, nn.MSELoss(), optimizer, batch, precision="bf16")
    plan = make_plan(job, budget="1MiB")
    broken = dataclasses.replace(
        plan, choices=dataclasses.replace(plan.choices, blocks={"7": "keep"})
    )
    untouched_by(model.eval(), lambda: apply(broken, job), BadInput, "names 7, which")
    run = apply(plan, job)
    assert run.step(batch).dtype is torch.bfloat16
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


# -- plans as files --------------------------------------------------------------------------------


@pytest.fixture
def plan() -> Plan:
    choices = Choices(
        precision="bf16-mixed",
        micro_batch=2,
        blocks={"blocks.0": "keep", "blocks.1": "recompute saving attention#0 product#12"},
        compiled=True,
        compiled_others=("norm",),
        head="head",
        loss_chunk=512,
        techniques=on(cuda_allocator={"conf": "expandable_segments:True"}),
    )
    return a_plan(Net(), choices)


def test_a_plan_comes_back_from_its_file_as_it_was(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["schema_version"] == SCHEMA_VERSION
    assert list(tmp_path.iterdir()) == [path]


def edited(plan: Plan, path: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(plan.as_dict()))
    *parents, name = path.split(".")
    at = values
    for parent in parents:
        at = at[parent]
    if value is KeyError:
        del at[name]
    else:
        at[name] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("kind", "a letter", "this is no plan"),
        ("schema_version", 9, "has schema 9, and this oomph reads 1 to .; install a newer oomph"),
        ("schema_version", 0, "has schema 0"),
        ("schema_version", KeyError, "has schema None"),
        ("choices", KeyError, "lacks 'choices'"),
        ("choices", [], "changed into something else"),
        ("choices.quantum", True, "'quantum' is no choice of a plan; known are precision"),
        ("choices.head", KeyError, "belongs to a head"),
        ("choices.techniques", ["channels_last"], "techniques cannot be"),
        ("choices.techniques", {"quantum": {}}, "uses the technique 'quantum', which this oomph"),
        ("choices.techniques", {"channels_last": {"enabled": 1}}, "enabled cannot be 1"),
        ("choices.techniques", {"channels_last": {"first": True}}, "has 'first', which is unkn"),
        ("choices.micro_batch", "2", "micro_batch cannot be '2'"),
        ("choices.micro_batch", True, "micro_batch cannot be True"),
        ("choices.micro_batch", -2, "at least one sample, not -2"),
        ("choices.compiled", 1, "compiled cannot be 1"),
        ("choices.loss_chunk", 0, "at least one row, not 0"),
        ("choices.loss_chunk", None, "belongs to a head"),
        ("choices.precision", "fp8", "precision is one of .*, not 'fp8'"),
        ("choices.weights", "heavy", "weights are own or .*, not 'heavy'"),
        ("choices.blocks", {"blocks.0": "burn"}, "blocks.0 can be kept or recomputed, not 'burn'"),
        ("choices.blocks", {"blocks.0": "recompute saving all"}, "not 'recompute saving all'"),
        ("choices.blocks", {"blocks.0": 3}, "can be kept or recomputed, not 3"),
        ("made_for.torch", KeyError, "lacks 'torch'"),
        ("made_for.torch", 2.11, "torch cannot be 2.11"),
        ("made_for.batch", 4, "changed into something else"),
        ("made_for.batch", [["four"]], "changed into something else"),
        ("made_for.colour", "red", "changed into something else"),
        ("predicted.seconds", "fast", "seconds cannot be 'fast'"),
        ("predicted.peak.device", None, "device cannot be None"),
        ("budget", "plenty", "changed into something else"),
        ("fidelity", "perfect", "'perfect': exact, rounding or lossy belongs there"),
        ("changes", [{"technique": "recompute"}], r"changes\[0\] lacks 'before'"),
        ("changes", 7, "changed into something else"),
    ],
)
def test_an_edited_plan_is_refused_in_words(
    plan: Plan, tmp_path: Path, path: str, value: Any, words: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(edited(plan, path, value)))
    with pytest.raises(OomphError, match=words):
        Plan.load(file)


def test_a_file_that_is_no_plan_or_half_of_one_is_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    whole = json.dumps(plan.as_dict())
    for text in (whole[: len(whole) // 2], "", "a plan", whole + "}"):
        file.write_text(text)
        with pytest.raises(BadInput, match=r"plan\.json is no plan, or only part of one"):
            Plan.load(file)
    for text in ("[]", "3", "null"):
        file.write_text(text)
        with pytest.raises(BadInput, match="is no plan: `oomph plan --save FILE` writes one"):
            Plan.load(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="is no plan, or only part of one"):
        Plan.load(file)
    with pytest.raises(BadInput, match=r"cannot read the plan .*: No such file"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(BadInput, match="cannot read the plan"):
        Plan.load(tmp_path)


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_save_that_fails_keeps_the_old_file_and_leaves_no_other(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)

    def half_written(beside: Path) -> None:
        beside.write_bytes(b"{")
        raise OSError("No space left on device")

    def not_moved(self: Path, target: Any) -> None:
        raise OSError("No space left on device")

    if fails == "write":
        monkeypatch.setattr(writing, "open_new", half_written)
    else:
        monkeypatch.setattr(Path, "replace", not_moved)
    with pytest.raises(BadInput, match="No space left"):
        dataclasses.replace(plan, budget=7).save(path)
    monkeypatch.undo()
    assert Plan.load(path) == plan
    assert list(tmp_path.iterdir()) == [path]
