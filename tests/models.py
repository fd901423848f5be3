"""Small models that several tests train, and the quiet Trainer they train in."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

OOM_TEXT = "CUDA out of memory. Tried to allocate 1.00 GiB."


def make_trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    """Make a Trainer that writes nothing, on the CPU, for one epoch; `kwargs` go over that."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | kwargs))


class Recorder(Logger):
    """Keeps every point."""

    name = "recorder"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def of(self, key: str) -> list[tuple[int | None, dict[str, float]]]:
        """Return the points that have a key."""
        return [(step, point) for step, point in self.points if key in point]

    def values(self, key: str) -> list[float]:
        return [point[key] for _, point in self.of(key)]

    def steps(self, key: str) -> list[int | None]:
        return [step for step, _ in self.of(key)]


class Unit(pl.LightningModule):
    """Every micro-batch has a gradient of exactly 1 on `w`; `grads` has one for each step."""

    def __init__(self, n: int = 10, batch_size: int = 1, lr: float = 0.0) -> None:
        super().__init__()
        self.n, self.batch_size, self.lr = n, batch_size, lr
        self.w = nn.Parameter(torch.zeros(1))
        self.grads: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.n, 1)), batch_size=self.batch_size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.w * batch[0]).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.w.grad is not None
        self.grads.append(self.w.grad.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.w], lr=self.lr)


class FakeOOM(pl.LightningModule):
    """Raises what CUDA says when a batch has more than `limit` samples; `seen` has every size."""

    def __init__(self, n: int = 64, limit: int = 8, batch_size: int = 4) -> None:
        super().__init__()
        self.n, self.limit, self.batch_size = n, limit, batch_size
        self.layer = nn.Linear(4, 1)
        self.seen: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.n, 4)), batch_size=self.batch_size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(len(batch[0]))
        if len(batch[0]) > self.limit:
            raise RuntimeError(OOM_TEXT)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Block(nn.Module):
    """A residual block with the two things that recomputing gets wrong: BatchNorm and dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(self.linear(x)).relu())


class Blocks(pl.LightningModule):
    """Three repeated blocks between two linear layers, with data for every stage.

    The data are the same for every instance. Seed torch before building the model and before a fit
    to have the same weights and the same dropout.
    """

    def __init__(self, n: int = 24, batch_size: int = 4, width: int = 8) -> None:
        super().__init__()
        self.n, self.batch_size = n, batch_size
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def loader(self) -> DataLoader[Any]:
        x = torch.randn(self.n, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
