"""Offloaded activations give the same gradients to the bit, and are not on the GPU meanwhile."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from deferred_link import DeferredLink
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import oomph
from oomph.hardware import GPU, find_gpu
from oomph.hardware.timing.clock import Clock
from oomph.memory.link import Copy, InstantLink, Link
from oomph.plans.choices import KEEP, RECOMPUTE
from oomph.rehearsal.compiled import stand_in_for_compiled
from oomph.rehearsal.link import REACHED, RehearsedLink
from oomph.rehearsal.phases import END_OF_STEP, rehearse
from oomph.rehearsal.recorder import Recorder
from oomph.techniques.offload_activations import ActivationOffload
from oomph.techniques.recompute import recompute, replace_forward
from oomph.techniques.technique import Undo

WIDTH, LENGTH, WORDS = 8, 6, 11
HIDDEN = LENGTH * WIDTH * 4
"""Bytes of one sample between two blocks."""


class Block(nn.Module):
    """Saves views of one memory, transposed ones, masks, indices and its own output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gates = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(attended)
        left, right = self.gates(x).chunk(2, dim=-1)
        gated = torch.where(left > 0, left * right, right.exp())
        largest = x.gather(-1, x.argsort(-1)[..., :4]).repeat(1, 1, 2)
        out = torch.tanh(x + self.down(gated) + largest)
        return out if scale is None else out * scale


class Net(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, blocks: int = 3, dropout: float = 0.0, rounds: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.rounds = rounds

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        scale = x.detach().abs().mean(-1, keepdim=True)
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x, scale=scale)
        return F.linear(self.norm(x), self.embedding.weight)


def words_of(samples: int) -> Tensor:
    return torch.randint(0, WORDS, (samples, LENGTH))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def train(model: nn.Module, sizes: Sequence[Sequence[int]] = ((3,), (3,))) -> list[Tensor]:
    """The gradients of each step and the weights after all, with micro-batches of these sizes."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in sizes:
        for samples in step:
            loss_of(model, words_of(samples)).backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def offload(model: Net, link: Link, **options: Any) -> ActivationOffload:
    """All blocks of a model on the CPU, which stands for the GPU here."""
    engine = ActivationOffload(link, model, device_type="cpu", smallest=1)
    for block in model.blocks:
        engine.wrap(block, **options)
    return engine


def compile_it(block: nn.Module) -> Undo:
    compiled = torch.compile(block.forward, backend="aot_eager", dynamic=False)
    return replace_forward(block, compiled)


def recompute_compiled(block: nn.Module) -> None:
    recompute(block, compiled=True)
    compile_it(block)


EAGER: dict[str, Callable[[nn.Module], Any]] = {
    "kept": lambda block: None,
    "recomputed": recompute,
    "recomputed in part": lambda block: recompute(block, ["attention#0", "product#1"]),
}
COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": compile_it,
    "compiled and recomputed": recompute_compiled,
}
LINKS: dict[str, Callable[[], Any]] = {
    "instant": InstantLink,
    "at the last moment": DeferredLink,
    "at once": lambda: DeferredLink(eager=1.0),
    **{
        f"by chance {seed}": lambda seed=seed: DeferredLink(eager=0.3, seed=seed)
        for seed in range(3)
    },
}


@pytest.mark.parametrize("make_link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_gradients_are_the_same_to_the_bit(
    prepare: Callable[[nn.Module], Any], make_link: Callable[[], Any]
) -> None:
    expected = train(Net(dropout=0.5))
    model = Net(dropout=0.5)
    for block in model.blocks:
        prepare(block)
    link = make_link()
    engine = offload(model, link)
    assert_same(train(model), expected)
    engine.undo()
    link.close()


@pytest.mark.parametrize("prepare", COMPILED.values(), ids=COMPILED)
def test_gradients_of_compiled_blocks_are_the_same_to_the_bit(
    prepare: Callable[[nn.Module], Any],
) -> None:
    plain = Net()
    for block in plain.blocks:
        prepare(block)
    expected = train(plain)
    for link in (DeferredLink(), DeferredLink(eager=0.3)):
        model = Net()
        for block in model.blocks:
            prepare(block)
        engine = offload(model, link)
        assert_same(train(model), expected)
        assert link.bytes["out"] == link.bytes["in"] > 0
        engine.undo()


@pytest.mark.parametrize("eager", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("lag", [1, 2, 9])
def test_only_chosen_tensors_of_chosen_blocks_leave(eager: float, lag: int) -> None:
    expected = train(Net(4))
    model, link = Net(4), DeferredLink(eager=eager)
    engine = ActivationOffload(link, model, device_type="cpu", smallest=1)
    engine.wrap(model.blocks[0], {0, 3}, lag=lag)
    engine.wrap(model.blocks[2], {1}, lag=lag)
    assert_same(train(model), expected)
    first, second = engine.sizes(model.blocks[0]), engine.sizes(model.blocks[2])
    assert link.bytes["out"] == 2 * (first[0] + first[3] + second[1])
    engine.undo()


def test_the_order_of_saving_depends_on_nothing_but_the_block() -> None:
    model = Net()
    engine = offload(model, InstantLink(), which=())
    train(model, [[3]])
    alone = [engine.sizes(block) for block in model.blocks]
    engine.undo()
    engine = offload(model, InstantLink())
    train(model, [[3]])
    assert [engine.sizes(block) for block in model.blocks] == alone
    assert alone[0] == alone[1]


@pytest.mark.parametrize("eager", [0.0, 0.3, 1.0])
def test_micro_batches_of_any_size_share_the_host_memory_of_the_largest(eager: float) -> None:
    sizes = [[4, 2, 1], [3, 4]]
    expected = train(Net(dropout=0.5), sizes)
    model, link = Net(dropout=0.5), DeferredLink(eager=eager)
    engine = offload(model, link)
    assert_same(train(model, sizes), expected)
    distinct = link.taken
    engine.undo()
    link.bytes["out"] = 0
    engine = offload(model, link)
    train(model, [[4]])
    assert distinct == link.bytes["out"]
    engine.undo()


def test_a_larger_batch_gets_larger_host_memory() -> None:
    expected = train(Net(), [[1], [4]])
    model, link = Net(), DeferredLink()
    engine = offload(model, link)
    assert_same(train(model, [[1], [4]]), expected)
    engine.undo()


@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
@pytest.mark.parametrize("eager", [0.0, 0.3, 1.0])
def test_a_block_that_runs_twice_before_its_backward_has_memory_for_both(
    prepare: Callable[[nn.Module], Any], eager: float
) -> None:
    expected = train(Net(2, rounds=2))
    model, link = Net(2, rounds=2), DeferredLink(eager=eager)
    for block in model.blocks:
        prepare(block)
    engine = offload(model, link)
    assert_same(train(model), expected)
    engine.undo()


def test_two_graphs_may_be_under_way_at_once() -> None:
    def gradients(model: Net) -> list[Tensor]:
        torch.manual_seed(1)
        losses = [loss_of(model, words_of(samples)) for samples in (3, 2)]
        for loss in losses:
            loss.backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    expected = gradients(Net())
    model = Net()
    engine = offload(model, DeferredLink(eager=0.3))
    assert_same(gradients(model), expected)
    engine.undo()


def test_a_graph_can_go_backward_twice() -> None:
    def gradients(model: Net) -> list[Tensor]:
        torch.manual_seed(1)
        loss = loss_of(model, words_of(3))
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    expected = gradients(Net())
    model = Net()
    engine = offload(model, DeferredLink())
    assert_same(gradients(model), expected)
    engine.undo()


def test_gradients_of_gradients_are_the_same() -> None:
    def penalty(block: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(block.parameters()))[0]

    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, requires_grad=True)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    expected = penalty(block, x)
    engine = ActivationOffload(DeferredLink(), block, device_type="cpu", smallest=1)
    engine.wrap(block)
    assert_same([penalty(block, x)], [expected])
    engine.undo()


def fail_in_backward(_: nn.Module, __: Any, output: Tensor) -> None:
    """As a hook: fails when the module's backward begins."""

    def fail(_: Tensor) -> None:
        raise OSError("in backward")

    output.register_hook(fail)


@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
@pytest.mark.parametrize("eager", [0.0, 0.3, 1.0])
def test_after_a_failed_backward_the_next_step_is_right(
    prepare: Callable[[nn.Module], Any], eager: float
) -> None:
    expected = train(Net())
    model, link = Net(), DeferredLink(eager=eager)
    for block in model.blocks:
        prepare(block)
    engine = offload(model, link)
    train(model, [[3]])
    host = link.taken
    model.load_state_dict(Net().state_dict())
    handle = model.blocks[1].register_forward_hook(fail_in_backward)
    for _ in range(2):
        with pytest.raises(OSError, match="in backward"):
            loss_of(model, words_of(3)).backward()
        model.zero_grad()
    handle.remove()
    assert_same(train(model), expected)
    assert link.taken == host, "the failed steps' slots are used again"
    engine.undo()
    link.close()


def test_after_a_failed_forward_nothing_stays_on_the_gpu() -> None:
    model = Net()
    engine = offload(model, Counting())

    def fail(*_: Any) -> None:
        raise OSError("in forward")

    handle = model.blocks[2].register_forward_hook(fail)
    with Storages() as made, pytest.raises(OSError, match="in forward"):
        model(words_of(3))
    gc.collect()
    assert made.alive() == 0
    handle.remove()
    assert_same(train(model), train(Net()))
    engine.undo()


def test_a_tensor_that_is_changed_after_it_was_saved_is_refused_as_by_autograd() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            saved = x.exp()
            out = saved * 2
            saved.add_(1)
            return out

    model = nn.Sequential(Changing(), nn.Tanh())
    engine = ActivationOffload(InstantLink(), model, device_type="cpu", smallest=1)
    engine.wrap(model[0])
    with pytest.raises(RuntimeError, match="changed in place"):
        model(torch.ones(4, requires_grad=True)).sum().backward()
    engine.undo()


# -- where the memory is ---------------------------------------------------------------------------


class Storages(TorchDispatchMode):
    """Watches the memory that ops make, however long it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {t.untyped_storage() for t in (*args, *(kwargs or {}).values()) if _is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::set_":
            return out  # by which the link looks at memory that somebody else made
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if _is_tensor(tensor) and (storage := tensor.untyped_storage()) not in before:
                self._made[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        """Bytes of it that are still there."""
        return sum(nbytes for made, nbytes in self._made.values() if made() is not None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def made_by_no_op(nbytes: int) -> Tensor:
    """Host memory that `Storages` does not see: what it counts stands for the GPU's memory."""
    return torch.from_numpy(np.empty(nbytes, np.uint8))


class Counting(InstantLink):
    """Writes down what is copied, and counts the host memory that is still held."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._memory: list[tuple[weakref.ref[Any], int]] = []

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        self.events.append("out")
        return super().to_host(source, target, after)

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        self.events.append("in")
        return super().to_gpu(source, target, after)

    def host_memory(self, nbytes: int) -> Tensor:
        memory = made_by_no_op(nbytes)
        self._memory.append((weakref.ref(memory.untyped_storage()), nbytes))
        return memory

    def held(self) -> int:
        return sum(nbytes for memory, nbytes in self._memory if memory() is not None)


def saved_bytes(model: Net, samples: int = 4) -> int:
    """What a forward leaves behind for backward."""
    words = words_of(samples)
    with Storages() as made:
        loss = loss_of(model, words)
    alive = made.alive()
    del loss
    return alive


def test_what_left_is_not_on_the_gpu_between_forward_and_backward() -> None:
    plain, model = Net(), Net()
    before = saved_bytes(plain)
    link = Counting()
    engine = offload(model, link)
    after = saved_bytes(model)
    assert before - after == link.held() > before / 2
    engine.undo()


@pytest.mark.parametrize("prepare", EAGER.values(), ids=EAGER)
def test_after_a_step_nothing_is_left_on_the_gpu_but_gradients(
    prepare: Callable[[nn.Module], Any],
) -> None:
    model = Net()
    for block in model.blocks:
        prepare(block)
    engine = offload(model, Counting())
    with Storages() as made:
        loss_of(model, words_of(3)).backward()
        model.zero_grad()
    assert made.alive() == 0
    engine.undo()


def test_after_a_failed_backward_nothing_is_left_on_the_gpu() -> None:
    """Not even what was on its way back when it failed."""

    class Late(DeferredLink):
        def host_memory(self, nbytes: int) -> Tensor:
            return made_by_no_op(nbytes)

    model, link = Net(), Late()
    engine = offload(model, link)
    model.blocks[1].register_forward_hook(fail_in_backward)
    with Storages() as made:
        with pytest.raises(OSError, match="in backward"):
            loss_of(model, words_of(3)).backward()
        model.zero_grad()
    gc.collect()
    assert link.bytes["in"] > 0
    assert made.alive() == 0
    engine.undo()


def test_a_graph_that_is_kept_after_backward_is_on_the_host_again() -> None:
    model = Net()
    engine = offload(model, Counting())
    with Storages() as made:
        loss = loss_of(model, words_of(3))
        before = made.alive()
        loss.backward(retain_graph=True)
        model.zero_grad()
    assert made.alive() == before
    engine.undo()


def test_a_recomputed_block_has_not_even_its_input_on_the_gpu() -> None:
    plain, model = Net(), Net()
    for net in (plain, model):
        for block in net.blocks:
            recompute(block)
    before = saved_bytes(plain)
    engine = offload(model, Counting())
    inputs = 3 * 4 * HIDDEN  # three blocks, four samples
    scale = 4 * LENGTH * 4  # one for all of them, given by name
    assert before - saved_bytes(model) == inputs + scale
    engine.undo()


def test_an_input_by_name_leaves_as_one_by_position() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x=x)
            return x

    model = Named()
    for block in model.blocks:
        recompute(block)
    link = DeferredLink()
    engine = ActivationOffload(link, model, device_type="cpu", smallest=1)
    for block in model.blocks:
        engine.wrap(block)
    x = torch.randn(4, LENGTH, WIDTH, requires_grad=True)
    model(x).sum().backward()
    assert link.bytes["out"] == 4 * HIDDEN, "the second block's; the first one's is the model's"
    engine.undo()


def test_what_two_blocks_save_leaves_once() -> None:
    """A block's tanh saves its result, which the next block saves as its input."""
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3))
    )
    link = DeferredLink(eager=0.3)
    engine = ActivationOffload(link, layers, device_type="cpu", smallest=1)
    for layer in layers:
        engine.wrap(layer)
    layers(torch.randn(5, 8)).sum().backward()
    assert link.bytes == {"out": 3 * 5 * 8 * 4, "in": 3 * 5 * 8 * 4}
    engine.undo()


def test_weights_buffers_inputs_and_small_tensors_stay() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))
            self.register_buffer("table", torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) * self.table[:1] * x.mean(-1, keepdim=True)

    model, link = Scaled(), DeferredLink()
    engine = ActivationOffload(link, model, device_type="cpu", smallest=1024)
    engine.wrap(model)
    x = torch.randn(8, 64, requires_grad=True)
    model(x).sum().backward()
    product = 8 * 64 * 4
    assert sorted(engine.sizes(model)) == [8 * 4, product]
    assert link.bytes["out"] == product
    engine.undo()


def test_what_is_made_where_a_weight_was_leaves() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    class GivesMemoryBack(nn.Module):
        """As one whose weights are streamed; an activation gets the number of their storage."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.block = Square()

        def forward(self, x: Tensor) -> Tensor:
            number = self.weight.untyped_storage()._cdata
            self.weight.data = torch.empty(0)
            others = []
            while (made := x.clone()).untyped_storage()._cdata != number:
                others.append(made)
                assert len(others) < 10_000, "the number is not used again"
            return self.block(made)

    model, link = GivesMemoryBack(), DeferredLink()
    engine = ActivationOffload(link, model, device_type="cpu", smallest=1)
    engine.wrap(model.block)
    model(torch.randn(64, requires_grad=True)).sum().backward()
    assert link.bytes["out"] == 64 * 4
    engine.undo()


def test_a_batch_on_another_device_than_the_gpu_stays() -> None:
    model, link = Net(), DeferredLink()
    engine = ActivationOffload(link, model, smallest=1)
    for block in model.blocks:
        engine.wrap(block)
    assert_same(train(model), train(Net()))
    assert link.bytes["out"] == 0
    engine.undo()


def test_without_gradients_nothing_is_moved() -> None:
    model, link = Net(), DeferredLink()
    engine = offload(model, link)
    with torch.no_grad():
        model(words_of(2))
    assert link.taken == 0
    engine.undo()


def test_undo_frees_the_host_memory_and_leaves_the_model_as_it_was() -> None:
    model, link = Net(), Counting()
    before = [(dict(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    engine = offload(model, link)
    train(model)
    assert link.held() > 0
    engine.undo()
    engine.undo()
    gc.collect()
    assert link.held() == 0
    assert [(dict(vars(m)), len(m._forward_hooks)) for m in model.modules()] == before
    train(model)
    assert link.held() == 0


def test_a_graph_outlives_undo() -> None:
    torch.manual_seed(1)
    words = words_of(3)
    plain, model, link = Net(), Net(), Counting()
    loss_of(plain, words).backward()
    engine = offload(model, link)
    loss = loss_of(model, words)
    engine.undo()
    loss.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    del loss
    assert link.held() == 0


def test_a_graph_that_never_goes_backward_frees_its_slots() -> None:
    model, link = Net(), Counting()
    engine = offload(model, link)
    for _ in range(3):
        loss_of(model, words_of(3))
    once = link.held()
    train(model)
    assert link.held() == once
    engine.undo()


# -- when it is copied -----------------------------------------------------------------------------


def test_a_block_comes_back_while_the_next_one_runs_backward() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    link = Counting()
    engine = ActivationOffload(link, layers, device_type="cpu", smallest=1)
    for number, layer in enumerate(layers):
        engine.wrap(layer)
        layer[1].register_full_backward_pre_hook(
            lambda *_, number=number: link.events.append(f"block {number}")
        )
    loss = layers(torch.randn(5, 8)).sum()
    link.events.clear()
    loss.backward()
    # Of each block its input, which of the first stays, and what its GELU saves. The last block has
    # no time to come back in.
    both = ["in", "in"]
    assert link.events == [*both, *both, "block 2", "in", "block 1", "block 0"]
    engine.undo()


def test_with_a_longer_lag_a_block_has_the_time_of_more_parts() -> None:
    """Parts are what the model calls, offloaded or not."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
    link = Counting()
    sources: list[weakref.ref[Any]] = []
    layers[0][0].register_forward_hook(
        lambda _, __, out: sources.append(weakref.ref(out.untyped_storage()))
    )
    gone: list[bool] = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_: gone.append(sources[0]() is None))
        layer[1].register_full_backward_pre_hook(
            lambda *_, number=number: link.events.append(f"block {number}")
        )
    engine = ActivationOffload(link, layers, device_type="cpu", smallest=1)
    engine.wrap(layers[0], {0}, lag=2)
    loss = layers(torch.randn(5, 8)).sum()
    assert gone == [False, False, False, True], "it is given back after the third block's hooks"
    loss.backward()
    assert link.events == ["out", "block 3", "in", "block 2", "block 1", "block 0"]
    engine.undo()


# -- in a rehearsal --------------------------------------------------------------------------------

H200 = find_gpu("h200")
TOKENS, WIDE = 4096, 256
#: What a block of `Wide` saves: its input and what its tanh makes.
SAVED = TOKENS * (WIDE + 4 * WIDE) * 4


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, 4 * WIDE)
        self.down = nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(6))
        self.head = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(kw_only=True)
class Rehearsed:
    """What a rehearsal of one step found."""

    after_forward: int = 0
    peak: int = 0
    seconds: float = 0.0
    host_bytes: int = 0


Prepare = Callable[[nn.Module, Recorder], Any]
REHEARSED: dict[str, tuple[Prepare, int]] = {
    "kept": (lambda block, _: None, SAVED),
    "recomputed": (lambda block, _: recompute(block), SAVED // 5),
    "compiled": (
        lambda block, recorder: stand_in_for_compiled(block, KEEP, recorder=recorder),
        SAVED,
    ),
    "compiled and recomputed": (
        lambda block, recorder: stand_in_for_compiled(block, RECOMPUTE, recorder=recorder),
        SAVED // 5,
    ),
}


def rehearse_step(gpu: GPU, prepare: Prepare, *, offloaded: bool) -> Rehearsed:
    found = Rehearsed()
    job = oomph.Job(Wide, nn.MSELoss(), "sgd", (torch.zeros(TOKENS, WIDE), torch.zeros(TOKENS, 1)))

    def watch(model: nn.Module, _: Any, recorder: Recorder) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            prepare(block, recorder)
        if offloaded:
            engine = ActivationOffload(RehearsedLink(recorder, gpu), model)
            for block in model.blocks:  # type: ignore[union-attr]
                engine.wrap(block)

        def note(*_: Any) -> None:
            found.after_forward = recorder.allocated

        model.register_forward_hook(note)

    timeline = rehearse(job, gpu, ("step",), watch=watch, clock=Clock.of(gpu), skip_first_step=True)
    now = 0
    for _, block, is_birth in timeline.stream_of_events():
        now += block.size if is_birth else -block.size
        found.peak = max(found.peak, now)
    begin, end = (mark.seconds for mark in timeline.marks if mark.name == END_OF_STEP)
    found.seconds = end - begin
    found.host_bytes = timeline.host_bytes
    return found


def with_link(rate: float) -> GPU:
    return dataclasses.replace(H200, name="another link", host_link=rate / REACHED)


@pytest.mark.parametrize(("prepare", "saved"), REHEARSED.values(), ids=REHEARSED)
def test_a_rehearsal_finds_the_memory_that_left(prepare: Prepare, saved: int) -> None:
    plain = rehearse_step(with_link(1e15), prepare, offloaded=False)
    found = rehearse_step(with_link(1e15), prepare, offloaded=True)
    assert found.host_bytes == 6 * saved
    assert plain.after_forward - found.after_forward == 6 * saved
    # In backward there are two blocks on the GPU: one that runs and one that comes back.
    gradients = 6 * 8 * WIDE * (WIDE + 1) * 4
    assert 4 * saved - gradients <= plain.peak - found.peak <= 4 * saved


@pytest.mark.parametrize(("prepare", "saved"), REHEARSED.values(), ids=REHEARSED)
def test_copies_take_time_in_a_rehearsal_only_where_the_link_is_too_slow(
    prepare: Prepare, saved: int
) -> None:
    plain = rehearse_step(with_link(1e15), prepare, offloaded=False)
    forward = plain.seconds / 4  # at least, of a step that also goes backward
    hidden = rehearse_step(with_link(12 * saved / forward), prepare, offloaded=True)
    assert hidden.seconds < 1.1 * plain.seconds
    slow = rehearse_step(with_link(saved / forward), prepare, offloaded=True)
    # Both ways; the last block comes back at once, and one block's way may hide.
    assert 10 * forward < slow.seconds < plain.seconds + 12 * forward
