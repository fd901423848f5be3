"""Trial steps of a model in training: how much memory a micro-batch takes, and how fast it is."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.callbacks._lightning import clear_matmul_workspaces
from lightning_memopt.callbacks._lightning_logs import unlogged
from lightning_memopt.core.batches import copy_structure, tensors_of
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.micro_batch_search import Trial
from lightning_memopt.core.oom import is_out_of_memory
from lightning_memopt.core.peaks import peak_counter
from lightning_memopt.core.preserved_training import preserved


class TrialError(Exception):
    """A trial failed for another reason than memory."""


class Trials:
    """Runs steps of the model itself, outside of the Trainer's loop and without its hooks.

    A trial is forward, backward and the optimizer's step, and forward and backward once more, with
    everything in memory that a later step finds there; where a second set of gradients is kept, the
    optimizer steps beside it too. It steps past every hook on it, with gradients of zero, so that
    no weight runs away.

    Args:
        trainer: The Trainer, about to train.
        module: The model.
        part_of: From a number of samples to that many, on the device.
        limit: Bytes that a trial may reach; `None` sets no limit but the device's own.
        keeps_gradients: Whether training keeps a second set of gradients.

    Attributes:
        phase: What ran last.
        asked: What the allocator said when memory ran out last.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        part_of: Callable[[int], Any],
        limit: int | None,
        keeps_gradients: bool,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._part_of = part_of
        self._limit = limit
        self._keeps_gradients = keeps_gradients
        self._device = trainer.strategy.root_device
        self._reader = memory_reader(self._device)
        self._parameters = list(module.parameters())
        self._host_bytes = 0
        self.phase = "forward"
        self.asked = ""

    @contextmanager
    def without_trace(self, batch: Any) -> Iterator[None]:
        """Put everything back at the end: model, optimizer, loggers, random states, the batch."""
        trainer, module = self._trainer, self._module
        loggers, should_stop = trainer.loggers, trainer.should_stop
        optimizer, tensors = trainer.optimizers[0], tensors_of(batch)
        with preserved(module, optimizer, self._device, tensors) as kept, unlogged(trainer):
            self._host_bytes = kept.host_bytes if self._device.type == "cpu" else 0
            del kept  # the copies are to be gone when memory is given back
            # A rank can't take part in what others don't do.
            vars(module)["log"] = vars(module)["log_dict"] = _log_nothing
            if trainer.world_size > 1:
                vars(module)["all_gather"] = _refuse_to_gather
            trainer.loggers = [DummyLogger() for _ in loggers]
            try:
                yield
            finally:
                trainer.loggers, trainer.should_stop = loggers, should_stop
                self._forget_gradients()
        self._release()
        clear_matmul_workspaces(self._device)

    def run(self, size: int) -> Trial:
        """Try a number of samples.

        Raises:
            TrialError: It failed for another reason than memory.
        """
        self._forget_gradients()
        self._release()
        counter = peak_counter(self._device)
        before = self._reader.read()
        span = counter.open()
        seconds = self._seconds(size)
        peak, reading = counter.lap(span)
        if self._device.type == "cpu":
            peak -= self._host_bytes
            known = reading.peak is not None
        else:
            peak, known = reading.reserved, True
        retries = (reading.alloc_retries or 0) - (before.alloc_retries or 0)
        fits = seconds is not None and not retries
        if fits and known and self._limit is not None:
            fits = peak <= self._limit
        # What ran out of memory, or gave its cache back for want of it, needs more than its peak.
        needed = peak if known and seconds is not None and not retries else None
        return Trial(size, needed, seconds, fits)

    def compare_with_halves(
        self, size: int, halve: Callable[[Any], list[tuple[Any, float | Tensor]]]
    ) -> tuple[float, float] | None:
        """Return the loss of `size` samples, and the weighted mean of the losses of its halves.

        They differ where samples of a batch depend on each other. Modules are in eval mode here.

        Args:
            size: Number of samples, which fit.
            halve: From a batch to its halves and how much each counts.

        Returns:
            The two losses; `None` where they can't be told, as with a loss that is random.
        """
        try:
            self._module.eval()
            with torch.no_grad():
                whole = self._part_of(size)
                loss, again = float(self._loss(whole)), float(self._loss(whole))
                halves = [(float(self._loss(x)), float(weight)) for x, weight in halve(whole)]
        except Exception:  # a look that fails must not stop a training
            return None
        total = sum(weight for _, weight in halves)
        if loss != again or not total:
            return None
        return loss, sum(loss * weight for loss, weight in halves) / total

    def _seconds(self, size: int) -> float | None:
        """Return the time of one forward and backward, or `None` where memory ran out."""
        try:
            with torch.enable_grad():
                return self._step(size)
        except Exception as error:
            if isinstance(error, TrialError):
                raise
            if not is_out_of_memory(error):
                raise TrialError(f"{type(error).__name__}: {error}") from error
            self.asked = str(error).splitlines()[0]
        return None

    def _step(self, size: int) -> float:
        part, optimizer = self._part_of(size), self._trainer.optimizers[0]
        self._forward_and_backward(part)
        self._optimizer_step(optimizer)
        gradients = (p.grad for p in self._parameters if p.grad is not None)
        aside = [gradient.clone() for gradient in gradients] if self._keeps_gradients else []
        self._wait()
        start = time.perf_counter()
        self._forward_and_backward(part)
        self._wait()
        seconds = time.perf_counter() - start
        if aside:
            self._optimizer_step(optimizer)
        return seconds

    def _forward_and_backward(self, part: Any) -> None:
        self.phase = "forward"
        loss = self._loss(part)
        self.phase = "backward"
        self._module.backward(loss)

    def _loss(self, part: Any) -> Tensor:
        arguments = [copy_structure(part)]  # a step may take items out of its batch
        if is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2):
            arguments.append(0)
        with self._trainer.precision_plugin.train_step_context():
            output = self._module.training_step(*arguments)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TrialError("no loss from `training_step`")
        return loss

    def _optimizer_step(self, optimizer: Optimizer) -> None:
        self.phase = "the optimizer's step"
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            # Past the hooks, and past the schedules that count its calls.
            inspect.unwrap(type(optimizer).step)(optimizer)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _release(self) -> None:
        gc.collect()
        self._reader.release_cache()


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `self.log`."""


def _refuse_to_gather(*args: Any, **kwargs: Any) -> None:
    raise TrialError("`all_gather`, in which a rank that tries sizes has no others")
