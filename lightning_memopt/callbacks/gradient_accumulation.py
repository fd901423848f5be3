"""A large batch from small ones, with exactly the large one's gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS

from lightning_memopt.callbacks._base import refuse_other_factors
from lightning_memopt.callbacks._lightning import (
    PointWriter,
    estimate_steps,
    is_within_epoch,
    logged_step,
)
from lightning_memopt.callbacks._weighing import WindowWeighing
from lightning_memopt.core.accumulation import (
    next_boundary,
    optimizer_steps,
    plan_windows,
    steps_asked,
)
from lightning_memopt.core.checks import check_positive_int, check_schedule, check_weigh_by


class GradientAccumulation(WindowWeighing):
    """Step the optimizer once in several batches, with the gradient of the one big batch.

    You gain the training of a batch that doesn't fit; you pay the time of the small batches. Unlike
    `Trainer(accumulate_grad_batches=...)` the gradient of a window is exact for a loss that is a
    mean over samples: short last windows, epochs shorter than the window, micro-batches of unequal
    size, loaders without a length, resumed runs and unequal ranks included. Batch-coupled layers
    (BatchNorm) still see the small batches. Don't use it where the big batch fits.

    The number of batches a window can change while training runs (`set_steps`); a change waits for
    a batch that begins a window of both lengths, and a resumed run goes on with it.

    Args:
        steps: Batches a window, for the whole run or from an epoch on, as `{0: 8, 4: 2}`. Raising
            it makes the effective batch larger and the optimizer steps fewer.
        weigh_by: How much a batch counts within its window: `"samples"`, by its number of samples;
            `"batches"`, all the same, as Lightning does; or a function, or its dotted name, from
            the batch on the device to a number or 0-d tensor, such as the tokens that count.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `steps` is below one or empty, or `weigh_by` is an unknown word.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[GradientAccumulation(4)], logger=False)

    Source: the gradient of a mean is the weighted mean of the gradients of its parts.
    """

    owns = "`accumulate_grad_batches`"
    _override: int | None = None
    _override_epoch = 0
    _epoch = 0
    _ended = False
    _factor: int | None = None
    _restored: dict[str, Any] | None = None
    _end_estimate: Callable[[], None] | None = None

    def __init__(
        self,
        steps: int | dict[int, int],
        weigh_by: str | Callable[[Any], float | Tensor] = "samples",
    ) -> None:
        check_schedule("steps", steps)
        check_weigh_by("weigh_by", weigh_by)
        self.steps = steps
        self.weigh_by = weigh_by

    def set_steps(self, steps: int) -> None:
        """Ask for another number of batches a window.

        It is applied at the next batch that begins a window of both lengths, at the latest with the
        next epoch, and holds until the next entry of a schedule by epoch.

        Args:
            steps: Batches a window.

        Raises:
            TypeError: `steps` is not an `int`.
            ValueError: `steps` is below one.
        """
        check_positive_int("steps", steps)
        self._override_epoch = 0 if self._ended else self._epoch
        self._override, self._ended = steps, False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the factor before `configure_optimizers` asks how many steps there will be."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_other_factors(self, trainer, pl_module)
        if self._ended:
            self._override, self._override_epoch, self._epoch = None, 0, 0
        self._restored = None
        self._announced: int | None = None
        self.begin_weighing()
        self._writer = PointWriter(trainer)
        self.undo.callback(self._let_go)
        self.undo.callback(setattr, trainer, "accumulate_grad_batches", 1)
        self._set(trainer, self._wanted(0))
        if isinstance(self.steps, dict):
            estimate = partial(optimizer_steps, self._wanted)
            self._end_estimate = self.undo.callback(estimate_steps(trainer, estimate))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The schedules are built: give the Trainer its own estimate back."""
        if self._end_estimate is not None:
            self._end_estimate()
            self._end_estimate = None
        if self.steps != 1 and any(
            isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers
        ):
            raise MisconfigurationException(
                "`GradientAccumulation` can't be exact with `LBFGS`, which evaluates the last "
                "batch of a window several times: use `steps=1` or another optimizer."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what the windows of an epoch are, or with what a resumed run goes on."""
        self._epoch = trainer.current_epoch
        resumed = ""
        if self._restored is not None:
            self._override = self._restored["override"]
            self._override_epoch = self._restored["override_epoch"]
            self.weights.reference = self._restored["reference"]
            resumed = "resumed with "
        now = self._wanted(self._epoch)
        if self._restored is None:
            self._set(trainer, now)
        else:
            # Lightning checks with it where the checkpoint was made; the first batch may change it.
            self._set(trainer, self._restored["factor"])
            now = self._restored["factor"] if is_within_epoch(trainer) else now
        self._writer.add({"accumulation/steps": float(now)}, logged_step(trainer))
        batches = trainer.num_training_batches
        if batches == float("inf"):
            windows = f"{now} batches a window of an unknown number, as the loader has no length"
        else:
            windows = str(plan_windows(int(batches), now))
        rank_zero_info(f"GradientAccumulation: {resumed}{windows}")
        if batches < now:
            rank_zero_warn(
                f"An epoch has fewer batches than a window, {batches} < {now}: the optimizer steps "
                f"at the end of each epoch, with the mean of {batches} batches. Lower `steps` or "
                "make epochs longer."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Change the factor where a window of both lengths begins, and weigh the batch."""
        self._epoch = trainer.current_epoch
        now, wanted = trainer.accumulate_grad_batches, self._wanted(self._epoch)
        if now != wanted:
            self._change(trainer, batch_idx, now, wanted)
        self.weights.take(self.weigh(trainer, [batch])[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the factor in force, for the checkpoint."""
        if self._factor is None:
            return {}
        return {
            "steps": self.steps,
            "factor": self._factor,
            "override": self._override,
            "override_epoch": self._override_epoch,
            "reference": self.weights.reference,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the factor of a checkpoint, unless `steps` has been changed since."""
        if state_dict["steps"] == self.steps:
            self._restored = state_dict
            return
        rank_zero_info(
            f"GradientAccumulation: `steps` is {self.steps}, no longer the checkpoint's "
            f"{state_dict['steps']}; the new one holds from here"
        )

    def _wanted(self, epoch: int) -> int:
        if not self.enabled:
            return 1
        return steps_asked(self.steps, epoch, self._override, self._override_epoch)

    def _set(self, trainer: pl.Trainer, factor: int) -> None:
        trainer.accumulate_grad_batches = self._factor = factor

    def _change(self, trainer: pl.Trainer, batch_idx: int, now: int, wanted: int) -> None:
        boundary = next_boundary(batch_idx, now, wanted)
        if boundary > batch_idx:
            if self._announced != wanted:
                self._announced = wanted
                rank_zero_info(
                    f"GradientAccumulation: {wanted} batches a window requested at batch "
                    f"{batch_idx}, applied at batch {boundary} or with the next epoch"
                )
            return
        self._announced = None
        self._set(trainer, wanted)
        self._writer.add({"accumulation/steps": float(wanted)}, logged_step(trainer))
        rank_zero_info(
            f"GradientAccumulation: {wanted} batches a window applied at batch {batch_idx} of "
            f"epoch {self._epoch}, before {now}; schedules that step with the optimizer keep the "
            "length they were built with"
        )

    def _let_go(self) -> None:
        # What was asked for stays until the next run: a checkpoint of a failure still needs it.
        self._ended = True
        self._end_estimate = None
        self._writer.flush()
        del self._writer  # holds the loggers, which don't pickle
