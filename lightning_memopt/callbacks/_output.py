"""Where a callback writes its files, and what it shows in TensorBoard beside curves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger


def output_directory(trainer: pl.Trainer, dirpath: str | Path | None, name: str) -> Path:
    """Return the directory of a callback's files; all ranks have to ask, and at the same time.

    Args:
        trainer: The Trainer.
        dirpath: What the user asked for.
        name: Name of the directory within the logger's, or within `default_root_dir`, else.
    """
    logged = trainer.log_dir  # which is sent from rank 0 to all
    if dirpath is not None:
        return Path(dirpath).expanduser()
    root = logged or trainer.default_root_dir
    return Path(name) if "://" in root else Path(root) / name


def unused_path(path: Path, *suffixes: str) -> Path:
    """Return a path without suffix that no file has: this one, or one with a number at its end.

    Args:
        path: The path; a dot in its name is no suffix.
        suffixes: Those of the files that will be written.
    """
    found, number = path, 1
    while any(found.with_name(found.name + suffix).exists() for suffix in suffixes):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def tensorboard_writers(trainer: pl.Trainer) -> list[Any]:
    """Return the `SummaryWriter` of each TensorBoard logger; on rank 0 alone."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [logger.experiment for logger in loggers if isinstance(logger, TensorBoardLogger)]


def add_page(writers: Iterable[Any], tag: str, text: str, step: int) -> None:
    """Show a text in TensorBoard as it is, its columns under each other."""
    page = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown's code
    for writer in writers:
        writer.add_text(tag, page, step)
