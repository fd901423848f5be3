"""The parts of a step sum to what CUDA counts, and an estimate without a GPU comes close to it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet50

from lightning_memopt import MemoryMonitor, anatomy, estimate
from lightning_memopt.core.anatomy import UNTRACED, Anatomy
from lightning_memopt.core.cards import CONTEXT
from lightning_memopt.core.units import GIB, MIB
from tests.callbacks.test_memory_monitor_anatomy import Net
from tests.models import make_trainer


class Images(nn.Module):
    """ResNet-50 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = resnet50()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(images), labels)


class Words(nn.Module):
    """A small GPT with its loss."""

    def __init__(self, width: int = 768, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(
            width, 12, 4 * width, 0.1, functional.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.blocks(self.embedding(tokens), mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Series(nn.Module):
    """An LSTM of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(512, 1024, 3, batch_first=True, dropout=0.1)

    def forward(self, series: Tensor) -> Tensor:
        return self.lstm(series)[0].square().mean()


def images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 224, 224), torch.zeros(samples, dtype=torch.long)


CASES: dict[str, tuple[type[nn.Module], Callable[[], Any]]] = {
    "resnet": (Images, lambda: images(64)),
    "gpt": (Words, lambda: torch.randint(32000, (8, 512))),
    "lstm": (Series, lambda: torch.randn(256, 256, 512)),
}
every_case = pytest.mark.parametrize("case", CASES)
both_precisions = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])


@pytest.fixture(autouse=True)
def _empty_device() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def measured(case: str, precision: str) -> Anatomy:
    kind, make_batch = CASES[case]
    with torch.device("cuda"):
        model, batch = kind(), make_batch()
    found = anatomy(model, torch.optim.AdamW(model.parameters()), batch, precision)
    assert found.is_measured
    assert found.reserved is not None
    assert found.reserved >= found.peak > GIB
    assert sum(part.size for part in found.parts) == found.peak
    return found


@every_case
@both_precisions
def test_what_no_part_explains_is_under_three_percent(case: str, precision: str) -> None:
    found = measured(case, precision)
    assert found.size_of(UNTRACED) < 0.03 * found.peak


@every_case
@both_precisions
def test_an_estimate_from_shapes_alone_is_within_five_percent(case: str, precision: str) -> None:
    found = measured(case, precision)
    kind, make_batch = CASES[case]
    with torch.device("meta"):
        model = kind()
    predicted = estimate(model, make_batch(), precision, "AdamW", device="h200")
    assert not predicted.reason
    assert predicted.anatomy.peak == pytest.approx(found.peak, rel=0.05)


def test_the_steps_leave_weights_and_numbers_as_they_were() -> None:
    model = Series().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    before, seed = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    anatomy(model, optimizer, torch.randn(8, 16, 512, device="cuda"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(seed, torch.cuda.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_a_monitor_measures_the_parts_of_the_steps_of_a_fit() -> None:
    monitor = MemoryMonitor(verbose=False)
    make_trainer(monitor, accelerator="gpu", max_epochs=1).fit(Net())
    found = monitor.summary()["anatomy"]
    assert found["is_measured"]
    assert found["peak_bytes"] == sum(part["size_bytes"] for part in found["parts"])
    traced = sum(p["size_bytes"] for p in found["parts"] if p["kind"] != UNTRACED)
    # All is small here but the workspaces of cuBLAS.
    assert traced < found["peak_bytes"] <= traced + 80 * MIB


def test_a_card_leaves_room_for_the_context() -> None:
    torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda"))
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    print(f"outside of the allocator: {outside / MIB:.0f} MiB of {total / MIB:.0f} MiB")
    assert outside <= CONTEXT
