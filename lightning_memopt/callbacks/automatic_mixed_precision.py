"""Half-precision activations and faster arithmetic, chosen for the device."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import LBFGS, Optimizer

from lightning_memopt.callbacks._base import ToggledCallback
from lightning_memopt.callbacks._lightning import (
    PointWriter,
    is_window_end,
    logged_step,
    unscales_itself,
)
from lightning_memopt.callbacks._precision import MixedPrecision
from lightning_memopt.core.checks import check_bool, check_epoch, check_word
from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.precision import PRECISIONS, PrecisionChoice, choose_precision


class AutomaticMixedPrecision(ToggledCallback):
    """Run forward in bf16 or fp16 where the device computes in it, with a loss scaler for fp16.

    You gain about half the memory of activations and, on a GPU, speed; you pay the accuracy of half
    precision in the operators that autocast chooses. Parameters, gradients and optimizer state stay
    fp32 and don't shrink. It is Lightning's `Trainer(precision=...)`, chosen by the device, started
    at an epoch if you like, with the scaler's life logged (`amp/scale`, `amp/skipped_steps`). Use
    `Trainer(precision=...)` where you know what you want from the first step on.

    The scaler's state is in the checkpoint under Lightning's own key, so checkpoints with and
    without this callback are interchangeable. bf16 has no scaler and logs nothing.

    Args:
        precision: `"auto"`, or by name `"bf16-mixed"`, `"16-mixed"` or `"32-true"`.
        start_epoch: First epoch in that precision, counted from 0; epochs before it are fp32. An
            evaluation of its own (`trainer.validate`) is always in that precision.
        hold_lr_on_skip: Whether schedules that step with the optimizer stay where they are when the
            scaler skipped the step.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `precision` is an unknown word or `start_epoch` is below zero.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutomaticMixedPrecision()], logger=False)

    Source: Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.
    """

    owns = "the precision plugin"
    _plugin: MixedPrecision | None = None
    _between_windows = True
    _last_scaler: dict[str, Any] | None = None

    def __init__(
        self,
        precision: Literal["auto", "bf16-mixed", "16-mixed", "32-true"] = "auto",
        start_epoch: int = 0,
        hold_lr_on_skip: bool = False,
    ) -> None:
        check_word("precision", precision, PRECISIONS)
        check_epoch("start_epoch", start_epoch)
        check_bool("hold_lr_on_skip", hold_lr_on_skip)
        self.precision = precision
        self.start_epoch = start_epoch
        self.hold_lr_on_skip = hold_lr_on_skip

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the precision and put its plugin in place, until the run ends."""
        super().setup(trainer, pl_module, stage)
        plain = trainer.strategy.precision_plugin
        if type(plain) is not Precision:
            raise MisconfigurationException(
                "`AutomaticMixedPrecision` sets the precision, but the Trainer's plugin is already "
                f"`{type(plain).__name__}` ({trainer.precision!r}): remove it from the Trainer "
                "(`precision=`, `plugins=`, or a strategy that brings its own), or this callback."
            )
        if self.hold_lr_on_skip and not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "`hold_lr_on_skip=True` needs automatic optimization: with manual optimization "
                "your `training_step` steps the schedules itself."
            )
        device = trainer.strategy.root_device
        choice = (
            choose_precision(device)
            if self.precision == "auto"
            else PrecisionChoice(self.precision, "as asked for")
        )
        since = f" from epoch {self.start_epoch}" if self.start_epoch and stage == "fit" else ""
        rank_zero_info(f"AutomaticMixedPrecision: {choice.precision}{since} ({choice.reason})")
        self._between_windows = True
        if stage == "fit":
            self._last_scaler = None
        if choice.precision == "32-true":
            return
        self._plugin = MixedPrecision(choice.precision, device.type)
        self._plugin.active = self.enabled and (stage != "fit" or self.start_epoch == 0)
        self._writer = PointWriter(trainer)
        trainer.strategy.precision_plugin = self._plugin
        self.undo.callback(setattr, trainer.strategy, "precision_plugin", plain)
        self.undo.callback(self._let_go, keep_scaler=stage == "fit")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what would bypass the scaler, and watch the optimizers for it."""
        if self._plugin is None or self._plugin.loss_scaler is None:
            return
        for optimizer in trainer.optimizers:
            _refuse_unscalable(optimizer, trainer.gradient_clip_val)
            hook = optimizer.register_step_pre_hook(self._plugin.refuse_bypass)
            self.undo.callback(hook.remove)
        if self.hold_lr_on_skip:
            self.undo.callback(_HeldSchedules(pl_module, trainer, self._plugin).restore)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate in the precision that the epoch at hand has, also after a resume."""
        self._switch(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Switch between two windows, so that no window mixes scaled and plain gradients."""
        if self._between_windows:
            self._switch(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the scaler's life."""
        if self._plugin is None:
            return
        self._between_windows = is_window_end(trainer)
        if self._between_windows and self._plugin.scaler is not None:
            values = {
                "amp/scale": float(self._plugin.scale),
                "amp/skipped_steps": float(self._plugin.skipped_steps),
            }
            self._writer.add(values, logged_step(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch ends its last window, even if a hook skipped the rest of it."""
        self._between_windows = True

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the scaler into a checkpoint of a run that has ended, as of one that failed."""
        if self._last_scaler:
            checkpoint.setdefault(MixedPrecision.__qualname__, self._last_scaler)

    def _switch(self, trainer: pl.Trainer) -> None:
        active = self.enabled and trainer.current_epoch >= self.start_epoch
        if self._plugin is None or self._plugin.active == active:
            return
        self._plugin.active = active
        precision = self._plugin.precision if active else "32-true"
        rank_zero_info(f"AutomaticMixedPrecision: {precision} from step {trainer.global_step}")

    def _let_go(self, *, keep_scaler: bool) -> None:
        self._writer.flush()
        if keep_scaler and self._plugin is not None:
            self._last_scaler = self._plugin.state_dict()
        self._plugin = None
        del self._writer  # holds the loggers, which don't pickle


class _HeldSchedules(PatchedMethod):
    """Leaves schedules that follow the optimizer where they are when the scaler skipped a step."""

    def __init__(
        self, pl_module: pl.LightningModule, trainer: pl.Trainer, plugin: MixedPrecision
    ) -> None:
        super().__init__(pl_module, "lr_scheduler_step")
        self._trainer = trainer
        self._plugin = plugin

    def __call__(self, scheduler: Any, metric: Any) -> None:
        """Step one schedule, or not."""
        by_step = any(
            config.scheduler is scheduler and config.interval == "step"
            for config in self._trainer.lr_scheduler_configs
        )
        if not (by_step and self._plugin.skipped_last_step):
            self.original(scheduler, metric)


def _refuse_unscalable(optimizer: Optimizer, clip_val: float | None) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            "`16-mixed` and `LBFGS` don't go together, it evaluates the loss several times a step: "
            "use `precision='bf16-mixed'` or `'32-true'`."
        )
    if clip_val and unscales_itself(optimizer):
        raise MisconfigurationException(
            f"`gradient_clip_val={clip_val}` in `16-mixed` needs an optimizer that doesn't unscale "
            f"gradients itself, but this `{name}` is fused: use `fused=False`, or drop clipping."
        )
