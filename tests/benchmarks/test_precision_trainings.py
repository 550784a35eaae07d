"""The benchmark of adaptive precision trains, rehearses and writes what it found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.precision import Row, rehearsed, train, ways, write
from oomph.hardware import find_gpu


def test_a_short_training_is_judged_rehearsed_and_written(tmp_path: Path) -> None:
    adaptive = ways(steps=10)[2]
    trained = train("sensitive", adaptive, 0, device="cpu", steps=10)
    assert trained.levels["blocks.0"] == "bf16"
    assert trained.levels["entry.linear"] == "fp32"
    assert 0.0 <= trained.accuracy <= 1.0
    step = rehearsed("sensitive", adaptive, [trained], find_gpu("h100-sxm"))
    row = Row(model="sensitive", way=adaptive.name, trained=[trained], step=step)
    options = argparse.Namespace(out=tmp_path, device="cpu", gpu="h100-sxm", steps=10)
    write([row], options)
    (found,) = json.loads((tmp_path / "precision.json").read_text())["rows"]
    assert found["trained"][0]["loss"] == trained.loss
    assert found["step"]["peak"] == step.peak > 0
