from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.core.flops import Flops
from lightning_memopt.core.memory_trace import MemoryTrace

MODELS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "first convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)), (2, 3, 8, 8)),
    "frozen": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(False), nn.Conv2d(4, 2, 3)),
               (2, 3, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_pytorchs(name):
    make, shape = MODELS[name]
    model, batch = make(), torch.rand(shape)
    flops = Flops()

    def extra(func, args, results):
        flops.add(func, args, results)
        return 0

    with MemoryTrace("cpu", extra):
        model(batch).sum().backward()
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    assert flops.total == counter.get_total_flops() > 0


def test_a_linear_layer_by_hand():
    flops = Flops()
    with MemoryTrace("cpu", lambda *args: flops.add(*args) or 0):
        torch.rand(3, 6) @ torch.rand(6, 5)
    assert flops.total == 2 * 3 * 6 * 5
