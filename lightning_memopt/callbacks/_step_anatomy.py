"""The anatomy of the first steps of a fit, while they run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_memopt.callbacks._anatomy_report import show_anatomy
from lightning_memopt.core.anatomy import Anatomy, read_anatomy
from lightning_memopt.core.batches import count_samples, tensors_of
from lightning_memopt.core.compiled_code import is_compiled
from lightning_memopt.core.failure_place import first_line
from lightning_memopt.core.memory_trace import MemoryTrace, is_in_dispatch_mode
from lightning_memopt.core.model_advice import Advice, advise
from lightning_memopt.core.peaks import PeakCounter
from lightning_memopt.core.run_memory import BATCH, GRADIENTS, OPTIMIZER_STATE, tensors_by_kind
from lightning_memopt.core.traced_copy import Plan
from lightning_memopt.core.traced_step import label_run

_STEPS = 2  # only the second has the optimizer's state, and gradients that forward finds
_SECONDS = 5.0  # after which no other advice is tried
_MOST = 1_000_000  # storages that are taken down, of some 200 bytes each


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Let a failure end the trace, with one line about it, rather than the run."""

    @wraps(method)
    def guarded(self: StepAnatomy, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.give_up(first_line(error))

    return guarded


class StepAnatomy:
    """Traces the first two optimizer steps of a fit, which run as they would without it.

    Operators run one by one under the trace, so it begins only where they would anyway.

    Attributes:
        is_wanted: Whether steps are still to be traced.
        is_verbose: Whether to print the anatomy.
        has_advice: Whether to find what would save most, which calls `training_step` again.
        found: The anatomy, once there is one.
        advice: What would save most; on rank 0.

    Args:
        trainer: The Trainer.
        pl_module: The model.
        counter: Counts the peak of the device.
    """

    def __init__(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, counter: PeakCounter
    ) -> None:
        self._trainer, self._module, self._counter = trainer, pl_module, counter
        self.is_verbose = self.has_advice = False
        self._device = trainer.strategy.root_device
        self._trace: MemoryTrace | None = None
        self._entered = ExitStack()
        self._steps = self._peak = self._reserved = 0
        self.found: Anatomy | None = None
        self.advice: list[Advice] = []
        self.is_wanted = False

    @_harmless
    def begin_batch(self, batch: Any) -> None:
        """A batch begins, on its device."""
        if not self.is_wanted:
            return
        self._entered.close()  # a hook may have skipped the end of a batch
        reason = _why_not(self._trainer, self._module) if self._trace is None else ""
        if is_in_dispatch_mode():
            reason = "another dispatch mode is active"
        if reason:
            self.give_up(reason)
            return
        if self._trace is None:
            self._trace = MemoryTrace(self._device.type)
            self._span = self._counter.open()
            label_run(self._trace, self._module, self._trainer.optimizers, [batch])
        else:
            self._trace.label(tensors_of(batch), BATCH)
        self._entered.enter_context(self._trace.naming_modules(self._module))
        self._entered.callback(self._trace.leave)
        self._trace.__enter__()  # type: ignore[no-untyped-call]
        self._trace.begin_phase("forward")

    @_harmless
    def begin_phase(self, name: str) -> None:
        """Forward, backward or the optimizer's step begins."""
        if self.is_wanted and self._trace is not None:
            if name == "optimizer":
                self._trace.label(_gradients(self._module), GRADIENTS)
            self._trace.begin_phase(name)

    @_harmless
    def end_batch(self, batch: Any, is_step_end: bool) -> None:
        """A batch ends; validation may follow, or the next batch of the step.

        Args:
            batch: The batch.
            is_step_end: Whether the optimizer has stepped; after its second step all is shown.
        """
        self._entered.close()
        if self._trace is not None:
            kinds = tensors_by_kind(self._module, self._trainer.optimizers)
            self._trace.label(kinds[OPTIMIZER_STATE], OPTIMIZER_STATE)
            if is_step_end:
                self._end_step(batch)
            elif len(self._trace.lifetimes) > _MOST:
                self.end()

    @_harmless
    def end(self, batch: Any = None) -> None:
        """Show the anatomy of the steps that have ended, unless it has been shown.

        Args:
            batch: The batch that shall be used to find what would save most.
        """
        trace = self._trace
        self.stop()
        if trace is None or not trace.phases:
            return
        if self._device.type == "cuda":
            if not self._peak:
                self._count()
            self.found = read_anatomy(trace, True, self._peak, self._reserved)
        else:
            self.found = read_anatomy(trace, False)
        if self._trainer.is_global_zero:
            self.advice = self._advise(batch, self.found.peak) if self.has_advice else []
            show_anatomy(self._trainer, self.found, self.advice, self.is_verbose)

    def as_dict(self) -> dict[str, Any]:
        """Return what was found in plain types; empty before."""
        if self.found is None:
            return {}
        return {**self.found.as_dict(), "advice": [each.as_dict() for each in self.advice]}

    def give_up(self, reason: str) -> None:
        """Trace no more, and say why."""
        self.stop()
        rank_zero_info(f"MemoryMonitor: no anatomy of a step, as {reason}")

    def stop(self) -> None:
        """Trace no more."""
        self._entered.close()
        if self._trace is not None:
            self._trace.stop()
        self._trace, self.is_wanted = None, False

    def _advise(self, batch: Any, peak: int) -> list[Advice]:
        trainer, optimizers = self._trainer, self._trainer.optimizers
        plan = Plan(
            self._module,
            batch,
            trainer.precision,
            optimizers[0] if len(optimizers) == 1 else None,
            "ddp" if isinstance(trainer.strategy, DDPStrategy) else "auto",
            None,
            self._device.type == "cuda",
            accumulates=trainer.accumulate_grad_batches > 1,
        )
        if batch is None:
            return []
        with suppress(Exception):  # what shapes alone can't answer; `estimate` says what
            return advise(plan, count_samples(batch), 0, peak, _SECONDS)
        return []

    def _end_step(self, batch: Any) -> None:
        self._steps += 1
        if self._device.type == "cuda":
            self._count()
        if self._steps == _STEPS:
            self.end(batch)

    def _count(self) -> None:
        peak, reading = self._counter.lap(self._span)
        self._peak = max(self._peak, peak)
        self._reserved = max(self._reserved, reading.reserved)


def _why_not(trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
    strategy = trainer.strategy
    if strategy.root_device.type not in ("cpu", "cuda"):
        return f"it is known for CPUs and CUDA, not for `{strategy.root_device.type}`"
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        return f"`{type(strategy).__name__}` may split tensors over devices"
    if is_compiled(pl_module):
        return "compiled code would run uncompiled under the trace"
    return ""


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
