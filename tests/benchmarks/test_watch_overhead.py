"""The benchmark of watching tells a cost from noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import watch_overhead
from benchmarks.watch_overhead import Training, Watching, _SlowMeter, main, overhead


def noisy_steps(seed: int, rounds: int = 80) -> np.ndarray:
    """Seconds of steps on a machine where every fifth block is disturbed."""
    draw = np.random.default_rng(seed)
    disturbed = draw.random(rounds) < 0.2
    return 10e-3 * (1 + 0.01 * draw.standard_normal(rounds) + disturbed * draw.random(rounds))


def test_a_cost_is_found_whatever_all_blocks_of_a_round_have_in_common() -> None:
    drift = np.linspace(1.0, 3.0, 80)
    found = overhead(1.015 * drift, drift)
    assert [found.median, found.low, found.high] == pytest.approx([0.015] * 3)
    assert str(found) == "1.50 % (95 % interval 1.50 to 1.50)"


def test_a_cost_is_told_from_none_although_steps_are_disturbed() -> None:
    plain, others = noisy_steps(0), noisy_steps(1)
    none, some = overhead(others, plain), overhead(1.02 * others, plain)
    assert none.low < 0 < none.high
    assert 0 < some.low < 0.02 < some.high


def test_fewer_rounds_are_less_certain() -> None:
    few, many = (overhead(noisy_steps(2, rounds), noisy_steps(3, rounds)) for rounds in (10, 400))
    assert few.high - few.low > 2 * (many.high - many.low)


def test_only_watched_blocks_are_watched() -> None:
    reads = 0

    class CountingMeter(_SlowMeter):
        def is_ready(self) -> bool:
            nonlocal reads
            reads += 1
            return True

    training = Training(device="cpu", layers=1, width=4, rows=1)
    watching = Watching(training, CountingMeter())
    before = reads
    training.clock()
    assert reads == before
    watching.clock()
    assert reads > before
    after = reads
    training.clock()
    assert reads == after


def test_all_of_it_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch_overhead, "LEAST_ROUNDS", 3)
    monkeypatch.setattr(watch_overhead, "STEP_SECONDS", 1e-6)
    main(["--seconds", "0", "--out", str(tmp_path / "watch.json")])
    cases = json.loads((tmp_path / "watch.json").read_text())["cases"]
    assert [case["busy"] for case in cases] == ["card", "host"]
    for case in cases:
        assert [sorted(one) for one in case["rounds"]] == [["plain", "plain again", "watched"]] * 3
        assert case["overhead"]["low"] <= case["overhead"]["median"] <= case["overhead"]["high"]
    assert capsys.readouterr().out.count("overhead: ") == 2
