"""The search for a micro-batch in a Trainer: its trials, and what the ranks agree on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.parameter import is_lazy

from lightning_memopt.callbacks._base import SuiteCallback, callbacks_of
from lightning_memopt.callbacks._first_batches import first_batches
from lightning_memopt.callbacks._lightning import PointWriter
from lightning_memopt.callbacks._lightning_step import to_device
from lightning_memopt.callbacks._peers import Peers
from lightning_memopt.callbacks._search_report import Found, report, why_nothing_fits
from lightning_memopt.callbacks._trials import TrialError, Trials
from lightning_memopt.core.batches import count_samples, split_batch, take_samples
from lightning_memopt.core.generators import same_randomness
from lightning_memopt.core.memory import read_memory
from lightning_memopt.core.memory_limits import usable_bytes
from lightning_memopt.core.micro_batch_search import MicroBatchSearch
from lightning_memopt.core.oom import SampleTooLargeError
from lightning_memopt.core.units import parse_size
from lightning_memopt.core.weights import Weigher

_LOOKED_AT = 3
_SILENT_S = 3.0
_COMPARED = 16
_SAME_LOSS = 0.02  # half precision differs by less


class NothingRanError(RuntimeError):
    """No trial ran, for another reason than memory."""


@dataclass(frozen=True)
class Search:
    """Finds the micro-batch to train with, says what was tried, and leaves no trace.

    Attributes:
        trainer: The Trainer, about to train.
        pl_module: The model.
        memory: What a step may use, as a size or a share of what this process may use.
        split: The user's own way to cut a batch, if there is one: it decides which sizes there are.
        weigh: From a part of a batch to how much it counts.
        worst: From the first few batches to the one to try sizes with.
        is_cut_on_host: Whether batches are cut before they are on the device.
        keeps_gradients: Whether a second set of gradients is kept where a step has several batches.
        peers: The other ranks; all take the least that one of them found.
        writer: Takes the curve; its x is the number of samples.
    """

    trainer: pl.Trainer
    pl_module: pl.LightningModule
    memory: int | str
    split: Callable[[Any, int], list[Any]] | None
    weigh: Weigher
    worst: Callable[[list[Any]], Any]
    is_cut_on_host: bool
    keeps_gradients: bool
    peers: Peers
    writer: PointWriter

    def in_loader(self) -> Found | None:
        """Look at the first few batches and search with the worst one.

        Returns:
            What was found; `None` where the batches can't be read twice.

        Raises:
            MisconfigurationException: A batch can't be cut, or a rank can't try by itself.
            SampleTooLargeError: Not even one sample fits.
            NothingRanError: A trial failed for another reason and nothing ran before.
        """
        self._refuse_untriable()
        batches = first_batches(self.trainer, _LOOKED_AT)
        if not batches:
            return None
        worst = self.worst(batches)
        # On its way to the device a batch may be augmented.
        with same_randomness(self.trainer.strategy.root_device):
            if self.is_cut_on_host:
                return self._search(worst, partial(to_device, self.trainer))
            return self._search(to_device(self.trainer, worst), lambda part: part)

    def in_batch(self, batch: Any) -> Found:
        """Search with a batch on the device; raises what `in_loader` does."""
        self._refuse_untriable()
        return self._search(batch, lambda part: part)

    def _refuse_untriable(self) -> None:
        strategy, reason = self.trainer.strategy, ""
        if isinstance(strategy, SingleDeviceStrategy):
            return
        if type(strategy) is not DDPStrategy:
            reason = f"`{type(strategy).__name__}` shares a model between ranks"
        elif any(isinstance(module, SyncBatchNorm) for module in self.pl_module.modules()):
            reason = "`SyncBatchNorm` talks to the other ranks"
        if reason:
            raise MisconfigurationException(
                "`AutoAccumulation` can't try sizes on a rank of its own, as "
                f"{reason}: give `micro_batch_size`."
            )

    def _search(self, batch: Any, place: Callable[[Any], Any]) -> Found:
        samples = count_samples(batch)
        if samples is None and self.split is None:
            raise MisconfigurationException(
                f"`AutoAccumulation` can't tell the samples of a `{type(batch).__name__}`, so it "
                'can\'t cut it: override its `split_batch`, or use `split="loader"`, where the '
                "loader makes smaller batches."
            )
        if samples is None or any(map(is_lazy, self.pl_module.parameters())):
            return Found(None, None)

        def part_of(size: int) -> Any:
            if size == samples:
                return place(batch)
            if self.split is not None:
                return place(self.split(batch, math.ceil(samples / size))[0])
            return place(take_samples(batch, size))

        return self._find(batch, samples, part_of)

    def _find(self, batch: Any, samples: int, part_of: Callable[[int], Any]) -> Found:
        usable = usable_bytes(self.trainer.strategy.root_device)
        size = parse_size(self.memory, "memory")
        limit = None if size.is_share and usable is None else size.of(usable or 0)
        search = MicroBatchSearch(samples, limit)
        keeps = self.keeps_gradients and (
            self.is_cut_on_host or self.trainer.accumulate_grad_batches > 1
        )
        trials = Trials(self.trainer, self.pl_module, part_of, limit, keeps)
        with trials.without_trace(batch):
            failure = _try_sizes(search, trials)
            if search.chosen is not None and 1 < search.chosen < samples:
                self._look_for_coupling(trials, min(search.chosen, _COMPARED))
        # Before anything is raised, so that no rank is left waiting.
        chosen, largest = (self.peers.least(x or 0) for x in (search.chosen, search.largest))
        if failure is not None and search.chosen is None:
            raise NothingRanError(
                f"`AutoAccumulation` found no size that runs, as a step fails with {failure}. Mend "
                "it, or give `micro_batch_size`."
            )
        if search.chosen is None:
            raise SampleTooLargeError(
                why_nothing_fits(search, f"in {trials.phase}: {trials.asked}", usable)
                + _what_helps(self.trainer)
            )
        if chosen == 0:
            raise NothingRanError(
                "`AutoAccumulation` found no size that runs on another rank: see its output, or "
                "give `micro_batch_size`."
            )
        if failure is not None:
            rank_zero_warn(f"`AutoAccumulation` ended its trials early, at one with {failure}")
        found = Found(largest, chosen)
        report(search, found, usable, self.trainer.is_global_zero, self.writer)
        return found

    def _look_for_coupling(self, trials: Trials, size: int) -> None:
        def halve(batch: Any) -> list[tuple[Any, float | Tensor]]:
            parts = (self.split or split_batch)(batch, 2)
            weights = [self.weigh(part) for part in parts]
            return [(x, 1.0 if w is None else w) for x, w in zip(parts, weights, strict=True)]

        losses = trials.compare_with_halves(size, halve)
        if losses is not None and not math.isclose(*losses, rel_tol=_SAME_LOSS, abs_tol=1e-6):
            rank_zero_warn(
                f"`AutoAccumulation`: the loss of {size} samples is {losses[0]:.4g}, but the mean "
                f"of its halves' {losses[1]:.4g}, so results change with the micro-batch. If it is "
                "a mean over something else than samples, such as tokens, say so by `weigh_by`; a "
                "loss that compares the samples of a batch can't be cut."
            )


def circumstances(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """Return what a choice of micro-batch depends on, to know whether it still holds."""
    device = trainer.strategy.root_device
    parameters = [p for p in pl_module.parameters() if not is_lazy(p)]
    name = device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "device": name,
        "memory": read_memory(device).device_total,
        "ranks": trainer.world_size,
        "precision": trainer.precision_plugin.precision,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "suite": sorted(
            type(callback).__name__
            for callback in callbacks_of(trainer)
            if isinstance(callback, SuiteCallback)
        ),
    }


def _try_sizes(search: MicroBatchSearch, trials: Trials) -> str | None:
    """Run the trials and return why they ended early, if they did."""
    begun = time.monotonic()
    while (size := search.next_size()) is not None:
        if time.monotonic() - begun > _SILENT_S:
            rank_zero_info(f"AutoAccumulation: trying {size} samples")
        try:
            search.add(trials.run(size))
        except TrialError as error:
            return str(error)
    return None


def _what_helps(trainer: pl.Trainer) -> str:
    helpers = {
        "GradientCheckpointing": "`GradientCheckpointing()`, which keeps less for backward",
        "AutomaticMixedPrecision": "`AutomaticMixedPrecision()`, which halves activations",
    }
    present = {type(callback).__name__ for callback in callbacks_of(trainer)}
    absent = [text for name, text in helpers.items() if name not in present]
    return f" What helps: {'; '.join([*absent, 'a smaller model or input'])}."
