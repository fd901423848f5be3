from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memopt import GradientCheckpointing, checkpoint_layers, select_layers
from tests.models import Blocks, make_trainer


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1024)
        self.up = nn.Linear(1024, 4096)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4096, 1024)

    def forward(self, *, x):  # by keyword only: the device of the random state must be found
        return x + self.down(self.drop(self.up(self.norm(x)).relu()))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Wide() for _ in range(6)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x=x)
        return x


def step(every: int, keep: str = "nothing"):
    torch.manual_seed(0)
    model = Stack().cuda()
    if every:
        checkpoint_layers(model, select_layers(model)[::every], keep)
    x = torch.randn(4096, 1024, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).square().mean()
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = [parameter.grad.cpu() for parameter in model.parameters()]
    buffers = [buffer.cpu() for buffer in model.buffers()]
    return peak, gradients, buffers, torch.rand(1, device="cuda")


def test_more_checkpoints_have_a_lower_peak_and_the_same_gradients():
    results = {every: step(every) for every in (0, 2, 1)}
    assert results[1][0] < results[2][0] < results[0][0]
    for every in (1, 2):
        for one, other in zip(results[0][1:], results[every][1:], strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_kept_products_lie_between():
    nothing, plain, kept = step(1), step(0), step(1, "matmul")
    assert nothing[0] < kept[0] < plain[0]
    for a, b in zip(plain[1], kept[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_fit_has_the_weights_of_one_without(order):
    weights = []
    for callbacks in ([], [GradientCheckpointing()][::order]):
        torch.manual_seed(0)
        model = Blocks()
        make_trainer(*callbacks, accelerator="gpu", max_epochs=2).fit(model)
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=0)


def test_attention_is_kept_and_everything_else_recomputed():
    from torchvision.models.vision_transformer import VisionTransformer

    peaks, gradients = {}, {}
    for keep in ("plain", "nothing", "attention"):
        torch.manual_seed(0)
        model = VisionTransformer(224, 16, 4, 8, 512, 1024).cuda()
        if keep != "plain":
            checkpoint_layers(model, select_layers(model), keep)
        images = torch.randn(64, 3, 224, 224, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).square().mean()
        loss.backward()
        peaks[keep] = torch.cuda.max_memory_allocated() - before
        gradients[keep] = [parameter.grad.cpu() for parameter in model.parameters()]
    assert peaks["nothing"] < peaks["attention"] < peaks["plain"]
    for a, b in zip(gradients["plain"], gradients["attention"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
