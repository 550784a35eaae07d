"""Micro-batches: their losses and gradients add up to those of the whole batch, or are refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from oomph.engine.step import Stage, train_step
from oomph.errors import BadInput
from oomph.jobs.job import Job, split_batch
from oomph.splitting import prove_split
from oomph.techniques.micro_batch import Weigher, why_whole
from oomph.techniques.recompute import recompute

VOCABULARY = 11
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


class Net(nn.Module):
    """Logits of each token, and numbers for other losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(4, VOCABULARY)
        self.double()

    def hidden(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embed(ids).tanh())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def ragged(samples: int = 5, length: int = 6, ignored: int = -100) -> Batch:
    """Sample i has i valid labels at its end, so the first has none."""
    torch.manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (samples, length))
    labels = ids.clone()
    for at in range(samples):
        labels[at, : length - at] = ignored
    return {"ids": ids, "labels": labels}


def trained(
    loss: Loss | nn.Module,
    batches: list[Any],
    micro_batch: int | None,
    items: Callable[[Any], Any] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of plain gradient descent."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    job = Job(model, loss, optimizer, batches[0], micro_batch=micro_batch, normalizer=items)
    stage = Stage(
        job=job,
        model=model,
        optimizer=optimizer,
        device_type="cpu",
        weigher=Weigher(items),
        returns_loss=True,
    )
    losses = [train_step(stage, batch) for batch in batches]
    assert all(isinstance(one, Tensor) for one in losses)
    return losses, list(model.parameters())  # type: ignore[return-value]


def assert_adds_up(
    loss: Loss | nn.Module,
    *batches: Any,
    items: Callable[[Any], Any] | None = None,
    sizes: tuple[int, ...] = (1, 2, 3),
) -> None:
    whole = trained(loss, list(batches), None)
    for size in sizes:
        parts = trained(loss, list(batches), size, items)
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-13)


# -- what averages over targets --------------------------------------------------------------------


def plain(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def classes_second(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), target=batch["labels"])


def shifted(model: Any, batch: Batch) -> Tensor:
    logits, labels = model(batch["ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted_and_padded(model: Any, batch: Batch) -> Tensor:
    """As transformers shifts the labels of causal models."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten(), ignore_index=-100)


def only_valid(model: Any, batch: Batch) -> Tensor:
    valid = batch["labels"] != -100
    return F.cross_entropy(model(batch["ids"])[valid], batch["labels"][valid])


def log_likelihood(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["ids"]).log_softmax(-1)
    return F.nll_loss(logits.flatten(0, 1), batch["labels"].flatten())


def smoothed(model: Any, batch: Batch) -> Tensor:
    logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=0.2)


@pytest.mark.parametrize(
    "loss", [plain, classes_second, shifted, shifted_and_padded, log_likelihood, smoothed]
)
def test_a_mean_over_targets_is_that_of_the_whole_batch(loss: Loss) -> None:
    first = ragged()
    second = {name: tensor.flip(0) for name, tensor in ragged(4).items()}
    assert_adds_up(loss, first, second, first)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="not in this torch")
def test_torchs_own_fused_head_and_loss_is_such_a_mean() -> None:
    def fused(model: Any, batch: Batch) -> Tensor:
        rows = model.hidden(batch["ids"]).flatten(0, 1)
        head = model.head
        return F.linear_cross_entropy(
            rows, head.weight, batch["labels"].flatten(), linear_bias=head.bias
        )

    assert_adds_up(fused, ragged(), ragged())


def test_targets_are_found_in_a_tuple_and_by_their_padding() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, labels = batch
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=0)

    batch = ragged(ignored=0)
    assert_adds_up(loss, (batch["ids"], batch["labels"]))


def test_a_criterion_is_a_loss_like_any_other() -> None:
    labels = torch.tensor([3, -100, 1, 5, -100])

    class Last(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits[:, -1], targets)

    assert_adds_up(Last(), (ragged()["ids"], labels))


def test_labels_may_be_of_any_whole_type() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        labels = batch["labels"].long()
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten(), ignore_index=0)

    batch = ragged(ignored=0)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert_adds_up(loss, {**batch, "labels": batch["labels"].to(dtype)})


def test_a_batch_without_any_target_has_no_mean_in_parts_either() -> None:
    batch = ragged()
    batch["labels"][:] = -100
    (loss,), _ = trained(plain, [batch], 2)
    assert loss.isnan()


class Away(Tensor):
    """On another device, as far as anyone can tell; only single numbers go together with it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Away:
        away: Away = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device="meta"
        )
        away.inner = inner
        return away

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(not isinstance(tensor, Away) and tensor.dim() for tensor in given):
            raise RuntimeError("Expected all tensors to be on the same device")

        def here(leaf: Any) -> Any:
            leaf = leaf.inner if isinstance(leaf, Away) else leaf
            return torch.device("cpu") if leaf == torch.device("meta") else leaf

        result = func(*tree_map(here, args), **tree_map(here, kwargs or {}))
        return tree_map(lambda leaf: Away(leaf) if isinstance(leaf, Tensor) else leaf, result)


class Moves(TorchDispatchMode):
    """What is moved to `meta` goes away, with its values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("meta"):
            return Away(args[0].clone())
        return func(*args, **kwargs)


def test_targets_are_found_where_the_loss_moved_them() -> None:
    scores = torch.randn(4, 3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3], [4, -100, -100], [1, -100, 2], [3, 3, -100]])
    batch = {"scores": scores, "labels": labels}

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        moved = {name: tensor.to("meta") for name, tensor in part.items()}
        return F.cross_entropy(moved["scores"].flatten(0, 1), moved["labels"].flatten())

    weigher, losses = Weigher(), []
    with Moves():
        with pytest.raises(RuntimeError, match="same device"):
            torch.equal(labels, labels.to("meta"))  # else this test would say nothing
        weigher.begin(batch)
        for part in split_batch(batch, 1):
            loss = weigher.weigh(part, 0.25, functools.partial(loss_of, part))
            assert isinstance(loss, Away)
            losses.append(loss.inner)
        weigher.finish()
        weigher.begin(batch)  # it has nothing to complain of
    whole = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(torch.stack(losses).sum(), whole)


def test_left_padding_does_not_hide_the_shift() -> None:
    """The first sample alone looks the same shifted and not; its place in the row tells."""
    batch = ragged()
    batch["labels"][4] = batch["ids"][4]
    assert_adds_up(shifted_and_padded, batch)
    assert_adds_up(plain, batch)


def test_losses_that_drop_ignored_targets_themselves_are_counted_too() -> None:
    first = ragged()
    first["labels"][0] = first["ids"][0]
    assert_adds_up(only_valid, first, ragged(), sizes=(2, 3))


def test_targets_that_a_mask_selects_are_counted_by_that_mask() -> None:
    batch = ragged(length=5)
    batch["labels"][0, -1] = 3
    batch["labels"][4] = batch["ids"][4]
    assert_adds_up(only_valid, batch, ragged())


def test_targets_that_a_loss_makes_of_its_batch_are_counted_in_the_whole_one() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        labels = batch["ids"].masked_fill(batch["ids"] > 7, -100)
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten())

    batch = ragged()
    batch["ids"][1] = 9  # a part without any valid target
    assert_adds_up(loss, batch, ragged())
    assert_adds_up(loss, batch, items=lambda batch: (batch["ids"] <= 7).sum())
    assert_adds_up(loss, batch, items=lambda batch: int((batch["ids"] <= 7).sum()))


def test_targets_that_the_model_makes_need_the_jobs_word() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        logits = model(batch["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, logits.argmax(1).masked_fill(logits.amax(1) < 0, -100))

    with pytest.raises(BadInput, match=r"cannot tell .* `normalizer=lambda batch"):
        trained(loss, [ragged()], 2)


def test_class_weights_are_summed_over_the_whole_batch() -> None:
    weights = torch.linspace(0.5, 2, VOCABULARY, dtype=torch.float64)

    def loss(model: Any, batch: Batch) -> Tensor:
        logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, weight=weights)

    def items(batch: Batch) -> Tensor:
        return weights[batch["labels"][batch["labels"] != -100]].sum()

    assert_adds_up(loss, ragged(), ragged(4))
    assert_adds_up(loss, ragged(), items=items, sizes=(2, 3))


def test_several_means_in_one_loss_have_each_their_own_targets() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        logits = model(batch["ids"])
        tokens = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return tokens + 0.3 * F.cross_entropy(logits[:, -1], batch["kind"], ignore_index=2)

    batch = {**ragged(), "kind": torch.tensor([1, 2, 0, 2, 1])}
    assert_adds_up(loss, batch, batch)


# -- what counts by samples ------------------------------------------------------------------------


def squared(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["ids"]).sum(-1), batch["labels"].double())


def test_other_means_count_by_samples() -> None:
    def probable(model: Any, batch: Batch) -> Tensor:
        targets = F.one_hot(batch["ids"], VOCABULARY).double()
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), targets.flatten(0, 1))

    assert_adds_up(squared, ragged(), ragged())
    assert_adds_up(probable, ragged())


def test_each_term_of_a_loss_counts_in_its_own_way() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        return plain(model, batch) + 0.1 * squared(model, batch)

    assert_adds_up(loss, ragged(), ragged())


# -- what does not add up --------------------------------------------------------------------------


def masked(model: Any, batch: Batch) -> Tensor:
    """A mean over valid tokens that is written out."""
    valid = (batch["labels"] != -100).double()
    losses = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    return (losses * valid).sum() / valid.sum()


def summed(model: Any, batch: Batch) -> Tensor:
    logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum")


def mean_of_means(model: Any, batch: Batch) -> Tensor:
    logits = model(batch["ids"])
    each = [F.cross_entropy(logits[at], batch["labels"][at]) for at in range(len(logits))]
    return torch.stack(each).mean()


def without_empty() -> Batch:
    return {name: tensor[1:] for name, tensor in ragged().items()}


@pytest.mark.parametrize(
    ("loss", "items"),
    [
        (masked, lambda batch: (batch["labels"] != -100).sum()),
        (summed, lambda batch: torch.tensor(1)),
        (mean_of_means, lambda batch: len(batch["ids"])),
    ],
)
def test_a_loss_that_does_not_add_up_is_refused_unless_the_job_says_how(
    loss: Loss, items: Callable[[Any], Any]
) -> None:
    with pytest.raises(BadInput, match=r"the loss of two samples is .* `normalizer=lambda batch"):
        trained(loss, [without_empty()], 1)
    assert_adds_up(loss, without_empty(), items=items)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_a_sum_that_is_asked_for_in_the_old_way_is_a_sum() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()
        return F.cross_entropy(logits, labels, size_average=False)

    with pytest.raises(BadInput, match="the loss of two samples is"):
        trained(loss, [ragged()], 1)


def test_samples_that_are_compared_with_each_other_do_not_add_up() -> None:
    def contrastive(model: Any, batch: Batch) -> Tensor:
        rows = model(batch["ids"]).mean(1)
        return F.cross_entropy(rows @ rows.t(), torch.arange(len(rows)))

    def spread(model: Any, batch: Batch) -> Tensor:
        return -model(batch["ids"]).mean(1).std(0, correction=0).sum()

    with pytest.raises(BadInput, match="cannot tell"):
        trained(contrastive, [ragged()], 2)
    with pytest.raises(BadInput, match="the loss of two samples is"):
        trained(spread, [ragged()], 2)


def preferred(model: Any, batch: Batch) -> Tensor:
    """Compares the first half of a batch, sample by sample, with the second."""
    if len(batch["ids"]) % 2:
        raise ValueError("an answer is missing")
    chosen, rejected = model(batch["ids"]).mean((1, 2)).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def test_halves_that_are_compared_do_not_add_up_although_none_fails() -> None:
    with pytest.raises(BadInput, match=r"the loss of four samples is .* `whole_batch=True`"):
        trained(preferred, [ragged(8)], 4)


def test_a_loss_that_fails_with_one_sample_may_still_add_up() -> None:
    def never_alone(model: Any, batch: Batch) -> Tensor:
        assert len(batch["ids"]) > 1
        return squared(model, batch)

    assert_adds_up(never_alone, ragged(8), sizes=(2, 4))
    with pytest.raises(BadInput, match=r"takes no parts .*AssertionError.* `whole_batch=True`"):
        trained(never_alone, [ragged(3)], 2)


def test_a_refusal_comes_before_any_weight_changes() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    job = Job(model, masked, optimizer, without_empty(), micro_batch=1)
    stage = Stage(job=job, model=model, optimizer=optimizer, device_type="cpu", weigher=Weigher())
    with pytest.raises(BadInput):
        train_step(stage, without_empty())
    torch.testing.assert_close(list(model.parameters()), list(Net().parameters()), rtol=0, atol=0)


def test_a_loss_is_tried_once_and_a_plain_mean_never() -> None:
    calls: list[bool] = []

    def counted(model: Any, batch: Batch) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return squared(model, batch)

    def counted_mean(model: Any, batch: Batch) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return plain(model, batch)

    trained(counted, [ragged(4)] * 3, 2)
    assert (calls.count(True), calls.count(False)) == (6, 3)
    calls.clear()
    trained(counted_mean, [ragged(4)] * 3, 2)
    assert (calls.count(True), calls.count(False)) == (6, 0)


def test_a_trial_leaves_modes_and_random_streams_as_they_are() -> None:
    def noisy(model: Any, batch: Batch) -> Tensor:
        modes.append((model.training, model.dropout.training))
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return squared(model, batch) * noise

    def streams() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    modes: list[tuple[bool, bool]] = []
    model = Net()
    model.dropout.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    job = Job(model, noisy, optimizer, ragged(), micro_batch=3)
    stage = Stage(job=job, model=model, optimizer=optimizer, device_type="cpu", weigher=Weigher())
    batch = ragged()
    seed()
    train_step(stage, batch)
    after = streams()
    seed()
    for _ in range(2):  # as many parts
        streams()
    assert after == streams()
    assert modes == [(True, False), *[(False, False)] * 3, (True, False)]


def test_a_loss_that_only_works_in_training_is_not_tried() -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        return squared(model, batch) / model.training

    assert_adds_up(loss, ragged())


# -- what must stay whole --------------------------------------------------------------------------


def test_a_batch_norm_that_learns_keeps_the_batch_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert why_whole(model).startswith("1 (BatchNorm1d) averages over the batch")
    assert not why_whole(model.eval())
    assert not why_whole(nn.Sequential(nn.LayerNorm(2), nn.InstanceNorm1d(2)))


@torch.jit.script
def _scaled(hidden: Tensor, width: int) -> Tensor:
    return hidden / torch.sqrt(torch.tensor(width, dtype=torch.float64) * 2)


def test_numbers_inside_a_scripted_function_are_no_calls_of_the_loss() -> None:
    """No function mode sees those of TorchScript, but what dispatch modes call in them."""

    class Blocks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.double()

        def hidden(self, ids: Tensor) -> Tensor:
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    class Scripted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return _scaled(super().forward(input), input.shape[-1]).tanh()

    model = Blocks()
    for name in ("0", "1"):
        scripted = Scripted(4, 4).double()
        scripted.load_state_dict(model.blocks.get_submodule(name).state_dict())
        setattr(model.blocks, name, scripted)
    batch = ragged()

    def loss(net: Any, part: Batch) -> Tensor:
        return F.cross_entropy(net(part["ids"]).flatten(0, 1), part["labels"].flatten())

    for _ in range(3):  # after which TorchScript has made of it what it makes of it
        loss(model, batch).backward()
    job = Job(model, loss, torch.optim.SGD(model.parameters(), 1.0), batch)
    split = prove_split(job, None)
    assert not split.whole_because
    for block, keep in zip(model.blocks, ((), ("product#0",)), strict=True):
        recompute(block, keep)
    weigher = Weigher(split=split)
    expected = loss(model, batch).detach()
    weigher.begin(batch)
    total = 0.0
    for part in weigher.parts(batch, 2):
        share = len(part["ids"]) / 5
        one = weigher.weigh(part, share, functools.partial(loss, model, part))
        one.backward()
        total += float(one)
    assert total == pytest.approx(float(expected), rel=1e-9)


def test_constants_that_only_one_forward_makes_are_no_other_way_to_compute_a_loss() -> None:
    """A cache makes some where there is one; a mask of padding does where something is padded."""
    makes_constants = True

    def loss(model: Any, batch: Batch) -> Tensor:
        hidden = model(batch["ids"])
        if makes_constants:
            hidden = hidden * torch.tensor(1.0) * hidden.new_ones(())
        return hidden.square().mean()

    model, batch = Net(), ragged(4)
    job = Job(model, loss, torch.optim.SGD(model.parameters(), 1.0), batch)
    split = prove_split(job, None)
    expected = float(loss(model, batch))
    makes_constants = False
    weigher = Weigher(split=split)
    weigher.begin(batch)
    parts = weigher.parts(batch, 2)
    losses = [weigher.weigh(one, 0.5, functools.partial(loss, model, one)) for one in parts]
    assert float(sum(losses)) == pytest.approx(expected, rel=1e-9)
