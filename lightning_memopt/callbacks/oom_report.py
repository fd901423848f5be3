"""A page that explains an out-of-memory error, written when one ends the run."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_memopt.callbacks._base import SuiteCallback, callbacks_of
from lightning_memopt.callbacks._holders import holders_of
from lightning_memopt.callbacks._lightning import is_window_end, logged_step
from lightning_memopt.callbacks._output import (
    add_page,
    output_directory,
    tensorboard_writers,
    unused_path,
)
from lightning_memopt.core.checks import check_path, check_positive_int
from lightning_memopt.core.memory_history import (
    Snapshot,
    can_record_history,
    recorded_history,
    save_snapshot,
    take_snapshot,
)
from lightning_memopt.core.oom import is_out_of_memory
from lightning_memopt.core.oom_findings import find_out
from lightning_memopt.core.oom_text import report_text
from lightning_memopt.core.peaks import peak_counter, watched_resets
from lightning_memopt.core.recent_steps import RecentSteps
from lightning_memopt.core.units import MIB

_STEPS = 50
# Address space for writing a report where the host has none left; untouched, it takes no memory.
_SPARE_BYTES = 32 * MIB


class OOMReport(SuiteCallback):
    """Explain an out-of-memory error that ends a run: what asked, who holds memory, what helps.

    You gain a page of text, and on a GPU the snapshot that https://pytorch.org/memory_viz opens,
    for each rank that ran out of memory: what was asked for by which line of yours and in which
    phase, how the device's memory was divided, what holds it (parameters, gradients, optimizer
    state, activations by module, the largest allocations by source line), the last 50 steps, the
    likely kind, and what to do with what it would save. The page is in TensorBoard, too. The error
    reaches you as it was.

    You pay a record of each allocation with its Python lines on a GPU, and a counter read a step.
    Leave it out where steps are launched by a slow host and memory has never been short.

    Args:
        dirpath: Directory of the reports; by default `oom/` under the logger's directory, or under
            `default_root_dir`.
        max_entries: How many of the latest allocations and frees are kept for the snapshot. Raising
            it shows more of the past, for some 600 bytes each on the host.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `max_entries` is below one.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[OOMReport(dirpath="oom")], logger=False)

    Source: PyTorch's record of allocations, https://docs.pytorch.org/docs/stable/torch_cuda_memory.html.
    """

    owns = "the report of out-of-memory errors"

    def __init__(self, dirpath: str | Path | None = None, max_entries: int = 100_000) -> None:
        check_path("dirpath", dirpath)
        check_positive_int("max_entries", max_entries)
        self.dirpath = dirpath
        self.max_entries = max_entries

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to record, before the model is moved to the device."""
        super().setup(trainer, pl_module, stage)
        device = trainer.strategy.root_device
        self._directory = output_directory(trainer, self.dirpath, "oom")
        self._recent = RecentSteps(_STEPS)
        self._peaks = peak_counter(device)
        self._span = self._peaks.open()
        self._spare = ExitStack()
        self.undo.callback(self._forget)
        self.undo.enter_context(self._spare)
        with suppress(OSError):  # there is no memory even for that
            self._spare.enter_context(mmap.mmap(-1, _SPARE_BYTES))
        self.undo.enter_context(watched_resets())
        self.undo.enter_context(recorded_history(device, self.max_entries))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what is recorded."""
        device = trainer.strategy.root_device
        recording = (
            f"recording the last {self.max_entries:,} allocations on {device}"
            if can_record_history(device)
            else f"no record of allocations on {device}"
        )
        rank_zero_info(f"OOMReport: {recording}; a report would go to {self._directory}")

    def on_train_batch_start(self, trainer: pl.Trainer, _: Any, batch: Any, *__: Any) -> None:
        """Note the batch's shapes."""
        self._recent.begin_batch(batch, "train")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Note the memory of a step."""
        if not is_window_end(trainer):
            return
        if trainer.strategy.root_device.type == "cpu":
            reading = self._peaks.reader.read()  # to begin a new peak takes Linux a millisecond
            highest = reading.reserved
        else:
            highest, reading = self._peaks.lap(self._span)
        self._recent.end_step(logged_step(trainer), reading.allocated, highest)

    def on_validation_batch_start(self, *arguments: Any, **named: Any) -> None:
        """Note the batch's shapes."""
        batch = named["batch"] if "batch" in named else arguments[2]
        self._recent.begin_batch(batch, "evaluation")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the report if memory ran out, and put back all that was changed."""
        try:
            if "undo" in vars(self) and is_out_of_memory(exception):
                self._spare.close()
                self._report(trainer, pl_module, exception)
        except Exception as error:  # the run has failed already, for another reason
            rank = trainer.global_rank
            print(f"OOMReport of rank {rank} could not be written: {error!r}", file=sys.stderr)
        finally:
            super().on_exception(trainer, pl_module, exception)

    def _report(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        device = trainer.strategy.root_device
        name = f"oom-rank{trainer.global_rank}-step{trainer.global_step}"
        path = unused_path(self._directory / name, ".txt", ".pickle")
        snapshot = take_snapshot(device)
        files = self._save(snapshot, path.with_name(f"{path.name}.pickle"))
        findings = find_out(
            exception,
            device,
            pl_module,
            trainer.optimizers,
            self._recent,
            snapshot,
            lambda: holders_of(trainer),
            in_use=frozenset(type(callback).__name__ for callback in callbacks_of(trainer)),
            is_half="16" in str(trainer.precision) or "transformer" in str(trainer.precision),
            is_expandable=_has_expandable_segments(),
        )
        text = report_text(findings, _where(trainer), _machine(device), files)
        page = path.with_name(f"{path.name}.txt")
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"{text}OOMReport: not in a file: {error}", file=sys.stderr)
        else:
            print(f"OOMReport: {page} says what ran out of memory, and what would help")
        writers = tensorboard_writers(trainer)
        add_page(writers, "oom/report", text, trainer.global_step)
        for writer in writers:
            writer.flush()

    def _save(self, snapshot: Snapshot | None, path: Path) -> list[str]:
        if snapshot is None:
            return []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_snapshot(snapshot, path)
        except OSError as error:
            return [f"No snapshot: {error}"]
        return [
            f"{path.name} has the allocator's record: open it at https://pytorch.org/memory_viz"
        ]

    def _forget(self) -> None:
        del self._recent, self._span, self._peaks, self._spare


def _where(trainer: pl.Trainer) -> str:
    step, steps = logged_step(trainer), trainer.global_step
    of_all = "" if step == steps else f" ({steps} of all optimizers)"
    epoch, rank = trainer.current_epoch, trainer.global_rank
    return f"at step {step}{of_all}, epoch {epoch}, on rank {rank} of {trainer.world_size}"


def _has_expandable_segments() -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)


def _machine(device: torch.device) -> str:
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{device} ({name}), torch {torch.__version__}, lightning {lightning.__version__}"
