from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_memopt.callbacks._output import (
    output_directory,
    tensorboard_writers,
    unused_path,
)
from tests.models import Recorder, make_trainer


@pytest.mark.parametrize("logger", [TensorBoardLogger, CSVLogger])
def test_files_go_beside_those_of_the_logger(logger: Any, tmp_path: Path) -> None:
    trainer = make_trainer(logger=logger(tmp_path))
    assert output_directory(trainer, None, "oom") == Path(trainer.logger.log_dir) / "oom"


def test_without_a_logger_they_go_to_the_trainers_directory(tmp_path: Path) -> None:
    trainer = make_trainer(default_root_dir=tmp_path)
    assert output_directory(trainer, None, "oom") == tmp_path / "oom"


def test_a_directory_of_the_users_is_taken_as_it_is(tmp_path: Path) -> None:
    trainer = make_trainer(default_root_dir=tmp_path)
    assert output_directory(trainer, "mine", "oom") == Path("mine")
    assert output_directory(trainer, tmp_path, "oom") == tmp_path
    assert output_directory(trainer, "~/mine", "oom") == Path.home() / "mine"


def test_files_of_a_run_that_is_logged_elsewhere_are_local() -> None:
    trainer = make_trainer(default_root_dir="memory://bucket/run")
    assert output_directory(trainer, None, "oom") == Path("oom")


def test_a_path_is_new_for_all_of_its_suffixes(tmp_path: Path) -> None:
    path = tmp_path / "a.b"
    assert unused_path(path, ".txt", ".pickle") == path
    (tmp_path / "a.b.pickle").touch()
    assert unused_path(path, ".txt") == path
    assert unused_path(path, ".txt", ".pickle") == tmp_path / "a.b-2"
    (tmp_path / "a.b-2.txt").touch()
    assert unused_path(path, ".txt", ".pickle") == tmp_path / "a.b-3"


def test_only_tensorboard_has_writers(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path)
    trainer = make_trainer(logger=[Recorder(), board])
    assert tensorboard_writers(trainer) == [board.experiment]
    assert tensorboard_writers(make_trainer()) == []
