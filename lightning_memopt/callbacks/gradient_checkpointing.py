"""Less memory for activations, at the price of computing them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_memopt.callbacks._base import ToggledCallback
from lightning_memopt.core.checks import check_bool, check_patterns, check_positive_int, check_word
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.recompute import checkpoint_layers
from lightning_memopt.core.recomputing import explain_mismatch
from lightning_memopt.core.side_effects import counting_twice, is_frozen_stem, own_checkpointing


class GradientCheckpointing(ToggledCallback):
    """Keep only the inputs of the chosen blocks and compute the rest again in backward.

    You gain the memory of what the blocks keep for backward, usually most of a training step's; you
    pay about a third of the step's time if every block is chosen, less with `every` or `keep`.
    Don't use it where memory isn't short, and see `torch.compile` with an activation budget where
    the model compiles. Weights, gradients, BatchNorm statistics, random numbers, parameter names
    and checkpoints are those of a run without it; validation is not recomputed.

    Hooks and metrics inside a block run twice, of which the fit start warns: let them ask
    `lightning_memopt.is_recomputing()`. A block that does not repeat itself ends the run with its
    name. `enable()` and `disable()` switch it while training runs, from the next batch.

    Args:
        layers: `"auto"` for the repeated blocks of the model; otherwise one pattern or several: a
            dotted name, in which `*` stays within one part, or a class name.
        every: Checkpoint every so many of the layers. Raising it costs memory and saves time.
        skip_last: Whether to leave the last layer out: its recomputation comes first in backward,
            when all else is still kept, so it lowers the peak least.
        keep: Results to keep within a block: `"nothing"`, `"attention"` (the fused attention's) or
            `"matmul"` (those and matrix products and convolutions). More memory, less time where
            the device is busy; more time on the host for each operator.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is empty, out of range or an unknown word.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[GradientCheckpointing(every=2)], logger=False)

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
    https://arxiv.org/abs/1604.06174.
    """

    owns = "the `forward` of the model's layers"
    _undo_checkpoint: Callable[[], None] | None = None

    def __init__(
        self,
        layers: str | list[str] = "auto",
        every: int = 1,
        skip_last: bool = False,
        keep: Literal["nothing", "attention", "matmul"] = "nothing",
    ) -> None:
        check_patterns("layers", layers)
        check_positive_int("every", every)
        check_bool("skip_last", skip_last)
        check_word("keep", keep, ("nothing", "attention", "matmul"))
        self.layers = layers
        self.every = every
        self.skip_last = skip_last
        self.keep = keep

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the layers, now that `configure_model` has made them, and checkpoint them."""
        self._choose(pl_module)
        self.undo.callback(self._switch, pl_module, on=False)
        self._switch(pl_module, on=self.enabled)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Switch on or off where that was asked for."""
        # The mode that decides on the model's own switch is often set by its `on_train_start`.
        if self._own and self._own != own_checkpointing(pl_module):
            self._choose(pl_module)
            self._switch(pl_module, on=self.enabled)
        if self.enabled != (self._undo_checkpoint is not None):
            self._switch(pl_module, on=self.enabled)
            state = "on" if self.enabled else "off"
            rank_zero_info(f"GradientCheckpointing: {state} from step {trainer.global_step}")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Name the block in PyTorch's error, and put everything back."""
        explain_mismatch(exception)
        super().on_exception(trainer, pl_module, exception)

    def _choose(self, pl_module: pl.LightningModule) -> None:
        try:
            selected = select_layers(pl_module, self.layers)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error
        selected = selected[: -1 if self.skip_last else None][:: self.every]
        self._own = own_checkpointing(pl_module)
        left_to_own = [name for name, is_training in self._own.items() if is_training]
        self._names = [
            name for name in selected if not any(_is_within(name, outer) for outer in left_to_own)
        ]
        for outer, is_training in self._own.items():
            _warn_of_own_switch(outer, is_training)
        if not self._names and not left_to_own:
            raise MisconfigurationException(
                f"`layers={self.layers!r}`, `every={self.every}` and `skip_last={self.skip_last}` "
                "leave nothing to checkpoint; choose other layers."
            )
        # Those too are checkpointed if their input needs gradients, as that of a prompt does.
        frozen = [name for name in self._names if is_frozen_stem(pl_module, name)]
        active = [name for name in self._names if name not in frozen]
        self._warn(pl_module, active, frozen)
        rank_zero_info(
            f"GradientCheckpointing: checkpointing {len(active)} modules"
            f"{_listed(', first ', active[:1])}"
            f"{_listed('; skipping frozen ', frozen)}"
        )

    def _switch(self, pl_module: pl.LightningModule, *, on: bool) -> None:
        if self._undo_checkpoint is not None:
            self._undo_checkpoint()
            self._undo_checkpoint = None
        if on:
            self._undo_checkpoint = checkpoint_layers(pl_module, self._names, self.keep)

    def _warn(self, pl_module: pl.LightningModule, active: list[str], frozen: list[str]) -> None:
        if frozen and not active:
            rank_zero_warn(
                f"`layers={self.layers!r}` are all frozen and come before what is trained, so "
                "nothing is recomputed unless their input needs gradients; choose later layers."
            )
        twice = counting_twice(pl_module, active)
        if twice:
            rank_zero_warn(
                f"Hooks and metrics in checkpointed layers run twice a step:{_listed(' ', twice)}"
                "; let them return early when `lightning_memopt.is_recomputing()`."
            )
        if len(active) == 1:
            rank_zero_warn(
                f"`layers={self.layers!r}` is one segment, `{active[0]}`: while it is "
                "recomputed all its activations are back, so it lowers the peak only by what the "
                "rest of the model keeps; choose the blocks inside it."
            )


def _is_within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _warn_of_own_switch(name: str, is_training: bool) -> None:
    where = f"`{name}`" if name else "The model"
    if is_training:
        rank_zero_warn(
            f"{where} has its own gradient checkpointing switched on, so its layers are left to "
            "it; switch that off where the model is made to let this callback choose."
        )
    else:
        rank_zero_warn(
            f"{where} has its own gradient checkpointing switched on, but the built-in "
            "checkpointing is inactive because the module is in eval mode; this callback "
            "checkpoints its layers."
        )


def _listed(prefix: str, names: list[str], most: int = 5) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return prefix + ", ".join(names[:most]) + more
