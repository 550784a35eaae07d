"""A saved run goes on as if it had never stopped; what is saved is plain; what is damaged, another
model's or does not fit on the disk is refused in words, and nothing is lost."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_plans import plan_with
from switched_on import on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import oomph
from benchmarks.profiler_memory import measure_cpu_peak
from oomph.errors import BadCheckpoint, BadInput, DiskFull, OomphError, WrongCheckpoint
from oomph.jobs.job import Job
from oomph.memory.limits import HostLimits
from oomph.plans.choices import Choices
from oomph.runs import checkpoint_folder, tensor_files
from oomph.runs.batches import Batches
from oomph.runs.checkpoint_folder import checkpoints
from oomph.runs.loading import Resumed, load_checkpoint
from oomph.runs.nested_state import put_together, take_apart
from oomph.runs.run import Run, apply, resume
from oomph.runs.saving import checksum_of
from oomph.runs.tensor_files import MappedTensors, check_file, size_of, write_tensors
from oomph.runs.training import Saving, train

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
CLASSES, WIDTH = 16, 32


# -- small jobs ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied weights, dropout, running statistics, and a weight that is not contiguous."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, width)
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(2)))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.mix = nn.Linear(width, 2 * width)
        self.back = nn.Linear(2 * width, width)
        self.back.weight = nn.Parameter(torch.randn(2 * width, width).mul_(0.1).t())
        self.head = nn.Linear(width, CLASSES)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.drop(self.blocks(x).tanh())
        x = x + self.back(self.mix(x).relu())
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


class NoNorm(Net):
    """The same without a module that needs the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def some_batch(seed: int) -> Batch:
    ids = torch.randint(CLASSES, (4, 6), generator=torch.Generator().manual_seed(seed))
    targets = ids.roll(1, 1)
    targets[0, : seed % 5] = -100
    return ids, targets


BATCHES = [some_batch(seed) for seed in range(8)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    slow = [p for p in model.parameters() if p.dim() < 2]
    fast = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW([{"params": fast}, {"params": slow, "weight_decay": 0.0}], lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def start(
    choices: Choices = Choices(),  # noqa: B008
    build: Callable[[], nn.Module] = Net,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    clip_norm: float | None = None,
) -> Run:
    model = build()
    if choices.precision == "bf16":
        model.to(torch.bfloat16)
    optimizer = make(model)
    precision = choices.precision
    job = Job(model, loss_of, optimizer, BATCHES[0], precision=precision, clip_norm=clip_norm)
    return apply(plan_with(choices, model, optimizer, BATCHES[0]), job)


def losses(run: Run, batches: list[Batch]) -> list[float]:
    return [float(run.step(batch)) for batch in batches]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- the same losses -------------------------------------------------------------------------------


def everything_may_go_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is."""
    monkeypatch.setattr("oomph.techniques.disk_state.LEAST", 0)
    monkeypatch.setattr("oomph.techniques.disk_weights.LEAST", 0)


WEIGHTS_ON_DISK = Choices(
    optimizer_on="host", weights_away=("blocks.0", "blocks.1"), weights_away_on="disk"
)

WAYS = {
    "plain": (Choices(), Net, adamw),
    "recompute": (Choices(blocks={"blocks.0": "recompute"}), Net, adamw),
    "parts": (Choices(micro_batch=1), NoNorm, adamw),
    "in backward": (Choices(optimizer_in_backward=True), Net, adamw),
    "on the host": (Choices(optimizer_on="host"), Net, adamw),
    "masters on the host": (
        Choices(optimizer_on="host", weights="bf16 with fp32 masters"),
        Net,
        adamw,
    ),
    "on the disk": (Choices(optimizer_on="host", disk_share=1.0), Net, adamw),
    "masters on the host, some on the disk": (
        Choices(optimizer_on="host", weights="bf16 with fp32 masters", disk_share=0.5),
        Net,
        adamw,
    ),
    "masters on the disk": (
        Choices(optimizer_on="host", weights="bf16 with fp32 masters", disk_share=1.0),
        Net,
        adamw,
    ),
    "weights on the disk": (WEIGHTS_ON_DISK, Net, adamw),
    "masters and weights on the disk": (
        dataclasses.replace(WEIGHTS_ON_DISK, weights="bf16 with fp32 masters", disk_share=1.0),
        Net,
        adamw,
    ),
    "gradients on the disk": (
        Choices(optimizer_on="host", micro_batch=2, gradient_room=0, gradients_on="disk"),
        NoNorm,
        adamw,
    ),
    "fused": (Choices(techniques=on("fused_optimizer")), Net, adamw),
    "masters": (Choices(weights="bf16 with fp32 masters"), Net, adamw),
    "masters in backward": (
        Choices(weights="bf16 with fp32 masters", optimizer_in_backward=True, micro_batch=2),
        NoNorm,
        adamw,
    ),
    "8 bits": (Choices(techniques=on("low_bit_state")), Net, adamw),
    "chunked": (Choices(head="head", loss_chunk=5, micro_batch=2), NoNorm, adamw),
    "bf16": (Choices(precision="bf16-mixed"), Net, adamw),
    "bf16 in 8 bits": (Choices(precision="bf16", techniques=on("low_bit_state")), Net, adamw),
    "sgd": (Choices(), Net, sgd),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_the_losses_of_one_that_was_never_stopped(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.techniques.low_bit_state.SMALLEST", 64)
    everything_may_go_to_the_disk(monkeypatch)
    one, other = start(*WAYS[way]), start(*WAYS[way])
    torch.manual_seed(1)
    expected = losses(one, BATCHES)
    torch.manual_seed(1)
    assert losses(other, BATCHES[:3]) == expected[:3]
    other.save(tmp_path)
    assert losses(other, BATCHES[3:4]) == expected[3:4]

    torch.manual_seed(99)
    again = start(*WAYS[way])
    resumed = again.load(tmp_path)
    assert (resumed.step, again.steps, resumed.notes) == (3, 3, ())
    assert losses(again, BATCHES[3:]) == expected[3:]
    one.undo()
    again.undo()
    assert_same(weights_of(again.model), weights_of(one.model))
    assert_same(again.optimizer.state_dict(), one.optimizer.state_dict())


@pytest.mark.parametrize(
    ("on_disk", "way"),
    [
        ("on the disk", "plain"),
        ("masters on the disk", "masters"),
        ("weights on the disk", "plain"),
        ("masters and weights on the disk", "masters"),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_on_the_disk_is_saved_piece_by_piece(
    steps: int, on_disk: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    run = start(*WAYS[on_disk])
    plain = start(*WAYS[way])
    largest = max(parameter.nbytes for parameter in plain.model.parameters())
    for one in (run, plain):
        torch.manual_seed(1)
        losses(one, BATCHES[:steps])
    with monkeypatch.context() as patch:
        patch.setattr("oomph.techniques.host_state.HostState.show", None)
        patch.setattr("oomph.techniques.host_masters.HostMasters.show_numbers", None)
        tiny = HostLimits(memory=largest, memory_limit="a tiny machine", lockable=None)
        patch.setattr("oomph.memory.limits.host_limits", lambda *_: tiny)
        run.save(tmp_path / "disk")
    plain.save(tmp_path / "plain")
    saved, expected = (load_checkpoint(tmp_path / name) for name in ("disk", "plain"))
    assert_same(saved.model_state, expected.model_state)
    assert_same(saved.optimizer_state, expected.optimizer_state)
    strides = [{n: t.stride() for n, t in one.model_state.items()} for one in (saved, expected)]
    assert strides[0] == strides[1]
    run.undo()
    plain.undo()
    assert_same(weights_of(run.model), weights_of(plain.model))


@pytest.mark.parametrize("build", [Net, NoNorm])
def test_a_step_whose_gradients_wait_on_the_disk_is_made_before_it_is_saved(
    build: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    plain = Choices(micro_batch=2 if build is NoNorm else None)
    leaves = dataclasses.replace(plain, optimizer_on="host", gradient_room=0, gradients_on="disk")
    runs = {name: start(c, build, clip_norm=0.1) for name, c in (("disk", leaves), ("own", plain))}
    for run in runs.values():
        torch.manual_seed(1)
        losses(run, BATCHES[:3])
    host = runs["disk"]._stage.host
    assert host is not None and not host._gradients.is_empty, "the step is only begun"
    for name, run in runs.items():
        run.save(tmp_path / name)
    saved, expected = (load_checkpoint(tmp_path / name) for name in runs)
    assert_same(saved.model_state, expected.model_state)
    assert_same(saved.optimizer_state, expected.optimizer_state)
    after = []
    for run in runs.values():
        torch.manual_seed(2)
        after.append(losses(run, BATCHES[3:]))
        run.undo()
    assert after[0] == after[1]


def test_masters_on_the_disk_go_on_from_a_plain_checkpoint_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_may_go_to_the_disk(monkeypatch)
    plain, run = start(*WAYS["masters"]), start(*WAYS["masters on the disk"])
    torch.manual_seed(1)
    losses(plain, BATCHES[:3])
    losses(run, BATCHES[:1])
    plain.save(tmp_path)
    expected = losses(plain, BATCHES[3:])
    run.load(tmp_path)
    assert losses(run, BATCHES[3:5]) == expected[:2]
    run.save(tmp_path)
    run.undo()
    again = start(*WAYS["masters"])
    again.load(tmp_path)
    assert losses(again, BATCHES[5:]) == expected[2:]


def test_a_run_that_went_on_can_go_back(tmp_path: Path) -> None:
    run = start()
    torch.manual_seed(1)
    losses(run, BATCHES[:2])
    run.save(tmp_path)
    expected = losses(run, BATCHES[2:])
    run.load(tmp_path)
    assert run.steps == 2
    assert losses(run, BATCHES[2:]) == expected


def test_a_checkpoint_before_the_first_step_is_whole(tmp_path: Path) -> None:
    run = start()
    torch.manual_seed(1)
    run.save(tmp_path)
    expected = losses(run, BATCHES)
    again = start()
    assert again.load(tmp_path).step == 0
    assert losses(again, BATCHES) == expected


def test_resume_applies_the_saved_plan(tmp_path: Path) -> None:
    run = start(Choices(micro_batch=2), NoNorm)
    torch.manual_seed(1)
    losses(run, BATCHES[:2])
    run.save(tmp_path)
    expected = losses(run, BATCHES[2:])
    model = NoNorm()
    again = resume(tmp_path, Job(model, loss_of, adamw(model), BATCHES[0]))
    assert again.plan == run.plan
    assert again.resumed is not None and again.resumed.notes == ()
    assert losses(again, BATCHES[2:]) == expected


def test_a_resume_that_is_refused_leaves_no_plan_behind(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path)
    model = Net()
    with pytest.raises(OomphError):
        resume(tmp_path, Job(model, loss_of, sgd(model), BATCHES[0]))
    assert apply(
        plan_with(Choices(), model, sgd(model), BATCHES[0]),
        Job(model, loss_of, sgd(model), BATCHES[0]),
    )


@pytest.mark.parametrize(
    "then, now", [("parts", "chunked"), ("plain", "masters"), ("8 bits", "plain")]
)
def test_another_plan_goes_on_from_the_same_checkpoint_and_says_so(
    then: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.techniques.low_bit_state.SMALLEST", 64)
    run, other = start(*WAYS[then]), start(*WAYS[now])
    for one in (run, other):
        for module in one.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # parts draw other numbers than the whole
    losses(run, BATCHES[:3])
    run.save(tmp_path)
    (note,) = other.load(tmp_path).notes
    assert note.startswith("the plan is another (")
    exact = now == "chunked"
    expected = losses(run, BATCHES[3:])
    assert losses(other, BATCHES[3:]) == pytest.approx(expected, rel=1e-5 if exact else 2e-2)


def test_weights_of_another_type_are_rounded_and_that_is_told(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path)
    other = start(Choices(precision="bf16"))
    notes = other.load(tmp_path).notes
    told = "embed.weight was saved as torch.float32 and is torch.bfloat16 in this model"
    assert told in notes
    assert_same(other.model.embed.weight.data, run.model.embed.weight.data.bfloat16())


def test_fp16s_loss_scale_is_kept(tmp_path: Path) -> None:
    run = start(Choices(precision="fp16-mixed"))
    assert run._stage.scaler is not None
    run.step(BATCHES[0])
    run._stage.scaler.update(512.0)
    run.save(tmp_path)
    again = start(Choices(precision="fp16-mixed"))
    again.load(tmp_path)
    assert again._stage.scaler is not None
    assert again._stage.scaler.state_dict() == run._stage.scaler.state_dict()
    assert again._stage.scaler.get_scale() == 512.0
    assert start().load(tmp_path).notes != ()


def test_all_random_streams_are_kept(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path)

    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    expected = draw()
    draw()
    run.load(tmp_path)
    assert draw() == expected


# -- plain PyTorch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "fused", "masters", "8 bits"])
def test_a_checkpoint_loads_into_plain_pytorch(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.techniques.low_bit_state.SMALLEST", 64)
    run = start(*WAYS[way])
    losses(run, BATCHES[:3])
    run.save(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    model = Net()
    optimizer = adamw(model)
    model.load_state_dict(checkpoint.model_state)
    optimizer.load_state_dict(checkpoint.optimizer_state)
    run.undo()
    assert_same(weights_of(model), weights_of(run.model))
    assert_same(optimizer.state_dict(), run.optimizer.state_dict())
    assert checkpoint.step == 3


class Pictures(nn.Module):
    """A convolution whose weight may lie in memory in another order than its dimensions have."""

    def __init__(self, permuted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 48)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        if permuted:
            weight = self.conv.weight.detach()
            self.conv.weight = nn.Parameter(weight.permute(0, 2, 1).contiguous().permute(0, 2, 1))
        self.head = nn.Linear(48, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.conv(x))


@pytest.mark.parametrize(
    "choices",
    [
        Choices(techniques=on("fused_optimizer")),
        Choices(techniques=on("low_bit_state")),
        WAYS["masters on the disk"][0],
        dataclasses.replace(WEIGHTS_ON_DISK, weights_away=("conv",)),
    ],
    ids=["fused", "8 bits", "masters on the disk", "weights on the disk"],
)
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_weights_may_lie_in_memory_in_another_order_than_when_saved(
    choices: Choices, saved: bool, loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.techniques.low_bit_state.SMALLEST", 64)
    everything_may_go_to_the_disk(monkeypatch)
    run = start(choices, lambda: Pictures(saved))
    losses(run, BATCHES[:2])
    run.save(tmp_path)
    again = start(choices, lambda: Pictures(loaded))
    again.load(tmp_path)
    expected = losses(run, BATCHES[2:])
    # Only 8-bit state is rounded once more where it is put into another order.
    same = saved == loaded or "low_bit_state" not in choices.techniques
    assert losses(again, BATCHES[2:]) == pytest.approx(expected, rel=1e-5 if same else 0.02)
    plain, model = load_checkpoint(tmp_path), Pictures(saved)
    assert plain.model_state["conv.weight"].stride() == model.conv.weight.stride()
    owned = [p for group in adamw(model).param_groups for p in group["params"]]
    (at,) = (at for at, p in enumerate(owned) if p is model.conv.weight)
    assert plain.optimizer_state["state"][at]["exp_avg"].stride() == model.conv.weight.stride()


@pytest.mark.parametrize("permuted", [True, False])
def test_the_order_in_memory_is_written_down_of_weights_that_lie_in_another(
    permuted: bool, tmp_path: Path
) -> None:
    path = start(Choices(), lambda: Pictures(permuted)).save(tmp_path)
    manifest = json.loads((path / "checkpoint.json").read_text())
    expected = {"conv.weight": [18, 1, 6]} if permuted else {}
    assert manifest["content"]["model"]["strides"] == expected


class CountsInItsState(torch.optim.SGD):
    """Keeps a count of its steps, and a tensor, by words."""

    def step(self, closure: Any = None) -> Any:
        """A step whose rate falls."""
        state: Any = self.state
        state["steps"] = state["steps"] + 1 if "steps" in state else 1
        state["all"].setdefault("sum", torch.zeros(2)).add_(state["steps"])
        self.param_groups[0]["lr"] = 0.1 / state["steps"]
        return super().step(closure)


def test_what_an_optimizer_keeps_by_a_word_comes_back(tmp_path: Path) -> None:
    def start() -> tuple[oomph.Run, oomph.Job, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = CountsInItsState(model.parameters(), lr=0.1, momentum=0.9)
        batch = (torch.randn(4, 4), torch.randn(4, 4))
        job = oomph.Job(model, nn.MSELoss(), optimizer, batch)
        return oomph.fit(model, optimizer, nn.MSELoss(), batch, budget="1MiB"), job, batch

    run, _, batch = start()
    run.step(batch)
    run.save(tmp_path)
    expected = [run.step(batch).item() for _ in range(2)]
    other, job, _ = start()
    other.undo()
    resumed = oomph.resume(tmp_path, job)
    assert [resumed.step(batch).item() for _ in range(2)] == expected
    assert resumed.optimizer.state["steps"] == 3
    assert resumed.optimizer.state["all"]["sum"].tolist() == [6, 6]


def test_a_plain_state_dict_loads_into_a_run_and_is_saved_by_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model)
    for batch in BATCHES[:2]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = Net()
    own = adamw(fresh)
    fresh.load_state_dict(model.state_dict())
    own.load_state_dict(optimizer.state_dict())
    choices = Choices(weights="bf16 with fp32 masters", techniques=on("fused_optimizer"))
    run = apply(plan_with(choices, fresh, own, BATCHES[0]), Job(fresh, loss_of, own, BATCHES[0]))
    run.save(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert_same(checkpoint.model_state, model.state_dict())
    assert_same(checkpoint.optimizer_state, optimizer.state_dict())


def test_files_are_plain_safetensors_with_tied_weights_once(tmp_path: Path) -> None:
    run = start(Choices(weights="bf16 with fp32 masters"))
    path = run.save(tmp_path)
    saved = load_file(path / "model.safetensors")
    assert "head.weight" not in saved and saved["embed.weight"].dtype is torch.float32
    run.undo()
    expected = {name: value for name, value in weights_of(run.model).items() if name in saved}
    assert_same(saved, expected)
    assert set(weights_of(run.model)) - set(saved) == {"head.weight"}
    loaded = load_checkpoint(path).model_state
    assert loaded["head.weight"] is loaded["embed.weight"]


def test_what_a_module_saves_beside_tensors_comes_back(tmp_path: Path) -> None:
    class Extra(Net):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    run = start(build=Extra)
    run.model.seen = 7  # type: ignore[assignment]
    run.save(tmp_path)
    again = start(build=Extra)
    again.load(tmp_path)
    assert again.model.seen == 7


def test_saving_takes_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", 1 << 10)
    run = start(build=lambda: Net(256))
    run.step(BATCHES[0])
    total = sum(p.nbytes for p in run.model.parameters())
    assert measure_cpu_peak(lambda: run.save(tmp_path)) < total / 4


# -- data ------------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Samples with random noise, drawn where they are read."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, at: int) -> Tensor:
        return torch.full((2,), float(at)) + torch.rand(2)


def shuffled(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), batch_size=2, shuffle=True, **options)


def own_stream() -> DataLoader[Tensor]:
    return shuffled(generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("make", [shuffled, own_stream])
@pytest.mark.parametrize("taken", [1, 4, 6, 7, 12, 13])
def test_a_resumed_run_takes_the_batches_that_would_have_come(
    make: Callable[[], DataLoader[Tensor]], taken: int, tmp_path: Path
) -> None:
    def endless(batches: Batches) -> Iterator[Tensor]:
        while True:
            yield from batches

    run, torch_stream = start(), 3
    torch.manual_seed(torch_stream)
    stream = endless(run.batches(make()))
    for _ in range(taken):
        next(stream)
        torch.rand(1)  # a step draws from the same stream
    run.save(tmp_path)
    expected = [next(stream) for _ in range(9)]
    torch.manual_seed(99)
    again = start()
    if taken % 2:  # before or after the load
        again.load(tmp_path)
    batches = again.batches(make())
    if not taken % 2:
        again.load(tmp_path)
    stream = endless(batches)
    assert_same([next(stream) for _ in range(9)], expected)
    assert again.resumed is not None and not again.resumed.waiting


def test_a_loader_that_keeps_its_own_place_is_asked_and_told(tmp_path: Path) -> None:
    class Keeper:
        at = 0
        read = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 5:
                self.at += 1
                self.read += 1
                yield self.at
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    run = start()
    stream = iter(run.batches(Keeper()))  # type: ignore[arg-type]
    assert [next(stream), next(stream)] == [1, 2]
    run.save(tmp_path)
    keeper, again = Keeper(), start()
    again.load(tmp_path)
    assert list(again.batches(keeper)) == [3, 4, 5]  # type: ignore[arg-type]
    assert keeper.read == 3


def test_a_loader_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    run = start()
    stream = iter(run.batches([1, 2, 3]))
    for _ in range(3):
        next(stream)
    run.save(tmp_path)
    again = start()
    again.load(tmp_path)
    with pytest.raises(
        WrongCheckpoint, match="ends after 2 batches, and the saved run had taken 3"
    ):
        list(again.batches([1, 2]))


def test_a_save_right_after_a_load_keeps_the_place(tmp_path: Path) -> None:
    run = start()
    next(iter(run.batches([1, 2, 3])))
    run.save(tmp_path)
    for _ in range(2):
        run = start()
        batches = run.batches([1, 2, 3])
        run.load(tmp_path)
        run.save(tmp_path)
    assert list(batches) == [2, 3]


class Words(torch.utils.data.Dataset[Batch]):
    """Sequences of ids, and what follows each."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, at: int) -> Batch:
        ids = torch.randint(CLASSES, (7,), generator=torch.Generator().manual_seed(at))
        return ids[:-1], ids[1:]


def test_a_training_that_is_resumed_has_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    def job() -> Job:
        model = Net()
        return Job(model, loss_of, adamw(model), BATCHES[0])

    def loader() -> DataLoader[Batch]:
        return DataLoader(Words(), batch_size=4, shuffle=True, drop_last=True)

    model = Net()
    to_train = functools.partial(
        train, plan_with(Choices(), model, adamw(model), BATCHES[0]), device=CPU
    )
    torch.manual_seed(3)
    expected = [done.loss for done in to_train(job(), steps=12, loader=loader())]

    torch.manual_seed(3)
    saving = Saving(folder=tmp_path, every=5)
    first = list(to_train(job(), steps=8, loader=loader(), saving=saving))
    assert [done.step for done in first if done.saved] == [5, 8]
    told: list[Resumed] = []
    for path, step in zip(checkpoints(tmp_path), (5, 8), strict=True):
        torch.manual_seed(99)
        rest = list(to_train(job(), steps=12, loader=loader(), resume=path, tell=told.append))
        assert [done.step for done in rest] == list(range(step + 1, 13))
        assert [done.loss for done in rest] == expected[step:]
    assert [one.notes for one in told] == [(), ()]
    with pytest.raises(BadInput, match="has 8 steps behind it already"):
        list(to_train(job(), steps=8, loader=loader(), resume=tmp_path))


# -- what is attached ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
            ],
            [3],
        ),
    ],
)
def test_a_scheduler_goes_on(make: Callable[[torch.optim.Optimizer], Any], tmp_path: Path) -> None:
    def step(run: Run, scheduler: Any, batches: list[Batch]) -> list[tuple[float, list[float]]]:
        done = []
        for batch in batches:
            loss = float(run.step(batch))
            scheduler.step()
            done.append((loss, scheduler.get_last_lr()))
        return done

    run = start()
    scheduler = make(run.optimizer)
    run.attach("scheduler", scheduler)
    step(run, scheduler, BATCHES[:3])
    run.save(tmp_path)
    expected = step(run, scheduler, BATCHES[3:])
    again = start()
    scheduler = make(again.optimizer)
    again.attach("scheduler", scheduler)
    again.load(tmp_path)
    assert step(again, scheduler, BATCHES[3:]) == expected


class Attached:
    """Anything with a state; this one may refuse it."""

    def __init__(self, state: Any = None, refuses: bool = False) -> None:
        self.state = state
        self.refuses = refuses

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        if self.refuses:
            raise KeyError("momentum")
        self.state = state["state"]


def test_attached_states_and_extras_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "tensor": torch.arange(6.0).view(2, 3).t(),
        "array": np.arange(4, dtype=np.int32),
        3: (1, None, [float("inf"), float("-inf")]),
        "bytes": b"\x00\xff",
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(2, dtype=torch.bfloat16)},
        "$odd": True,
        "counter": Counter([1, 1, 2]),
        "number": 0.1 + 0.2,
        "scalar": np.float64(0.1),
    }
    run = start()
    run.attach("mine", Attached(state))
    run.save(tmp_path, extra={"epoch": 3, "best": [0.25]})
    again, mine = start(), Attached()
    again.attach("mine", mine)
    resumed = again.load(tmp_path)
    assert resumed.extra == {"epoch": 3, "best": [0.25]}
    assert list(mine.state) == list(state)
    np.testing.assert_array_equal(mine.state.pop("array"), state.pop("array"))
    for name in ("tensor", "a.b", "a"):
        assert_same(mine.state.pop(name), state.pop(name))
    assert mine.state == state
    assert type(mine.state["counter"]) is Counter


def test_a_state_that_is_no_data_is_named(tmp_path: Path) -> None:
    run = start()
    run.attach("mine", Attached({"f": print}))
    with pytest.raises(BadInput, match=r"states.mine.state.f is a builtin_function"):
        run.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    run = start()
    run.attach("first", Attached(1))
    run.attach("second", Attached(2))
    run.step(BATCHES[0])
    run.save(tmp_path)
    again, first = start(), Attached("mine")
    again.attach("first", first)
    again.attach("second", Attached(refuses=True))
    before = weights_of(again.model)
    with pytest.raises(WrongCheckpoint, match=r"second .*does not take its saved state: KeyError"):
        again.load(tmp_path)
    assert first.state == "mine"
    assert_same(weights_of(again.model), before)
    assert again.steps == 0


def test_what_the_checkpoint_knows_nothing_of_is_told(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path)
    run.attach("new", Attached())
    assert run.load(tmp_path).notes == ("the checkpoint has no state of new, which starts anew",)


# -- the folder ------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    run = start()
    for batch in BATCHES[:4]:
        run.step(batch)
        last = run.save(tmp_path / "new" / "folder", keep=2)
    assert names(tmp_path / "new" / "folder") == ["000003-step-3", "000004-step-4"]
    assert load_checkpoint(tmp_path / "new" / "folder").path == last
    with pytest.raises(BadInput, match="at least one checkpoint must be kept"):
        run.save(tmp_path, keep=0)


def test_the_newest_is_the_last_one_written_not_the_one_of_the_highest_step(tmp_path: Path) -> None:
    run = start()
    first = run.save(tmp_path)
    losses(run, BATCHES[:2])
    run.save(tmp_path)
    run.load(first)
    run.step(BATCHES[3])
    run.save(tmp_path)
    assert load_checkpoint(tmp_path).step == 1


def test_a_checkpoint_may_be_moved_and_renamed(tmp_path: Path) -> None:
    run = start()
    best = run.save(tmp_path / "run").rename(tmp_path / "best")
    assert load_checkpoint(best).step == 0


def test_leftovers_of_ours_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".oomph-unfinished-abc", ".other", "notes", "000x-step-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".oomph-unfinished-link").symlink_to(tmp_path / "notes")
    start().save(tmp_path)
    assert not (tmp_path / ".oomph-unfinished-abc").exists()
    assert (tmp_path / "notes" / "file").exists()
    assert names(tmp_path) == ["000001-step-0", "000x-step-1", "notes"]


def test_two_do_not_save_to_one_folder_at_once(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path)
    with (tmp_path / ".oomph-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process is saving to"):
            run.save(tmp_path)
    assert run.save(tmp_path).exists()


# -- full and closed disks -------------------------------------------------------------------------


def test_too_little_room_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.save(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(tensor_files.os, "fsync", lambda _: pytest.fail("written"))
    with pytest.raises(DiskFull, match=r"at least [\d.]+ KiB is missing") as caught:
        run.save(tmp_path)
    assert caught.value.missing > 10_000
    assert names(tmp_path) == ["000001-step-0"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_while_saving_leaves_the_last_checkpoint(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.save(tmp_path)
    run.step(BATCHES[0])
    calls = []

    def fail_later(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files.os, "fsync", fail_later)
        full = code in (errno.ENOSPC, errno.EDQUOT)
        expected = "does not fit on the disk" if full else f"cannot save to .*{os.strerror(code)}"
        with pytest.raises(DiskFull if full else BadInput, match=expected):
            run.save(tmp_path)
    assert names(tmp_path) == ["000001-step-0"]
    assert not list(tmp_path.glob(".oomph-unfinished*"))
    assert load_checkpoint(tmp_path).step == 0
    assert run.save(tmp_path).name == "000002-step-1"


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot save to .*file"):
        start().save(tmp_path / "file" / "folder")


# -- damage ----------------------------------------------------------------------------------------


def saved_run(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints; the second one is to be damaged."""
    run = start()
    run.step(BATCHES[0])
    first = run.save(folder)
    run.step(BATCHES[1])
    return first, run.save(folder)


def assert_refused(folder: Path, match: str, kind: type[OomphError] = BadCheckpoint) -> None:
    """Nothing is loaded, nothing is changed."""
    run = start()
    mine = Attached("mine")
    run.attach("mine", mine)
    run.step(BATCHES[5])
    weights, stream = weights_of(run.model), torch.get_rng_state()
    optimizer = json.dumps(take_apart(run.optimizer.state_dict(), "", {}))
    with pytest.raises(kind, match=match) as caught:
        run.load(folder)
    assert type(caught.value) is kind
    assert_same(weights_of(run.model), weights)
    assert torch.equal(torch.get_rng_state(), stream)
    assert json.dumps(take_apart(run.optimizer.state_dict(), "", {})) == optimizer
    assert (run.steps, run.resumed, mine.state) == (1, None, "mine")
    assert run.step(BATCHES[0]) > 0


FILES = ("model.safetensors", "optimizer.safetensors", "state.safetensors", "checkpoint.json")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_wherever_it_is(name: str, tmp_path: Path) -> None:
    _, path = saved_run(tmp_path)
    original = (path / name).read_bytes()
    for at in random.Random(0).sample(range(len(original)), 12):
        flipped = bytearray(original)
        flipped[at] ^= 1 << at % 8
        (path / name).write_bytes(flipped)
        with pytest.raises(BadCheckpoint):
            load_checkpoint(tmp_path)
    assert_refused(tmp_path, "there is also .*000001-step-1")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 7, 0.5, -1])
def test_a_file_that_was_cut_is_refused(name: str, left: float, tmp_path: Path) -> None:
    first, path = saved_run(tmp_path)
    content = (path / name).read_bytes()
    end = int(left * len(content)) if isinstance(left, float) else left
    (path / name).write_bytes(content[:end])
    assert_refused(path, "was cut or edited|is damaged")
    assert load_checkpoint(first).step == 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    _, path = saved_run(tmp_path)
    (path / name).unlink()
    assert_refused(tmp_path, f"{name} cannot be read: No such file")


def test_a_checkpoint_of_a_newer_oomph_is_refused(tmp_path: Path) -> None:
    _, path = saved_run(tmp_path)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["schema_version"] = 2
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert_refused(tmp_path, "has schema 2, and this oomph reads 1")
    (path / "checkpoint.json").write_text("[]")
    assert_refused(tmp_path, "is not of a checkpoint of `run.save`")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, "there is no checkpoint in")
    assert_refused(tmp_path / "nowhere", "there is no checkpoint in")


class Larger(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: Net(48), "embed.weight is 16×48 in the checkpoint and 16×32 in this model"),
        (Larger, "the checkpoint has more.weight, which this model has not"),
        (NoNorm, "this model has norm.weight, which the checkpoint has not"),
        (Untied, "head.weight is tied to embed.weight in this model, and was not when saved"),
    ],
)
def test_another_models_checkpoint_is_refused_by_name(
    build: Callable[[], nn.Module], match: str, tmp_path: Path
) -> None:
    run = start(build=build)
    run.step(BATCHES[0])
    run.save(tmp_path)
    assert_refused(tmp_path, match, WrongCheckpoint)


def test_a_tied_checkpoint_loads_into_an_untied_model(tmp_path: Path) -> None:
    def by_shape(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in model.named_parameters() if n != "head.weight"], 0.1)

    run = start(make=by_shape)
    run.save(tmp_path)
    model = Untied()
    model.head.weight.requires_grad_(False)
    again = start(build=lambda: model, make=by_shape)
    again.load(tmp_path)
    assert_same(model.head.weight.data, model.embed.weight.data)
    assert model.head.weight is not model.embed.weight


@pytest.mark.parametrize(
    "make, match",
    [
        (sgd, "the checkpoint is of SGD, and the optimizer is AdamW"),
        (lambda m: torch.optim.AdamW(m.parameters()), "has 2 groups of parameters, and 1 when"),
        (
            lambda m: torch.optim.AdamW(
                [{"params": list(m.parameters())[:3]}, {"params": list(m.parameters())[3:]}]
            ),
            "the optimizer's group 0 holds blocks.1.weight where it held blocks.0.bias when saved",
        ),
    ],
)
def test_another_optimizers_checkpoint_is_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], match: str, tmp_path: Path
) -> None:
    run = start(make=make)
    run.step(BATCHES[0])
    run.save(tmp_path)
    assert_refused(tmp_path, match, WrongCheckpoint)


def test_a_plan_of_another_version_is_no_reason_not_to_load(tmp_path: Path) -> None:
    run = start()
    path = run.save(tmp_path)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["content"]["plan"]["schema_version"] = 99
    manifest["crc32"] = checksum_of(manifest["content"])
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    (note,) = start().load(path).notes
    assert note.startswith(
        "the saved plan cannot be compared with this one: the plan has schema 99"
    )


def test_a_run_that_is_over_neither_saves_nor_loads(tmp_path: Path) -> None:
    run = start()
    run.save(tmp_path)
    run.undo()
    for call in (run.save, run.load):
        with pytest.raises(BadInput, match="this run is over"):
            call(tmp_path)


# -- tensors ---------------------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", 64)
    bits = torch.randint(0, 255, (120,), dtype=torch.uint8)
    tensors = {
        str(dtype): bits.clone().view(dtype) if dtype is not torch.bool else bits > 99
        for dtype in tensor_files._NAMES
    }
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["strided"] = torch.arange(24.0).view(4, 6)[:, ::2].t()
    tensors["expanded"] = torch.ones(1, 3).expand(5, 3)
    tensors["channels last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    written = write_tensors(tmp_path / "file", tensors)
    assert written.size == size_of(tensors) == (tmp_path / "file").stat().st_size
    check_file(tmp_path / "file", written)
    mapped = MappedTensors(tmp_path / "file")
    library = load_file(tmp_path / "file")
    assert mapped.names == tensors.keys() == library.keys()
    for name, tensor in tensors.items():
        for read in (mapped[name], library[name]):
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(_bits(read), _bits(tensor)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta"), torch.ones(1) + 1j]
)
def test_a_tensor_that_cannot_be_saved_is_named(tensor: Tensor, tmp_path: Path) -> None:
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128)
    with pytest.raises(BadInput, match="odd cannot be saved"):
        write_tensors(tmp_path / "file", {"odd": tensor})


def test_unknown_words_of_a_newer_oomph_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match=r"\$set is nothing this oomph can read"):
        put_together({"$set": [1]}, lambda _: pytest.fail("no tensor"))


def test_names_are_public() -> None:
    assert oomph.load_checkpoint is load_checkpoint
    assert oomph.resume is resume
    assert checkpoint_folder.MANIFEST == "checkpoint.json"
