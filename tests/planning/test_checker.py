"""Who examines choices: the second process, if it was asked for them in time."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from oomph.gpus import find_gpu
from oomph.job import Job
from oomph.planning.candidates import Candidate
from oomph.planning.checker import FORESEEN, Checker
from oomph.planning.choices import Choices
from oomph.planning.questions import GLANCE, question
from oomph.timing.clock import Clock

HERE = Choices(optimizer_on="host")
COMING = [dataclasses.replace(HERE, gpu_share=share) for share in (0.1, 0.2, 0.3, 0.4)]


class Second:
    """Knows some answers, and notes what it is asked for."""

    def __init__(self, known: Any = None) -> None:
        self.known = known
        self.asked: list[Any] = []

    def answer(self, question: Any) -> Any:
        return self.known

    def ask(self, questions: list[Any]) -> None:
        self.asked = questions


def told(second: Any) -> Any:
    gpu, nothing = find_gpu("h200"), lambda _: None
    job = Job(nn.Identity, nn.MSELoss(), "adamw", (torch.ones(1, 1), torch.ones(1, 1)))
    checker = Checker(job=job, gpu=gpu, clock=Clock.of(gpu), budget=1, second=second, say=nothing)
    empty: Any = None
    candidate = Candidate(seconds=1.0, number=0, heard=empty, solution=empty, choices=HERE)
    return checker._told_of(candidate, GLANCE, COMING)


def test_what_comes_next_is_examined_beside_what_is_examined_here() -> None:
    second = Second()
    assert told(second) is None
    assert second.asked == [question(GLANCE, one) for one in COMING[:FORESEEN]]


def test_what_was_examined_beside_leaves_the_next_to_be_examined_here() -> None:
    second = Second((True, 100, 0, 7, 1.0, "", False))
    verdict, candidate = told(second)
    assert verdict.fits and candidate.choices == HERE
    assert second.asked == [question(GLANCE, one) for one in COMING[1 : FORESEEN + 1]]


def test_the_allocators_settings_are_part_of_no_question() -> None:
    other = dataclasses.replace(HERE, allocator="expandable_segments:True")
    assert question(GLANCE, HERE) == question(GLANCE, other)
