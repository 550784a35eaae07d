"""Blocks are found in models as people write them, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from tiny_models import (
    Other,
    Residual,
    Third,
    albert,
    bert,
    chain,
    gpt2,
    hf_resnet,
    llama,
    mixture,
    resnet,
    swin,
    t5,
    vit,
)
from torch import Tensor, nn

from oomph.hardware import find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.jobs.blocks import Call, Family, choose_blocks, families, is_chain
from oomph.jobs.job import Job
from oomph.search.survey import survey


def blocks_of(job: Job) -> list[str]:
    found = survey(job, None, Clock.of(None), lambda *_: None)
    return [block.path for block in found.blocks]


def numbered(pattern: str, count: int) -> list[str]:
    return [pattern.format(at) for at in range(count)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llama, numbered("model.layers.{}", 4)),
        (gpt2, numbered("transformer.h.{}", 4)),
        (bert, numbered("bert.encoder.layer.{}", 3)),
        (vit, numbered("vit.layers.{}", 3)),
        (t5, [*numbered("encoder.block.{}", 2), *numbered("decoder.block.{}", 2)]),
        # One layer that runs four times.
        (albert, ["albert.encoder.albert_layer_groups.0.albert_layers.0"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_layers_of_a_transformer_are_its_blocks(
    make: Callable[[], Job], expected: list[str]
) -> None:
    assert blocks_of(make()) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            swin,
            [
                *numbered("swin.encoder.layers.0.blocks.{}", 2),
                *numbered("swin.encoder.layers.1.blocks.{}", 4),
            ],
        ),
        # Residual blocks, not the convolutions with their norms that each is a list of.
        (
            hf_resnet,
            [
                *numbered("resnet.encoder.stages.0.layers.{}", 2),
                *numbered("resnet.encoder.stages.1.layers.{}", 3),
            ],
        ),
        # A stage of a single block is that block.
        (resnet, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_blocks_of_stages_are_blocks_and_the_stages_are_not(
    make: Callable[[], Job], expected: list[str]
) -> None:
    assert blocks_of(make()) == expected


@pytest.mark.parametrize(
    "job",
    [
        lambda: mixture(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4),
        lambda: mixture(hf.OlmoeForCausalLM, hf.OlmoeConfig, num_experts=4),
    ],
    ids=["mixtral", "olmoe"],
)
def test_layers_with_experts_are_blocks_as_any_others(job: Callable[[], Job]) -> None:
    h200 = find_gpu("h200")
    found = survey(job(), h200, Clock.of(h200), lambda *_: None)
    assert [block.path for block in found.blocks] == numbered("model.layers.{}", 3)


class Experts(nn.Module):
    """A layer whose experts all take its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(
            weights[:, at : at + 1] * expert(x) for at, expert in enumerate(self.experts)
        )


def test_experts_side_by_side_are_no_blocks() -> None:
    assert blocks_of(chain(lambda: nn.Sequential(Experts(), Experts()))) == ["0", "1"]
    assert blocks_of(chain(Experts)) == []


class Loop(nn.Module):
    """Runs a list, or lists in a list, one after the other."""

    def __init__(self, *layers: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                for one in layer if isinstance(layer, nn.ModuleList) else (layer,):
                    x = one(x)
        return x


def test_blocks_of_a_list_need_not_be_of_one_class() -> None:
    mixed = chain(lambda: nn.Sequential(Residual(), Other(), Third()))
    assert blocks_of(mixed) == ["0", "1", "2"]
    alternating = chain(lambda: Loop(Residual(), Other(), Residual(), Other()))
    assert blocks_of(alternating) == numbered("layers.{}", 4)


class Around(nn.Module):
    """Runs a list with the residual connections, and a pool, written around its layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in layers)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return x


class Beside(nn.Module):
    """Adds up what the layers of a list each make of the same input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for layer in self.layers:
            # The memory of each result is free before the next layer's begins.
            found += layer(x.sin()).detach() * layer.up.weight.sum()
        return found


def test_layers_are_blocks_where_residual_connections_stand_around_them() -> None:
    around = chain(lambda: Around(Residual(), Other(), Third()))
    assert blocks_of(around) == numbered("layers.{}", 3)
    assert blocks_of(chain(lambda: Beside(*(Residual() for _ in range(4))))) == []


def test_layers_that_a_loss_calls_one_by_one_are_linked_by_their_results_alone() -> None:
    def apart(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = model.get_submodule("0"), model.get_submodule("1")
        return torch.stack([part(batch[0] * 2).sum() for part in (first, second)]).sum()

    job = dataclasses.replace(chain(lambda: nn.Sequential(Residual(), Residual())), loss=apart)
    assert blocks_of(job) == []


def test_lists_in_a_list_are_opened() -> None:
    def pair() -> nn.ModuleList:
        return nn.ModuleList([Residual(), Residual()])

    expected = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert blocks_of(chain(lambda: Loop(pair(), pair()))) == expected


def test_sequences_in_a_sequence_are_blocks() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    assert blocks_of(chain(lambda: nn.Sequential(layer(), layer(), layer()))) == ["0", "1", "2"]


def test_what_runs_several_times_is_one_block() -> None:
    twice = chain(lambda: Loop(Residual(), Residual(), times=3))
    assert blocks_of(twice) == ["layers.0", "layers.1"]
    shared = Residual()
    assert blocks_of(chain(lambda: Loop(shared, shared, shared))) == ["layers.0"]


class Neighbours(nn.Module):
    """Blocks that are attributes, one of which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = Residual(), Residual(), Residual()
        self.embed = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.embed(x)))


def test_neighbours_of_one_class_are_blocks_in_the_order_they_run() -> None:
    assert blocks_of(chain(Neighbours)) == ["second", "first"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
        lambda: nn.Sequential(Residual()),
        Residual,
    ],
    ids=["layers", "one in a sequence", "one"],
)
def test_a_model_that_repeats_nothing_has_no_blocks(make: Callable[[], nn.Module]) -> None:
    assert blocks_of(chain(make)) == []


class Pair(nn.Module):
    """A layer with two things of one class that follow each other, but are not all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross, self.mlp = Residual(), Residual(), Other()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.cross(self.attention(x)))


class WithList(nn.Module):
    """A layer that is a list to the smaller part."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.Sequential(Residual(), Residual())
        self.rest = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlps(x)
        for layer in self.rest:
            x = layer(x)
        return x


@pytest.mark.parametrize("layer", [Pair, WithList])
def test_parts_of_a_layer_do_not_take_its_place(layer: Callable[[], nn.Module]) -> None:
    assert blocks_of(chain(lambda: nn.Sequential(layer(), layer()))) == ["0", "1"]


# -- by records of calls --------------------------------------------------------------------------


def call(path: str, taken: int, given: int) -> Call:
    return path, frozenset([taken]), frozenset([given])


def test_a_chain_takes_what_the_one_before_gave_in_most_of_its_calls() -> None:
    linked = [call("a", 0, 1), call("b", 1, 2), call("c", 2, 3)]
    assert is_chain(["a", "b", "c"], linked)
    assert is_chain(["a", "b", "c"], [*linked[:2], call("c", 7, 8)])
    assert not is_chain(["a", "b", "c", "d"], [*linked[:2], call("c", 7, 8), call("d", 9, 10)])
    assert not is_chain(["a", "b", "c"], [call("a", 0, 1), call("b", 0, 2), call("c", 0, 3)])


def test_calls_of_others_do_not_break_a_chain() -> None:
    calls = [call("a", 0, 1), call("inside", 5, 6), call("b", 1, 2)]
    assert is_chain(["a", "b"], calls)


def test_one_call_is_no_chain_and_several_of_one_module_are() -> None:
    assert not is_chain(["a"], [call("a", 0, 1)])
    assert is_chain(["a"], [call("a", 0, 1), call("a", 1, 2)])
    assert not is_chain(["a"], [])


def test_a_family_knows_all_that_is_inside_it() -> None:
    (family,) = families(nn.Sequential(WithList(), WithList()))
    assert family.paths == ["0", "1"]
    inner = ["mlps", "mlps.0", "mlps.1"]
    expected = ["0", *(f"0.{at}" for at in inner), "1", *(f"1.{at}" for at in inner)]
    assert list(family.all_paths()) == expected


def test_what_never_ran_is_no_block() -> None:
    found: list[Family] = families(nn.Sequential(Residual(), Residual(), Residual()))
    assert choose_blocks(found, [call("0", 0, 1), call("1", 1, 2)]) == ["0", "1"]
    assert choose_blocks(found, []) == []


def test_a_module_at_two_places_is_one_member() -> None:
    shared = Residual()
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, Residual())})
    paths = [path for family in families(model) for path in family.all_paths()]
    assert paths == ["a", "a.0", "b", "b.1"]
