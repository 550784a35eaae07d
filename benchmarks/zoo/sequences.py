"""Recurrent nets and other models of sequences, with the batch where their authors like it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, training

WORDS, WIDTH = 60, 32


def _labelled(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Times first: (T, B, F), and a class for each sequence."""
    return drawn.normal(drawn.length, drawn.size, 16), drawn.whole(5, drawn.size)


def _words(drawn: Drawn) -> dict[str, Tensor]:
    mask = drawn.mask()
    words = drawn.whole(WORDS, drawn.size, drawn.length, least=2)
    return {
        "words": words * mask,
        "lengths": drawn.lengths(),
        "mask": mask,
        "tags": drawn.whole(6, drawn.size, drawn.length).masked_fill(~mask, -1),
        "label": drawn.whole(3, drawn.size),
    }


class TimeFirst(nn.Module):
    """An LSTM as PyTorch has it by default, and the last step's state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, WIDTH, num_layers=3)
        self.fc = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Any:
        """(T, B, F) → (B, classes)."""
        h0 = torch.zeros(3, x.size(1), WIDTH).to(x.device)
        c0 = torch.zeros(3, x.size(1), WIDTH).to(x.device)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[-1, :, :])


@entry()
def lstm_time_first() -> Training:
    """Batches whose first dimension is time, as long as some batches are large."""
    return training(TimeFirst(), nn.CrossEntropyLoss(), each(_labelled))


@entry()
def lstm_time_first_as_long_as_the_batch() -> Training:
    """As many steps as samples: (6, 6, 16)."""

    def square(drawn: Drawn) -> tuple[Tensor, Tensor]:
        return drawn.normal(drawn.size, drawn.size, 16), drawn.whole(5, drawn.size)

    return training(TimeFirst(), nn.CrossEntropyLoss(), each(square, 4))


class Tagger(nn.Module):
    """Packed sequences through a bidirectional LSTM; scores of tags for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)
        self.blocks = nn.ModuleList([Residual(WIDTH) for _ in range(3)])
        self.emissions = nn.Linear(WIDTH, 6)

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        """(B, T) → (B, T, tags)."""
        packed = pack_padded_sequence(self.embed(words), lengths.cpu(), batch_first=True)
        x, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=words.size(1)
        )
        for block in self.blocks:
            x = block(x)
        return self.emissions(x)


@entry()
def packed_tagger() -> Training:
    """A loss over packed sequences, in which padding is ignored."""

    def loss(model: Any, batch: Any) -> Any:
        scores = model(batch["words"], batch["lengths"])
        return F.cross_entropy(scores.view(-1, 6), batch["tags"].view(-1), ignore_index=-1)

    return training(Tagger(), loss, each(_words), "adam")


class PlainTagger(Tagger):
    """The same without packing."""

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        """(B, T) → (B, T, tags)."""
        x, _ = self.lstm(self.embed(words))
        for block in self.blocks:
            x = block(x)
        return self.emissions(x)


class CRF(nn.Module):
    """A conditional random field, with a loop over time as in everybody's own."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(tags) * 0.1)
        self.end = nn.Parameter(torch.randn(tags) * 0.1)
        self.transitions = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Any:
        """The likelihood of each sequence of tags."""
        emissions, tags, mask = (one.transpose(0, 1) for one in (emissions, tags, mask))
        return self._score(emissions, tags, mask) - self._partition(emissions, mask)

    def _score(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Any:
        steps, size = tags.shape
        weight = mask.float()
        score = self.start[tags[0]]
        score += emissions[0, torch.arange(size), tags[0]]
        for t in range(1, steps):
            score += self.transitions[tags[t - 1], tags[t]] * weight[t]
            score += emissions[t, torch.arange(size), tags[t]] * weight[t]
        last = mask.long().sum(0) - 1
        return score + self.end[tags[last, torch.arange(size)]]

    def _partition(self, emissions: Tensor, mask: Tensor) -> Any:
        score = self.start + emissions[0]
        for t in range(1, emissions.size(0)):
            following = score.unsqueeze(2) + self.transitions + emissions[t].unsqueeze(1)
            score = torch.where(mask[t].unsqueeze(1), following.logsumexp(1), score)
        return torch.logsumexp(score + self.end, 1)


class TaggerWithCRF(nn.Module):
    """A tagger, and a random field over its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.tagger = PlainTagger()
        self.crf = CRF(6)


def _crf(reduction: str) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        emissions = model.tagger(batch["words"], batch["lengths"])
        likelihood = model.crf(emissions, batch["tags"].clamp(min=0), batch["mask"])
        if reduction == "sum":
            return -likelihood.sum() / 10
        if reduction == "mean":
            return -likelihood.mean()
        return -likelihood.sum() / batch["mask"].float().sum()

    return loss


@entry()
def crf_sum() -> Training:
    """The likelihood of all sequences."""
    return training(TaggerWithCRF(), _crf("sum"), each(_words))


@entry()
def crf_mean() -> Training:
    """The mean likelihood of sequences."""
    return training(TaggerWithCRF(), _crf("mean"), each(_words), "adam")


@entry()
def crf_by_tokens() -> Training:
    """The likelihood of all sequences by how many words they have."""
    return training(TaggerWithCRF(), _crf("token_mean"), each(_words))


class Encoder(nn.Module):
    """A GRU over embedded words, times first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, bidirectional=True)
        self.fc = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, source: Tensor) -> Any:
        """(T, B) → all states and the last."""
        outputs, hidden = self.rnn(self.embed(source))
        return outputs, torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)))


class Decoder(nn.Module):
    """One word after the other, with attention on the encoder's states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attn = nn.Linear(3 * WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, 1, bias=False)
        self.rnn = nn.GRU(3 * WIDTH, WIDTH)
        self.out = nn.Linear(4 * WIDTH, WORDS)

    def forward(self, word: Tensor, hidden: Tensor, states: Tensor, mask: Tensor) -> Any:
        """Scores of the next word, and the next state."""
        embedded = self.embed(word.unsqueeze(0))
        repeated = hidden.unsqueeze(1).repeat(1, states.shape[0], 1)
        permuted = states.permute(1, 0, 2)
        energy = torch.tanh(self.attn(torch.cat((repeated, permuted), dim=2)))
        attention = self.v(energy).squeeze(2).masked_fill(mask == 0, -1e10)
        weighted = torch.bmm(F.softmax(attention, dim=1).unsqueeze(1), permuted).permute(1, 0, 2)
        output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
        scores = self.out(torch.cat((output, weighted, embedded), dim=2).squeeze(0))
        return scores, hidden.squeeze(0)


class Seq2Seq(nn.Module):
    """Ben Trevett's tutorial, which is in thousands of repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, source: Tensor, target: Tensor) -> Any:
        """(T, B) of words → (T, B, words) of scores, always told the right word."""
        outputs = torch.zeros(target.shape[0], target.shape[1], WORDS, device=source.device)
        states, hidden = self.encoder(source)
        mask = (source != 0).permute(1, 0)
        word = target[0, :]
        for t in range(1, target.shape[0]):
            outputs[t], hidden = self.decoder(word, hidden, states, mask)
            word = target[t]
        return outputs


@entry()
def seq2seq_with_attention() -> Training:
    """Sources and targets with times first, and padding that is ignored."""

    def batch(drawn: Drawn) -> tuple[Tensor, Tensor]:
        source = (drawn.whole(WORDS, drawn.size, drawn.length, least=2) * drawn.mask()).t()
        target = drawn.whole(WORDS, drawn.length // 2, drawn.size, least=2)
        target[-3:, : drawn.size // 2] = 0
        return source.contiguous(), target

    def loss(model: Any, batch: Any) -> Any:
        source, target = batch
        output = model(source, target)
        return nn.CrossEntropyLoss(ignore_index=0)(output[1:].view(-1, WORDS), target[1:].view(-1))

    return training(Seq2Seq(), loss, each(batch), "adam")


class Pointer(nn.Module):
    """Points at its own input, one item after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(2, WIDTH, 2, batch_first=True)
        self.cell = nn.LSTMCell(2, WIDTH)
        self.w1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, points: Tensor, order: Tensor) -> Any:
        """Scores of where each step points, what was pointed at being masked."""
        states, (h, c) = self.encoder(points)
        h, c = h[-1], c[-1]
        rows = torch.arange(points.size(0))
        at = points.new_zeros(points.size(0), 2)
        visited = torch.zeros(points.shape[:2], dtype=torch.bool, device=points.device)
        scores = []
        for step in range(order.size(1)):
            h, c = self.cell(at, (h, c))
            score = torch.tanh(self.w1(states) + self.w2(h)[:, None]) @ self.v
            scores.append(score.masked_fill(visited, -1e4))
            visited = visited.clone()
            visited[rows, order[:, step]] = True
            at = points[rows, order[:, step]]
        return torch.stack(scores, 1)


@entry()
def pointer_network() -> Training:
    """Rows of the batch are addressed by arange."""

    def batch(drawn: Drawn) -> tuple[Tensor, Tensor]:
        points = drawn.uniform(drawn.size, drawn.length // 2, 2)
        return points, points.sum(-1).argsort(1)

    def loss(model: Any, batch: Any) -> Any:
        points, order = batch
        scores = model(points, order)
        return F.cross_entropy(scores.reshape(-1, scores.size(-1)), order.reshape(-1))

    return training(Pointer(), loss, each(batch, 2), "adam")


class Carried(nn.Module):
    """A language model that goes on from the state of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.state: Any = None

    def forward(self, words: Tensor) -> Any:
        """Scores of next words; the state stays for the next call."""
        if self.state is None or self.state[0].size(1) != words.size(0):
            self.state = None
            out, state = self.rnn(self.embed(words))
        else:
            out, state = self.rnn(self.embed(words), self.state)
        self.state = tuple(one.detach() for one in state)
        return self.head(out)


@entry()
def truncated_backpropagation() -> Training:
    """State goes from batch to batch on an attribute of the module."""

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        words = drawn.whole(WORDS, 6, drawn.length + 1)
        return {"x": words[:, :-1].contiguous(), "y": words[:, 1:].contiguous()}

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"])

    return training(Carried(), loss, each(batch), clip_norm=0.25)


class Memory(nn.Module):
    """Questions about stories: several hops over a memory of sentences."""

    def __init__(self, hops: int = 3) -> None:
        super().__init__()
        self.keys = nn.ModuleList([nn.Embedding(WORDS, WIDTH) for _ in range(hops + 1)])

    def forward(self, story: Tensor, question: Tensor) -> Any:
        """Scores of answers."""
        u = self.keys[0](question).sum(1)
        for one, other in zip(self.keys, self.keys[1:], strict=False):
            m, c = one(story).sum(2), other(story).sum(2)
            p = torch.softmax(torch.einsum("bsw,bw->bs", m, u), -1)
            u = u + torch.einsum("bs,bsw->bw", p, c)
        last: Any = self.keys[-1]
        return F.linear(u, last.weight)


@entry()
def memory_network() -> Training:
    """Neighbouring hops share their embeddings; answers are summed."""

    def batch(drawn: Drawn) -> tuple[Tensor, Tensor, Tensor]:
        return (
            drawn.whole(WORDS, drawn.size, drawn.length, 5),
            drawn.whole(WORDS, drawn.size, 4),
            drawn.whole(WORDS, drawn.size),
        )

    def loss(model: Any, batch: Any) -> Any:
        story, question, answer = batch
        return F.cross_entropy(model(story, question), answer, reduction="sum") / len(answer)

    return training(Memory(), loss, each(batch))


class TemporalBlock(nn.Module):
    """A dilated causal convolution whose end is chomped off."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.chomp = 2 * dilation
        self.conv1 = nn.utils.weight_norm(  # the old way, as in the paper's own code
            nn.Conv1d(width, width, 3, padding=self.chomp, dilation=dilation)
        )
        self.conv2 = nn.utils.weight_norm(
            nn.Conv1d(width, width, 3, padding=self.chomp, dilation=dilation)
        )

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        h = F.relu(self.conv1(x)[:, :, : -self.chomp].contiguous())
        h = F.relu(self.conv2(h)[:, :, : -self.chomp].contiguous())
        return F.relu(h + x)


@entry()
def temporal_convolutions() -> Training:
    """A TCN with weight norm; the loss is the mean error of the last step."""
    model = nn.Sequential(nn.Conv1d(2, 24, 1), *[TemporalBlock(24, 2**at) for at in range(4)])

    def loss(model: Any, batch: Any) -> Any:
        x, y = batch
        return F.mse_loss(model(x)[:, :, -1].mean(1), y)

    return training(
        model, loss, each(lambda d: (d.normal(d.size, 2, 2 * d.length), d.normal(d.size))), "adam"
    )


@entry()
def list_of_sequences() -> Training:
    """A batch is a list of tensors of several lengths, padded in the loss."""
    model = TimeFirst()

    def batch(drawn: Drawn) -> dict[str, Any]:
        return {
            "sequences": [drawn.normal(int(n), 16) for n in drawn.lengths()],
            "labels": drawn.whole(5, drawn.size),
        }

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(pad_sequence(batch["sequences"])), batch["labels"])

    return training(model, loss, each(batch))


@entry()
def last_valid_step() -> Training:
    """The state at each sequence's own last step, by gather."""
    model = nn.ModuleDict(
        {"rnn": nn.GRU(16, WIDTH, 3, batch_first=True), "fc": nn.Linear(WIDTH, 3)}
    )

    def loss(model: Any, batch: Any) -> Any:
        out, _ = model["rnn"](batch["x"])
        last = (batch["lengths"] - 1).view(-1, 1, 1).expand(-1, 1, out.size(2))
        return F.cross_entropy(model["fc"](out.gather(1, last).squeeze(1)), batch["y"])

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {
            "x": drawn.normal(drawn.size, drawn.length, 16),
            "lengths": drawn.lengths(),
            "y": drawn.whole(3, drawn.size),
        }

    return training(model, loss, each(batch))


@entry()
def forecasts_scaled_by_their_past() -> Training:
    """DeepAR: each series by its own mean; a negative log-likelihood over valid steps."""

    class DeepAR(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, WIDTH, 3, batch_first=True)
            self.mu = nn.Linear(WIDTH, 1)
            self.sigma = nn.Sequential(nn.Linear(WIDTH, 1), nn.Softplus())

        def forward(self, x: Tensor) -> Any:
            scale = 1 + x.abs().mean(1, keepdim=True)
            h, _ = self.lstm((x / scale).unsqueeze(-1))
            return self.mu(h).squeeze(-1) * scale, self.sigma(h).squeeze(-1) * scale

    def loss(model: Any, batch: Any) -> Any:
        mu, sigma = model(batch["past"])
        likelihood = torch.distributions.Normal(mu, sigma).log_prob(batch["future"])
        valid = batch["future"] != 0
        return -torch.mean(likelihood[valid])

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        mask = drawn.mask()
        return {
            "past": drawn.normal(drawn.size, drawn.length),
            "future": (drawn.normal(drawn.size, drawn.length) + 3) * mask,
        }

    return training(DeepAR(), loss, each(batch, 2), "adam")


@entry()
def recurrent_cell_by_hand() -> Training:
    """Gates written as one matrix, and a loop over words; perplexity is kept on the model."""

    class HandLSTM(nn.Module):
        last_perplexity: float = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.w = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.1)
            self.u = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.1)
            self.b = nn.Parameter(torch.zeros(4 * WIDTH))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, words: Tensor) -> Any:
            x = self.embed(words)
            h = c = torch.zeros(x.size(0), WIDTH, device=x.device)
            states = []
            for t in range(x.size(1)):
                i, f, g, o = (x[:, t] @ self.w + h @ self.u + self.b).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                states.append(h.unsqueeze(0))
            return self.head(torch.cat(states, 0).transpose(0, 1).contiguous())

    def loss(model: Any, batch: Any) -> Any:
        words = batch["words"]
        lost = F.cross_entropy(
            model(words[:, :-1]).reshape(-1, WORDS), words[:, 1:].reshape(-1), ignore_index=0
        )
        model.last_perplexity = lost.detach().exp().item()
        return lost

    return training(HandLSTM(), loss, each(_words))
