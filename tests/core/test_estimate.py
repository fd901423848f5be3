"""Estimates on shapes alone equal what real steps count, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_memopt import anatomy, estimate
from lightning_memopt.core.anatomy import Anatomy
from lightning_memopt.core.estimate import Estimate
from lightning_memopt.core.units import MIB

IMAGES = torch.zeros(2, 3, 64, 64)


class Gpt(nn.Module):
    """Two blocks of causal attention with a head that shares the embedding's weights."""

    def __init__(self, width: int = 32, words: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.blocks(self.embed(x), mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


class Unet(nn.Module):
    """One level down and up, joined by the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.last(torch.cat([skip, self.up(self.low(skip))], 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet18": (torchvision.models.resnet18, IMAGES),
    "mobilenet": (torchvision.models.mobilenet_v3_small, IMAGES),
    "efficientnet": (torchvision.models.efficientnet_b0, IMAGES),
    "squeezenet": (torchvision.models.squeezenet1_1, IMAGES),
    "convnext": (torchvision.models.convnext_tiny, IMAGES),
    "vit": (partial(torchvision.models.vit_b_32, image_size=64), IMAGES),
    "swin": (torchvision.models.swin_t, IMAGES),
    "lraspp": (
        partial(
            torchvision.models.segmentation.lraspp_mobilenet_v3_large,
            weights=None,
            weights_backbone=None,
        ),
        IMAGES,
    ),
    "unet": (Unet, IMAGES),
    "gpt": (Gpt, torch.zeros(3, 12, dtype=torch.long)),
}


def net(**kwargs: Any) -> nn.Module:
    """Return two layers of 64 features with an activation between them."""
    first, second = nn.Linear(64, 64, **kwargs), nn.Linear(64, 64, **kwargs)
    return nn.Sequential(first, nn.ReLU(), second)


WEIGHTS = 2 * 4 * (64 * 64 + 64)  # bytes


def traced(module: nn.Module, batch: Any = None, **kwargs: Any) -> Estimate:
    """Return an estimate that is known not to be rough."""
    kwargs.setdefault("device", "cpu")
    found = estimate(module, torch.ones(8, 64) if batch is None else batch, **kwargs)
    assert found.reason == ""
    assert sum(part.size for part in found.anatomy.parts) == found.anatomy.peak
    return found


def without_addresses(found: Anatomy) -> dict[str, Any]:
    """Return all that a real step and a fake one have to agree in."""
    parts = sorted((p.kind, p.dtype, p.size) for p in found.parts)
    return {"peak": found.peak, "phase": found.phase, "parts": parts, "kept": set(found.kept)}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_alone_tell_what_a_real_step_takes_to_the_byte(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    module = make().train()
    optimizer = torch.optim.AdamW(module.parameters())
    real = anatomy(module, optimizer, batch)
    found = traced(module, batch, optimizer=optimizer).anatomy
    assert without_addresses(found) == without_addresses(real)


def test_no_weight_is_allocated_for_a_model_on_meta() -> None:
    with torch.device("meta"):
        module = torchvision.models.resnet50()
        batch = torch.empty(2, 3, 64, 64)
    found = traced(module, batch, optimizer="SGD").anatomy
    assert found.size_of("parameters") == 25_557_032 * 4
    assert found.size_of("parameters") / MIB == pytest.approx(97.5, abs=0.05)
    assert all(p.is_meta for p in module.parameters())


@pytest.mark.parametrize(
    ("optimizer", "states", "steps"),
    [
        ("SGD", 0, 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1, 0),
        ("adagrad", 1, 4),
        ("Adam", 2, 4),
        ("AdamW", 2, 4),
        (None, 2, 4),
    ],
)
def test_optimizers_hold_what_their_method_needs(optimizer: Any, states: int, steps: int) -> None:
    found = traced(net(), optimizer=optimizer).anatomy
    of_steps = steps * 4  # a number for each parameter
    assert found.size_of("optimizer state") == states * WEIGHTS + of_steps
    assert found.size_of("gradients") == WEIGHTS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mixed_precision_casts_activations_and_keeps_parameters(device: str) -> None:
    found = traced(net(), precision="bf16-mixed", device=device).anatomy
    types = {(p.kind, p.dtype) for p in found.parts}
    assert ("parameters", "float32") in types
    assert ("gradients", "float32") in types
    assert ("optimizer state", "float32") in types
    assert not any(kind != "activations" and "bfloat16" in dtype for kind, dtype in types)
    row, weights = 64 * 2, 64 * 64 * 2
    # Both layers' inputs, the weights that turn gradients back, and the loss.
    assert dict(found.kept_by("dtype")) == {"bfloat16": 2 * 8 * row + weights, "float32": 4}


def test_true_precision_casts_all() -> None:
    module = net()
    found = traced(module, precision="bf16-true").anatomy
    assert found.size_of("parameters") == WEIGHTS // 2
    assert found.size_of("batch") == 8 * 64 * 2
    assert all(p.dtype == torch.float32 for p in module.parameters())


def test_rows_are_kept_for_backward() -> None:
    row = 64 * 4
    kept = traced(net(), torch.ones(8, 64)).anatomy.kept_by("module")
    assert dict(kept)["1"] == 8 * row  # what ReLU made, for itself and for the layer after it


def test_micro_batches_are_of_any_size_and_gradients_of_those_before_are_there() -> None:
    module = net()
    whole = traced(module, torch.ones(8, 64))
    more = traced(module, torch.ones(8, 64), micro_batch_size=32)
    part = traced(module, torch.ones(8, 64), micro_batch_size=2)
    assert (whole.samples, more.samples, part.samples) == (8, 32, 2)
    assert more.anatomy.size_of("batch") == 4 * whole.anatomy.size_of("batch")
    alone = traced(module, torch.ones(2, 64))
    assert part.anatomy.size_of("gradients") == WEIGHTS
    assert dict(part.anatomy.kept_by("module")) == dict(alone.anatomy.kept_by("module"))


def test_checkpointed_layers_keep_their_input_alone() -> None:
    deep = nn.Sequential(*(net() for _ in range(4)))
    plain = traced(deep, torch.ones(512, 64)).anatomy
    found = traced(deep, torch.ones(512, 64), checkpoint="auto").anatomy
    assert found.kept_bytes < plain.kept_bytes
    assert found.peak < plain.peak
    assert not any("forward" in vars(m) for m in deep.modules())


def test_ranks_hold_buckets_as_large_as_their_gradients() -> None:
    one, many = (traced(net(), strategy=s).anatomy for s in ("auto", "ddp"))
    assert many.size_of("gradient buckets") == WEIGHTS
    assert many.peak == one.peak + WEIGHTS


def test_all_on_cuda_is_rounded_and_libraries_are_counted() -> None:
    found = traced(nn.Linear(3, 3), torch.ones(2, 3), device="h200", optimizer="SGD")
    assert found.anatomy.peak % 512 == 0
    assert found.anatomy.size_of("libraries and others") == 64 * MIB
    assert found.anatomy.size_of("parameters") == 4 * 12
    assert found.anatomy.size_of("allocator rounding") > 0


def test_the_largest_micro_batch_is_the_largest_that_fits() -> None:
    batch = torch.zeros(4, 4096)
    module = nn.Sequential(nn.Linear(4096, 4096), nn.Sigmoid(), nn.Linear(4096, 4096))
    found = traced(module, batch, device="2GiB", optimizer="SGD")
    assert found.fits
    assert found.largest is not None

    def does_fit(n: int) -> bool | None:
        return traced(module, batch, device="2GiB", optimizer="SGD", micro_batch_size=n).fits

    assert does_fit(found.largest)
    assert not does_fit(int(found.largest * 1.01) + 2)


def test_what_never_fits_has_no_largest_micro_batch() -> None:
    with torch.device("meta"):
        module = nn.Linear(2**15, 2**15)
    found = traced(module, torch.zeros(2, 2**15), device="t4")
    assert (found.fits, found.largest) == (False, 0)


def test_a_device_without_a_limit_tells_no_fit() -> None:
    for device in ("cpu", "cuda"):
        found = traced(net(), device=device)
        assert (found.usable, found.fits, found.largest) == (None, None, None)


def test_nothing_is_touched() -> None:
    module = nn.Sequential(net(), nn.BatchNorm1d(64), nn.Dropout()).eval()
    optimizer = torch.optim.Adam(module.parameters())
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    batch = torch.rand(4, 64)
    random = torch.get_rng_state()
    kwargs: dict[str, Any] = {"device": "h200", "checkpoint": ["Linear"]}
    traced(module, batch, optimizer=optimizer, **kwargs)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert not module.training
    assert not optimizer.state
    assert not any("forward" in vars(m) for m in module.modules())


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"precision": "bf17"}, ValueError, "`precision` must be one of"),
        ({"strategy": "fsdp"}, ValueError, "`strategy` must be one of"),
        ({"optimizer": "Adamant"}, ValueError, "`optimizer` must be one of"),
        ({"device": "h2000"}, ValueError, "`device` must be"),
        ({"device": "50%"}, ValueError, "`device` must be"),
        ({"checkpoint": ["nothing"]}, ValueError, "nothing"),
        ({"micro_batch_size": 0}, ValueError, "`micro_batch_size` must be"),
        ({"micro_batch_size": 2.5}, TypeError, "`micro_batch_size` must be"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    kwargs: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        estimate(net(), torch.ones(2, 64), **kwargs)
    assert "\n" not in str(raised.value)


def test_samples_that_can_not_be_told_are_not_resized() -> None:
    with pytest.raises(TypeError, match="whose samples can be told"):
        estimate(net(), 3, micro_batch_size=2)
