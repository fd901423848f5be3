"""A training step that is done in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_memopt.callbacks._lightning_step import Part, SplitOptimization
from lightning_memopt.core.batches import copy_structure, count_samples
from lightning_memopt.core.side_effects import normalising_over_batch
from lightning_memopt.core.step_metrics import StepMetrics
from lightning_memopt.core.weights import WindowWeights


class SplitStep:
    """Does each batch in parts of at most `micro_batch_size` samples.

    Args:
        trainer: The Trainer, with its strategy and optimizers ready.
        module: The model.
        split: From a batch and a number of parts to the parts.
        weigh: From the parts of a batch to their weights.
        weights: Those of the window at hand.
        begin: Called with each batch before anything is done with it.

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
        begin: Callable[[Any], None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self.begin = begin
        self._split = split
        self._weigh = weigh
        self.weights = weights
        self.metrics = StepMetrics(each for each in module.modules() if isinstance(each, Metric))
        self.micro_batch_size: int | None = None
        self.recoveries = 0
        self._unsized_parts = 1
        self._has_warned = self._has_warned_of_samples = False
        self.samples: int | None = None
        self.k = 1

    def cut(self, batch: Any) -> list[Part]:
        """Return the parts of a batch, whose containers are not the batch's."""
        self.samples = count_samples(batch)
        self.k = k = self._count_parts(self.samples)
        if k > 1:
            self.warn_of_coupling()
        elif self.samples is None and self.micro_batch_size is not None:
            self._warn_of_unknown_samples(batch)
        parts = [copy_structure(batch)] if k == 1 else self._split(batch, k)
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

    def _warn_of_unknown_samples(self, batch: Any) -> None:
        if not self._has_warned_of_samples:
            self._has_warned_of_samples = True
            rank_zero_warn(
                f"`AutoAccumulation` can't tell the samples of a `{type(batch).__name__}`, so "
                "`micro_batch_size` says nothing: batches stay whole until memory runs out."
            )

    def _count_parts(self, samples: int | None) -> int:
        if samples is None:
            return self._unsized_parts
        at_once = self.micro_batch_size or samples
        return max(1, math.ceil(samples / at_once)) if at_once else 1
