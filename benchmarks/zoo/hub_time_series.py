"""Models of transformers that foretell series of numbers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import batches as made
from benchmarks.zoo.hub import hub

#: Numbers that are foretold, those that are seen, and those before that lags reach.
AHEAD, SEEN, BEFORE = 6, 12, 3


def with_features() -> list[dict[str, Any]]:
    """Series with some values missing, features of each moment, and what followed."""
    batches = []
    for size, _, stream in made.shapes():
        past = SEEN + BEFORE
        seen = torch.rand(size, past, generator=stream) > 0.1
        batches.append(
            {
                "past_values": torch.rand(size, past, generator=stream) * 5,
                "past_time_features": torch.randn(size, past, 2, generator=stream),
                "past_observed_mask": seen,
                "static_categorical_features": torch.randint(4, (size, 1), generator=stream),
                "static_real_features": torch.randn(size, 1, generator=stream),
                "future_values": torch.rand(size, AHEAD, generator=stream) * 5,
                "future_time_features": torch.randn(size, AHEAD, 2, generator=stream),
            }
        )
    return batches


def of_channels(target: str, *, classes: bool = False) -> list[dict[str, Any]]:
    """Series of two channels, and what is to be told from them."""
    batches = []
    for size, _, stream in made.shapes():
        batch: dict[str, Any] = {"past_values": torch.randn(size, 24, 2, generator=stream)}
        if classes:
            batch[target] = torch.randint(5, (size,), generator=stream)
        elif target:
            batch[target] = torch.randn(size, AHEAD, 2, generator=stream)
        batches.append(batch)
    return batches


_SERIES: dict[str, Any] = {
    "prediction_length": AHEAD,
    "context_length": SEEN,
    "lags_sequence": [1, 2, 3],
    "scaling": "mean",
    "num_time_features": 2,
    "num_static_categorical_features": 1,
    "num_static_real_features": 1,
    "cardinality": [4],
    "embedding_dimension": [2],
    "d_model": 16,
    "feature_size": 10,
}
_PATCHES: dict[str, Any] = {
    "num_input_channels": 2,
    "context_length": 24,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": AHEAD,
}
for kind, head in (
    ("time_series_transformer", "TimeSeriesTransformerForPrediction"),
    ("informer", "InformerForPrediction"),
    ("autoformer", "AutoformerForPrediction"),
):
    draws = kind == "informer"
    hub(kind.replace("_", "-"), kind, head, with_features, draws=draws, **_SERIES)
hub(
    "time-series-normal",
    "time_series_transformer",
    "TimeSeriesTransformerForPrediction",
    with_features,
    **{**_SERIES, "scaling": "std"},
    distribution_output="normal",
)
hub(
    "patchtst",
    "patchtst",
    "PatchTSTForPrediction",
    lambda: of_channels("future_values"),
    **_PATCHES,
)
hub(
    "patchtst-nll",
    "patchtst",
    "PatchTSTForPrediction",
    lambda: of_channels("future_values"),
    **_PATCHES,
    loss_="nll",
)
hub(
    "patchtst-classes",
    "patchtst",
    "PatchTSTForClassification",
    lambda: of_channels("target_values", classes=True),
    **_PATCHES,
    num_targets=5,
)
hub(
    "patchtst-pretraining",
    "patchtst",
    "PatchTSTForPretraining",
    lambda: of_channels(""),
    draws=True,
    **_PATCHES,
)
