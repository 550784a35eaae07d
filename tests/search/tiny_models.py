"""Jobs on models of a few thousand parameters, built like those that people train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from oomph.jobs.job import Job

Batch = Callable[[], Any]


def tokens(batch: int = 4, length: int = 32) -> Batch:
    def make() -> dict[str, Tensor]:
        ids = torch.ones(batch, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return make


def images(batch: int = 4, size: int = 32) -> Batch:
    def make() -> dict[str, Tensor]:
        labels = torch.ones(batch, dtype=torch.long)
        return {"pixel_values": torch.ones(batch, 3, size, size), "labels": labels}

    return make


def rows(batch: int = 8, width: int = 16) -> Batch:
    return lambda: (torch.ones(batch, width), torch.zeros(batch, width))


def hugging_face(cls: Any, config: Any, batch: Batch, **options: Any) -> Job:
    return Job(lambda: cls(config), batch=batch, name=config.model_type, **options)


def llama(
    layers: int = 4, vocabulary: int = 256, batch: Batch | None = None, **options: Any
) -> Job:
    config = hf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
    )
    return hugging_face(hf.LlamaForCausalLM, config, batch or tokens(), **options)


def gpt2(layers: int = 4, batch: Batch | None = None, **options: Any) -> Job:
    config = hf.GPT2Config(
        n_embd=32,
        n_layer=layers,
        n_head=4,
        vocab_size=256,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return hugging_face(hf.GPT2LMHeadModel, config, batch or tokens(), **options)


def bert(layers: int = 3, **options: Any) -> Job:
    config = hf.BertConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=256,
    )
    return hugging_face(hf.BertForMaskedLM, config, tokens(), **options)


def albert(layers: int = 4, **options: Any) -> Job:
    config = hf.AlbertConfig(
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=256,
    )
    return hugging_face(hf.AlbertForMaskedLM, config, tokens(), **options)


def t5(layers: int = 2, **options: Any) -> Job:
    config = hf.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=layers,
        num_heads=4,
        vocab_size=256,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return hugging_face(hf.T5ForConditionalGeneration, config, tokens(), **options)


def vit(layers: int = 3, **options: Any) -> Job:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    return hugging_face(hf.ViTForImageClassification, config, images(), **options)


def swin(**options: Any) -> Job:
    config = hf.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 4],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
    )
    return hugging_face(hf.SwinForImageClassification, config, images(), **options)


def hf_resnet(**options: Any) -> Job:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 3], layer_type="basic"
    )
    return hugging_face(hf.ResNetForImageClassification, config, images(), **options)


def convnext(**options: Any) -> Job:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 2], num_stages=2)
    return hugging_face(hf.ConvNextForImageClassification, config, images(), **options)


def mixture(cls: Any, config: Any, **options: Any) -> Job:
    """A model with four experts in each layer."""
    small = config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        num_experts_per_tok=2,
        **options,
    )
    return hugging_face(cls, small, tokens())


class Basic(nn.Module):
    """A residual block of two convolutions, as torchvision's."""

    def __init__(self, width: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider)
        self.downsample: nn.Module | None = None
        if stride != 1:
            shortcut = nn.Conv2d(width, wider, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.downsample is None else self.downsample(x)
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + beside)


class ResNet(nn.Module):
    """Stages that are attributes of the model; the last has a single block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Basic(8, 8, 1), Basic(8, 8, 1))
        self.layer2 = nn.Sequential(Basic(8, 16, 2), Basic(16, 16, 1))
        self.layer3 = nn.Sequential(Basic(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x))))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet(**options: Any) -> Job:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.ones(4, 3, 16, 16), torch.ones(4, dtype=torch.long)

    return Job(ResNet, nn.CrossEntropyLoss(), batch=batch, name="resnet", **options)


class Residual(nn.Module):
    """The smallest thing that is a block."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.down(torch.relu(self.up(x))))
        return x + hidden


class Other(Residual):
    """Another class of blocks."""


class Third(Residual):
    """Yet another one."""


def chain(make: Callable[[], nn.Module], batch: Batch | None = None, **options: Any) -> Job:
    """A job on a model from rows to rows of 16."""
    options = {"optimizer": "sgd", "name": "chain", **options}
    return Job(make, nn.MSELoss(), batch=batch or rows(), **options)
