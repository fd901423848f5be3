"""The training that options and a LightningCLI configuration describe together."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_memopt.commands._batch_source import (
    batch_of_data,
    batch_of_example,
    batch_of_shapes,
    sized_batch,
)
from lightning_memopt.commands._cli_file import CliFile, read_cli_file
from lightning_memopt.commands._errors import CommandError
from lightning_memopt.commands._targets import call, load_target, read_arguments
from lightning_memopt.core.cards import find_card
from lightning_memopt.core.estimate import Estimate, estimate
from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.model_advice import Advice, advise
from lightning_memopt.core.traced_copy import Plan

_SHORT_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}


class PlannedTraining:
    """A training that is to be estimated; where both say something, options win.

    Attributes:
        notes: What was assumed or left out, a sentence each.

    Raises:
        CommandError: Options or configuration can't be followed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.notes: list[str] = []
        self._options = options
        self._file = CliFile() if options.config is None else read_cli_file(options.config)
        trainer, callbacks = self._file.trainer, self._file.callbacks
        precision = options.precision or _amp_precision(callbacks) or trainer.get("precision")
        precision = str(precision or "32-true")
        self._precision = _SHORT_PRECISIONS.get(precision, precision)
        self._strategy = options.strategy or str(trainer.get("strategy") or "auto")
        self._steps = (
            options.accumulate_grad_batches
            or _accumulation(callbacks)
            or trainer.get("accumulate_grad_batches")
            or 1
        )
        self._checkpoint: str | list[str] | None = None
        self._name = ""
        self._size: int | None = None

    def estimate(self) -> Estimate:
        """Return what it needs, from weights without values if that can be.

        Raises:
            CommandError: Something that the user has named can't be made or used.
        """
        make = self._maker()
        if make is None:
            return self._estimate(load_target(self._options.module))
        try:
            with torch.device("meta"):
                module = make()
        except CommandError:  # constructors may read values
            return self._estimate(make())
        found = self._estimate(module)
        # With values the step may be traced, or at least be tried with small batches.
        return self._estimate(make()) if found.reason else found

    def advice(self) -> list[Advice]:
        """Return what would save most of what was estimated last, if that was traced."""
        device = self._options.device
        library_bytes = find_card(device).library_bytes if self._plan.on_cuda else 0
        return advise(self._plan, self._size, library_bytes)

    def title(self) -> str:
        """Return in one line what was estimated."""
        words = [self._name]
        if self._size is not None:
            words.append(f"{self._size} sample{'' if self._size == 1 else 's'}")
        if self._steps > 1:
            words.append(f"{self._steps} micro-batches a step")
        if self._options.optimizer:
            words.append(self._options.optimizer)
        return ", ".join([*words, self._precision, f"strategy {self._strategy}"])

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain types."""
        return {
            "module": self._name,
            "precision": self._precision,
            "strategy": self._strategy,
            "accumulate_grad_batches": self._steps,
            "checkpoint": self._checkpoint,
            "notes": self.notes,
        }

    def _maker(self) -> Callable[[], Any] | None:
        """Return what makes the module, `None` where an object is named."""
        name = self._options.module
        arguments = {**self._file.model_arguments, **read_arguments(self._options.init)}
        if name is None:
            if self._file.model is None:
                raise CommandError(
                    "A module is needed: `package.module:Name`, or a `--config` that has one."
                )
            if arguments:
                raise CommandError("`--init` needs the module named beside it.")
            return self._file.model
        target = load_target(name)
        return functools.partial(call, target, arguments, name) if _is_maker(target) else None

    def _estimate(self, module: Any) -> Estimate:
        if not isinstance(module, nn.Module):
            raise CommandError(f"The module must be a `torch.nn.Module`, got {module!r:.80}.")
        self._name = type(module).__name__
        batch, module = self._batch(module)
        callback = self._file.callbacks.get("AutoAccumulation", {})
        size = self._options.batch_size or callback.get("micro_batch_size")
        if self._options.input and size is None:
            size = 1  # as of a `DataLoader`
        is_cut = self._steps > 1 or "micro_batch_size" in callback
        batch, self._size = sized_batch(batch, size, is_cut)
        optimizer = self._options.optimizer or self._file.optimizer
        try:
            self._checkpoint = self._layers(module)
            found = estimate(
                module,
                batch,
                self._precision,
                optimizer,
                self._strategy,
                self._options.device,
                checkpoint=self._checkpoint,
                micro_batch_size=self._size,
            )
        except (TypeError, ValueError) as error:
            raise CommandError(str(error).partition("\n")[0]) from error
        on_cuda = self._options.device != "cpu"
        self._plan = Plan(
            module, batch, self._precision, optimizer, self._strategy, self._checkpoint, on_cuda
        )
        return found

    def _layers(self, module: nn.Module) -> str | list[str] | None:
        layers: list[str] | None = self._options.checkpoint
        if layers:
            return layers[0] if len(layers) == 1 else layers
        callback = self._file.callbacks.get("GradientCheckpointing")
        if callback is None:
            return None
        if callback.get("keep", "nothing") != "nothing":
            self._note("`keep` of GradientCheckpointing is not followed, so it will need more")
        names = select_layers(module, callback.get("layers", "auto"))
        return names[: -1 if callback.get("skip_last") else None][:: callback.get("every", 1)]

    def _batch(self, module: nn.Module) -> tuple[Any, nn.Module]:
        if self._options.input:
            return batch_of_shapes(self._options.input), module
        data = self._data
        if data is not None:
            return batch_of_data(data, self._options.batch_size), module
        self._note("the step is forward of `example_input_array`, then backward of its mean")
        return batch_of_example(module)

    @functools.cached_property
    def _data(self) -> Any:
        arguments = {**self._file.data_arguments, **read_arguments(self._options.data_init)}
        name = self._options.data
        if name is None:
            return None if self._file.data is None else self._file.data()
        target = load_target(name)
        return call(target, arguments, name) if _is_maker(target) else target

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _is_maker(target: Any) -> bool:
    return isinstance(target, type | functools.partial) or inspect.isroutine(target)


def _amp_precision(callbacks: Mapping[str, Mapping[str, Any]]) -> str | None:
    if "AutomaticMixedPrecision" not in callbacks:
        return None
    precision = callbacks["AutomaticMixedPrecision"].get("precision", "auto")
    return "bf16-mixed" if precision == "auto" else precision  # what it chooses since Ampere


def _accumulation(callbacks: Mapping[str, Mapping[str, Any]]) -> int | None:
    steps = callbacks.get("GradientAccumulation", {}).get("steps")
    return max(steps.values()) if isinstance(steps, Mapping) else steps
