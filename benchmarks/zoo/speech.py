"""Speech and sound, as people write it by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, training

BANDS, LETTERS = 20, 12


def _spoken(drawn: Drawn) -> dict[str, Tensor]:
    """Spectrograms, padded, with what is said."""
    said = drawn.whole(LETTERS, drawn.size, 4, least=1)
    return {
        "features": drawn.normal(drawn.size, drawn.length, BANDS),
        "mask": drawn.mask(),
        "letters": said,
        "letter_lengths": torch.tensor([4 - at % 3 for at in range(drawn.size)]),
    }


class Recognizer(nn.Module):
    """Convolutions that halve the time, residual blocks, and letters."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(BANDS, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(4)])
        self.head = nn.Linear(width, LETTERS)

    def forward(self, features: Tensor) -> Any:
        """Scores of letters for every second step."""
        x = F.gelu(self.subsample(features.transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _ctc(reduction: str, zero_infinity: bool) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        scores = model(batch["features"]).log_softmax(-1).transpose(0, 1)
        lengths = (batch["mask"].sum(1) + 1) // 2
        return F.ctc_loss(
            scores,
            batch["letters"],
            lengths,
            batch["letter_lengths"],
            reduction=reduction,
            zero_infinity=zero_infinity,
        )

    return loss


@entry()
def ctc_mean() -> Training:
    """Lengths are computed from masks; the loss is PyTorch's mean of means."""
    return training(Recognizer(), _ctc("mean", False), each(_spoken), "adam")


@entry()
def ctc_sum_zero_infinity() -> Training:
    """A sum, in which impossible sentences count nothing."""
    summed = _ctc("sum", True)
    return training(Recognizer(), lambda model, b: summed(model, b) / 500, each(_spoken))


@entry()
def ctc_by_frames() -> Training:
    """A sum over sentences, divided by the frames of the batch."""
    summed = _ctc("sum", True)

    def loss(model: Any, batch: Any) -> Any:
        return summed(model, batch) / batch["mask"].sum()

    return training(Recognizer(), loss, each(_spoken))


@entry()
def ctc_with_joined_targets() -> Training:
    """Targets of all sentences behind each other, as a collate function of warp-ctc makes them."""

    def joined(drawn: Drawn) -> tuple[Tensor, ...]:
        batch = _spoken(drawn)
        counts = batch["letter_lengths"]
        flat = torch.cat([row[:n] for row, n in zip(batch["letters"], counts, strict=True)])
        return batch["features"], flat, (drawn.lengths() + 1) // 2, counts

    def loss(model: Any, batch: Any) -> Any:
        features, flat, lengths, counts = batch
        scores = model(features).permute(1, 0, 2).log_softmax(2)
        return nn.CTCLoss(blank=0, zero_infinity=True)(scores, flat, lengths, counts)

    return training(Recognizer(), loss, each(joined))


class DeepSpeech(nn.Module):
    """Recurrent layers over time, sequence first."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, (5, 3), stride=(2, 1), padding=(2, 1))
        self.layers = nn.ModuleList(
            [
                nn.GRU(4 * BANDS // 2 if at == 0 else width, width, bidirectional=True)
                for at in range(3)
            ]
        )
        self.out = nn.Linear(width, LETTERS)

    def forward(self, x: Tensor) -> Any:
        """(B, T, F) → (T, B, letters), with both directions summed."""
        x = F.hardtanh(self.conv(x.transpose(1, 2).unsqueeze(1)), 0, 20)
        b, c, f, t = x.size()
        x = x.view(b, c * f, t).transpose(1, 2).transpose(0, 1).contiguous()
        for layer in self.layers:
            x, _ = layer(x)
            x = x.view(x.size(0), x.size(1), 2, -1).sum(2)
        return self.out(x)


@entry()
def deep_speech() -> Training:
    """Recurrent layers with the sequence first, and a sum over sentences by their number."""

    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["features"])
        scores = out.float().log_softmax(2)
        lengths = batch["mask"].sum(1).int()
        total = F.ctc_loss(
            scores, batch["letters"], lengths, batch["letter_lengths"], reduction="sum"
        )
        return total / out.size(1)

    return training(DeepSpeech(), loss, each(_spoken))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, residuals and skips."""

    def __init__(self, width: int = 24, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.filters = nn.ModuleList()
        self.gates = nn.ModuleList()
        self.outs = nn.ModuleList()
        for at in range(layers):
            self.filters.append(nn.Conv1d(width, width, 2, dilation=2 ** (at % 3)))
            self.gates.append(nn.Conv1d(width, width, 2, dilation=2 ** (at % 3)))
            self.outs.append(nn.Conv1d(width, 2 * width, 1))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 64, 1))

    def forward(self, x: Tensor) -> Any:
        """Scores of the next sample of sound."""
        x = self.embed(x).transpose(1, 2)
        skips = 0
        for filter_, gate, out in zip(self.filters, self.gates, self.outs, strict=True):
            assert isinstance(filter_, nn.Conv1d)
            padded = F.pad(x, (filter_.dilation[0], 0))
            residual, skip = out(torch.tanh(filter_(padded)) * gate(padded).sigmoid()).chunk(2, 1)
            x = x + residual
            skips = skips + skip
        return self.head(skips)


@entry()
def wavenet() -> Training:
    """The next of 64 levels of sound."""

    def loss(model: Any, wave: Any) -> Any:
        return F.cross_entropy(model(wave[:, :-1]), wave[:, 1:])

    return training(WaveNet(), loss, each(lambda d: d.whole(64, d.size, 4 * d.length)), "adam")


class Synthesizer(nn.Module):
    """Text to spectrograms; how long each letter lasts is learned beside it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width, padding_idx=0)
        self.encoder = nn.ModuleList([Residual(width) for _ in range(3)])
        self.duration = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.decoder = nn.ModuleList([Residual(width) for _ in range(3)])
        self.to_mel = nn.Linear(width, BANDS)

    def forward(self, letters: Tensor, durations: Tensor) -> Any:
        """The spectrogram, and the logarithms of durations."""
        x = self.embed(letters)
        for block in self.encoder:
            x = block(x)
        log_durations = self.duration(x.detach()).squeeze(-1)
        frames = int(durations.sum(1).max())
        expanded = x.new_zeros(x.size(0), frames, x.size(2))
        for row, (sample, times) in enumerate(zip(x, durations, strict=True)):
            long = torch.repeat_interleave(sample, times, dim=0)
            expanded[row, : long.size(0)] = long
        for block in self.decoder:
            expanded = block(expanded)
        return self.to_mel(expanded), log_durations


@entry()
def length_regulator() -> Training:
    """Durations of letters repeat their states: shapes depend on numbers of the batch."""

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        durations = drawn.whole(4, drawn.size, drawn.length, least=1) * drawn.mask()
        frames = int(durations.sum(1).max())
        return {
            "letters": drawn.whole(30, drawn.size, drawn.length, least=1) * drawn.mask(),
            "durations": durations,
            "mel": drawn.normal(drawn.size, frames, BANDS),
        }

    def loss(model: Any, batch: Any) -> Any:
        mel, log_durations = model(batch["letters"], batch["durations"])
        mask = batch["letters"] != 0
        wanted = torch.log(batch["durations"].float() + 1)
        of_durations = ((log_durations - wanted) ** 2).masked_select(mask).mean()
        return F.l1_loss(mel, batch["mel"]) + 0.1 * of_durations

    return training(Synthesizer(), loss, each(batch), "adam")


class Spotter(nn.Module):
    """Words in sound: a spectrogram in the model, convolutions over it."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.convs = nn.ModuleList(
            [nn.Conv2d(1 if at == 0 else 16, 16, 3, padding=1) for at in range(4)]
        )
        self.out = nn.Linear(16, 8)

    def forward(self, wave: Tensor) -> Any:
        """Scores of words."""
        spectrum = torch.stft(wave, 64, 16, window=self.window, return_complex=True).abs()
        x = torch.log(spectrum + 1e-6).unsqueeze(1)
        x = (x - x.mean((1, 2, 3), keepdim=True)) / (x.std((1, 2, 3), keepdim=True) + 1e-5)
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.out(x.mean((2, 3)))


@entry()
def keyword_spotting() -> Training:
    """A short-time Fourier transform in the model, and each sound by its own mean."""
    return training(
        Spotter(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        each(lambda d: (d.normal(d.size, 24 * d.length), d.whole(8, d.size))),
    )


@entry()
def source_separation_by_permutation() -> Training:
    """Two voices, of which any may come first: the better order for each sample."""
    model = nn.Sequential(
        nn.Conv1d(1, 32, 8, stride=4), *[nn.Conv1d(32, 32, 3, padding=1) for _ in range(4)]
    )
    model.append(nn.ConvTranspose1d(32, 2, 8, stride=4))

    def fit(one: Tensor, other: Tensor) -> Any:
        scale = (one * other).sum(-1, keepdim=True) / (other.pow(2).sum(-1, keepdim=True) + 1e-8)
        target = scale * other
        noise = one - target
        return 10 * torch.log10(target.pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8) + 1e-8)

    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["mixed"])
        a, b = out.unbind(1)
        one, other = batch["voices"].unbind(1)
        straight = fit(a, one) + fit(b, other)
        crossed = fit(a, other) + fit(b, one)
        return -torch.maximum(straight, crossed).mean() / 2

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        voices = drawn.normal(drawn.size, 2, 16 * drawn.length)
        return {"voices": voices, "mixed": voices.sum(1, keepdim=True)}

    return training(model, loss, each(batch))
