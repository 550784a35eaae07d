"""Allocator settings: set beside the user's own, and taken back, where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from oomph.techniques.allocator_settings import EXPANDABLE, set_allocator


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What PyTorch's allocator was told, on a machine that seems to have a GPU."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return said


def test_settings_are_set_and_switched_off_again(told: list[str]) -> None:
    undo = set_allocator(EXPANDABLE)
    assert told == ["expandable_segments:True"]
    undo()
    assert told[1:] == ["expandable_segments:False"]


def test_the_users_settings_stay_beside_a_plans(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch forgets what it is not told again, but not that segments expand."""
    theirs = "max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", theirs)
    set_allocator(EXPANDABLE)()
    assert told == [f"{theirs},expandable_segments:True", f"expandable_segments:False,{theirs}"]


def test_what_the_user_set_to_something_else_comes_back(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True, max_split_size_mb:64")
    set_allocator("max_split_size_mb:32")()
    assert told == [
        "expandable_segments:True,max_split_size_mb:32",
        "max_split_size_mb:64,expandable_segments:True",
    ]


def test_no_settings_or_no_gpu_changes_nothing(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_allocator("")()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_allocator(EXPANDABLE)()
    assert told == []


@pytest.mark.skipif(
    torch.cuda.is_available() or not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="changes the allocator's real settings, and reads them back",
)
def test_pytorch_understands_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    undo = set_allocator(EXPANDABLE)
    read = torch._C._accelerator_getAllocatorSettings
    assert read() == "max_split_size_mb:128,expandable_segments:True"
    undo()
    assert read() == "expandable_segments:False,max_split_size_mb:128"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    set_allocator(EXPANDABLE)()
