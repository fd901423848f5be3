"""What the examples share: figures of a run, a fresh process for the other run, and the table.

Imported by `quickstart.py` and `gpt.py`; nothing here is needed to use the callbacks. To see it:

    python examples/quickstart.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lightning_memopt import MemoryMonitor, read_memory

WARM_UP_STEPS = 3
COMPARED_STEPS = 12
MIB = 2**20


class Probe(Callback):
    """Notes the time of each optimizer step and the exact bytes that one batch keeps for backward.

    The peak is that of the first steps, so that a short run and a long one compare: resident memory
    creeps up. Put it last in `callbacks`, so that a step includes what the others do.
    """

    def __init__(self) -> None:
        self.start_bytes = 0
        self._peak: int | None = None
        self._kept: dict[int, int] = {}
        self._ends: list[float] = []
        self._steps = 0
        self._hooks: Any = None

    def figures(self) -> dict[str, Any]:
        """Return the device, the peak, what was there before, what is kept, and a step's ms."""
        ends = self._ends[WARM_UP_STEPS:] if len(self._ends) > WARM_UP_STEPS + 1 else self._ends
        steps = [1000 * (after - before) for before, after in pairwise(ends)]
        return {
            "device": self.monitor.summary()["device"],
            "peak_bytes": self._peak or self.monitor.summary()["peak_bytes"],
            "start_bytes": self.start_bytes,
            "kept_bytes": sum(self._kept.values()),
            "step_ms": statistics.median(steps),
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.monitor = next(c for c in trainer.callbacks if isinstance(c, MemoryMonitor))
        memory = read_memory(trainer.strategy.root_device)
        on_cpu = trainer.strategy.root_device.type == "cpu"
        self.start_bytes = memory.reserved if on_cpu else memory.allocated

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._hooks is not None:
            return
        weights = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self._kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        self._hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self._hooks:
            self._hooks.__exit__()
            self._hooks = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._steps:
            return  # a batch in the middle of an accumulation window
        self._steps = trainer.global_step
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize()
        self._ends.append(time.perf_counter())
        if self._steps == COMPARED_STEPS:
            self._peak = self.monitor.summary()["peak_bytes"]


def use_half_of_the_cores() -> None:
    """Leave a core to the rest of the machine.

    The threads of an operator wait for each other in a loop that never sleeps: where a core is
    taken by another program, a step was seen to take thirteen times as long.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def in_fresh_process(train: Callable[..., dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Run `train` where nothing was trained before: its resident memory is then its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, **options).result()


def print_comparison(
    title: str, suite: dict[str, Any], plain: dict[str, Any], scores: dict[str, str]
) -> None:
    """Print both runs' figures side by side, then the scores of the run with the suite."""
    kind = "resident memory of the process" if suite["device"] == "cpu" else "allocated memory"
    table = Table(
        title=title, caption=f"Peak: {kind} on {suite['device']}, in {COMPARED_STEPS} steps."
    )
    table.add_column("")
    table.add_column("with the suite", justify="right")
    table.add_column("without", justify="right")
    table.add_column("ratio", justify="right")
    rows = [
        ("peak, MiB", "peak_bytes", MIB),
        ("  of it before the first step, MiB", "start_bytes", MIB),
        ("kept for backward, MiB", "kept_bytes", MIB),
        ("time of a step (median), ms", "step_ms", 1),
    ]
    for name, key, unit in rows:
        a, b = suite[key] / unit, plain[key] / unit
        table.add_row(name, f"{a:,.1f}", f"{b:,.1f}", f"{a / b:.2f}")
    for name, value in scores.items():
        table.add_row(name, value, "", "")
    Console().print(table)
