"""Timelines made by hand, and small rehearsals, for pages and exports."""

from __future__ import annotations

import functools
import random

import torch
from torch import nn

import oomph
from oomph.rehearsal.timeline import Block, Category, Span, Timeline

#: A module of this name would end a script element, were it not escaped.
EVIL = "</script><script>document.title='owned'</script><!--"


def random_timeline(events: int, *, seed: int = 0) -> Timeline:
    """So many births and deaths of all categories, with one needle of a peak."""
    draw = random.Random(seed)
    timeline = Timeline(events=events)
    alive: list[Block] = []
    needle = events * 2 // 3
    for event in range(events):
        if event == needle:
            size = 1 << 40
        elif event == needle + 1:
            timeline.blocks[-1].death = event
            alive.pop()
            continue
        elif alive and draw.random() < 0.5:
            alive.pop(draw.randrange(len(alive))).death = event
            continue
        else:
            size = draw.randrange(1, 1 << 24)
        module = f"model.layers.{event * 10 // events}.mlp"
        category = draw.choice(list(Category))
        block = Block(
            size=size, birth=event, category=category, module=module, op="aten.mm.default"
        )
        timeline.blocks.append(block)
        alive.append(block)
    half = events // 2
    timeline.spans += [Span("build", 0, half), Span("step", half, events)]
    return timeline


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.add_module(EVIL.replace(".", " "), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.layers, *list(self.children())[1:]):
            x = module(x).relu()
        return x


@functools.cache
def small_estimate(gpu: str | None = "rtx-4090", allocator: str = "") -> oomph.Estimate:
    """A model whose module has a name that means harm."""
    batch = (torch.ones(8, 64), torch.zeros(8, 64))
    job = oomph.Job(_Body, nn.MSELoss(), "adamw", batch, name="<b>body</b>")
    return oomph.estimate(job, gpu=gpu, budget="1GiB", allocator=allocator)
