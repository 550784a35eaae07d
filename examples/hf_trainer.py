"""A small Llama trained with the Hugging Face Trainer on made-up tokens.

python examples/hf_trainer.py --batch-size 4
oomph rehearse --gpu rtx-4090 examples/hf_trainer.py --batch-size 4
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int, vocab: int) -> None:
        self.tokens = torch.randint(0, vocab, (count, length))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama.")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--output-dir", default="hf-output")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = LlamaConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.width,
        intermediate_size=4 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads // 2,
        max_position_embeddings=arguments.seq,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=arguments.output_dir,
            per_device_train_batch_size=arguments.batch_size,
            gradient_accumulation_steps=arguments.gradient_accumulation,
            gradient_checkpointing=arguments.gradient_checkpointing,
            dataloader_num_workers=arguments.workers,
            max_steps=arguments.max_steps,
            logging_steps=1,
            bf16=True,
            report_to=[],
        ),
        train_dataset=RandomTokens(arguments.samples, arguments.seq, arguments.vocab_size),
    )
    result = trainer.train()
    print(f"training loss: {result.training_loss:.4f}")
    if torch.cuda.is_available():
        print(f"peak allocated: {torch.cuda.max_memory_allocated()}")


if __name__ == "__main__":
    main()
