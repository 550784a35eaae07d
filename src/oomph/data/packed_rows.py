"""Packed rows: keeps the samples of a row apart, and checks that a model does.

Positions restart with every sample. That is enough for transformers models to see the boundaries,
if they get no attention mask and keep no cache; `block_diagonal_mask` is for other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from oomph.data.packing import Row
from oomph.data.samples import IGNORED, tokens_and_labels
from oomph.errors import BadInput
from oomph.techniques.parts_trial import in_evaluation


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of another dataset's samples, for a `DataLoader` with `PackedBatches`."""

    def __init__(self, dataset: Any, *, length: int, pad_token: int = 0) -> None:
        self._dataset, self._length, self._pad_token = dataset, length, pad_token

    def __getitem__(self, row: Row) -> dict[str, Tensor]:
        samples = [self._dataset[index] for index in row]
        return pack_row(samples, length=self._length, pad_token=self._pad_token)


def pack_row(samples: Sequence[Any], *, length: int, pad_token: int = 0) -> dict[str, Tensor]:
    """Concatenate samples: tokens, labels, and positions that restart with each sample.

    A sample's first token is not learned: it would be predicted from another sample's token. The
    rest of the row is padding, treated as a separate sample that is not learned.
    """
    pairs = [tokens_and_labels(sample, length) for sample in samples]
    lengths = [len(tokens) for tokens, _ in pairs]
    if sum(lengths) > length:
        raise BadInput(
            f"samples of {', '.join(map(str, lengths))} tokens do not go into a row of {length}:"
            " are the lengths given to PackedBatches those of this dataset?"
        )
    ids = torch.full((length,), pad_token, dtype=torch.long, device="cpu")
    targets = torch.full((length,), IGNORED, dtype=torch.long, device="cpu")
    positions = torch.arange(length, device="cpu")
    at = 0
    for tokens, labels in pairs:
        end = at + len(tokens)
        ids[at:end] = tokens
        targets[at + 1 : end] = labels[1:]
        positions[at:end] = torch.arange(len(tokens), device="cpu")
        at = end
    positions[at:] = torch.arange(length - at, device="cpu")
    return {"input_ids": ids, "position_ids": positions, "labels": targets}


def sample_numbers(position_ids: Tensor) -> Tensor:
    """For each token of packed rows, the index of its sample in the row, from 0."""
    begins = position_ids == 0
    return begins.cumsum(-1) - 1


def block_diagonal_mask(position_ids: Tensor, *, causal: bool = True) -> Tensor:
    """A mask of rows × 1 × length × length for `scaled_dot_product_attention`: true where a
    token may attend to another."""
    number = sample_numbers(position_ids)
    mask = number[:, None, :, None] == number[:, None, None, :]
    return mask.tril() if causal else mask


def for_flash_attention(batch: dict[str, Any]) -> dict[str, Any]:
    """A packed batch as one long row with the bounds of its samples, as flash-attn needs it.

    Its kernels keep samples apart only in a batch of a single row.
    """
    flat = {name: value.reshape(1, -1) for name, value in batch.items()}
    begins = torch.nonzero(flat["position_ids"][0] == 0)[:, 0]
    end = begins.new_tensor([flat["position_ids"].shape[1]])
    bounds = torch.cat([begins, end]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {
        **flat,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@torch.no_grad()
def check_packing(model: nn.Module, batch: dict[str, Any]) -> None:
    """Refuse a model in which a sample of a packed row sees another.

    The first sample of each row is replaced by other tokens: the model's output for the later ones
    must not change. Needs memory for two forwards.
    """
    positions = batch["position_ids"]
    first = sample_numbers(positions) == 0
    if bool(first.all()):
        raise BadInput("to check packing, give a batch with at least two samples in a row")
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    changed = {**inputs, "input_ids": _with_others(batch["input_ids"], first)}
    with in_evaluation(model):
        there, other = (_logits(model(**one))[~first] for one in (inputs, changed))
    # Kernels may sum in another order; a leak changes outputs by the magnitude of the logits.
    if not torch.allclose(there, other, rtol=1e-3, atol=1e-3 * float(there.abs().max())):
        raise BadInput(_leak_advice(model))


def _with_others(ids: Tensor, where: Tensor) -> Tensor:
    """Replace tokens there by others of the batch, which are in the vocabulary."""
    for shift in range(1, ids.numel()):
        changed = torch.where(where, ids.flatten().roll(shift).reshape(ids.shape), ids)
        if not torch.equal(changed, ids):
            return changed
    raise BadInput("to check packing, give a batch with different tokens in it")


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    assert isinstance(logits, Tensor), "a model that returns no logits cannot be checked"
    return logits.float()


def _leak_advice(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    words = "the model lets a sample of a packed row see the one before it"
    if getattr(config, "use_cache", False):
        return f"{words}: set model.config.use_cache = False, for its cache hides the boundaries"
    kind = str(getattr(config, "_attn_implementation", ""))
    if "flash" in kind:
        return f"{words}: {kind} needs packed rows as oomph.for_flash_attention makes them"
    return (
        f"{words}: give its attention oomph.block_diagonal_mask(position_ids), or use TokenBatches,"
        " which do not pack"
    )
