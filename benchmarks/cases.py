"""The jobs whose memory was measured on a real GPU, and which predictions are checked against.

Half of them are for development: their histories may be read op by op. The other half is held out:
models, and settings of models, that no rule was made from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.jobs.job import Job
from oomph.jobs.sources import job_from_name


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured job."""

    name: str
    family: str
    make: Callable[[], Job]
    held_out: bool
    allocator: str = ""
    settings: str
    """What was chosen, for the table."""


class LanguageRNN(nn.Module):
    """An embedding, a stack of recurrent layers and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 512)
        layers = {"lstm": nn.LSTM, "gru": nn.GRU}[kind]
        self.layers = layers(512, 1024, num_layers=2, batch_first=True)
        self.head = nn.Linear(1024, 32000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0])  # type: ignore[no-any-return]


class SmallUNet(nn.Module):
    """Down, across and up again: strided, plain and transposed convolutions with two norms."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.group_norm = nn.GroupNorm(32, 2 * width)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 10, 1)

    def forward(self, image: Tensor) -> Tensor:
        outer = F.silu(self.enter(image))
        inner = F.silu(self.group_norm(self.down(outer)))
        inner = F.relu(self.batch_norm(self.middle(inner)))
        joined = torch.cat([outer, self.up(inner)], dim=1)
        return self.leave(joined).mean((2, 3))  # type: ignore[no-any-return]


class PlainEncoder(nn.Module):
    """PyTorch's own transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(512, 32000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    """Wide linear layers, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1024, 8192, 8192, 8192, 1000]
        pairs = itertools.pairwise(widths)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


def _token_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def _tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    shape = (batch, length)
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


def _images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.long)


def _vectors(batch: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, 1024), torch.zeros(batch, dtype=torch.long)


_PLAIN: dict[str, Callable[..., Job]] = {
    "lstm": lambda b, s, **o: Job(
        functools.partial(LanguageRNN, "lstm"),
        _token_loss,
        batch=functools.partial(_tokens, b, s),
        **o,
    ),
    "gru": lambda b, s, **o: Job(
        functools.partial(LanguageRNN, "gru"),
        _token_loss,
        batch=functools.partial(_tokens, b, s),
        **o,
    ),
    "unet": lambda b, s, **o: Job(
        SmallUNet, nn.CrossEntropyLoss(), batch=functools.partial(_images, b, s), **o
    ),
    "encoder": lambda b, s, **o: Job(
        PlainEncoder, _token_loss, batch=functools.partial(_tokens, b, s), **o
    ),
    "mlp": lambda b, s, **o: Job(
        Perceptron, nn.CrossEntropyLoss(), batch=functools.partial(_vectors, b), **o
    ),
}


def _make(model: str, batch: int, seq: int, options: dict[str, Any]) -> Job:
    if model in _PLAIN:
        return _PLAIN[model](batch, seq, name=model, **options)
    return job_from_name(model, batch=batch, seq=seq, **options)


#: family, model, batch, seq, precision, optimizer, extras
_DEVELOPMENT = """
decoder llama-3.2-1b 16 2048 bf16-mixed adamw-fused micro_batch=4
decoder llama-3.2-1b 16 2048 bf16-mixed adamw-fused micro_batch=1
decoder llama-3.2-1b 16 2048 bf16-mixed adamw-fused micro_batch=4 checkpointing=full
decoder llama-3.2-1b 16 2048 bf16-mixed adamw-fused micro_batch=1 checkpointing=full
decoder llama-3.2-1b 2 1024 fp32 adamw
decoder llama-3.2-1b 4 1024 bf16 adamw expandable
decoder gpt2-medium 8 1024 bf16-mixed adamw
decoder gpt2-medium 4 512 fp32 sgd-momentum
decoder gpt2 16 512 fp16-mixed adamw-fused
decoder qwen2.5-0.5b 4 2048 bf16-mixed adamw-fused expandable
decoder smollm2-135m 8 1024 bf16-mixed adamw
experts olmoe-1b-7b 2 512 bf16 sgd
encoder bert-large 16 512 bf16-mixed adamw
encoder bert-large 8 384 fp32 adamw checkpointing=full
encoder deberta-v3-base 8 512 bf16-mixed adamw
encoder-decoder t5-base 8 512 bf16-mixed adamw
encoder-decoder t5-base 4 512 fp32 sgd-momentum
vision vit-large 32 224 bf16-mixed adamw-fused
vision vit-base 32 224 fp32 sgd-momentum
vision resnet-50 64 224 fp32 sgd-momentum
vision resnet-50 64 224 bf16-mixed sgd-momentum expandable
vision convnext-base 32 224 bf16-mixed adamw
vision swin-base 16 224 bf16-mixed adamw
audio whisper-small 8 128 bf16-mixed adamw
audio wav2vec2-base 8 80000 fp32 adamw
recurrent lstm 32 256 fp32 adamw
recurrent lstm 32 256 bf16-mixed adamw
recurrent gru 16 128 fp32 sgd-momentum
plain unet 16 128 fp32 adamw
plain unet 16 128 bf16-mixed adamw
plain encoder 16 512 bf16-mixed adamw
plain mlp 4096 1 bf16-mixed adamw
"""

_HELD_OUT = """
decoder tinyllama-1.1b 4 2048 bf16-mixed adamw-fused
decoder tinyllama-1.1b 2 1024 fp32 sgd-momentum
decoder qwen3-0.6b 4 2048 bf16-mixed adamw
decoder qwen3-0.6b 2 2048 bf16-mixed adamw-fused checkpointing=full expandable
decoder gpt2-large 4 1024 bf16-mixed adamw-fused checkpointing=full
decoder gpt2-large 2 1024 fp32 adamw
decoder opt-1.3b 4 1024 bf16-mixed sgd-momentum
decoder pythia-1b 4 1024 bf16-mixed adamw expandable
decoder gemma-3-1b 2 1024 bf16-mixed adamw-fused
decoder llama-3.2-3b 2 1024 bf16 adamw
decoder smollm2-135m 16 2048 bf16-mixed adamw-fused micro_batch=4 checkpointing=full
encoder bert-base 32 256 fp32 adamw
encoder bert-base 32 512 fp16-mixed adamw-fused
encoder roberta-large 8 512 bf16-mixed sgd-momentum checkpointing=full
encoder modernbert-base 8 1024 bf16-mixed adamw
encoder distilbert-base 32 256 bf16-mixed adamw expandable
encoder-decoder bart-large 4 512 bf16-mixed adamw
encoder-decoder t5-large 4 512 bf16-mixed adamw-fused checkpointing=full
vision vit-base 64 224 bf16-mixed adamw checkpointing=full
vision vit-large 16 224 fp32 adamw-fused
vision dinov2-large 16 224 bf16-mixed adamw
vision convnext-base 16 224 fp32 sgd-momentum expandable
vision swin-base 32 224 fp32 adamw-fused
vision resnet-50 128 224 bf16-mixed adamw
audio whisper-small 4 256 fp32 sgd-momentum
audio wav2vec2-base 16 48000 bf16-mixed adamw-fused
recurrent gru 32 256 bf16-mixed adamw
plain unet 32 256 bf16-mixed sgd-momentum
plain encoder 32 256 fp32 adamw-fused
plain mlp 2048 1 fp32 sgd-momentum
"""


def _parse(table: str, held_out: bool) -> list[Case]:
    cases = []
    for row in table.split("\n"):
        if not row.strip():
            continue
        family, model, batch, seq, precision, optimizer, *extras = row.split()
        options: dict[str, Any] = {"precision": precision, "optimizer": optimizer}
        options |= dict(extra.split("=") for extra in extras if "=" in extra)
        if "micro_batch" in options:
            options["micro_batch"] = int(options["micro_batch"])
        cases.append(
            Case(
                name="/".join([model, f"{batch}x{seq}", precision, optimizer, *extras]),
                family=family,
                make=functools.partial(_make, model, int(batch), int(seq), options),
                held_out=held_out,
                allocator="expandable_segments:True" if "expandable" in extras else "",
                settings=" ".join([f"{batch}×{seq}", precision, optimizer, *extras]),
            )
        )
    return cases


def all_cases() -> list[Case]:
    """Every case, development first."""
    return _parse(_DEVELOPMENT, held_out=False) + _parse(_HELD_OUT, held_out=True)
