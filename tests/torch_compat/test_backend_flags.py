"""Flags that PyTorch's test helpers have frozen can be set, and are frozen afterwards."""

from __future__ import annotations

import pytest
import torch

from oomph.techniques.autocast import use_tf32
from oomph.torch_compat.backend_flags import set_backend_flag


@pytest.fixture
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_globals = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(torch_globals, "__allow_nonbracketed_mutation_flag", False)


@pytest.mark.usefixtures("_frozen")
def test_a_plan_with_tf32_is_applied_and_undone_where_flags_are_frozen() -> None:
    before = torch.backends.cudnn.allow_tf32
    undo = use_tf32(not before)
    assert torch.backends.cudnn.allow_tf32 is not before
    undo()
    assert torch.backends.cudnn.allow_tf32 is before


@pytest.mark.usefixtures("_frozen")
def test_flags_stay_frozen_for_others() -> None:
    set_backend_flag(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.cudnn.benchmark = True
