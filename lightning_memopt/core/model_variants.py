"""Changes of a model that save memory, to be tried on a copy that has no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

_LEAST_CHANNELS = 16  # with fewer, a dense convolution is small anyway


@dataclass(frozen=True)
class Variant:
    """A change of a model.

    Attributes:
        what: What it is.
        how: How a user makes it, with the source of the method.
        change: Makes it in place.
    """

    what: str
    how: str
    change: Callable[[nn.Module], object]


def variants_of(model: nn.Module) -> list[Variant]:
    """Return the changes that a model allows; whether they save anything has to be tried."""
    found = []
    convolutions = _dense_convolutions(model)
    if convolutions:
        found.append(
            Variant(
                f"depthwise-separable instead of {len(convolutions)} dense convolutions",
                "a depthwise `Conv2d(groups=in_channels)` and a 1x1 one (arXiv 1704.04861)",
                lambda copied: _separate(copied, convolutions),
            )
        )
    head = _wide_head(model)
    if head is not None:
        name, channels = head
        found.append(
            Variant(
                f"global average pooling before `{name}`",
                "`AdaptiveAvgPool2d(1)` before the head (arXiv 1312.4400)",
                lambda copied: _pool(copied, name, channels),
            )
        )
    pair = _untied(model)
    if pair is not None:
        linear, embedding = pair
        found.append(
            Variant(
                f"`{linear}` tied to `{embedding}`",
                f"`{linear}.weight = {embedding}.weight` (arXiv 1608.05859)",
                lambda copied: _tie(copied, linear, embedding),
            )
        )
    return found


def output_head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """Return name and module of the last linear layer."""
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return linears[-1] if linears else None


class _Pooled(nn.Module):
    """A linear layer on the mean of each channel of what was flattened."""

    def __init__(self, old: nn.Linear, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.linear = nn.Linear(
            channels, old.out_features, old.bias is not None, dtype=old.weight.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        mean = x.reshape(*x.shape[:-1], self.channels, -1).mean(-1)
        out: Tensor = self.linear(mean)
        return out


def _dense_convolutions(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
        and module.groups == 1
        and max(module.kernel_size) > 1
        and min(module.in_channels, module.out_channels) >= _LEAST_CHANNELS
    ]


def _separate(model: nn.Module, names: list[str]) -> None:
    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Conv2d)
        dtype = old.weight.dtype
        depthwise = nn.Conv2d(
            old.in_channels,
            old.in_channels,
            old.kernel_size,  # type: ignore[arg-type]
            old.stride,  # type: ignore[arg-type]
            old.padding,  # type: ignore[arg-type]
            old.dilation,  # type: ignore[arg-type]
            groups=old.in_channels,
            bias=False,
            dtype=dtype,
        )
        has_bias = old.bias is not None
        pointwise = nn.Conv2d(old.in_channels, old.out_channels, 1, bias=has_bias, dtype=dtype)
        _replace(model, name, nn.Sequential(depthwise, pointwise))


def _wide_head(model: nn.Module) -> tuple[str, int] | None:
    """Return the first linear layer after all convolutions, if it reads each of their pixels."""
    channels = 0
    first: tuple[str, nn.Linear] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            channels, first = module.out_channels, None
        elif isinstance(module, nn.Linear) and first is None:
            first = name, module
    if first is None or not channels:
        return None
    features = first[1].in_features
    return (first[0], channels) if features > channels and features % channels == 0 else None


def _pool(model: nn.Module, name: str, channels: int) -> None:
    old = model.get_submodule(name)
    assert isinstance(old, nn.Linear)
    _replace(model, name, _Pooled(old, channels))


def _untied(model: nn.Module) -> tuple[str, str] | None:
    """Return a linear layer whose weight could be that of an embedding, and the embedding."""
    embeddings = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    head = output_head(model)
    if head is None:
        return None
    name, linear = head
    fitting = (n for n, m in embeddings if m.weight.shape == linear.weight.shape)
    embedding = next(fitting, None)
    if embedding is None or model.get_submodule(embedding).weight is linear.weight:
        return None
    return name, embedding


def _tie(model: nn.Module, linear: str, embedding: str) -> None:
    weight = model.get_submodule(embedding).weight
    assert isinstance(weight, nn.Parameter)
    model.get_submodule(linear).weight = weight


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
