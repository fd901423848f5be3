from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_memopt.callbacks._base import SuiteCallback, ToggledCallback, callbacks_of
from tests.models import Unit, make_trainer


class Tidy(SuiteCallback):
    """Changes nothing and says when its two changes are undone."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.events.append("setup")
        self.undo.callback(self.events.append, "first undone")
        self.undo.callback(self.events.append, "second undone")


class Painter(Tidy):
    owns = "the colour"


class OtherPainter(Tidy):
    owns = "the colour"


class Sculptor(Tidy):
    owns = "the shape"


LIFE = ["setup", "second undone", "first undone"]


class Raising(Unit):
    error: BaseException = RuntimeError("broken")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


def raising(error: BaseException) -> Raising:
    model = Raising()
    model.error = error
    return model


# What is undone


def test_changes_are_undone_once_after_a_finished_fit_the_last_first():
    callback = Tidy()
    make_trainer(callback).fit(Unit())
    assert callback.events == LIFE


@pytest.mark.parametrize("error", [RuntimeError("broken"), GeneratorExit("broken")])
def test_changes_are_undone_once_after_an_exception(error):
    callback = Tidy()
    with pytest.raises(type(error), match="broken"):
        make_trainer(callback).fit(raising(error))
    assert callback.events == LIFE


def test_changes_are_undone_when_another_callback_fails_in_setup():
    class Broken(pl.Callback):
        def setup(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("broken setup")

    callback = Tidy()
    with pytest.raises(RuntimeError, match="broken setup"):
        make_trainer(callback, Broken()).fit(Unit())
    assert callback.events == LIFE


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_changes_are_undone_after_an_evaluation(stage):
    class Model(Unit):
        val_dataloader = test_dataloader = predict_dataloader = Unit.train_dataloader

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0]

        test_step = validation_step

    callback = Tidy()
    getattr(make_trainer(callback), stage)(Model())
    assert callback.events == LIFE


def test_each_fit_begins_with_nothing_to_undo():
    callback = Tidy()
    for model in (Unit(), raising(RuntimeError("broken")), Unit()):
        if isinstance(model, Raising):
            with pytest.raises(RuntimeError, match="broken"):
                make_trainer(callback).fit(model)
        else:
            make_trainer(callback).fit(model)
    assert callback.events == LIFE * 3


def test_undoing_twice_or_before_any_setup_is_harmless():
    callback = Tidy()
    callback.restore()
    trainer, model = make_trainer(callback), Unit()
    trainer.fit(model)
    callback.on_exception(trainer, model, RuntimeError("late"))
    callback.teardown(trainer, model, "fit")
    assert callback.events == LIFE


def test_one_undo_that_fails_keeps_none_of_the_others_from_running():
    callback, trainer, model = Tidy(), make_trainer(), Unit()
    callback.setup(trainer, model, "fit")

    def fail() -> None:
        raise OSError("can't undo")

    callback.undo.callback(fail)
    with pytest.raises(OSError, match="can't undo"):
        callback.restore()
    assert callback.events == LIFE
    callback.restore()
    assert callback.events == LIFE


# Owners


@pytest.mark.parametrize("pair", [(Painter, OtherPainter), (OtherPainter, Painter)])
def test_the_second_owner_of_a_thing_is_refused_by_name_in_one_line(pair):
    first, second = (kind() for kind in pair)
    text = (
        rf"^`{pair[1].__name__}` and `{pair[0].__name__}` both want the colour: keep one of the "
        rf"two in `Trainer\(callbacks=\.\.\.\)`\.$"
    )
    trainer = make_trainer(first, second)
    with pytest.raises(MisconfigurationException, match=text):
        trainer.fit(Unit())
    assert trainer.global_step == 0
    assert first.events == LIFE
    assert second.events == []


def test_owners_of_different_things_and_of_none_go_together():
    callbacks = [Painter(), Sculptor(), Tidy(), type("Tidier", (Tidy,), {})()]
    make_trainer(*callbacks).fit(Unit())
    assert [callback.events for callback in callbacks] == [LIFE] * 4


def test_callbacks_of_the_model_count_as_owners_too():
    class Model(Unit):
        def configure_callbacks(self) -> list[pl.Callback]:
            return [OtherPainter()]

    with pytest.raises(MisconfigurationException, match="both want the colour"):
        make_trainer(Painter()).fit(Model())


def test_all_callbacks_of_a_trainer_are_found():
    callback = Tidy()
    assert callback in callbacks_of(make_trainer(callback, pl.callbacks.Timer()))


# The other package


class Foreign(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    train_dataloader = Unit.train_dataloader
    training_step = Unit.training_step
    n = batch_size = 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_of_the_other_package_is_refused_in_one_line_before_it_trains():
    callback = Tidy()
    trainer = pytorch_lightning.Trainer(
        callbacks=[callback],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(MisconfigurationException, match="`Tidy`") as caught:
        trainer.fit(Foreign())
    text = str(caught.value)
    assert re.fullmatch(
        r"[^\n]*`lightning\.pytorch`[^\n]*`pytorch_lightning\.[^\n]*Trainer`[^\n]*"
        r"import `Trainer` and `LightningModule` from `lightning\.pytorch`[^\n]*",
        text,
    ), text
    assert trainer.global_step == 0
    assert callback.events == []


# Switches


def test_a_switch_is_on_until_it_is_switched_off():
    callback = ToggledCallback()
    states = [callback.enabled]
    for switch in (callback.disable, callback.disable, callback.enable):
        switch()
        states.append(callback.enabled)
    assert states == [True, False, False, True]
    assert ToggledCallback().enabled
