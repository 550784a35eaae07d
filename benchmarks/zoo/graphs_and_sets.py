"""Graphs, clouds of points, sets: batches whose rows are not samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, perceptron, training

WIDTH = 24


def _graph(drawn: Drawn) -> dict[str, Any]:
    """Nodes of several graphs one below the other, as loaders of graphs make them."""
    sizes = [3 + (at + drawn.at) % 4 for at in range(drawn.size)]
    batch = torch.repeat_interleave(torch.arange(drawn.size), torch.tensor(sizes))
    edges, start = [], 0
    for size in sizes:
        edges.append(start + drawn.whole(size, 2, 2 * size))
        start += size
    return {
        "x": drawn.normal(start, 8),
        "edge_index": torch.cat(edges, 1),
        "batch": batch,
        "y": drawn.whole(3, drawn.size),
        "node_y": drawn.whole(3, start),
        "train": drawn.uniform(start) < 0.6,
        "graphs": drawn.size,
    }


class GraphConv(nn.Module):
    """Sums over neighbours, by index_add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        """The same shape."""
        source, target = edge_index
        summed = torch.zeros_like(x).index_add_(0, target, x[source])
        return x + F.relu(self.own(x) + self.others(summed))


class GraphNet(nn.Module):
    """Convolutions over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([GraphConv(WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        """States of nodes."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x, edge_index)
        return x


@entry()
def graph_classes() -> Training:
    """A mean over nodes of each graph, by scatter_add."""

    def loss(model: Any, b: Any) -> Any:
        x = model(b["x"], b["edge_index"])
        index = b["batch"][:, None].expand_as(x)
        pooled = x.new_zeros(b["graphs"], x.size(1)).scatter_add_(0, index, x)
        counts = torch.bincount(b["batch"], minlength=b["graphs"]).clamp(min=1)
        return F.cross_entropy(model.head(pooled / counts[:, None]), b["y"])

    return training(GraphNet(), loss, each(_graph))


@entry()
def node_classes_of_a_mask() -> Training:
    """Cora: one graph, and a mask of nodes that are trained."""

    def loss(model: Any, b: Any) -> Any:
        out = F.log_softmax(model.head(model(b["x"], b["edge_index"])), dim=1)
        return F.nll_loss(out[b["train"]], b["node_y"][b["train"]])

    return training(GraphNet(), loss, each(_graph), "adam")


@entry()
def dense_graph_convolutions() -> Training:
    """Kipf's: an adjacency matrix of nodes, with as many rows as samples."""

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(8 if at == 0 else WIDTH, WIDTH) for at in range(4)]
            )
            self.out = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor, adjacency: Tensor) -> Any:
            for layer in self.layers:
                x = F.relu(torch.mm(adjacency, layer(x)))
            return self.out(x)

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        n = drawn.size
        adjacency = (drawn.uniform(n, n) < 0.3).float() + torch.eye(n)
        return {
            "x": drawn.normal(n, 8),
            "adjacency": adjacency / adjacency.sum(1, keepdim=True),
            "y": drawn.whole(3, n),
        }

    return training(
        GCN(), lambda m, b: F.cross_entropy(m(b["x"], b["adjacency"]), b["y"]), each(batch, 8)
    )


@entry()
def molecules_in_padded_tables() -> Training:
    """Adjacency matrices of each sample: here rows are samples."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(8 if at == 0 else WIDTH, WIDTH) for at in range(4)]
            )
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor) -> Any:
            for layer in self.layers:
                x = torch.relu(torch.bmm(adjacency, layer(x))) * mask.unsqueeze(-1)
            return self.out(x.sum(1) / mask.sum(1, keepdim=True)).squeeze(-1)

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        n, t = drawn.size, drawn.length
        mask = drawn.mask().float()
        adjacency = (drawn.uniform(n, t, t) < 0.2).float() * mask[:, None] * mask[:, :, None]
        return {"x": drawn.normal(n, t, 8), "a": adjacency, "mask": mask, "y": drawn.normal(n)}

    return training(
        Dense(),
        lambda m, b: F.l1_loss(m(b["x"], b["a"], b["mask"]), b["y"]),
        each(batch),
        "adam",
    )


@entry()
def attention_over_edges() -> Training:
    """GAT: a softmax over the edges of each node, by scatter."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            h = self.linear(x)
            source, target = edge_index[0], edge_index[1]
            score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1))).squeeze(1)
            top = torch.full((len(x),), -1e9).scatter_reduce(0, target, score, "amax")
            weight = torch.exp(score - top[target].detach())
            total = torch.zeros(len(x)).index_add(0, target, weight)
            weight = weight / (total[target] + 1e-9)
            return x + torch.zeros_like(x).index_add(0, target, weight[:, None] * h[source])

    model = GraphNet()
    model.blocks = nn.ModuleList([Attention() for _ in range(4)])

    def loss(model: Any, b: Any) -> Any:
        return F.cross_entropy(model.head(model(b["x"], b["edge_index"])), b["node_y"])

    return training(model, loss, each(_graph))


@entry()
def links_with_negative_samples() -> Training:
    """Edges of the graph and others that come with the batch."""

    def loss(model: Any, b: Any) -> Any:
        x = model(b["x"], b["edge_index"])
        one, other = b["edge_index"]
        right = (x[one] * x[other]).sum(-1)
        wrong = (x[one] * x[other.flip(0)]).sum(-1)
        return -(F.logsigmoid(right).mean() + F.logsigmoid(-wrong).mean()) / 10

    return training(GraphNet(), loss, each(_graph))


class PointNet(nn.Module):
    """Points one by one, and their maximum; a small net turns the cloud."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.ReLU(), nn.Conv1d(WIDTH, 9, 1))
        self.convs = nn.ModuleList(
            [nn.Conv1d(3 if at == 0 else WIDTH, WIDTH, 1) for at in range(4)]
        )
        self.fc = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        """Scores of classes, and the matrix."""
        matrix = torch.max(self.turn(x), 2)[0].view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1)
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.fc(torch.max(x, 2, keepdim=True)[0].view(-1, WIDTH)), matrix


@entry()
def point_net() -> Training:
    """Classes, and a penalty for matrices that do not turn."""

    def loss(model: Any, b: Any) -> Any:
        scores, m = model(b[0])
        eye = torch.eye(3)[None, :, :]
        off = torch.mean(torch.norm(torch.bmm(m, m.transpose(2, 1)) - eye, dim=(1, 2)))
        return F.nll_loss(F.log_softmax(scores, 1), b[1]) + 0.001 * off

    return training(
        PointNet(), loss, each(lambda d: (d.normal(d.size, 3, 32), d.whole(4, d.size))), "adam"
    )


@entry()
def chamfer_distance() -> Training:
    """Nearest points of two clouds of each sample."""
    model = nn.Sequential(nn.Linear(3, WIDTH), *[Residual(WIDTH) for _ in range(4)])
    model.append(nn.Linear(WIDTH, 3))

    def loss(model: Any, b: Any) -> Any:
        distances = torch.cdist(model(b[:, 0]), b[:, 1])
        return distances.min(1)[0].mean() + distances.min(2)[0].mean()

    return training(model, loss, each(lambda d: d.normal(d.size, 2, 20, 3)))


class Attend(nn.Module):
    """Attention of one set on another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.rest = Residual(width)

    def forward(self, q: Tensor, k: Tensor) -> Any:
        """As many as queries; heads are put beside the samples."""
        heads = 4
        query, key, value = self.q(q), self.k(k), self.v(k)
        parts = [torch.cat(one.split(one.size(2) // heads, 2), 0) for one in (query, key, value)]
        weights = torch.softmax(parts[0].bmm(parts[1].transpose(1, 2)) / 4, 2)
        out = torch.cat((parts[0] + weights.bmm(parts[2])).split(query.size(0), 0), 2)
        return self.rest(out)


@entry()
def set_transformer() -> Training:
    """Induced points, and heads that are cut and put behind each other in the batch."""

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, WIDTH)
            self.points = nn.Parameter(torch.randn(1, 4, WIDTH))
            self.blocks = nn.ModuleList([Attend(WIDTH) for _ in range(6)])
            self.out = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for one, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = other(x, one(self.points.repeat(x.size(0), 1, 1), x))
            return self.out(x.mean(1)).squeeze(-1)

    return training(
        Sets(),
        lambda m, b: F.mse_loss(m(b[0]), b[1]),
        each(lambda d: (d.normal(d.size, d.length, 2), d.normal(d.size))),
        "adam",
    )


@entry()
def deep_sets_with_masks() -> Training:
    """Sums over the members of each set that count."""
    model = nn.ModuleDict(
        {
            "phi": nn.Sequential(nn.Linear(4, WIDTH), *[Residual(WIDTH) for _ in range(4)]),
            "rho": perceptron(WIDTH, WIDTH, 1),
        }
    )

    def loss(model: Any, b: Any) -> Any:
        h = model["phi"](b["x"]) * b["mask"].unsqueeze(-1)
        pooled = h.sum(1) / b["mask"].sum(1, keepdim=True)
        return F.mse_loss(model["rho"](pooled).squeeze(-1), b["y"])

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        return {
            "x": drawn.normal(drawn.size, drawn.length, 4),
            "mask": drawn.mask(),
            "y": drawn.normal(drawn.size),
        }

    return training(model, loss, each(batch))


@entry()
def segments_by_lengths() -> Training:
    """Rows of all sets in one table, and lengths as a list of Python's numbers."""
    model = nn.ModuleDict(
        {
            "phi": nn.Sequential(nn.Linear(4, WIDTH), *[Residual(WIDTH) for _ in range(4)]),
            "out": nn.Linear(WIDTH, 1),
        }
    )

    def loss(model: Any, b: Any) -> Any:
        h = model["phi"](b["rows"])
        pooled = torch.stack([part.mean(0) for part in h.split(b["lengths"])])
        return F.mse_loss(model["out"](pooled).squeeze(-1), b["y"])

    def batch(drawn: Drawn) -> dict[str, Any]:
        lengths = [int(n) for n in drawn.lengths()]
        return {
            "rows": drawn.normal(sum(lengths), 4),
            "lengths": lengths,
            "y": drawn.normal(drawn.size),
        }

    return training(model, loss, each(batch))
