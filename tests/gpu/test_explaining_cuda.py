"""Each way to run out of memory, on a real card, named by `oomph.watch`. Skipped without a GPU."""

from __future__ import annotations

import contextlib
import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import oomph
from oomph.explaining.causes import CauseKind
from oomph.explaining.meters import CudaMeter
from oomph.explaining.oom_report import OomReport
from oomph.units import GIB, MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = 1024
LIMIT = 2 * GIB


def model(layers: int = 4, width: int = WIDTH) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*blocks).cuda()


def batch(length: int, width: int = WIDTH) -> torch.Tensor:
    return torch.ones(length, width, device="cuda")


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    net(inputs).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def limited_to(size: int) -> Iterator[None]:
    """A process that may reserve so much, and leaves nothing behind."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


def explained(program: Callable[[], None], tmp_path) -> OomReport:
    torch.ones(1, device="cuda")  # CUDA runs before the limit is set
    watch = oomph.watch(report=tmp_path / "report.json")
    with limited_to(LIMIT), pytest.raises(torch.OutOfMemoryError), watch:
        program()
    assert watch.report is not None
    return watch.report


def test_a_batch_that_is_too_big_from_the_start(tmp_path) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), batch(262_144))

    report = explained(program, tmp_path)
    assert report.cause.kind is CauseKind.DOES_NOT_FIT
    assert report.evidence.asked >= GIB
    assert report.evidence.reading.limit == pytest.approx(LIMIT, rel=0.01)


def test_losses_kept_with_their_graphs(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        inputs, losses = batch(4096), []
        while True:
            train_step(net, optimizer, inputs)
            losses.append(net(inputs).pow(2).mean())

    report = explained(program, tmp_path)
    assert report.cause.kind is CauseKind.LEAK
    held = report.evidence.alive.held[0]
    assert held.name == "losses"
    assert held.place.startswith("test_explaining_cuda.py:")
    assert held.size > LIMIT / 2


def test_a_longer_batch_than_before(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        for length in (8192, 16_384, 10_000, 200_000):
            train_step(net, optimizer, batch(length))

    report = explained(program, tmp_path)
    assert report.cause.kind is CauseKind.LONGER_BATCH
    assert report.evidence.largest_before.shape == (16_384, WIDTH)


def test_fragmentation(tmp_path) -> None:
    def program():
        pieces = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(190)]
        del pieces[::2]
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")

    report = explained(program, tmp_path)
    assert report.cause.kind is CauseKind.FRAGMENTATION
    assert report.cause.size >= 512 * MIB


def test_evaluation_that_keeps_its_outputs(tmp_path) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), batch(64))
        net.eval()
        predictions = []
        with torch.no_grad():
            while True:
                predictions.append(net(batch(32_768)))

    report = explained(program, tmp_path)
    assert report.cause.kind is CauseKind.EVAL_ACCUMULATION
    assert "predictions" in report.headline


def test_a_copy_of_the_weights_made_to_save_them(tmp_path) -> None:
    def save(net: nn.Module) -> None:
        copied = {name: weight.clone() for name, weight in net.state_dict().items()}
        torch.save(copied, tmp_path / "model.pt")

    def program():
        net = model(44, 2048)  # 0.7 GiB of weights, and as much of gradients
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch(16, 2048)).sum().backward()
        optimizer.step()
        save(net)

    assert explained(program, tmp_path).cause.kind is CauseKind.SAVE_COPY


def test_the_first_step_of_an_optimizer(tmp_path) -> None:
    def program():
        net = model(44, 2048)
        train_step(net, torch.optim.AdamW(net.parameters()), batch(16, 2048))

    report = explained(program, tmp_path)
    assert report.cause.kind is CauseKind.OPTIMIZER_FIRST_STEP
    weights = report.evidence.alive.categories["parameter"]
    assert report.cause.size == pytest.approx(2 * weights, rel=0.01)


def test_the_logits_of_a_large_vocabulary(tmp_path) -> None:
    def program():
        net = nn.Sequential(nn.Embedding(128_000, 64), nn.Linear(64, 128_000)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        tokens = torch.ones(2, 1024, dtype=torch.long, device="cuda")
        logits = net(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    assert explained(program, tmp_path).cause.kind is CauseKind.LARGE_LOGITS


def test_the_sizes_that_are_filed_add_up_to_what_is_allocated(tmp_path) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), batch(262_144))

    report = explained(program, tmp_path)
    categories = report.evidence.alive.categories
    allocated = report.evidence.reading.allocated
    assert sum(categories.values()) == pytest.approx(allocated, rel=0.05)


def test_an_unmodified_script_is_explained_and_ends_with_its_code(tmp_path) -> None:
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(
        "import torch\n"
        "torch.cuda.set_per_process_memory_fraction(0.02)\n"
        "kept = []\n"
        "layer = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
        "while True:\n"
        "    layer(torch.ones(8192, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    kept.append(torch.ones(64 << 20, device='cuda'))\n"
    )
    command = [sys.executable, "-m", "oomph", "run", "--report", str(report), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert json.loads(report.read_text())["cause"] == "leak"
    assert "kept" in done.stderr


def test_a_snapshot_that_pytorch_dumps_here_is_read(tmp_path) -> None:
    path = tmp_path / "snapshot.pickle"
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found = oomph.explain(path)
    with path.open("rb") as file:
        whole = pickle.load(file)  # our own file, a moment old
    blocks = [block for segment in whole["segments"] for block in segment["blocks"]]
    active = sum(block["size"] for block in blocks if block["state"].startswith("active"))
    assert found.details["allocated"] == active
    assert found.details["reserved"] == sum(one["total_size"] for one in whole["segments"])
    assert found.details["peak"] == active + 128 * MIB
    assert any("test_explaining_cuda.py" in site for site in found.sites)
    del kept


def test_reading_the_counters_starts_nothing_and_agrees_with_pytorch() -> None:
    meter = CudaMeter()
    torch.ones(1, device="cuda")
    assert meter.is_ready()
    assert meter.sample().allocated == torch.cuda.memory_allocated()
    assert meter.read().reserved == torch.cuda.memory_reserved()
