from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_memopt.core.preserved_training import preserved

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.metric = MeanMetric()
        self.outputs: list[float] = []

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        loss = self.net(torch.randn(8, 4) + random.random()).square().mean()
        self.metric(loss.detach())
        self.outputs.append(loss.item())
        loss.backward()
        optimizer.step()
        return loss.item()

    def spoil(self, optimizer: torch.optim.Optimizer) -> None:
        self.step(optimizer)
        self.net.eval()
        self.frozen.requires_grad_(True)
        optimizer.param_groups[0]["lr"] = 7.0
        with torch.no_grad():
            self.frozen.weight.zero_()


def everything(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "weights": model.state_dict(),
            "modes": [module.training for module in model.modules()],
            "trained": [p.requires_grad for p in model.parameters()],
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "metric": model.metric.metric_state,
            "outputs": model.outputs,
            "torch": torch.get_rng_state(),
            "python": torch.tensor(random.getstate()[1]),
        }
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(kind: Any, steps: int, fails: bool) -> None:
    model = Model()
    optimizer = kind(model.net.parameters(), lr=0.1)
    for _ in range(steps):
        model.step(optimizer)
    gradients = [p.grad for p in model.parameters()]
    before = everything(model, optimizer)
    try:
        with preserved(model, optimizer, CPU) as kept:
            assert all(p.grad is None for p in model.parameters())
            assert kept.host_bytes >= sum(p.numel() for p in model.parameters()) * 4
            model.spoil(optimizer)
            if fails:
                raise MemoryError
    except MemoryError:
        assert fails
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_training_goes_on_as_if_nothing_had_been() -> None:
    losses = []
    for looks in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.net.parameters())
        run = [model.step(optimizer)]
        if looks:
            with preserved(model, optimizer, CPU):
                model.spoil(optimizer)
        losses.append([*run, *(model.step(optimizer) for _ in range(3))])
    assert losses[0] == losses[1]
