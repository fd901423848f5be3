"""Train a ResNet-18 on handwritten digits with five callbacks, and see what they do to memory.

Run it on a GPU or, in under three minutes, on two CPU cores:

    python examples/quickstart.py

The images are the 1797 digits that scikit-learn ships, resized to 64 x 64: nothing is downloaded.
The same model then takes a few steps without the suite. The table at the end compares the two; the
curves of each step's memory are in TensorBoard, opened by the line printed last.

On a CPU eight images at once keep so little that weights, gradients and optimizer state are most of
the peak; more images show what the suite is for, at the price of accuracy (fewer steps):

    python examples/quickstart.py --batch-size 64
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from comparison import (
    COMPARED_STEPS,
    Probe,
    in_fresh_process,
    print_comparison,
    use_half_of_the_cores,
)
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import resnet18

from lightning_memopt import (
    AutoAccumulation,
    AutomaticMixedPrecision,
    EmptyCache,
    GradientCheckpointing,
    MemoryMonitor,
)

ACCUMULATED = 2
# The data sits in memory: workers would only add processes.
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class DigitsData(LightningDataModule):
    """Handwritten digits in ten classes; a fifth of each class is held out, always the same."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        images = functional.interpolate(images, size=(64, 64), mode="bilinear")
        # Three views of one channel: the copies are made batch by batch.
        dataset = TensorDataset(images.expand(-1, 3, -1, -1), torch.tensor(digits.target))
        train, held_out = train_test_split(
            range(len(dataset)), test_size=0.2, stratify=digits.target, random_state=0
        )
        self.train = torch.utils.data.Subset(dataset, train)
        self.held_out = torch.utils.data.Subset(dataset, held_out)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=60)


class DigitsModel(LightningModule):
    """A ResNet-18 as it would be without the suite: nothing in it knows about memory."""

    def __init__(self, max_lr: float = 1e-3) -> None:
        super().__init__()
        self.max_lr = max_lr
        self.net = resnet18(weights=None, num_classes=10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.max_lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def suite(effective_batch_size: int) -> list[Callback]:
    """Return the callbacks."""
    return [
        MemoryMonitor(),
        GradientCheckpointing(),
        AutomaticMixedPrecision(),
        AutoAccumulation(effective_batch_size),
        EmptyCache(),
    ]


def train(with_suite: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Train once and return the figures; without the suite, one big batch for the small ones."""
    seed_everything(args.seed, verbose=False)
    use_half_of_the_cores()
    callbacks = (
        suite(args.batch_size * ACCUMULATED) if with_suite else [MemoryMonitor(verbose=False)]
    )
    probe = Probe()
    trainer = Trainer(
        max_epochs=1 if args.fast else args.epochs,
        max_steps=-1 if with_suite else COMPARED_STEPS,
        limit_train_batches=12 if args.fast else None,
        limit_val_batches=(2 if args.fast else None) if with_suite else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, probe],
        logger=TensorBoardLogger(args.logdir, name="with_suite" if with_suite else "without"),
    )
    data = DigitsData(args.batch_size * (1 if with_suite else ACCUMULATED))
    trainer.fit(DigitsModel(), data)
    accuracy = trainer.callback_metrics.get("val/accuracy", torch.nan)
    return {"accuracy": float(accuracy), **probe.figures()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # Two CPU cores need many steps from few images; a GPU can take batches whose memory shows.
    epochs, batch_size = (20, 64) if torch.accelerator.is_available() else (2, 8)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="images at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", default="logs/quickstart")
    parser.add_argument("--fast", action="store_true", help="a few batches only, to try it out")
    args = parser.parse_args(argv)

    figures = train(with_suite=True, args=args)
    plain = in_fresh_process(train, with_suite=False, args=args)
    scores = {"accuracy on held-out images": f"{figures['accuracy']:.4f}"}
    print_comparison("ResNet-18 on digits", figures, plain, scores)
    print(f"tensorboard --logdir {args.logdir}")


if __name__ == "__main__":
    main()
