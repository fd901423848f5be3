"""Train a small GPT on the Python sources of the standard library, with five callbacks.

Run it on a GPU or, in two minutes, on two CPU cores:

    python examples/gpt.py

The text is the standard library that came with this Python, read character by character: nothing
is downloaded. At the end come the loss on files that were held out, a sample of what the model
writes, the figures with the suite and without, and the line that opens TensorBoard.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import warnings
from pathlib import Path
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
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_memopt import (
    AutoAccumulation,
    AutomaticMixedPrecision,
    EmptyCache,
    GradientCheckpointing,
    MemoryMonitor,
)

ACCUMULATED = 2
CHARACTERS = 128  # ASCII
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    """A decoder that predicts the next character."""

    def __init__(
        self, width: int = 128, depth: int = 3, context: int = 128, max_lr: float = 3e-3
    ) -> None:
        super().__init__()
        self.context, self.max_lr = context, max_lr
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads=width // 32) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.max_lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @torch.no_grad()
    def write(self, start: str, length: int, temperature: float = 0.7) -> str:
        """Continue a text."""
        text = torch.tensor([list(start.encode())], device=self.device)
        for _ in range(length):
            odds = (self(text[:, -self.context :])[:, -1] / temperature).softmax(-1)
            text = torch.cat([text, torch.multinomial(odds, 1)], dim=1)
        return bytes(text[0].tolist()).decode()

    def _loss(self, batch: Tensor) -> Tensor:
        return functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class SourceData(LightningDataModule):
    """The modules at the top of the standard library, cut into windows; every tenth is held out."""

    def __init__(self, windows: int, batch_size: int = 8, context: int = 128) -> None:
        super().__init__()
        self.windows, self.batch_size, self.context = windows, batch_size, context

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        held_out = files[::10]
        self.train = self._cut([file for file in files if file not in held_out], self.windows)
        self.held_out = self._cut(held_out, self.windows // 10)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.batch_size)

    def _cut(self, files: list[Path], windows: int) -> Tensor:
        """Return windows, one character longer than the context, spread over all files."""
        text = b"".join(file.read_text("utf-8").encode("ascii", "ignore") for file in files)
        # An evenly spaced choice: whatever the number, it covers the whole text.
        starts = torch.linspace(0, len(text) - self.context - 1, windows).long()
        characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        return characters[starts.unsqueeze(1) + torch.arange(self.context + 1)]


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
        max_epochs=1,
        max_steps=-1 if with_suite else COMPARED_STEPS,
        limit_val_batches=None if with_suite else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, probe],
        logger=TensorBoardLogger(args.logdir, name="with_suite" if with_suite else "without"),
    )
    batch_size = args.batch_size * (1 if with_suite else ACCUMULATED)
    model = GPT()
    trainer.fit(model, SourceData(args.windows, batch_size, model.context))
    return {
        "loss": float(trainer.callback_metrics.get("val/loss", torch.nan)),
        "sample": model.eval().write("def ", length=args.sample) if with_suite else "",
        **probe.figures(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=6400, help="pieces of text to train on")
    parser.add_argument("--batch-size", type=int, default=8, help="windows at once")
    parser.add_argument("--sample", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", default="logs/gpt")
    parser.add_argument("--fast", action="store_true", help="a few batches only, to try it out")
    args = parser.parse_args(argv)
    if args.fast:
        args.windows, args.sample = 96, 20

    figures = train(with_suite=True, args=args)
    plain = in_fresh_process(train, with_suite=False, args=args)
    print(f"\n{figures['sample']}\n")
    loss = figures["loss"]
    scores = {
        "loss on held-out files": f"{loss:.4f}",
        "  bits a character": f"{loss / math.log(2):.3f}",
    }
    print_comparison("A small GPT on Python's sources", figures, plain, scores)
    print(f"tensorboard --logdir {args.logdir}")


if __name__ == "__main__":
    main()
