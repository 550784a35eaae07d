"""Blocks: the repeated parts of a model, found without its author's help.

A block is one of several modules of a class that follow each other, in a list, a sequence, or as
neighbours in a stage. Where a repeated module holds a chain of repeated modules itself (the stages
of a vision model), the inner ones are the blocks; experts that stand side by side are not a chain.
Whether modules form a chain only a run can tell, so it is asked of a record of their calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

#: What a call of a module took and gave, as keys of storages, in the order of calls.
Call = tuple[str, frozenset[int], frozenset[int]]

_STRUCTURE = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Neighbours of one class, by path, and the families inside them."""

    paths: tuple[str, ...]
    inner: tuple[Family, ...]

    def all_paths(self) -> Iterator[str]:
        """The paths of this family and of those inside it."""
        yield from self.paths
        for family in self.inner:
            yield from family.all_paths()


def families(model: nn.Module) -> list[Family]:
    """Every group of neighbours that are alike, outermost first."""
    return _families(model, "")


def _families(module: nn.Module, path: str) -> list[Family]:
    members = list(_members(module, path))
    kinds = [type(member) for _, member in members]
    found: list[Family] = []
    for kind in dict.fromkeys(kinds):
        alike = [(at, member) for at, member in members if type(member) is kind]
        inner = tuple(family for at, member in alike for family in _families(member, at))
        if len(alike) > 1 and _is_compound(alike[0][1]):
            found.append(Family(paths=tuple(at for at, _ in alike), inner=inner))
        else:
            found.extend(inner)
    return found


def _members(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The module's children, with lists and sequences opened up."""
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if type(child) in _STRUCTURE:
            yield from _members(child, at)
        else:
            yield at, child


def _is_compound(module: nn.Module) -> bool:
    """Whether a module does more than one thing; a lone linear layer is not worth a block."""
    return sum(1 for part in module.modules() if not list(part.children())) > 1


def choose_blocks(found: Sequence[Family], calls: Sequence[Call]) -> list[str]:
    """The blocks to plan for, in the order they first run."""
    chosen: list[str] = []

    def choose(family: Family) -> None:
        inner = [one for one in family.inner if is_chain(one.paths, calls)]
        if inner:
            for one in inner:
                choose(one)
        elif is_chain(family.paths, calls):
            chosen.extend(family.paths)
        else:
            for one in family.inner:
                choose(one)

    for family in found:
        choose(family)
    order = {path: at for at, (path, _, _) in reversed(list(enumerate(calls)))}
    return sorted((path for path in chosen if path in order), key=lambda path: order[path])


def is_chain(paths: Sequence[str], calls: Sequence[Call]) -> bool:
    """Whether most of these modules take what the one before them gave."""
    made = {path: gave for path, _, gave in calls}
    took = {path: taken for path, taken, _ in calls}
    links = [
        bool(made.get(before, frozenset()) & took.get(after, frozenset()))
        for before, after in itertools.pairwise(paths)
    ]
    return sum(links) * 2 >= len(links) and any(links)
