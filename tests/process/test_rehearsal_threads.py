"""What a rehearsal replaces, it replaces for the threads that rehearse (rule 13)."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import oomph
from oomph import Job, find_gpu
from oomph.process.rehearsal_threads import rehearses_here, rehearsing, replaced_here
from oomph.rehearsal.phases import rehearse
from oomph.rehearsal.script import rehearse_script
from oomph.rehearsal.world import pretend
from oomph.techniques.attention_rows import close_gaps, closes_gaps
from oomph.techniques.autocast import use_tf32

GPU = find_gpu("h200")


class Mixed(nn.Module):
    """One of each op that a rehearsal gives other kernels, or other rules of autocast."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward = nn.Linear(width, 3 * width)
        self.norm = nn.BatchNorm1d(width)
        self.rms = nn.RMSNorm(width)
        self.drop = nn.Dropout(0.2)
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).unsqueeze(1).chunk(3, dim=-1)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).squeeze(1)
        x = self.rms(self.norm(x.transpose(1, 2)).transpose(1, 2))
        x = torch.cat([self.drop(x), torch.softmax(x, -1).exp()], 1)
        return self.outward(x).log_softmax(-1)


def job(width: int = 32, depth: int = 2, precision: str = "bf16-mixed") -> Job:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*(Mixed(width) for _ in range(depth)))

    return Job(
        make, lambda m, x: m(x).sum(), "adamw", torch.zeros(4, 8, width), precision=precision
    )


@contextmanager
def busy_rehearsing() -> Iterator[Callable[[], int]]:
    """While active, another thread rehearses without end; gives how often it was done."""
    done, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            rehearse(job(), GPU)
            done[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: done[0]
    finally:
        stop.set()
        thread.join()


def train(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for at in range(steps):
        x = torch.randn(4, 8, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=at % 2 == 1):
            loss = model(x).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def replaced_names() -> dict[str, Any]:
    """Some of each kind of what a rehearsal replaces."""
    names = {
        "FakeTensor": torch._subclasses.FakeTensor,
        "device": FakeTensor.__dict__.get("device"),
        "numpy": FakeTensor.__dict__.get("numpy"),
        "enter": record_function.__enter__,
        "default_generators": torch.cuda.default_generators,
        "version": torch.version.cuda,
        "sdpa": F.scaled_dot_product_attention,
        "modules": tuple(map(type, (torch, torch.cuda, torch.version))),
        "swap": torch.utils.swap_tensors,
        "deepcopy": getattr(FakeTensorMode, "__deepcopy__", None),
    }
    for name in ("Generator", "inference_mode", "is_autocast_enabled", "manual_seed", "save"):
        names[name] = getattr(torch, name)
    for name in ("is_available", "Stream", "Event", "memory_allocated", "current_stream"):
        names[f"cuda.{name}"] = getattr(torch.cuda, name)
    return names


def test_estimates_of_several_threads_are_those_of_one_alone() -> None:
    before = replaced_names()
    jobs = [job(width, depth) for width in (16, 32, 64) for depth in (1, 3)] * 2
    alone = [oomph.estimate(one, gpu=GPU).as_dict() | {"seconds": 0} for one in jobs[:6]] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: oomph.estimate(one, gpu=GPU), jobs))
    assert [one.as_dict() | {"seconds": 0} for one in found] == alone
    after = replaced_names()
    assert {name for name in before if after[name] is not before[name]} <= {"modules"}
    assert after["modules"] == before["modules"]


def test_plans_of_two_threads_are_those_of_one_alone() -> None:
    jobs = [job(32, 2, "fp32"), job(48, 3, "fp32")]
    need = [oomph.estimate(one, gpu=GPU).smallest_budget for one in jobs]

    def choose(at: int) -> Any:
        plan = oomph.plan(jobs[at], gpu=GPU, budget=need[at] - 2048, allow="exact")
        return plan.choices, plan.predicted.peak

    alone = [choose(at) for at in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(choose, range(2))) == alone


def test_training_in_another_thread_is_not_disturbed() -> None:
    alone = train(20)
    with busy_rehearsing() as rehearsals:
        while rehearsals() < 3:  # they begin and end in the midst of a training
            assert train(20) == alone  # to the bit: dropout draws what it would have drawn


@pytest.mark.parametrize(
    "op",
    [
        "addcdiv",
        "cat",
        "exp",
        "layer_norm",
        "linear",
        "prod",
        "sdpa",
        "softmax",
        "tensordot",
        "gru",
    ],
)
def test_autocast_of_another_thread_casts_as_ever(op: str) -> None:
    torch.manual_seed(0)
    gru = nn.GRU(8, 8)
    x, y = torch.randn(4, 8, 8), torch.randn(4, 8, 8)

    def run() -> Tensor:
        half = x.bfloat16()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            if op == "addcdiv":
                return torch.addcdiv(x, half, y)
            if op == "cat":
                return torch.cat([half, y])
            if op == "layer_norm":
                return F.layer_norm(half, (8,))
            if op == "linear":
                return F.linear(x, y[0])
            if op == "prod":
                return half.prod()
            if op == "sdpa":
                return F.scaled_dot_product_attention(x, y, y, dropout_p=0.5)
            if op == "tensordot":
                return (
                    torch.tensordot(x, y, 1) if x.dim() == 1 else torch.tensordot(x, y, ([2], [2]))
                )
            if op == "gru":
                return gru(x)[0]
            return getattr(torch, op)(half, *([-1] if op == "softmax" else []))

    expected = run()
    inside, finished = threading.Event(), threading.Event()

    def look() -> None:
        with pretend(GPU):
            inside.set()
            assert finished.wait(60)

    with ThreadPoolExecutor(1) as pool:
        rehearsed = pool.submit(look)
        assert inside.wait(60)
        found = run()
        finished.set()
        rehearsed.result()
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


def beside_a_rehearsal(look: Callable[[], Any]) -> tuple[Any, Any]:
    """What another thread sees beside a rehearsal, and what the rehearsal itself sees."""
    with ThreadPoolExecutor(1) as pool, pretend(GPU):
        return pool.submit(look).result(), look()


@pytest.mark.parametrize(
    "look",
    [
        lambda: torch.cuda.is_available(),
        lambda: torch.version.cuda,
        lambda: type(torch.Generator("cpu")).__module__,
        lambda: torch._subclasses.FakeTensor.__name__,
        lambda: type(torch.inference_mode()).__name__,
        lambda: len(torch.cuda.default_generators),
        lambda: torch.cuda.Stream.__module__,
        lambda: str(FakeTensorMode().from_tensor(torch.zeros(2))),
    ],
)
def test_another_thread_sees_the_process_as_it_is(look: Callable[[], Any]) -> None:
    plain = look()
    there, here = beside_a_rehearsal(look)
    assert there == plain
    assert here != plain or torch.cuda.is_available()


def normalized(x: Tensor) -> Tensor:
    """Ops with other kernels in a rehearsal, and of these what PyTorch's tracer takes apart."""
    x = F.linear(x, torch.ones(8, 8))
    x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
    x = F.dropout(F.rms_norm(x, (8,)), 0.3)
    return F.batch_norm(x, None, None, training=True).softmax(-1).log_softmax(-1)


def joined(x: Tensor) -> Tensor:
    """Ops that autocast casts on the CPU alone, on a GPU alone, and on both."""
    x = torch.cat([torch.stack([x, x.exp()]), torch.einsum("abc,adc->abd", x, x)[None]])
    return F.cross_entropy(x[0, 0], torch.arange(8)) + x.sum()


def without_gradients(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def asking(x: Tensor) -> Tensor:
    """Questions that a rehearsal answers itself."""
    there = torch.cuda.is_available() or torch.version.cuda is not None
    return x + 1 if there or torch.is_autocast_enabled("cuda") else x * 2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("function", [normalized, joined, without_gradients, asking])
def test_what_another_thread_compiles_is_what_it_would_be(
    function: Callable[[Tensor], Tensor], autocast: bool
) -> None:
    def compiled() -> list[str]:
        """The function, traced down to what a compiler is given."""
        torch._dynamo.reset()
        graphs: list[str] = []

        def keep(graph: fx.GraphModule, _: Any) -> Any:
            graphs.append(str(graph.code))
            return make_boxed_func(graph.forward)

        def backend(graph: fx.GraphModule, inputs: Any) -> Any:
            return aot_module_simplified(graph, inputs, fw_compiler=keep)

        run = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run(torch.ones(2, 8, 8, requires_grad=function is not without_gradients))
        return graphs

    alone = compiled()
    with ThreadPoolExecutor(1) as pool, pretend(GPU):
        beside = pool.submit(compiled).result()
    afterwards = compiled()
    torch._dynamo.reset()
    assert alone
    assert beside == alone
    assert afterwards == alone


def test_the_random_stream_of_the_process_is_its_own() -> None:
    state = torch.get_rng_state()
    with ThreadPoolExecutor(1) as pool:

        def make() -> nn.Module:
            torch.manual_seed(7)
            assert torch.initial_seed() == 7
            torch.randperm(8)  # drawn for real
            assert torch.equal(pool.submit(torch.get_rng_state).result(), state)
            return nn.Linear(4, 4)

        rehearse(Job(make, lambda m, x: m(x).sum(), "sgd", torch.zeros(2, 4)), GPU)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_drawn_in_a_rehearsal_follows_its_seed() -> None:
    class Shuffled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            torch.manual_seed(7)
            self.order = torch.randperm(8).tolist()

    seen: list[Any] = []  # filled by `watch`: what the job fills is emptied again
    rehearse(
        Job(Shuffled, lambda m, x: m(x).sum(), "sgd", torch.zeros(2, 4)),
        GPU,
        ("build",),
        watch=lambda model, *_: seen.append(model.order),
    )
    expected = torch.randperm(8, generator=torch.Generator().manual_seed(7)).tolist()
    assert seen == [expected]


def test_tf32_is_not_switched_by_a_rehearsal() -> None:
    before = torch.get_float32_matmul_precision()
    with rehearsing():
        put_back = use_tf32()
        assert torch.get_float32_matmul_precision() == before
        put_back()


def test_gaps_that_another_thread_closes_stay_closed() -> None:
    undo = close_gaps()
    try:
        with busy_rehearsing() as rehearsals:
            while rehearsals() < 2:
                assert closes_gaps()
        assert closes_gaps()
    finally:
        undo()
    assert not closes_gaps()


def test_files_of_another_thread_are_written_while_a_script_is_rehearsed(tmp_path: Path) -> None:
    state, own = tmp_path / "state.pt", tmp_path / "by_the_script.txt"
    script = tmp_path / "train.py"
    script.write_text(
        "\n".join(
            (
                "import threading, time, torch",
                "from pathlib import Path",
                f"def write(): Path({str(own)!r}).write_text('written')",
                "thread = threading.Thread(target=write)",
                "thread.start(); thread.join()",
                f"assert Path({str(own)!r}).read_text() == 'written'",
                "model = torch.nn.Linear(8, 8).cuda()",
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
                "while True:",
                "    model(torch.randn(4, 8, device='cuda')).sum().backward()",
                "    optimizer.step()",
            )
        )
    )
    stop, saved = threading.Event(), []

    def work() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while not stop.is_set():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()  # the rehearsal counts and stops the script's own alone
            torch.save(model.state_dict(), state)
            with tempfile.NamedTemporaryFile() as temporary:
                saved.append((state.stat().st_size, Path(temporary.name).parent))
            state.unlink()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        timelines = [rehearse_script(script, gpu=GPU) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert len({size for size, _ in saved}) == 1
    assert {folder for _, folder in saved} == {Path(tempfile.gettempdir())}
    assert not own.exists()
    assert {timeline.notes[0] for timeline in timelines} == {"stopped after 2 optimizer steps"}
    assert len({len(timeline.blocks) for timeline in timelines}) == 1


def test_what_dies_in_another_thread_is_written_down_by_the_rehearsal() -> None:
    """A garbage collection runs in whichever thread happens to begin it."""
    with ThreadPoolExecutor(1) as pool, pretend(GPU) as recorder, recorder.phase("build"):
        held = [torch.ones(1024, device="cuda")]
        events, alive = recorder.timeline.events, recorder.allocated
        pool.submit(held.clear).result()
        assert (recorder.timeline.events, recorder.allocated) == (events, alive)
        torch.ones(16, device="cuda")
        assert recorder.timeline.blocks[0].death == events


def test_a_timeline_is_not_changed_by_what_dies_afterwards() -> None:
    with pretend(GPU) as recorder:
        held = [torch.ones(1024, device="cuda")]
    events = recorder.timeline.events
    with pretend(GPU):
        held.clear()
    assert recorder.timeline.events == events
    assert recorder.timeline.blocks[0].death is None


def test_a_rehearsal_may_be_nested_and_is_over_at_its_end() -> None:
    with rehearsing() as outer:
        with rehearsing() as inner:
            assert inner is outer
        assert rehearses_here()
    assert not rehearses_here()


def test_who_keeps_a_stand_in_gets_the_real_function_afterwards() -> None:
    class Owner:
        @staticmethod
        def name() -> str:
            return "real"

    kept = []
    for number in ("first", "second"):
        with rehearsing(), replaced_here(Owner, "name", lambda number=number: number):
            kept.append(Owner.name)
            assert kept[0]() == number  # of the rehearsal that is on
    assert [name() for name in kept] == ["real", "real"]
    assert Owner.name() == "real"


def test_a_class_that_is_kept_from_a_rehearsal_is_the_real_one_afterwards() -> None:
    with pretend(GPU):
        kept = torch.inference_mode
        with kept():
            assert not torch.is_inference_mode_enabled()
    with kept():
        assert torch.is_inference_mode_enabled()
    assert isinstance(torch.inference_mode(), kept)


def test_another_thread_gives_its_warnings_and_keeps_its_filters() -> None:
    def warn() -> int:
        with warnings.catch_warnings(record=True) as given:
            warnings.warn("something", UserWarning, stacklevel=1)
        return len(given)

    with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with pretend(GPU):
            assert pool.submit(warn).result() == 1
            assert warn() == 0
            with pretend(GPU):
                assert warn() == 0
            assert warn() == 0
            pool.submit(warnings.simplefilter, "error", BytesWarning).result()
        assert warnings.filters[0][::2] == ("error", BytesWarning, 0)
        assert warnings.filters[1:] == before
        assert warn() == 1


def test_threads_of_autograd_take_part_in_the_rehearsal_whose_backward_they_run() -> None:
    """A backward that begins more than sixty others inside of each other goes on in a new one."""
    threads: SimpleQueue[tuple[int, bool]] = SimpleQueue()

    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.depth = depth

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x, self.depth)

        def inside(self, x: Tensor, depth: int) -> Tensor:
            if depth == 0:
                threads.put((threading.get_ident(), rehearses_here() and torch.cuda.is_available()))
                return F.dropout(x, 0.5)
            again: Tensor = checkpoint(self.inside, x, depth - 1, use_reentrant=True)
            return again

    def blocks(depth: int) -> list[int]:
        job = Job(
            lambda: nn.Sequential(nn.Linear(64, 64), Nested(depth)),
            lambda m, x: m(x).sum(),
            "sgd",
            torch.ones(16, 64),
        )
        timeline = rehearse(job, GPU, ("build", "step"), skip_first_step=True)
        inside = [b.size for b in timeline.blocks if b.module == "1" and b.phase == "step"]
        assert all(b.death is not None for b in timeline.blocks if b.module == "1")
        return sorted(set(inside))

    few, many = blocks(2), blocks(62)
    found = {threads.get() for _ in range(threads.qsize())}
    assert len({thread for thread, _ in found}) == 2
    assert all(rehearses for _, rehearses in found)
    assert many == few
