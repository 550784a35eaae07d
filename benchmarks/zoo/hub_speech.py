"""Models of transformers that hear or speak."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub

_classes = partial(made.sounds, labels="class")
#: Two convolutions over the wave, and few groups of positions.
_WAVES: dict[str, Any] = {
    "conv_dim": (8,) * 2,
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 20,
}


def spectra(bins: int = 16, frames: int = 64, *, labels: str = "tokens") -> list[dict[str, Any]]:
    """Spectra of one length, with what is said."""
    batches = []
    for size, length, stream in made.shapes():
        said = torch.randint(5, made.VOCABULARY, (size, length // 2), generator=stream)
        said[size // 2 :, -2:] = -100
        if labels == "class":
            said = torch.randint(5, (size,), generator=stream)
        features = torch.randn(size, bins, frames, generator=stream)
        batches.append({"input_features": features, "labels": said})
    return batches


def frames(bins: int = 16, *, labels: str = "tokens") -> list[dict[str, Any]]:
    """Padded frames, each a spectrum, with what is said."""
    batches = []
    for at, (size, length, stream) in enumerate(made.shapes()):
        long = length * 4
        mask = torch.ones(size, long, dtype=torch.long)
        for row in range(1, size if at else 0):
            mask[row, long - 4 * row :] = 0
        features = torch.randn(size, long, bins, generator=stream)
        said = torch.randint(1, 20, (size, 4), generator=stream)
        said[size // 2 :, 2:] = -100
        batches.append({"input_features": features, "attention_mask": mask, "labels": said})
    return batches


def spoken_texts() -> list[dict[str, Any]]:
    """Texts and the spectra of their speech."""
    batches = []
    for batch, (size, length, stream) in zip(made.texts(""), made.shapes(), strict=True):
        speech = torch.randn(size, length * 2, 16, generator=stream)
        speaker = torch.randn(size, 8, generator=stream)
        batches.append({**batch, "labels": speech, "speaker_embeddings": speaker})
    return batches


def hidden_waves() -> list[dict[str, Any]]:
    """Waves, which of their frames are hidden, and others to tell each from."""
    batches = []
    for size, _, stream in made.shapes():
        waves = torch.randn(size, 1600, generator=stream)
        hidden = torch.rand(size, 78, generator=stream) < 0.3
        others = torch.randint(78, (size, 78, 4), generator=stream)
        others += 78 * torch.arange(size)[:, None, None]
        batches.append(
            {"input_values": waves, "mask_time_indices": hidden, "sampled_negative_indices": others}
        )
    return batches


def whole_waves() -> list[dict[str, Any]]:
    """Waves with one channel."""
    return [
        {"input_values": torch.randn(size, 1, 16 * length, generator=stream)}
        for size, length, stream in made.shapes()
    ]


def reconstruction(model: nn.Module, batch: Any) -> Tensor:
    """How far what was decoded is from what was encoded."""
    waves = batch["input_values"]
    made_again: Tensor = model(waves).audio_values
    made_again = made_again.reshape(len(waves), 1, -1)[..., : waves.shape[-1]]
    off: Tensor = (made_again - waves[..., : made_again.shape[-1]]).abs().mean()
    return off


def with_codes(model: nn.Module, batch: Any) -> Tensor:
    """The same, and how far codes are from what they stand for."""
    out = model(batch["input_values"])
    waves = batch["input_values"][:, 0, : out.audio_values.shape[-1]]
    off: Tensor = (out.audio_values[:, : waves.shape[-1]] - waves).abs().mean()
    codes: Tensor = out.loss.mean()
    return off + codes


hub("wav2vec2-ctc", "wav2vec2", "Wav2Vec2ForCTC", made.sounds, **_WAVES)
hub(
    "wav2vec2-ctc-mean",
    "wav2vec2",
    "Wav2Vec2ForCTC",
    made.sounds,
    **_WAVES,
    ctc_loss_reduction="mean",
    ctc_zero_infinity=True,
)
hub(
    "wav2vec2-classes",
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    _classes,
    **_WAVES,
    classifier_proj_size=16,
)
hub(
    "wav2vec2-pretraining",
    "wav2vec2",
    "Wav2Vec2ForPreTraining",
    hidden_waves,
    draws=True,
    **_WAVES,
    codevector_dim=16,
    proj_codevector_dim=16,
    num_codevectors_per_group=8,
    mask_time_prob=0.05,
)
hub(
    "wav2vec2-conformer-ctc", "wav2vec2-conformer", "Wav2Vec2ConformerForCTC", made.sounds, **_WAVES
)
hub("hubert-ctc", "hubert", "HubertForCTC", made.sounds, **_WAVES)
hub(
    "data2vec-audio-ctc",
    "data2vec-audio",
    "Data2VecAudioForCTC",
    made.sounds,
    **{**_WAVES, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
)
hub("wavlm-ctc", "wavlm", "WavLMForCTC", made.sounds, **_WAVES, num_ctc_classes=20)
hub(
    "unispeech-sat-classes",
    "unispeech-sat",
    "UniSpeechSatForSequenceClassification",
    _classes,
    **_WAVES,
    classifier_proj_size=16,
)
hub("sew-ctc", "sew", "SEWForCTC", made.sounds, **_WAVES, squeeze_factor=2)
hub("sew-d-ctc", "sew-d", "SEWDForCTC", made.sounds, **_WAVES, squeeze_factor=2)
hub(
    "wav2vec2-bert-ctc",
    "wav2vec2-bert",
    "Wav2Vec2BertForCTC",
    frames,
    feature_projection_input_dim=16,
    vocab_size=20,
    conv_depthwise_kernel_size=5,
)
hub(
    "parakeet-ctc",
    "parakeet_ctc",
    "ParakeetForCTC",
    lambda: frames(),
    vocab_size=20,
    encoder_config__num_mel_bins=16,
    encoder_config__subsampling_conv_channels=8,
    encoder_config__intermediate_size=64,
)
hub(
    "whisper",
    "whisper",
    "WhisperForConditionalGeneration",
    spectra,
    num_mel_bins=16,
    max_source_positions=32,
    max_target_positions=32,
)
hub(
    "whisper-classes",
    "whisper",
    "WhisperForAudioClassification",
    partial(spectra, labels="class"),
    num_mel_bins=16,
    max_source_positions=32,
    classifier_proj_size=16,
)
hub(
    "moonshine",
    "moonshine",
    "MoonshineForConditionalGeneration",
    lambda: _said_waves(),
    pad_token_id=0,
    encoder_num_attention_heads=4,
    decoder_num_attention_heads=4,
    encoder_num_key_value_heads=4,
    decoder_num_key_value_heads=4,
)
hub(
    "speech-to-text",
    "speech_to_text",
    "Speech2TextForConditionalGeneration",
    lambda: _text_frames(),
    input_feat_per_channel=16,
    conv_channels=16,
    max_source_positions=256,
    max_target_positions=64,
)
hub(
    "ast-classes",
    "audio-spectrogram-transformer",
    "ASTForAudioClassification",
    lambda: _spectrograms(),
    num_mel_bins=16,
    max_length=32,
    patch_size=8,
    frequency_stride=8,
    time_stride=8,
)
hub(
    "speecht5-speaks",
    "speecht5",
    "SpeechT5ForTextToSpeech",
    spoken_texts,
    draws=True,
    num_mel_bins=16,
    speaker_embedding_dim=8,
    speech_decoder_prenet_units=16,
    speech_decoder_postnet_units=16,
    speech_decoder_prenet_dropout=0.0,
)
hub("speecht5-hears", "speecht5", "SpeechT5ForSpeechToText", lambda: _said_waves(), **_WAVES)
hub(
    "encodec",
    "encodec",
    "EncodecModel",
    whole_waves,
    reconstruction,
    num_filters=4,
    upsampling_ratios=[4, 2],
    hidden_size=16,
    codebook_size=16,
    codebook_dim=16,
    num_lstm_layers=1,
)
hub(
    "dac",
    "dac",
    "DacModel",
    whole_waves,
    with_codes,
    encoder_hidden_size=8,
    downsampling_ratios=[2, 4],
    decoder_hidden_size=32,
    upsampling_ratios=[4, 2],
    n_codebooks=2,
    codebook_size=16,
    codebook_dim=4,
    hidden_size=32,
)
hub(
    "musicgen-decoder",
    "musicgen_decoder",
    "MusicgenForCausalLM",
    lambda: _codes(),
    num_codebooks=2,
    vocab_size=95,
    audio_channels=1,
)


def _said_waves() -> list[dict[str, Any]]:
    batches = made.sounds(6400)
    for (size, _, stream), batch in zip(made.shapes(), batches, strict=True):
        said = torch.randint(5, 20, (size, 6), generator=stream)
        said[size // 2 :, -2:] = -100
        batch["labels"] = said
    return batches


def _text_frames() -> list[dict[str, Any]]:
    batches = frames()
    for (size, _, stream), batch in zip(made.shapes(), batches, strict=True):
        said = torch.randint(5, made.VOCABULARY, (size, 6), generator=stream)
        said[size // 2 :, -2:] = -100
        batch["labels"] = said
    return batches


def _spectrograms() -> list[dict[str, Any]]:
    return [
        {
            "input_values": torch.randn(size, 32, 16, generator=stream),
            "labels": torch.randint(5, (size,), generator=stream),
        }
        for size, _, stream in made.shapes()
    ]


def _codes() -> list[dict[str, Any]]:
    batches = []
    for size, length, stream in made.shapes():
        codes = torch.randint(90, (size * 2, length), generator=stream)
        labels = torch.randint(90, (size, length, 2), generator=stream)
        batches.append({"input_ids": codes.view(size * 2, length), "labels": labels})
    return batches
