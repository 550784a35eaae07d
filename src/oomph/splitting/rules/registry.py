"""The registry of rules, by op name."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import resources

from oomph.splitting.call import Call
from oomph.splitting.flow import Flow

Rule = Callable[[Call], Flow]

#: Op names by what the ops do; see `ops.toml`.
OPS: dict[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in tomllib.loads(
        resources.files("oomph.splitting.rules").joinpath("ops.toml").read_text(encoding="utf-8")
    ).items()
}
#: Rules by the op's name without its overload.
RULES: dict[str, Rule] = {}


def enter(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ops."""

    def decorate(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return decorate
