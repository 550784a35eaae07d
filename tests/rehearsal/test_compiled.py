"""A compiled block's stand-in takes the memory of the graphs that PyTorch would cut it into."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import GPT2Config, LlamaConfig, SwinConfig, SwinModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from oomph.errors import CannotRehearse
from oomph.hardware import find_gpu
from oomph.hardware.timing.layouts import has_channels_last
from oomph.plans.choices import KEEP, RECOMPUTE
from oomph.rehearsal import compiled
from oomph.rehearsal.compiled import forget_compiled, stand_in_for_compiled
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.world import pretend
from oomph.techniques.channels_last import channels_last
from oomph.techniques.compiled_blocks import FALLBACK_RANDOM

H200 = find_gpu("h200")
BATCH, LENGTH, WIDTH = 2, 16, 32
HIDDEN = BATCH * LENGTH * WIDTH * 4

Inputs = dict[str, Any]
Case = Callable[[], tuple[nn.Module, Inputs]]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget_compiled()
    yield
    forget_compiled()


def llama_layer() -> tuple[nn.Module, Inputs]:
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",  # the same ops on every device
    )
    angles = torch.ones(BATCH, LENGTH, 8), torch.ones(BATCH, LENGTH, 8)
    return LlamaDecoderLayer(config, 0), {"position_embeddings": angles}


def gpt2_block() -> tuple[nn.Module, Inputs]:
    config = GPT2Config(n_embd=WIDTH, n_head=4, n_positions=LENGTH, attn_implementation="eager")
    return GPT2Block(config, 0).train(), {}


def saved_for_real(case: Case) -> int:
    """Bytes that autograd keeps for a block after AOTAutograd cut it, beside what it was given."""
    block, others = case()
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    names, weights = zip(*block.named_parameters(), strict=True)
    leaves, spec = tree_flatten(others)

    def flat(*tensors: Tensor) -> Tensor:
        given, x, rest = tensors[: len(names)], tensors[len(names)], tensors[len(names) + 1 :]
        with _reparametrize_module(block, dict(zip(names, given, strict=True))):
            return block(x, **tree_unflatten(list(rest), spec))

    with config.patch(FALLBACK_RANDOM):
        decompositions = select_decomp_table()
    cut = aot_function(
        flat,
        fw_compiler=lambda graph, _: graph,
        partition_fn=partitioners.min_cut_rematerialization_partition,
        decompositions=decompositions,
    )
    out = cut(*weights, x, *leaves)
    given = {t.untyped_storage().data_ptr() for t in (*weights, x, *leaves)}
    storages = {t.untyped_storage().data_ptr(): t for t in out.grad_fn.saved_tensors}
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in given)


def to_gpu(value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([t.to("cuda") if isinstance(t, Tensor) else t for t in leaves], spec)


def saved_by_stand_in(case: Case, how: str = KEEP) -> int:
    """Bytes that are alive after the stand-in's forward and were not before, but for its result."""
    with pretend(H200) as recorder:
        block, others = case()
        block.to("cuda")
        others = to_gpu(others)
        x = torch.empty(BATCH, LENGTH, WIDTH, device="cuda", requires_grad=True)
        stand_in_for_compiled(block, how, recorder=recorder)
        before = recorder.allocated
        out = block(x, **others)
        saved = recorder.allocated - before - HIDDEN
        out.sum().backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in block.parameters())
        gradients = sum(p.numel() * 4 for p in block.parameters()) + HIDDEN
        del out
        workspaces = sum(b.size for b in recorder.timeline.blocks if b.category == "workspace")
        assert recorder.allocated - before == gradients + workspaces, "all that was saved is freed"
        return saved


@pytest.mark.parametrize("case", [llama_layer, gpt2_block])
def test_what_is_saved_is_what_aot_autograd_saves(case: Case) -> None:
    assert saved_by_stand_in(case) == saved_for_real(case)


@pytest.mark.parametrize("case", [llama_layer, gpt2_block])
def test_recomputed_a_block_saves_its_inputs_alone(case: Case) -> None:
    assert saved_by_stand_in(case, RECOMPUTE) == 0


@pytest.mark.parametrize(
    ("case", "how", "width"),
    [
        (llama_layer, "recompute saving product#0", WIDTH),
        (llama_layer, "recompute saving product#1 product#2", WIDTH),  # keys and values are shared
        (gpt2_block, "recompute saving product#0", 3 * WIDTH),
    ],
)
def test_saving_an_op_adds_its_result(case: Case, how: str, width: int) -> None:
    assert saved_by_stand_in(case, how) == BATCH * LENGTH * width * 4


class Twice(nn.Module):
    """The first product is asked for twice; a compiler makes it once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.relu(self.one(x)) * torch.sigmoid(self.one(x))
        first, second, third = torch.relu(self.other(both)).chunk(3, dim=-1)
        return x + first * second * third


@pytest.mark.parametrize(("number", "width"), [(0, WIDTH), (2, 3 * WIDTH)])
def test_ops_are_numbered_as_they_are_written(number: int, width: int) -> None:
    saved = saved_by_stand_in(lambda: (Twice(), {}), f"recompute saving product#{number}")
    assert saved == BATCH * LENGTH * width * 4


# -- graphs are shared -----------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * scale


def run(recorder: Recorder, block: nn.Module, how: str = KEEP, rows: int = 4, **rest: Any) -> Any:
    block.to("cuda")
    undo = stand_in_for_compiled(block, how, recorder=recorder)
    out = block(torch.empty(rows, WIDTH, device="cuda", requires_grad=True), **rest)
    undo()
    return out


def graphs_and_cuts() -> tuple[int, int]:
    graphs = [graph for alike in compiled._traced.values() for graph in alike]
    return len(graphs), sum(len(graph.cuts) for graph in graphs)


def test_blocks_of_one_class_are_traced_once_and_cut_once_for_each_choice() -> None:
    with pretend(H200) as recorder:
        for block in (Mlp(), Mlp(), Mlp()):
            run(recorder, block)
        assert graphs_and_cuts() == (1, 1)
        run(recorder, Mlp(), RECOMPUTE)
        assert graphs_and_cuts() == (1, 2)


@pytest.mark.parametrize(
    "differently",
    [
        lambda recorder: run(recorder, Mlp(), rows=8),
        lambda recorder: run(recorder, Mlp(), scale=2.0),
        lambda recorder: run(recorder, Mlp().requires_grad_(False)),
    ],
    ids=["rows", "a constant", "frozen"],
)
def test_other_shapes_constants_and_gradients_are_other_graphs(
    differently: Callable[[Recorder], Any],
) -> None:
    with pretend(H200) as recorder:
        run(recorder, Mlp())
        differently(recorder)
    assert graphs_and_cuts() == (2, 2)


class Numbered(Mlp):
    """One of several that differ in a number, a flag and the class of a module inside."""

    def __init__(self, number: int, *, twice: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.number, self.twice = number, twice
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, numbers: list[int] | None = None) -> Tensor:
        if numbers is not None:
            numbers.append(self.number)
        out = self.dropout(super().forward(x))
        return torch.tanh(out) if self.twice else out


@pytest.mark.parametrize(
    ("other", "graphs"),
    [
        (Numbered(2), 1),
        (Numbered(1, twice=True), 2),
        (Numbered(1, dropout=0.5), 2),
    ],
    ids=["a number that nobody reads", "a flag", "a module"],
)
def test_blocks_share_a_graph_where_all_that_is_read_is_the_same(
    other: Numbered, graphs: int
) -> None:
    with pretend(H200) as recorder:
        for block in (Numbered(1), other, Numbered(3)):
            run(recorder, block)
    assert graphs_and_cuts() == (graphs, graphs)


def test_a_number_that_is_read_makes_another_graph() -> None:
    with pretend(H200) as recorder:
        for number in (1, 2, 1):
            run(recorder, Numbered(number), numbers=[])
    assert graphs_and_cuts() == (2, 2)


def test_windows_that_are_shifted_in_some_blocks_count_there() -> None:
    """In one class of block, every second of which shifts its windows and takes more for it."""
    sizes = {"image_size": 32, "embed_dim": 32, "depths": [2], "num_heads": [2], "window_size": 4}
    layers = SwinModel(SwinConfig(**sizes, drop_path_rate=0.0)).encoder.layers[0].blocks
    images = torch.empty(4, 8 * 8, 32)

    def peak(block: nn.Module) -> int:
        with pretend(H200) as recorder:
            block.to("cuda")
            stand_in_for_compiled(block, KEEP, recorder=recorder)
            block(images.to("cuda").requires_grad_(), (8, 8))[0].sum().backward()
        events = recorder.timeline.stream_of_events()
        sizes = (block.size if is_birth else -block.size for _, block, is_birth in events)
        return max(itertools.accumulate(sizes))

    alone = [peak(copy.deepcopy(layer)) for layer in reversed(layers)]
    forget_compiled()
    assert [peak(layer) for layer in layers] == alone[::-1]
    assert alone[0] > alone[1]


def test_autocast_is_part_of_the_graph() -> None:
    with pretend(H200) as recorder:
        run(recorder, Mlp())
        with torch.autocast("cuda", torch.bfloat16):
            out = run(recorder, Mlp())
        assert graphs_and_cuts() == (2, 2)
        assert out.dtype is torch.float32  # what is added to it is wider


def test_without_gradients_a_block_runs_as_it_is() -> None:
    with pretend(H200) as recorder, torch.no_grad():
        run(recorder, Mlp())
        assert graphs_and_cuts() == (0, 0)


def test_so_does_one_with_nothing_to_differentiate() -> None:
    """As a table of positions that is not trained."""
    with pretend(H200) as recorder:
        block = Mlp().requires_grad_(False).to("cuda")
        stand_in_for_compiled(block, KEEP, recorder=recorder)
        assert block(torch.empty(4, WIDTH, device="cuda")).shape == (4, WIDTH)
        assert graphs_and_cuts() == (0, 0)


def test_forgetting_leaves_nothing() -> None:
    with pretend(H200) as recorder:
        run(recorder, Mlp())
    forget_compiled()
    assert not compiled._traced


# -- what blocks return ----------------------------------------------------------------------------


class Returns(Mlp):
    """Returns a nest of things that are not all its own results."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x)
        bias = self.up.weight.sum() * mask
        return {"out": out, "none": None, "mask": mask, "bias": bias, "sizes": (x.detach() * 2, 7)}


def test_a_nest_of_results_comes_back_as_it_was() -> None:
    with pretend(H200) as recorder:
        mask = torch.ones(4, WIDTH, device="cuda")
        out = run(recorder, Returns(), mask=mask)
        assert list(out) == ["out", "none", "mask", "bias", "sizes"]
        assert out["none"] is None and out["sizes"][1] == 7
        assert out["mask"] is mask  # given back, not made
        assert out["out"].shape == out["bias"].shape == (4, WIDTH)
        assert out["out"].requires_grad and out["bias"].requires_grad
        assert not out["sizes"][0].requires_grad


def test_a_result_that_nobody_uses_does_not_stop_backward() -> None:
    with pretend(H200) as recorder:
        block = Returns()
        out = run(recorder, block, mask=torch.ones(4, WIDTH, device="cuda"))
        out["out"].sum().backward()
        assert all(p.grad is not None for p in block.parameters())


class Masked(Mlp):
    """Attention with places that count and places that do not, as rows that are filled up have."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.view(1, 1, *x.shape)
        return super().forward(F.scaled_dot_product_attention(rows, rows, rows, mask)[0, 0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_takes_masks_of_either_kind(dtype: torch.dtype) -> None:
    with pretend(H200) as recorder:
        block = Masked()
        mask = torch.ones(1, 1, 4, 4, device="cuda").to(dtype)
        run(recorder, block, mask=mask).sum().backward()
        assert all(p.grad is not None for p in block.parameters())


class Joins(Mlp):
    """Begins with what two others made, as blocks do that are fed by an earlier one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH + 8, WIDTH)

    def forward(self, x: Tensor, earlier: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.both(torch.cat([x, earlier], 1)))


def test_gradients_that_are_parts_of_one_have_shapes_of_their_own() -> None:
    with pretend(H200) as recorder:
        earlier = torch.ones(4, 8, device="cuda", requires_grad=True)
        run(recorder, Joins(), earlier=earlier).sum().backward()
        assert earlier.grad is not None and earlier.grad.shape == earlier.shape


class ReturnsTwice(Mlp):
    """Returns one tensor as its result and among those that later blocks are given."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return out, (x, out)


def test_what_is_returned_twice_comes_back_twice() -> None:
    with pretend(H200) as recorder:
        block = ReturnsTwice()
        out, (_, again) = run(recorder, block)
        assert again is out
        (out * again).sum().backward()
        assert all(p.grad is not None for p in block.parameters())


class Normed(Mlp):
    """Writes to buffers: its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.norm(x))


def test_running_statistics_are_no_results() -> None:
    with pretend(H200) as recorder:
        block = Normed()
        out = run(recorder, block)
        assert isinstance(out, Tensor) and out.shape == (4, WIDTH)
        out.sum().backward()
        assert block.norm.weight.grad is not None


# -- what cannot be compiled -----------------------------------------------------------------------


class Branches(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) if x.sum() > 0 else x


class Writes(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.mul_(2))


class Views(Mlp):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), x.t()


@pytest.mark.parametrize("block", [Branches, Writes, Views])
def test_what_cannot_be_cut_in_two_is_refused(block: Callable[[], nn.Module]) -> None:
    with pretend(H200) as recorder:
        made = block().to("cuda")
        stand_in_for_compiled(made, KEEP, recorder=recorder)
        hidden = torch.empty(4, WIDTH, device="cuda", requires_grad=True) * 1
        with pytest.raises(CannotRehearse):
            made(hidden)
        assert not recorder.tracing


def test_undoing_gives_the_block_its_own_forward_back() -> None:
    with pretend(H200) as recorder:
        block = Mlp()
        stand_in_for_compiled(block, KEEP, recorder=recorder)()
        assert "forward" not in vars(block)


# -- images ----------------------------------------------------------------------------------------


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.norm(self.one(x)).relu())


def test_channels_stay_last_through_forward_and_backward() -> None:
    with pretend(H200) as recorder:
        block = Convolving().to("cuda")
        for convolution in (block.one, block.two):
            channels_last(convolution)
        x = torch.empty(2, 8, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        stand_in_for_compiled(block, KEEP, recorder=recorder)
        out = block(x)
        assert has_channels_last(out)
        seen: list[bool] = []
        x.register_hook(lambda gradient: seen.append(has_channels_last(gradient)))
        out.sum().backward()
        assert seen == [True]
        assert all(p.grad is not None and p.grad.is_contiguous() for p in block.parameters())


def test_a_block_whose_convolutions_compute_otherwise_is_another_graph() -> None:
    with pretend(H200) as recorder:
        plain, last = Convolving().to("cuda"), Convolving().to("cuda")
        channels_last(last.one)
        x = torch.empty(2, 8, 4, 4, device="cuda", requires_grad=True)
        for block in (plain, last):
            stand_in_for_compiled(block, KEEP, recorder=recorder)
            block(x)
    assert graphs_and_cuts() == (2, 2)
