"""Every module of torch.nn is rehearsed to the byte that a real run on the CPU takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_truth import measure, predict
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oomph.errors import CannotRehearse
from oomph.jobs.job import Job
from oomph.rehearsal.phases import rehearse

ALL = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module)
}

#: Classes that are no layer by themselves, and why.
NOT_LAYERS = {
    "Module": "the base class; it has no forward",
    "Container": "the base class under its old name",
    "ModuleList": "holds modules; it has no forward",
    "ModuleDict": "holds modules; it has no forward",
    "ParameterList": "holds parameters; it has no forward",
    "ParameterDict": "holds parameters; it has no forward",
    "RNNBase": "the base class of RNN, LSTM and GRU",
    "RNNCellBase": "the base class of the cells",
}

Make = Callable[[], nn.Module]
Inputs = Callable[[], tuple[Tensor, ...]]


def floats(*shapes: tuple[int, ...]) -> Inputs:
    return lambda: tuple(torch.rand(shape) for shape in shapes)


def labels(shape: tuple[int, ...], of: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) % of


ROWS, LINE, IMAGE = floats((6, 10)), floats((2, 4, 12)), floats((2, 4, 8, 8))
VOLUME = floats((2, 4, 6, 6, 6))
BY_DIMENSION = {1: LINE, 2: IMAGE, 3: VOLUME}
SEQUENCE = floats((5, 3, 8))


def unpool(dimension: int) -> Inputs:
    def inputs() -> tuple[Tensor, ...]:
        (x,) = BY_DIMENSION[dimension]()
        return getattr(nn, f"MaxPool{dimension}d")(2, return_indices=True)(x)

    return inputs


class Recipes(dict[str, tuple[Make, Inputs]]):
    """How to make each module, and what to feed it."""

    def add(self, name: str, inputs: Inputs, *args: Any, **kwargs: Any) -> None:
        self[name] = (lambda: ALL[name](*args, **kwargs), inputs)


RECIPES = Recipes()
for name in (
    *("CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Mish"),
    *("LeakyReLU", "LogSigmoid", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid"),
    *("Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink"),
    *("AlphaDropout", "Dropout", "Flatten", "Identity"),
):
    RECIPES.add(name, ROWS)
for name in ("Softmax", "LogSoftmax", "Softmin"):
    RECIPES.add(name, ROWS, dim=1)
RECIPES.add("Threshold", ROWS, 0.5, 0.0)
RECIPES.add("Softmax2d", IMAGE)
RECIPES.add("FeatureAlphaDropout", IMAGE)
for d, inputs in BY_DIMENSION.items():
    RECIPES.add(f"Dropout{d}d", inputs)
    RECIPES.add(f"AdaptiveAvgPool{d}d", inputs, 3)
    RECIPES.add(f"AdaptiveMaxPool{d}d", inputs, 3)
    RECIPES.add(f"AvgPool{d}d", inputs, 2)
    RECIPES.add(f"MaxPool{d}d", inputs, 2)
    RECIPES.add(f"MaxUnpool{d}d", unpool(d), 2)
    RECIPES.add(f"LPPool{d}d", inputs, 2, 2)
    RECIPES.add(f"BatchNorm{d}d", inputs, 4)
    RECIPES.add(f"InstanceNorm{d}d", inputs, 4, affine=True)
    RECIPES.add(f"Conv{d}d", inputs, 4, 6, 3)
    RECIPES.add(f"ConvTranspose{d}d", inputs, 4, 6, 3)
    for kind in ("Circular", "Reflection", "Replication", "Zero"):
        RECIPES.add(f"{kind}Pad{d}d", inputs, 2)
    RECIPES.add(f"ConstantPad{d}d", inputs, 2, 0.5)
    RECIPES.add(f"LazyBatchNorm{d}d", inputs)
    RECIPES.add(f"LazyInstanceNorm{d}d", inputs, affine=True)
    RECIPES.add(f"LazyConv{d}d", inputs, 6, 3)
    RECIPES.add(f"LazyConvTranspose{d}d", inputs, 6, 3)
RECIPES.add("FractionalMaxPool2d", IMAGE, 2, output_size=4)
RECIPES.add("FractionalMaxPool3d", VOLUME, 2, output_size=3)
RECIPES.add("SyncBatchNorm", IMAGE, 4)
RECIPES.add("GroupNorm", IMAGE, 2, 4)
RECIPES.add("LayerNorm", ROWS, 10)
RECIPES.add("RMSNorm", ROWS, 10)
RECIPES.add("LocalResponseNorm", IMAGE, 2)
RECIPES.add("CrossMapLRN2d", IMAGE, 2)
RECIPES.add("ChannelShuffle", IMAGE, 2)
RECIPES.add("PixelShuffle", IMAGE, 2)
RECIPES.add("PixelUnshuffle", IMAGE, 2)
RECIPES.add("Unfold", IMAGE, 3)
RECIPES.add("Fold", floats((2, 12, 9)), (4, 4), (2, 2))
RECIPES.add("Unflatten", ROWS, 1, (2, 5))
RECIPES.add("Upsample", IMAGE, scale_factor=2)
RECIPES.add("UpsamplingBilinear2d", IMAGE, scale_factor=2)
RECIPES.add("UpsamplingNearest2d", IMAGE, scale_factor=2)
RECIPES.add("Linear", ROWS, 10, 7)
RECIPES.add("LazyLinear", ROWS, 7)
RECIPES.add("Bilinear", floats((6, 5), (6, 4)), 5, 4, 3)
RECIPES.add("Embedding", lambda: (labels((6, 5), of=11),), 11, 7)
RECIPES.add("EmbeddingBag", lambda: (labels((6, 5), of=11),), 11, 7)
RECIPES.add("CosineSimilarity", floats((6, 10), (6, 10)))
RECIPES.add("PairwiseDistance", floats((6, 10), (6, 10)))
for name in ("RNN", "LSTM", "GRU"):
    RECIPES.add(name, SEQUENCE, 8, 7, num_layers=2)
    RECIPES.add(f"{name}Cell", ROWS, 10, 7)
RECIPES.add("MultiheadAttention", floats((5, 3, 8), (5, 3, 8), (5, 3, 8)), 8, 2)
RECIPES.add("TransformerEncoderLayer", SEQUENCE, 8, 2, 16)
RECIPES.add("TransformerDecoderLayer", floats((5, 3, 8), (4, 3, 8)), 8, 2, 16)
RECIPES.add("Transformer", floats((5, 3, 8), (4, 3, 8)), 8, 2, 1, 2, 16)
RECIPES["TransformerEncoder"] = (
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
    SEQUENCE,
)
RECIPES["TransformerDecoder"] = (
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
    floats((5, 3, 8), (4, 3, 8)),
)
RECIPES["Sequential"] = (lambda: nn.Sequential(nn.Linear(10, 7), nn.ReLU()), ROWS)
RECIPES["DataParallel"] = (lambda: nn.DataParallel(nn.Linear(10, 7)), ROWS)

# Losses: predictions and targets.
for name in ("BCELoss", "BCEWithLogitsLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss"):
    RECIPES.add(name, floats((6, 10), (6, 10)))
RECIPES.add("SmoothL1Loss", floats((6, 10), (6, 10)))
RECIPES.add("PoissonNLLLoss", floats((6, 10), (6, 10)))
RECIPES.add("GaussianNLLLoss", lambda: tuple(torch.rand(6, 10) + 0.1 for _ in range(3)))
RECIPES.add("SoftMarginLoss", lambda: (torch.rand(6, 10), torch.ones(6, 10, dtype=torch.int64)))
RECIPES.add("HingeEmbeddingLoss", lambda: (torch.rand(6, 10), torch.ones(6, 10)))
RECIPES.add("MultiLabelSoftMarginLoss", lambda: (torch.rand(6, 10), torch.ones(6, 10)))
RECIPES.add("MultiLabelMarginLoss", lambda: (torch.rand(6, 10), labels((6, 10), of=10)))
RECIPES.add("MultiMarginLoss", lambda: (torch.rand(6, 10), labels((6,), of=10)))
RECIPES.add("CrossEntropyLoss", lambda: (torch.rand(6, 10), labels((6,), of=10)))
RECIPES.add("NLLLoss", lambda: (torch.rand(6, 10), labels((6,), of=10)))
RECIPES.add("NLLLoss2d", lambda: (torch.rand(2, 4, 8, 8), labels((2, 8, 8), of=4)))
RECIPES.add("CosineEmbeddingLoss", lambda: (*floats((6, 10), (6, 10))(), torch.ones(6)))
RECIPES.add("MarginRankingLoss", lambda: (*floats((6,), (6,))(), torch.ones(6)))
RECIPES.add("TripletMarginLoss", floats((6, 10), (6, 10), (6, 10)))
RECIPES.add("TripletMarginWithDistanceLoss", floats((6, 10), (6, 10), (6, 10)))
if hasattr(nn, "LinearCrossEntropyLoss"):  # new in torch 2.13
    RECIPES.add("LinearCrossEntropyLoss", lambda: (torch.rand(6, 10), labels((6,), of=17)), 10, 17)
RECIPES.add(
    "CTCLoss",
    lambda: (
        torch.rand(9, 2, 5),
        labels((2, 3), of=4) + 1,
        *(torch.tensor([n, n]) for n in (9, 3)),
    ),
    reduction="sum",
)
RECIPES.add(
    "AdaptiveLogSoftmaxWithLoss", lambda: (torch.rand(6, 10), labels((6,), of=20)), 10, 20, [5, 12]
)


#: Losses whose last input is a target; the others compare several predictions.
HAS_TARGET = {name for name in ALL if name.endswith("Loss")} - {
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
}

#: Shapes inside these hang on values: they are given a real batch, whose values are known.
READS_VALUES = {"AdaptiveLogSoftmaxWithLoss"}

#: Refused as a function that builds the model; rehearsed as a model that saw its first batch.
LAZY = {name for name in ALL if name.startswith("Lazy")}

#: Modules on the CPU that take memory beyond their tensors, and why. Their real peak is higher than
#: the rehearsal's, which counts no scratch of CPU kernels.
TAKES_MORE = {
    "oneDNN packs inputs and weights": [
        f"{lazy}Conv{transpose}{d}d"
        for lazy in ("", "Lazy")
        for transpose in ("", "Transpose")
        for d in "123"
    ],
    "statistics are summed per thread": [
        "SyncBatchNorm",
        *(
            f"{lazy}{kind}Norm{d}d"
            for lazy in ("", "Lazy")
            for kind in ("Batch", "Instance")
            for d in "123"
        ),
    ],
    "the kernel works on a copy with channels last": [
        "Upsample",
        "UpsamplingBilinear2d",
        "UpsamplingNearest2d",
    ],
    "the loss is computed per element, then reduced": [
        "BCEWithLogitsLoss",
        "HuberLoss",
        "MSELoss",
        "SmoothL1Loss",
        "SoftMarginLoss",
    ],
    "backward fills a second table of path probabilities": ["CTCLoss"],
    "masks become indices inside the kernel": ["AdaptiveLogSoftmaxWithLoss"],
    "indices are sorted into bags": ["EmbeddingBag"],
    "oneDNN reorders the weights of a recurrent layer": ["LSTM"],
    "a product of three tensors is permuted": ["Bilinear"],
    "Python's numbers become tensors of eight bytes": [
        "BCELoss",
        "CosineEmbeddingLoss",
        "GaussianNLLLoss",
        "HingeEmbeddingLoss",
        "L1Loss",
        "LPPool1d",
        "LPPool2d",
        "LPPool3d",
        "LocalResponseNorm",
        "MarginRankingLoss",
        "MultiLabelMarginLoss",
        "MultiLabelSoftMarginLoss",
        "MultiheadAttention",
    ],
}


class Scaled(nn.Module):
    """The module behind one weight, so that every floating input but targets needs a gradient."""

    def __init__(self, make: Make, targets: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.module = make()
        self.targets = targets

    def forward(self, *inputs: Any) -> Tensor:
        last = len(inputs) - self.targets
        scaled = (
            x * self.scale if _is_float(x) and at < last else x for at, x in enumerate(inputs)
        )
        outputs = tree_leaves(self.module(*scaled))
        # Squared, so that the gradient that comes back is a tensor of its own, as in real models.
        return functools.reduce(torch.add, (torch.mul(x, x).sum() for x in outputs if _is_float(x)))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def job_of(name: str) -> Job:
    make, inputs = RECIPES[name]

    def build() -> nn.Module:
        return Scaled(make, targets=int(name in HAS_TARGET))

    model: Any = build
    if name in LAZY:
        model = build()
        model(*inputs())
    batch = inputs() if name in READS_VALUES else inputs
    return Job(model, lambda model, batch: model(*batch), "sgd", batch)


def test_every_class_of_torch_nn_is_accounted_for() -> None:
    unknown = ALL.keys() - RECIPES.keys() - NOT_LAYERS.keys()
    assert not unknown, f"say how to run {sorted(unknown)}, or why they are no layers"
    assert not RECIPES.keys() & NOT_LAYERS.keys()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore")
def test_a_rehearsal_is_right_to_the_byte(name: str) -> None:
    predicted, measured = predict(job_of(name)), measure(job_of(name))
    assert predicted.alive == measured.tensors.alive
    assert predicted.peaks == measured.tensors.peaks
    if not any(name in names for names in TAKES_MORE.values()):
        assert predicted == measured.all
    for stretch, peak in predicted.peaks.items():
        assert peak <= measured.all.peaks[stretch], stretch


@pytest.mark.parametrize("name", sorted(LAZY))
def test_a_lazy_module_in_a_builder_is_refused_by_name(name: str) -> None:
    make, inputs = RECIPES[name]
    job = Job(make, lambda model, batch: model(*batch).sum(), "sgd", inputs)
    with pytest.raises(CannotRehearse, match=f"{name}.*run one batch through"):
        rehearse(job, None)


def test_a_lazy_model_that_saw_no_batch_is_refused_by_name() -> None:
    job = Job(nn.LazyLinear(3), lambda model, batch: model(*batch).sum(), "sgd", ROWS)
    with pytest.raises(CannotRehearse, match="LazyLinear"):
        rehearse(job, None)


def test_shapes_that_hang_on_unknown_values_are_refused_by_op() -> None:
    make, _ = RECIPES["AdaptiveLogSoftmaxWithLoss"]
    job = Job(
        make,
        lambda model, batch: model(*batch).loss,
        "sgd",
        lambda: (torch.rand(6, 10), torch.rand(6).mul(20).long()),
    )
    with pytest.raises(CannotRehearse, match=r"index at .*only real data can tell"):
        rehearse(job, None)


def test_a_sparse_gradient_is_refused() -> None:
    job = Job(
        lambda: nn.Embedding(11, 7, sparse=True),
        lambda model, batch: model(batch).sum(),
        "sgd",
        lambda: labels((6, 5), of=11),
    )
    with pytest.raises(CannotRehearse, match="makes a sparse tensor"):
        rehearse(job, None)
