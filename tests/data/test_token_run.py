import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oomph.data.loader import Loader
from oomph.data.padding import pad_samples
from oomph.data.token_batches import TokenBatches
from oomph.errors import StalePlan
from oomph.runs.run import fit

LENGTHS = [3, 9, 4, 16, 5, 2, 8, 6, 1, 9, 3, 4]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def loss(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def test_a_plan_for_the_worst_shape_is_for_every_batch_by_tokens():
    batches = TokenBatches(LENGTHS, tokens=32)
    ((rows, length),) = batches.worst_shapes()
    net = Net()
    sample = pad_samples([torch.ones(length).long()] * rows)
    seen = set()
    with fit(
        net, torch.optim.SGD(net.parameters(), 0.1), loss, sample, budget="1MiB", prefetch=2
    ) as run:
        assert run.plan.choices.micro_batch is None
        for batch in run.batches(
            Loader([torch.ones(n).long() for n in LENGTHS], batches, collate=pad_samples)
        ):
            run.step(batch)
            seen.add(tuple(batch["input_ids"].shape))
        assert any(shape[0] > rows for shape in seen)
        with pytest.raises(StalePlan):
            run.step(pad_samples([torch.ones(17).long()]))
        with pytest.raises(StalePlan):
            run.step(pad_samples([torch.ones(16).long()] * 3))
