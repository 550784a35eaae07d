"""A small GPT trained in a plain loop, in the manner of nanoGPT.

    python examples/plain_loop.py --batch-size 12
    oomph rehearse --gpu rtx-4090 examples/plain_loop.py --batch-size 12

It reads tokens from `--data` (a file of uint16) or makes some up.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self, vocab: int, length: int, layers: int, heads: int, width: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.length = length
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = torch.arange(tokens.shape[1], dtype=torch.long, device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizer(
        self, weight_decay: float, learning_rate: float, device_type: str
    ) -> torch.optim.AdamW:
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused_available = "fused" in inspect.signature(torch.optim.AdamW).parameters
        extra = {"fused": True} if fused_available and device_type == "cuda" else {}
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), **extra)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    parser.add_argument("--data", type=Path, help="a file of uint16 tokens")
    parser.add_argument("--out-dir", type=Path, default=Path("out"))
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--gradient-accumulation", type=int, default=2)
    parser.add_argument("--max-iters", type=int, default=100)
    parser.add_argument("--eval-interval", type=int, default=50)
    parser.add_argument("--eval-iters", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    device = arguments.device
    device_type = "cuda" if "cuda" in device else "cpu"
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    dtype = getattr(torch, arguments.dtype)
    autocast = (
        contextlib.nullcontext()
        if dtype is torch.float32
        else torch.amp.autocast(device_type=device_type, dtype=dtype)
    )

    if arguments.data is not None:
        data = np.memmap(arguments.data, dtype=np.uint16, mode="r")
    else:
        count = 20 * arguments.block_size
        data = np.random.randint(0, arguments.vocab_size, count, dtype=np.uint16)
    splits = {"train": data[: -len(data) // 10], "val": data[-len(data) // 10 :]}

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, length = splits[split], arguments.block_size
        starts = torch.randint(len(tokens) - length, (arguments.batch_size,))
        x = torch.stack([torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts])
        y = torch.stack(
            [torch.from_numpy(tokens[i + 1 : i + 1 + length].astype(np.int64)) for i in starts]
        )
        if device_type == "cuda":
            x = x.pin_memory().to(device, non_blocking=True)
            y = y.pin_memory().to(device, non_blocking=True)
        else:
            x, y = x.to(device), y.to(device)
        return x, y

    model = GPT(
        arguments.vocab_size,
        arguments.block_size,
        arguments.layers,
        arguments.heads,
        arguments.width,
        arguments.dropout,
    )
    model.to(device)
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}")
    scaler = torch.amp.GradScaler(device_type, enabled=dtype is torch.float16)
    optimizer = model.configure_optimizer(0.1, arguments.learning_rate, device_type)
    raw_model = model
    if arguments.compile:
        model = torch.compile(model)

    @torch.no_grad()
    def estimate_loss() -> dict[str, torch.Tensor]:
        found = {}
        model.eval()
        for split in splits:
            losses = torch.zeros(arguments.eval_iters)
            for k in range(arguments.eval_iters):
                x, y = get_batch(split)
                with autocast:
                    _, loss = model(x, y)
                losses[k] = loss.item()
            found[split] = losses.mean()
        model.train()
        return found

    best_val_loss = 1e9
    x, y = get_batch("train")
    started = time.time()
    for iteration in range(arguments.max_iters):
        if iteration % arguments.eval_interval == 0:
            losses = estimate_loss()
            print(f"step {iteration}: train {losses['train']:.4f}, val {losses['val']:.4f}")
            if losses["val"] < best_val_loss:
                best_val_loss = losses["val"]
                if iteration > 0:
                    arguments.out_dir.mkdir(parents=True, exist_ok=True)
                    checkpoint = {
                        "model": raw_model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "iteration": iteration,
                        "best_val_loss": best_val_loss,
                    }
                    torch.save(checkpoint, arguments.out_dir / "ckpt.pt")
        for _ in range(arguments.gradient_accumulation):
            with autocast:
                _, loss = model(x, y)
                loss = loss / arguments.gradient_accumulation
            x, y = get_batch("train")
            scaler.scale(loss).backward()
        if arguments.grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        now = time.time()
        print(f"iter {iteration}: loss {loss.item():.4f}, time {(now - started) * 1000:.0f} ms")
        started = now
    if device_type == "cuda":
        print(f"peak allocated: {torch.cuda.max_memory_allocated()}")


if __name__ == "__main__":
    main()
