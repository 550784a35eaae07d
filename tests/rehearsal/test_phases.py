"""A whole job rehearsed: what its phases take, what is refused, and that nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cpu_truth import measure, predict
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from oomph.errors import BadInput, CannotRehearse, UnknownName
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.jobs.sources import job_from_name
from oomph.rehearsal import phases
from oomph.rehearsal.estimation import estimate
from oomph.rehearsal.phases import PHASES, rehearse
from oomph.rehearsal.timeline import Category, Timeline

H200 = find_gpu("h200")
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def job(model: Any = Net, **changes: Any) -> Job:
    given = {
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": "adamw",
        "batch": lambda: torch.randn(64, WIDTH),
    }
    return Job(model=model, **{**given, **changes})


def peak(timeline: Timeline, phase: str) -> int:
    """The most bytes of tensors alive at once during a phase."""
    span = next(span for span in timeline.spans if span.name == phase)
    now = most = 0
    for event, block, is_birth in timeline.stream_of_events():
        now += block.size if is_birth else -block.size
        if span.start <= event < span.stop:
            most = max(most, now)
    return most


def alive(timeline: Timeline, category: Category) -> int:
    """Bytes of a category at the end of the last phase."""
    last = timeline.alive_at(timeline.spans[-1].stop - 1)
    return sum(block.size for block in last if block.category is category)


# -- what it takes --------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
def test_the_phases_follow_each_other(gpu: Any) -> None:
    timeline = rehearse(job(), gpu)
    assert [span.name for span in timeline.spans] == list(PHASES)
    assert all(
        one.stop == other.start
        for one, other in zip(timeline.spans, timeline.spans[1:], strict=False)
    )


@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
def test_weights_and_optimizer_state_are_counted_once(gpu: Any) -> None:
    timeline = rehearse(job(), gpu)
    weights = sum(p.numel() * 4 for p in Net().parameters())
    counters = 4 * len(list(Net().parameters())) if gpu is None else 0  # a GPU's are on the host
    assert alive(timeline, Category.PARAMETER) == weights
    assert alive(timeline, Category.OPTIMIZER) == 2 * weights + counters
    assert alive(timeline, Category.INPUT) == 64 * WIDTH * 4
    assert alive(timeline, Category.GRADIENT) == 0, "zero_grad lets them go"


@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
def test_a_given_model_takes_what_a_built_one_takes(gpu: Any) -> None:
    built, given = rehearse(job(Net), gpu), rehearse(job(Net()), gpu)
    for phase in ("first step", "step", "eval"):
        assert peak(built, phase) == peak(given, phase)


def test_a_given_optimizer_takes_what_a_named_one_takes() -> None:
    model = Net()
    given = job(model, optimizer=torch.optim.AdamW(model.parameters()))
    for phase in ("first step", "step"):
        assert peak(rehearse(given, H200), phase) == peak(rehearse(job(), H200), phase)


@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
def test_the_state_of_a_given_optimizer_is_there_from_the_first_step(gpu: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    timeline = rehearse(job(model, optimizer=optimizer), gpu)
    weights = sum(p.numel() * 4 for p in model.parameters())
    counters = 4 * len(list(model.parameters())) if gpu is None else 0
    build = timeline.alive_at(timeline.spans[0].stop - 1)
    state = sum(b.size for b in build if b.category is Category.OPTIMIZER)
    assert state == 2 * weights + counters
    assert alive(timeline, Category.OPTIMIZER) == state


def test_a_real_batch_takes_what_a_made_one_takes() -> None:
    real = job(batch=torch.randn(64, WIDTH))
    assert peak(rehearse(real, None), "step") == peak(rehearse(job(), None), "step")
    assert predict(job()) == measure(job()).tensors


def test_the_second_step_needs_more_than_the_first_activations() -> None:
    timeline = rehearse(job(optimizer="adam"), None)
    assert peak(timeline, "eval") < peak(timeline, "step")
    assert peak(timeline, "first step") <= peak(timeline, "step")


def test_tied_weights_are_counted_once() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, False))
        model[1].weight = model[0].weight
        return model

    for model in (tied, tied()):
        timeline = rehearse(job(model), H200)
        assert alive(timeline, Category.PARAMETER) == WIDTH * WIDTH * 4
        assert alive(timeline, Category.OPTIMIZER) == 2 * WIDTH * WIDTH * 4
    assert predict(job(tied)).alive == measure(job(tied)).tensors.alive


def test_frozen_weights_get_neither_gradients_nor_state() -> None:
    def half_frozen() -> nn.Module:
        model = Net(2)
        model.blocks[0].requires_grad_(False)
        return model

    timeline = rehearse(job(half_frozen), H200)
    trained = sum(p.numel() * 4 for p in Net(1).parameters())
    assert alive(timeline, Category.PARAMETER) == 2 * trained
    assert alive(timeline, Category.OPTIMIZER) == 2 * trained
    assert predict(job(half_frozen)) == measure(job(half_frozen)).tensors


MANY = {"batch": lambda: torch.randn(8192, WIDTH)}


def test_smaller_micro_batches_lower_the_peak() -> None:
    jobs = [job(**MANY), *(job(micro_batch=size, **MANY) for size in (8192, 2048, 512))]
    whole, one, four, sixteen = (peak(rehearse(each, H200), "step") for each in jobs)
    assert whole == one > four > sixteen


@pytest.mark.parametrize("micro_batch", [64, 32, 24, 8, 5])
def test_micro_batches_are_rehearsed_to_the_byte(micro_batch: int) -> None:
    split = job(micro_batch=micro_batch)
    assert predict(split) == measure(split).tensors


def test_checkpointing_lowers_the_peak() -> None:
    kept, full = (job(checkpointing=how, **MANY) for how in ("none", "full"))
    assert peak(rehearse(full, H200), "step") < peak(rehearse(kept, H200), "step")


def test_checkpointing_is_rehearsed_to_the_byte() -> None:
    full = job(checkpointing="full")
    predicted, measured = predict(full), measure(full).tensors
    # The real step keeps the CPU's random state of each block, which is nobody's activation.
    random_state = torch.get_rng_state().nbytes
    for mark, size in predicted.alive.items():
        states = 4 if mark.endswith("after forward") else 0
        assert measured.alive[mark] == size + states * random_state
    for stretch, size in predicted.peaks.items():
        states = {"after forward": 4, "after backward": 1}.get(stretch.split(", ")[1], 0)
        assert measured.peaks[stretch] == size + states * random_state


def test_bf16_weights_take_half() -> None:
    timeline = rehearse(job(precision="bf16"), H200)
    assert alive(timeline, Category.PARAMETER) == sum(p.numel() * 2 for p in Net().parameters())


def test_a_job_without_an_optimizer_is_only_evaluated() -> None:
    timeline = rehearse(job(optimizer=None), H200)
    assert [span.name for span in timeline.spans] == ["build", "eval", "save"]
    assert alive(timeline, Category.OPTIMIZER) == 0


def test_every_activation_has_a_module_and_an_op() -> None:
    timeline = rehearse(job(), H200)
    activations = [b for b in timeline.blocks if b.category is Category.ACTIVATION]
    inside = [b for b in activations if b.module]
    assert {b.module for b in inside} >= {"blocks.0.norm", "blocks.3.up"}
    assert all(b.op for b in activations)
    gradients = [b for b in timeline.blocks if b.category is Category.GRADIENT]
    assert {b.module for b in gradients} >= {"blocks.0.up", "blocks.3.down"}


# -- what is refused ------------------------------------------------------------------------------


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(BadInput, match="nothing to train"):
        rehearse(job(nn.ReLU), None)


def test_a_frozen_model_is_refused_unless_it_is_only_evaluated() -> None:
    def frozen() -> nn.Module:
        return Net().requires_grad_(False)

    with pytest.raises(BadInput, match="nothing to train"):
        rehearse(job(frozen), H200)
    rehearse(job(frozen, optimizer=None), H200)


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean step"):
        rehearse(job(), None, ("stepp",))


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BadInput, match="no samples"):
        rehearse(job(batch=torch.ones(0, WIDTH)), None)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    with pytest.raises(BadInput, match=r"one number, not shape \(64, 64\)"):
        rehearse(job(loss=lambda model, batch: model(batch)), None)


@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
def test_a_forward_that_raises_names_its_module(gpu: Any) -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(x)

    def build() -> nn.Module:
        model = Net()
        model.blocks[2] = Broken()
        return model

    with pytest.raises(CannotRehearse, match=r"blocks\.2\.down: RuntimeError"):
        rehearse(job(build), gpu)


def test_a_builder_that_raises_is_a_refusal_with_its_words() -> None:
    def build() -> nn.Module:
        raise ValueError("no such width")

    with pytest.raises(CannotRehearse, match="ValueError: no such width"):
        rehearse(job(build), None)


def test_control_flow_that_hangs_on_data_is_refused_with_its_line() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        if torch.logical_xor(out > 0, out > 1)[0, 0]:
            return out.sum()
        return out.mean()

    with pytest.raises(CannotRehearse, match=r"test_phases\.py:\d+ branches on a value"):
        rehearse(job(loss=loss), H200)


# -- what stays as it was -------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_a_given_model_is_left_untouched(gpu: Any, precision: str) -> None:
    model = Net().eval()
    model.blocks[0].requires_grad_(False)
    seen: list[Any] = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    before = copy.deepcopy(model.state_dict())
    hooks = [len(module._forward_hooks) for module in model.modules()]

    rehearse(job(model, precision=precision, checkpointing="full"), gpu)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert not any(module.training for module in model.modules())
    assert [p.requires_grad for p in model.blocks[0].parameters()] == [False] * 6
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())
    assert not any(isinstance(p, FakeTensor) for p in model.parameters())
    assert "forward" not in vars(model.blocks[0])
    model(torch.ones(2, WIDTH))


def test_a_given_optimizer_is_left_untouched() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())

    rehearse(job(model, optimizer=optimizer), H200)

    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][name]) for name, value in state.items())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [*model.parameters()]
    optimizer.step()


def fail(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(batch)
        raise ValueError("on purpose")


def test_an_error_is_told_with_the_module_that_failed_whatever_is_being_handled() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("too warm")

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Fails()))

    job = Job(model, nn.MSELoss(), batch=lambda: (torch.ones(2, 4), torch.ones(2, 4)))
    try:
        raise torch.OutOfMemoryError
    except torch.OutOfMemoryError:
        with pytest.raises(CannotRehearse, match=r"failed in 1\.1: ValueError: too warm"):
            rehearse(job, None)


def test_a_rehearsal_that_fails_leaves_autocast_as_it_was() -> None:
    torch.set_autocast_dtype("cpu", torch.bfloat16)  # CUDA's is another
    with pytest.raises(CannotRehearse):
        rehearse(Job(lambda: nn.Linear(2, 2), fail, "sgd", torch.ones(2, 2)), H200)
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


@pytest.mark.parametrize("fails", [False, True], ids=["after success", "after failure"])
@pytest.mark.parametrize("gpu", [None, H200], ids=["cpu", "gpu"])
def test_the_process_is_as_before(gpu: Any, fails: bool) -> None:
    def state() -> list[Any]:
        x = torch.ones(2, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes = [
                (x @ x).dtype,
                torch.cat([x, (x @ x)]).dtype,
                torch.nn.functional.layer_norm(x @ x, (2,)).dtype,
                torch.nn.functional.softmax(x @ x, -1).dtype,
            ]
        return [
            *dtypes,
            dict(vars(torch.cuda)),
            FakeTensor.device,
            torch._subclasses.FakeTensor,
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cpu"),
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_cache_enabled(),
            torch.is_grad_enabled(),
            torch.version.cuda,
            torch.utils.swap_tensors,
            torch.is_autocast_enabled,
            torch.clear_autocast_cache,
            torch.nn.modules.lazy.LazyModuleMixin.__init__,
            list(torch.utils._foreach_utils._foreach_supported_types),
            torch.utils._python_dispatch._get_current_dispatch_mode(),
            torch.overrides._get_current_function_mode(),
            torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        ]

    before = state()
    if fails:
        with pytest.raises(CannotRehearse, match="on purpose"):
            rehearse(job(loss=fail), gpu)
    else:
        rehearse(job(precision="bf16-mixed"), gpu)
    after = state()
    assert torch.equal(before.pop(), after.pop())
    assert before == after


def test_the_random_stream_is_left_where_it_was() -> None:
    model = nn.Sequential(Net(1), nn.Dropout(0.5))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    rehearse(job(model), H200)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_leaving_out_repeated_micro_batches_changes_no_byte(
    monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    job = job_from_name(
        "smollm2-135m",
        batch=7,
        seq=64,
        micro_batch=1,
        precision="bf16-mixed",
        checkpointing=checkpointing,
    )
    shortened = estimate(job, "h200", phases=("first step", "step", "eval"))
    monkeypatch.setattr(phases, "_first_of_each_size", list)
    whole = estimate(job, "h200", phases=("first step", "step", "eval"))
    assert len(whole.timeline.blocks) > 1.5 * len(shortened.timeline.blocks)
    assert shortened.phases == whole.phases


def test_a_smaller_last_micro_batch_is_rehearsed_too() -> None:
    parts = [torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    assert [len(part) for part in phases._first_of_each_size(parts)] == [2, 2, 2, 1]
    assert [len(part) for part in phases._first_of_each_size(parts[:4])] == [2, 2, 2]


class _Detector(nn.Module):
    """Gives losses in training, and else what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.net(x)
        return {"loss": out.square().mean()} if self.training else list(out.unique())


def test_a_model_whose_evaluation_only_data_can_tell_is_trained() -> None:
    batch = torch.rand(6, 4)
    job = Job(_Detector(), lambda model, x: sum(model(x).values()), "sgd", batch)
    timeline = rehearse(job, None)
    assert any("evaluation cannot be rehearsed" in note for note in timeline.notes)
    with pytest.raises(CannotRehearse, match="only real data can tell"):
        rehearse(job, None, ("eval",))


@pytest.mark.parametrize("is_first", [True, False])
def test_what_the_user_compiled_is_rehearsed_and_compiles_afterwards(is_first: bool) -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def twice(x: Tensor) -> Tensor:
        return x * 2

    model, batch = nn.Linear(4, 4), torch.rand(6, 4)
    if not is_first:
        twice(model(batch))
    job = Job(model, lambda model, x: twice(model(x)).square().mean(), "sgd", batch)
    rehearse(job, None)
    assert torch.equal(twice(batch), batch * 2)
