"""Lightning's training step, cut into parts: the private seams, each with the reason.

Lightning offers no public way to run a batch in several passes before one optimizer step.
`tests/callbacks/test_lightning_step.py` fails loudly on a version of Lightning that moved one of
these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.callbacks._lightning_logs import PartLogs
from lightning_memopt.core.joined_outputs import join_outputs, weighted_mean
from lightning_memopt.core.step_metrics import StepMetrics
from lightning_memopt.core.weights import WindowWeights

FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "the optimizer's step"


@dataclass(frozen=True)
class Part:
    """A micro-batch of the batch at hand.

    Attributes:
        batch: The samples, of the type that the loader gives.
        size: Number of samples; `None` where it can't be told.
        weight: How much it counts.
    """

    batch: Any
    size: int | None
    weight: float | Tensor

    @property
    def has_weight(self) -> bool:
        """Whether it counts; on a device it may."""
        return isinstance(self.weight, Tensor) or self.weight != 0


class StepOwner(Protocol):
    """Decides how a batch is done.

    Attributes:
        weights: Those of the accumulation window at hand.
        metrics: The metrics of the model.
    """

    weights: WindowWeights
    metrics: StepMetrics

    def begin(self, batch: Any) -> None:
        """A batch comes; all hooks before it have run."""

    def cut(self, batch: Any) -> list[Part]:
        """Return the parts of a batch."""

    def do(
        self, loop: SplitOptimization, batch_idx: int, optimizer: Optimizer, once: Callable[[], Any]
    ) -> Any:
        """Call `once`, which does the whole batch, as often as need be."""

    def before_last_backward(self) -> None:
        """All of the batch is done but the last part's backward."""

    def after_last_backward(self) -> None:
        """All of the batch is done but the optimizer's step."""


class SplitOptimization(_AutomaticOptimization):
    """Lightning's part of the loop that does forward, backward and the optimizer's step.

    Forward and backward are done for one part of the batch after the other; gradients are zeroed
    before the first backward and, with several ranks, synchronised in the last one.

    Attributes:
        phase: What runs now.
    """

    def __init__(self, old: _AutomaticOptimization, owner: StepOwner) -> None:
        super().__init__(old.trainer)
        self.optim_progress = old.optim_progress
        self._skip_backward = old._skip_backward
        self._owner = owner
        self.phase = FORWARD

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        """Do one batch."""
        run = super().run
        self._owner.begin(kwargs["batch"])

        def once() -> Any:
            self.phase = FORWARD
            self._parts = self._owner.cut(kwargs["batch"])
            return run(optimizer, batch_idx, kwargs)

        return self._owner.do(self, batch_idx, optimizer, once)

    def _make_closure(
        self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> Any:
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
        backward = self._make_backward_fn(optimizer)
        closures = []
        # What has no weight may have no finite loss either, such as a mean over no tokens.
        for i, part in enumerate(self._parts):
            of_part = OrderedDict(kwargs)
            of_part["batch"] = part.batch
            backward_of_part = backward if part.has_weight else None
            if i == len(self._parts) - 1:
                backward_of_part = self._last(backward, part)
            closures.append(
                Closure(
                    step_fn=self._make_step_fn(of_part),
                    backward_fn=backward_of_part,
                    zero_grad_fn=zero_grad if i == 0 else None,
                )
            )
        return _PartsClosure(self, self._owner, self._parts, closures)

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        self.phase = FORWARD
        return super()._training_step(kwargs)

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        if backward is None:
            return None

        def backward_fn(loss: Tensor) -> None:
            self.phase = BACKWARD
            backward(loss)

        return backward_fn

    def _last(self, backward: Callable[[Tensor], None] | None, part: Part) -> Any:
        if backward is None:
            return None
        # Ranks synchronise in it, and a batch that isn't cut is as without the callback.
        is_needed = part.has_weight or self.trainer.world_size > 1 or len(self._parts) == 1

        def last_backward(loss: Tensor) -> None:
            self._owner.before_last_backward()
            if is_needed:
                backward(loss)

        return last_backward


class _PartsClosure(AbstractClosure[ClosureResult]):
    """Forward and backward of all parts, with the result of the whole batch."""

    def __init__(
        self,
        loop: SplitOptimization,
        owner: StepOwner,
        parts: list[Part],
        closures: list[Closure],
    ) -> None:
        super().__init__()
        self._loop = loop
        self._owner = owner
        self._parts = parts
        self._closures = closures

    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Do the parts."""
        trainer = self._loop.trainer
        if len(self._parts) == 1 and trainer.world_size == 1:
            self._owner.weights.take(self._parts[0].weight)
            result = self._closures[0].closure()
            self._owner.after_last_backward()
            return result
        logs = PartLogs(trainer, self._owner.metrics)
        results = []
        for i, (part, closure) in enumerate(zip(self._parts, self._closures, strict=True)):
            self._owner.weights.take(part.weight)
            is_last = i == len(self._parts) - 1
            with (
                logs.of_part(part.batch, part.weight),
                _block_parallel_sync_behavior(trainer.strategy, not is_last),
            ):
                result = closure.closure()
            # The graph's loss would keep what backward needed of a part until the batch ends.
            results.append(None if result.loss is None else result.asdict())
        self._owner.after_last_backward()
        logs.end()
        return _joined(self._parts, results)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._result = self.closure(*args, **kwargs)
        self._loop.phase = OPTIMIZER_STEP
        return self._result.loss


def _joined(parts: list[Part], results: list[dict[str, Any] | None]) -> ClosureResult:
    done = [(p, r) for p, r in zip(parts, results, strict=True) if r is not None]
    joined = ClosureResult(None)
    if done:
        weights = [part.weight for part, _ in done]
        outputs = [result for _, result in done]
        losses = [output.pop("loss") for output in outputs]
        joined.loss = weighted_mean(losses, weights)
        joined.extra = join_outputs(outputs, [part.size for part, _ in done], weights)
    return joined


def split_step(trainer: pl.Trainer, owner: StepOwner) -> Callable[[], None]:
    """Let `owner` decide how each batch is done, until the returned function is called.

    Raises:
        MisconfigurationException: The model takes its batches from the loader by itself.
    """
    step = trainer.lightning_module.training_step
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "`AutoAccumulation` can't cut batches that `training_step(dataloader_iter)` takes by "
            "itself: write it as `training_step(batch, batch_idx)`."
        )
    epoch_loop = trainer.fit_loop.epoch_loop
    old = epoch_loop.automatic_optimization
    epoch_loop.automatic_optimization = SplitOptimization(old, owner)

    def put_back() -> None:
        epoch_loop.automatic_optimization = old

    return put_back


def to_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Return a batch of the loader as the training step gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    # It finds the hook of the datamodule or of the model, for which there is no public call.
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
