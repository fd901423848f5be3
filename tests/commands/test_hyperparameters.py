from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_memopt.commands._hyperparameters import (
    HyperparametersError,
    differing,
    read_hyperparameters,
)


def read(folder, text):
    (folder / "hparams.yaml").write_text(text)
    return read_hyperparameters(folder)


def test_nested_keys_are_flat_and_plain_lists_are_one_value(tmp_path):
    text = "a: {b: {c: 1}}\nsizes: [1, 2]\nlayers: [{n: 1}, {n: 2}]\nempty: {}\nnone:\n"
    assert read(tmp_path, text) == {
        "a.b.c": 1,
        "sizes": "[1, 2]",
        "layers.0.n": 1,
        "layers.1.n": 2,
        "empty": "{}",
        "none": None,
    }


def test_what_lightning_saves_is_read_without_making_objects_of_it(tmp_path):
    class Model(pl.LightningModule):
        def __init__(self, lr, shape, act):
            super().__init__()
            self.save_hyperparameters()

    model = Model(0.1, (3, 4), torch.nn.functional.relu)
    logger = CSVLogger(tmp_path, name=None, version="")
    logger.log_hyperparams(model.hparams)
    logger.save()
    found = read_hyperparameters(tmp_path)
    assert (found["lr"], found["shape"]) == (0.1, "[3, 4]")
    assert "relu" in str(found["act"])


def test_objects_of_python_are_told_apart_by_their_class(tmp_path):
    text = "x: !!python/object:some.Thing {size: 3}\ny: !!python/object/apply:some.call [1]\n"
    assert read(tmp_path, text) == {
        "x.class": "some.Thing",
        "x.size": 3,
        "y.some.call": "[1]",
    }


def test_yaml_that_holds_itself_ends(tmp_path):
    assert read(tmp_path, "a: &a\n  b: *a\n  c: 1\n") == {"a.b": "...", "a.c": 1}


def test_no_file_has_no_hyperparameters(tmp_path):
    assert read_hyperparameters(tmp_path) == {}


@pytest.mark.parametrize("text", ["a: [", "? [1]\n: 2", "\x00"])
def test_what_is_no_yaml_is_an_error(tmp_path, text):
    with pytest.raises(HyperparametersError, match="can't be read as YAML"):
        read(tmp_path, text)


def test_only_what_differs_is_told(tmp_path):
    nan = float("nan")
    first = {"same": 1, "nan": nan, "lr": 0.1, "gone": None}
    second = {"same": 1.0, "nan": float("nan"), "lr": 0.2, "new": 1}
    assert differing(first, second) == {
        "lr": {"first": 0.1, "second": 0.2},
        "gone": {"first": None},
        "new": {"second": 1},
    }
