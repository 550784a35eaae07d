"""Trials: rehearses choices and records the results and the candidates behind them.

Choices that do not fit the GPU are tried again with block options that leave more room; if it is
known beforehand that they take room, they get it at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oomph.plans.choices import Choices
from oomph.search.candidates import Candidate, Verdict
from oomph.search.checker import Found, LookInto
from oomph.search.refining import Tried


@dataclass(kw_only=True)
class Trials:
    """Tries choices that offload, starting from a candidate that fits."""

    look_into: LookInto
    leaner: Callable[[Candidate, int], Candidate | None]
    """The candidate with this many more bytes of room in its blocks, if possible."""
    seconds: Callable[[Verdict, Candidate], float]
    limit: int
    """The most bytes of GPU memory that may be needed."""
    staying: Callable[[Choices], int]
    """The bytes known to stay on the GPU permanently with these choices, and not with others."""
    _found: dict[str, Found] = field(default_factory=dict)
    """By choices: the candidate that has them, and its verdict."""
    _like: dict[str, Candidate] = field(default_factory=dict)
    """By block options: a candidate that has them, and its solution."""
    _attempts: dict[str, Tried | None] = field(default_factory=dict)
    """Results of the attempts: some are repeated after others were made in between."""
    _coming: Sequence[Choices] = ()

    def begin(self, verdict: Verdict, candidate: Candidate) -> Tried:
        """Start from this candidate."""
        self._found[str(candidate.choices)] = verdict, candidate
        self.add_blocks(candidate)
        return self._tried(verdict, candidate)

    def add_blocks(self, candidate: Candidate) -> None:
        """Allow trying choices with this candidate's block options."""
        self._like[str(candidate.choices.blocks)] = candidate

    def who_has(self, choices: Choices) -> Found:
        """The candidate that was found with these choices, and its verdict."""
        return self._found[str(choices)]

    def fastest_first(self, best: Tried, host: int | None) -> list[Tried]:
        """What fits the GPU, and the host limit, from the best on.

        Quick checks may have been too optimistic about some of them.
        """
        others = [one for one in self._attempts.values() if one is not None and one != best]
        fit = [
            one
            for one in others
            if one.seconds >= best.seconds
            if host is None or one.host <= max(host, best.host)
        ]
        return [best, *sorted(fit, key=lambda one: one.seconds)]

    def foresee(self, choices: Sequence[Choices]) -> None:
        """Announce choices that are likely to be tried, in this order."""
        self._coming = choices

    def attempt(self, choices: Choices) -> Tried | None:
        """Try choices whose block options are known; None if there is no room for them."""
        if _key(choices) not in self._attempts:
            self._attempts[_key(choices)] = self._try_out(choices)
        return self._attempts[_key(choices)]

    def _try_out(self, choices: Choices) -> Tried | None:
        prepared = self._prepared(choices)
        if prepared is None:
            return None
        verdict, tried = self._examine(prepared, choices)
        if not verdict.fits:
            leaner = self.leaner(tried, verdict.smallest_budget - self.limit)
            if leaner is None:
                return None
            verdict, tried = self._examine(leaner, choices)
        if not verdict.fits or tried.rehearsed is None:
            return None
        self.add_blocks(tried)
        return self._tried(verdict, tried)

    def _prepared(self, choices: Choices) -> Candidate | None:
        """The candidate with room in its blocks for what now stays on the GPU, or None."""
        before = self._like[str(choices.blocks)]
        tried = dataclasses.replace(before, choices=choices)
        stays = self.staying(choices) - self.staying(before.choices)
        if stays <= 0 or str(before.choices) not in self._found:
            return tried
        missing = self._found[str(before.choices)][0].smallest_budget + stays - self.limit
        return self.leaner(tried, missing) if missing > 0 else tried

    def _examine(self, candidate: Candidate, meant: Choices) -> Found:
        """Look into a candidate that has room for the choices that are `meant`."""
        before = self._like[str(meant.blocks)].choices
        coming = [one for one in self._coming if one != meant and _key(one) not in self._attempts]
        ready = [
            # Choices that build on these use the same block options.
            dataclasses.replace(candidate, choices=_with_blocks_of(one, candidate))
            if _builds_on(one, meant, before)
            else self._prepared(one)
            for one in coming
        ]
        others = [o.choices for o in ready if o is not None and o.choices != candidate.choices]
        verdict, candidate = self.look_into(candidate, others)
        self._found[str(candidate.choices)] = verdict, candidate
        return verdict, candidate

    def _tried(self, verdict: Verdict, candidate: Candidate) -> Tried:
        return Tried(
            choices=candidate.choices,
            seconds=self.seconds(verdict, candidate),
            host=verdict.host,
            cleans=verdict.step_retries > 0,
        )


def _key(choices: Choices) -> str:
    """Cache key; leaves out what changes no tensor, which follows from everything else."""
    return str(choices.concerning_tensors)


def _builds_on(choices: Choices, one: Choices, before: Choices) -> bool:
    """Whether `choices` include every change that sets `one` apart from `before`."""
    return all(
        getattr(choices, changed.name) == getattr(one, changed.name)
        for changed in dataclasses.fields(Choices)
        if getattr(one, changed.name) != getattr(before, changed.name)
    )


def _with_blocks_of(choices: Choices, candidate: Candidate) -> Choices:
    return dataclasses.replace(choices, blocks=candidate.choices.blocks)
