"""Lightning's mixed precision, made to be switched, to count skipped steps, and not bypassed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from lightning.pytorch.plugins.precision import Precision


class MixedPrecision(LightningMixedPrecision):
    """`lightning.pytorch.plugins.MixedPrecision` that can be active or not.

    Its class has the same name, as Lightning keeps the scaler's state in a checkpoint under that
    name: either finds the other's.

    Attributes:
        loss_scaler: The scaler, also while inactive; `None` in bf16.
        scale: The scaler's scale after the last step.
        skipped_steps: Steps that the scaler has skipped in this run.
        skipped_last_step: Whether the last step was one of them.
    """

    def __init__(self, precision: Literal["16-mixed", "bf16-mixed"], device: str) -> None:
        super().__init__(precision, device)
        self.loss_scaler: torch.amp.GradScaler | None = self.scaler
        self.scale = 1.0
        self.skipped_steps = 0
        self.skipped_last_step = False
        self._active = True
        self._stepping = False

    @property
    def active(self) -> bool:
        """Whether forward runs in autocast and losses are scaled."""
        return self._active

    @active.setter
    def active(self, active: bool) -> None:
        self._active = active
        self.scaler = self.loss_scaler if active else None

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast while active."""
        if not self._active:
            yield
            return
        with super().forward_context():
            yield

    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizable,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Step through the scaler and note whether it skipped."""
        self.skipped_last_step = False
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        # The scaler itself waits for the device here, to see whether a gradient is infinite.
        before = self.scaler.get_scale()
        self._stepping = True
        try:
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        finally:
            self._stepping = False
        self.scale = self.scaler.get_scale()
        self.skipped_last_step = self.scale < before
        self.skipped_steps += self.skipped_last_step
        return result

    def clip_gradients(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip; where nothing is scaled, a fused optimizer's gradients are as good as any."""
        if self.scaler is None:
            Precision.clip_gradients(self, optimizer, *args, **kwargs)
        else:
            super().clip_gradients(optimizer, *args, **kwargs)

    def refuse_bypass(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step of an optimizer that doesn't come through `optimizer_step`.

        Raises:
            RuntimeError: The optimizer was stepped directly, with gradients that are still scaled.
        """
        if self.scaler is not None and not self._stepping:
            raise RuntimeError(
                f"`{type(optimizer).__name__}.step` was called past the loss scaler, with "
                f"gradients {self.scaler.get_scale():g} times too large: step the optimizer that "
                "Lightning hands out (`optimizer.step(closure)`, `self.optimizers()`), or use "
                "`precision='bf16-mixed'`."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, also while inactive."""
        return {} if self.loss_scaler is None else self.loss_scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the scaler's state."""
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state_dict)
