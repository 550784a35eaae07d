"""Some of the zoo's trainings, fitted: the same numbers as untouched."""

from __future__ import annotations

import pytest

from benchmarks.exactness import EQUAL, try_case
from benchmarks.zoo import ZOO

#: Hand-written ones of different kinds, each for something that was wrong or refused once, or would
#: be if nobody looked.
HAND_WRITTEN = (
    "vqvae-with-moving-codes",
    "flow-set-by-its-first-batch",
    "gradient-penalty",
    "info-nce",
    "positive-weight-as-long-as-the-batch",
    "masked-mean-by-sums",
    "mask-made-in-the-loss",
    "dice-and-cross-entropy",
    "focal-by-positives",
    "smooth-over-valid-neighbours",
    "batch-statistics-by-hand",
    "spectral-norm",
    "mixup-in-the-model",
    "counters-in-forward",
    "lstm-time-first",
    "packed-tagger",
    "ctc-by-frames",
    "list-of-sequences",
    "fake-quantize-of-pytorch",
    "slopes-of-each-sample",
)


#: Of libraries, one of each kind that was refused or wrong once, and of the commonest.
OF_LIBRARIES = (
    "llama-unpadded",
    "llama4",
    "mixtral-router-loss",
    "gpt-oss",
    "switch",
    "deberta-masked",
    "bert-pretraining",
    "tapas-cells",
    "t5",
    "wav2vec2-ctc",
    "whisper",
    "time-series-transformer",
    "patchtst-nll",
    "clip",
    "llava",
    "qwen2-5-vl",
    "detr",
    "lora",
    "vq-model",
)


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_so_does_that_of_a_librarys_model(name: str) -> None:
    entry = ZOO[name]
    pytest.importorskip(entry.library)
    result = try_case(entry, 0.4, "cpu", "exact")
    assert result.status == EQUAL, result.detail


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_fitted_training_gives_the_numbers_of_the_untouched_one(name: str) -> None:
    result = try_case(ZOO[name], 0.45, "cpu", "exact")
    assert result.status == EQUAL, result.detail
