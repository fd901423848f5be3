"""A training step done again in smaller parts when memory runs out in the middle of it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from lightning_memopt.callbacks._lightning import is_window_end
from lightning_memopt.callbacks._lightning_step import OPTIMIZER_STEP, Part, SplitOptimization
from lightning_memopt.callbacks._peers import STOPPED, Peers, is_lost_connection
from lightning_memopt.callbacks._split_step import SplitStep
from lightning_memopt.callbacks._step_mark import StepMark
from lightning_memopt.core.batches import tensors_of
from lightning_memopt.core.generators import held_by, keep
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.micro_batch_search import next_parts
from lightning_memopt.core.oom import is_out_of_memory, requested_bytes
from lightning_memopt.core.replay import versions_of
from lightning_memopt.core.rewind import Rewind
from lightning_memopt.core.units import format_bytes

_HELP = (
    "`GradientCheckpointing` or `AutomaticMixedPrecision` make a sample smaller, a leaner "
    "optimizer (SGD, or `foreach=False`) its step"
)


class RecoveringStep(SplitStep):
    """Does a batch again in smaller parts when memory runs out in the middle of it.

    Ranks go back together or not at all. Once gradients are being synchronised nobody can: the
    ranks that got through have the others' gradients already.

    Args:
        arguments: Those of `SplitStep`.
        peers: The other ranks.
        say: Called with one line each time.
    """

    def __init__(self, *arguments: Any, peers: Peers, say: Callable[[str], None]) -> None:
        super().__init__(*arguments)
        self._peers = peers
        self._say = say
        self._rewind = Rewind(self._module)
        self._parameters = list(self._module.parameters())
        self._generators = [each for each in held_by(self._module) if keep(each) is not None]
        self._has_peers = self._trainer.world_size > 1
        self._is_in_sync = False

    def cut(self, batch: Any) -> list[Part]:
        """Return the parts of a batch."""
        parts = super().cut(batch)
        self._batch, self._tensors = batch, tensors_of(batch)
        self._batch_versions = versions_of(self._tensors)
        return parts

    def do(
        self, loop: SplitOptimization, batch_idx: int, optimizer: Optimizer, once: Callable[[], Any]
    ) -> Any:
        """Do a batch; where memory runs out, put everything back and do it in smaller parts."""
        self._mark = StepMark(
            self._trainer,
            self._parameters,
            self._rewind,
            self.weights,
            optimizer,
            self._generators,
            begins_window=batch_idx % self._trainer.accumulate_grad_batches == 0,
        )
        self._is_in_sync = False
        try:
            while True:
                try:
                    return super().do(loop, batch_idx, optimizer, once)
                except _PeerFailedError:
                    why, parts = "on another rank", self.k
                except Exception as error:
                    parts = self._more_parts(error, loop.phase)
                    why = f"in {loop.phase}{_asked_for(error)}"
                    self._peers.all(False)
                # Only out here is the traceback gone, which held what the step had made.
                self._go_back(loop.phase)
                self._take_parts(parts)
                self._say(f"out of memory {why} at batch {batch_idx}: {self._outcome()}")
        finally:
            del self._mark, self._batch, self._tensors

    def before_last_backward(self) -> None:
        """Before gradients are synchronised, let all ranks know that this one got so far."""
        if self._has_peers and is_window_end(self._trainer):
            self._agree()
            self._is_in_sync = True
        self._mark.add_what_was_set_aside()

    def after_last_backward(self) -> None:
        """Let all ranks know of what is done, if they don't yet, and look at the optimizer."""
        if self._has_peers and not self._is_in_sync:
            self._agree()
        self._mark.add_what_was_set_aside()  # a last part without a loss has no backward
        self._mark.note_optimizer()

    def _agree(self) -> None:
        if not self._peers.all(True):
            raise _PeerFailedError

    def _more_parts(self, error: Exception, phase: str) -> int:
        """Return the number of parts to go on with, or raise what can't be helped."""
        if self._is_in_sync and is_lost_connection(error):
            raise RuntimeError(STOPPED) from error
        if not is_out_of_memory(error):
            raise error
        if self._is_in_sync:
            raise RuntimeError(
                "Out of memory while gradients were synchronised between ranks, or later in the "
                "step: no rank can go back from there, so training stops. Lower `memory` or "
                "`micro_batch_size` of `AutoAccumulation`."
            ) from error
        if self._mark.are_weights_changed:
            done = "the optimizer" if phase == OPTIMIZER_STEP else "the step"
            raise _advised(error, f"{done} had begun to change weights; {_HELP}")
        if versions_of(self._tensors) != self._batch_versions:
            raise _advised(error, "`training_step` changes its batch in place: copy it there first")
        if self.samples is not None:
            parts = next_parts(self.samples, self.k)
            if parts is None:
                raise _advised(error, f"this was one sample at a time already; {_HELP}")
            return parts
        if not self._can_be_cut(2 * self.k):
            raise _advised(error, "the batch can't be cut further: override its `split_batch`")
        return 2 * self.k

    def _can_be_cut(self, parts: int) -> bool:
        try:
            return len(self._split(self._batch, parts)) > self.k
        except (TypeError, ValueError):
            return False

    def _go_back(self, phase: str) -> None:
        gc.collect()
        self._mark.put_back(was_stepping=phase == OPTIMIZER_STEP)
        memory_reader(self._trainer.strategy.root_device).release_cache()
        self.recoveries += 1

    def _take_parts(self, parts: int) -> None:
        if self.samples is None:
            self._unsized_parts = parts
        else:
            # Ranks may have batches of other sizes, and so other numbers of parts.
            self.micro_batch_size = self._peers.least(math.ceil(self.samples / parts))

    def _outcome(self) -> str:
        parts, size = self._count_parts(self.samples), self.micro_batch_size
        of = "" if size is None else f" of {size} sample{'s' if size > 1 else ''}"
        return f"put back and done again in {parts} parts{of}, which holds from here"


class _PeerFailedError(Exception):
    """Another rank has to do its batch again, so this one has to as well."""


def _asked_for(error: Exception) -> str:
    size = requested_bytes(error)
    return "" if size is None else f" ({format_bytes(size)} asked for)"


def _advised(error: Exception, advice: str) -> Exception:
    error.args = (f"{error} AutoAccumulation: {advice}.", *error.args[1:])
    return error
