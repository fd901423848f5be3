"""One training step with all that PyTorch can tell about its memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_memopt.core.line_memory import line_memory
from lightning_memopt.core.lone_profiler import LoneProfiler
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.memory_history import Snapshot, recorded_history, take_snapshot
from lightning_memopt.core.module_memory import ModuleMemory
from lightning_memopt.core.nvtx_ranges import NvtxRanges
from lightning_memopt.core.run_memory import (
    BUFFERS,
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    tensors_by_kind,
)
from lightning_memopt.core.step_timeline import OTHER, Mark, StepTimeline, build_timeline
from lightning_memopt.core.storages import WeakStorage, storage_of
from lightning_memopt.core.trace_events import read_events, read_times

PREFIX = "lightning_memopt: "  # of the marks in a trace
_MAX_HISTORY = 200_000


class ProfiledStep:
    """Watches one step, from `begin` to `finish` or `close`.

    Args:
        model: The model.
        optimizers: Those that step.
        device: Where the step runs.
        nvtx: Whether to mark step, phases and modules for Nsight Systems.
        functions: Those whose lines are looked at.

    Attributes:
        modules: Memory by module.
        operators: PyTorch's profiler; `None` where another one runs. Known after `finish`.
        snapshot: The allocator's record; `None` where there is none. Known after `finish`.
        lines: The text of pytorch_memlab, `None` without functions. Known after `finish`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        device: torch.device,
        nvtx: bool = False,
        functions: Iterable[Callable[..., Any]] = (),
    ) -> None:
        self._model, self._optimizers, self._device = model, list(optimizers), device
        self._ranges = NvtxRanges() if nvtx else None
        self._functions = list(functions)
        self.modules = ModuleMemory(
            model,
            device,
            self._begin_forward,
            entered=None if self._ranges is None else self._ranges.push,
            left=None if self._ranges is None else self._ranges.pop,
        )
        self.operators: profile | None = None
        self.snapshot: Snapshot | None = None
        self.lines: str | None = None
        self._marks: list[Mark] = []  # their times come from the trace
        self._baseline: dict[int, tuple[int, str]] = {}
        self._references: dict[int, WeakStorage] = {}
        self._total: int | None = None
        self._text: Callable[[], str] | None = None
        self._phase = ""
        self._open = ExitStack()

    def begin(self, step: int, inputs: Iterable[Tensor], with_operators: bool = True) -> None:
        """Begin the step.

        Args:
            step: Its number.
            inputs: The tensors of its first batch.
            with_operators: Whether PyTorch's profiler may be started.
        """
        if self._ranges is not None:
            self._open.callback(self._ranges.close)
            self._ranges.push(f"step {step}")
        if self._functions:
            self._text = self._open.enter_context(line_memory(self._functions, self._device))
        self._open.enter_context(recorded_history(self._device, _MAX_HISTORY))
        if with_operators:
            self.operators = _profiler(self._device, self._ranges is None)
            self._session = LoneProfiler(self.operators)
            self._open.callback(self._stop)
            self._session.start()
        inputs = list(inputs)
        self._take_baseline(inputs)
        self.note_inputs(inputs)
        self.begin_phase("forward")

    def note_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Take down the tensors of a batch."""
        self.modules.note_inputs(inputs)

    def watching(self) -> AbstractContextManager[None]:
        """Watch the forwards within."""
        if self._phase == "backward":
            self.modules.drop_last()  # backward failed, and the step is tried again
        return self.modules.watching()

    def begin_phase(self, name: str, loss: Tensor | None = None) -> None:
        """Begin a phase of the step, or a moment between two.

        Args:
            name: Its name; empty for a moment between.
            loss: What a backward begins from.
        """
        self.modules.raise_error()
        if name == "backward":
            self.modules.end_forward(loss)
        if self._ranges is not None:
            self._ranges.pop(self._phase)
            if name:
                self._ranges.push(name)
        self._phase = name
        self._mark(name, name or "between")

    def finish(self) -> None:
        """End the step and take what is known of it."""
        self.modules.end_forward()
        self._mark("", "end of the step")
        self.snapshot = take_snapshot(self._device)
        self._open.close()
        if self._text is not None:
            self.lines = self._text()

    def close(self) -> None:
        """Let the step go; nothing of it stays on."""
        self._open.close()
        self.modules.let_go()
        if self.operators is not None:
            self._session.forget()
            self.operators = None

    def timeline(self, trace: Path) -> StepTimeline | None:
        """Return memory over the step, from the trace that `operators` wrote.

        Args:
            trace: The Chrome trace, compressed.

        Returns:
            The timeline; `None` where the trace has no memory of this device.
        """
        with gzip.open(trace, "rt") as file:
            parsed = json.load(file)
        events = read_events(parsed, self._device.type, self._device.index)
        times = read_times(parsed, PREFIX)
        by_number = {int(name.partition(" ")[0]): time for name, time in times.items()}
        if not events or len(by_number) != len(self._marks):
            return None
        marks = [
            Mark(by_number[number], mark.phase, mark.labels, mark.gone)
            for number, mark in enumerate(self._marks, 1)
        ]
        return build_timeline(events, marks, self._baseline, self._total)

    def _begin_forward(self) -> None:
        if self._phase != "forward":
            self.begin_phase("forward")

    def _mark(self, phase: str, name: str) -> None:
        gone = [address for address, kept in self._references.items() if kept.is_freed]
        for address in gone:
            del self._references[address]
        labels = dict.fromkeys(self.modules.kept_addresses(), "activations")
        labels |= {storage.data_ptr(): category for storage, category in self._known()}
        self._marks.append(Mark(0.0, phase, labels, gone))
        # A moment, no range: the profiler would count the range as an operator.
        with record_function(f"{PREFIX}{len(self._marks)} {name}"):
            pass

    def _take_baseline(self, inputs: list[Tensor]) -> None:
        held = [(storage_of(tensor), OTHER) for tensor in inputs]
        for storage, category in [*held, *self._known()]:
            if storage is not None and storage.device.type == self._device.type:
                self._baseline[storage.data_ptr()] = storage.nbytes(), category
                self._references[storage.data_ptr()] = WeakStorage(storage)
        if self._device.type != "cpu":
            self._total = memory_reader(self._device).read().allocated

    def _known(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        """Yield the storages whose use is known; of two uses, the last counts."""
        kinds = tensors_by_kind(self._model, self._optimizers)
        for category, tensors in (
            (GRADIENTS, kinds[GRADIENTS]),
            (OPTIMIZER_STATE, kinds[OPTIMIZER_STATE]),
            (PARAMETERS, kinds[PARAMETERS] + kinds[BUFFERS]),
        ):
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage is not None:
                    yield storage, category

    def _stop(self) -> None:
        # After an exception, what it raises would hide the user's own.
        with suppress(RuntimeError):
            self._session.stop()
        if not self._session.is_whole:
            self.operators = None


def _profiler(device: torch.device, with_kernels: bool) -> profile:
    activities = [ProfilerActivity.CPU]
    # Nsight Systems and PyTorch can't both record kernels. Memory needs the host's side alone.
    if device.type in ("cuda", "xpu") and with_kernels:
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    # Without `acc_events` some versions warn that a second cycle would clear the first.
    return profile(activities=activities, profile_memory=True, acc_events=True)
