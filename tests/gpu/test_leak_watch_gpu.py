from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memopt import MemoryGrowthWarning, MemoryMonitor
from tests.models import make_trainer

STEPS, WIDTH, BATCH = 120, 256, 64
OUTPUT = BATCH * WIDTH * 4  # bytes


class Net(pl.LightningModule):
    """A small network whose step may keep something."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.keep, self.kept = keep, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch)
        loss = out.square().mean()
        if self.keep == "outputs":
            self.kept.append(out.detach())
        elif self.keep == "graphs":
            self.kept.append(out)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader[Any]:
        sizes = [BATCH if self.keep != "lengths" else 8 + 2 * step for step in range(STEPS)]
        return DataLoader([torch.randn(size, WIDTH) for size in sizes], batch_size=None)  # type: ignore[arg-type]


def fit(keep: str) -> None:
    make_trainer(MemoryMonitor(verbose=False), accelerator="gpu").fit(Net(keep))


def test_outputs_that_are_kept_are_told_with_their_rate() -> None:
    with pytest.warns(MemoryGrowthWarning, match="`model.kept`") as caught:
        fit("outputs")
    (text,) = (str(each.message) for each in caught if "MemoryMonitor" in str(each.message))
    (rate,) = re.findall(r"\+([\d.]+) MiB per 100 steps", text)
    assert float(rate) == pytest.approx(100 * OUTPUT / 2**20, rel=0.2)
    assert "would reach the limit of 1" in text  # of an H200's GiB


def test_outputs_that_are_kept_with_their_graph_are_told_so() -> None:
    with pytest.warns(MemoryGrowthWarning, match=r"`model.kept`.*with a graph"):
        fit("graphs")


@pytest.mark.parametrize("keep", ["nothing", "lengths"])
def test_a_clean_loop_is_left_alone(keep: str) -> None:
    fit(keep)  # warnings are errors
