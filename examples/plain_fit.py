"""A small language model trained in a plain PyTorch loop inside a budget: one line changes.

python examples/plain_fit.py --budget 3GiB              # fits
python examples/plain_fit.py --budget 3GiB --no-oomph   # on a GPU: out of memory
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oomph
from oomph.integrations.framework_plan import hold_to


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:2], self.heads, -1)
        q, k, v = (
            part.view(shape).transpose(1, 2)
            for part in self.mix(self.before(hidden)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.think(hidden)


class LanguageModel(nn.Module):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def batches(arguments: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Made-up tokens in sequences of all lengths; what is behind their ends does not count."""
    for _ in range(arguments.steps):
        tokens = torch.randint(0, arguments.vocab_size, (arguments.batch_size, arguments.seq))
        targets = tokens.roll(-1, dims=1)
        for row, length in enumerate(torch.randint(1, arguments.seq, (len(tokens),)).tolist()):
            targets[row, length:] = -100
        yield {"tokens": tokens, "targets": targets}


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description="Train a small language model inside a budget.")
    parser.add_argument("--budget", help="device memory, as 3GiB")
    parser.add_argument("--no-oomph", action="store_true", help="plain PyTorch")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LanguageModel(arguments.vocab_size, arguments.width, arguments.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = list(batches(arguments))

    losses = []
    predicted = None
    if arguments.no_oomph:
        if arguments.budget is not None:
            hold_to(arguments.budget, device)
        for batch in data:
            loss = next_token_loss(model, {name: part.to(device) for name, part in batch.items()})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    else:  # the one line, and a step of three
        with (
            oomph.watch(),
            oomph.fit(
                model, optimizer, next_token_loss, data[0], budget=arguments.budget, allow="exact"
            ) as run,
        ):
            losses = [run.step(batch).item() for batch in data]
            predicted = run.plan.predicted.peak.allocated / (1 << 30)
    result: dict[str, object] = {
        "losses": losses,
        "batch": arguments.batch_size,
        "predicted_gib": predicted,
        "reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
