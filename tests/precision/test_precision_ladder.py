"""Ladders begin with fp32 and go down; layers are blocks and what multiplies outside them."""

from __future__ import annotations

import pytest
import torch
from small_runs import Net
from torch import nn

from oomph.errors import BadInput, UnknownName
from oomph.precision.layers import find_layers
from oomph.techniques.number_formats import Level, ladder_of, make_ladder

LADDER = make_ladder(["fp32", "bf16", "fp8"])


def test_an_unknown_level_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="bf16"):
        make_ladder(["fp32", "bf-16"])


@pytest.mark.parametrize("names", [["bf16", "fp32"], ["fp32", "bf16", "bf16"]])
def test_a_ladder_that_does_not_go_down_is_refused(names: list[str]) -> None:
    with pytest.raises(BadInput, match="goes down"):
        make_ladder(names)


@pytest.mark.parametrize("names", [[], ["fp32"], ["tf32", "bf16"]])
def test_a_ladder_needs_fp32_and_more(names: list[str]) -> None:
    with pytest.raises(BadInput, match="fp32, with which"):
        make_ladder(names)


@pytest.mark.parametrize(
    ("capability", "own", "compiled", "ladder"),
    [
        ((7, 5), "fp32", True, ["fp32", "fp16"]),
        ((8, 6), "fp32", True, ["fp32", "tf32", "bf16"]),
        ((9, 0), "bf16", False, ["fp32", "tf32", "bf16"]),
        ((9, 0), "bf16", True, ["fp32", "tf32", "bf16", "fp8"]),
        ((9, 0), "fp16", True, ["fp32", "tf32", "fp16"]),
    ],
)
def test_a_card_has_the_levels_it_is_faster_at(
    capability: tuple[int, int],
    own: str,
    compiled: bool,
    ladder: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert list(ladder_of(torch.device("cuda"), Level(own), compiled=compiled)) == ladder


@pytest.mark.parametrize(
    ("own", "ladder"),
    [("fp32", ["fp32", "bf16"]), ("tf32", ["fp32", "tf32", "bf16"]), ("fp16", ["fp32", "fp16"])],
)
def test_the_cpu_has_bf16_and_what_the_job_runs_in(own: str, ladder: list[str]) -> None:
    assert list(ladder_of(torch.device("cpu"), Level(own), compiled=True)) == ladder


def test_blocks_are_layers_and_so_is_what_multiplies_outside() -> None:
    found = find_layers(Net(), ["blocks.0", "blocks.2"], LADDER)
    assert [layer.path for layer in found] == [
        "blocks.0",
        "blocks.1.up",
        "blocks.1.down",
        "blocks.2",
        "head",
    ]
    assert len(found[0].weights) == 4


def test_only_layers_that_have_kernels_for_it_go_down_to_fp8() -> None:
    lowest = {layer.path: layer.lowest for layer in find_layers(Net(), ["blocks.0"], LADDER)}
    # The head has eight rows, and FP8's kernels take multiples of sixteen.
    assert lowest["blocks.0"] == 2
    assert lowest["head"] == 1


def test_a_weight_of_two_layers_is_the_first_ones_and_frozen_layers_are_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    found = find_layers(model, [], (Level.FP32, Level.BF16))
    assert [(layer.path, len(layer.weights)) for layer in found] == [("0", 2), ("1", 1)]


def test_an_attentions_own_output_layer_is_part_of_it() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert [layer.path for layer in find_layers(model, [], LADDER)] == ["0", "1"]


def test_a_model_without_products_is_refused() -> None:
    with pytest.raises(BadInput, match="no layer that multiplies"):
        find_layers(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)), [], LADDER)


def test_layers_that_are_not_there_or_inside_each_other_are_refused() -> None:
    with pytest.raises(BadInput, match=r"no layer 'blocks\.7'"):
        find_layers(Net(), ["blocks.7"], LADDER)
    with pytest.raises(BadInput, match=r"blocks\.1\.up is inside another"):
        find_layers(Net(), ["blocks.1", "blocks.1.up"], LADDER)


def test_weights_that_are_not_fp32_are_refused() -> None:
    with pytest.raises(BadInput, match="are not fp32"):
        find_layers(Net().bfloat16(), [], LADDER)
