"""The batch that the training wants, done in micro-batches that fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import LBFGS

from lightning_memopt.callbacks._base import refuse_other_factors
from lightning_memopt.callbacks._effective_batch import EffectiveBatch
from lightning_memopt.callbacks._lightning import PointWriter, estimate_steps
from lightning_memopt.callbacks._lightning_step import split_step
from lightning_memopt.callbacks._micro_batch_size import MicroBatchSize
from lightning_memopt.callbacks._peers import Peers
from lightning_memopt.callbacks._recovering_step import RecoveringStep
from lightning_memopt.callbacks._search import Search, circumstances
from lightning_memopt.callbacks._split_step import SplitStep
from lightning_memopt.callbacks._train_loaders import samples_per_batch
from lightning_memopt.callbacks._weighing import WindowWeighing
from lightning_memopt.core.batches import count_elements, split_batch
from lightning_memopt.core.checks import check_bool, check_positive_int, check_weigh_by, check_word
from lightning_memopt.core.units import parse_size


class AutoAccumulation(WindowWeighing):
    """Do each batch in micro-batches that fit, the largest ones found by a few trials at fit start.

    You gain the batch size that the training wants on a device that is too small for it, without
    a batch size by hand, and a run that goes on when memory runs out: the batch is put back and
    done again in smaller parts. You pay the time of the trials (seconds) and that of smaller parts.
    Gradients, losses, logged values, schedules and the number of steps stay those of the whole
    batch, for a loss that is a mean over samples; layers and losses that couple the samples of a
    batch (BatchNorm, contrastive losses) see micro-batches. Don't use it where the batch fits.

    Override `split_batch` for batches of your own type, and `worst_batch` to say which of the first
    batches needs most memory.

    Args:
        effective_batch_size: Samples of an optimizer step, over all ranks. By default what the
            loader and `Trainer(accumulate_grad_batches=...)` make of it.
        micro_batch_size: Samples done at once; given, nothing is searched. Raising it takes more
            memory and is mostly faster.
        memory: What a step may use, as a size or a share of what this process may use.
        split: `"step"` cuts each batch inside the step: nothing else in the run changes. `"loader"`
            makes the loader give micro-batches, so that the large batch is never on the device;
            `disable` has no effect on it.
        recover: Whether a batch that runs out of memory is done again in smaller parts. In a window
            of several batches a second set of gradients is kept meanwhile.
        weigh_by: How much a micro-batch counts: `"samples"`, `"batches"` (all the same), or a
            function, or its dotted name, from a batch on the device to a number or 0-d tensor.

    Attributes:
        largest: The largest number of samples that was found to fit at once; `None` before.
        chosen: Samples done at once now; `None` before.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range or an unknown word.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutoAccumulation()], logger=False)

    Source: the gradient of a mean is the weighted mean of the gradients of its parts.
    """

    owns = "`accumulate_grad_batches`"
    largest: int | None = None
    chosen: int | None = None
    _restored: dict[str, Any] | None = None
    _asked: tuple[int | None, ...] = ()

    def __init__(
        self,
        effective_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        memory: int | str = "90%",
        split: Literal["step", "loader"] = "step",
        recover: bool = True,
        weigh_by: str | Callable[[Any], float | Tensor] = "samples",
    ) -> None:
        if effective_batch_size is not None:
            check_positive_int("effective_batch_size", effective_batch_size)
        if micro_batch_size is not None:
            check_positive_int("micro_batch_size", micro_batch_size)
        parse_size(memory, "memory")
        check_word("split", split, ("step", "loader"))
        check_bool("recover", recover)
        check_weigh_by("weigh_by", weigh_by)
        self.effective_batch_size = effective_batch_size
        self.micro_batch_size = micro_batch_size
        self.memory = memory
        self.split = split
        self.recover = recover
        self.weigh_by = weigh_by

    def split_batch(self, batch: Any, k: int) -> list[Any]:
        """Cut a batch into `k` parts; override it for batches of your own type.

        Args:
            batch: A batch, on the device (on the host with `split="loader"`).
            k: Number of parts.

        Returns:
            The parts, in order.
        """
        return split_batch(batch, k)

    def worst_batch(self, batches: list[Any]) -> Any:
        """Choose which of the first few batches to try sizes with: the one with most elements.

        Args:
            batches: As the loader gives them.

        Returns:
            One of them, or another batch that no batch of the run exceeds.
        """
        return max(batches, key=count_elements)

    def set_micro_batch_size(self, micro_batch_size: int | None) -> None:
        """Ask for another number of samples at once, while a fit runs.

        It holds from the next batch on, with `split="loader"` from the next epoch on.

        Args:
            micro_batch_size: Samples at once, or `None` to search again, with the next batch.

        Raises:
            TypeError: `micro_batch_size` is not an `int`.
            ValueError: `micro_batch_size` is below one.
        """
        if micro_batch_size is not None:
            check_positive_int("micro_batch_size", micro_batch_size)
        self._asked = (micro_batch_size,)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what can't be split, before `configure_optimizers` asks for the steps."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        is_free = self.effective_batch_size is None
        may_change = is_free and self.split == "step"
        refuse_other_factors(self, trainer, pl_module, may_be_set=is_free, may_change=may_change)
        self.largest = self.chosen = self._restored = None
        self._asked = ()
        self.begin_weighing()
        self._effective = EffectiveBatch(trainer, self.effective_batch_size, self.split == "loader")
        self._writer = PointWriter(trainer)
        self.undo.callback(self._let_go)
        self.undo.callback(self._effective.put_back)
        if self._effective.is_given:
            estimate = estimate_steps(trainer, self._effective.count_steps)
            self._end_estimate = self.undo.callback(estimate)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The schedules are built: set the factor that they were built for."""
        if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise MisconfigurationException(
                "`AutoAccumulation` can't be exact with `LBFGS`, which evaluates a batch several "
                "times: use another optimizer."
            )
        if self._effective.is_given:
            self._end_estimate()
            trainer.fit_loop.setup_data()
            self._effective.plan()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the step, with the micro-batch that is given, restored or found."""
        peers = Peers(trainer)
        weigh = partial(self.weigh, trainer)
        step = partial(RecoveringStep, peers=peers, say=self._say) if self.recover else SplitStep
        self._step = step(
            trainer, pl_module, self.split_batch, weigh, self.weights, self._begin_batch
        )
        self.undo.callback(split_step(trainer, self._step))
        is_own = type(self).split_batch is not AutoAccumulation.split_batch
        search = Search(
            trainer,
            pl_module,
            self.memory,
            self.split_batch if is_own else None,
            self.weights.weigh,
            self.worst_batch,
            is_cut_on_host=self.split == "loader",
            keeps_gradients=self.recover,
            peers=peers,
            writer=self._writer,
        )
        self._size = MicroBatchSize(trainer, self._step, search, self._effective, self._writer)
        self._here = circumstances(trainer, pl_module) | {
            "asked": [self.effective_batch_size, self.memory, self.split],
            "batch": samples_per_batch(trainer),
        }
        is_known = self._restored is not None and self._restored["here"] == self._here
        if self.micro_batch_size is not None:
            self._size.use(self.micro_batch_size, "as given")
        elif peers.all(is_known) and self._restored is not None:
            self._size.use(self._restored["chosen"], "as resumed", self._restored["largest"])
        else:
            self._size.search()
        self._note()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what was asked for, and let a loader that was made anew give micro-batches too."""
        if self.split == "loader":
            self._answer()
            self._effective.use_micro_batches(self._size.chosen)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log a change."""
        self._note()

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and what it was made for, for the checkpoint."""
        if self.chosen is None:
            return {}
        return {"chosen": self.chosen, "largest": self.largest, "here": self._here}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the choice of a checkpoint, to be used if all is as it was."""
        self._restored = state_dict or None

    def _begin_batch(self, batch: Any) -> None:
        if self.split == "step":
            self._answer(batch)
        self._step.micro_batch_size = self._size.chosen if self.enabled else None

    def _answer(self, batch: Any = None) -> None:
        asked, self._asked = self._asked, ()
        self._size.answer(asked, batch)

    def _say(self, line: str) -> None:
        self._size.take_from_step(line)

    def _note(self) -> None:
        self.chosen, self.largest = self._size.chosen, self._size.largest
        self._size.log()

    def _let_go(self) -> None:
        self._writer.flush()
        # They hold the model, the loggers and the group of ranks, which don't pickle.
        for name in ("_writer", "_effective", "_step", "_size", "_end_estimate"):
            vars(self).pop(name, None)
