"""What all callbacks of the suite share: one owner for each thing, and everything is put back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler


class SuiteCallback(Callback):
    """A Lightning callback that undoes what it changed, after a fit and after a failure alike.

    A subclass registers each undo on `self.undo` when it makes the change. Lightning calls
    `teardown` after a run that ended and only `on_exception` after one that raised (Ctrl-C too):
    both close the stack, and closing it twice is harmless.

    Attributes:
        owns: The one thing of the Trainer that this callback decides, in the user's words; two
            callbacks that own the same thing are refused. `None` owns nothing.
        undo: What to undo when the run ends, last change first. Made in `setup`.
    """

    owns: ClassVar[str | None] = None
    undo: ExitStack

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a foreign Trainer and a second owner, and start with nothing to undo."""
        name = type(self).__name__
        if not isinstance(trainer, pl.Trainer):
            raise MisconfigurationException(
                f"`{name}` is built on `lightning.pytorch`, but this Trainer is a "
                f"`{type(trainer).__module__}.{type(trainer).__name__}`: import `Trainer` and "
                "`LightningModule` from `lightning.pytorch`; the two packages don't mix."
            )
        self.undo = ExitStack()
        if self.owns is None:
            return
        for other in callbacks_of(trainer):
            if other is self:
                break
            if isinstance(other, SuiteCallback) and other.owns == self.owns:
                raise MisconfigurationException(
                    f"`{name}` and `{type(other).__name__}` both want {self.owns}: "
                    "keep one of the two in `Trainer(callbacks=...)`."
                )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put back all that was changed."""
        self.restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Put back all that was changed."""
        self.restore()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: while a run goes on, what belongs to the run stays with it."""
        state = dict(vars(self))
        if "undo" in state:
            state = {key: x for key, x in state.items() if key != "undo" and key[:1] != "_"}
        return state

    def restore(self) -> None:
        """Undo every change that is still in place."""
        undo = self.__dict__.pop("undo", None)
        if undo is not None:
            undo.close()


class ToggledCallback(SuiteCallback):
    """A callback that can be switched off and on while training runs.

    Attributes:
        enabled: What was asked for last; it takes effect at the next boundary that is safe.
    """

    enabled: bool = True

    def enable(self) -> None:
        """Switch the callback on, from the next step."""
        self.enabled = True

    def disable(self) -> None:
        """Switch the callback off, from the next step."""
        self.enabled = False


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """Return all callbacks of a Trainer, the model's own included."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def refuse_other_factors(
    callback: SuiteCallback,
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    may_be_set: bool = False,
    may_change: bool = False,
) -> None:
    """Refuse a Trainer in which anything but `callback` decides how gradients accumulate.

    Args:
        callback: The one that decides.
        trainer: The Trainer.
        pl_module: The model.
        may_be_set: Whether it goes well with a factor that the Trainer has.
        may_change: Whether it goes well with a factor that changes by epoch.

    Raises:
        MisconfigurationException: The Trainer, another callback, the strategy or the user's
            `training_step` decides.
    """
    schedulers = [x for x in callbacks_of(trainer) if isinstance(x, GradientAccumulationScheduler)]
    if not pl_module.automatic_optimization:
        reason = "needs automatic optimization: your `training_step` decides when to step"
    elif trainer.strategy.handles_gradient_accumulation:
        strategy = type(trainer.strategy).__name__
        reason = f"can't set the factor of `{strategy}`, which accumulates by itself: set it there"
    elif trainer.accumulate_grad_batches != 1 and not may_be_set:
        value = trainer.accumulate_grad_batches
        reason = f"and `Trainer(accumulate_grad_batches={value})` both set the factor: keep one"
    elif schedulers and not may_change:
        reason = "and `GradientAccumulationScheduler` both set the factor: keep one of the two"
    else:
        return
    raise MisconfigurationException(f"`{type(callback).__name__}` {reason}.")
