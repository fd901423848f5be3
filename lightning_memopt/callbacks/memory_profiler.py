"""Everything about the memory of a few chosen steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_memopt.callbacks._base import SuiteCallback
from lightning_memopt.callbacks._lightning import is_window_end, logged_step
from lightning_memopt.callbacks._output import output_directory
from lightning_memopt.callbacks._profile_report import (
    UnfinishedReportError,
    write_report,
)
from lightning_memopt.core.batches import tensors_of
from lightning_memopt.core.checks import check_bool, check_path, check_patterns, check_steps
from lightning_memopt.core.failure_place import first_line
from lightning_memopt.core.line_memory import find_function, has_line_memory
from lightning_memopt.core.patching import surround
from lightning_memopt.core.profile_files import UNSEEN
from lightning_memopt.core.profiled_step import ProfiledStep
from lightning_memopt.core.timeline_pictures import has_pictures

_INSTALL = 'pip install "lightning-memopt[profiler]"'


class MemoryProfiler(SuiteCallback):
    """Profile the memory of chosen steps: by operator, by module, over time and by line.

    You gain, for each chosen step, files that say where its memory went: operators by the memory
    that they take (`operators.txt`, and `trace.json.gz` for https://ui.perfetto.dev), modules by
    what their forward takes and keeps for backward (`modules.txt`), a stacked curve of parameters,
    optimizer state, gradients, activations and the rest (`categories.png`, `timeline.csv`), the
    allocator's timeline (`blocks.png`) and on CUDA its `snapshot.pickle` for
    https://pytorch.org/memory_viz. TensorBoard gets the pictures and tables of rank 0. You pay time
    and host memory in the chosen steps; later ones cost nothing, and results don't change. On a CPU
    memory is that of tensors, there is no snapshot, and what a module's forward takes isn't told.

    Gradients are known when a backward has ended, activations by what the graph of the loss keeps
    when it begins. The batch, what a checkpointed module recomputes and all that PyTorch allocates
    for a moment is `other`. Manual optimization must use `self.manual_backward(loss)`: another
    backward isn't seen, and then what modules keep is unknown. So it is with an old PyTorch, and
    for what a TorchScript keeps. Where another PyTorch profiler runs or has begun a schedule,
    operators and timeline are left out: there can be only one.

    Args:
        steps: Optimizer steps to profile, each for itself, counted from 0 as the x of `self.log`.
            The first ones of a run are not typical: caches fill, libraries are loaded.
        dirpath: Where files go. `None` is `memory_profile` under the logger's directory or, without
            a logger, `default_root_dir`. Names have the step and the rank; no file is replaced.
        nvtx: Whether to mark step, phases and modules for Nsight Systems. The trace then has no
            kernels: Nsight records these. Needs CUDA.
        lines: Methods whose memory is shown line by line, by dotted name as seen from the
            LightningModule (`["training_step", "net.forward"]`). Needs CUDA and pytorch_memlab,
            which resets the allocator's peak at each line and traces every Python call.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `steps` or `lines` is empty, or a step is below zero.
        MisconfigurationException: `nvtx` or `lines` without CUDA, `lines` without pytorch_memlab or
            with a name that is no method.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[MemoryProfiler(steps=[5])], logger=False)

    Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html,
    https://docs.pytorch.org/docs/stable/profiler.html, https://github.com/Stonesjtu/pytorch_memlab.
    """

    _profiled: ProfiledStep | None = None
    _remaining: frozenset[int] = frozenset()
    _functions: tuple[Callable[..., Any], ...] = ()
    _folder = Path()
    _step = -1
    _with_operators = True

    def __init__(
        self,
        steps: list[int] | tuple[int, ...] = (5, 6),
        dirpath: str | Path | None = None,
        nvtx: bool = False,
        lines: list[str] | None = None,
    ) -> None:
        steps = list(steps) if isinstance(steps, range) else steps
        check_steps("steps", steps)
        check_path("dirpath", dirpath)
        check_bool("nvtx", nvtx)
        if lines is not None:
            if not isinstance(lines, list) or not all(isinstance(x, str) for x in lines):
                raise TypeError(f"`lines` must be a list of `str`, got {lines!r}.")
            check_patterns("lines", lines)
        self.steps = steps
        self.dirpath = dirpath
        self.nvtx = nvtx
        self.lines = lines

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """See what can be done here, and where files go."""
        super().setup(trainer, pl_module, stage)
        self._remaining = frozenset()
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        for argument, value in (("nvtx", self.nvtx), ("lines", self.lines)):
            if value and device.type != "cuda":
                raise MisconfigurationException(
                    f"`MemoryProfiler({argument}={value!r})` needs CUDA, but training runs on "
                    f"`{device}`: leave `{argument}` out."
                )
        if self.lines and not has_line_memory():
            raise MisconfigurationException(
                f"`MemoryProfiler(lines={self.lines!r})` needs pytorch_memlab: {_INSTALL}."
            )
        self._folder = output_directory(trainer, self.dirpath, "memory_profile")
        self.undo.callback(self._let_go)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the methods to look at, and say what will be profiled."""
        functions = {name: find_function(pl_module, name) for name in self.lines or ()}
        unknown = [name for name, function in functions.items() if function is None]
        if unknown:
            raise MisconfigurationException(
                f"`lines` of `MemoryProfiler` must be methods of `{type(pl_module).__name__}` or "
                f"of its modules, written in Python, got {unknown}."
            )
        self._functions = tuple(function for function in functions.values() if function is not None)
        self._remaining = frozenset(self.steps)
        self._with_operators = not isinstance(trainer.profiler, PyTorchProfiler)  # type: ignore[attr-defined]
        missing = "" if has_pictures() else f"; no pictures without matplotlib: {_INSTALL}"
        if not self._with_operators:
            missing += "; operators and timeline are left out: the Trainer's own profiler runs"
        steps = ", ".join(map(str, sorted(self._remaining)))
        rank_zero_info(
            f"MemoryProfiler: profiling step{'s' if len(self._remaining) > 1 else ''} {steps} into "
            f"{self._folder}{missing}"
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a chosen step with the first batch of its window."""
        if self._profiled is not None:
            self._carefully(lambda step: step.note_inputs(tensors_of(batch)))
        elif self._remaining and (step := logged_step(trainer)) in self._remaining:
            self._remaining -= {step}
            self._begin(trainer, pl_module, batch, step)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Tensor) -> None:
        """End a forward."""
        self._begin_phase("backward", loss)

    def on_after_backward(self, *_: Any) -> None:
        """End a backward."""
        self._begin_phase("")

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Begin to step."""
        self._begin_phase("optimizer")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """End a step with the last batch of its window, and write its files."""
        if self._profiled is None:
            return
        if not is_window_end(trainer):
            self._begin_phase("")
            return

        def finish(profiled: ProfiledStep) -> None:
            profiled.finish()
            if profiled.operators is None and self._with_operators:
                rank_zero_info(
                    f"MemoryProfiler: step {self._step} without operators and timeline: another "
                    "PyTorch profiler was running, and there can be only one"
                )
            if not all(forward.has_backward for forward in profiled.modules.forwards):
                rank_zero_info(
                    f"MemoryProfiler: step {self._step} without what modules keep: {UNSEEN}"
                )
            said = write_report(trainer, profiled, self._folder, self._step)
            rank_zero_info(f"MemoryProfiler: step {self._step}: {said}")

        self._carefully(finish)
        self._end()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give up a step that a hook left within its window."""
        if self._profiled is not None:
            self._end()
            rank_zero_warn(
                f"MemoryProfiler: no profile of step {self._step}: a hook ended the epoch before "
                "the optimizer stepped."
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell of steps that never came."""
        if self._remaining:
            rank_zero_warn(
                f"`MemoryProfiler(steps={self.steps!r})` found no step "
                f"{', '.join(map(str, sorted(self._remaining)))}: the run ended before step "
                f"{logged_step(trainer)}, or had begun after it."
            )

    def _begin(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, step: int
    ) -> None:
        device = trainer.strategy.root_device
        profiled = ProfiledStep(pl_module, trainer.optimizers, device, self.nvtx, self._functions)
        self._profiled, self._step = profiled, step
        self._unwatch = surround(pl_module, "training_step", profiled.watching)
        self._carefully(lambda each: each.begin(step, tensors_of(batch), self._with_operators))

    def _begin_phase(self, name: str, loss: Tensor | None = None) -> None:
        if self._profiled is not None:
            self._carefully(lambda step: step.begin_phase(name, loss))

    def _carefully(self, act: Callable[[ProfiledStep], None]) -> None:
        """Do a part of the profile; where it fails, training goes on without."""
        try:
            if self._profiled is not None:
                act(self._profiled)
        except Exception as error:
            self._end()
            if isinstance(error, UnfinishedReportError):
                text = f"profile of step {self._step} is not whole: {error}"
            else:
                text = f"no profile of step {self._step}: {first_line(error)}"
            warnings.warn(f"MemoryProfiler: {text}", stacklevel=2)

    def _end(self) -> None:
        profiled, self._profiled = self._profiled, None
        if profiled is not None:
            self._unwatch()
            del self._unwatch
            profiled.close()

    def _let_go(self) -> None:
        self._end()
        self._remaining, self._functions = frozenset(), ()
