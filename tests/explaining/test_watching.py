"""Each way to run out of memory is produced by a program and named; the error leaves unchanged."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import OrderedDict

import pytest
import torch
from simulated_gpu import SimulatedGpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import oomph
from oomph.errors import BadInput
from oomph.explaining.causes import CauseKind
from oomph.explaining.failure import size_asked_for
from oomph.explaining.watching import Watch
from oomph.units import MIB

WIDTH = 64


def model(layers: int = 4, width: int = WIDTH) -> nn.Module:
    blocks = (
        nn.Sequential(OrderedDict(fc=nn.Linear(width, width), act=nn.ReLU())) for _ in range(layers)
    )
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    net(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def explained(program, device: SimulatedGpu, tmp_path, **options) -> Watch:
    """Run a program on the device until its memory is full."""
    watch = oomph.watch(meter=device, report=tmp_path / "report.json", **options)
    with device, pytest.raises(torch.OutOfMemoryError), watch:
        program()
    assert watch.report is not None
    return watch


def kind_of(watch: Watch) -> CauseKind:
    return watch.report.cause.kind


# --- causes ---------------------------------------------------------------------------------------


def test_a_batch_that_is_too_big_from_the_start_does_not_fit(tmp_path) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(131_072, WIDTH))

    watch = explained(program, SimulatedGpu(120 * MIB), tmp_path)
    report = watch.report
    assert kind_of(watch) is CauseKind.DOES_NOT_FIT
    assert report.evidence.failure.phase == "forward"
    assert report.evidence.failure.place.startswith("test_watching.py:")
    smaller = next(one for one in report.remedies if "micro-batches of 65536" in one.do)
    assert smaller.saves > 0


def test_a_model_that_is_too_big_fails_while_it_is_built(tmp_path) -> None:
    watch = explained(lambda: model(32, 1024), SimulatedGpu(64 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.DOES_NOT_FIT
    assert watch.report.evidence.failure.phase == "build"


def test_losses_kept_with_their_graphs_are_a_leak(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batch, losses = torch.ones(4096, WIDTH), []
        while True:
            train_step(net, optimizer, batch)
            losses.append(net(batch).pow(2).mean())

    watch = explained(program, SimulatedGpu(128 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.LEAK
    held = watch.report.evidence.alive.held[0]
    assert (held.name, held.kind) == ("losses", "list")
    line = int(held.place.removeprefix("test_watching.py:"))
    assert "losses.append" in open(__file__).readlines()[line - 1]  # noqa: PTH123, SIM115
    # A loss is one number; what it holds is the graph behind it.
    assert held.size > 50 * MIB
    assert "losses" in watch.report.headline
    assert watch.report.remedies[0].enough


def test_a_sum_of_losses_is_a_leak_too(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batch, total = torch.ones(4096, WIDTH), 0
        while True:
            train_step(net, optimizer, batch)
            total += net(batch).pow(2).mean()

    watch = explained(program, SimulatedGpu(128 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.LEAK
    assert watch.report.evidence.alive.held[0].name == "total"


def test_graphs_that_wait_for_a_backward_that_never_comes(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train_step(net, optimizer, torch.ones(4096, WIDTH))
        total = 0
        for _ in range(1000):
            total = total + net(torch.ones(4096, WIDTH)).pow(2).mean()
        total.backward()

    watch = explained(program, SimulatedGpu(128 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.LEAK
    assert "from forward to forward" in watch.report.headline
    assert watch.report.evidence.alive.held[0].name == "total"


def test_a_model_called_often_in_every_step_does_not_leak(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for rows in (1024, 1024, 16_384):
            x = torch.ones(rows, WIDTH)
            for _ in range(8):
                x = net(x)
            x.sum().backward()
            optimizer.step()

    watch = explained(program, SimulatedGpu(90 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.LONGER_BATCH


def test_outputs_kept_in_an_attribute_are_named_after_its_class(tmp_path) -> None:
    class Logger:
        def __init__(self) -> None:
            self.history = []

    def program():
        net, logger = model(), Logger()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        while True:
            train_step(net, optimizer, torch.ones(4096, WIDTH))
            logger.history.append({"out": net(torch.ones(16_384, WIDTH)).detach()})

    watch = explained(program, SimulatedGpu(128 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.LEAK
    assert watch.report.evidence.alive.held[0].name == "Logger.history"


def test_a_longer_batch_than_before(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.AdamW(net.parameters())
        for length in (8000, 12_000, 9600, 16_000, 96_000):
            train_step(net, optimizer, torch.ones(length, WIDTH))

    watch = explained(program, SimulatedGpu(160 * MIB), tmp_path)
    report = watch.report
    assert kind_of(watch) is CauseKind.LONGER_BATCH
    assert report.evidence.inputs.shape == (96_000, WIDTH)
    assert report.evidence.largest_before.shape == (16_000, WIDTH)
    assert "96000×64" in report.headline
    assert "predicted" in report.headline


def test_fragmentation(tmp_path) -> None:
    def program():
        # Every other piece is freed: half of the memory is unused, in pieces that are too small.
        pieces = [torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(40)]
        del pieces[::2]
        torch.empty(30 * MIB, dtype=torch.uint8)

    watch = explained(program, SimulatedGpu(190 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.FRAGMENTATION
    assert "expandable_segments" in watch.report.remedies[0].do
    assert watch.report.evidence.reading.unused >= 80 * MIB


def ask_for(size: int) -> None:
    """Without any module, whose call would make a watch look at the device."""
    torch.empty(8 * MIB, dtype=torch.uint8)
    torch.empty(size, dtype=torch.uint8)


def test_a_request_that_is_refused_before_any_module_is_called_is_known_to_the_byte(
    tmp_path,
) -> None:
    asked = 90 * MIB + 512
    watch = explained(lambda: ask_for(asked), SimulatedGpu(64 * MIB), tmp_path)
    assert watch.report.evidence.asked == asked


def test_of_a_device_that_begins_inside_the_error_says_what_was_asked_for(tmp_path) -> None:
    device = SimulatedGpu(64 * MIB, begun=False)
    watch = explained(lambda: ask_for(90 * MIB + 512), device, tmp_path)
    assert watch.report.evidence.asked == 90 * MIB
    assert "90.00 MiB were asked for" in watch.report.headline


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has …", 512 * MIB),
        ("Tried to allocate 1.50 GiB. GPU 0 has …", 1536 * MIB),
        ("Tried to allocate 512 bytes. GPU 0 has …", 512),
        ("Tried to allocate 4194304.00 GiB. GPU 0 has …", 0),
        ("CUDA driver error: out of memory", 0),
    ],
)
def test_what_an_error_says_was_asked_for(words: str, size: int) -> None:
    assert size_asked_for(torch.OutOfMemoryError(words)) == size


def test_memory_held_by_another_process(tmp_path) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(65_536, WIDTH))

    watch = explained(program, SimulatedGpu(400 * MIB, others=300 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.HELD_BY_OTHERS
    assert watch.report.cause.size == 300 * MIB
    assert "nvidia-smi" in watch.report.remedies[0].do


def test_others_are_not_blamed_where_the_process_limits_itself(tmp_path) -> None:
    device = SimulatedGpu(400 * MIB, others=200 * MIB, limit=60 * MIB)
    watch = explained(lambda: model(64, 512), device, tmp_path)
    assert kind_of(watch) is CauseKind.DOES_NOT_FIT


@pytest.mark.parametrize("joined", [False, True], ids=["in a batch", "when joined"])
def test_evaluation_that_keeps_its_outputs(tmp_path, joined) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(64, WIDTH))
        net.eval()
        predictions = []
        with torch.no_grad():
            for _ in range(8 if joined else 1000):
                predictions.append(net(torch.ones(40_960, WIDTH)))
            torch.cat(predictions)

    watch = explained(program, SimulatedGpu(160 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.EVAL_ACCUMULATION
    assert watch.report.evidence.failure.phase == "eval"
    assert "predictions" in watch.report.headline


def test_evaluation_that_joins_its_outputs_in_an_object(tmp_path) -> None:
    class Outputs:
        def __init__(self) -> None:
            self.joined = torch.ones(0, WIDTH)

        def add(self, output: torch.Tensor) -> None:
            self.joined = torch.cat([self.joined, output])

    def program():
        net, outputs = model().eval(), Outputs()
        with torch.no_grad():
            while True:
                outputs.add(net(torch.ones(20_480, WIDTH)))

    watch = explained(program, SimulatedGpu(160 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.EVAL_ACCUMULATION
    assert watch.report.evidence.alive.held[0].name == "Outputs.joined"
    assert "the attribute Outputs.joined, filled in test_watching.py" in watch.report.headline


def test_a_model_made_after_others_is_followed_when_it_evaluates(tmp_path) -> None:
    others = [model().eval(), model().eval()]

    def program():
        net, outputs = model().eval(), []
        with torch.no_grad():
            while True:
                outputs.append(net(torch.ones(20_480, WIDTH)))

    watch = explained(program, SimulatedGpu(160 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.EVAL_ACCUMULATION
    assert len(others) == 2


def test_a_copy_of_the_weights_made_to_save_them(tmp_path) -> None:
    def save(net: nn.Module) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in net.state_dict().items()}

    def program():
        net = model(24, 1024)  # 96 MiB of weights, and as much of gradients
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(16, 1024)).sum().backward()
        optimizer.step()
        save(net)

    watch = explained(program, SimulatedGpu(240 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.SAVE_COPY
    assert watch.report.cause.size > 20 * MIB


def test_a_copy_made_in_the_loop_itself_is_told_by_its_looks(tmp_path) -> None:
    def program():
        net = model(24, 1024)  # 96 MiB of weights, and as much of gradients
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(16, 1024)).sum().backward()
        optimizer.step()
        best = {}
        for name, weight in net.named_parameters():
            best[name] = weight.detach().clone()

    watch = explained(program, SimulatedGpu(240 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.SAVE_COPY


def test_averaged_weights_are_not_taken_for_a_save(tmp_path) -> None:
    def program():
        net = model(12, 1024)
        average = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(16, 1024)).sum().backward()
        optimizer.step()
        torch.ones(150 * MIB, dtype=torch.uint8)  # the next batch, say
        assert average

    watch = explained(program, SimulatedGpu(240 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.DOES_NOT_FIT


def test_the_first_step_of_an_optimizer(tmp_path) -> None:
    def program():
        net = model(24, 1024)  # 96 MiB of weights, as much of gradients, twice of state
        train_step(net, torch.optim.AdamW(net.parameters()), torch.ones(16, 1024))

    elsewhere = torch.optim.AdamW(model(24, 512).parameters())  # its weights are not on the device
    watch = explained(program, SimulatedGpu(300 * MIB), tmp_path)
    report = watch.report
    assert elsewhere.param_groups
    assert kind_of(watch) is CauseKind.OPTIMIZER_FIRST_STEP
    weights = report.evidence.alive.categories["parameter"]
    assert report.cause.size == pytest.approx(2 * weights, rel=0.01)
    assert report.evidence.alive.categories["gradient"] == weights


def test_the_logits_of_a_large_vocabulary(tmp_path) -> None:
    def program():
        net = nn.Sequential(nn.Embedding(32_000, 64), nn.Linear(64, 32_000))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        tokens = torch.ones(2, 512, dtype=torch.long)
        logits = net(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    watch = explained(program, SimulatedGpu(260 * MIB), tmp_path)
    assert kind_of(watch) is CauseKind.LARGE_LOGITS
    assert "32,000" in watch.report.headline


# --- what was alive -------------------------------------------------------------------------------


def test_activations_are_filed_under_the_module_that_saved_them(tmp_path) -> None:
    def program():
        net = model()
        train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(131_072, WIDTH))

    alive = explained(program, SimulatedGpu(200 * MIB), tmp_path).report.evidence.alive
    assert alive.categories["activation"] > 90 * MIB
    assert alive.modules["blocks.*.fc"] > 90 * MIB
    assert sum(alive.categories.values()) >= 170 * MIB


def test_what_is_on_the_host_or_fake_is_not_counted(tmp_path) -> None:
    device, on_host = SimulatedGpu(64 * MIB), model(4, 1024)
    with FakeTensorMode():
        fake = torch.ones(512 * MIB, dtype=torch.uint8)

    def program():
        net = model()
        assert on_host is not net
        full(device)

    alive = explained(program, device, tmp_path).report.evidence.alive
    weights = sum(parameter.numel() for parameter in model().parameters())
    assert alive.categories["parameter"] == 4 * weights
    assert sum(alive.categories.values()) < MIB
    assert fake.numel() == 512 * MIB


def test_a_tensor_that_wraps_others_counts_as_those(tmp_path) -> None:
    device = SimulatedGpu(64 * MIB)

    def program():
        kept = [TwoTensor(torch.ones(MIB), torch.ones(MIB)) for _ in range(3)]
        full(device)
        assert kept

    alive = explained(program, device, tmp_path).report.evidence.alive
    assert alive.categories == {"kept": 24 * MIB}


def test_what_a_checkpoint_packed_away_is_not_unpacked(tmp_path) -> None:
    recomputed = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            recomputed.append(1)
            return self.layer(x).relu()

    def program():
        blocks = nn.ModuleList(Block() for _ in range(4))
        x = torch.ones(8192, WIDTH)
        for block in blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        torch.ones(400 * MIB, dtype=torch.uint8)

    explained(program, SimulatedGpu(200 * MIB), tmp_path)
    assert len(recomputed) == 4


# --- the error, the report, and nothing else ------------------------------------------------------


def full(device: SimulatedGpu) -> None:
    torch.empty(2 * device.read().total, dtype=torch.uint8)


def test_the_error_is_the_one_that_was_raised_with_a_note(tmp_path) -> None:
    device, raised = SimulatedGpu(64 * MIB), []

    def program():
        try:
            full(device)
        except torch.OutOfMemoryError as error:
            raised.append(error)
            raise

    watch = oomph.watch(meter=device, report=tmp_path / "r.json")
    with device, pytest.raises(torch.OutOfMemoryError) as caught, watch:
        program()
    assert caught.value is raised[0]
    assert [note.startswith("oomph: out of memory") for note in caught.value.__notes__] == [True]


def test_nothing_of_the_program_stays_alive_after_it(tmp_path) -> None:
    device = SimulatedGpu(64 * MIB)
    watch = oomph.watch(meter=device, report=tmp_path / "r.json")
    with device:
        try:
            with watch:
                kept = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(3)]
                full(device)
        except torch.OutOfMemoryError:
            pass
        del kept
    assert device.sample().allocated == 0


def test_the_report_is_json_for_its_owner_alone(capsys, tmp_path) -> None:
    device = SimulatedGpu(64 * MIB)
    with device, pytest.raises(torch.OutOfMemoryError), oomph.watch(meter=device) as watch:
        full(device)
    path = watch.report_path
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text()) == watch.report.as_dict()
        printed = capsys.readouterr().err.splitlines()
        assert printed[0] == f"oomph: {watch.report.headline}"
        assert str(path) in printed[-1]
    finally:
        path.unlink()


def test_a_report_is_explained_in_the_same_words(tmp_path) -> None:
    def program():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        kept = []
        while True:
            train_step(net, optimizer, torch.ones(4096, WIDTH))
            kept.append(torch.ones(4 * MIB, dtype=torch.uint8))

    watch = explained(program, SimulatedGpu(100 * MIB), tmp_path)
    found = oomph.explain(tmp_path / "report.json")
    assert (found.kind, found.predicted) == ("watch report", False)
    assert found.headline == watch.report.headline
    assert found.categories == watch.report.evidence.alive.categories
    text = str(found)
    assert text.startswith(watch.report.headline)
    assert "Allocated after each step" in text
    assert "try store numbers in kept" in text


def test_only_the_innermost_watch_explains(tmp_path, capsys) -> None:
    device = SimulatedGpu(64 * MIB)
    outer = oomph.watch(meter=device)
    inner = oomph.watch(meter=device, report=tmp_path / "r.json")
    with device, pytest.raises(torch.OutOfMemoryError), outer, inner:
        full(device)
    assert inner.report is not None
    assert outer.report is None


def test_as_a_decorator_each_call_is_watched(tmp_path) -> None:
    device = SimulatedGpu(64 * MIB)

    @oomph.watch(meter=device, report=tmp_path / "r.json")
    def run(size: int) -> int:
        """Runs."""
        return torch.ones(size, dtype=torch.uint8).numel()

    with device:
        assert run(3) == 3
        with pytest.raises(torch.OutOfMemoryError):
            run(100 * MIB)
    assert (tmp_path / "r.json").exists()
    assert run.__doc__ == "Runs."


def test_as_a_bare_decorator_a_function_stays_itself() -> None:
    @oomph.watch
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8


def test_a_generator_cannot_be_decorated() -> None:
    with pytest.raises(BadInput, match="inside"):

        @oomph.watch
        def batches():
            yield 1


def test_other_errors_pass_and_write_nothing(tmp_path) -> None:
    watch = oomph.watch(meter=SimulatedGpu(64 * MIB), report=tmp_path / "r.json")
    with pytest.raises(ValueError, match="mine"), watch:
        raise ValueError("mine")
    assert not (tmp_path / "r.json").exists()


def test_an_error_that_only_speaks_of_memory_is_not_taken_for_one(tmp_path) -> None:
    watch = oomph.watch(meter=SimulatedGpu(64 * MIB), report=tmp_path / "r.json")
    with pytest.raises(RuntimeError), watch:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    assert watch.report is None


def test_without_a_gpu_the_error_says_so() -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this PyTorch has CUDA")
    with pytest.raises(torch.OutOfMemoryError) as caught, oomph.watch():
        raise torch.OutOfMemoryError("full")
    assert "no GPU" in caught.value.__notes__[0]


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path) -> None:
    with pytest.raises(BadInput, match="no folder"):
        oomph.watch(report=tmp_path / "missing" / "r.json")
    with pytest.raises(BadInput, match="is a folder"):
        oomph.watch(report=tmp_path)


def test_a_read_only_folder_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(BadInput, match="read-only"):
        oomph.watch(report=tmp_path / "r.json")


def test_a_disk_that_fills_up_later_does_not_hide_the_cause(tmp_path, capsys, monkeypatch) -> None:
    device = SimulatedGpu(64 * MIB)
    folder = tmp_path / "gone"
    folder.mkdir()
    watch = oomph.watch(meter=device, report=folder / "r.json")
    with device, pytest.raises(torch.OutOfMemoryError) as caught, watch:
        folder.rmdir()
        full(device)
    assert "out of memory" in caught.value.__notes__[0]
    assert "could not be written" in capsys.readouterr().err


def test_hooks_are_gone_when_the_watch_is_over() -> None:
    net = model(1)
    with oomph.watch(meter=SimulatedGpu(64 * MIB)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        assert net._forward_pre_hooks
        assert not net[0]._forward_pre_hooks
        train_step(net, optimizer, torch.ones(1, WIDTH))
    assert not net._forward_pre_hooks
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks


def test_a_job_gets_a_plan_that_would_have_fitted(tmp_path) -> None:
    device = SimulatedGpu(64 * MIB)
    net = model(6, 64)
    job = oomph.Job(
        net, nn.MSELoss(), "sgd", (torch.ones(4096, 64), torch.ones(4096, 64)), name="mine"
    )
    watch = oomph.watch(meter=device, report=tmp_path / "r.json", job=job)
    with device, pytest.raises(torch.OutOfMemoryError), watch:
        full(device)
    assert "a plan fits: 64.00 MiB" in watch.report.remedies[-1].why
