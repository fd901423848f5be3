"""What `_lightning_step.py` and `_lightning_logs.py` touch of Lightning is where it was."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.optimization import automatic
from torch import Tensor

from lightning_memopt.callbacks._lightning_logs import LoopMark
from lightning_memopt.callbacks._lightning_step import (
    Part,
    SplitOptimization,
    split_step,
    to_device,
)
from lightning_memopt.core.step_metrics import StepMetrics
from lightning_memopt.core.weights import WindowWeights, weigher
from tests.models import Blocks, Unit, make_trainer


class Halves:
    """A step owner that cuts each batch in two and takes down what it is asked."""

    def __init__(self) -> None:
        self.weights = WindowWeights(weigher("batches"))
        self.metrics = StepMetrics([])
        self.calls: list[str] = []

    def begin(self, batch: list[Tensor]) -> None:
        self.calls.append("begin")

    def cut(self, batch: list[Tensor]) -> list[Part]:
        return [Part([x], len(x), 0.5) for x in batch[0].chunk(2)]

    def do(self, loop: Any, batch_idx: int, optimizer: Any, once: Any) -> Any:
        self.calls.append(f"do {batch_idx}")
        result = once()
        self.calls.append(loop.phase)
        return result

    def before_last_backward(self) -> None:
        self.calls.append("before last")

    def after_last_backward(self) -> None:
        self.calls.append("after last")


class Install(pl.Callback):
    def __init__(self, owner: Halves) -> None:
        self.owner = owner

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = trainer.fit_loop.epoch_loop.automatic_optimization
        self.put_back = split_step(trainer, self.owner)
        self.during = trainer.fit_loop.epoch_loop.automatic_optimization

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.put_back()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        loss.mul_(0.5)


def test_the_loop_asks_its_owner_and_is_given_back_with_its_counts() -> None:
    owner, model = Halves(), Unit(n=4, batch_size=2)
    install = Install(owner)
    trainer = make_trainer(install)
    trainer.fit(model)
    one = ["before last", "after last", "the optimizer's step"]
    assert owner.calls == ["begin", "do 0", *one, "begin", "do 1", *one]
    assert model.grads == [1, 1]
    assert type(install.before) is automatic._AutomaticOptimization
    assert type(install.during) is SplitOptimization
    assert trainer.fit_loop.epoch_loop.automatic_optimization is install.before
    assert trainer.global_step == 2
    assert install.before.optim_progress is install.during.optim_progress
    assert trainer.fit_loop.state_dict().keys() == make_trainer().fit_loop.state_dict().keys()


def test_lightnings_part_still_has_what_is_replaced() -> None:
    names = {
        "run": ["optimizer", "batch_idx", "kwargs"],
        "_make_closure": ["kwargs", "optimizer", "batch_idx"],
        "_make_step_fn": ["kwargs"],
        "_make_zero_grad_fn": ["batch_idx", "optimizer"],
        "_make_backward_fn": ["optimizer"],
        "_training_step": ["kwargs"],
    }
    for name, arguments in names.items():
        method = getattr(automatic._AutomaticOptimization, name)
        assert list(method.__code__.co_varnames[1 : method.__code__.co_argcount]) == arguments
    assert set(vars(automatic._AutomaticOptimization(make_trainer()))) >= {"_skip_backward"}


def test_the_result_collection_still_has_what_is_looked_at() -> None:
    class Logging(Blocks):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            results = trainer.fit_loop.epoch_loop._results
            assert isinstance(results, dict)
            assert {"batch", "batch_size"} <= set(vars(results))
            item = results["training_step.loss"]
            assert isinstance(item._forward_cache, Tensor)
            assert all((item.is_tensor, item.meta.on_step, item.meta.is_mean_reduction))
            assert {"is_sum_reduction", "is_max_reduction"} <= set(dir(item.meta))
            assert {"value", "cumulated_batch_size"} <= set(vars(item))
            assert callable(results.update_metrics)
            connector = vars(trainer._logger_connector)
            assert isinstance(connector["_first_loop_iter"], bool)
            assert connector["_current_fx"] == "training_step"
            self.looked = True

    look = Look()
    make_trainer(look).fit(Logging())
    assert look.looked


def test_a_mark_of_the_loop_goes_back() -> None:
    class Logging(Blocks):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("loss", torch.ones(()), on_step=True, on_epoch=True)
            if batch_idx == 1 and not self.is_done:
                self.is_done = True
                trainer, results = self.trainer, self.trainer.fit_loop.epoch_loop._results
                progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
                before = progress.state_dict()
                mark = LoopMark(trainer)
                value = results["training_step.loss"].value
                self.log("loss", torch.ones(()), on_step=True, on_epoch=True)
                self.log("other", torch.ones(()))
                progress.optimizer.step.increment_ready()
                progress.optimizer.zero_grad.increment_completed()
                assert results["training_step.loss"].value != value
                mark.put_back()
                assert results["training_step.loss"].value == value
                assert "training_step.other" not in results
                assert progress.state_dict() == before
            return super().training_step(batch, batch_idx)

        is_done = False

    model = Logging()
    trainer = make_trainer()
    trainer.fit(model)
    assert model.is_done
    assert trainer.callback_metrics["loss_epoch"] == 1


def test_a_batch_goes_to_the_device_by_all_hooks() -> None:
    class Hooked(Blocks):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [x + 1 for x in batch]

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return [x * 10 for x in batch]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [x + 0.5 for x in batch]

    class Move(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.moved = to_device(trainer, [torch.zeros(2)])

    move = Move()
    make_trainer(move, limit_train_batches=1, limit_val_batches=0).fit(Hooked())
    assert move.moved[0].tolist() == [10.5, 10.5]


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_model_that_takes_its_batches_by_itself_is_refused() -> None:
    class Iterating(Unit):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return (self.w * batch[0]).mean()

    with pytest.raises(MisconfigurationException, match=r"`training_step\(dataloader_iter\)`"):
        make_trainer(Install(Halves())).fit(Iterating())
