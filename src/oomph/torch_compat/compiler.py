"""Attributes that PyTorch's compiler sets on modules and functions, and its settings.

Importing this module does not load the compiler.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch.nn.Module._compiled_call_impl",
        used_for="finds modules that were compiled in place",
        without_it="such modules are hooked or recomputed, and compiled again at each step",
    ),
    PrivateName(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        used_for="the model inside of what `torch.compile` returned",
        without_it="compiled models cannot be planned, nor reported by their names",
    ),
    PrivateName(
        "torch._dynamo.eval_frame.innermost_fn",
        used_for="what it unwraps (`_torchdynamo_orig_callable`) was compiled",
        without_it="weights are streamed into compiled code, which does not see them change",
    ),
    PrivateName(
        "torch.jit.ScriptFunction._torchdynamo_inline",
        used_for="the Python of a scripted function, for the rehearsal and the run",
        without_it="models with TorchScript (DeBERTa) cannot be rehearsed",
    ),
    PrivateName(
        "torch._dynamo.decorators.assume_constant_result",
        used_for="what another thread that compiles asks is not traced (`_dynamo_marked_constant`)",
        without_it="threads that compile beside a rehearsal fail",
    ),
    PrivateName(
        "torch._dynamo.eval_frame._callback_from_stance",
        used_for="functions that the user compiled are rehearsed as they are written",
        without_it="a rehearsal leaves them uncompiled for good, or fails inside the compiler",
    ),
    PrivateName(
        "torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count",
        used_for="such functions with `fullgraph=True`, which miss their compiled frames otherwise",
        without_it="they fail in a rehearsal",
        is_optional=True,
    ),
    PrivateName(
        "torch.utils._triton",
        used_for="answers about the GPU are forgotten after a rehearsal",
        without_it="after a rehearsal PyTorch believes in a GPU that is not there",
    ),
    PrivateName(
        "torch._dynamo.config",
        used_for="how often a block may be compiled again (`recompile_limit`)",
        without_it="models with many alike blocks run most of them uncompiled",
    ),
)

#: Replacements of compiler functions that make compiled code run eagerly.
UNCOMPILED: dict[str, Callable[[Any], Any]] = {
    "_callback_from_stance": lambda _: None,
    "set_fullgraph_compiled_frame_count": lambda _: -1,
}


def loaded_compiler() -> ModuleType | None:
    """The module that hooks the compiler into Python frames; None until the compiler is loaded."""
    return sys.modules.get("torch._dynamo.eval_frame")


#: Attribute of a module: the compiled call if it was compiled in place, or None.
COMPILED_CALL = "_compiled_call_impl"
#: Attribute of the module that `torch.compile` returned: the original module.
ORIGINAL = "_orig_mod"
#: Attribute of the function that `torch.compile` returned: the original function.
ORIGINAL_FUNCTION = "_torchdynamo_orig_callable"
#: Attribute of a TorchScript function: the Python function it was made from.
SCRIPTED = "_torchdynamo_inline"
#: The module in which PyTorch caches whether Triton finds a GPU.
TRITON = "torch.utils._triton"

compiled_call_of: Callable[[nn.Module], Any] = operator.attrgetter(COMPILED_CALL)


def mark_constant(function: Any) -> None:
    """Do what `torch.compiler.assume_constant_result` does, without loading the compiler."""
    function._dynamo_marked_constant = True


def settings() -> Any:
    """The settings of `torch.compile`; loads the compiler."""
    return torch._dynamo.config
