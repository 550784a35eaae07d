"""A small convolutional classifier trained with Lightning on made-up images.

python examples/lightning_script.py --batch-size 64
oomph rehearse --gpu rtx-4090 examples/lightning_script.py --batch-size 64
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Classifier(L.LightningModule):
    def __init__(self, width: int, depth: int, classes: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [convolution(3, width, stride=2)]
        for _ in range(depth):
            layers += [convolution(width, 2 * width, stride=2), convolution(2 * width, 2 * width)]
            width *= 2
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.features(images)))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", (logits.argmax(-1) == labels).float().mean())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small classifier.")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()

    def loader(shuffle: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
        images = torch.randn(arguments.samples, 3, arguments.image_size, arguments.image_size)
        labels = torch.randint(0, arguments.classes, (arguments.samples,))
        return DataLoader(
            TensorDataset(images, labels),
            batch_size=arguments.batch_size,
            shuffle=shuffle,
            num_workers=arguments.workers,
            pin_memory=True,
        )

    model = Classifier(arguments.width, arguments.depth, arguments.classes, 1e-3)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=arguments.max_steps,
        log_every_n_steps=1,
    )
    trainer.fit(model, loader(shuffle=True), loader(shuffle=False))
    print(f"peak allocated: {torch.cuda.max_memory_allocated()}")


if __name__ == "__main__":
    main()
