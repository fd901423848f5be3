"""The weights of an accumulation window, in the hooks of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.callbacks._base import ToggledCallback
from lightning_memopt.core.weights import Weight, WindowWeights, correct, weigher


class WindowWeighing(ToggledCallback):
    """Gives each batch its weight in a window, and the window the gradient of its mean.

    Attributes:
        weigh_by: How a batch is weighed, as the user wrote it.
        weights: Those of the window at hand. Made by `begin_weighing`.
    """

    weigh_by: str | Callable[[Any], float | Tensor]
    weights: WindowWeights
    _warned = False

    def begin_weighing(self) -> None:
        """Start a run.

        Raises:
            MisconfigurationException: `weigh_by` is a name that leads to nothing.
        """
        self._warned = False
        try:
            self.weights = WindowWeights(weigher(self.weigh_by))
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    def weigh(self, trainer: pl.Trainer, parts: list[Any]) -> list[Weight]:
        """Return how much each part of a batch counts; a batch that isn't cut is its one part."""
        is_alone = trainer.accumulate_grad_batches == 1 and trainer.world_size == 1
        if is_alone and len(parts) == 1:
            return [self.weights.unit]
        weights = [self.weights.weigh(part) for part in parts]
        known = [weight for weight in weights if weight is not None]
        if len(known) < len(weights):
            self._warn_of_unknown_weights(parts)
            known = [self.weights.unit / len(parts)] * len(parts)
        if len(parts) > 1:  # what has no weight must be known before its backward
            known = [float(weight) for weight in known]
        total = sum(known)
        if is_alone and not isinstance(total, Tensor):
            self.weights.reference = total  # nothing else is in this window
        elif self.weights.reference is None:
            self.weights.reference = trainer.strategy.broadcast(float(total) or 1.0)
        return known

    def _warn_of_unknown_weights(self, parts: list[Any]) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"The number of samples in a `{type(parts[0]).__name__}` can't be told, so every "
                'batch counts the same, as `weigh_by="batches"`: pass a function from the batch to '
                "its weight as `weigh_by`."
            )

    def on_before_zero_grad(self, *_: Any) -> None:
        """Start to count a window with its gradients."""
        self.weights.begin()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Let the batch count for what it weighs."""
        self.weights.scale(loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Turn the sum of the window into its mean: after unscaling, before clipping."""
        total = self.weights.total
        if trainer.world_size > 1 and self.weigh_by != "batches":
            mine = torch.as_tensor(total, device=trainer.strategy.root_device, dtype=torch.float32)
            # `strategy.reduce` would make the host wait at a barrier.
            total = trainer.strategy.all_gather(mine).mean()
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        correct(parameters, trainer.accumulate_grad_batches * self.weights.unit, total)
        self.weights.begin()  # a step may come without a backward, as in SWA's last epoch
