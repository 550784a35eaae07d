"""Streamed weights give the numbers of an untouched model to the bit, and few are on the GPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deferred_link import DeferredLink, poison
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from oomph.errors import BadInput
from oomph.memory.link import Copy, HostWork, InstantLink, Link
from oomph.techniques.compiled_blocks import compile_block
from oomph.techniques.host_optimizer import HostOptimizer
from oomph.techniques.host_placement import HostPlacement
from oomph.techniques.offload_activations import ActivationOffload
from oomph.techniques.recompute import recompute
from oomph.techniques.saved_weights import SavedWeights
from oomph.techniques.streamed_weights import StreamedWeights
from oomph.techniques.watched_tensors import own_work

WIDTH, WORDS, LENGTH = 8, 13, 5
SMALL = 1024
"""Bytes of a bucket: a block has several."""
BLOCKS = [f"blocks.{at}" for at in range(4)]


class Block(nn.Module):
    """Weights that are used as they are, transposed, twice and in part, beside a buffer."""

    counts = True

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.counts:
            self.seen: Tensor
            self.seen += x.detach().float().mean((0, 1))
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        wide = F.silu(self.up(x)) * self.scale
        x = x + self.dropout(self.down(wide)) * self.scale[:WIDTH].exp()
        return x + F.linear(x, self.down.weight[:, :WIDTH].t() @ self.down.weight[:, WIDTH:])


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    tied: bool = False
    """Whether blocks share weights with each other, and the embedding with the head."""
    frozen: bool = False
    dropout: float = 0.0
    parts: int = 1
    autocast: bool = False
    clip: float | None = None
    blocks: Sequence[str] = tuple(BLOCKS)
    change: Callable[[nn.Module], Any] | None = None
    """What is done to each block of both models first."""

    def make(self) -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Net(self.dropout)
        if self.tied:
            net.head.weight = net.embed.weight
            net.blocks[2].up.weight = net.blocks[0].up.weight
            net.blocks[3].scale = net.blocks[2].scale
        if self.frozen:
            net.blocks[1].requires_grad_(False)
            net.blocks[2].up.weight.requires_grad_(False)
        for block in net.blocks if self.change is not None else ():
            self.change(block)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(
        self,
        net: Net,
        optimizer: torch.optim.Optimizer,
        seed: int,
        host: HostOptimizer | None = None,
    ) -> list[Tensor]:
        """A training step; gives the loss of each part and the gradients that it made."""
        torch.manual_seed(seed)
        results = []
        for part in range(self.parts):
            tokens = torch.randint(WORDS, (3, LENGTH + 1))
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = net(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            last = part == self.parts - 1
            with (
                made_gradients(net) as gradients,
                host.backward(last=last) if host is not None else contextlib.nullcontext(),
            ):
                (loss / self.parts).backward()
            results += [loss.detach(), *gradients]
        if host is not None:
            host.step()
            return results
        if self.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad()
        return results


@contextlib.contextmanager
def made_gradients(net: nn.Module) -> Iterator[list[Tensor]]:
    """The gradients that a backward inside makes, in the order of the parameters."""
    made: dict[Tensor, Tensor] = {}
    gradients: list[Tensor] = []
    trained = [p for p in net.parameters() if p.requires_grad]
    hooks = [p.register_hook(lambda g, p=p: made.update({p: g.clone()})) for p in trained]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()
    gradients += [made[parameter] for parameter in trained]


class Streaming:
    """A model with streamed weights that are stepped; no gradient waits on the GPU."""

    def __init__(self, case: Case, link: Link, ahead: int = 1, host_share: float = 0.0) -> None:
        self.case = case
        self.net, self.optimizer = case.make()
        self.streamed = StreamedWeights(self.net, case.blocks, link, ahead=ahead)
        placement = HostPlacement(bucket=SMALL, keep_gradients=0, host_share=host_share)
        self.host: HostOptimizer | None = HostOptimizer(
            self.net,
            self.optimizer,
            link,
            placement,
            weights=self.streamed,
            clip_norm=case.clip,
        )

    def step(self, seed: int) -> list[Tensor]:
        return self.case.step(self.net, self.optimizer, seed, self.host)

    def undo(self) -> None:
        self.host.undo()
        self.host = None
        self.streamed.undo()


class CountingLink:
    """Passes everything on; knows how many blocks are on the GPU at once."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.fetches = 0
        self.most = 0
        self._there: dict[int, weakref.ref[Any]] = {}

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        if source.dtype is torch.uint8:  # a block, and nothing that is stepped
            self.fetches += 1
            storage = target.untyped_storage()
            self._there[storage._cdata] = weakref.ref(storage)
            self.most = max(self.most, sum(there() is not None for there in self._there.values()))
        return self._link.to_gpu(source, target, after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def assert_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), (a, b)


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        assert_equal(list(found["state"][number].values()), list(state.values()))


def assert_same_training(case: Case, link: Link, steps: int = 3, ahead: int = 1) -> None:
    plain, optimizer = case.make()
    streaming = Streaming(case, link, ahead)
    for seed in range(steps):
        expected = case.step(plain, optimizer, seed)
        assert_equal(streaming.step(seed), expected)
    assert_same_state(streaming.optimizer, optimizer)
    assert_equal(list(streaming.net.state_dict().values()), list(plain.state_dict().values()))
    streaming.undo()
    assert_equal(list(streaming.net.parameters()), list(plain.parameters()))
    # Both go on as plain models.
    assert_equal(streaming.step(9), case.step(plain, optimizer, 9))
    link.close()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps a block's memory for longer than he should finds nonsense in it."""
    drop = StreamedWeights._drop

    def drop_poisoned(streamed: StreamedWeights, unit: Any) -> None:
        memory, here = unit.memory, unit.is_here
        drop(streamed, unit)
        if memory is not None and here:
            poison(memory)

    monkeypatch.setattr(StreamedWeights, "_drop", drop_poisoned)


def recomputed_by_torch(block: nn.Module) -> None:
    """As Hugging Face does: the recomputation calls the block as a whole."""
    call = block.__class__.__call__

    class Recomputed(type(block)):  # type: ignore[misc]
        def __call__(self, *args: Any) -> Any:
            return checkpoint(lambda *x: call(self, *x), *args, use_reentrant=False)

    block.__class__ = Recomputed


CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "tied in micro-batches": Case(tied=True, parts=3),
    "frozen": Case(frozen=True, tied=True),
    "dropout": Case(dropout=0.3, parts=2),
    "autocast": Case(autocast=True),
    "autocast in micro-batches": Case(autocast=True, parts=2, dropout=0.3),
    "recomputed": Case(change=recompute, dropout=0.3, tied=True),
    "partly recomputed": Case(change=lambda block: recompute(block, ["product#1"])),
    "recomputed under autocast": Case(change=recompute, autocast=True),
    "recomputed from outside": Case(change=recomputed_by_torch, dropout=0.3),
    "all but two blocks": Case(blocks=["blocks.1", "blocks.2"], tied=True),
    "embedding and head": Case(tied=True, blocks=["embed", *BLOCKS, "head"]),
}


#: Without clipping, weights are stepped inside backward; with it all gradients leave before.
clipped_or_not = pytest.mark.parametrize("clip", [None, 0.5])


@clipped_or_not
@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_same_bits(name: str, clip: float | None) -> None:
    assert_same_training(dataclasses.replace(CASES[name], clip=clip), InstantLink())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("eager", "seed", "clip"), [(0.0, 0, None), (0.0, 0, 0.5), (0.3, 1, None), (0.3, 2, 0.5)]
)
def test_training_gives_the_same_bits_however_late_copies_are(
    name: str, eager: float, seed: int, clip: float | None
) -> None:
    case = dataclasses.replace(CASES[name], clip=clip)
    assert_same_training(case, DeferredLink(eager=eager, seed=seed), steps=2)


@clipped_or_not
@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_any_number_of_blocks_may_come_ahead(ahead: int, clip: float | None) -> None:
    case = dataclasses.replace(CASES["tied in micro-batches"], clip=clip)
    assert_same_training(case, DeferredLink(), ahead=ahead)


@clipped_or_not
@pytest.mark.parametrize("name", CASES)
def test_no_more_blocks_are_on_the_gpu_than_run_and_come_next(
    name: str, clip: float | None
) -> None:
    link = CountingLink(DeferredLink(eager=0.5))
    streaming = Streaming(dataclasses.replace(CASES[name], clip=clip), link)
    for seed in range(3):
        streaming.step(seed)
    assert link.most == 2


@clipped_or_not
def test_the_last_blocks_of_forward_are_the_first_of_backward(clip: float | None) -> None:
    """What is here is not fetched again: each block but the last two comes twice in a step.

    Where a block is stepped when its forward comes, it comes with that.
    """
    link = CountingLink(InstantLink())
    streaming = Streaming(Case(clip=clip), link)
    for seed in range(3):
        link.fetches = 0
        streaming.step(seed)
    assert link.fetches == (4 + 2 if clip is None else 2)


def test_copies_of_weights_by_autocast_do_not_outlive_their_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    casts: list[weakref.ref[Any]] = []
    note = SavedWeights._note_cast

    def watch(streamed: SavedWeights, source: Tensor, cast: Tensor) -> None:
        casts.append(weakref.ref(cast.untyped_storage()))
        note(streamed, source, cast)

    monkeypatch.setattr(SavedWeights, "_note_cast", watch)
    streaming = Streaming(Case(autocast=True), InstantLink())
    weights = {tuple(p.shape) for p in streaming.net.blocks.parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        logits = streaming.net(torch.zeros(2, LENGTH, dtype=torch.long))
        gc.collect()
        alive = [cast() for cast in casts if cast() is not None]
    sizes = {2 * torch.Size(shape).numel() for shape in weights if len(shape) > 1}
    assert len(casts) > 20
    assert not [storage for storage in alive if storage.nbytes() in sizes]
    del logits


def test_a_changed_copy_of_a_weight_is_saved_as_it_is() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            half = self.weight.to(torch.bfloat16)
            half.mul_(3)
            return x @ half

    def gradients(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            model(x).sum().backward()
        assert x.grad is not None
        return x.grad

    plain, streamed = nn.Sequential(Changed()), nn.Sequential(Changed())
    StreamedWeights(streamed, ["0"], InstantLink())
    inputs = [torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    assert_equal([gradients(streamed, inputs[0])], [gradients(plain, inputs[1])])


class Result:
    """What no one can look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Unusual(nn.Module):
    """Takes its input by name; gives its output in an object."""

    def __init__(self, in_object: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_object = in_object

    def forward(self, x: Tensor) -> Any:
        out = self.linear(self.linear(x).relu())
        return Result(out) if self.in_object else out


@pytest.mark.parametrize("in_object", [False, True])
def test_recomputed_blocks_find_their_weights_however_they_are_called(in_object: bool) -> None:
    def gradients(streams: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(Unusual(in_object) for _ in range(4))
        for block in model:
            recompute(block)
        if streams:
            StreamedWeights(model, ["0", "1", "2", "3"], InstantLink(), ahead=0)
        x = torch.ones(2, 4, requires_grad=True)
        for block in model:
            x = block(x).tensor if in_object else block(x=x)
        x.sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(streams=False)
    assert len(expected) == 8
    assert_equal(gradients(streams=True), expected)


# --- The model, seen from outside -----------------------------------------------------------------


def test_a_weight_that_is_not_here_is_read_and_written_as_if_it_were() -> None:
    net, _ = Case().make()
    before = copy.deepcopy(net.state_dict())
    streamed = StreamedWeights(net, BLOCKS, InstantLink())
    weight = net.blocks[0].up.weight
    assert weight.shape == (2 * WIDTH, WIDTH)
    assert torch.equal(weight, before["blocks.0.up.weight"])
    with own_work():
        assert weight.isnan().all()  # none of it is on the GPU
    with torch.no_grad():
        weight.add_(1)
    weight.data[0] = 7
    assert torch.equal(streamed.numbers(weight)[1:], before["blocks.0.up.weight"][1:] + 1)
    assert (streamed.numbers(weight)[0] == 7).all()


def test_parameters_stay_the_same_objects() -> None:
    net, _ = Case(tied=True).make()
    before = dict(net.named_parameters(remove_duplicate=False))
    streamed = StreamedWeights(net, BLOCKS, InstantLink())
    net(torch.zeros(2, LENGTH, dtype=torch.long)).sum().backward()
    streamed.undo()
    now = dict(net.named_parameters(remove_duplicate=False))
    assert all(now[name] is parameter for name, parameter in before.items())
    assert vars(net.blocks[0]).keys() == vars(Case().make()[0].blocks[0]).keys()
    assert not any("__deepcopy__" in vars(parameter) for parameter in now.values())


def test_states_are_saved_and_loaded_while_weights_are_streamed() -> None:
    case = Case(tied=True)
    streaming = Streaming(case, DeferredLink())
    other, _ = case.make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    saved = copy.deepcopy(other.state_dict())
    streaming.step(0)
    assert not streaming.net.load_state_dict(saved).missing_keys
    assert_equal(list(streaming.net.state_dict().values()), list(saved.values()))
    block = streaming.net.blocks[1]
    assert_equal(list(block.state_dict().values()), list(other.blocks[1].state_dict().values()))
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    assert torch.equal(streaming.net(tokens), other(tokens))


def test_a_copied_model_is_whole_and_on_its_own() -> None:
    case = Case(tied=True)
    plain, _ = case.make()
    streaming = Streaming(case, InstantLink())
    twin = copy.deepcopy(streaming.net)
    assert twin.blocks[2].up.weight is twin.blocks[0].up.weight
    streaming.step(0)
    assert_equal(list(twin.parameters()), list(plain.parameters()))
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    twin(tokens).sum().backward()
    plain(tokens).sum().backward()
    gradients = [p.grad for p in twin.parameters()], [p.grad for p in plain.parameters()]
    assert_equal(*gradients)  # type: ignore[arg-type]
    streaming.undo()
    assert torch.equal(twin(tokens), plain(tokens))


def test_a_state_of_the_optimizer_from_before_goes_on() -> None:
    case = Case(tied=True)
    plain, optimizer = case.make()
    net, other = case.make()
    case.step(plain, optimizer, 0)
    case.step(net, other, 0)
    streamed = StreamedWeights(net, BLOCKS, InstantLink())
    host = HostOptimizer(net, other, InstantLink(), weights=streamed)
    assert_equal(case.step(net, other, 1, host), case.step(plain, optimizer, 1))
    assert_same_state(other, optimizer)


# --- With other techniques ------------------------------------------------------------------------


@contextlib.contextmanager
def compiled_eagerly(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Blocks are traced for forward and backward, and run by PyTorch's own kernels."""
    from torch._dynamo.backends.debugging import aot_eager

    real, graphs = torch.compile, []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return aot_eager(graph, inputs)

    def stand_in(forward: Any, *, dynamic: bool, options: Any) -> Any:
        return real(forward, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", stand_in)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize(("recomputes", "autocast"), [(False, False), (True, False), (False, True)])
def test_compiled_blocks_are_compiled_once_and_give_the_same_bits(
    recomputes: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(block: nn.Module) -> None:
        if recomputes:
            block.counts = False  # a recomputed part that writes to a buffer is not compiled
            recompute(block, compiled=True)
        compile_block(block)

    with compiled_eagerly(monkeypatch) as graphs:
        case = Case(change=change, autocast=autocast, clip=0.5)
        plain, optimizer = case.make()
        case.step(plain, optimizer, 0)
        compiled_plainly = len(graphs)
        assert compiled_plainly
        assert_same_training(case, DeferredLink(eager=0.3))
        # Autocast without its cache is another way to run it, for PyTorch's compiler.
        assert len(graphs) <= compiled_plainly + autocast
        link = CountingLink(InstantLink())
        streaming = Streaming(case, link)
        for seed in range(2):
            streaming.step(seed)
        assert link.most == 2


@clipped_or_not
@pytest.mark.parametrize("change", [None, recompute])
def test_activations_are_offloaded_beside_weights(
    change: Callable[[nn.Module], Any] | None, clip: float | None
) -> None:
    case = Case(change=change, tied=True, clip=clip)
    plain, optimizer = case.make()
    link = DeferredLink(eager=0.3)
    streaming = Streaming(case, link)
    offload = ActivationOffload(link, streaming.net, device_type="cpu", smallest=0)
    for block in streaming.net.blocks:
        offload.wrap(block)
    alone = DeferredLink(eager=0.3)
    beside = Streaming(case, alone)
    for seed in range(2):
        assert_equal(streaming.step(seed), case.step(plain, optimizer, seed))
        beside.step(seed)
        inputs = 4 * 3 * LENGTH * WIDTH * 4
        assert link.bytes["out"] - alone.bytes["out"] >= (1 + seed) * inputs
    offload.undo()
    streaming.undo()


# --- Whoever else writes to the host's numbers ----------------------------------------------------


@pytest.mark.parametrize("eager", [0.0, 0.3, 1.0])
def test_a_weight_that_the_host_writes_to_comes_as_it_will_be(eager: float) -> None:
    case = Case(tied=True)
    plain, _ = case.make()
    net, _ = case.make()
    link = DeferredLink(eager=eager)
    streamed = StreamedWeights(net, BLOCKS, link)
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(net(tokens), plain(tokens))
            for weight in (net.blocks[0].up.weight, net.blocks[3].down.weight):
                host = streamed.host_weight(weight)
                before = streamed.before_write(weight)
                work = link.host_work(lambda host=host: host.mul_(1.5), host.nbytes, before)
                streamed.written(weight, [work])
            plain.blocks[0].up.weight.mul_(1.5)
            plain.blocks[3].down.weight.mul_(1.5)
    streamed.undo()
    assert_equal(list(net.parameters()), list(plain.parameters()))


class FollowedCopy:
    def __init__(self) -> None:
        self.is_waited = self.is_finished = False

    def wait(self) -> None:
        self.is_waited = True

    def finish(self) -> None:
        self.is_finished = True


class FollowingLink(InstantLink):
    """Knows who waited for its copies of blocks: the computing stream, the host or its writes."""

    def __init__(self) -> None:
        self.copies: list[FollowedCopy] = []
        self.before_writes: list[Copy] = []

    def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        copy = super().to_gpu(source, target)
        if source.dtype is not torch.uint8:
            return copy
        self.copies.append(FollowedCopy())
        return self.copies[-1]

    def to_host(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
        self.before_writes += after
        return super().to_host(source, target)

    def host_work(
        self,
        work: Callable[[], None],
        nbytes: int,
        after: Sequence[Copy] = (),
        *,
        only_numbers: bool = False,
    ) -> HostWork:
        self.before_writes += after
        return super().host_work(work, nbytes)


@pytest.mark.parametrize("host_share", [0.0, 1.0])
def test_the_host_waits_for_no_copy_before_it_writes(host_share: float) -> None:
    link = FollowingLink()
    # Clipped: nothing is written before all gradients are there.
    streaming = Streaming(Case(clip=0.5), link, host_share=host_share)
    loss = streaming.net(torch.zeros(2, LENGTH, dtype=torch.long)).sum()
    with streaming.host.backward():
        loss.backward()
    assert link.copies
    assert all(copy.is_waited for copy in link.copies)
    first, last = (streaming.net.blocks[at].scale for at in (0, 3))
    assert streaming.streamed.before_write(first) == link.copies[-1:]
    assert streaming.streamed.before_write(last) == link.copies[3:4]
    came_last = [
        copy for w in streaming.streamed.parameters for copy in streaming.streamed.before_write(w)
    ]
    assert not any(copy in link.before_writes for copy in came_last)
    streaming.host.step()
    streaming.host.settle()
    assert all(copy in link.before_writes for copy in came_last)
    assert not any(copy.is_finished for copy in link.copies)


def test_a_write_that_fails_leaves_no_half_of_a_block_behind() -> None:
    class Failed:
        def wait(self) -> None:
            raise ArithmeticError

        finish = wait

    class Failing(InstantLink):
        def to_gpu(self, source: Tensor, target: Tensor, after: Sequence[Copy] = ()) -> Copy:
            for earlier in after:
                earlier.finish()
            return super().to_gpu(source, target)

    net, _ = Case().make()
    plain, _ = Case().make()
    streamed = StreamedWeights(net, BLOCKS, Failing())
    streamed.written(net.blocks[0].scale, [Failed()])
    tokens = torch.ones(2, LENGTH, dtype=torch.long)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            net(tokens)
    streamed.written(net.blocks[0].scale)
    assert torch.equal(net(tokens), plain(tokens))


def test_a_backward_that_needs_weights_from_before_a_step_is_refused() -> None:
    streaming = Streaming(Case(blocks=["embed", *BLOCKS, "head"]), InstantLink())
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    early, late = (streaming.net(tokens).sum() for _ in range(2))
    with streaming.host.backward():
        late.backward()
    streaming.host.step()
    with (
        pytest.raises(BadInput, match="changed after the forward"),
        streaming.host.backward(),
    ):
        early.backward()
    streaming.step(0)


def test_a_block_that_writes_to_its_own_weights_is_refused() -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    model = nn.Sequential(Writing(4, 4))
    StreamedWeights(model, ["0"], InstantLink())
    with pytest.raises(BadInput, match="writes to its own weights"):
        model(torch.ones(1, 4))


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    streaming = Streaming(Case(frozen=True), InstantLink())
    streaming.net.requires_grad_(True)
    with pytest.raises(BadInput, match="unfrozen"):
        streaming.step(0)


# --- When things go wrong -------------------------------------------------------------------------


def test_a_failed_forward_or_backward_leaves_everything_usable() -> None:
    case = Case(tied=True, dropout=0.2, clip=0.5)
    plain, optimizer = case.make()
    streaming = Streaming(case, DeferredLink())

    def fail(*_: Any) -> None:
        raise ArithmeticError

    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    for spoil in (
        lambda: streaming.net.blocks[2].up.register_forward_pre_hook(fail),
        lambda: streaming.net.blocks[1].up.register_full_backward_hook(fail),
    ):
        handle = spoil()
        with pytest.raises(ArithmeticError):
            loss = streaming.net(tokens).sum()
            with streaming.host.backward():
                loss.backward()
        handle.remove()
    plain.load_state_dict(streaming.net.state_dict())  # buffers count what they saw
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert_equal(streaming.step(0), case.step(plain, optimizer, 0))


def test_host_memory_is_given_back() -> None:
    memory: list[weakref.ref[Any]] = []

    class Watched(InstantLink):
        def host_memory(self, nbytes: int) -> Tensor:
            taken = super().host_memory(nbytes)
            memory.append(weakref.ref(taken.untyped_storage()))
            return taken

    streaming = Streaming(Case(tied=True), Watched())
    streaming.step(0)
    assert len(memory) > 4
    streaming.undo()
    gc.collect()
    assert not [taken for taken in memory if taken() is not None]
    assert not any(parameter.isnan().any() for parameter in streaming.net.parameters())


def test_a_backward_after_undo_is_refused() -> None:
    net, _ = Case().make()
    streamed = StreamedWeights(net, BLOCKS, InstantLink())
    loss = net(torch.zeros(2, LENGTH, dtype=torch.long)).sum()
    streamed.undo()
    with pytest.raises(BadInput, match="after the backward"):
        loss.backward()


def test_host_memory_that_runs_out_leaves_the_model_as_it_was() -> None:
    class Small(InstantLink):
        def __init__(self) -> None:
            self.left = 3

        def host_memory(self, nbytes: int) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise MemoryError
            return super().host_memory(nbytes)

    net, _ = Case().make()
    plain, _ = Case().make()
    with pytest.raises(MemoryError):
        StreamedWeights(net, BLOCKS, Small())
    assert_equal(list(net.parameters()), list(plain.parameters()))
    assert_equal(
        [net(torch.ones(2, LENGTH, dtype=torch.long))],
        [plain(torch.ones(2, LENGTH, dtype=torch.long))],
    )


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (["blocks.9"], "no block blocks.9"),
        (["blocks", "blocks.1"], "blocks.1 is a part of blocks"),
        (["blocks.0.dropout"], "nothing to stream"),
    ],
)
def test_blocks_that_cannot_be_streamed_are_refused(blocks: list[str], said: str) -> None:
    net, _ = Case().make()
    with pytest.raises(BadInput, match=said):
        StreamedWeights(net, blocks, InstantLink())


# --- Inference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_generating_gives_the_same_tokens(no_grad: Callable[[], Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    net = copy.deepcopy(plain)
    link = CountingLink(DeferredLink(eager=0.5))
    streamed = StreamedWeights(net, [f"model.layers.{at}" for at in range(3)], link)
    prompt = torch.randint(32, (2, 5))

    def generate(model: Any) -> Any:
        with no_grad():
            return model.generate(
                prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip

    expected = generate(plain)
    for _ in range(2):
        result = generate(net)
        assert torch.equal(result.sequences, expected.sequences)
        assert_equal(result.logits, expected.logits)
    assert link.most == 2
    streamed.undo()
    assert_equal(generate(net).logits, expected.logits)


def test_while_the_last_block_runs_the_first_comes_again() -> None:
    """In forwards without gradients, one after the other."""
    coming: list[bool] = []
    net, _ = Case().make()
    streamed = StreamedWeights(net, BLOCKS, InstantLink())
    first = streamed._units[0]
    net.blocks[3].register_forward_hook(lambda *_: coming.append(first.memory is not None))
    with torch.no_grad():
        for _ in range(3):
            net(torch.zeros(2, LENGTH, dtype=torch.long))
    assert coming == [True] * 3
