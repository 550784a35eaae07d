"""Transformers as people write them themselves, with their masks, positions, caches and experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, training

WORDS, WIDTH, HEADS = 50, 24, 4


def _words(drawn: Drawn) -> Tensor:
    return drawn.whole(WORDS, drawn.size, drawn.length, least=1)


def _padded(drawn: Drawn) -> dict[str, Tensor]:
    mask = drawn.mask()
    words = _words(drawn) * mask
    return {"words": words, "labels": words.masked_fill(~mask, -100), "mask": mask}


def _square(drawn: Drawn) -> Tensor:
    """As many samples as steps."""
    return drawn.whole(WORDS, drawn.size, drawn.size, least=1)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT without flash attention: a triangle in a buffer."""

    bias: Tensor

    def __init__(self, longest: int = 64) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        triangle = torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest)
        self.register_buffer("bias", triangle)

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (one.view(b, t, HEADS, c // HEADS).transpose(1, 2) for one in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln, self.attn, self.mlp = nn.LayerNorm(WIDTH), attention, Residual(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        return self.mlp(x + self.attn(self.ln(x)))


class GPT(nn.Module):
    """Words in, scores of words out, with one matrix for both."""

    def __init__(self, attention: type[nn.Module], depth: int = 3, positions: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(64, WIDTH) if positions else None
        self.blocks = nn.ModuleList([Block(attention()) for _ in range(depth)])
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        """Scores, and the loss where there are targets."""
        x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100
        )


def _own_loss(model: Any, b: Any) -> Any:
    return model(b["words"], b["labels"])[1]


@entry()
def nano_gpt() -> Training:
    """The loss comes out of forward; padding is ignored."""
    return training(GPT(CausalSelfAttention), _own_loss, each(_padded), "adamw", clip_norm=1.0)


@entry()
def sft_by_hand() -> Training:
    """Shifted labels, a mask over answers, sum by sum."""

    def loss(model: Any, b: Any) -> Any:
        logits, _ = model(b["words"])
        logits, labels = logits[:, :-1], b["words"][:, 1:]
        picked = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(-1)).squeeze(-1)
        mask = b["mask"][:, 1:]
        return -(picked * mask).sum() / mask.sum()

    return training(GPT(CausalSelfAttention), loss, each(_padded))


class Rotary(nn.Module):
    """Rotary positions, cached on the module as the batch needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cached_length = 0
        self.cos: Any = None
        self.sin: Any = None

    def _turn(self, x: Tensor) -> Any:
        one, other = x.chunk(2, -1)
        return x * self.cos + torch.cat([-other, one], -1) * self.sin

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        b, t, c = x.shape
        if t != self.cached_length:
            self.cached_length = t
            rates = 1.0 / (10000 ** (torch.arange(0, c // HEADS, 2).float() / (c // HEADS)))
            angles = torch.outer(torch.arange(t).float(), rates)
            angles = torch.cat([angles, angles], -1)
            self.cos, self.sin = angles.cos()[None, None], angles.sin()[None, None]
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self._turn(q), self._turn(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, t, c))


@entry()
def rotary_with_a_cache() -> Training:
    """Cosines are kept on the module, and made anew for another length."""
    return training(GPT(Rotary, positions=False), _own_loss, each(_padded))


class Alibi(nn.Module):
    """Biases by distance; heads are put beside samples in one dimension."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float())

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        b, t, c = x.shape
        q, k, v = (
            one(x).view(b, t, HEADS, -1).transpose(1, 2).reshape(b * HEADS, t, -1)
            for one in (self.q, self.k, self.v)
        )
        places = torch.arange(t)
        distance = (places[None, :] - places[:, None]).float()
        bias = (self.slopes[:, None, None] * distance).repeat(b, 1, 1)
        mask = torch.full((t, t), float("-inf")).triu(1)
        scores = torch.baddbmm(bias + mask, q, k.transpose(1, 2), alpha=0.4)
        return scores.softmax(-1).bmm(v).view(b, HEADS, t, -1).transpose(1, 2).reshape(b, t, c)


@entry()
def alibi_with_heads_beside_samples() -> Training:
    """Biases are repeated for each sample."""
    return training(GPT(Alibi, positions=False), _own_loss, each(_padded))


class Relative(nn.Module):
    """T5's buckets by an embedding of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.bias = nn.Embedding(129, HEADS)

    def forward(self, x: Tensor) -> Any:
        """The same shape, with a mask for each head of each sample."""
        t = x.shape[1]
        distance = torch.arange(t)[None] - torch.arange(t)[:, None] + 64
        bias = self.bias(distance).permute(2, 0, 1)
        mask = bias.masked_fill(torch.ones(t, t).triu(1).bool(), -1e4)
        mask = mask.unsqueeze(0).expand(x.shape[0], -1, -1, -1).reshape(-1, t, t)
        return self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]


@entry()
def relative_positions() -> Training:
    """Biases of distances become masks for all heads of all samples."""
    return training(GPT(Relative, positions=False), _own_loss, each(_padded))


@entry()
def as_many_samples_as_steps() -> Training:
    """A causal mask of T×T, and T is the number of samples."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Any:
            x = x.transpose(0, 1)
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(0))
            return self.attend(x, x, x, attn_mask=mask)[0].transpose(0, 1)

    def loss(model: Any, words: Any) -> Any:
        return F.cross_entropy(model(words)[0][:, :-1].transpose(1, 2), words[:, 1:])

    return training(GPT(Plain), loss, each(_square, 3))


@entry()
def mask_in_the_batch_as_long_as_it() -> Training:
    """The T×T mask is one of the batch's tensors, and T is the number of samples."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(WORDS, WIDTH),
            "encoder": nn.TransformerEncoder(layer, 3),
            "head": nn.Linear(WIDTH, WORDS),
        }
    )

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        words = _square(drawn)
        return {"words": words, "mask": torch.ones(drawn.size, drawn.size).triu(1).bool()}

    def loss(model: Any, b: Any) -> Any:
        h = model["encoder"](model["embed"](b["words"]), mask=b["mask"])
        return F.cross_entropy(model["head"](h)[:, :-1].flatten(0, 1), b["words"][:, 1:].flatten())

    return training(model, loss, each(batch, 3))


@entry()
def pytorch_transformer_with_time_first() -> Training:
    """`nn.Transformer`, times first, padding masks with samples first."""
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(WORDS, WIDTH),
            "net": nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, dropout=0.0),
            "head": nn.Linear(WIDTH, WORDS),
        }
    )

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        source = (_words(drawn) * drawn.mask()).t().contiguous()
        target = drawn.whole(WORDS, drawn.length // 2 + 1, drawn.size, least=1)
        return {"source": source, "target": target}

    def loss(model: Any, b: Any) -> Any:
        source, target = b["source"], b["target"]
        causal = model["net"].generate_square_subsequent_mask(target.size(0) - 1)
        h = model["net"](
            model["embed"](source),
            model["embed"](target[:-1]),
            tgt_mask=causal,
            src_key_padding_mask=(source == 0).transpose(0, 1),
            memory_key_padding_mask=(source == 0).transpose(0, 1),
        )
        logits = model["head"](h)
        return F.cross_entropy(logits.reshape(-1, WORDS), target[1:].reshape(-1))

    return training(model, loss, each(batch), "adam")


class Experts(nn.Module):
    """The two best experts of four for each token, one after the other; the router's loss stays
    on the module."""

    balance: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([Residual(WIDTH, 1) for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        flat = x.reshape(-1, x.size(-1))
        p = self.router(flat).softmax(-1)
        weight, which = p.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(which == number)
            if row.numel():
                out.index_add_(0, row, expert(flat[row]) * weight[row, place, None])
        share = F.one_hot(which, 4).float().sum(1).mean(0)
        self.balance = 4 * (share * p.mean(0)).sum()
        return out.view_as(x)


@entry()
def experts_with_balance_over_the_batch() -> Training:
    """Mixtures whose balance is a product of means over all tokens."""

    def loss(model: Any, b: Any) -> Any:
        lost = _own_loss(model, b)
        return lost + 0.01 * sum(block.attn.balance for block in model.blocks)

    return training(GPT(Experts), loss, each(_padded))


class SoftExperts(nn.Module):
    """All experts for all tokens, by one einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        return torch.einsum("btw,ewv,bte->btv", x, self.weight, self.router(x).softmax(-1))


@entry()
def experts_by_einsum() -> Training:
    """No token is sent anywhere."""
    return training(GPT(SoftExperts), _own_loss, each(_padded))


class Capacity(nn.Module):
    """Switch: one expert for each token, as long as there is room: others of the batch matter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        """The same shape; what does not fit is zero."""
        flat = x.flatten(0, 1)
        p, which = self.router(flat).softmax(-1).max(-1)
        one_hot = F.one_hot(which, 3)
        place = (one_hot.cumsum(0) * one_hot).sum(1) - 1
        fits = place < flat.size(0) // 4
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = ((which == number) & fits).unsqueeze(1)
            out = out + torch.where(mine, expert(flat), 0.0)
        return (out * p.unsqueeze(1)).view_as(x)


@entry()
def experts_with_capacity() -> Training:
    """Which tokens an expert takes depends on all tokens before them in the batch."""
    return training(GPT(Capacity), _own_loss, each(_padded))


class Caching(nn.Module):
    """Keys and values of the last batch are attended to as well, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.memory: Any = None

    def forward(self, x: Tensor) -> Any:
        """The same shape; what was seen stays for the next call."""
        seen = x if self.memory is None else torch.cat([self.memory, x], 1)
        self.memory = x.detach()[:, -8:]
        k, v = self.kv(seen).chunk(2, -1)
        return F.scaled_dot_product_attention(self.q(x), k, v)


@entry()
def memory_of_the_last_batch() -> Training:
    """Transformer-XL: each block keeps states of the last batch."""

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        words = drawn.whole(WORDS, 12, drawn.length, least=1)
        return {"words": words, "labels": words}

    return training(GPT(Caching), _own_loss, each(batch, 1))


class LoRA(nn.Module):
    """A frozen matrix and two small ones."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Any:
        """Both added."""
        return self.layer(x) + x @ self.a.t() @ self.b.t() * 2


@entry()
def lora_by_hand() -> Training:
    """Everything is frozen but small matrices beside the projections."""
    model = GPT(CausalSelfAttention).requires_grad_(False)
    for block in model.blocks:
        attention: Any = block.attn
        attention.c_attn = LoRA(attention.c_attn)
        attention.c_proj = LoRA(attention.c_proj)
    return training(model, _own_loss, each(_padded), "adamw")


class Merged(nn.Linear):
    """Low rank weights that are merged in each forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)

    def forward(self, x: Tensor) -> Any:
        """By the sum of both matrices."""
        return F.linear(x, self.weight + self.b @ self.a, self.bias)


@entry()
def low_rank_weights_merged() -> Training:
    """A product of parameters is added to another."""
    return training(GPT(Merged), _own_loss, each(_padded))


@entry()
def masked_words() -> Training:
    """BERT by hand: some words are hidden in the loss, by a mask of the batch."""

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        made = _padded(drawn)
        made["hidden"] = (drawn.uniform(drawn.size, drawn.length) < 0.3) & made["mask"]
        made["hidden"][:, 0] = True
        return made

    def loss(model: Any, b: Any) -> Any:
        words = torch.where(b["hidden"], torch.zeros_like(b["words"]), b["words"])
        logits = model(words)[0]
        return F.cross_entropy(logits[b["hidden"]], b["words"][b["hidden"]])

    return training(GPT(SoftExperts), loss, each(batch))


@entry()
def preferences() -> Training:
    """DPO: chosen and rejected answers behind each other in one forward, a frozen reference."""
    torch.manual_seed(2)
    reference = GPT(CausalSelfAttention).requires_grad_(False)

    def likelihood(model: Any, words: Tensor, mask: Tensor) -> Any:
        logits = model(words)[0][:, :-1].log_softmax(-1)
        picked = logits.gather(2, words[:, 1:].unsqueeze(2)).squeeze(2)
        return (picked * mask[:, 1:]).sum(-1)

    def loss(model: Any, b: Any) -> Any:
        words = torch.cat([b["chosen"], b["rejected"]], dim=0)
        mask = torch.cat([b["mask"], b["mask"]], dim=0)
        own = likelihood(model, words, mask)
        with torch.no_grad():
            other = likelihood(reference, words, mask)
        n = b["chosen"].size(0)
        margin = (own[:n] - own[n:]) - (other[:n] - other[n:])
        return -F.logsigmoid(0.1 * margin).mean()

    return training(
        GPT(CausalSelfAttention),
        loss,
        each(lambda d: {"chosen": _words(d), "rejected": _words(d), "mask": d.mask()}),
    )


@entry()
def adaptive_computation() -> Training:
    """PonderNet: a probability to stop at each step, and a divergence from a geometric prior."""

    class Ponder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.halt = nn.GRUCell(8, WIDTH), nn.Linear(WIDTH, 1)
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Any:
            h = x.new_zeros(x.shape[0], WIDTH)
            left, ps, ys = x.new_ones(x.shape[0]), [], []
            for step in range(5):
                h = self.cell(x, h)
                stop = self.halt(h).sigmoid().squeeze(1) if step < 4 else x.new_ones(x.shape[0])
                ps.append(left * stop)
                ys.append(self.out(h).squeeze(1))
                left = left * (1 - stop)
            return torch.stack(ps), torch.stack(ys)

    def loss(model: Any, b: Any) -> Any:
        ps, ys = model(b[0])
        lost = (ps * (ys - b[1]) ** 2).sum(0).mean()
        prior = torch.tensor([0.3, 0.21, 0.147, 0.1, 0.243])
        rates = ps.transpose(0, 1)
        divergence = F.kl_div((rates + 1e-9).log(), prior.expand_as(rates), reduction="batchmean")
        return lost + 0.01 * divergence

    return training(Ponder(), loss, each(lambda d: (d.normal(d.size, 8), d.normal(d.size)), 16))
