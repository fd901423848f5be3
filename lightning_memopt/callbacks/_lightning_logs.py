"""What `self.log` holds back, seen part by part and put back: private, each with the reason.

Lightning keeps the value that a step shows, and the sums that an epoch shows, in its result
collection; there is no public way to them. `tests/callbacks/test_lightning_step.py` fails loudly on
a version of Lightning that moved one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_memopt.core.joined_outputs import weighted_mean
from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.rewind import Attributes
from lightning_memopt.core.step_metrics import StepMetrics


class PartLogs:
    """Makes one value for the step, and one for the epoch, of what `self.log` got in each part.

    A mean is weighed as the parts are, and a metric's value is that of all parts together. Ranks
    synchronise a step's value once, when all of them have done the batch.

    Args:
        trainer: The Trainer, in a training batch.
        metrics: The metrics of the model.
    """

    def __init__(self, trainer: pl.Trainer, metrics: StepMetrics) -> None:
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._connector: Any = trainer._logger_connector
        self._module: Any = trainer.lightning_module
        self._metrics = metrics
        self._whole = self._results.batch
        # The first batch of an epoch starts the sums anew, which only its first part must do.
        self._is_first_batch = self._connector._first_loop_iter
        self._parts = 0
        self._weight: float | Tensor = 1.0
        self._metric: Metric | None = None
        self._logged: dict[str, list[_Logged]] = {}
        self._before: dict[str, tuple[Any, ...]] = {}
        metrics.begin()

    @contextmanager
    def of_part(self, part: Any, weight: float | Tensor) -> Iterator[None]:
        """Run a part and take what it logs."""
        self._parts += 1
        self._weight = weight
        self._results.batch, self._results.batch_size = part, None
        with ExitStack() as patches:
            patches.callback(_Seen(self._module, "log", self._see_log).restore)
            patches.callback(_Seen(self._results, "update_metrics", self._see_update).restore)
            yield
        self._connector._first_loop_iter = False

    def end(self) -> None:
        """Show the values of the whole batch."""
        self._metrics.end(self._parts)
        self._connector._first_loop_iter = self._is_first_batch
        self._results.batch, self._results.batch_size = self._whole, None
        for key, logged in self._logged.items():
            item = self._results[key]
            item.meta.sync._generate_sync_fn()
            value = self._value(item, logged)
            if item.is_tensor and item.meta.is_mean_reduction and item.meta.on_epoch:
                sum_before, size_before = self._before[key]
                item.value = sum_before + value * (item.cumulated_batch_size - size_before)
            if item.meta.on_step:
                item._forward_cache = item.meta.sync(value.clone()) if item.is_tensor else value

    def _see_log(self, *arguments: Any, **named: Any) -> None:
        # Lightning passes on a copy, by which a metric's value isn't known any more.
        value = arguments[1] if len(arguments) > 1 else named.get("value")
        self._metric = self._metrics.find_returned(value)

    def _see_update(self, key: str, value: Any, *_: Any) -> None:
        """Take a value, of which the result collection makes a sum."""
        item, metric, self._metric = self._results[key], self._metric, None
        if key not in self._logged:
            self._before[key] = tuple(vars(item).get(x) for x in ("value", "cumulated_batch_size"))
        # One rank may have other parts than another, or none that it gets through.
        item.meta.sync._fn = item.meta.sync.no_op
        if not item.is_tensor:
            value, metric = value._forward_cache, value
        self._logged.setdefault(key, []).append(_Logged(value, self._weight, metric))

    def _value(self, item: Any, logged: list[_Logged]) -> Any:
        metric = logged[0].metric
        if metric is not None and (value := self._metrics.value_of(metric)) is not None:
            return value
        values = [each.value for each in logged]
        if any(not isinstance(value, Tensor) for value in values):
            return values[-1]
        values = [value if value.is_floating_point() else value.float() for value in values]
        if item.is_tensor and not item.meta.is_mean_reduction:
            stacked = torch.stack(values)
            if item.meta.is_sum_reduction:
                return stacked.sum(0)
            return stacked.amax(0) if item.meta.is_max_reduction else stacked.amin(0)
        return weighted_mean(values, [each.weight for each in logged])


@dataclass(frozen=True)
class _Logged:
    """What was logged in a part: its value, how much the part counts, the metric that gave it."""

    value: Any
    weight: float | Tensor
    metric: Metric | None


class _Seen(PatchedMethod):
    """A method that is looked at before it is called."""

    def __init__(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        super().__init__(owner, name)
        self._look = look

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look, then call."""
        self._look(*args, **kwargs)
        return self.original(*args, **kwargs)


@contextmanager
def unlogged(trainer: pl.Trainer) -> Iterator[None]:
    """Let nothing remain of what is logged, by whatever way, in steps outside of the loop."""
    epoch_loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    connector: Any = trainer._logger_connector
    results, current, name = epoch_loop._results, connector._current_fx, module._current_fx_name
    epoch_loop._results = type(results)(training=True)
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        epoch_loop._results = results
        connector._current_fx, module._current_fx_name = current, name


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
