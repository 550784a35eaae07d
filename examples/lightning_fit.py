"""A small language model trained with Lightning inside a budget: one line changes.

python examples/lightning_fit.py --budget 3GiB              # fits
python examples/lightning_fit.py --budget 3GiB --no-oomph   # on a GPU: out of memory
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from oomph.integrations.framework_plan import hold_to
from oomph.integrations.lightning import OomphCallback


class LanguageModel(L.LightningModule):
    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        tokens, targets = batch
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        # Padding has the class that cross_entropy ignores.
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description="Train a small language model inside a budget.")
    parser.add_argument("--budget", help="device memory, as 3GiB")
    parser.add_argument("--no-oomph", action="store_true", help="plain Lightning")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(argv)

    L.seed_everything(0, verbose=False)
    model = LanguageModel(arguments.vocab_size, arguments.width, arguments.layers)
    tokens = torch.randint(0, arguments.vocab_size, (4 * arguments.batch_size + 3, arguments.seq))
    targets = tokens.roll(-1, dims=1)
    for row, length in enumerate(torch.randint(1, arguments.seq, (len(tokens),)).tolist()):
        targets[row, length:] = -100
    loader = DataLoader(TensorDataset(tokens, targets), arguments.batch_size, shuffle=True)

    callbacks: list[L.Callback] = []
    if not arguments.no_oomph:  # the one line
        callbacks.append(OomphCallback(budget=arguments.budget))
    elif arguments.budget is not None and torch.cuda.is_available():
        hold_to(arguments.budget, torch.device("cuda"))
    trainer = L.Trainer(
        devices=1,
        max_steps=arguments.steps,
        callbacks=callbacks,
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    predicted = trainer.callback_metrics.get("peak_gib_predicted")
    result: dict[str, object] = {
        "losses": model.losses,
        "batch": arguments.batch_size * trainer.accumulate_grad_batches,
        "predicted_gib": None if predicted is None else float(predicted),
        "reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
