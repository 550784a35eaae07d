"""Weights that are away are read and written outside of their block as if they were there."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deferred_link import DeferredLink
from memory_slots import MemorySlots
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.errors import BadInput
from oomph.memory.link import InstantLink, Link
from oomph.techniques.disk_weights import OnDisk
from oomph.techniques.recompute import recompute
from oomph.techniques.streamed_weights import StreamedWeights
from oomph.techniques.watched_tensors import is_watched

WIDTH = 6
LINKS: dict[str, Callable[[], Link]] = {"at once": InstantLink, "late": DeferredLink}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def away(link: Link | None = None, **how: Any) -> tuple[nn.Sequential, StreamedWeights]:
    net = make()
    return net, StreamedWeights(net, ["1", "2"], link or InstantLink(), **how)


def _saved(weight: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


READS: dict[str, Callable[[Tensor], Any]] = {
    "an op": lambda w: w * 2,
    "norm": lambda w: w.norm(),
    "a list of tensors": lambda w: torch.stack([w, w]),
    "a vector": lambda w: nn.utils.parameters_to_vector([w]),
    "data": lambda w: w.data.sum(),
    "an alias of an alias": lambda w: w.detach().t()[1:, ::2].exp(),
    "another type's view": lambda w: w.detach().view(torch.int32).sum(),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "a list": lambda w: torch.tensor(w.tolist()),
    "an element": lambda w: w[1, 2].item(),
    "a deep copy": lambda w: copy.deepcopy(w).detach(),
    "a deep copy of an alias": lambda w: copy.deepcopy(w.data),
    "torch.save": lambda w: _saved(w).detach(),
    "how it lies": lambda w: torch.tensor(w.stride()),
    "printed": repr,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", READS)
def test_a_weight_is_read_as_if_it_were_here(how: str, grad: bool) -> None:
    net, _ = away()
    with torch.set_grad_enabled(grad):
        ours, theirs = READS[how](net[1].weight), READS[how](make()[1].weight)
    assert ours == theirs if not isinstance(ours, Tensor) else torch.equal(ours, theirs)


@pytest.mark.parametrize("recomputed", [False, True])
def test_so_it_is_after_a_backward(recomputed: bool) -> None:
    net, streamed = away()
    plain = make()
    for at in (1, 2):
        if recomputed:
            recompute(net[at])
    for _ in range(3):
        net(torch.ones(2, WIDTH)).sum().backward()
        for at in (1, 2):
            assert is_watched(net[at].weight) and is_watched(net[at].bias)
            assert torch.equal(net[at].weight * 2, plain[at].weight * 2)
    streamed.undo()
    assert not is_watched(net[1].weight)


def test_so_it_is_in_the_forward_after_a_backward_that_failed() -> None:
    class Stop(RuntimeError):
        pass

    def stop(_: Tensor) -> None:
        raise Stop

    net, _ = away()
    x = torch.ones(2, WIDTH)
    hook = net[0].weight.register_hook(stop)  # the blocks behind it have had their backward
    with pytest.raises(Stop):
        net(x).sum().backward()
    hook.remove()
    net(x)
    assert all(is_watched(net[at].weight) for at in (1, 2))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "data in place": lambda w: w.data.clamp_(-0.1, 0.1),
    "data": lambda w: setattr(w, "data", w.data * 3),
    "data of another": lambda w: setattr(w, "data", torch.ones(WIDTH, WIDTH)),
    "an element": lambda w: w.__setitem__((0, 1), 5.0),
    "an element of an alias": lambda w: w.data.view(-1).__setitem__(3, 5.0),
    "rows of an alias": lambda w: w.detach()[2:4].zero_(),
    "an initializer": lambda w: nn.init.constant_(w, 0.3),
    "copy_": lambda w: w.copy_(torch.ones(WIDTH, WIDTH)),
    "out": lambda w: torch.add(torch.ones(WIDTH, WIDTH), 1, out=w),
    "each of several": lambda w: torch._foreach_mul_([w, w.data], 0.5),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_to_a_weight_is_the_weight(how: str, link: str) -> None:
    net, streamed = away(LINKS[link]())
    plain = make()
    x = torch.ones(2, WIDTH)
    for one in (net, plain):
        one(x)  # blocks are here, or on their way
        with torch.no_grad():
            WRITES[how](one[1].weight)
    assert torch.equal(net(x), plain(x))
    streamed.undo()
    assert torch.equal(net[1].weight, plain[1].weight)
    assert type(net[1].weight) is nn.Parameter and not vars(net[1].weight)


def test_a_write_that_needs_no_grad_says_so_as_ever() -> None:
    net, _ = away()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        net[1].weight.mul_(2)
    assert torch.equal(net[1].weight, make()[1].weight)


def test_an_alias_follows_its_weight_and_outlives_the_run() -> None:
    net, streamed = away()
    held = net[1].weight.data.view(-1)
    with torch.no_grad():
        net[1].weight.fill_(2)
        assert (held == 2).all()
        held[0] = 3
        assert net[1].weight[0, 0] == 3
        streamed.undo()
        held[1] = 4
        assert net[1].weight[0, 1] == 4


def _penalties(net: nn.Sequential, x: Tensor) -> Tensor:
    squares = torch.stack([p.square().sum() for p in net.parameters()]).sum()
    gram = net[1].weight.t() @ net[2].weight
    before = F.linear(x, net[2].weight[:, 1:3].mean(1, keepdim=True).expand(-1, WIDTH))
    return net(x + before).square().sum() + squares + gram.norm()


@pytest.mark.parametrize("link", LINKS)
def test_gradients_flow_to_weights_that_a_loss_reads(link: str) -> None:
    net, _ = away(LINKS[link]())
    plain = make()
    x = torch.ones(2, WIDTH)
    for one in (net, plain):
        _penalties(one, x).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


def test_second_derivatives_go_through_them() -> None:
    def slope(one: nn.Sequential) -> Tensor:
        loss = one[1].weight.pow(3).sum()
        (gradient,) = torch.autograd.grad(loss, one[1].weight, create_graph=True)
        gradient.square().sum().backward()
        assert one[1].weight.grad is not None
        return one[1].weight.grad

    assert torch.equal(slope(away()[0]), slope(make()))


def test_what_autograd_saves_of_them_takes_no_memory() -> None:
    net, streamed = away()
    loss = net[1].weight.square().sum()
    assert streamed.is_noted(net[1].weight)
    loss.backward()
    assert not streamed.is_noted(net[1].weight)


class _Reads(nn.Module):
    """A block that reads another's weight."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x)) + F.linear(x, self.other[0].weight.detach())


def test_a_recomputed_block_may_read_another_block() -> None:
    def run(streams: bool) -> list[Tensor]:
        net = make()
        net.append(_Reads(net[2]))
        if streams:
            recompute(net[4])
            recompute(net[1])
            StreamedWeights(net, ["1", "2", "4"], InstantLink())
        out = []
        for _ in range(5):
            net.zero_grad()
            net(torch.ones(2, WIDTH)).square().sum().backward()
            out += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        return out

    assert all(torch.equal(*pair) for pair in zip(run(True), run(False), strict=True))


def test_threads_read_them_beside_each_other() -> None:
    net, _ = away(DeferredLink())
    expected = make()[1].weight
    wrong: list[int] = []

    def read(number: int) -> None:
        for _ in range(20):
            if not torch.equal(net[1].weight, expected):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda w: w.data_ptr(), "data_ptr"),
        (lambda w: w.untyped_storage(), "untyped_storage"),
        (lambda w: setattr(w, "data", torch.ones(2)), "data of torch.float32[2]"),
        (lambda w: setattr(w, "data", w.data.double()), "data of torch.float64"),
    ],
)
def test_what_only_a_weight_that_is_here_has_is_refused(
    ask: Callable[[Tensor], Any], what: str
) -> None:
    net, _ = away()
    with pytest.raises(BadInput) as refused:
        ask(net[1].weight)
    said = str(refused.value)
    assert "the weight 1.weight" in said and what in said and "test_away_reads.py:" in said
    assert torch.equal(net[1].weight, make()[1].weight)


def test_weights_that_the_disk_only_has_to_read_are_not_written_to() -> None:
    link = InstantLink()
    on_disk = OnDisk(blocks=["1"], open_store=lambda largest, buffers: MemorySlots(link))
    net, _ = away(link, on_disk=on_disk)
    assert torch.equal(net[1].weight, make()[1].weight)
    with torch.no_grad(), pytest.raises(BadInput, match=r"only read.*test_away_reads.py:\d+"):
        net[1].weight.mul_(2)
    assert torch.equal(net[1].weight, make()[1].weight)
