"""A step that runs out of memory anywhere leaves nothing behind, and comes out right on a retry.

Memory runs out in every single operation of a step, one at a time: a dispatch mode refuses the
n-th. That is more than every allocation, and includes those of the transaction itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from switched_on import on
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomph.engine import host_copies
from oomph.engine.host_copies import HostCopies
from oomph.engine.out_of_memory import (
    _wait_for_backward_on,
    free_what_is_left,
    ran_out_of_memory,
)
from oomph.errors import BadInput, OutOfMemory
from oomph.jobs.description import describe_job
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.plans.fidelity import Fidelity
from oomph.plans.ledgers import Ledgers
from oomph.plans.plan import Plan, Predicted
from oomph.process.rehearsal_threads import rehearses_here
from oomph.runs.fallback_plans import Fallback
from oomph.runs.run import Run, apply

VOCABULARY, WIDTH = 12, 8
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_little_garbage() -> Iterator[None]:
    """Small tensors on many threads wait for each other; a collection looks at few objects."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


# -- jobs ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x).tanh())


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(dropout))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Counting(Net):
    """Has statistics, a table that is not saved, and a buffer that is replaced in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("wide", torch.zeros(1).expand(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        self.table += 1
        self.last = hidden.detach().mean()
        return self.head(self.blocks(self.norm(hidden.transpose(1, 2)).transpose(1, 2)))


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def a_batch(seed: int) -> Batch:
    ids = torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 1:] = -100
    return {"ids": ids, "labels": labels}


BATCHES = [a_batch(seed) for seed in (1, 2, 3)]
RECOMPUTE = {"blocks.0": "recompute saving product#0"}
MASTERS = "bf16 with fp32 masters"


def an_embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Embedding(512, 16).bfloat16()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetUp:
    choices: Choices = dataclasses.field(default_factory=Choices)
    build: Callable[[], nn.Module] = Net
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def start(self, *smaller: Choices) -> Run:
        """A run that has these plans to fall back on, and no others."""
        model = self.build()
        job = Job(model, token_loss, self.optimizer(model.parameters()), BATCHES[0], **self.options)
        run = apply(a_plan(model, self.choices, job.optimizer), job)
        ladder = run._adapting._fallbacks_by_plan[0]
        ladder.stop()
        for at, choices in enumerate(smaller):
            plan = a_plan(model, choices, job.optimizer)
            ladder.steps_down.append(Fallback(plan=plan, need=1000 - at, retries=0))
        return run


def a_plan(model: nn.Module, choices: Choices, optimizer: Any) -> Plan:
    return Plan(
        made_for=describe_job("net", model, BATCHES[0], optimizer, None),
        budget=1 << 20,
        choices=choices,
        predicted=Predicted(
            peak=Ledgers(allocated=1 << 19, reserved=1 << 19, device=1 << 19),
            high=1 << 19,
            categories_at_peak={},
            seconds=0.5,
            unlimited_seconds=0.4,
            samples=2,
            tokens=6,
        ),
        fidelity=Fidelity.EXACT,
        gap=0.0,
        changes=(),
        notes=(),
        planning_seconds=0.0,
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    some, *others = parameters
    return torch.optim.NAdam([{"params": [some], "lr": 1e-3}, {"params": others}])


SET_UPS = {
    "plain": SetUp(),
    "micro-batches": SetUp(choices=Choices(micro_batch=1), optimizer=sgd),
    "recompute and clipping": SetUp(
        choices=Choices(blocks=RECOMPUTE), optimizer=sgd, options={"clip_norm": 0.1}
    ),
    "chunked loss": SetUp(choices=Choices(head="head", loss_chunk=2), optimizer=sgd),
    "in backward": SetUp(choices=Choices(optimizer_in_backward=True, blocks=RECOMPUTE)),
    "in backward, in parts": SetUp(
        choices=Choices(optimizer_in_backward=True, micro_batch=1), optimizer=sgd
    ),
    "masters": SetUp(choices=Choices(precision="bf16-mixed", weights=MASTERS), optimizer=sgd),
    "masters in backward": SetUp(
        choices=Choices(precision="bf16-mixed", weights=MASTERS, optimizer_in_backward=True)
    ),
    "fp16": SetUp(choices=Choices(precision="fp16-mixed")),
    "fp16, fused": SetUp(choices=Choices(precision="fp16-mixed", techniques=on("fused_optimizer"))),
    "statistics": SetUp(build=Counting, optimizer=sgd),
    "dropout": SetUp(
        build=lambda: Net(dropout=0.5), choices=Choices(blocks=RECOMPUTE), optimizer=sgd
    ),
    "foreach": SetUp(optimizer=foreach),
    "nesterov": SetUp(optimizer=nesterov),
    "fused": SetUp(choices=Choices(techniques=on("fused_optimizer"))),
    "two groups": SetUp(optimizer=two_groups),
    "8-bit state": SetUp(
        choices=Choices(techniques=on("low_bit_state")),
        build=an_embedding,
        options={"precision": "bf16"},
    ),
}


# -- running out -----------------------------------------------------------------------------------


class Refusing(TorchDispatchMode):
    """Refuses operations, from the first one counted as `at`; counts them and what they make."""

    def __init__(self, at: int = -1, times: int = 1) -> None:
        super().__init__()
        self.count = 0
        self.refused = range(at, at + times)
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if rehearses_here():  # which takes no memory of the device
            return func(*args, **(kwargs or {}))
        self.count += func.namespace == "aten"
        if func.namespace == "aten" and self.count - 1 in self.refused:
            raise torch.OutOfMemoryError(f"no memory for {func}")
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        self.made += [StorageWeakRef(r.untyped_storage()) for r in results if isinstance(r, Tensor)]
        return result

    def still_there(self, run: Run) -> list[int]:
        """What operations made and nobody dropped, but for what they were given."""
        owned = [p for group in run.optimizer.param_groups for p in group["params"]]
        given = (*run.model.parameters(), *run.model.buffers(), *owned, *tree_leaves(BATCHES))
        scaler = run._stage.scaler
        numbers = (scaler._scale, scaler._growth_tracker) if scaler is not None else ()
        kept = (run._transaction._buffers, run._transaction._weights)
        copies = [copy.value for one in kept for copy in one._copies.values()]
        own = storages((given, numbers, copies, list(map(dict, run.optimizer.state.values()))))
        known = {storage._cdata for storage in own}
        return [ref.cdata for ref in self.made if not ref.expired() and ref.cdata not in known]


def storages(values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


#: What a run has found out about the job's loss, which no step that is taken back makes untrue.
LEARNED = ("_rules", "split")


def state_of(run: Run) -> dict[str, Any]:
    """All that a step changes, as copies."""
    stage = run._stage
    owned = [p for group in run.optimizer.param_groups for p in group["params"]]
    scaler, weigher = stage.scaler, stage.weigher
    return copy.deepcopy(
        {
            "model": dict(run.model.named_parameters()),
            "buffers": dict(run.model.named_buffers()),
            "owned": owned,
            "optimizer": [dict(run.optimizer.state.get(p, {})) for p in owned],
            "has state": [p in run.optimizer.state for p in owned],
            "attributes": vars(run.optimizer).keys() & {"grad_scale", "found_inf", "step"},
            "scaler": scaler and [scaler._scale, scaler._growth_tracker],
            "stages": scaler and dict(scaler._per_optimizer_states),
            "weigher": weigher and {k: v for k, v in vars(weigher).items() if k not in LEARNED},
            "random": torch.get_rng_state(),
            "gradients": [p.grad for p in (*run.model.parameters(), *owned)],
            "steps": run.steps,
        }
    )


def assert_same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        leaves, others = tree_leaves(value), tree_leaves(other[name])
        assert len(leaves) == len(others), name
        for a, b in zip(leaves, others, strict=True):
            same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
            assert same, name


def after(run: Run, batches: list[Batch]) -> tuple[list[Tensor], dict[str, Any]]:
    torch.manual_seed(7)
    losses = [run.step(batch) for batch in batches]
    return losses, state_of(run)


@pytest.mark.parametrize(
    ("name", "done"),
    [
        *((name, 1) for name in SET_UPS),
        # The first step makes the optimizer's state.
        *((name, 0) for name in ("plain", "in backward", "fused")),
    ],
)
def test_memory_that_runs_out_anywhere_leaves_everything_as_it_was(name: str, done: int) -> None:
    set_up = SET_UPS[name]
    expected_losses, expected = after(set_up.start(), BATCHES[: done + 1])
    run = set_up.start()
    after(run, BATCHES[:done])
    before = state_of(run)
    at = 0
    while True:
        refusing = Refusing(at)
        try:
            with refusing:
                loss = run.step(BATCHES[done])
        except OutOfMemory:
            assert not refusing.still_there(run)
            refusing.made.clear()
            assert_same(state_of(run), before)
            at += 1
            continue
        # Either nothing was refused any more, or the optimizer came to its end all the same.
        assert loss == expected_losses[-1]
        assert_same(state_of(run), expected)
        if refusing.count <= at:
            break
        at += 1
        run = set_up.start()
        after(run, BATCHES[:done])
    assert at > 30


IN_PARTS = Choices(micro_batch=1)


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("plain", IN_PARTS),
        ("plain", Choices(blocks=RECOMPUTE)),
        ("plain", Choices(optimizer_in_backward=True)),
        ("in backward", IN_PARTS),
        ("micro-batches", Choices(micro_batch=1, blocks=RECOMPUTE)),
        ("dropout", Choices(micro_batch=1)),
        ("fused", Choices(micro_batch=1, techniques=on("fused_optimizer"))),
        ("masters in backward", Choices(precision="bf16-mixed", weights=MASTERS, micro_batch=1)),
        (
            "fp16, fused",
            Choices(precision="fp16-mixed", micro_batch=1, techniques=on("fused_optimizer")),
        ),
    ],
)
def test_the_same_batch_is_run_again_as_if_it_had_been_planned_so(
    name: str, smaller: Choices
) -> None:
    set_up = SET_UPS[name]
    planned_so = dataclasses.replace(set_up, choices=smaller).start()
    expected_losses, expected = after(planned_so, BATCHES[:2])
    refused = 0
    for at in range(0, 400, 7):
        run = set_up.start(smaller)
        torch.manual_seed(7)
        with Refusing(at) as refusing:
            losses = [run.step(BATCHES[0])]
        if not run.events:  # the optimizer came to its end, or nothing was refused
            if refusing.count <= at:
                break
            continue
        refused += 1
        losses.append(run.step(BATCHES[1]))
        assert losses == expected_losses
        assert_same(state_of(run), expected)
        assert run.plan.choices == smaller
        assert [(event.step, event.after.choices) for event in run.events] == [(0, smaller)]
        assert run.events[0].cause.startswith("out of memory (OutOfMemoryError: no memory for aten")
    assert refused > 3


def test_plans_are_tried_one_after_the_other_and_the_error_says_which() -> None:
    run = SET_UPS["plain"].start(IN_PARTS, Choices(micro_batch=1, blocks=RECOMPUTE))
    before = state_of(run)
    words = r"under all 3 plans that were left, which should need 512.0 KiB, 1000 B, 999 B: .* aten"
    with pytest.raises(OutOfMemory, match=words), Refusing(20, times=100_000):
        run.step(BATCHES[0])
    assert_same(state_of(run), before)
    assert len(run.events) == 2
    assert run.step(BATCHES[0]).isfinite()


def test_random_numbers_are_drawn_as_if_the_failed_step_had_not_been() -> None:
    run = SET_UPS["dropout"].start()
    expected, _ = after(SET_UPS["dropout"].start(), BATCHES)
    torch.manual_seed(7)
    losses = []
    for batch in BATCHES:
        with pytest.raises(OutOfMemory), Refusing(40):
            run.step(batch)
        losses.append(run.step(batch))
    assert losses == expected


# -- the optimizer ---------------------------------------------------------------------------------


class Grudging(TorchDispatchMode):
    """Refuses to make anything larger than so many elements."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.refused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        if any(s._cdata not in given and s.nbytes() > 4 * self.most for s in storages(result)):
            self.refused += 1
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return result


def step_of(run: Run, most: int) -> int:
    """Step with gradients of one, with no memory for more than so many elements at a time."""
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    pieces = run._stage.pieces
    assert pieces is not None
    with Grudging(most) as grudging:
        pieces.step()
    return grudging.refused


@pytest.mark.parametrize("name", ["plain", "foreach", "two groups", "masters"])
def test_without_memory_for_the_largest_parameter_no_other_is_stepped(name: str) -> None:
    run = SET_UPS[name].start()
    before = state_of(run)
    with pytest.raises(torch.OutOfMemoryError):
        step_of(run, most=VOCABULARY * WIDTH - 1)
    run._transaction.roll_back(run._stage)
    assert_same(state_of(run), before)


class WithoutRoots(TorchDispatchMode):
    """Refuses square roots: AdamW takes them after it has changed weights and averages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sqrt" in func.__name__:
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "foreach", "two groups"])
def test_a_step_that_breaks_off_in_the_middle_of_a_parameter_leaves_it_as_it_was(name: str) -> None:
    run = SET_UPS[name].start()
    run.step(BATCHES[0])
    before = state_of(run)
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    pieces = run._stage.pieces
    assert pieces is not None
    with pytest.raises(torch.OutOfMemoryError), WithoutRoots():
        pieces.step()
    run._transaction.roll_back(run._stage)
    assert_same(state_of(run), before)


def test_an_optimizer_that_cannot_be_divided_steps_as_a_whole_and_says_if_it_broke_off() -> None:
    run = SET_UPS["plain"].start()
    run.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(torch.OutOfMemoryError):
        step_of(run, most=0)
    assert run.step(BATCHES[0]).isfinite()
    with pytest.raises(torch.OutOfMemoryError):
        step_of(run, most=WIDTH * WIDTH)  # some parameters are smaller
    with pytest.raises(BadInput, match="some weights were stepped already and others were not"):
        run.step(BATCHES[0])


def test_gradients_are_dropped_as_they_are_used() -> None:
    run = SET_UPS["plain"].start()
    step_of(run, most=1 << 20)
    owned = run.optimizer.param_groups[0]["params"]
    assert all(parameter.grad is None for parameter in owned)


# -- which errors --------------------------------------------------------------------------------


def wrapped(inner: BaseException) -> BaseException:
    error = RuntimeError("the backend failed")
    error.inner_exception = inner  # type: ignore[attr-defined]
    return error


def caused(cause: BaseException) -> BaseException:
    error = ValueError("while tuning")
    error.__cause__ = cause
    return error


def cublas(status: str) -> BaseException:
    return RuntimeError(f"CUDA error: CUBLAS_STATUS_{status}")


def from_the_cpu() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


@pytest.mark.parametrize(
    ("error", "refusals", "is_memory"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), 0, True),
        (MemoryError(), 0, True),
        (from_the_cpu(), 0, True),
        (cublas("ALLOC_FAILED when calling `cublasCreate(handle)`"), 0, True),
        (cublas("NOT_INITIALIZED when calling `cublasCreate(handle)`"), 0, True),
        (cublas("NOT_INITIALIZED when calling `cublasSgemm(handle)`"), 0, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), 0, True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), 0, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), 0, False),
        (RuntimeError("FIND was unable to find an engine"), 0, False),
        (RuntimeError("FIND was unable to find an engine"), 1, True),
        (ValueError("out of memory"), 1, False),
        (RuntimeError("my own out of memory"), 0, False),
        (wrapped(torch.OutOfMemoryError("")), 0, True),
        (caused(MemoryError()), 0, True),
        (KeyboardInterrupt(), 0, False),
    ],
)
def test_a_want_of_memory_is_told_from_other_errors(
    error: BaseException, refusals: int, is_memory: bool
) -> None:
    assert ran_out_of_memory(error, refusals) is is_memory


def test_whoever_waits_for_backward_is_behind_all_that_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[int] = []
    grad = torch.autograd.grad

    def note(output: Tensor, *args: Any) -> Any:
        numbers.append(output.grad_fn._sequence_nr())
        return grad(output, *args)

    monkeypatch.setattr(torch.autograd, "grad", note)
    leaf = torch.ones(3, requires_grad=True)
    first_of_this_thread = (leaf + 1).grad_fn._sequence_nr()
    _wait_for_backward_on(torch.device("cpu"))
    (number,) = numbers
    assert number < max(first_of_this_thread, 1)  # what has the largest number is run first


def test_what_a_broken_backward_had_queued_is_freed() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            raise torch.OutOfMemoryError("in the middle of backward")

    def fail() -> StorageWeakRef:
        leaf = torch.ones(3, requires_grad=True)
        saved = leaf.exp()  # made first: its backward waits while the other one fails
        held = StorageWeakRef(saved.untyped_storage())
        with contextlib.suppress(torch.OutOfMemoryError):
            (saved + Failing.apply(leaf)).sum().backward()
        return held

    held = fail()
    assert not held.expired()  # else nothing would be left to free
    free_what_is_left(torch.device("cpu"))
    assert held.expired()


def test_an_accelerators_error_is_told_by_its_code() -> None:
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = 2
    assert ran_out_of_memory(error)
    error.error_code = 700
    assert not ran_out_of_memory(error)


# -- copies on the host ----------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 1 << 24], ids=["group by group", "all as one"])
def test_copies_come_back_whatever_shape_and_type_they_have(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "_TOGETHER", together)
    tensors = [
        torch.randn(3, 4).t(),
        torch.tensor(2.0),
        torch.randn(0, 3),
        torch.randn(4).bfloat16(),
        torch.arange(5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopies()
    copies.keep([tensors[:3], tensors[3:]])
    for tensor in tensors:
        tensor.zero_()
        copies.put_back(tensor)
    assert all(map(torch.equal, tensors, before))
    assert copies.nbytes == sum(tensor.nbytes for tensor in tensors)
    copies.keep([])
    assert copies.nbytes == 0


def test_copies_that_are_done_make_room_for_others() -> None:
    def queued(*done: bool) -> Any:
        return [(1, SimpleNamespace(query=lambda one=one: one)) for one in done]

    for before, after in (((True,), 0), ((True, True, False, True), 2), ((False, True), 2)):
        copies = HostCopies()
        copies._queued.extend(queued(*before))
        copies._begin_more()
        assert len(copies._queued) == after


def test_what_keeps_still_is_copied_once() -> None:
    table = torch.zeros(3)
    copies = HostCopies()
    copies.keep([[table]], still={id(table)})
    table.data += 1  # behind its version's back
    copies.keep([[table]], still={id(table)})
    copies.put_back(table)
    assert torch.equal(table, torch.zeros(3))
    copies.keep([[table]])
    table += 1
    copies.put_back(table)
    assert torch.equal(table, torch.zeros(3))


def test_copies_keep_no_tensor_alive() -> None:
    run = SET_UPS["in backward"].start()
    run.step(BATCHES[0])
    held = [weakref.ref(t) for s in run.optimizer.state.values() for t in s.values()]
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    gc.collect()
    assert not any(tensor() is not None for tensor in held)
    assert run.step(BATCHES[1]).isfinite()
