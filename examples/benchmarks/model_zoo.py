"""Models of many kinds with batches to train them on, for benchmarks that compare over models.

Convolutional networks, vision transformers, detection and segmentation of torchvision and timm,
encoders and decoders of transformers, a U-Net, recurrent networks and a GPT; all with random
weights. `timm` and `transformers` are only needed for their models.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MakeBatch = Callable[[int], Any]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        family: Where it comes from.
        make: Makes the model: called with a batch it returns its loss.
        batch: Makes a batch of so many samples.
        sizes: Three numbers of samples that are worth training with.
    """

    family: str
    make: Callable[[], nn.Module]
    batch: MakeBatch
    sizes: tuple[int, int, int]


class Classifier(nn.Module):
    """A network and its cross-entropy; of what torchvision returns in a mapping, `"out"`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        output = self.network(inputs)
        output = output["out"] if isinstance(output, dict) else output
        return functional.cross_entropy(output, labels)


class Detector(nn.Module):
    """A detection network of torchvision, with boxes as tensors of all images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses."""
        targets = [{"boxes": b, "labels": n} for b, n in zip(boxes, labels, strict=True)]
        return torch.stack(list(self.network(list(images), targets).values())).sum()


class UNet(nn.Module):
    """The network of Ronneberger et al. (2015), with BatchNorm and padding."""

    def __init__(self, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(_double(2 * each, each) for each in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of each pixel."""
        skips = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class Recurrent(nn.Module):
    """A tagger: embedding, recurrent layers, and a class for each token."""

    def __init__(self, kind: type[nn.RNNBase], vocabulary: int = 10_000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = kind(width, width, num_layers=2, batch_first=True, dropout=0.1)  # type: ignore[call-arg]
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, classes before positions."""
        return self.head(self.layers(self.embedding(tokens))[0]).transpose(1, 2)


class GPT(nn.Module):
    """A decoder of pre-norm blocks, with attention by `scaled_dot_product_attention`."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50_304
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(2048, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, classes before positions."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.norm2(x))


def _double(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


def _images(n: int, pixels: int = 224) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, pixels, pixels), torch.randint(1000, (n,))


def _masks(n: int, classes: int, pixels: int = 256) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, pixels, pixels), torch.randint(classes, (n, pixels, pixels))


def _boxes(n: int) -> tuple[Tensor, Tensor, Tensor]:
    corners = torch.tensor([[20.0, 20.0, 120.0, 120.0], [60.0, 80.0, 280.0, 300.0]])
    return torch.randn(n, 3, 320, 320), corners.repeat(n, 1, 1), torch.ones(n, 2, dtype=torch.long)


def _tags(n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (n, length)), torch.randint(vocabulary, (n, length))


def _text(n: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(2, vocabulary, (n, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _decoded(n: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(2, vocabulary, (n, length))
    return {"input_ids": tokens, "labels": tokens}


def _torchvision(name: str, **arguments: Any) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    return Classifier(models.get_model(name, weights=None, **arguments))


def _segmentation(name: str) -> nn.Module:
    return _torchvision(name, weights_backbone=None, num_classes=21)


def _detection(name: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    made = models.get_model(
        name, weights=None, weights_backbone=None, num_classes=3, min_size=320, max_size=320
    )
    return Detector(made)


def _timm(name: str) -> nn.Module:
    return Classifier(importlib.import_module("timm").create_model(name))


def _transformers(name: str, **arguments: Any) -> nn.Module:
    """Return a model of transformers by its class, with the sizes of its configuration."""
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**arguments))


_CNN, _LARGE_CNN, _TRANSFORMER = (16, 64, 192), (8, 32, 96), (16, 64, 128)

ZOO = {
    **{
        name: Entry("torchvision", partial(_torchvision, name), _images, sizes)
        for name, sizes in {
            "resnet50": _CNN,
            "vgg16": _LARGE_CNN,
            "densenet121": _LARGE_CNN,
            "mobilenet_v3_large": _CNN,
            "efficientnet_b0": _CNN,
            "regnet_y_1_6gf": _CNN,
            "convnext_tiny": _LARGE_CNN,
            "vit_b_16": _TRANSFORMER,
            "swin_t": _LARGE_CNN,
        }.items()
    },
    **{
        name: Entry(
            "segmentation", partial(_segmentation, name), partial(_masks, classes=21), sizes
        )
        for name, sizes in {"deeplabv3_resnet50": (4, 8, 24), "fcn_resnet50": (4, 8, 24)}.items()
    },
    **{
        name: Entry("detection", partial(_detection, name), _boxes, (2, 4, 8))
        for name in ("fasterrcnn_mobilenet_v3_large_fpn", "retinanet_resnet50_fpn")
    },
    **{
        name: Entry("timm", partial(_timm, name), _images, sizes)
        for name, sizes in {
            "convnextv2_nano": _LARGE_CNN,
            "deit_small_patch16_224": _TRANSFORMER,
            "mixer_b16_224": _LARGE_CNN,
            "edgenext_small": _LARGE_CNN,
        }.items()
    },
    "bert": Entry(
        "transformers",
        partial(_transformers, "BertForMaskedLM"),
        partial(_text, length=128, vocabulary=30_522),
        (8, 32, 64),
    ),
    "distilbert": Entry(
        "transformers",
        partial(_transformers, "DistilBertForMaskedLM"),
        partial(_text, length=128, vocabulary=30_522),
        (8, 32, 64),
    ),
    "gpt2": Entry(
        "transformers",
        partial(_transformers, "GPT2LMHeadModel"),
        partial(_decoded, length=512, vocabulary=50_257),
        (2, 8, 16),
    ),
    "llama": Entry(
        "transformers",
        partial(
            _transformers,
            "LlamaForCausalLM",
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
        ),
        partial(_decoded, length=512, vocabulary=32_000),
        (2, 8, 16),
    ),
    "t5_small": Entry(
        "transformers",
        partial(_transformers, "T5ForConditionalGeneration", decoder_start_token_id=0),
        partial(_text, length=128, vocabulary=32_000),
        (8, 32, 64),
    ),
    "unet": Entry("own", lambda: Classifier(UNet()), partial(_masks, classes=2), (4, 8, 24)),
    "lstm": Entry(
        "own",
        lambda: Classifier(Recurrent(nn.LSTM)),
        partial(_tags, length=128, vocabulary=10_000),
        (16, 64, 128),
    ),
    "gru": Entry(
        "own",
        lambda: Classifier(Recurrent(nn.GRU)),
        partial(_tags, length=128, vocabulary=10_000),
        (16, 64, 128),
    ),
    "gpt": Entry(
        "own",
        lambda: Classifier(GPT()),
        partial(_tags, length=512, vocabulary=50_304),
        (2, 8, 16),
    ),
}
"""Entries by name."""
