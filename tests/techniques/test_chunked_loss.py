"""A loss in chunks: the untouched job's numbers, without its logits, in models nobody edits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from oomph import find_gpu
from oomph.errors import BadInput
from oomph.rehearsal.recorder import Recorder
from oomph.rehearsal.timeline import Block
from oomph.rehearsal.world import pretend
from oomph.techniques import softmax_grad
from oomph.techniques.chunked_loss import (
    ChunkedForward,
    chunk_loss,
    chunked_calls,
    find_heads,
)
from oomph.techniques.lazy_logits import LazyLogits, StaleLogits
from oomph.techniques.softmax_grad import add_product, cross_entropy_chunk

VOCABULARY, WIDTH, BATCH, LENGTH = 37, 16, 3, 7
ROWS = BATCH * LENGTH


class Model(nn.Module):
    """An embedding, a layer and a head, tied or not."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return self.head(hidden)  # type: ignore[no-any-return]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[0, :4] = -100
    labels[2, 6] = -100
    return tokens, labels


def make_model(dtype: torch.dtype = torch.float64, **options: bool) -> Model:
    torch.manual_seed(0)
    return Model(**options).to(dtype)


def flat_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **options)


Loss = Callable[[Tensor, Tensor], Tensor]


def gradients(
    model: Model, batch: tuple[Tensor, Tensor], loss_of: Loss = flat_loss
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


def check_same(
    model: Model,
    batch: tuple[Tensor, Tensor],
    loss_of: Loss = flat_loss,
    *,
    tokens: int = 4,
    most: float = 1e-10,
) -> None:
    """A chunked copy of the model gives the same loss and gradients."""
    chunked = copy.deepcopy(model)
    chunk_loss(chunked.head, tokens)
    loss, expected = gradients(model, batch, loss_of)
    found_loss, found = gradients(chunked, batch, loss_of)
    assert error(found_loss, loss) <= most
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) <= most, name
        assert found[name].dtype is gradient.dtype
    assert found_loss.dtype is loss.dtype
    assert chunked_calls(chunked.head) > 0


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, ROWS - 1, ROWS, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_the_untouched_jobs(
    batch: tuple[Tensor, Tensor], tokens: int, reduction: str
) -> None:
    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return flat_loss(logits, labels, reduction=reduction)

    check_same(make_model(bias=True), batch, loss_of, tokens=tokens)


def test_a_tied_weight_gets_both_its_gradients(batch: tuple[Tensor, Tensor]) -> None:
    check_same(make_model(tied=True), batch)


def test_another_ignore_index_is_obeyed(batch: tuple[Tensor, Tensor]) -> None:
    tokens, labels = batch
    labels = labels.masked_fill(labels == -100, 5)
    check_same(make_model(), (tokens, labels), lambda x, y: flat_loss(x, y, ignore_index=5))


@pytest.mark.parametrize("frozen", ["head", "embedding layer"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(
    batch: tuple[Tensor, Tensor], frozen: str
) -> None:
    model = make_model(bias=True)
    for name in frozen.split():
        model.get_submodule(name).requires_grad_(False)
    check_same(model, batch)


def test_a_batch_without_targets_sums_to_zero(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model(bias=True)
    chunk_loss(model.head, 4)
    ignored = torch.full_like(batch[1], -100)
    loss, found = gradients(
        model, (batch[0], ignored), lambda x, y: flat_loss(x, y, reduction="sum")
    )
    assert loss == 0
    assert all(not gradient.any() for gradient in found.values())


def test_the_mean_of_no_target_is_nan_and_its_gradient_zero_as_in_torch(
    batch: tuple[Tensor, Tensor],
) -> None:
    model = make_model(bias=True)
    nothing = batch[0], torch.full_like(batch[1], -100)
    expected = gradients(copy.deepcopy(model), nothing)
    chunk_loss(model.head, 4)
    for loss, found in (expected, gradients(model, nothing)):
        assert loss.isnan()
        assert all(not gradient.any() for gradient in found.values())


def test_a_target_outside_the_vocabulary_is_an_error(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    chunk_loss(model.head, 4)
    labels = batch[1].masked_fill(batch[1] == -100, VOCABULARY)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        flat_loss(model(batch[0]), labels)


def test_the_gradient_that_comes_in_is_passed_on(batch: tuple[Tensor, Tensor]) -> None:
    check_same(make_model(bias=True), batch, lambda x, y: 3 * flat_loss(x, y) ** 2)


def test_a_kept_graph_can_be_used_again(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model(bias=True)
    chunk_loss(model.head, 4)
    loss = flat_loss(model(batch[0]), batch[1])
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(2 * loss, parameters)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, other, rtol=1e-12, atol=0)


def test_masked_logits_make_no_nan(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model(bias=True)
    with torch.no_grad():
        model.head.bias[VOCABULARY // 2 :] = -torch.inf
    labels = batch[1].clamp(max=VOCABULARY // 2 - 1)
    check_same(model, (batch[0], labels))


# -- half precision --------------------------------------------------------------------------------


def check_no_worse(
    model: Model,
    batch: tuple[Tensor, Tensor],
    run: Callable[[Model], dict[str, Tensor]],
    loss_of: Loss = flat_loss,
) -> None:
    """Errors against fp64 are no more than twice those of the untouched job."""
    _, truth = gradients(copy.deepcopy(model).double(), batch, loss_of)
    chunked = copy.deepcopy(model)
    chunk_loss(chunked.head, 4)
    untouched, found = run(model), run(chunked)
    assert chunked_calls(chunked.head) == 1
    for name, gradient in truth.items():
        assert untouched[name].dtype is found[name].dtype
        assert error(found[name], gradient) <= 2 * error(untouched[name], gradient), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upcast", [True, False])
def test_under_autocast_errors_are_no_worse(
    batch: tuple[Tensor, Tensor], dtype: torch.dtype, upcast: bool
) -> None:
    def run(model: Model) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=dtype):
            logits = model(batch[0])
            assert logits.dtype is dtype
            loss = flat_loss(logits.float() if upcast else logits, batch[1])
        assert loss.dtype is torch.float32
        model.zero_grad()
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    check_no_worse(make_model(torch.float32, bias=True), batch, run)


@pytest.mark.parametrize("added", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("upcast", [True, False])
def test_so_they_are_with_a_number_for_each_class(
    batch: tuple[Tensor, Tensor], added: torch.dtype, upcast: bool
) -> None:
    numbers = EACH_CLASS.to(added)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return flat_loss((logits.float() if upcast else logits) + numbers.to(logits.device), labels)

    def run(model: Model) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(batch[0]), batch[1])
        model.zero_grad()
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    check_no_worse(make_model(torch.float32, bias=True), batch, run, loss_of)


@pytest.mark.parametrize("upcast", [True, False])
def test_a_bf16_models_errors_are_no_worse(batch: tuple[Tensor, Tensor], upcast: bool) -> None:
    def run(model: Model) -> dict[str, Tensor]:
        loss, found = gradients(model, batch, lambda x, y: flat_loss(x.float() if upcast else x, y))
        assert loss.dtype is (torch.float32 if upcast else torch.bfloat16)
        return found

    check_no_worse(make_model(torch.bfloat16, bias=True), batch, run)


def test_small_probabilities_survive_fp16() -> None:
    head = nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[16.0], [0.0], [0.0], [0.0]]))
    chunk_loss(head, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(head(torch.ones(1, 1)), torch.tensor([0]))
    loss.backward()
    assert head.weight.grad is not None
    probability = float(torch.tensor([16.0, 0, 0, 0]).softmax(0)[1])
    assert probability < 2e-7, "a subnormal number in fp16"
    assert float(head.weight.grad[1]) == pytest.approx(probability, rel=1e-2)


def test_a_weights_gradient_is_summed_in_fp32() -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    total = torch.empty(1, 1)
    for step in range(1000):
        add_product(one, one, total, step > 0)
    assert total == 1000, "bf16 would have stopped at 256"


def test_half_precision_logits_are_converted_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(10, 30).bfloat16()
    target = torch.arange(10)
    whole, parts = logits.clone(), logits.clone()
    losses = cross_entropy_chunk(whole, target, 30, 3, 1.0, 1.0, True)
    monkeypatch.setattr(softmax_grad, "_CONVERTED_AT_A_TIME", 100)
    assert torch.equal(cross_entropy_chunk(parts, target, 30, 3, 1.0, 1.0, True), losses)
    assert torch.equal(parts, whole)
    expected = F.cross_entropy(logits.float(), target, ignore_index=3, reduction="none")
    torch.testing.assert_close(losses, expected)


def test_autocast_around_the_loss_alone_does_not_reach_the_head(
    batch: tuple[Tensor, Tensor],
) -> None:
    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flat_loss(logits, labels)

    check_same(make_model(torch.float32, bias=True), batch, loss_of, most=1e-5)


def test_autocast_keeps_no_copy_of_the_weight_that_has_lost_its_graph(
    batch: tuple[Tensor, Tensor],
) -> None:
    model = make_model(torch.float32)

    def both(logits: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.ones(2, WIDTH)
        return flat_loss(logits, labels) + F.linear(hidden, model.head.weight).float().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, expected = gradients(model, batch, both)
        expected_weight = expected["head.weight"].clone()
        chunk_loss(model.head, 4)
        _, found = gradients(model, batch, both)
    assert error(found["head.weight"], expected_weight) < 0.01


# -- what stays lazy, and what does not ------------------------------------------------------------

TARGETS = torch.arange(ROWS).view(BATCH, LENGTH) % VOCABULARY

#: A number for each class, as some models add, which they do not train.
EACH_CLASS = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)

LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, VOCABULARY),
    "view with the classes left open": lambda x: x.view(ROWS, -1),
    "view of a tuple": lambda x: x.view((ROWS, VOCABULARY)),
    "reshape": lambda x: x.reshape(LENGTH, BATCH, VOCABULARY),
    "torch.reshape": lambda x: torch.reshape(x, (-1, VOCABULARY)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten by keyword": lambda x: x.flatten(end_dim=-2),
    "torch.flatten": lambda x: torch.flatten(x, 0, 1),
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, VOCABULARY),
    "sliced": lambda x: x[:, 1:],
    "one position": lambda x: x[:, -1, :],
    "a new dimension": lambda x: x[:, None],
    "masked": lambda x: x[TARGETS > 3],
    "some rows": lambda x: x[torch.tensor([0, 2])],
    "unsqueeze": lambda x: x.unsqueeze(-2),
    "squeeze": lambda x: x[:1].squeeze(0),
    "scaled": lambda x: x * 2 / 3.0,
    "a number for each class": lambda x: x + EACH_CLASS,
    "the same in a row": lambda x: torch.add(x.view(-1, VOCABULARY), EACH_CLASS[None]) * 2,
    "transposed": lambda x: x.transpose(1, 2),
    "transposed and back": lambda x: x.transpose(1, 2).transpose(-1, -2),
    "permuted": lambda x: x.permute(0, 2, 1),
    "cloned": lambda x: x.clone(),
    "moved to where it is": lambda x: x.to("cpu"),
    "cast to what it is": lambda x: x.to(x.dtype, copy=True).type(torch.float64),
}

COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "argmax": lambda x: x.argmax(-1),
    "some classes": lambda x: x[..., :5],
    "one class": lambda x: x[:, :, 5],
    "a last dimension": lambda x: x[..., None],
    "a last dimension by unsqueeze": lambda x: x.unsqueeze(-1),
    "a full mask": lambda x: x[torch.ones(BATCH, LENGTH, VOCABULARY, dtype=torch.bool)],
    "other classes": lambda x: x.reshape(-1, BATCH),
    "flattened whole": lambda x: x.flatten(),
    "rounded": lambda x: x.to(torch.bfloat16),
    "added": lambda x: x + 1,
    "a number for each position": lambda x: x + torch.ones(LENGTH, 1, dtype=x.dtype),
    "something for each class that is trained": lambda x: x + EACH_CLASS.clone().requires_grad_(),
    "something for each class of scaled ones": lambda x: x * 2 + EACH_CLASS,
    "something for each class twice": lambda x: x + EACH_CLASS + EACH_CLASS,
    "a multiple for each class": lambda x: torch.add(x, EACH_CLASS, alpha=2),
    "scaled by a tensor": lambda x: x * torch.tensor(2.0),
    "divided by zero": lambda x: x / 0,
    "transposed first": lambda x: x.transpose(0, 1),
    "transposed, then sliced": lambda x: x.transpose(1, 2)[..., :-1],
    "concatenated": lambda x: torch.cat([x, x]),
    "detached": lambda x: x.detach(),
    "in place": lambda x: x.mul_(2),
    "viewed as integers": lambda x: x.view(torch.int64),
    "class weights": lambda x: F.cross_entropy(
        x.view(-1, VOCABULARY), TARGETS.view(-1), torch.rand(VOCABULARY, dtype=x.dtype)
    ),
    "label smoothing": lambda x: flat_loss(x, TARGETS, label_smoothing=0.1),
    "no reduction": lambda x: flat_loss(x, TARGETS, reduction="none"),
    "soft targets": lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).softmax(-1)),
    "positions for classes": lambda x: F.cross_entropy(
        x, torch.zeros(BATCH, VOCABULARY, dtype=torch.int64)
    ),
    "no rows": lambda x: F.cross_entropy(x[:0].flatten(0, 1), TARGETS[:0].flatten()),
}


@pytest.mark.parametrize("change", LAZY.values(), ids=LAZY.keys())
def test_leading_dimensions_change_without_logits(
    batch: tuple[Tensor, Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    model = make_model(bias=True)
    expected = change(model(batch[0]))
    chunk_loss(model.head, 4)
    lazy = change(model(batch[0]))
    assert isinstance(lazy, LazyLogits)
    assert isinstance(model.head.forward, ChunkedForward)
    assert model.head.forward.materialised == 0
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    assert (lazy.device, lazy.dim(), len(lazy)) == (expected.device, expected.dim(), len(expected))
    assert lazy.requires_grad
    torch.testing.assert_close(lazy.on_host(), expected.detach())
    assert torch.equal(lazy.materialise(), expected)
    assert model.head.forward.materialised == 1


@pytest.mark.parametrize("change", COMPUTED.values(), ids=COMPUTED.keys())
def test_all_else_computes_the_logits_once(
    batch: tuple[Tensor, Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    model = make_model(bias=True)
    torch.manual_seed(2)
    expected = change(model(batch[0]))
    chunk_loss(model.head, 4)
    logits = model(batch[0])
    torch.manual_seed(2)
    found = change(logits)
    assert not isinstance(found, LazyLogits)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.requires_grad == expected.requires_grad
    assert isinstance(model.head.forward, ChunkedForward)
    assert model.head.forward.materialised == 1
    assert chunked_calls(model.head) == 0
    logits.exp()
    assert model.head.forward.materialised == 1


def test_classes_are_the_second_dimension_even_where_the_last_fits_too() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 5).double()
    hidden = torch.randn(2, 5, 4, dtype=torch.float64)
    target = torch.randint(0, 5, (2, 5))
    expected = F.cross_entropy(head(hidden), target)
    chunk_loss(head, 3)
    assert torch.equal(F.cross_entropy(head(hidden), target), expected)


CHUNKED: dict[str, Loss] = {
    "shifted": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, VOCABULARY), y[..., 1:].contiguous().view(-1)
    ),
    "module": lambda x, y: nn.CrossEntropyLoss(ignore_index=-100)(x.flatten(0, 1), y.flatten()),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes second, permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y),
    "only the rows that count": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "divided": lambda x, y: flat_loss(x / 8.0, y),
    "multiplied": lambda x, y: flat_loss(0.25 * x, y),
    "added to each class": lambda x, y: flat_loss(x + EACH_CLASS, y),
    "added to each class, then divided": lambda x, y: flat_loss((x + EACH_CLASS[None]) / 8, y),
    "a number per label": lambda x, y: flat_loss(x, y, reduction="sum") / (y != -100).sum(),
    "two losses of one call": lambda x, y: flat_loss(x, y) + flat_loss(x[:2], y[1:]),
}


@pytest.mark.parametrize("loss_of", CHUNKED.values(), ids=CHUNKED.keys())
def test_losses_as_people_write_them_are_chunked(
    batch: tuple[Tensor, Tensor], loss_of: Loss
) -> None:
    check_same(make_model(bias=True), batch, loss_of)


def test_a_term_beside_the_loss_gets_its_gradient_too(batch: tuple[Tensor, Tensor]) -> None:
    check_same(
        make_model(bias=True), batch, lambda x, y: flat_loss(x, y) + x.logsumexp(-1).square().mean()
    )


def test_a_head_may_be_called_twice(batch: tuple[Tensor, Tensor]) -> None:
    class Twice(Model):
        def forward(self, tokens: Tensor) -> Any:
            return super().forward(tokens), super().forward(tokens.flip(0))

    def loss_of(logits: Any, labels: Tensor) -> Tensor:
        one, other = logits
        return flat_loss(one, labels) + 2 * flat_loss(other, labels)

    torch.manual_seed(0)
    check_same(Twice(bias=True).double(), batch, loss_of)


def test_what_is_written_into_logits_is_seen_by_their_views_not_by_copies(
    batch: tuple[Tensor, Tensor],
) -> None:
    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        view, copied = logits.view(-1, VOCABULARY), logits.clone()
        logits[:, 0] = 0
        return F.cross_entropy(view, labels.view(-1)) + 3 * flat_loss(copied, labels)

    model = make_model(bias=True)
    loss, expected = gradients(copy.deepcopy(model), batch, loss_of)
    chunk_loss(model.head, 4)
    found_loss, found = gradients(model, batch, loss_of)
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_gradients_only_the_loss_is_computed(
    batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    expected = flat_loss(model(batch[0]), batch[1])
    chunk_loss(model.head, 4)
    asked: list[bool] = []

    def watch(*args: Any) -> Tensor:
        asked.append(args[-1])
        return cross_entropy_chunk(*args)

    monkeypatch.setattr(softmax_grad, "cross_entropy_chunk", watch)
    made_with = model(batch[0]).view(-1, VOCABULARY)
    with torch.no_grad():
        made_without = model(batch[0]).view(-1, VOCABULARY)
        for logits in (made_with, made_without):
            asked.clear()
            loss = F.cross_entropy(logits, batch[1].view(-1))
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
            assert not loss.requires_grad
            assert asked == [False] * 6


def test_logits_made_without_gradients_never_get_any(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    chunk_loss(model.head, 4)
    with torch.no_grad():
        made_without = model(batch[0])
    made_with = model(batch[0])
    with torch.no_grad():
        viewed_without = made_with.view(-1, VOCABULARY)
    assert not flat_loss(made_without, batch[1]).requires_grad
    assert not flat_loss(viewed_without, batch[1]).requires_grad
    assert not made_without.exp().requires_grad
    assert flat_loss(made_with, batch[1]).requires_grad


def test_under_inference_mode_logits_are_lazy_too(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    expected = model(batch[0])
    chunk_loss(model.head, 4)
    with torch.inference_mode():
        logits = model(batch[0])
        assert isinstance(logits, LazyLogits)
        assert torch.equal(logits[:, -1].argmax(-1), expected[:, -1].argmax(-1))


# -- autograd's other ways -------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A loss of the user's own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("made", [lambda x: x, lambda x: (x / 4).transpose(1, 2)])
def test_an_autograd_function_of_the_users_passes_gradients_on(
    batch: tuple[Tensor, Tensor], made: Callable[[Tensor], Tensor]
) -> None:
    def loss_of(logits: Tensor, _: Tensor) -> Tensor:
        return Doubled.apply(made(logits)).square().mean()  # type: ignore[no-any-return]

    model = make_model(bias=True)
    _, expected = gradients(copy.deepcopy(model), batch, loss_of)
    chunk_loss(model.head, 4)
    _, found = gradients(model, batch, loss_of)
    assert all(error(found[name], expected[name]) < 1e-10 for name in expected)


def test_a_backward_hook_of_the_head_is_called(batch: tuple[Tensor, Tensor]) -> None:
    seen: list[torch.Size] = []
    model = make_model(bias=True)
    _, expected = gradients(copy.deepcopy(model), batch)
    model.head.register_full_backward_hook(lambda *a: seen.append(a[2][0].shape))
    chunk_loss(model.head, 4)
    _, found = gradients(model, batch)
    assert seen == [(BATCH, LENGTH, VOCABULARY)]
    assert all(error(found[name], expected[name]) < 1e-10 for name in expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_heads_and_losses_give_the_same(
    batch: tuple[Tensor, Tensor], reentrant: bool
) -> None:
    class Checkpointed(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = torch.tanh(self.layer(self.embedding(tokens)))
            return checkpoint(self.head, hidden, use_reentrant=reentrant)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Checkpointed(bias=True).double()

    def checkpointed_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(flat_loss, logits, labels, use_reentrant=reentrant)  # type: ignore[no-any-return]

    for loss_of in (flat_loss, checkpointed_loss):
        _, expected = gradients(copy.deepcopy(model), batch, loss_of)
        chunked = copy.deepcopy(model)
        chunk_loss(chunked.head, 4)
        _, found = gradients(chunked, batch, loss_of)
        assert all(error(found[name], expected[name]) < 1e-10 for name in expected)


def test_a_hook_on_logits_is_called_if_it_comes_before_the_loss(
    batch: tuple[Tensor, Tensor],
) -> None:
    model = make_model()
    chunk_loss(model.head, 4)
    seen: list[torch.Size] = []
    logits = model(batch[0])
    view = logits.view(-1, VOCABULARY)
    logits.register_hook(lambda gradient: seen.append(gradient.shape))
    F.cross_entropy(view, batch[1].view(-1)).backward()
    assert seen == [(BATCH, LENGTH, VOCABULARY)]


def test_a_hook_that_would_never_be_called_is_refused(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    chunk_loss(model.head, 4)
    logits = model(batch[0])
    flat_loss(logits, batch[1])
    with pytest.raises(BadInput, match="no gradient of the logits"):
        logits.register_hook(print)
    logits.exp()
    with pytest.raises(BadInput, match="no gradient of the logits"):
        logits.retain_grad()


def test_logits_wanted_after_the_optimizers_step_are_an_error_not_wrong(
    batch: tuple[Tensor, Tensor],
) -> None:
    model = make_model()
    chunk_loss(model.head, 4)
    logits = model(batch[0])
    flat_loss(logits, batch[1]).backward()
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(StaleLogits, match="before the optimizer's step"):
        logits.argmax(-1)
    with pytest.raises(StaleLogits, match="before the optimizer's step"):
        flat_loss(logits, batch[1])


def test_so_is_another_number_for_each_class(batch: tuple[Tensor, Tensor]) -> None:
    model, numbers = make_model(), EACH_CLASS.clone()
    chunk_loss(model.head, 4)
    logits = model(batch[0]) + numbers
    numbers.zero_()
    with pytest.raises(StaleLogits):
        flat_loss(logits, batch[1])


# -- applying and undoing --------------------------------------------------------------------------


def test_undo_leaves_the_head_as_it_was(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    before = dict(vars(model.head))
    undo = chunk_loss(model.head, 4)
    assert isinstance(model(batch[0]), LazyLogits)
    undo()
    undo()
    assert vars(model.head) == before
    assert type(model(batch[0])) is Tensor


def test_a_head_is_chunked_only_once() -> None:
    head = nn.Linear(4, 8)
    undo = chunk_loss(head, 4)
    with pytest.raises(BadInput, match="undo that first"):
        chunk_loss(head, 8)
    undo()
    chunk_loss(head, 8)


def test_a_head_with_a_forward_of_its_own_is_refused() -> None:
    class Capped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).tanh()

    patched = nn.Linear(4, 8)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    for head in (Capped(4, 8), patched):
        before = dict(vars(head))
        with pytest.raises(BadInput, match="a forward of its own"):
            chunk_loss(head, 4)
        assert vars(head) == before


def test_a_chunk_has_at_least_one_token() -> None:
    with pytest.raises(BadInput, match="at least one token"):
        chunk_loss(nn.Linear(4, 8), 0)


def test_a_copy_of_a_chunked_model_uses_its_own_weights(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    chunk_loss(model.head, 4)
    copied = copy.deepcopy(model)
    _, found = gradients(copied, batch)
    assert "head.weight" in found
    assert model.head.weight.grad is None
    assert (chunked_calls(copied.head), chunked_calls(model.head)) == (1, 0)


def test_a_loss_that_fails_leaves_the_model_usable(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    _, expected = gradients(copy.deepcopy(model), batch)
    chunk_loss(model.head, 4)

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        gradients(model, batch, fails)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(model(batch[0]).flatten(0, 1), torch.zeros(3, dtype=torch.int64))
    _, found = gradients(model, batch)
    assert all(error(found[name], expected[name]) < 1e-10 for name in expected)


def test_inputs_that_linear_refuses_are_still_refused() -> None:
    head = nn.Linear(4, 8)
    chunk_loss(head, 4)
    with pytest.raises(RuntimeError, match="dtype"):
        head(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="shape"):
        head(torch.ones(2, 5))


def test_a_compiled_model_computes_its_logits(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model()
    expected = model(batch[0])
    chunk_loss(model.head, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch[0]), expected)


# -- models of transformers ------------------------------------------------------------------------

BIG = 4100


def _hf(name: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": BIG, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder = {**sizes, "hidden_size": 8, "intermediate_size": 16, "num_key_value_heads": 1}
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=BIG, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=BIG, d_model=8, d_ff=16, d_kv=4, num_layers=2, num_heads=2
        )
        config.decoder_start_token_id = 0
        return transformers.T5ForConditionalGeneration(config).eval()
    if name == "bart":
        heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
        feed = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
        config = transformers.BartConfig(vocab_size=BIG, d_model=8, **heads, **layers, **feed)
        model = transformers.BartForConditionalGeneration(config).eval()
        model.final_logits_bias.normal_()  # as Marian's are
        return model
    if name == "bert":
        config = transformers.BertConfig(**sizes, hidden_size=8, intermediate_size=16)
        return transformers.BertForMaskedLM(config).eval()
    if name == "granite":
        config = transformers.GraniteConfig(**decoder, logits_scaling=8.0)
        return transformers.GraniteForCausalLM(config).eval()
    config = transformers.LlamaConfig(**decoder, tie_word_embeddings=name == "tied llama")
    return transformers.LlamaForCausalLM(config).eval()


HF_NAMES = ["llama", "tied llama", "gpt2", "t5", "bart", "bert", "granite"]


@pytest.mark.parametrize("name", HF_NAMES)
@pytest.mark.parametrize("items", [None, 11])
def test_transformers_models_take_the_chunked_path(name: str, items: int | None) -> None:
    model = _hf(name)
    ids = torch.arange(18).view(2, 9) * 7 % BIG
    labels = ids.clone()
    labels[0, :3] = -100
    extra = {"num_items_in_batch": items} if items and name not in ("t5", "bart", "bert") else {}
    chunked = copy.deepcopy(model)
    ((_, head),) = find_heads(chunked)
    chunk_loss(head, 4)
    expected = model(input_ids=ids, labels=labels, **extra)
    found = chunked(input_ids=ids, labels=labels, **extra)
    expected.loss.backward()
    found.loss.backward()
    assert isinstance(head.forward, ChunkedForward)
    assert (head.forward.chunked, head.forward.materialised) == (1, 0)
    torch.testing.assert_close(found.loss, expected.loss)
    for (path, one), other in zip(model.named_parameters(), chunked.parameters(), strict=True):
        if "key.bias" not in path and "k_proj.bias" not in path:  # is zero but for rounding
            assert one.grad is not None
            assert error(other.grad, one.grad) < 1e-5, path  # type: ignore[arg-type]
    torch.testing.assert_close(found.logits + 0, expected.logits)
    assert head.forward.materialised == 1


def test_text_is_generated_as_before() -> None:
    model = _hf("llama")
    ids = torch.arange(6).view(2, 3)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    ((_, head),) = find_heads(model)
    chunk_loss(head, 4)
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize(
    ("name", "path"),
    [("llama", "lm_head"), ("t5", "lm_head"), ("bert", "cls.predictions.decoder")],
)
def test_heads_are_found(name: str, path: str) -> None:
    assert [found for found, _ in find_heads(_hf(name))] == [path]


def test_wide_layers_of_repeated_blocks_are_no_heads() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))

    sequential = nn.Sequential(nn.Embedding(5000, 64), block(), block(), nn.Linear(64, 5000))
    assert [path for path, _ in find_heads(sequential)] == ["3"]
    listed = nn.ModuleDict({"blocks": nn.ModuleList([block()]), "head": nn.Linear(64, 5000)})
    assert [path for path, _ in find_heads(listed)] == ["head"]
    heads = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(64, 5000), nn.Linear(64, 5000)])})
    assert [path for path, _ in find_heads(heads)] == ["heads.0", "heads.1"]
    assert find_heads(nn.Sequential(nn.Linear(64, 4095), nn.Linear(4095, 5000))) == []


# -- rehearsed -------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> Iterator[Recorder]:
    with pretend(find_gpu("h200")) as recorder:
        yield recorder


REHEARSED_ROWS, REHEARSED_WIDTH = 2 * 256, 8
#: What a GPU's half-precision products take a vocabulary of `BIG` for.
PADDED = 4160


def _rehearse(
    recorder: Recorder, tokens: int | None, dtype: torch.dtype
) -> tuple[int, list[Block]]:
    """The step's peak, and what it allocated."""
    model = _hf("llama").to(dtype).to("cuda")
    ids = torch.zeros(2, 256, dtype=torch.long, device="cuda")
    ((_, head),) = find_heads(model)
    if tokens is not None:
        chunk_loss(head, tokens)
    before, first = recorder.allocated, len(recorder.timeline.blocks)
    recorder.reset_peak()
    autocast = dtype is torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert tokens is None or chunked_calls(head) == 1
    assert output.logits.device == torch.device("cuda", 0)
    assert output.logits.is_cuda
    assert head.weight.grad is not None
    blocks = recorder.timeline.blocks[first:]
    return recorder.peak_allocated - before, [b for b in blocks if b.category != "workspace"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rehearsal_sees_one_chunk_of_logits_at_a_time(gpu: Recorder, dtype: torch.dtype) -> None:
    untouched, _ = _rehearse(gpu, None, dtype)
    chunked, blocks = _rehearse(gpu, 64, dtype)
    one_chunk = 64 * PADDED * 2
    chunks = [block for block in blocks if block.size == one_chunk]
    assert len(chunks) == REHEARSED_ROWS // 64
    assert max(block.size for block in blocks) == one_chunk
    for earlier, later in itertools.pairwise(chunks):
        assert earlier.death is not None
        assert earlier.death < later.birth
    logits = REHEARSED_ROWS * BIG
    assert untouched - chunked > logits * (2 + 4 + 4), "bf16, fp32 and its log-softmax are gone"


def test_the_weights_gradient_is_made_once(gpu: Recorder) -> None:
    _, blocks = _rehearse(gpu, 64, torch.float32)
    for rows in (BIG, PADDED):  # the embedding's and the head's
        assert [block.size for block in blocks].count(rows * REHEARSED_WIDTH * 4) == 1


def test_moving_lazy_logits_is_rehearsed(gpu: Recorder) -> None:
    head = nn.Linear(8, BIG).to("cuda")
    chunk_loss(head, 4)
    hidden = torch.zeros(32, 8, device="cuda")
    head(hidden.clone()).materialise()  # cuBLAS has its workspace from now on
    before = gpu.allocated
    logits = head(hidden)
    assert isinstance(logits.to("cuda", torch.float32), LazyLogits)
    assert isinstance(logits.to(hidden.device), LazyLogits)
    assert gpu.allocated == before
    on_host = logits.cpu()
    assert on_host.device.type == "cpu"
    assert gpu.allocated == before + 32 * BIG * 4


def test_logits_for_the_host_take_one_chunk_of_the_device_at_a_time(gpu: Recorder) -> None:
    head = nn.Linear(8, BIG, bias=False).to("cuda", torch.bfloat16)
    chunk_loss(head, 4)
    hidden = torch.zeros(32, 8, device="cuda", dtype=torch.bfloat16)
    head(hidden.clone()).materialise()  # cuBLAS has its workspace from now on
    before = gpu.allocated
    gpu.reset_peak()
    on_host = (head(hidden).float() / 2).on_host()
    assert on_host.device.type == "cpu"
    assert on_host.dtype is torch.float32
    assert gpu.peak_allocated - before == 4 * BIG * 2


def test_all_three_products_of_a_head_are_counted(batch: tuple[Tensor, Tensor]) -> None:
    head = nn.Linear(WIDTH, VOCABULARY)
    chunk_loss(head, 4)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(head(hidden), batch[1].view(-1)).backward()
    assert counter.get_total_flops() == 3 * 2 * ROWS * WIDTH * VOCABULARY


def test_the_ops_tell_the_truth_about_themselves() -> None:
    logits, target = torch.randn(5, 9), torch.tensor([0, 1, -100, 3, 6])
    for dtype in (torch.float64, torch.bfloat16):
        for vocabulary in (9, 7):  # the rest is padding
            arguments = (logits.to(dtype), target, vocabulary, -100, 0.5, 2.0, True)
            torch.library.opcheck(cross_entropy_chunk, arguments)
        left, right = torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype)
        total = torch.zeros(3, 5, dtype=softmax_grad.wide_dtype(dtype))
        torch.library.opcheck(add_product, (left, right, total, True))
