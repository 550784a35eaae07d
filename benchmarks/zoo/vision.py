"""Pictures: segmentation, detection, augmentation in the model, mixed losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.courses import Training
from benchmarks.zoo.entries import entry
from benchmarks.zoo.making import Drawn, Residual, each, training

CLASSES = 4


def _segmented(drawn: Drawn) -> dict[str, Tensor]:
    classes = drawn.whole(CLASSES, drawn.size, 16, 16)
    classes[:, : 3 * drawn.at] = 255
    return {"image": drawn.normal(drawn.size, 3, 16, 16), "classes": classes}


class DoubleConv(nn.Module):
    """Two convolutions, with a norm that is given."""

    def __init__(self, inputs: int, outputs: int, groups: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Any:
        """The same size."""
        return self.net(x)


class UNet(nn.Module):
    """Down, up, and skips between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv1 = DoubleConv(4 * width, 2 * width)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv2 = DoubleConv(3 * width, width)
        self.outc = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Any:
        """Scores for each pixel."""
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.up1(self.down2(x2))
        x3 = F.pad(x3, [0, x2.size(3) - x3.size(3), 0, x2.size(2) - x3.size(2)])
        x = self.conv1(torch.cat([x2, x3], dim=1))
        return self.outc(self.conv2(torch.cat([x1, self.up2(x)], dim=1)))


@entry()
def unet_with_ignored_pixels() -> Training:
    """Pixels of no class are ignored, more of them in each batch."""
    return training(
        UNet(),
        lambda model, b: F.cross_entropy(model(b["image"]), b["classes"], ignore_index=255),
        each(_segmented, 2),
        "adam",
    )


@entry()
def unet_with_dice() -> Training:
    """Milesial's U-Net: cross entropy, and dice over the whole batch."""

    def loss(model: Any, b: Any) -> Any:
        scores, classes = model(b["image"]), b["classes"].clamp(max=CLASSES - 1)
        wanted = F.one_hot(classes, CLASSES).permute(0, 3, 1, 2).float()
        p = F.softmax(scores, dim=1).float().flatten(0, 1)
        t = wanted.flatten(0, 1)
        both = 2 * (p * t).sum(dim=(-1, -2, -3))
        sizes = p.sum(dim=(-1, -2, -3)) + t.sum(dim=(-1, -2, -3))
        sizes = torch.where(sizes == 0, both, sizes)
        dice = 1 - ((both + 1e-6) / (sizes + 1e-6)).mean()
        return nn.CrossEntropyLoss()(scores, classes) + dice

    return training(UNet(), loss, each(_segmented, 2))


@entry()
def unet_with_dice_of_classes() -> Training:
    """A ratio for each class over the batch, as `monai` has it with `batch=True`."""

    def loss(model: Any, b: Any) -> Any:
        p = model(b["image"]).softmax(1)
        t = F.one_hot(b["classes"].clamp(max=3), CLASSES).permute(0, 3, 1, 2)
        both, sizes = (p * t).sum((0, 2, 3)), (p + t).sum((0, 2, 3))
        return (1 - 2 * both / (sizes + 1e-5)).mean()

    return training(UNet(), loss, each(_segmented, 2))


@entry()
def unet_with_deep_supervision() -> Training:
    """Losses of two sizes, one of them over shrunk labels."""

    def loss(model: Any, b: Any) -> Any:
        scores = model(b["image"])
        small = F.avg_pool2d(scores, 4)
        labels = b["classes"][:, ::4, ::4]
        return F.cross_entropy(scores, b["classes"], ignore_index=255) + 0.4 * F.cross_entropy(
            small, labels, ignore_index=255
        )

    return training(UNet(), loss, each(_segmented, 2))


class Backbone(nn.Module):
    """Convolutions of one width."""

    def __init__(self, outputs: int, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU()) for _ in range(4)]
        )
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Any:
        """A grid of predictions."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _boxed(drawn: Drawn) -> dict[str, Any]:
    """Pictures with some boxes each, as lists of targets."""
    targets = []
    for at in range(drawn.size):
        count = 1 + (at + drawn.at) % 3
        corner = drawn.uniform(count, 2) * 8
        boxes = torch.cat([corner, corner + 2 + drawn.uniform(count, 2) * 6], 1)
        targets.append({"boxes": boxes, "labels": drawn.whole(3, count, least=1)})
    return {"images": drawn.normal(drawn.size, 3, 16, 16), "targets": targets}


def _overlap(one: Tensor, other: Tensor) -> Any:
    top = torch.max(one[:, None, :2], other[:, :2])
    bottom = torch.min(one[:, None, 2:], other[:, 2:])
    both = (bottom - top).clamp(min=0).prod(2)
    areas = [(b[:, 2:] - b[:, :2]).prod(1) for b in (one, other)]
    return both / (areas[0][:, None] + areas[1] - both + 1e-6)


@entry()
def retina_by_hand() -> Training:
    """Anchors, and a loop over images; losses of each are divided by its positives."""
    ys, xs = torch.meshgrid(torch.arange(8) * 2.0, torch.arange(8) * 2.0, indexing="ij")
    anchors = torch.stack([xs - 2, ys - 2, xs + 4, ys + 4], -1).view(-1, 4)

    def loss(model: Any, b: Any) -> Any:
        out = model(b["images"]).permute(0, 2, 3, 1).reshape(len(b["images"]), -1, 7)
        losses = []
        for row, target in zip(out, b["targets"], strict=True):
            overlap, which = _overlap(anchors, target["boxes"]).max(1)
            positive = overlap > 0.2
            labels = torch.zeros(len(anchors), 3)
            labels[positive, target["labels"][which[positive]]] = 1
            lost = F.binary_cross_entropy_with_logits(row[:, :3], labels, reduction="sum")
            off = target["boxes"][which[positive]] - anchors[positive]
            boxes = F.smooth_l1_loss(row[positive, 3:], off, reduction="sum")
            losses.append((lost + boxes) / max(1, int(positive.sum())))
        return torch.stack(losses).mean()

    return training(Backbone(7), loss, each(_boxed, 1))


class Detr(nn.Module):
    """Queries that look at a grid."""

    def __init__(self, width: int = 16, queries: int = 6) -> None:
        super().__init__()
        self.backbone = Backbone(width)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.layers = nn.ModuleList(
            [
                nn.TransformerDecoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
                for _ in range(3)
            ]
        )
        self.classes, self.boxes = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Any:
        """Classes and boxes of all queries."""
        memory = self.backbone(x).flatten(2).transpose(1, 2)
        h = self.queries.unsqueeze(0).repeat(len(x), 1, 1)
        for layer in self.layers:
            h = layer(h, memory)
        return self.classes(h), self.boxes(h).sigmoid() * 16


@entry()
def detr_with_matching_by_scipy() -> Training:
    """Queries are matched to boxes with scipy; boxes are divided by their number in the batch."""

    def match(scores: Tensor, boxes: Tensor, targets: list[Any]) -> list[Any]:
        pairs = []
        with torch.no_grad():
            for p, box, target in zip(scores.softmax(-1), boxes, targets, strict=True):
                cost = torch.cdist(box, target["boxes"], p=1) - p[:, target["labels"]]
                rows, columns = linear_sum_assignment(cost.cpu().numpy())
                pairs.append((torch.as_tensor(rows), torch.as_tensor(columns)))
        return pairs

    def loss(model: Any, b: Any) -> Any:
        scores, boxes = model(b["images"])
        pairs = match(scores, boxes, b["targets"])
        batch = torch.cat([torch.full_like(rows, at) for at, (rows, _) in enumerate(pairs)])
        query = torch.cat([rows for rows, _ in pairs])
        found = zip(b["targets"], pairs, strict=True)
        labels = torch.cat([t["labels"][c] for t, (_, c) in found])
        wanted = torch.full(scores.shape[:2], 0)
        wanted[batch, query] = labels
        found = zip(b["targets"], pairs, strict=True)
        truth = torch.cat([t["boxes"][c] for t, (_, c) in found])
        count = sum(len(t["labels"]) for t in b["targets"])
        of_boxes = F.l1_loss(boxes[batch, query], truth, reduction="sum") / max(count, 1)
        weight = torch.tensor([0.1, 1.0, 1.0, 1.0])
        return F.cross_entropy(scores.transpose(1, 2), wanted, weight) + 0.1 * of_boxes

    return training(Detr(), loss, each(_boxed, 1), "adamw")


@entry()
def yolo_with_targets_in_one_table() -> Training:
    """All boxes of the batch in one table whose first column is the picture."""

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        count = 2 * drawn.size + drawn.at
        picture = drawn.whole(drawn.size, count).sort().values
        cells = drawn.whole(8, count, 2)
        return {
            "images": drawn.normal(drawn.size, 3, 16, 16),
            "targets": torch.cat([picture[:, None], cells, drawn.whole(3, count, 1)], 1),
        }

    def loss(model: Any, b: Any) -> Any:
        out = model(b["images"])
        picture, x, y, kind = b["targets"].unbind(1)
        found = out[picture, :, y, x]
        objects = torch.zeros_like(out[:, 0])
        objects[picture, y, x] = 1.0
        of_objects = F.binary_cross_entropy_with_logits(out[:, 0], objects)
        return (F.cross_entropy(found[:, 1:4], kind) + of_objects) * len(out)

    return training(Backbone(4), loss, each(batch, 2))


@entry()
def heatmaps_by_their_peaks() -> Training:
    """CenterNet: a focal loss over heatmaps, divided by the number of peaks in the batch."""

    def loss(model: Any, b: Any) -> Any:
        p = torch.clamp(model(b["image"]).sigmoid(), 1e-4, 1 - 1e-4)
        truth = b["heat"]
        peaks, rest = truth.eq(1).float(), truth.lt(1).float()
        one = torch.log(p) * torch.pow(1 - p, 2) * peaks
        other = torch.log(1 - p) * torch.pow(p, 2) * torch.pow(1 - truth, 4) * rest
        count = peaks.float().sum()
        if count == 0:
            return -other.sum()
        return -(one.sum() + other.sum()) / count

    def batch(drawn: Drawn) -> dict[str, Tensor]:
        heat = drawn.uniform(drawn.size, 2, 8, 8) * 0.9
        heat[:, :, drawn.at, : 1 + drawn.at] = 1.0
        return {"image": drawn.normal(drawn.size, 3, 16, 16), "heat": heat}

    return training(Backbone(2), loss, each(batch))


@entry(draws=True)
def augmentation_in_the_model() -> Training:
    """Pictures are jittered and erased in forward, each by its own random numbers."""

    class Augmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Backbone(5)

        def forward(self, x: Tensor) -> Any:
            if self.training:
                bright = torch.rand(x.size(0), 1, 1, 1, device=x.device) + 0.5
                x = x * bright + 0.05 * torch.randn_like(x)
                x = torch.where(torch.rand(x.size(0), 1, 1, 1) < 0.5, x.flip(-1), x)
            return self.net(x).mean((2, 3))

    return training(
        Augmented(),
        nn.CrossEntropyLoss(),
        each(lambda d: (d.normal(d.size, 3, 16, 16), d.whole(5, d.size))),
    )


@entry()
def augmentation_by_numpy() -> Training:
    """One crop for the whole batch, drawn by numpy."""

    def loss(model: Any, b: Any) -> Any:
        x, y = b
        top, left = np.random.randint(0, 4, 2)
        return F.cross_entropy(model(x[:, :, top : top + 12, left : left + 12]).mean((2, 3)), y)

    return training(
        Backbone(5), loss, each(lambda d: (d.normal(d.size, 3, 16, 16), d.whole(5, d.size)))
    )


class Patches(nn.Module):
    """A small vision transformer, its blocks written out."""

    def __init__(self, width: int = 24, depth: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "norm": nn.LayerNorm(width),
                        "attn": nn.MultiheadAttention(width, 4, batch_first=True),
                        "mlp": Residual(width),
                    }
                )
            )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        """Scores of classes, from the first token."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            normed = block["norm"](x)
            x = block["mlp"](x + block["attn"](normed, normed, normed, need_weights=False)[0])
        return self.head(x[:, 0])


@entry()
def vision_transformer_by_hand() -> Training:
    """Soft targets, as after mixing pictures outside."""

    def batch(drawn: Drawn) -> tuple[Tensor, Tensor]:
        return drawn.normal(drawn.size, 3, 16, 16), drawn.normal(drawn.size, 5).softmax(1)

    def loss(model: Any, b: Any) -> Any:
        return torch.sum(-b[1] * F.log_softmax(model(b[0]), dim=-1), dim=-1).mean()

    return training(Patches(), loss, each(batch), "adamw")


@entry()
def masked_autoencoder() -> Training:
    """Patches are kept by the order of noise in the batch; the loss is over those removed."""

    class Masked(nn.Module):
        def __init__(self, width: int = 24) -> None:
            super().__init__()
            self.embed, self.decode = nn.Linear(12, width), nn.Linear(width, 12)
            self.token = nn.Parameter(torch.zeros(1, 1, width))
            self.blocks = nn.ModuleList([Residual(width) for _ in range(4)])

        def forward(self, x: Tensor, noise: Tensor) -> Any:
            n, length, width = x.shape
            shuffle = torch.argsort(noise, dim=1)
            restore = torch.argsort(shuffle, dim=1)
            kept = torch.gather(x, 1, shuffle[:, :4].unsqueeze(-1).repeat(1, 1, width))
            mask = torch.ones([n, length])
            mask[:, :4] = 0
            mask = torch.gather(mask, 1, restore)
            h = self.embed(kept)
            for block in self.blocks:
                h = block(h)
            h = torch.cat([h, self.token.repeat(n, length - 4, 1)], 1)
            h = torch.gather(h, 1, restore.unsqueeze(-1).repeat(1, 1, h.shape[2]))
            lost = ((self.decode(h) - x) ** 2).mean(-1)
            return (lost * mask).sum() / mask.sum()

    return training(
        Masked(),
        lambda m, b: m(*b),
        each(lambda d: (d.normal(d.size, 16, 12), d.uniform(d.size, 16)), 6),
        "adamw",
    )


@entry()
def total_variation_and_perceptual() -> Training:
    """A frozen net's features, Gram matrices of each picture, and differences of pixels."""
    torch.manual_seed(5)
    features = Backbone(8).eval().requires_grad_(False)

    def gram(x: Tensor) -> Any:
        b, c, h, w = x.size()
        flat = x.view(b, c, h * w)
        return flat.bmm(flat.transpose(1, 2)) / (c * h * w)

    def loss(model: Any, x: Any) -> Any:
        out = F.interpolate(model(x), scale_factor=2)
        one, other = features(out), features(x)
        style = F.mse_loss(gram(one), gram(other), reduction="sum")
        variation = torch.sum(torch.abs(out[:, :, :, :-1] - out[:, :, :, 1:]))
        return F.mse_loss(one, other) + style + 1e-5 * variation

    return training(Backbone(3), loss, each(lambda d: d.normal(d.size, 3, 16, 16)), "adam")
