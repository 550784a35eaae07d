"""Batches to train a model on: the keyword arguments of a forward that returns `.loss`.

Only shapes and dtypes matter, so every value is a placeholder and fake tensors also work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomph.errors import BadInput
from oomph.jobs.models.catalogue import KINDS, ModelEntry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Kind of training step by the class name's suffix and its main input.
_KIND_OF_HEAD = {
    ("ForCausalLM", "input_ids"): "causal-lm",
    ("LMHeadModel", "input_ids"): "causal-lm",
    ("ForMaskedLM", "input_ids"): "masked-lm",
    ("ForSequenceClassification", "input_ids"): "sequence-classification",
    ("ForSequenceClassification", "input_values"): "audio-classification",
    ("ForConditionalGeneration", "input_ids"): "seq2seq-lm",
    ("ForConditionalGeneration", "input_features"): "speech-seq2seq",
    ("ForImageClassification", "pixel_values"): "image-classification",
    ("ForCTC", "input_values"): "ctc",
}

# Model types that look positions up in a table: a position beyond its end is an error.
_POSITIONS_IN_A_TABLE = frozenset(
    (
        *("albert", "bart", "bert", "blenderbot", "deberta", "deberta-v2", "distilbert", "electra"),
        *("ernie", "git", "gpt2", "gpt_bigcode", "gpt_neo", "mbart", "openai-gpt", "opt"),
    )
)
# The same, with the table's first entries reserved for padding.
_POSITIONS_AFTER_PADDING = frozenset(
    ("camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")
)
_IMAGE_SIZE_IS_FIXED = frozenset(("beit", "clip", "deit", "siglip", "vit"))
_SMALLEST_IMAGE = 32
#: Default lengths if the config names none: tokens, pixels per side, samples of audio.
_USUAL_TOKENS, _USUAL_SIDE, _USUAL_AUDIO = 512, 224, 160_000


def task_kind(model_class: type[nn.Module], config: Any) -> str:
    """What a training step of this class computes, as one of `KINDS`."""
    name = model_class.__name__
    main_input = getattr(model_class, "main_input_name", "")
    for (ending, its_input), kind in _KIND_OF_HEAD.items():
        if name.endswith(ending) and main_input == its_input:
            if kind == "causal-lm" and "vision_config" in config.sub_configs:
                return "image-to-text"
            if kind == "seq2seq-lm" and not config.is_encoder_decoder:
                break
            return kind
    raise BadInput(f"oomph has no sample batch for {name}; give the job one of your own")


def usual_length(kind: str, config: Any) -> int:
    """The default length of a sample; see `ModelEntry.seq` for its unit."""
    if kind == "image-classification":
        side = getattr(_vision(config), "image_size", None) or _USUAL_SIDE
        return int(max(side) if isinstance(side, (list, tuple)) else side)
    if kind in ("audio-classification", "ctc"):
        return _USUAL_AUDIO
    return min(_USUAL_TOKENS, _most_positions(config) or _USUAL_TOKENS)


def sample_batch(
    entry_or_kind: ModelEntry | str,
    config: Any,
    batch: int,
    seq: int,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """`batch` samples of length `seq` for a training forward; see `ModelEntry.seq` for its unit."""
    import torch

    kind = entry_or_kind.kind if isinstance(entry_or_kind, ModelEntry) else entry_or_kind
    if kind not in KINDS:
        raise BadInput(f"{kind!r} is not a kind of training step; those are {', '.join(KINDS)}")
    for what, count in (("batch", batch), ("sequence length", seq)):
        if not isinstance(count, int) or count < 1:
            raise BadInput(f"the {what} must be a whole number of at least 1, not {count!r}")

    def tokens(*shape: int) -> Tensor:
        # One rather than zero, which is CTC's blank and the padding of many vocabularies.
        return torch.ones(shape, dtype=torch.long, device=device)

    def classes() -> Tensor:
        # A single label means regression: its targets are floats.
        return torch.zeros(batch, device=device) if config.num_labels == 1 else tokens(batch)

    def images(side: int) -> Tensor:
        channels = _vision(config).num_channels
        return torch.zeros(batch, channels, side, side, device=device)

    if kind in ("image-classification", "audio-classification", "ctc"):
        if kind == "image-classification":
            _check_image(config, seq)
            return {"pixel_values": images(seq), "labels": classes()}
        frames = _audio_frames(config, seq)
        audio = torch.zeros(batch, seq, device=device)
        # Speech has about one letter per four frames of 20 ms.
        labels = classes() if kind == "audio-classification" else tokens(batch, -(-frames // 4))
        return {"input_values": audio, "labels": labels}

    _check_positions(config, seq)
    if kind == "speech-seq2seq":
        frames = 2 * config.max_source_positions
        features = torch.zeros(batch, config.num_mel_bins, frames, device=device)
        return {"input_features": features, "labels": tokens(batch, seq)}
    text = {"input_ids": tokens(batch, seq)}
    if kind == "sequence-classification":
        return {**text, "labels": classes()}
    if kind == "image-to-text":
        text["pixel_values"] = images(_vision(config).image_size)
    return {**text, "labels": tokens(batch, seq)}


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", config)


def _most_positions(config: Any) -> int | None:
    """Number of tokens in the table of positions; None if there is no such table."""
    if config.model_type == "whisper":
        return int(config.max_target_positions)
    if not getattr(config, "position_biased_input", True):
        return None  # DeBERTa can work without the table
    if config.model_type in _POSITIONS_IN_A_TABLE:
        return int(config.max_position_embeddings)
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return int(config.max_position_embeddings - config.pad_token_id - 1)
    return None


def _check_positions(config: Any, seq: int) -> None:
    longest = _most_positions(config)
    if longest is not None and seq > longest:
        raise BadInput(f"a {config.model_type} of this config takes {longest} tokens, not {seq}")


def _check_image(config: Any, side: int) -> None:
    vision = _vision(config)
    if config.model_type in _IMAGE_SIZE_IS_FIXED and side != vision.image_size:
        raise BadInput(
            f"a {config.model_type} of this config takes images of {vision.image_size} pixels a"
            f" side, not {side}"
        )
    if side < _SMALLEST_IMAGE:
        raise BadInput(f"images of {side} pixels a side are too small: {_SMALLEST_IMAGE} is least")


def _audio_frames(config: Any, samples: int) -> int:
    """Number of frames that the convolutions make of this many samples."""
    if not hasattr(config, "conv_kernel"):
        raise BadInput(
            f"oomph has no sample batch for the audio of a {config.model_type};"
            " give the job one of your own"
        )
    frames = samples
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        frames = (frames - kernel) // stride + 1
        if frames < 1:
            raise BadInput(f"{samples} samples of audio are too few for one frame")
    return frames
