"""What training EfficientNet-B0 and MobileNet needs beside ResNet-50: weights, activations, peak.

    python examples/benchmarks/network_memory.py
    python examples/benchmarks/network_memory.py --batch 2 --pixels 64      # quick, on a CPU

Each network is trained for two steps with AdamW under `anatomy`, which says where the bytes of the
peak are. People choose a network by its parameters; what training needs is decided by what forward
keeps for backward, which has little to do with them.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
from model_zoo import Classifier
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torchvision.models import get_model

from lightning_memopt import anatomy

NETWORKS = ("resnet50", "efficientnet_b0", "mobilenet_v2", "mobilenet_v3_large")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 2**20


def measure(name: str, batch: int, pixels: int, precision: str) -> dict[str, Any]:
    """Return the anatomy of a network's training step in figures."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Classifier(get_model(name, weights=None)).train()
        inputs = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))
    found = anatomy(model, torch.optim.AdamW(model.parameters()), inputs, precision)
    return {
        "network": name,
        "precision": precision,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_bytes": found.size_of("parameters"),
        "kept_bytes": found.kept_bytes,
        "peak_bytes": found.peak,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows, each beside the first network in its precision."""
    first = {row["precision"]: row for row in reversed(rows)}
    table = Table("network", "precision", box=SIMPLE)
    for name in ("parameters", "weights MiB", "kept MiB", "peak MiB", "peak of ResNet-50's"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["network"],
            row["precision"],
            f"{row['parameters'] / 1e6:.2f} M",
            *(f"{row[key] / MIB:,.1f}" for key in ("weights_bytes", "kept_bytes", "peak_bytes")),
            f"{row['peak_bytes'] / first[row['precision']]['peak_bytes']:.0%}",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128 if DEVICE == "cuda" else 2)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args(argv)
    rows = []
    for precision in ("32-true", "bf16-mixed"):
        for name in NETWORKS:
            rows.append(measure(name, arguments.batch, arguments.pixels, precision))
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    console = Console(width=100)
    console.print(f"batch {arguments.batch} at {arguments.pixels} px on {DEVICE}")
    show(rows, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
