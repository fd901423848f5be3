"""Memory of every step, and where it peaked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console

from lightning_memopt.callbacks._base import SuiteCallback
from lightning_memopt.callbacks._leak_watch import LeakWatch
from lightning_memopt.callbacks._lightning import PointWriter, is_window_end, logged_step
from lightning_memopt.callbacks._memory_report import (
    CURVES,
    describe_plan,
    peak_table,
    point_of_ranks,
    point_of_step,
)
from lightning_memopt.callbacks._step_anatomy import StepAnatomy
from lightning_memopt.core.checks import check_bool, check_positive_int
from lightning_memopt.core.peaks import watched_resets
from lightning_memopt.core.step_memory import BETWEEN, StepMemory
from lightning_memopt.core.units import GIB

_STEP = "step"


class MemoryMonitor(SuiteCallback):
    """Log allocated, reserved and peak memory of every step, and the peak of each phase.

    You gain curves in every logger (six keys under `memory/`, one point an optimizer step), the
    peaks of forward, backward and optimizer step, separate curves for validation, test and predict,
    and at the end a table of where the run peaked. You pay a few counter reads on the host and one
    event a step; the device is never waited for. On a CPU allocated is what malloc has in use,
    reserved and the peak are resident memory. Where PyTorch keeps no peak (MPS) it is the highest
    sample taken at the boundaries of the phases.

    A step begins where the one before it ended, so what comes between, such as moving the batch to
    the device, is in its forward; validation is not. The peak counter is reset at each boundary;
    the run's peak survives that, and a reset by other code, which is marked in the table and in
    `summary()`. Of several optimizer steps in a batch all but the last count into a forward.

    Memory that grows steadily over 50 steps or more, by 1 MiB per 100 steps at least, is told
    once, in a `MemoryGrowthWarning`: how fast, when it would reach the limit, which attribute of
    the model, a callback, a metric or the script holds it. Silence it by
    `warnings.filterwarnings("ignore", category=MemoryGrowthWarning)`.

    Args:
        every_n_steps: Optimizer steps between two points; steps in between are not read, their
            peak counts for the run alone. Raising it saves the cost of those reads; a leak is
            found later.
        phases: Whether to read the peak of forward, backward and optimizer step apart.
        verbose: Whether to print the anatomy and the table at the end of fit.
        anatomy: Whether to say where the bytes of a step are: printed, in TensorBoard and in
            `summary()`. The first two steps are traced for it, and slower; not those of compiled
            models, nor with strategies other than one device and DDP.
        advice: Whether the anatomy ends in what would save most. Then rank 0 calls `training_step`
            again, for some 5 s, on copies without values; what it writes elsewhere isn't undone.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `every_n_steps` is below one.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> monitor = MemoryMonitor()
        >>> trainer = Trainer(callbacks=[monitor], logger=False)
        >>> monitor.summary()
        {}

    Source: the counters of PyTorch's caching allocator,
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management.
    """

    _memory: StepMemory | None = None
    _summary: dict[str, Any] = {}
    _before: dict[str, Any] = {}
    _eval_batches: Counter[str]
    _device = ""
    _steps = 0

    def __init__(
        self,
        every_n_steps: int = 1,
        phases: bool = True,
        verbose: bool = True,
        anatomy: bool = True,
        advice: bool = False,
    ) -> None:
        check_positive_int("every_n_steps", every_n_steps)
        flags = {"phases": phases, "verbose": verbose, "anatomy": anatomy, "advice": advice}
        for name, value in flags.items():
            check_bool(name, value)
        self.every_n_steps = every_n_steps
        self.phases = phases
        self.verbose = verbose
        self.anatomy = anatomy
        self.advice = advice

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run so far, or of the last one; needs no logger.

        Returns:
            Sizes in bytes under keys that end in `_bytes`: the run's peak with its phase, step and
            epoch, the peak of each phase, what was allocated and reserved at the last boundary; the
            device, the number of steps read, the `anatomy` of a step. Empty before the first run.
        """
        if self._memory is not None:
            own: dict[str, Any] = {
                "device": self._device,
                "steps": self._steps,
                **self._memory.summary(),
            }
            if self._traced.found is not None:
                own["anatomy"] = self._traced.as_dict()
            phases = own["phases"] | self._before.get("phases", {})
            self._summary = own | self._before | {"phases": phases}
        return dict(self._summary)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the peak counter, from here to the end of the run."""
        super().setup(trainer, pl_module, stage)
        device = trainer.strategy.root_device
        self._device, self._steps = str(device), 0
        self._in_step = self._saw_backward = False
        if stage == "fit" or not self._summary:
            self._before, self._eval_batches = {}, Counter()
        else:  # an evaluation of its own adds to the figures of the fit, and to its curves
            self._before = {k: v for k, v in self._summary.items() if self._summary["steps"]}
        self._writer = PointWriter(trainer)
        self._memory = StepMemory(device)
        self._traced = StepAnatomy(trainer, pl_module, self._memory.counter)
        self._traced.is_wanted = self.anatomy and stage == "fit"
        self._traced.is_verbose, self._traced.has_advice = self.verbose, self.advice
        self._leaks = LeakWatch(device)
        self.undo.enter_context(watched_resets())
        self.undo.callback(self._let_go)
        self.undo.callback(self._traced.stop)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what is read, and put the curves on shared charts."""
        plan = describe_plan(self._device, self._running.reading, self.every_n_steps)
        rank_zero_info(f"MemoryMonitor: {plan}")
        self._writer.add_layout(CURVES)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        """Begin a step with the first batch of its window."""
        step = logged_step(trainer)
        self._traced.begin_batch(batch)
        if self._in_step or step % self.every_n_steps:
            return
        self._running.begin_step(step, trainer.current_epoch)
        self._in_step, self._saw_backward = True, False

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        """End a forward."""
        self._end_phase(trainer, "forward", next_phase="backward")

    def on_after_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        """End a backward."""
        self._saw_backward = True
        # Another micro-batch may follow.
        self._end_phase(trainer, "backward", next_phase="forward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Begin the optimizer's step."""
        self._traced.begin_phase("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, _: Any, outputs: Any = None, batch: Any = None, *__: Any
    ) -> None:
        """End a step with the last batch of its window, and write its point."""
        self._traced.end_batch(batch, is_window_end(trainer))
        if not self._in_step or not is_window_end(trainer):
            return
        memory = self._running
        step = logged_step(trainer)
        last = "optimizer" if self._saw_backward else "forward"
        memory.end_step(last if self.phases else _STEP, step, trainer.current_epoch)
        self._in_step = False
        self._steps += 1
        peaks = memory.step_peaks()
        peak = max(peaks.values())
        values = point_of_step(memory, peak)
        if self.phases:
            values |= {f"memory_phase/{name}_peak_gib": peak / GIB for name, peak in peaks.items()}
        self._writer.add(values, step)
        self._leaks.add(trainer, step, memory.reading.allocated, peak, outputs, batch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the ranks' peaks of this epoch."""
        self._in_step = False  # a hook may have skipped the rest of the epoch within a window
        peak = self._running.end_epoch() / GIB
        if trainer.world_size == 1:
            return
        mine = torch.tensor(peak, device=trainer.strategy.root_device)
        peaks = trainer.strategy.all_gather(mine).flatten().tolist()
        self._writer.add(point_of_ranks(peaks), logged_step(trainer) - 1)  # of the last step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print where the run peaked."""
        self._traced.end()
        if self.verbose and trainer.is_global_zero:
            Console().print(peak_table(self.summary()))

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Begin a batch of an evaluation."""
        step, epoch = logged_step(trainer), trainer.current_epoch
        if self._in_step and not self.phases:  # validation within a window
            self._running.end_phase(_STEP, step, epoch)
        else:
            self._running.end_other(BETWEEN, step, epoch)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """End a batch of an evaluation, and write its point."""
        stage = trainer.state.stage
        if stage is None or trainer.sanity_checking:
            return
        name = str(stage.dataloader_prefix)
        memory, batch = self._running, self._eval_batches[name]
        self._eval_batches[name] += 1
        peak = memory.end_other(name, batch, trainer.current_epoch)
        values = {"allocated_gib": memory.reading.allocated, "peak_allocated_gib": peak}
        self._writer.add({f"memory_{name}/{key}": x / GIB for key, x in values.items()}, batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @property
    def _running(self) -> StepMemory:
        if self._memory is None:
            raise RuntimeError("`MemoryMonitor` was asked for memory outside a run.")
        return self._memory

    def _end_phase(self, trainer: pl.Trainer, phase: str, next_phase: str) -> None:
        self._traced.begin_phase(next_phase)
        if self._in_step and self.phases:
            self._running.end_phase(phase, logged_step(trainer), trainer.current_epoch)

    def _let_go(self) -> None:
        self._writer.flush()
        self.summary()
        self._memory = None
        del self._leaks, self._traced, self._writer  # these hold what doesn't pickle
