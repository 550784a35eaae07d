"""Ops that write to tensors of the user's own, which a rehearsal leaves as they are (rule 13).

The rehearsed model is a copy; the loss and the optimizer's functions are not: they may hold a
teacher, a queue, or a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oomph.techniques.tensor_writes import written_by
from oomph.torch_compat.fake_tensors import FakeTensor, current_fake_mode
from oomph.torch_compat.operators import schema_of
from oomph.torch_compat.pytree import tree_map


def run_fake(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op's fake result; what it would write to for real is replaced by a fake tensor.

    PyTorch's fake mode runs some ops for real where no argument is fake, as adding to a counter.
    """
    mode = current_fake_mode() if schema_of(func).is_mutable else None
    if mode is None:
        return func(*args, **kwargs)
    own = {id(one) for one in written_by(func, args, kwargs) if not isinstance(one, FakeTensor)}

    def stand_in(leaf: Any) -> Any:
        return mode.from_tensor(leaf) if id(leaf) in own else leaf

    if own:
        args, kwargs = tree_map(stand_in, (args, kwargs))
    return func(*args, **kwargs)
