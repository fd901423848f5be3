"""What `self.log` holds back, seen part by part and put back: private, each with the reason.

Lightning keeps the value that a step shows, and the sums that an epoch shows, in its result
collection; there is no public way to them. `tests/callbacks/test_lightning_step.py` fails loudly on
a version of Lightning that moved one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_memopt.core.joined_outputs import weighted_mean
from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.rewind import Attributes
from lightning_memopt.core.step_metrics import StepMetrics

_NOTHING: Any = object()


class PartLogs:
    """Makes one value for the step from what `self.log` was given in each part.

    What an epoch shows needs no help: Lightning weighs it by the size of the batch at hand, which
    is the part's. The value that a metric returned is the exception: that of the batch is seldom
    the mean of its parts', so it is put in their place.

    Args:
        trainer: The Trainer, in a training batch.
        metrics: The metrics of the model.
    """

    def __init__(self, trainer: pl.Trainer, metrics: StepMetrics) -> None:
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._connector: Any = trainer._logger_connector
        self._module = trainer.lightning_module
        self._metrics = metrics
        self._metric: Metric | None = None
        self._parts = 0
        self._whole = self._results.batch
        # The first batch of an epoch starts the sums anew, which only its first part must do.
        self._is_first_batch = self._connector._first_loop_iter
        self._former = {key: item._forward_cache for key, item in self._of_steps()}
        self._logged: dict[str, list[tuple[Tensor, float | Tensor]]] = {}
        self._returned: dict[str, tuple[Metric, Tensor, Tensor]] = {}
        metrics.begin()

    @contextmanager
    def of_part(self, part: Any, weight: float | Tensor) -> Iterator[None]:
        """Run a part and take what it logged."""
        self._parts += 1
        self._results.batch, self._results.batch_size = part, None
        for _, item in self._of_steps():
            item._forward_cache = None
        with ExitStack() as patches:
            patches.callback(_Seen(self._module, "log", self._see_log).restore)
            patches.callback(_Seen(self._results, "update_metrics", self._see_update).restore)
            yield
        self._connector._first_loop_iter = False
        for key, item in self._of_steps():
            if item._forward_cache is not None:
                self._logged.setdefault(key, []).append((item._forward_cache, weight))

    def end(self) -> None:
        """Show the values of the whole batch."""
        self._metrics.end(self._parts)
        self._replace_returned()
        self._connector._first_loop_iter = self._is_first_batch
        self._results.batch, self._results.batch_size = self._whole, None
        for key, item in self._of_steps():
            if key in self._logged:
                item._forward_cache = self._value(key, item, self._logged[key])
            else:
                item._forward_cache = self._former.get(key)

    def _see_log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        # Lightning passes on a copy, by which a metric's value isn't known any more.
        self._metric = self._metrics.find_returned(value)

    def _see_update(self, key: str, *_: Any) -> None:
        """Take note of a value that a metric returned, and what was there before it."""
        item, metric = self._results[key], self._metric
        if metric is not None and item.is_tensor and item.meta.is_mean_reduction:
            self._returned.setdefault(key, (metric, item.value, item.cumulated_batch_size))

    def _replace_returned(self) -> None:
        for key, (metric, value, size) in self._returned.items():
            item, of_batch = self._results[key], self._metrics.value_of(metric)
            if of_batch is None or not item.meta.on_epoch:
                continue
            item.value = value + of_batch * (item.cumulated_batch_size - size)

    def _of_steps(self) -> list[tuple[str, Any]]:
        return [(key, item) for key, item in self._results.items() if item.meta.on_step]

    def _value(self, key: str, item: Any, logged: list[tuple[Tensor, float | Tensor]]) -> Any:
        metric = self._returned[key][0] if key in self._returned else item.value
        if isinstance(metric, Metric) and (value := self._metrics.value_of(metric)) is not None:
            return value
        values = [value for value, _ in logged]
        if item.is_tensor and not item.meta.is_mean_reduction:
            stacked = torch.stack(values)
            if item.meta.is_sum_reduction:
                return stacked.sum(0)
            return stacked.amax(0) if item.meta.is_max_reduction else stacked.amin(0)
        return weighted_mean(values, [weight for _, weight in logged])


class _Seen(PatchedMethod):
    """A method that is looked at before it is called."""

    def __init__(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        super().__init__(owner, name)
        self._look = look

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look, then call."""
        self._look(*args, **kwargs)
        return self.original(*args, **kwargs)


class LoopMark:
    """What a batch changes in Lightning's loop before it ends, to be put back."""

    def __init__(self, trainer: pl.Trainer) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        self._results: Any = epoch_loop._results
        self._connector: Any = trainer._logger_connector
        self._items = dict(self._results)
        progress = epoch_loop.automatic_optimization.optim_progress.optimizer
        counts = (x for each in (progress.step, progress.zero_grad) for x in vars(each).values())
        self._values = Attributes([self._results, *self._items.values(), *counts], deep=False)
        self._first_loop_iter = self._connector._first_loop_iter
        self._current_fx = self._connector._current_fx

    def put_back(self) -> None:
        """Go back to where this was made."""
        self._results.clear()
        self._results.update(self._items)
        self._values.put_back()
        self._connector._first_loop_iter = self._first_loop_iter
        self._connector._current_fx = self._current_fx
