"""The start of a training step, to go back to when memory runs out in the middle of it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memopt.callbacks._lightning_logs import LoopMark
from lightning_memopt.core.ddp import ForwardMark
from lightning_memopt.core.generators import keep
from lightning_memopt.core.random_state import RandomState
from lightning_memopt.core.replay import versions_of
from lightning_memopt.core.rewind import Rewind, weight_versions
from lightning_memopt.core.weights import WindowWeights


class StepMark:
    """All that forward and backward of a batch change, as it was before them.

    Gradients of earlier batches of the window are set aside, and added again when the batch is
    done: that takes the memory of one more set of gradients while they exist, no time, and none of
    either in the first batch of a window.

    Args:
        trainer: The Trainer, about to do a batch.
        parameters: Those whose gradients accumulate.
        rewind: The model's own state.
        weights: Those of the window at hand.
        optimizer: The optimizer that may step at the end of the batch.
        generators: Random generators that the model holds.
        begins_window: Whether gradients start anew with this batch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        parameters: list[nn.Parameter],
        rewind: Rewind,
        weights: WindowWeights,
        optimizer: Optimizer,
        generators: list[Any],
        begins_window: bool,
    ) -> None:
        self._trainer = trainer
        self._parameters = parameters
        self._loop = LoopMark(trainer)
        self._rewind = rewind
        self._rewind.mark()
        self._random = RandomState(trainer.strategy.root_device)
        self._generators = [keep(generator) for generator in generators]
        self._weights = weights
        self._weighed = weights.total, weights.reference
        self._optimizer = optimizer
        self._versions = weight_versions(parameters)
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._forward = ForwardMark(trainer.model)
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._is_added = False
        if not begins_window:
            self._aside = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, _ in self._aside:
                parameter.grad = None

    @property
    def are_weights_changed(self) -> bool:
        """Whether weights, or the optimizer's state, have changed, which can't be put back."""
        if weight_versions(self._parameters) != self._versions:
            return True
        return bool(self._groups) and self._has_state and _probe(self._optimizer) != self._probe

    def add_what_was_set_aside(self) -> None:
        """Add the gradients of the batches before; they are kept until this mark is dropped."""
        if self._is_added:
            return
        self._is_added = True
        with torch.no_grad():
            for parameter, gradient in self._aside:
                if parameter.grad is None:
                    parameter.grad = gradient.clone()
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad + gradient
                else:
                    parameter.grad.add_(gradient)

    def note_optimizer(self) -> None:
        """Take down what the optimizer's step, which comes next, changes first."""
        self._groups = [(group, dict(group)) for group in self._optimizer.param_groups]
        self._has_state = bool(self._optimizer.state)
        self._probe = _probe(self._optimizer)

    def put_back(self, was_stepping: bool) -> None:
        """Go back to the start of the step.

        Args:
            was_stepping: Whether all was done but the optimizer's step.
        """
        self._is_added = False
        for parameter in self._parameters:
            parameter.grad = None
        if was_stepping:
            self._end_unscaling()
            for group, options in self._groups:
                group.clear()
                group.update(options)
            if not self._has_state:
                self._optimizer.state.clear()
        self._groups = []
        self._loop.put_back()
        self._rewind.put_back()
        self._random.put_back()
        for put_back in self._generators:
            if put_back is not None:
                put_back()
        self._weights.total, self._weights.reference = self._weighed
        self._forward.put_back()

    def _end_unscaling(self) -> None:
        """Let a loss scaler unscale again, with the scale that it has."""
        scaler: Any = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.update(new_scale=scaler.get_scale())


def _probe(optimizer: Optimizer) -> list[list[Any]]:
    """Note the versions in the state of what an optimizer changes first in each group.

    Optimizers go through the gradients of a group in order, or through all of them at once.
    """
    found = []
    for group in optimizer.param_groups:
        first = next((p for p in group["params"] if p.grad is not None), None)
        if first is not None:
            state = list(optimizer.state.get(first, {}).values())
            numbers = [value for value in state if isinstance(value, int | float)]
            found.append([*versions_of(state), *numbers])
    return found
