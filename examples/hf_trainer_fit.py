"""A small Llama trained with the Hugging Face Trainer inside a budget: one line changes.

python examples/hf_trainer_fit.py --budget 3GiB              # fits
python examples/hf_trainer_fit.py --budget 3GiB --no-oomph   # on a GPU: out of memory
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from oomph.integrations.framework_plan import hold_to
from oomph.integrations.transformers import OomphTrainer

IGNORED = -100


class Conversations(Dataset[dict[str, torch.Tensor]]):
    """Made-up tokens; the answers to be learned are of all lengths."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        self.tokens = torch.randint(0, vocab, (count, length))
        self.prompts = torch.randint(0, length - 1, (count,))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        labels[: int(self.prompts[index])] = IGNORED
        return {"input_ids": self.tokens[index], "labels": labels}


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description="Train a small Llama inside a budget.")
    parser.add_argument("--budget", help="device memory, as 3GiB")
    parser.add_argument("--no-oomph", action="store_true", help="the plain Trainer")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args(argv)

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=arguments.vocab_size,
            hidden_size=arguments.width,
            intermediate_size=4 * arguments.width,
            num_hidden_layers=arguments.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=arguments.seq,
        )
    )
    data = Conversations(4 * arguments.batch_size + 3, arguments.seq, arguments.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch_size,
            max_steps=arguments.steps,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        if arguments.no_oomph:
            if arguments.budget is not None:
                hold_to(arguments.budget, settings.device)
            trainer = Trainer(model, settings, train_dataset=data)
        else:  # the one line
            trainer = OomphTrainer(model, settings, train_dataset=data, budget=arguments.budget)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result: dict[str, object] = {
        "losses": [entry["loss"] for entry in logs],
        "batch": settings.per_device_train_batch_size * settings.gradient_accumulation_steps,
        "predicted_gib": logs[-1].get("peak_gib_predicted"),
        "reserved": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
