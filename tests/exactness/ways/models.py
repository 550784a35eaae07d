"""Models, by how their modules call each other."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from .losses import WHOLE
from .pieces import (
    BLOCKS,
    WIDTH,
    WORDS,
    Block,
    Rows,
    Tokens,
    classes,
    momentum,
    numbers,
    regression,
    rows,
    seeded,
    texts,
)
from .training import Training, way

#: Why a block that cannot be run again is not recomputed.
NOT_AGAIN = {"recompute": "run again|other|written", "recompute_in_part": "run again|other|written"}


def _words(model: nn.Module, loss: Any = None) -> Training:
    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

    return Training(model=model, loss=loss or mean, optimizer=momentum(model), batches=texts())


@way()
def tied_embedding() -> Training:
    """The output layer is the embedding, turned over."""
    model = Tokens()
    model.head.weight = model.embed.weight
    return _words(model)


@way()
def one_block_called_often() -> Training:
    """All layers are one module, as in ALBERT: its weights get the sum of all calls' gradients."""
    model = Rows()
    model.blocks[1] = model.blocks[0]
    return regression(model)


@way()
def linear_layers_shared_between_blocks() -> Training:
    """Blocks of their own with a layer in common."""
    model = Rows()
    model.blocks[1].up = model.blocks[0].up
    return regression(model)


@way()
def blocks_backwards_in_odd_batches() -> Training:
    """The order of blocks follows a flag in the batch."""

    class Either(Rows):
        def forward(self, x: Tensor, turned: bool = False) -> Tensor:
            x = self.first(x)
            for block in reversed(self.blocks) if turned else self.blocks:
                x = block(x)
            return self.head(x)  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.mse_loss(model(batch["x"], batch["turned"]), batch["y"])

    batches = [{"x": x, "y": y, "turned": at % 2 == 1} for at, (x, y) in enumerate(rows())]
    return regression(Either(), loss=loss, batches=batches)


@way()
def a_depth_that_grows() -> Training:
    """Progressive training: the last block joins with the third step."""

    class Growing(Rows):
        depth = 1

        def hidden(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks[: self.depth]:
                x = block(x)
            return x

    model = Growing()
    training = regression(model)
    passed = [0]

    def grow() -> None:
        passed[0] += 1
        model.depth = 1 + (passed[0] >= 2)

    training.after_step = grow
    return training


@way()
def blocks_in_lists_in_lists() -> Training:
    """Stages of blocks, with a layer between them."""

    class Staged(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.ModuleList([nn.ModuleDict({"mlp": Block()}), nn.Linear(WIDTH, WIDTH)])
                for _ in range(BLOCKS)
            ).double()

        def hidden(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block, between in self.blocks:
                x = between(block["mlp"](x))
            return x

    return regression(Staged())


class _Call(nn.Module):
    """A block that is called with more than a tensor, and gives more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float = 1.0,
        mode: str = "plain",
        cache: dict[str, Any] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], None]:
        out = self.inner(x) * scale
        if mode == "gated":
            out = out * torch.sigmoid(self.gate(x))
        if mask is not None:
            out = out.masked_fill(~mask[:, None], 0.0)
        return out, {"norm": out.square().mean(1)}, None


@way()
def keywords_in_and_tuples_out() -> Training:
    """Blocks take keywords of all kinds, and give a tensor, a dict and None."""

    class Calling(Rows):
        def __init__(self) -> None:
            super().__init__(_Call)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mask, norms = x[:, 0] > -1.0, []
            x = self.first(x)
            for at, block in enumerate(self.blocks):
                x, extra, _ = block(x, mask=mask, scale=0.5 + at, mode=["plain", "gated"][at])
                norms.append(extra["norm"])
            return self.head(x), torch.stack(norms).sum(0)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, norms = model(batch[0])
        return F.mse_loss(out, batch[1]) + 0.1 * norms.mean()

    return regression(Calling(), loss=loss)


@dataclass
class _Output:
    """What a model gives, as an object."""

    out: Tensor
    aux: Tensor


_State = namedtuple("_State", "x residual")


@way()
def objects_between_blocks() -> Training:
    """Blocks take and give named tuples; the model gives a dataclass."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, state: _State) -> _State:
            return _State(self.inner(state.x + state.residual), state.x * 0.5)

    class Model(Rows):
        def __init__(self) -> None:
            super().__init__(Mixer)

        def forward(self, x: Tensor) -> _Output:  # type: ignore[override]
            state = _State(self.first(x), torch.zeros_like(x))
            for block in self.blocks:
                state = block(state)
            return _Output(self.head(state.x), state.residual.square().mean())

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = model(batch[0])
        return F.mse_loss(output.out, batch[1]) + output.aux

    return regression(Model(), loss=loss)


class _Graph:
    """What libraries of graphs and of sparse tensors hand from block to block."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@way()
def an_object_that_blocks_write_to() -> Training:
    """Blocks take an object with the features in it, and give nothing: autograd sees neither."""

    class Inside(Block):
        def forward(self, graph: _Graph) -> None:  # type: ignore[override]
            graph.x = super().forward(graph.x)

    class Model(Rows):
        def hidden(self, x: Tensor) -> Tensor:
            graph = _Graph(self.first(x))
            for block in self.blocks:
                block(graph)
            return graph.x

    return regression(Model(Inside))


@way()
def written_in_place_on_the_way() -> Training:
    """Blocks write to what they are given, as a residual stream, and through views."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            x[:, :2].mul_(0.9)  # whoever gave it sees that
            out += self.inner(x).mul_(0.5)
            out[:, 1:3].add_(x[:, 1:3])
            return F.relu(out, inplace=True) + x

    return regression(Rows(InPlace))


@way()
def its_own_checkpoints() -> Training:
    """A model that runs the inside of its blocks again by itself, both ways PyTorch has."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.one, x, use_reentrant=False)
            return checkpoint(self.other, x, use_reentrant=False)  # type: ignore[no-any-return]

    return regression(Rows(Checkpointed))


class _Straight(torch.autograd.Function):
    """Rounds, and lets gradients through; saves what it needs and a number beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.step = step
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 4 * ctx.step), None


@way(refusals=WHOLE)
def a_function_of_ones_own() -> Training:
    """A custom backward inside blocks."""

    class Quantized(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(_Straight.apply(x, 0.25))

    return regression(Rows(Quantized))


@way()
def parametrized_weights() -> Training:
    """Weights that are made of others in each forward: weight norm and orthogonal ones."""

    def make() -> nn.Module:
        block = Block()
        parametrizations.weight_norm(block.up)
        parametrizations.orthogonal(block.down)
        return block

    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).mT

    model = Rows(make)
    parametrize.register_parametrization(model.first, "weight", Symmetric())
    model.double()
    return regression(model)


@way(refusals=WHOLE)
def spectral_norms() -> Training:
    """Weights divided by their largest singular value, which each forward follows."""

    def make() -> nn.Module:
        block = Block()
        parametrizations.spectral_norm(block.up)
        nn.utils.spectral_norm(block.down)
        return block

    return regression(Rows(make))


@way()
def called_by_function() -> Training:
    """The loss calls the model with weights it made of the model's own: functional_call."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = {name: p * 0.9 for name, p in model.named_parameters()}
        return F.mse_loss(torch.func.functional_call(model, weights, (batch[0],)), batch[1])

    return regression(Rows(), loss=loss)


@way(refusals=WHOLE)
def an_inner_step() -> Training:
    """Meta-learning: the loss after a step of gradient descent on the same batch."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {
            name: weight - 0.1 * slope
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        return F.mse_loss(torch.func.functional_call(model, moved, (x,)), y)

    return regression(Rows(), loss=loss)


@way()
def early_exits() -> Training:
    """Each block has a head of its own, and their losses are weighed."""

    class Exits(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.exits = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)).double()

        def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
            x, found = self.first(x), []
            for block, leave in zip(self.blocks, self.exits, strict=True):
                x = block(x)
                found.append(leave(x))
            return [*found, self.head(x)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = [F.mse_loss(out, batch[1]) * 0.5**at for at, out in enumerate(model(batch[0]))]
        return sum(each, torch.zeros((), dtype=torch.float64))

    return regression(Exits(), loss=loss)


@way()
def gradients_cut_on_the_way() -> Training:
    """A branch without gradients, one that is detached, and one that no gradient reaches."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.target = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                still = self.target(x)
            return self.inner(x) + 0.1 * still + 0.1 * self.target(x.detach())

    return regression(Rows(Cut))


@way()
def frozen_trunk_with_adapters() -> Training:
    """Low-rank adapters beside frozen layers."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Block().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]

    model = Rows(Adapted)
    model.first.requires_grad_(False)
    return regression(model)


class _Norms(nn.Module):
    """A layer of some norm between two others."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.norm(self.up(x))))  # type: ignore[no-any-return]


def _with_norms(*makes: Callable[[], nn.Module]) -> Rows:
    made = iter(makes)
    return Rows(lambda: _Norms(next(made)))


@way()
def norms_of_each_sample() -> Training:
    """Root mean square and group norms."""
    return regression(_with_norms(lambda: nn.RMSNorm(WIDTH), lambda: nn.GroupNorm(2, WIDTH)))


@way(refusals=WHOLE)
def norms_of_the_batch() -> Training:
    """Batch norms, with and without statistics; each averages over its batch."""
    batches = rows(sizes=(6, 5, 2, 4, 3))
    model = _with_norms(
        lambda: nn.BatchNorm1d(WIDTH, momentum=None),
        lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    )
    return regression(model, batches=batches)


@way()
def norms_that_do_not_train() -> Training:
    """Batch norms that their user set to evaluate, as detectors have them."""

    class Frozen(Rows):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
            return self

    made = iter([lambda: nn.BatchNorm1d(WIDTH)] * BLOCKS)
    return regression(Frozen(lambda: _Norms(next(made))))


@way()
def images_with_instance_norms() -> Training:
    """Convolutions, with statistics of single samples."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, padding=1)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.SiLU())
                for _ in range(BLOCKS)
            )
            self.head = nn.Linear(4, 5)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]

    batches = [(numbers(len(y), 3, 6, 5, seed=at), y) for at, (_, y) in enumerate(classes(5))]
    return regression(Images(), loss=nn.CrossEntropyLoss(), batches=batches)


@way()
def attention_with_masks() -> Training:
    """PyTorch's own encoder layers with padding masks, first along words."""

    class Encoder(Tokens):
        def __init__(self) -> None:
            super().__init__(
                lambda: nn.TransformerEncoderLayer(
                    WIDTH, 2, 12, dropout=0.0, batch_first=False, norm_first=True
                )
            )

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embed(ids).transpose(0, 1)
            for block in self.blocks:
                x = block(x, src_key_padding_mask=~mask)
            logits: Tensor = self.head(x.transpose(0, 1))
            return logits

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"], batch["mask"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return _words(Encoder(), loss)


@way()
def recurrent() -> Training:
    """An LSTM between blocks, and a cell in a loop of Python."""

    class Recurrent(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.double()

        def forward(self, ids: Tensor) -> Tensor:
            x, _ = self.lstm(self.embed(ids))
            state, states = x[:, 0], []
            for at in range(x.shape[1]):
                state = self.cell(x[:, at], state)
                states.append(state)
            x = torch.stack(states, 1)
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(x)
            return logits

    return _words(Recurrent())


@way(draws=True)
def dropout() -> Training:
    """Random numbers in blocks: recompute must draw the same ones again."""

    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3, self.training)

    return regression(Rows(Dropped))


@way(draws=True)
def stochastic_depth() -> Training:
    """Samples skip a block at random, by a mask that PyTorch draws."""

    class Skipping(Block):
        def forward(self, x: Tensor) -> Tensor:
            keep = torch.rand(len(x), 1, dtype=x.dtype) < 0.7
            return x + (super().forward(x) - x) * keep / 0.7

    return regression(Rows(Skipping))


@way(draws=True, refusals=WHOLE | NOT_AGAIN)
def noise_of_a_generator() -> Training:
    """Noise from a generator that the block has for itself."""

    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = seeded(5)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
            return super().forward(x + 0.1 * noise)

    model = Rows(Noisy)
    training = regression(model)
    training.state = lambda: [block.generator.get_state() for block in model.blocks]
    return training


@way()
def lower_precision_inside() -> Training:
    """A block that computes a part in single precision, and one in bf16 by autocast."""

    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                gate = torch.sigmoid(x.float().mean(-1, keepdim=True)).double()
            return super().forward(x) * gate

    return regression(Rows(Mixed))


@way()
def forward_replaced_on_the_instance() -> Training:
    """A library put its own forward around those of the blocks."""
    model = Rows()
    for block in model.blocks:
        forward = block.forward

        def wrapped(x: Tensor, forward: Any = forward) -> Tensor:
            return forward(x * 0.9) * 1.1  # type: ignore[no-any-return]

        block.forward = functools.partial(wrapped)
    return regression(model)


@way()
def experts_chosen_by_words() -> Training:
    """Each word goes to the better of two experts, picked by index; a third is used by few."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.route(x).softmax(-1)
            best = weight.argmax(-1)
            out = torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                chosen = (best == at)[..., None]
                out = out + torch.where(chosen, expert(x), 0.0) * weight[..., at : at + 1]
            return x + out

    return _words(Tokens(Experts))


@way()
def views_and_strides() -> Training:
    """Blocks give views, expanded tensors and turned ones."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            both = self.inner(x).unsqueeze(-1).expand(-1, -1, 2)
            return both.transpose(1, 2)[:, 1].flip(1)

    return regression(Rows(Turning))


@way(refusals={"chunked_loss": "forward of its own"})
def a_head_of_its_own_class() -> Training:
    """The output layer is a subclass that does more than a linear layer."""

    class Cosine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 5 * F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))

    model = Tokens()
    model.head = Cosine(WIDTH, WORDS, bias=False).double()
    return _words(model)


@way()
def logits_used_twice() -> Training:
    """Words by cross entropy, and a penalty on the logits' normaliser."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["ids"])
        words = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return words + 1e-2 * logits.logsumexp(-1).square().mean()

    return _words(Tokens(), loss)
