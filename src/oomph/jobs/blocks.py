"""Finds blocks, the repeated parts of a model, without help from its author.

A block is one of several modules that run one after the other, in a list or a sequence, or as
neighbours of one class; or one module that runs several times. For a stage, which itself holds a
list of blocks, those are the blocks; experts that run side by side are not a chain. Only a run
shows whether modules form a chain, so this is read from a record of their calls.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

#: A call of a module: its path, and what its inputs and outputs hold: storages, and the results of
#: other calls that they were computed from. In call order.
Call = tuple[str, frozenset[int], frozenset[int]]

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A module that may be a block, and the families inside it."""

    path: str
    matrices: int
    """Number of weights with more than one row; a layer with its norm has one."""
    inner: tuple[Family, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Sibling modules that may form a chain."""

    members: tuple[Member, ...]
    is_list: bool
    """Whether they are one list of one class, as in a stage."""

    @property
    def paths(self) -> list[str]:
        """The paths of its members."""
        return [member.path for member in self.members]

    def all_paths(self) -> Iterator[str]:
        """The paths of this family and of those inside it."""
        for member in self.members:
            yield member.path
            for family in member.inner:
                yield from family.all_paths()


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of one class that follow each other in a list, outermost lists first.

    For a model of which nothing ran yet: whether they form a chain is not looked at.
    """
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        children = list(module.children())
        alike = len({type(child) for child in children}) == 1 and len(children) > 1
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and alike:
            found.extend(children)
            return
        for child in children:
            search(child)

    search(model)
    return found


def families(model: nn.Module) -> list[Family]:
    """Every group of modules that could form a chain, outermost first."""
    return _families(model, "", set())


def _families(module: nn.Module, path: str, seen: set[int]) -> list[Family]:
    groups: dict[str | type, list[tuple[str, nn.Module]]] = defaultdict(list)
    for shared, at, member in _members(module, path):
        # A module that appears twice is one block.
        if id(member) not in seen and _count_leaves(member) > 1:
            seen.add(id(member))
            groups[shared].append((at, member))
    return [
        Family(
            members=tuple(
                Member(
                    path=at,
                    matrices=sum(1 for parameter in member.parameters() if parameter.dim() > 1),
                    inner=tuple(_families(member, at, seen)),
                )
                for at, member in group
            ),
            is_list=isinstance(shared, str) and len({type(one) for _, one in group}) == 1,
        )
        for shared, group in groups.items()
    ]


def _members(
    module: nn.Module, path: str, within: str | None = None
) -> Iterator[tuple[str | type, str, nn.Module]]:
    """The module's children, each with its group: the outermost list it is in, or its class."""
    if within is None and isinstance(module, (*_LISTS, nn.Sequential)):
        within = path
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        if type(child) in _LISTS:
            yield from _members(child, at, within)
        else:
            yield type(child) if within is None else within, at, child


def _count_leaves(module: nn.Module) -> int:
    """Number of leaf modules; a single one, such as a linear layer, is not worth a block."""
    return sum(1 for part in module.modules() if not list(part.children()))


def choose_blocks(found: Sequence[Family], calls: Sequence[Call]) -> list[str]:
    """The blocks to plan for, in the order they first run."""
    chosen: list[str] = []

    def choose(family: Family) -> None:
        chain = is_chain(family.paths, calls)
        for member in family.members:
            inner = _lists_inside(member, calls) if chain else member.inner
            for one in inner:
                choose(one)
            if chain and not inner:
                chosen.append(member.path)

    for family in found:
        choose(family)
    order = {path: at for at, (path, _, _) in reversed(list(enumerate(calls)))}
    return sorted((path for path in chosen if path in order), key=lambda path: order[path])


def _lists_inside(stage: Member, calls: Sequence[Call]) -> list[Family]:
    """The lists of blocks inside a stage; none if it is a block itself."""
    found: list[Family] = []

    def search(member: Member) -> None:
        for family in member.inner:
            # A module with one matrix is a layer of a block, not a block.
            is_list = family.is_list and family.members[0].matrices > 1
            if is_list and is_chain(family.paths, calls):
                found.append(family)
            else:
                for one in family.members:
                    search(one)

    search(stage)
    inside = sum(member.matrices for family in found for member in family.members)
    return found if 2 * inside > stage.matrices else []


def is_chain(paths: Sequence[str], calls: Sequence[Call]) -> bool:
    """Whether most calls of these modules take the result of the call before them."""
    among = set(paths)
    own = [(taken, gave) for path, taken, gave in calls if path in among]
    links = [bool(gave & taken) for (_, gave), (taken, _) in itertools.pairwise(own)]
    return sum(links) * 2 >= len(links) and any(links)
