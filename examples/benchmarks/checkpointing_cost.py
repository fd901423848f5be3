"""Checkpointing by this suite beside plain `torch.utils.checkpoint`: peak and time of a step.

    python examples/benchmarks/checkpointing_cost.py
    python examples/benchmarks/checkpointing_cost.py --rounds 1 --steps 2    # quick, on a CPU

ResNet-50 and ViT-B/16 of torchvision, trained by a plain PyTorch loop with SGD; on CUDA batch 256
at 224 px in bf16 autocast, on a CPU something small in fp32. Nothing, every block and every second
block are checkpointed, the blocks once by `checkpoint_layers` and once as one would by hand:
`block.forward = partial(checkpoint, block.forward, use_reentrant=False)`. All variants are measured
in turn, several rounds of them, on one model in one process.

The peak is PyTorch's `max_memory_allocated`; on a CPU it is the bytes of distinct storages that are
kept for backward, parameters left out. Goal: the suite's step within 2 % of plain torch's and its
peak within 1 %. The suite also puts BatchNorm's statistics back; plain torch updates them twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet50, vit_b_16
from torchvision.models.vision_transformer import VisionTransformer

from lightning_memopt import checkpoint_layers, select_layers

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
BATCH, PIXELS, WARM_UP = (256, 224, 3) if ON_CUDA else (4, 64, 1)
MIB = 2**20

if ON_CUDA:
    MODELS: dict[str, Callable[[], nn.Module]] = {"ResNet-50": resnet50, "ViT-B/16": vit_b_16}
else:
    # A ViT-B's layers at the width of a ViT-Ti: its weights alone would take a CPU's time.
    MODELS = {
        "ResNet-50": resnet50,
        "ViT-Ti/16": partial(VisionTransformer, PIXELS, 16, 12, 3, 192, 768),
    }


def checkpoint_by_hand(model: nn.Module, names: list[str]) -> Callable[[], None]:
    """Checkpoint blocks with plain PyTorch; return the undo."""
    blocks = [model.get_submodule(name) for name in names]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def undo() -> None:
        for block in blocks:
            del block.forward

    return undo


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=ON_CUDA):
        loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


def kept_bytes(model: nn.Module, images: Tensor) -> int:
    """Return the bytes of distinct storages that a forward keeps for backward."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(images)
    return sum(size for pointer, size in kept.items() if pointer not in weights)


def measure(step: Callable[[], None], steps: int) -> tuple[float, int]:
    """Return the median ms of a step, and the peak on CUDA."""
    for _ in range(WARM_UP):
        step()
    if not ON_CUDA:
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - begin))
        return statistics.median(times), 0
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return statistics.median(times), torch.cuda.max_memory_allocated()


def benchmark(make: Callable[[], nn.Module], rounds: int, steps: int) -> dict[str, Any]:
    """Measure all variants of one model."""
    torch.manual_seed(0)
    model = make().to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(BATCH, 3, PIXELS, PIXELS, device=DEVICE)
    labels = torch.randint(1000, (BATCH,), device=DEVICE)
    names = select_layers(model)
    variants: dict[tuple[str, str], Callable[[], Callable[[], None]]] = {
        ("nothing", "-"): lambda: lambda: None
    }
    for chosen, some in (("each block", names), ("each 2nd", names[::2])):
        variants[chosen, "torch"] = partial(checkpoint_by_hand, model, some)
        variants[chosen, "suite"] = partial(checkpoint_layers, model, some)

    times: dict[tuple[str, str], list[float]] = {variant: [] for variant in variants}
    peaks: dict[tuple[str, str], int] = {}
    order = list(variants)
    step = partial(train_step, model, optimizer, images, labels)
    for round_ in range(rounds):
        # Backwards every other time: neither of two neighbours is always the later one.
        for variant in order[:: -1 if round_ % 2 else 1]:
            with ExitStack() as stack:
                stack.callback(variants[variant]())
                ms, peak = measure(step, steps)
                times[variant].append(ms)
                peaks[variant] = max(peaks.get(variant, 0), peak) or kept_bytes(model, images)
    return {
        "blocks": len(names),
        "rows": [
            {
                "checkpointed": chosen,
                "by": by,
                "peak_bytes": peaks[chosen, by],
                "step_ms": statistics.median(times[chosen, by]),
                "peak_share": peaks[chosen, by] / peaks["nothing", "-"],
                "step_share": _ratio(times[chosen, by], times["nothing", "-"]),
                # Of one round each, so that a drift of the clock is in both.
                "step_of_plain": _ratio(times[chosen, by], times[chosen, "torch"])
                if by == "suite"
                else None,
                "peak_of_plain": peaks[chosen, by] / peaks[chosen, "torch"]
                if by == "suite"
                else None,
            }
            for chosen, by in order
        ],
    }


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def _table(model: str, rows: list[dict[str, Any]]) -> Table:
    peak = "peak, MiB" if ON_CUDA else "kept, MiB"
    table = Table(
        title=model, caption="share: of nothing checkpointed; / torch: of plain torch", box=SIMPLE
    )
    table.add_column("checkpointed", no_wrap=True)
    for heading in (peak, "share", "/ torch", "step, ms", "share", "/ torch"):
        table.add_column(heading, justify="right")
    for row in rows:
        is_suite = row["by"] == "suite"
        table.add_row(
            f"{row['checkpointed']}, {row['by']}".removesuffix(", -"),
            f"{row['peak_bytes'] / MIB:,.1f}",
            f"{row['peak_share']:.3f}",
            f"{row['peak_of_plain']:.4f}" if is_suite else "",
            f"{row['step_ms']:.1f}",
            f"{row['step_share']:.3f}",
            f"{row['step_of_plain']:.4f}" if is_suite else "",
        )
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4 if ON_CUDA else 3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args(argv)

    name = torch.cuda.get_device_name() if ON_CUDA else "CPU"
    precision = "bf16 autocast" if ON_CUDA else "fp32"
    print(f"{name}, torch {torch.__version__}, batch {BATCH} at {PIXELS} px, {precision}")
    figures: dict[str, Any] = {"device": name, "torch": torch.__version__, "models": {}}
    for model, make in MODELS.items():
        result = figures["models"][model] = benchmark(make, args.rounds, args.steps)
        Console().print(_table(model, result["rows"]))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
