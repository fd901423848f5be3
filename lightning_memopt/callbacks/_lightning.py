"""The only place that touches what Lightning keeps private, each with the reason.

`tests/callbacks/test_lightning.py` fails loudly on a version of Lightning that moved one of these.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.accelerators.cuda import _clear_cuda_memory
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_memopt.core.event_file import EventFile

_MAX_POINTS = 100
_MAX_AGE_S = 5.0


def logged_step(trainer: pl.Trainer) -> int:
    """Return the x that `self.log` uses now.

    `trainer.global_step` counts the steps of every optimizer; the x of `self.log` does not, and
    Lightning offers no public name for it.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def is_window_end(trainer: pl.Trainer) -> bool:
    """Return whether the optimizer steps on the batch at hand.

    The rule (factor, last batch, unsized loaders, strategies) is Lightning's, without a public
    name.
    """
    return not trainer.fit_loop._should_accumulate()


def is_within_epoch(trainer: pl.Trainer) -> bool:
    """Return whether a resumed run goes on in the middle of an epoch."""
    return 0 <= trainer.fit_loop.epoch_loop.batch_idx < trainer.num_training_batches - 1


def unscales_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer takes scaled gradients, as the fused ones do.

    PyTorch tells its scaler by this attribute, and Lightning asks for it too.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class PointWriter:
    """Writes points to every logger of a Trainer, cheaply to TensorBoard.

    All values of a step are one event, and points are handed over in bunches: at the latest after a
    few seconds, when the run ends, and when it fails. Other loggers get each point at once through
    `log_metrics`.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        loggers = trainer.loggers if trainer.is_global_zero else []
        self._boards: list[Any] = [logger for logger in loggers if _writes_plain_events(logger)]
        self._others = [logger for logger in loggers if not _writes_plain_events(logger)]
        self._points: list[tuple[Mapping[str, float], int, float]] = []
        self._files: dict[int, tuple[Any, EventFile]] = {}
        self._flush_at = time.monotonic() + _MAX_AGE_S

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write one point: values by key, at x = `step`."""
        for logger in self._others:
            logger.log_metrics(dict(values), step=step)
        if self._boards:
            self._points.append((values, step, time.time()))
            if len(self._points) >= _MAX_POINTS or time.monotonic() >= self._flush_at:
                self.flush()

    def flush(self) -> None:
        """Hand over all points that are still held back."""
        points, self._points = self._points, []
        self._flush_at = time.monotonic() + _MAX_AGE_S
        for logger in self._boards if points else []:
            # Lightning writes hyperparameters through the same writer: `SummaryWriter` has no
            # public call for several values in one event.
            file_writer = logger.experiment._get_file_writer()
            if self._files.get(id(logger), (None,))[0] is not file_writer:
                self._files[id(logger)] = file_writer, EventFile(file_writer)
            _, file = self._files[id(logger)]
            prefix = _prefix(logger)
            file.write(
                ({prefix + key: x for key, x in values.items()} if prefix else values, step, time_)
                for values, step, time_ in points
            )

    def add_layout(self, layout: Mapping[str, Mapping[str, list[str]]]) -> None:
        """Put curves on shared charts: category -> chart -> keys (TensorBoard's custom scalars)."""
        for logger in self._boards:
            prefix = _prefix(logger)
            logger.experiment.add_custom_scalars(
                {
                    category: {
                        chart: ["Multiline", [prefix + key for key in keys]]
                        for chart, keys in charts.items()
                    }
                    for category, charts in layout.items()
                }
            )


def _writes_plain_events(logger: Logger) -> bool:
    """Tell Lightning's own TensorBoard logger from one whose `log_metrics` somebody changed."""
    return (
        isinstance(logger, TensorBoardLogger)
        and type(logger).log_metrics is TensorBoardLogger.log_metrics
        and "log_metrics" not in vars(logger)
    )


def _prefix(logger: Any) -> str:
    # `TensorBoardLogger(prefix=...)` is kept under a private name only.
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""


def estimate_steps(trainer: pl.Trainer, steps: Callable[[int, int], int]) -> Callable[[], None]:
    """Let `trainer.estimated_stepping_batches` answer for a factor that changes by epoch.

    It is a property that knows one factor for the whole run; schedules built from it in
    `configure_optimizers` would end elsewhere than training. A subclass carries the answer until
    the returned function is called.

    Args:
        trainer: The Trainer.
        steps: From the batches of an epoch and the epochs to the optimizer steps of the run.

    Returns:
        A function that puts the class back.
    """
    original: Any = type(trainer)

    def estimated_stepping_batches(self: pl.Trainer) -> int | float:
        stock: int | float = original.estimated_stepping_batches.fget(self)  # loads the loader
        batches, epochs = self.num_training_batches, self.max_epochs
        if batches == float("inf") or epochs is None or epochs == -1:
            return stock
        total = steps(int(batches), epochs)
        return total if self.max_steps == -1 else min(total, self.max_steps)

    answer = {"estimated_stepping_batches": property(estimated_stepping_batches)}
    trainer.__class__ = type(original.__name__, (original,), answer)

    def put_back() -> None:
        trainer.__class__ = original

    return put_back


def train_loaders(trainer: pl.Trainer) -> CombinedLoader | None:
    """Return the train loaders as the loop holds them; `None` before it has any.

    `trainer.train_dataloader` is public, but without the mode in which several are combined.
    """
    loaders: CombinedLoader | None = trainer.fit_loop._combined_loader
    return loaders


def set_train_loaders(trainer: pl.Trainer, loaders: CombinedLoader, fetch: bool = True) -> None:
    """Give the loop other train loaders, and end the workers of those before.

    `setup_data` makes loaders, fetcher and iterator in one go, without a seam in between.

    Args:
        trainer: The Trainer.
        loaders: The loaders.
        fetch: Whether batches come from them from now on.
    """
    trainer.fit_loop._combined_loader = loaders
    fetcher = trainer.fit_loop._data_fetcher
    if fetch and fetcher is not None:
        fetcher.teardown()
        fetcher.setup(loaders)
        iter(fetcher)


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a loader like another but for some attributes, with workers of its own.

    A `DataLoader` refuses new values for most attributes, and to build a subclass anew needs
    arguments that nobody kept. Workers that persist hang on `_iterator`.
    """
    copied = copy.copy(loader)
    vars(copied).update(changes, _iterator=None)
    return copied


def clear_matmul_workspaces(device: torch.device) -> None:
    """Free what cuBLAS keeps for the next product, as Lightning does when a fit ends.

    PyTorch has no public call for it.
    """
    if device.type == "cuda":
        _clear_cuda_memory()
