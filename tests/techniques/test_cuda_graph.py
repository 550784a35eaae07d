"""Graphed micro-batches: the numbers of plain ones, wherever they can be captured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_on_the_cpu import CpuCapture
from torch import Tensor, nn
from torch.nn import functional as F

from oomph.techniques import cuda_graph
from oomph.techniques.cuda_graph import GraphedParts, PartOfStep
from oomph.techniques.micro_batch import Weigher

IGNORED = -100


class Model(nn.Module):
    """Classes of tokens, some of which do not count; one weight is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 11)
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.layer(self.embedding(tokens).tanh())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Asking(Model):
    """Asks something of numbers it counted by itself, as transformers does."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        consecutive = bool((torch.arange(tokens.shape[1]).diff() == 1).all())
        return super().forward(tokens, labels) * (1 if consecutive else 2)


class Reading(Model):
    """Reads a number that depends on the batch, which no capture allows."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(tokens, labels)
        return loss if bool(loss > -1) else loss * 2


class Training:
    """A loop over parts as a step has it, plain or graphed."""

    def __init__(self, model: nn.Module, *, graphed: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        self.weigher = Weigher()
        parameters = list(model.parameters())
        self.capture = CpuCapture(lambda: [p.grad for p in parameters if p.grad is not None])
        self.graph = GraphedParts(self.optimizer, self.capture) if graphed else None

    def look(self, part: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.model(**part)

    def step(self, batch: dict[str, Tensor], size: int) -> Tensor:
        total = len(batch["tokens"])
        self.weigher.begin(batch)
        if self.graph is not None:
            self.graph.begin()
        losses = []
        for start in range(0, total, size):
            part = {name: leaf[start : start + size] for name, leaf in batch.items()}
            share = len(part["tokens"]) / total

            def work(part: Any, share: float = share) -> Tensor:
                loss = self.weigher.weigh(part, share, lambda: self.model(**part))
                loss.backward()
                return loss.detach()

            if self.graph is not None:
                losses.append(
                    self.graph.run(
                        PartOfStep(
                            batch=part,
                            share=share,
                            weigher=self.weigher,
                            work=work,
                            look=self.look,
                            weights=list(self.model.parameters()),
                        )
                    )
                )
            else:
                losses.append(work(part))
        self.weigher.finish()
        if self.graph is not None:
            self.graph.finish()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()


def batches(rows: int = 8) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    made = []
    for _ in range(5):
        labels = torch.randint(0, 11, (rows, 6))
        labels[torch.rand(rows, 6) < 0.4] = IGNORED
        labels[2:4] = IGNORED
        made.append({"tokens": torch.randint(0, 11, (rows, 6)), "labels": labels})
    return made


def pair(kind: type[nn.Module] = Model) -> tuple[Training, Training]:
    torch.manual_seed(0)
    model = kind()
    return Training(copy.deepcopy(model), graphed=False), Training(model, graphed=True)


def states(training: Training) -> list[Tensor]:
    return [*training.model.state_dict().values()]


@pytest.mark.parametrize("kind", [Model, Asking])
@pytest.mark.parametrize("rows", [8, 7], ids=["even parts", "a short last part"])
def test_numbers_are_those_of_plain_micro_batches(rows: int, kind: type[Model]) -> None:
    plain, graphed = pair(kind)
    for batch in batches(rows):
        torch.testing.assert_close(graphed.step(batch, 2), plain.step(batch, 2), rtol=0, atol=0)
    torch.testing.assert_close(states(graphed), states(plain), rtol=0, atol=0)
    assert graphed.capture.captures == 1
    # The first step runs as ever, and so does a part of another size.
    assert graphed.capture.replays == 4 * (rows // 2)


def test_a_weight_without_a_gradient_is_not_stepped() -> None:
    _, graphed = pair()
    before = graphed.model.unused.weight.clone()
    for batch in batches():
        graphed.step(batch, 2)
    assert torch.equal(graphed.model.unused.weight, before)


def test_what_cannot_be_captured_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(cuda_graph.log, "warning", lambda text, *rest: said.append(text % rest))
    plain, graphed = pair(Reading)
    for batch in batches():
        torch.testing.assert_close(graphed.step(batch, 2), plain.step(batch, 2), rtol=0, atol=0)
    torch.testing.assert_close(states(graphed), states(plain), rtol=0, atol=0)
    assert graphed.capture.replays == 0
    (words,) = said
    assert "not captured" in words and "depends on the batch" in words


def test_another_number_of_targets_in_each_batch_is_counted() -> None:
    plain, graphed = pair()
    for batch, valid in zip(batches(), (40, 3, 17, 1, 30), strict=True):
        labels = batch["labels"].flatten()
        labels.fill_(IGNORED)[:valid] = 5
        torch.testing.assert_close(graphed.step(batch, 2), plain.step(batch, 2), rtol=0, atol=0)


def test_what_was_forgotten_runs_as_ever_once_before_it_is_captured_again() -> None:
    """It may have to be compiled anew, which a capture does not allow."""
    plain, graphed = pair()
    assert graphed.graph is not None
    replayed = []
    for at, batch in enumerate(batches()):
        if at == 2:
            graphed.graph.forget()
        torch.testing.assert_close(graphed.step(batch, 2), plain.step(batch, 2), rtol=0, atol=0)
        replayed.append(graphed.capture.replays)
    torch.testing.assert_close(states(graphed), states(plain), rtol=0, atol=0)
    assert replayed == [0, 4, 4, 8, 12]
    assert graphed.capture.captures == 2


def test_undo_gives_the_gradients_memory_back() -> None:
    _, graphed = pair()
    for batch in batches():
        graphed.step(batch, 2)
    assert graphed.graph is not None
    graphed.graph.undo()
    assert all(p.grad is None for p in graphed.model.parameters())
    plain_step = graphed.step(batches()[0], 2)
    assert bool(plain_step.isfinite())
