"""How PyTorch's compiler traces a block and partitions its graph; loads much of the compiler."""

from __future__ import annotations

from typing import Any

import torch._dynamo.trace_rules
from torch._functorch import aot_autograd, compile_utils
from torch._functorch import config as config
from torch._functorch import partitioners as partitioners
from torch.fx import _lazy_graph_module

from oomph.torch_compat.private_name import PrivateName

NAMES = (
    PrivateName(
        "torch._functorch.aot_autograd.aot_function",
        used_for="traces a block's forward and backward as the compiler does",
        without_it="compiled blocks cannot be rehearsed",
    ),
    PrivateName(
        "torch._functorch.compile_utils.fx_graph_cse",
        used_for="makes equal ops one, as the compiler does",
        without_it="compiled blocks are rehearsed with ops that are not run",
    ),
    PrivateName(
        "torch._functorch.partitioners",
        used_for="cuts the graph as the compiler does: what is saved, what is recomputed",
        without_it="compiled blocks are rehearsed with other activations",
    ),
    PrivateName(
        "torch._functorch.config",
        used_for="the settings by which it is cut",
        without_it="compiled blocks are rehearsed with other activations",
    ),
    PrivateName(
        "torch.fx._lazy_graph_module._make_graph_module",
        used_for="makes a graph that is looked at and not run",
        without_it="rehearsing compiled blocks takes longer",
    ),
    PrivateName(
        "torch.fx._lazy_graph_module._use_lazy_graph_module",
        used_for="writes no Python for such graphs",
        without_it="rehearsing compiled blocks takes longer",
    ),
    PrivateName(
        "torch._dynamo.trace_rules.get_torch_obj_rule_map",
        used_for="the compiler files PyTorch's own functions before some are replaced",
        without_it="threads that compile beside a rehearsal find stand-ins",
    ),
    PrivateName(
        "torch._inductor.config",
        used_for="draws random numbers as code does that was not compiled",
        without_it="compiled blocks are rehearsed with other random ops",
    ),
    PrivateName(
        "torch._inductor.pattern_matcher",
        used_for="has to be loaded before equal ops are made one",
        without_it="`fx_graph_cse` fails",
    ),
    PrivateName(
        "torch._inductor.decomposition.select_decomp_table",
        used_for="takes ops apart as the compiler does",
        without_it="compiled blocks are rehearsed with other ops",
    ),
)

aot_function = aot_autograd.aot_function
fx_graph_cse = compile_utils.fx_graph_cse
make_graph_module = _lazy_graph_module._make_graph_module
use_lazy_graph_module = _lazy_graph_module._use_lazy_graph_module


def file_functions() -> None:
    """Make the compiler build its table of PyTorch's functions, which it keys by identity, now."""
    torch._dynamo.trace_rules.get_torch_obj_rule_map()


def compiler_settings() -> Any:
    """The settings of the compiler's own backend, which the first call loads."""
    from torch._inductor import config

    return config


def decompositions() -> Any:
    """The decompositions that this backend applies to ops."""
    from torch._inductor import pattern_matcher  # noqa: F401 - making equal ops one needs it
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
