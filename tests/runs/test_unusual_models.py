"""Weights, gradients and losses of rarer kinds: the plain loop's numbers, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupted_runs import CHOICES, WIDTH, Net, square_loss, state_of
from small_plans import plan_with
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._pytree import tree_leaves, tree_map_only

import oomph
from oomph.errors import BadInput, OomphError
from oomph.jobs.job import Job
from oomph.plans.choices import Choices
from oomph.runs.run import Run, apply

ON_THE_HOST = ["host_optimizer", "host_cores", "weights_away"]

Loss = Callable[[nn.Module, Any], Tensor]
Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def rows() -> list[tuple[Tensor, Tensor]]:
    streams = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return [
        (torch.randn(4, WIDTH, generator=s), torch.randn(4, WIDTH, generator=s)) for s in streams
    ]


def words() -> list[tuple[Tensor, Tensor]]:
    streams = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return [
        (torch.randint(9, (4, 3), generator=s), torch.randn(4, WIDTH, generator=s)) for s in streams
    ]


def apply_to(
    choices: Choices, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Any
) -> Run:
    plan = plan_with(choices, model, optimizer, batch)
    return apply(plan, Job(model, loss, optimizer, batch, name="net"))


def trained(make: Make, loss: Loss, batches: list[Any]) -> nn.Module:
    """The plain loop."""
    torch.manual_seed(0)
    model, optimizer = make()
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_trains_as_plainly(name: str, make: Make, loss: Loss, batches: list[Any]) -> None:
    """Under one of `CHOICES`, or as `fit` chooses."""
    expected = trained(make, loss, batches)
    torch.manual_seed(0)
    model, optimizer = make()
    if name == "fit":
        natural = oomph.estimate(Job(model, loss, optimizer, batches[0])).peak.device
        run = oomph.fit(model, optimizer, loss, batches[0], budget=2 * natural, allow="exact")
    else:
        run = apply_to(CHOICES[name], model, optimizer, loss, batches[0])
    for batch in batches:
        run.step(batch)
    run.undo()
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    for (path, one), (_, other) in pairs:
        torch.testing.assert_close(one, other, msg=lambda text, path=path: f"{path}: {text}")


# -- weights ---------------------------------------------------------------------------------------


class Turning(nn.Module):
    """A product in the complex plane."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(torch.complex64) @ self.turn).real.tanh()


def with_blocks(make_block: Callable[[], nn.Module]) -> Make:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        for block in model.blocks:
            block.dropout.p = 0.0
        if make_block is not None:
            model.blocks = nn.ModuleList(make_block() for _ in model.blocks)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return make


@pytest.mark.parametrize(
    "name", ["host_optimizer", "host_cores", "weights_away", "in_backward", "fit"]
)
def test_complex_weights_are_stepped_as_plainly(name: str) -> None:
    assert_trains_as_plainly(name, with_blocks(Turning), square_loss, rows())


class Gapped(nn.Module):
    """Every second column of a wider matrix, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.some @ self.turned / 8)


@pytest.mark.parametrize(
    "name", ["host_optimizer", "host_cores", "weights_away", "in_backward", "fit"]
)
def test_weights_with_gaps_are_stepped_as_plainly(name: str) -> None:
    assert_trains_as_plainly(name, with_blocks(Gapped), square_loss, rows())


def test_no_fused_kernel_steps_weights_with_gaps() -> None:
    model, optimizer = with_blocks(Gapped)()
    with pytest.raises(BadInput, match="has gaps in its memory"):
        apply_to(CHOICES["fused_optimizer"], model, optimizer, square_loss, rows()[0])


class Scripted(nn.Module):
    """A block with a part that TorchScript runs, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_a_module_that_torchscript_runs_is_refused_in_words() -> None:
    model, optimizer = with_blocks(Scripted)()
    batch = rows()[0]
    said = r"blocks\.0\.inner was made by torch\.jit\.script .* plan for the module"
    with pytest.raises(BadInput, match=said):
        oomph.fit(model, optimizer, square_loss, batch, budget="1MiB")
    with pytest.raises(BadInput, match=said):
        oomph.estimate(oomph.Job(model, square_loss, optimizer, batch))
    with pytest.raises(BadInput, match=said):
        apply_to(CHOICES["fused_optimizer"], model, optimizer, square_loss, batch)


def test_views_of_one_buffer_stay_where_they_are() -> None:
    model, optimizer = with_blocks(Turning)()
    weights = [block.turn for block in model.blocks]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    for at, weight in enumerate(weights):
        weight.data = flat[at * WIDTH**2 : (at + 1) * WIDTH**2].view(WIDTH, WIDTH)
    before = flat.clone()
    with pytest.raises(BadInput, match="are views of one piece of memory"):
        apply_to(CHOICES["weights_away"], model, optimizer, square_loss, rows()[0])
    assert torch.equal(flat, before)
    assert weights[1].data_ptr() == flat[WIDTH**2 :].data_ptr()


class TwoTensor(Tensor):
    """A weight whose numbers are in two tensors of its own."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> TwoTensor:
        made = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)  # type: ignore[attr-defined]
        made.first, made.second = first, second
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> TwoTensor:
        return TwoTensor(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, second = (
            func(*tree_map_only(cls, pick, args), **tree_map_only(cls, pick, kwargs or {}))
            for pick in (lambda one: one.first, lambda one: one.second)
        )
        return TwoTensor(first, second) if isinstance(first, Tensor) else first


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_weights_made_of_other_tensors_do_not_leave(name: str) -> None:
    model = Net()
    inner = model.blocks[0].inner
    inner.weight = nn.Parameter(TwoTensor(inner.weight.detach(), inner.weight.detach().clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match="TwoTensor"):
        apply_to(CHOICES[name], model, optimizer, square_loss, rows()[0])


# -- gradients -------------------------------------------------------------------------------------


class Words(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH, sparse=True)
        for block in self.blocks:
            block.dropout.p = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embed(ids).mean(1))


def with_sparse(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words()
        return model, optimizer(model.parameters(), lr=0.1, **options)

    return make


@pytest.mark.parametrize("name", ["recompute", "micro_batch", "offload", "in_backward"])
@pytest.mark.parametrize(
    "make", [with_sparse(torch.optim.SGD), with_sparse(torch.optim.Adagrad)], ids=["sgd", "adagrad"]
)
def test_sparse_gradients_are_stepped_as_plainly(name: str, make: Make) -> None:
    assert_trains_as_plainly(name, make, square_loss, words())


@pytest.mark.parametrize("name", ["recompute", "offload"])
def test_sparse_momentum_is_stepped_as_plainly(name: str) -> None:
    assert_trains_as_plainly(name, with_sparse(torch.optim.SGD, momentum=0.9), square_loss, words())


def test_sparse_momentum_inside_backward_is_refused_before_anything_is_changed() -> None:
    model, optimizer = with_sparse(torch.optim.SGD, momentum=0.9)()
    run = apply_to(CHOICES["in_backward"], model, optimizer, square_loss, words()[0])
    run.step(words()[0])  # which makes the state
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadInput, match="keeps sparse state"):
        run.step(words()[1])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "name", ["host_optimizer", "host_cores", "weights_away", "fused_optimizer"]
)
def test_sparse_gradients_are_refused_where_they_cannot_be_stepped(name: str) -> None:
    model, optimizer = with_sparse(torch.optim.SGD)()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadInput, match=r"the gradient of embed\.weight is sparse"):
        apply_to(CHOICES[name], model, optimizer, square_loss, words()[0])
    for one, other in zip(tree_leaves(model.state_dict()), tree_leaves(before), strict=True):
        assert torch.equal(one, other)


# -- losses ----------------------------------------------------------------------------------------


def of_each_sample(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Gradients by the input, sample by sample."""
    weights = dict(model.named_parameters())
    slopes = vmap(grad(lambda x: functional_call(model, weights, (x[None],)).sum()))(batch[0])
    return (slopes - batch[1]).square().mean() + square_loss(model, batch)


def along_a_direction(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out, slope = jvp(model, (batch[0],), (batch[1],))
    return (out - batch[1]).square().mean() + slope.square().mean()


def mapped(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (vmap(model)(batch[0]) - batch[1]).square().mean()


def penalized(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return square_loss(model, batch) + (slope.norm(dim=1) - 1).square().mean()


def curved(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """As a network that solves a differential equation is trained."""
    x = batch[0].detach().requires_grad_()
    out = model(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second.sum(1) - out.mean(1)).square().mean()


def adapted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A step inside of the loss, as meta-learning takes one."""
    weights = dict(model.named_parameters())
    inner = square_loss(model, batch)
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {
        name: weight - 0.1 * slope
        for (name, weight), slope in zip(weights.items(), slopes, strict=True)
    }
    return (functional_call(model, fast, (batch[0].flip(1),)) - batch[1]).square().mean()


#: Those for which the planner knows nothing, or whose parts must be refused, say so themselves.
TECHNIQUES = ["recompute", "recompute_in_part", "micro_batch", "in_backward", "offload", "fit"]


def of_smooth_blocks() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    for block in model.blocks:
        block.dropout.p = 0.0
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize(
    "loss", [of_each_sample, along_a_direction, mapped, penalized, curved, adapted]
)
def test_derivatives_in_a_loss_are_those_of_the_plain_loop(loss: Loss, name: str) -> None:
    try:
        assert_trains_as_plainly(name, of_smooth_blocks, loss, rows())
    except BadInput as error:
        assert name == "micro_batch" and "must not be split" in str(error)


@pytest.mark.parametrize("loss", [of_each_sample, along_a_direction, mapped])
def test_weights_that_are_away_do_not_come_inside_of_torch_func(loss: Loss) -> None:
    model, optimizer = of_smooth_blocks()
    run = apply_to(CHOICES["weights_away"], model, optimizer, loss, rows()[0])
    before = copy.deepcopy(state_of(run))
    with pytest.raises(OomphError, match=r"blocks\.0 is called inside of torch\.func"):
        run.step(rows()[0])
    for one, other in zip(tree_leaves(state_of(run)), tree_leaves(before), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TECHNIQUES, *ON_THE_HOST])
def test_a_model_in_evaluation_mode_is_trained_in_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a plain loop would; its user hears of it."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().eval()
        for block in model.blocks:
            block.dropout.p = 0.5
        model.blocks[0].train()
        model.blocks[0].dropout.eval()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    assert_trains_as_plainly(name, make, square_loss, rows())
    assert "in evaluation mode, and is trained so" in caplog.text


def test_a_run_leaves_the_mode_of_each_part_as_it_is() -> None:
    model = Net().eval()
    model.blocks[0].train()
    modes = [module.training for module in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    run = apply_to(CHOICES["recompute"], model, optimizer, square_loss, rows()[0])
    run.step(rows()[0])
    run.evaluate(rows())
    assert [module.training for module in model.modules()] == modes
    run.undo()
    assert [module.training for module in model.modules()] == modes


def test_an_optimizer_that_computes_the_loss_itself_is_refused_before_anything_is_changed() -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = copy.deepcopy(model.state_dict())
    batch = rows()[0]
    plan = plan_with(Choices(), model, optimizer, batch)
    with pytest.raises(BadInput, match="LBFGS has to be given a closure"):
        apply(plan, Job(model, square_loss, optimizer, batch, name="net"))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    usual = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(usual, 1)  # which wraps its step
    apply(
        plan_with(Choices(), model, usual, batch), Job(model, square_loss, usual, batch, name="net")
    ).undo()


class KeepsGradients(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.grad = None if weight.grad is None else weight.grad * 0.5


def test_an_optimizer_that_goes_on_with_earlier_gradients_is_refused() -> None:
    model = Net()
    optimizer = KeepsGradients(model.parameters(), 0.1)
    batch = rows()[0]
    plan = plan_with(Choices(), model, optimizer, batch)
    with pytest.raises(BadInput, match=r"KeepsGradients\.zero_grad leaves something .* state"):
        apply(plan, Job(model, square_loss, optimizer, batch, name="net"))


class WithReference(nn.Module):
    """A policy and a frozen copy of it; `parameters` gives those of the policy alone."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Net(), Net().requires_grad_(False)
        self.blocks = self.policy.blocks
        for block in (*self.policy.blocks, *self.reference.blocks):
            block.dropout.p = 0.0  # parts draw masks of their own

    def parameters(self) -> Any:  # type: ignore[override]
        return self.policy.parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.policy(x) - self.reference(x)


@pytest.mark.parametrize("name", [*CHOICES, "fit"])
def test_a_model_may_say_itself_which_its_parameters_are(name: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = WithReference()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    assert_trains_as_plainly(name, make, square_loss, rows())
