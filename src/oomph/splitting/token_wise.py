"""Modules known to process each token independently, although their ops sort all tokens.

Mixtures of experts group the tokens of a batch by the expert that each is routed to, and put them
back afterwards. No single op shows that this keeps tokens separate, but the interface that
transformers gives all its experts does: it takes each token's state, its experts and their weights.
"""

from __future__ import annotations

import inspect

from torch import nn

#: The arguments that the forward of transformers' experts takes.
_TAKES = ("hidden_states", "top_k_index", "top_k_weights")


def is_token_wise(module: nn.Module) -> bool:
    """Whether a module is one of transformers' own experts."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return False
    takes = tuple(inspect.signature(kind.forward).parameters)[1:]
    return takes == _TAKES
