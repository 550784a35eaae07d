"""Inference with weights off the GPU: planned to fit, same outputs, and everything given back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from oomph.errors import (
    BadInput,
    DiskFull,
    DoesNotFit,
    HostMemoryFull,
    HostTooSmall,
    WrongCheckpoint,
)
from oomph.hardware import find_gpu
from oomph.jobs.job import Job
from oomph.memory import limits
from oomph.memory.limits import HostLimits
from oomph.memory.link import InstantLink
from oomph.rehearsal.stores import DISK_READ
from oomph.runs import inference
from oomph.runs.inference import InferencePlan, apply_inference, plan_inference
from oomph.runs.weight_files import WeightFiles
from oomph.techniques.disk_weights import BUFFERS
from oomph.units import GIB

WIDTH, LAYERS = 8192, 12
BLOCK = 4 * WIDTH * WIDTH
"""Bytes of a layer of the model that is planned for: a quarter of a GiB."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).relu() + self.shift


def make_net(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
    return nn.Sequential(nn.Linear(4, width), blocks)


@functools.cache
def planned(budget: float, host: float | None = None) -> InferencePlan:
    job = Job(make_net, None, None, lambda: torch.zeros(2, 4))
    memory = None if host is None else int(host * GIB)
    return plan_inference(job, gpu="rtx-4090", budget=int(budget * GIB), host=memory)


def test_what_fits_stays_on_the_gpu() -> None:
    assert planned(6).streamed == ()


def test_as_few_blocks_are_streamed_as_the_budget_asks_for() -> None:
    as_it_is = planned(6)
    budget = 2.5
    plan = planned(budget)
    assert plan.estimate.fits
    assert plan.host_bytes == len(plan.streamed) * BLOCK
    # Those that are streamed are not there, but for two.
    saved = as_it_is.estimate.peak.allocated - plan.estimate.peak.allocated
    assert saved == pytest.approx((len(plan.streamed) - 2) * BLOCK, abs=1 << 20)
    assert plan.estimate.smallest_budget + BLOCK > budget * GIB
    assert plan.forward_seconds > as_it_is.forward_seconds


def test_streamed_blocks_are_spread_over_the_model() -> None:
    plan = planned(2.5)
    places = [int(path.split(".")[1]) for path in plan.streamed]
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert places[0] == 0
    assert max(gaps) - min(gaps) <= 1


def test_a_budget_that_is_too_small_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(DoesNotFit, match="12 of its 12 blocks") as refused:
        planned(1)
    assert len(planned(refused.value.smallest / GIB).streamed) == LAYERS


# 11 of the 12 blocks are streamed, which takes 2.75 GiB of host memory.
TIGHT = 2.0


@pytest.mark.parametrize("host", [None, 2.75, 100.0])
def test_with_host_memory_for_all_nothing_is_on_the_disk(host: float | None) -> None:
    plan = planned(TIGHT, host)
    assert (plan.on_disk, plan.disk_bytes) == ((), 0)
    assert plan.host_bytes == len(plan.streamed) * BLOCK == 2.75 * GIB
    assert plan == dataclasses.replace(planned(TIGHT), estimate=plan.estimate)


@pytest.mark.parametrize("host", [2.7, 2.5, 1.9, 1.25, 1.0])
def test_as_few_blocks_are_on_the_disk_as_host_memory_asks_for(host: float) -> None:
    everything, plan = planned(TIGHT), planned(TIGHT, host)
    cold = len(plan.on_disk)
    assert plan.streamed == everything.streamed
    assert plan.disk_bytes == cold * BLOCK
    # The ring of buffers, and the block that is on its way to the disk, are in host memory, too.
    assert plan.host_bytes == (len(plan.streamed) - cold + BUFFERS + 1) * BLOCK
    assert host * GIB - BLOCK < plan.host_bytes <= host * GIB
    assert plan.estimate.peak == everything.estimate.peak
    on_disk = [plan.streamed.index(path) for path in plan.on_disk]
    gaps = {after - before for before, after in itertools.pairwise(on_disk)}
    assert on_disk[0] == 0
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("host", [3.4, 3.0, 2.4, 1.9])
def test_blocks_of_several_sizes_stay_inside_host_memory(host: float) -> None:
    class Unlike(nn.Module):
        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, hidden, bias=False)
            self.down = nn.Linear(hidden, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x))

    def build() -> nn.Module:
        return nn.Sequential(*(Unlike(2048 + 512 * (7 * at % 12)) for at in range(LAYERS)))

    job = Job(build, None, None, lambda: torch.zeros(2, WIDTH))
    budget, room = int(2.2 * GIB), int(host * GIB)
    plan = plan_inference(job, gpu="rtx-4090", budget=budget, host=room)
    assert plan.on_disk
    assert plan.host_bytes <= room
    streamed, fewer = len(plan.streamed), len(plan.on_disk) - 1
    less, _ = inference._rehearsed(job, find_gpu("rtx-4090"), budget, 1, streamed, fewer)
    assert less.host_bytes > room


def test_a_forward_takes_as_long_as_the_disk() -> None:
    plan = planned(TIGHT, 1.9)
    assert plan.forward_seconds == pytest.approx(plan.disk_bytes / DISK_READ, rel=0.05)
    assert plan.forward_seconds > 2 * planned(TIGHT).forward_seconds


def test_host_memory_that_is_too_small_is_refused_with_what_is_missing() -> None:
    with pytest.raises(HostTooSmall, match="11 of its 11 streamed blocks on the disk") as refused:
        planned(TIGHT, 0.5)
    assert refused.value.missing == GIB // 2
    enough = planned(TIGHT, 0.5 + refused.value.missing / GIB)
    assert enough.on_disk == enough.streamed
    assert planned(refused.value.smallest / GIB, 0.5).streamed == ()


def test_the_host_memory_of_another_machine_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = HostLimits(memory=0, memory_limit="this machine", lockable=None)
    job = Job(make_net, None, None, lambda: torch.zeros(2, 4))
    plan = functools.partial(plan_inference, job, budget=int(TIGHT * GIB))
    monkeypatch.setattr("oomph.runs.run.host_limits", lambda: nothing)
    assert plan(gpu="rtx-4090").on_disk == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    with pytest.raises(HostTooSmall):
        plan(gpu="rtx-4090")
    assert plan(gpu="rtx-3090").on_disk == ()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card of the future")
    assert plan(gpu="rtx-4090").on_disk == ()


def small_plan(**changes: Any) -> InferencePlan:
    plan = dataclasses.replace(planned(2.5), **changes)
    assert plan.streamed
    return plan


def test_outputs_are_those_of_the_plain_model() -> None:
    plain = make_net(16)
    net = copy.deepcopy(plain).train()
    job = Job(net, nn.CrossEntropyLoss(), None, (torch.zeros(2, 4), torch.zeros(2)))
    batch = torch.randn(3, 4)
    expected = plain.eval()(batch)
    with apply_inference(small_plan(), job, device="cpu") as run:
        for _ in range(2):
            assert torch.equal(run((batch, None)), expected)
        with torch.no_grad():
            assert torch.equal(run.model(batch), expected)
        assert torch.equal(net[1][0].linear.weight, plain[1][0].linear.weight)
    assert net.training
    assert torch.equal(net.eval()(batch), expected)


def test_batches_are_what_the_job_says() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(16)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.net(x) * factor

    plan = small_plan(streamed=("net.1.3", "net.1.4", "net.1.5"))
    batch = {"x": torch.randn(2, 4), "factor": 2.0}
    plain = Named().eval()
    with torch.no_grad():
        expected = plain(**batch)
    with apply_inference(plan, Job(Named, None, None, batch), device="cpu") as run:
        assert torch.equal(run(batch), expected)

    def total(model: nn.Module, given: Any) -> Tensor:
        return model(**given).sum()

    with apply_inference(plan, Job(Named, total, None, batch), device="cpu") as run:
        assert torch.equal(run(batch), expected.sum())


def test_a_plan_of_another_model_is_refused() -> None:
    job = Job(nn.Linear(4, 4), None, None, torch.zeros(2, 4))
    with pytest.raises(BadInput, match=r"1\.0, which Linear has not"):
        apply_inference(small_plan(), job, device="cpu")


# --- Weights on the disk --------------------------------------------------------------------------


def cold_plan(**changes: Any) -> InferencePlan:
    plan = dataclasses.replace(planned(TIGHT, 1.9), disk_bytes=1000, **changes)
    assert BUFFERS < len(plan.on_disk) < len(plan.streamed)
    return plan


def small_job() -> tuple[nn.Module, Job]:
    net = make_net(16)
    return net, Job(net, None, None, torch.zeros(2, 4))


def test_outputs_are_those_of_the_plain_model_with_weights_on_the_disk(tmp_path: Path) -> None:
    net, job = small_job()
    plain = copy.deepcopy(net).eval()
    batch = torch.randn(3, 4)
    with torch.no_grad():
        expected = plain(batch)
    with apply_inference(cold_plan(), job, device="cpu", disk=tmp_path) as run:
        for _ in range(3):
            assert torch.equal(run(batch), expected)
        state = run.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        assert run.on_disk == cold_plan().on_disk
    assert run.on_disk == ()
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_refused_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, job = small_job()
    before = [parameter.data_ptr() for parameter in net.parameters()]
    with pytest.raises(BadInput, match="nowhere"):
        apply_inference(cold_plan(), job, device="cpu", disk=tmp_path / "nowhere")
    monkeypatch.setattr(limits, "free_disk", lambda folder: 999)
    with pytest.raises(DiskFull) as full:
        apply_inference(cold_plan(), job, device="cpu", disk=tmp_path)
    assert full.value.missing == 1
    assert [parameter.data_ptr() for parameter in net.parameters()] == before


def test_files_in_memory_count_as_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net(16).to("meta")  # nothing of it is in host memory yet
    plan = cold_plan()

    def to_take(*, disk_is_memory: bool) -> int:
        found = HostLimits(
            memory=0, memory_limit="this machine", lockable=None, disk_is_memory=disk_is_memory
        )
        monkeypatch.setattr(inference, "host_limits", lambda folder: found)
        return inference._host_bytes_to_take(net, plan, tmp_path)

    block = 4 * 16 * 16
    more = to_take(disk_is_memory=True) - to_take(disk_is_memory=False)
    assert more == len(plan.on_disk) * block


def test_an_undo_without_host_memory_changes_nothing_and_can_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, job = small_job()
    batch = torch.randn(3, 4)
    with torch.no_grad():
        expected = copy.deepcopy(net).eval()(batch)
    run = apply_inference(cold_plan(), job, device="cpu", disk=tmp_path)
    tiny = HostLimits(memory=100, memory_limit="a small machine", lockable=None)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_limits", lambda *_: tiny)
        with pytest.raises(HostMemoryFull):
            run.undo()
    assert torch.equal(run(batch), expected)
    run.undo()
    assert run.on_disk == ()
    assert not any(parameter.isnan().any() for parameter in net.parameters())
    with torch.no_grad():
        assert torch.equal(net.eval()(batch), expected)


# --- Models that have no room on the host ---------------------------------------------------------


def small_net() -> nn.Module:
    return make_net(16)


def on_meta(width: int = 16) -> nn.Module:
    with torch.device("meta"):
        return make_net(width)


PLANS = {"the device": lambda: planned(6), "the host": small_plan, "the disk": cold_plan}
#: What a job has as its model.
MODELS: dict[str, Callable[[], Any]] = {
    "a model on the meta device": on_meta,
    "a function that builds it there": lambda: on_meta,
    "a function that builds it as ever": lambda: small_net,
}


def saved(folder: Path) -> nn.Module:
    """A plain model, whose weights are in a file of a folder as well."""
    plain = small_net().eval()
    save_file(plain.state_dict(), folder / "model.safetensors")
    return plain


@pytest.mark.parametrize("where", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_without_numbers_has_those_of_a_checkpoint(
    model: str, where: str, tmp_path: Path
) -> None:
    plain = saved(tmp_path)
    batch = torch.randn(3, 4)
    with torch.no_grad():
        expected = plain(batch)
    job = Job(MODELS[model](), None, None, torch.zeros(2, 4))
    run = apply_inference(PLANS[where](), job, device="cpu", disk=tmp_path, checkpoint=tmp_path)
    for _ in range(3):
        assert torch.equal(run(batch), expected)
    state = run.model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    run.undo()
    assert all(parameter.is_meta for parameter in run.model.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_without_numbers_is_planned_as_one_with() -> None:
    job = Job(on_meta(WIDTH), None, None, lambda: torch.zeros(2, 4))
    plan = plan_inference(job, gpu="rtx-4090", budget=int(TIGHT * GIB), host=int(1.9 * GIB))
    expected = planned(TIGHT, 1.9)
    assert plan.estimate.peak == expected.estimate.peak
    assert plan == dataclasses.replace(expected, estimate=plan.estimate)


def test_a_model_and_a_checkpoint_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    net = make_net(16)
    apply = functools.partial(apply_inference, cold_plan(), device="cpu", disk=tmp_path)
    with pytest.raises(BadInput, match="name the checkpoint that has them"):
        apply(Job(on_meta(), None, None, torch.zeros(2, 4)))
    with pytest.raises(BadInput, match=r"0\.weight has numbers of its own"):
        apply(Job(net, None, None, torch.zeros(2, 4)), checkpoint=tmp_path)
    other = on_meta(17)
    before = list(other.parameters())
    with pytest.raises(WrongCheckpoint, match=r"0\.weight is \[16, 4\] in .*, and \[17, 4\]"):
        apply(Job(other, None, None, torch.zeros(2, 4)), checkpoint=tmp_path)
    assert all(map(operator.is_, other.parameters(), before))


class Host(InstantLink):
    """Knows the host memory that was taken and is still in use, and the most there ever was."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def host_memory(self, nbytes: int) -> Tensor:
        memory = super().host_memory(nbytes)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(memory.untyped_storage(), self._freed, nbytes)
        return memory

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def tied_net() -> nn.Module:
    """Two of its blocks share a weight."""
    net = small_net()
    net[1][1].linear.weight = net[1][0].linear.weight
    return net


def test_a_weight_that_blocks_share_is_planned_to_stay_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    monkeypatch.setattr(inference, "open_link", lambda _: host)
    job = Job(tied_net, None, None, torch.zeros(2, 4))
    plan, _ = inference._rehearsed(job, find_gpu("rtx-4090"), GIB, 1, LAYERS, LAYERS)
    batch, block = torch.randn(3, 4), 4 * 16 * 16
    assert len(plan.on_disk) == LAYERS - 2
    assert plan.disk_bytes == (LAYERS - 2) * block
    assert plan.host_bytes == (1 + BUFFERS + 1) * block
    with torch.no_grad():
        expected = tied_net().eval()(batch)
    with apply_inference(plan, job, device="cpu", disk=tmp_path) as run:
        assert host.now == (1 + BUFFERS) * block
        assert host.most <= plan.host_bytes
        for _ in range(2):
            assert torch.equal(run(batch), expected)


@pytest.mark.parametrize("on_disk", [0, 4, 8, 10])
def test_host_memory_is_what_was_planned(
    on_disk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    host = Host()
    monkeypatch.setattr(inference, "open_link", lambda _: host)
    job = Job(small_net, None, None, torch.zeros(2, 4))
    plan, _ = inference._rehearsed(job, find_gpu("rtx-4090"), GIB, 1, 10, on_disk)
    with apply_inference(plan, job, device="cpu", disk=tmp_path, checkpoint=tmp_path) as run:
        block = plan.host_bytes // (10 - on_disk + (BUFFERS + 1 if on_disk else 0))
        # While blocks go to the disk, those that stay on the host have not come yet.
        staying = (10 - on_disk + (BUFFERS if on_disk else 0)) * block
        assert host.most == max(staying, (BUFFERS + 1) * block if on_disk else 0)
        run(torch.zeros(2, 4))
        assert host.now == staying <= plan.host_bytes
    del run
    gc.collect()
    assert host.now == 0


def test_a_tied_model_of_transformers_generates_from_its_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    layers = tuple(f"model.layers.{at}" for at in range(6))
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=len(layers),
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompt = torch.randint(32, (2, 5))

    def generate(model: Any) -> Tensor:
        tokens: Tensor = model.generate(
            prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        return tokens

    job = Job(lambda: transformers.LlamaForCausalLM(config), None, None, {"input_ids": prompt})
    plan = dataclasses.replace(cold_plan(), streamed=layers, on_disk=layers[1:])
    with apply_inference(plan, job, device="cpu", disk=tmp_path, checkpoint=tmp_path) as run:
        assert torch.equal(generate(run.model), generate(plain))
        with torch.no_grad():
            assert torch.equal(run({"input_ids": prompt}).logits, plain(prompt).logits)
        head, embedding = run.model.lm_head.weight, run.model.model.embed_tokens.weight
        assert head is embedding


def test_the_files_of_a_checkpoint_are_let_go_when_all_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    mapped: list[weakref.ref[Any]] = []
    match = WeightFiles.match

    def watch(files: WeightFiles, model: nn.Module) -> dict[Tensor, Tensor]:
        found = match(files, model)
        mapped.extend(weakref.ref(tensor.untyped_storage()) for tensor in found.values())
        return found

    monkeypatch.setattr(WeightFiles, "match", watch)
    job = Job(small_net, None, None, torch.zeros(2, 4))
    with apply_inference(cold_plan(), job, device="cpu", disk=tmp_path, checkpoint=tmp_path):
        gc.collect()
        assert mapped
        assert [storage for storage in mapped if storage() is not None] == []
