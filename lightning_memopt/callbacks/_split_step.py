"""A training step done in parts, and done again in smaller ones when memory runs out."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_memopt.callbacks._lightning import is_window_end
from lightning_memopt.callbacks._lightning_step import OPTIMIZER_STEP, Part, SplitOptimization
from lightning_memopt.callbacks._peers import STOPPED, Peers, is_lost_connection
from lightning_memopt.callbacks._step_mark import StepMark
from lightning_memopt.core.batches import count_samples
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.micro_batch_search import next_parts
from lightning_memopt.core.oom import is_out_of_memory
from lightning_memopt.core.rewind import Rewind
from lightning_memopt.core.side_effects import normalising_over_batch
from lightning_memopt.core.step_metrics import StepMetrics
from lightning_memopt.core.units import format_bytes
from lightning_memopt.core.weights import WindowWeights

HELP = (
    "`GradientCheckpointing` or `AutomaticMixedPrecision` make a sample smaller, and a leaner "
    "optimizer (SGD, or `foreach=False`) its step."
)


class SplitStep:
    """Does each batch in parts of at most `micro_batch_size` samples.

    Args:
        trainer: The Trainer, with its strategy and optimizers ready.
        module: The model.
        split: From a batch and a number of parts to the parts.
        weigh: From the parts of a batch to their weights.
        weights: Those of the window at hand.

    Attributes:
        micro_batch_size: Samples of a part at most; `None` leaves batches whole.
        recoveries: How often a batch was done again.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        split: Callable[[Any, int], list[Any]],
        weigh: Callable[[list[Any]], list[float | Tensor]],
        weights: WindowWeights,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._split = split
        self._weigh = weigh
        self.weights = weights
        self.metrics = StepMetrics(each for each in module.modules() if isinstance(each, Metric))
        self.micro_batch_size: int | None = None
        self.recoveries = 0
        self._unsized_parts = 1
        self._has_warned = False
        self.samples: int | None = None
        self.k = 1

    def cut(self, batch: Any) -> list[Part]:
        """Return the parts of a batch."""
        self.samples = count_samples(batch)
        self.k = k = self._count_parts(self.samples)
        if k > 1:
            self.warn_of_coupling()
        parts = [batch] if k == 1 else self._split(batch, k)
        sizes = [self.samples] if k == 1 else [count_samples(part) for part in parts]
        return [
            Part(part, size, weight)
            for part, size, weight in zip(parts, sizes, self._weigh(parts), strict=True)
        ]

    def do(
        self, loop: SplitOptimization, batch_idx: int, optimizer: Optimizer, once: Callable[[], Any]
    ) -> Any:
        """Do a batch."""
        try:
            return once()
        except BaseException:
            self.metrics.cancel()
            raise

    def before_last_backward(self) -> None:
        """All of the batch is done but the last part's backward."""

    def after_last_backward(self) -> None:
        """All of the batch is done but the optimizer's step."""

    def warn_of_coupling(self) -> None:
        """Say once which modules make results depend on how a batch is cut."""
        names = [] if self._has_warned else normalising_over_batch(self._module)
        self._has_warned = True
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            rank_zero_warn(
                f"`AutoAccumulation`: {', '.join(names[:3])}{more} normalise over the batch, which "
                "is a micro-batch now: results change with its size. Group or layer norm don't, "
                "nor does batch norm in eval mode."
            )

    def take_smaller_parts(self) -> int:
        """Cut this batch and those that come into more parts and return the samples of one."""
        if self.samples is None:
            self._unsized_parts *= 2
            return 0
        return math.ceil(self.samples / (next_parts(self.samples, self.k) or self.samples))

    def _count_parts(self, samples: int | None) -> int:
        if samples is None:
            return self._unsized_parts
        at_once = self.micro_batch_size or samples
        return math.ceil(samples / at_once) if at_once else 1


class RecoveringStep(SplitStep):
    """Does a batch again in smaller parts when memory runs out in the middle of it.

    Ranks go back together or not at all. Once gradients are being synchronised nobody can: the
    ranks that got through have the others' gradients already.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        split: Callable[[Any, int], list[Any]],
        weigh: Callable[[list[Any]], list[float | Tensor]],
        weights: WindowWeights,
        peers: Peers,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(trainer, module, split, weigh, weights)
        self._peers = peers
        self._say = say
        self._rewind = Rewind(module)
        self._parameters = list(module.parameters())
        self._has_peers = trainer.world_size > 1
        self._is_in_sync = False

    def do(
        self, loop: SplitOptimization, batch_idx: int, optimizer: Optimizer, once: Callable[[], Any]
    ) -> Any:
        """Do a batch; where memory runs out, put everything back and do it in smaller parts."""
        self._mark = StepMark(
            self._trainer,
            self._parameters,
            self._rewind,
            self.weights,
            optimizer,
            begins_window=batch_idx % self._trainer.accumulate_grad_batches == 0,
        )
        self._is_in_sync = False
        try:
            while True:
                why = "on another rank"
                failed = True
                try:
                    result = super().do(loop, batch_idx, optimizer, once)
                    if not self._has_peers or self._is_in_sync or self._peers.all(True):
                        return result
                    failed = False
                except _PeerFailedError:
                    failed = False
                except Exception as error:
                    self._refuse(error, loop.phase)
                    why = f"in {loop.phase}{_asked_for(error)}"
                    self._peers.all(False)
                # Only out here is the traceback gone, which held what the step had made.
                self._go_back(loop.phase)
                self._shrink(failed)
                self._say(f"out of memory {why} at batch {batch_idx}: {self._outcome()}")
        finally:
            del self._mark

    def before_last_backward(self) -> None:
        """Before gradients are synchronised, let all ranks know that this one got so far."""
        if self._has_peers and is_window_end(self._trainer):
            if not self._peers.all(True):
                raise _PeerFailedError
            self._mark.add_what_was_set_aside()
            self._is_in_sync = True

    def after_last_backward(self) -> None:
        """Add the gradients that earlier batches of the window left."""
        if not self._is_in_sync:
            self._mark.add_what_was_set_aside()

    def _refuse(self, error: Exception, phase: str) -> None:
        """Raise what can't be helped, with the reason."""
        if self._is_in_sync and is_lost_connection(error):
            raise RuntimeError(STOPPED) from error
        if not is_out_of_memory(error):
            raise error
        if self._is_in_sync:
            raise RuntimeError(
                "Out of memory while gradients were synchronised between ranks, or later in the "
                "step: no rank can go back from there, so training stops. Lower `memory` or "
                "`micro_batch_size` of `AutoAccumulation`."
            ) from error
        if phase == OPTIMIZER_STEP and self._mark.is_stepping_half_done:
            raise _advised(error, f"the optimizer had begun to change weights; {HELP}")
        if self.samples is not None and self.k >= self.samples:
            raise _advised(error, f"this was one sample at a time already; {HELP}")

    def _go_back(self, phase: str) -> None:
        gc.collect()
        self._mark.put_back(was_stepping=phase == OPTIMIZER_STEP)
        memory_reader(self._trainer.strategy.root_device).release_cache()
        self.recoveries += 1

    def _shrink(self, failed: bool) -> None:
        size = self.take_smaller_parts() if failed else self.micro_batch_size or self.samples or 0
        self.micro_batch_size = self._peers.least(size) or None

    def _outcome(self) -> str:
        parts = self._count_parts(self.samples)
        of = f" of {self.micro_batch_size} samples" if self.micro_batch_size else ""
        return f"put back and done again in {parts} parts{of}, which holds from here"


class _PeerFailedError(Exception):
    """Another rank has to do its batch again, so this one has to as well."""


def _asked_for(error: Exception) -> str:
    found = re.search(r"allocate ([\d.]+) (\w+)", str(error))
    if found is None:
        return ""
    size, unit = found.groups()
    asked = format_bytes(int(size)) if unit == "bytes" else f"{size} {unit}"
    return f" ({asked} asked for)"


def _advised(error: Exception, advice: str) -> Exception:
    error.args = (f"{error}\nAutoAccumulation: {advice}", *error.args[1:])
    return error
