"""Peaks of memory by phase: forward, backward, optimizer step, evaluation, and what is between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memopt.core.memory import MemoryReading
from lightning_memopt.core.peaks import peak_counter

BETWEEN = "between"


@dataclass(frozen=True)
class PhasePeak:
    """The highest peak of one phase, and where it was.

    Attributes:
        peak: Allocated bytes (resident bytes on a CPU).
        step: Optimizer step, or batch of an evaluation, counted from 0.
        epoch: Epoch, counted from 0.
    """

    peak: int
    step: int
    epoch: int


class StepMemory:
    """Follows a run from boundary to boundary and keeps the peak of each phase.

    Attributes:
        counter: Keeps the peaks of any spans.
        reading: The figures at the last boundary.
        phases: Highest peak of each phase of the run so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.counter = peak_counter(device)
        self._run = self.counter.open()
        self._lap = self.counter.open()
        self._epoch = self.counter.open()
        self._step_peaks: dict[str, int] = {}
        self._ended: int | None = None
        self.reading: MemoryReading = self.counter.fold()
        self._retries_before = self.reading.alloc_retries or 0
        self.phases: dict[str, PhasePeak] = {}

    @property
    def alloc_retries(self) -> int | None:
        """How often the allocator flushed its cache since this run began, `None` if unknown."""
        retries = self.reading.alloc_retries
        return None if retries is None else retries - self._retries_before

    def begin_step(self, step: int, epoch: int) -> None:
        """Start a step: where the one before it ended, if nothing was read since.

        Reading the counters is most of what a step costs, and what comes between two steps, such as
        loading, is seldom more than a step itself.
        """
        if self._ended != step - 1:
            self.end_other(BETWEEN, step, epoch)
        self._step_peaks.clear()

    def end_step(self, phase: str, step: int, epoch: int) -> None:
        """End a step with its last phase."""
        self.end_phase(phase, step, epoch)
        self._ended = step

    def end_phase(self, phase: str, step: int, epoch: int) -> None:
        """Attribute the peak since the last boundary to a phase of this step."""
        peak = self.end_other(phase, step, epoch)
        self._step_peaks[phase] = max(peak, self._step_peaks.get(phase, 0))

    def end_other(self, name: str, step: int, epoch: int) -> int:
        """Attribute the peak since the last boundary to what is no part of a step.

        Returns:
            The peak in bytes.
        """
        self._ended = None
        peak, self.reading = self.counter.lap(self._lap)
        best = self.phases.get(name)
        if best is None or peak > best.peak:
            self.phases[name] = PhasePeak(peak, step, epoch)
        return peak

    def step_peaks(self) -> dict[str, int]:
        """Return the peak of each phase of this step in bytes."""
        return dict(self._step_peaks)

    def end_epoch(self) -> int:
        """Return the peak since the last epoch ended, in bytes."""
        self._ended = None
        return self.counter.lap(self._epoch)[0]

    def summary(self) -> dict[str, Any]:
        """Return the run so far; sizes in bytes, under keys that end in `_bytes`."""
        self.counter.fold()
        reading = self.reading
        phase, best = max(
            self.phases.items(),
            key=lambda item: (item[1].peak, item[0] != BETWEEN),
            default=(BETWEEN, PhasePeak(0, 0, 0)),
        )
        peak = max(self._run.peak, best.peak)
        return {
            "peak_bytes": peak,
            "peak_phase": phase if best.peak == peak else BETWEEN,
            "peak_step": best.step,
            "peak_epoch": best.epoch,
            "peak_interrupted": self._run.interrupted,
            "allocated_bytes": reading.allocated,
            "reserved_bytes": reading.reserved,
            "gap_bytes": max(0, reading.reserved - reading.allocated),
            "alloc_retries": self.alloc_retries,
            "phases": {
                name: {"peak_bytes": seen.peak, "step": seen.step, "epoch": seen.epoch}
                for name, seen in self.phases.items()
            },
        }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return the least, mean and largest of one value a rank, and the rank of the largest."""
    numbers = list(values)
    largest = max(numbers)
    return {
        "min": min(numbers),
        "mean": sum(numbers) / len(numbers),
        "max": largest,
        "max_rank": float(numbers.index(largest)),
    }
