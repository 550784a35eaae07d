"""The default device is that of the thread which asks."""

from __future__ import annotations

import threading

import torch

from oomph.torch_compat.function_modes import default_device


def test_a_device_that_another_thread_is_in_is_no_default_here() -> None:
    entered, done = threading.Event(), threading.Event()
    seen: list[torch.device | None] = []

    def other() -> None:
        with torch.device("meta"):
            entered.set()
            done.wait(20)
            seen.append(default_device())

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    assert default_device() is None
    with torch.device("cpu"):
        assert default_device() == torch.device("cpu")
        done.set()
        thread.join()
    assert default_device() is None
    assert seen == [torch.device("meta")]
