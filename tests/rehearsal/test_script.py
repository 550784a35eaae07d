"""Rehearsing a user's own script, unmodified."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import oomph
from oomph import BadInput, CannotRehearse, Category, Timeline, find_gpu
from oomph.rehearsal.script import estimate_script, rehearse_script

EXAMPLES = Path(__file__).parents[2] / "examples"
GPU = find_gpu("rtx-4090")

PLAIN = {"layers": 2, "width": 64, "heads": 2, "vocab-size": 512, "block-size": 64, "batch-size": 4}
TRAINER = {"layers": 2, "width": 64, "heads": 4, "vocab-size": 512, "seq": 32, "batch-size": 4}
LIGHTNING = {
    "width": 8,
    "depth": 2,
    "classes": 10,
    "image-size": 32,
    "samples": 64,
    "batch-size": 8,
}
#: Sizes small enough for a test.
SCRIPTS: dict[str, dict[str, int]] = {
    "plain_loop.py": PLAIN,
    "hf_trainer.py": TRAINER,
    "lightning_script.py": LIGHTNING,
}


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(tmp_path: Path, *lines: str, name: str = "train.py") -> Path:
    script = tmp_path / name
    script.write_text("\n".join(lines) + "\n")
    return script


def bytes_of(timeline: Timeline, category: Category, phase: str = "step") -> int:
    """Bytes of one category that are alive at the end of a phase."""
    end = max(span.stop for span in timeline.spans if span.name == phase)
    return sum(b.size for b in timeline.alive_at(end - 1) if b.category is category)


def arguments(given: dict[str, int]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]


def parameter_bytes(script: str, given: dict[str, int]) -> int:
    """Of the example's model, built for real."""
    names: dict[str, Any] = runpy.run_path(str(EXAMPLES / script), run_name="example")
    if script == "plain_loop.py":
        model = names["GPT"](
            given["vocab-size"],
            given["block-size"],
            given["layers"],
            given["heads"],
            given["width"],
        )
    elif script == "hf_trainer.py":
        model = names["LlamaForCausalLM"](
            names["LlamaConfig"](
                vocab_size=given["vocab-size"],
                hidden_size=given["width"],
                intermediate_size=4 * given["width"],
                num_hidden_layers=given["layers"],
                num_attention_heads=given["heads"],
                num_key_value_heads=given["heads"] // 2,
            )
        )
    else:
        model = names["Classifier"](given["width"], given["depth"], given["classes"], 1e-3)
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("script", SCRIPTS)
def test_real_scripts_are_rehearsed_as_they_are(script: str, capsys: Any) -> None:
    given = SCRIPTS[script]
    found = estimate_script(EXAMPLES / script, arguments(given), gpu=GPU)
    parameters = parameter_bytes(script, given)
    assert found.fits
    assert found.notes[0] == "stopped after 2 optimizer steps"
    assert bytes_of(found.timeline, Category.PARAMETER) == parameters
    assert bytes_of(found.timeline, Category.GRADIENT) == parameters
    assert bytes_of(found.timeline, Category.OPTIMIZER) >= 2 * parameters
    assert bytes_of(found.timeline, Category.OPTIMIZER, phase="build") == 0
    assert {"build", "first step", "step"} <= set(found.phases)
    assert any(b.category is Category.ACTIVATION for b in found.timeline.blocks)
    assert bytes_of(found.timeline, Category.INPUT) > 0
    assert any("taken to be 1.0" in note for note in found.notes)
    assert any("." in name for name in found.modules_at_peak)


@pytest.mark.parametrize("script", SCRIPTS)
def test_twice_the_batch_needs_more(script: str) -> None:
    given = SCRIPTS[script]
    twice = given | {"batch-size": 2 * given["batch-size"]}
    once, again, doubled = (
        estimate_script(EXAMPLES / script, arguments(sizes), gpu=GPU)
        for sizes in (given, given, twice)
    )
    assert once.peak == again.peak
    assert doubled.peak.allocated > once.peak.allocated


def test_a_script_needs_what_the_same_job_needs() -> None:
    size = {"layers": 4, "heads": 4, "width": 256}
    vocab, length, batch, parts = 8192, 256, 8, 2
    found = estimate_script(
        EXAMPLES / "plain_loop.py",
        arguments(
            {
                **size,
                "vocab-size": vocab,
                "block-size": length,
                "batch-size": batch,
                "gradient-accumulation": parts,
                "grad-clip": 0,
            }
        ),
        gpu=GPU,
    )
    make_model = runpy.run_path(str(EXAMPLES / "plain_loop.py"), run_name="example")["GPT"]
    held: list[torch.Tensor] = []

    def loss(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, loss = model(given["x"], given["y"])
        held[:] = [logits]  # as the loop's variable does, until the next forward
        return loss

    tokens = torch.zeros(batch * parts, length, dtype=torch.long)
    job = oomph.Job(
        lambda: make_model(vocab=vocab, length=length, **size),
        loss=loss,
        optimizer="adamw-fused",
        batch={"x": tokens, "y": tokens.clone()},
        precision="bf16-mixed",
        micro_batch=batch,
    )
    expected = oomph.estimate(job, gpu=GPU).phases["step"]
    assert found.phases["step"].allocated == pytest.approx(expected.allocated, rel=0.01)


def test_it_stops_after_the_steps_asked_for(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "model = torch.nn.Linear(8, 8).cuda()",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        "while True:",
        "    try:",
        "        model(torch.randn(4, 8, device='cuda')).sum().backward()",
        "        optimizer.step()",
        "    except Exception:",
        "        pass",
        "    print('a step')",
    )
    for steps in (1, 3):
        timeline = rehearse_script(script, gpu=GPU, steps=steps)
        plural = "" if steps == 1 else "s"
        assert timeline.notes[0] == f"stopped after {steps} optimizer step{plural}"


def test_every_optimizer_makes_its_steps(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "one, two = (torch.nn.Linear(8, 8).cuda() for _ in range(2))",
        "first = torch.optim.Adam(one.parameters())",
        "second = torch.optim.Adam(two.parameters())",
        "while True:",
        "    one(torch.randn(4, 8, device='cuda')).sum().backward(); first.step()",
        "    two(torch.randn(4, 8, device='cuda')).sum().backward(); second.step()",
        "    print('round')",
    )
    timeline = rehearse_script(script, gpu=GPU)
    moments = 2 * 2 * (8 * 8 + 8) * 4
    assert moments <= bytes_of(timeline, Category.OPTIMIZER) < moments + 64


def test_a_script_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import sys, torch",
        "model = torch.nn.Linear(8, 8).cuda().eval()",
        "with torch.inference_mode():",
        "    model(torch.randn(4, 8).cuda())",
        "sys.exit(0)",
    )
    found = estimate_script(script, gpu=GPU)
    assert found.notes == ("the script ended by itself after 0 optimizer steps",)
    assert set(found.phases) == {"build", "eval"}


@pytest.mark.parametrize("code", ["3", "'no data'"])
def test_a_script_that_exits_with_an_error_is_refused(tmp_path: Path, code: str) -> None:
    script = write(tmp_path, "import sys", f"sys.exit({code})")
    with pytest.raises(CannotRehearse, match=r"train\.py:2 .*exit"):
        rehearse_script(script, gpu=GPU)


def test_a_branch_on_data_names_the_line_of_the_script(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "y = torch.nn.Linear(4, 4).cuda()(torch.randn(2, 4).cuda())",
        "if torch.logical_xor(y.sum() > 0, y.mean() > 1):",
        "    print('positive')",
    )
    with pytest.raises(CannotRehearse, match=r"^train\.py:3 branches"):
        rehearse_script(script, gpu=GPU)


def test_a_failing_script_names_its_line_and_the_error(tmp_path: Path) -> None:
    write(tmp_path, "def shout():", "    raise ValueError('too loud')", name="voice.py")
    script = write(tmp_path, "import voice", "", "voice.shout()")
    expected = r"voice\.py:2 \(called in train\.py:3\) raised ValueError: too loud"
    with pytest.raises(CannotRehearse, match=expected):
        rehearse_script(script, gpu=GPU)
    assert "voice" not in sys.modules


def test_a_failure_inside_torch_names_the_line_of_the_script(tmp_path: Path) -> None:
    script = write(tmp_path, "import torch", "torch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()")
    with pytest.raises(CannotRehearse, match=r"^train\.py:2 raised RuntimeError"):
        rehearse_script(script, gpu=GPU)


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "missing.py", "no file"),
        (tmp_path, "folder"),
        (write(tmp_path, "x = 1", "def f(:", name="wrong.py"), r"wrong\.py:2"),
    ):
        with pytest.raises(BadInput, match=message):
            rehearse_script(path, gpu=GPU)
    with pytest.raises(BadInput, match="at least one"):
        rehearse_script(write(tmp_path, "pass"), gpu=GPU, steps=0)


def test_the_process_is_as_it_was(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, random, sys, torch",
        "assert __name__ == '__main__' and sys.argv[1:] == ['--fast']",
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 1",
        "torch.set_default_dtype(torch.bfloat16)",
        "torch.set_default_device('cuda')",
        "torch.set_grad_enabled(False)",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cudnn.benchmark = True",
        "torch.manual_seed(3); random.seed(3)",
        "assert torch.zeros(3).is_cuda",
        "os.environ['SEEN'] = 'yes'; os.chdir('/'); sys.path.append('/nowhere')",
        "sys.argv.append('more')",
    )

    def state() -> list[Any]:
        return [
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.get_rng_state().tolist(),
            torch.cuda.is_available,
            torch.Generator,
            torch.compile,
            torch.save,
            torch.autograd.backward,
            torch.zeros(2).tolist(),
            dict(os.environ),
            Path.cwd(),
            list(sys.argv),
            list(sys.path),
            sys.modules["__main__"],
            open,
            os.stat,
        ]

    before = state()
    rehearse_script(script, ["--fast"], gpu=GPU)
    assert state() == before


def test_what_the_script_writes_is_private(tmp_path: Path) -> None:
    kept = tmp_path / "log.csv"
    kept.write_text("precious")
    script = write(
        tmp_path,
        "import os, shutil, torch",
        "from pathlib import Path",
        "assert open('log.csv').read() == 'precious'",
        "with open('log.csv', 'w') as log: log.write('loss')",
        "assert Path('log.csv').read_text() == 'loss'",
        "os.makedirs('out/deep', exist_ok=True)",
        "torch.save(torch.nn.Linear(4, 4).cuda().state_dict(), 'out/deep/model.pt')",
        "os.replace('out/deep/model.pt', 'out/best.pt')",
        "assert sorted(os.listdir('out')) == ['best.pt', 'deep']",
        "assert [path.name for path in Path('out').glob('*.pt')] == ['best.pt']",
        "shutil.rmtree('out')",
        "assert not os.path.exists('out') and Path('log.csv').exists()",
        "os.remove('log.csv')",
        "assert not Path('log.csv').exists()",
    )
    timeline = rehearse_script(script, gpu=GPU)
    assert "checkpoints were not written" in timeline.notes
    assert kept.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"log.csv", "train.py"}


def test_a_checkpoint_is_loaded_where_it_belongs(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(100, 100), "step": 7}, tmp_path / "old.pt")
    script = write(
        tmp_path,
        "import torch",
        "kept = torch.load('old.pt', map_location='cuda')",
        "assert kept['weight'].is_cuda and kept['step'] == 7",
        "assert not torch.load('old.pt', weights_only=True)['weight'].is_cuda",
    )
    timeline = rehearse_script(script, gpu=GPU)
    assert [block.size for block in timeline.blocks] == [40_000]


def test_what_is_left_out_is_noted(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "from torch.utils.data import DataLoader, TensorDataset",
        "model = torch.compile(torch.nn.Linear(8, 8).cuda())",
        "data = TensorDataset(torch.randn(16, 8))",
        "for (x,) in DataLoader(data, batch_size=4, num_workers=3, shuffle=True, pin_memory=True):",
        "    model(x.cuda(non_blocking=True)).sum().backward()",
        "assert model._orig_mod.weight.grad is not None and model.in_features == 8",
        "torch.cuda.synchronize()",
    )
    notes = rehearse_script(script, gpu=GPU).notes
    assert any("torch.compile was left out" in note for note in notes)
    assert any("data workers" in note for note in notes)


def test_tensors_can_be_read_and_printed(tmp_path: Path, capsys: Any) -> None:
    script = write(
        tmp_path,
        "import copy, numpy, torch",
        "loss = torch.randn(3, device='cuda', generator=torch.Generator('cuda')).mean()",
        "print(f'loss {loss:.2f} {loss.item()}', loss)",
        "assert torch.arange(3).numpy().tolist() == [0, 1, 2]",
        "assert numpy.asarray(torch.randn(2).cuda().cpu()).tolist() == [0, 0]",
        "assert torch.from_numpy(numpy.arange(4)).cuda().tolist() == [0, 1, 2, 3]",
        "assert sorted(torch.randperm(4).tolist()) == [0, 1, 2, 3]",
        "assert torch.tensor(2).cuda().item() == 2",
        "assert copy.deepcopy(torch.ones(2)).tolist() == [1, 1]",
        "assert torch.ones(2).pin_memory().to('cuda:0', non_blocking=True).device.index == 0",
        "assert torch.ones(2, device='cuda').new_tensor([1]).is_cuda",
        "with torch.device('cuda'): assert torch.zeros(2).is_cuda",
        "with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()): pass",
    )
    notes = rehearse_script(script, gpu=GPU).notes
    assert "loss 1.00 1.0 tensor(…" in capsys.readouterr().out
    assert any("train.py:3 was taken to be 1.0" in note for note in notes)


def test_output_can_be_kept_out_of_stdout(tmp_path: Path, capsys: Any) -> None:
    script = write(tmp_path, "print('hello')")
    rehearse_script(script, gpu=GPU, stdout_to_stderr=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello\n"


def test_a_script_that_starts_processes_is_refused(tmp_path: Path) -> None:
    script = write(tmp_path, "import torch.multiprocessing as mp", "mp.spawn(print, nprocs=2)")
    with pytest.raises(CannotRehearse, match=r"train\.py:2: .*processes"):
        rehearse_script(script, gpu=GPU)


STAYS_ON_THE_HOST = (
    "import torch",
    "model = torch.nn.Linear(512, 512)",
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "for _ in range(3):",
    "    model(torch.randn(4, 512)).sum().backward()",
    "    optimizer.step()",
)


def test_a_model_that_stayed_on_the_host_is_said_first(tmp_path: Path) -> None:
    taken = "taken = torch.ones(1000).cuda()"
    on_host = write(tmp_path, *STAYS_ON_THE_HOST[:2], taken, *STAYS_ON_THE_HOST[2:])
    found = estimate_script(on_host, gpu=GPU)
    assert found.verdict == "inconclusive"
    assert "No parameter that the script used was on the GPU" in found.as_dict()["warnings"][0]
    assert str(found).splitlines()[1] == found.warnings[0]


@pytest.mark.parametrize("lines", [STAYS_ON_THE_HOST, ("print('nothing')",)])
def test_a_script_that_takes_nothing_of_the_gpu_says_so(tmp_path: Path, lines: Any) -> None:
    found = estimate_script(write(tmp_path, *lines), gpu=GPU)
    assert found.verdict == "inconclusive"
    assert "took no memory on the GPU" in found.warnings[0]


def test_parameters_left_on_the_host_are_counted_in_a_note(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "table, model = torch.nn.Embedding(1024, 256), torch.nn.Linear(256, 256).to(device='cuda')",
        "optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1)",
        "for _ in range(3):",
        "    model(table(torch.ones(4, dtype=torch.long)).cuda()).sum().backward()",
        "    optimizer.step()",
    )
    found = estimate_script(script, gpu=GPU)
    assert found.fits
    assert "1.00 MiB of the parameters that were used stayed on the host" in found.notes


@pytest.mark.parametrize(
    ("line", "is_there"),
    [
        ("torch.load(file, map_location='cuda')", True),
        ("torch.load(file, 'cuda:0')", True),
        ("torch.load(file, map_location=torch.device('cuda', 0))", True),
        ("torch.load(file, map_location={'cpu': 'cuda:0'})", True),
        ("torch.load(file, map_location={'cuda:0': 'cuda:0'})", False),
        ("torch.load(file, map_location=lambda storage, location: storage.cuda(0))", True),
        ("torch.load(file, map_location=lambda storage, location: storage)", False),
        ("torch.load(file, map_location=lambda storage, location: None)", False),
        ("torch.load(file)", False),
        ("load_file(safe, device='cuda')", True),
        ("load_file(safe, device=0)", True),
        ("load_file(safe)", False),
    ],
)
def test_a_checkpoint_is_counted_where_it_is_loaded(
    tmp_path: Path, line: str, is_there: bool
) -> None:
    weights = {"weight": torch.zeros(256, 256), "bias": torch.zeros(256)}
    torch.save(weights, tmp_path / "weights.pt")
    save_file(weights, tmp_path / "weights.safetensors")
    script = write(
        tmp_path,
        "import torch",
        "from safetensors.torch import load_file",
        f"file, safe = {str(tmp_path / 'weights.pt')!r}, {str(tmp_path / 'weights.safetensors')!r}",
        f"loaded = {line}",
        "assert {t.is_cuda for t in loaded.values()} == {" + str(is_there) + "}",
    )
    made = [block for block in rehearse_script(script, gpu=GPU).blocks if block.size > 1]
    assert sum(block.size for block in made) == is_there * (256 * 256 + 256) * 4


def test_a_data_parallel_model_runs_on_the_one_gpu(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "model = torch.nn.DataParallel(torch.nn.Linear(256, 256)).to(device='cuda')",
        "optimizer = torch.optim.Adam(model.parameters())",
        "for _ in range(3):",
        "    model(torch.randn(4, 256)).sum().backward()",
        "    optimizer.step()",
    )
    timeline = rehearse_script(script, gpu=GPU)
    assert bytes_of(timeline, Category.PARAMETER) == (256 * 256 + 256) * 4


@pytest.mark.parametrize(
    ("kept", "is_said"),
    [("kept.append(y.detach())", True), ("kept.append(y.mean().item())", False)],
)
def test_memory_that_grows_from_step_to_step_is_said(
    tmp_path: Path, kept: str, is_said: bool
) -> None:
    script = write(
        tmp_path,
        "import torch",
        "model, kept = torch.nn.Linear(256, 2048).cuda(), []",
        "optimizer = torch.optim.Adam(model.parameters())",
        "for _ in range(3):",
        "    y = model(torch.randn(1024, 256, device='cuda'))",
        f"    {kept}",
        "    y.sum().backward()",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
    )
    notes = rehearse_script(script, gpu=GPU).notes
    assert any(note.startswith("8.00 MiB more were alive") for note in notes) is is_said


def test_an_optimizer_with_a_history_has_all_of_it(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import torch",
        "model = torch.nn.Linear(256, 256, bias=False).to(device='cuda')",
        "optimizer = torch.optim.LBFGS(model.parameters(), history_size=7)",
        "x = torch.randn(4, 256, device='cuda')",
        "def closure():",
        "    optimizer.zero_grad()",
        "    loss = model(x).square().mean()",
        "    loss.backward()",
        "    return loss",
        "while True:",
        "    optimizer.step(closure)",
    )
    timeline = rehearse_script(script, gpu=GPU, steps=3)
    held = bytes_of(timeline, Category.OPTIMIZER) / (256 * 256 * 4)
    # Directions and steps of the history, the last direction and the gradient before it.
    assert 2 * 7 + 2 <= held < 2 * 7 + 2.01


def test_what_a_thread_could_not_do_is_said_first(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import threading, torch",
        "model = torch.nn.Linear(256, 256).to(device='cuda')",
        "optimizer, kept = torch.optim.SGD(model.parameters()), []",
        "thread = threading.Thread(target=lambda: kept.append(torch.ones(1 << 20).cuda()))",
        "thread.start()",
        "thread.join()",
        "for _ in range(3):",
        "    model(torch.randn(4, 256).cuda()).sum().backward()",
        "    optimizer.step()",
    )
    found = estimate_script(script, gpu=GPU)
    assert found.verdict == "inconclusive"
    assert found.warnings[0].startswith("What a thread of the script that ended with an error")
