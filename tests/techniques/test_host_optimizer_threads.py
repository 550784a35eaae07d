"""Steps by a thread of the host: the same weights, and errors that come out as themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from host_training import Recipe, Training, nearly, plain

from oomph.errors import BadInput
from oomph.memory.link import Copy, HostWork, InstantLink
from oomph.memory.worker import HostWorker
from oomph.techniques.optimizer_twin import OptimizerTwin
from oomph.techniques.watched_tensors import own_work

CLIPPED = Recipe(clip_norm=0.3)


class ThreadLink(InstantLink):
    """Copies at once; the host works in a thread, which takes its time."""

    def __init__(self, delay: float = 0.0) -> None:
        self._worker = HostWorker()
        self._delay = delay

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> HostWork:
        def slowly() -> None:
            time.sleep(self._delay)
            work()

        return self._worker.begin(slowly, after)

    def close(self) -> None:
        self._worker.close()


@pytest.fixture
def link() -> Iterator[ThreadLink]:
    link = ThreadLink()
    yield link
    link.close()


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("oomph-host")]


@pytest.mark.parametrize("delay", [0.0, 0.002])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_thread_steps_as_the_plain_optimizer(
    share: float, clip_norm: float | None, delay: float
) -> None:
    recipe = Recipe(clip_norm=clip_norm)
    link = ThreadLink(delay)
    training = Training(recipe=recipe)
    host = training.go_to_host(link, host_share=share, bucket=3000)
    nearly(training.run(6), plain(recipe, 6))
    assert workers()
    host.undo()
    link.close()
    assert not workers()


def fail_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    step = OptimizerTwin.step

    def fail(twin: OptimizerTwin, *args: Any) -> Any:
        if threading.current_thread().name.startswith("oomph-host"):
            raise ZeroDivisionError("on the host")
        return step(twin, *args)

    monkeypatch.setattr(OptimizerTwin, "step", fail)


def test_an_error_in_the_thread_comes_out_of_the_next_forward_as_itself(
    monkeypatch: pytest.MonkeyPatch, link: ThreadLink
) -> None:
    training = Training(recipe=CLIPPED)
    host = training.go_to_host(link, host_share=1.0)
    training.step(0)
    host.settle()
    fail_on_host(monkeypatch)
    training.step(1)
    with pytest.raises(ZeroDivisionError, match="on the host"):
        training.step(2)
    assert host.dirty
    with pytest.raises(BadInput, match="broke off halfway"):
        training.step(2)
    with pytest.raises(BadInput, match="broke off halfway"):
        training.optimizer.state_dict()
    host.undo()


def test_an_error_in_the_thread_comes_out_of_settle_as_itself(
    monkeypatch: pytest.MonkeyPatch, link: ThreadLink
) -> None:
    training = Training(recipe=CLIPPED)
    host = training.go_to_host(link, host_share=1.0)
    fail_on_host(monkeypatch)
    training.step(0)
    with pytest.raises(ZeroDivisionError, match="on the host"):
        host.settle()
    host.undo()


def test_the_thread_that_trains_goes_on_meanwhile() -> None:
    """`step` returns while the host has not begun."""
    gate = threading.Event()
    link = ThreadLink()
    work = link._worker.begin(lambda: gate.wait(10) and None)
    training = Training(recipe=CLIPPED)
    host = training.go_to_host(link, host_share=1.0)
    before = training.model.norm.weight.clone()
    training.step(0)
    assert not work.is_done()
    with own_work():  # whoever looks otherwise waits for the host
        assert torch.equal(training.model.norm.weight, before)
    gate.set()
    host.settle()
    assert not torch.equal(training.model.norm.weight, before)
    host.undo()
    link.close()


def test_a_worker_waits_for_copies_and_keeps_the_order() -> None:
    order: list[str] = []

    class Waiting:
        def wait(self) -> None:
            raise AssertionError("the host waits, not a stream")

        def finish(self) -> None:
            order.append("copy")

    worker = HostWorker()
    worker.begin(lambda: order.append("first"), [Waiting()])
    worker.begin(lambda: order.append("second")).finish()
    worker.close()
    assert order == ["copy", "first", "second"]
    worker.begin(lambda: order.append("third")).wait()
    worker.close()
    assert order[-1] == "third"
