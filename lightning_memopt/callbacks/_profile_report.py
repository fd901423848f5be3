"""What is written of a profiled step: files by every rank, TensorBoard by the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_memopt.callbacks._output import add_page, tensorboard_writers
from lightning_memopt.core.failure_place import first_line
from lightning_memopt.core.memory_history import save_snapshot
from lightning_memopt.core.profile_files import (
    ProfileFiles,
    describe_peak,
    modules_table,
    operators_table,
    write_curve,
)
from lightning_memopt.core.profiled_step import ProfiledStep
from lightning_memopt.core.timeline_pictures import (
    BOARD_DPI,
    draw_blocks,
    draw_categories,
    draw_pixels,
    has_pictures,
    save_pixels,
)

_TAG = "memory_profile"
_SHOWN_ROWS = 25
_PICTURES = {
    "categories": ("what memory is for", draw_categories),
    "blocks": ("blocks of the allocator", draw_blocks),
}


class UnfinishedReportError(Exception):
    """Not all files of a report could be written; says why, and which are there."""


def write_report(trainer: pl.Trainer, profiled: ProfiledStep, folder: Path, step: int) -> str:
    """Write all that is known of a step.

    Args:
        trainer: The Trainer.
        profiled: The step, finished.
        folder: Where files go.
        step: Its number.

    Returns:
        What the step's peak was, and which files there are, in one line.

    Raises:
        UnfinishedReportError: Some files could be written, and not all.
    """
    files = ProfileFiles(folder, step, trainer.global_rank)
    try:
        headline = _write(trainer, profiled, files, step)
    except Exception as error:
        if files.written:
            raise UnfinishedReportError(f"{first_line(error)}; {files.names}") from error
        raise
    return f"{headline}; {files.names}"


def _write(trainer: pl.Trainer, profiled: ProfiledStep, files: ProfileFiles, step: int) -> str:
    device = trainer.strategy.root_device
    is_host = device.type == "cpu"
    boards = tensorboard_writers(trainer)
    files.write("modules.txt", modules_table(profiled.modules))
    add_page(boards, f"{_TAG}/modules", modules_table(profiled.modules, _SHOWN_ROWS), step)
    headline = "no timeline"
    if profiled.operators is not None:
        files.write("operators.txt", operators_table(profiled.operators, is_host))
        shown = operators_table(profiled.operators, is_host, _SHOWN_ROWS)
        add_page(boards, f"{_TAG}/operators", shown, step)
        with files.path("trace.json.gz") as trace:
            profiled.operators.export_chrome_trace(str(trace))
            if not trace.stat().st_size:  # the disk is full, and nobody says so
                raise OSError(f"{trace.name} is empty: is the disk full?")
        timeline = profiled.timeline(trace)
        if timeline is not None:
            headline = describe_peak(timeline)
            with files.path("timeline.csv") as path:
                write_curve(timeline, path)
            title = f"Step {step} on {device}, rank {trainer.global_rank}"
            for name, (what, draw) in _PICTURES.items() if has_pictures() else ():
                figure = draw(timeline, f"{title}: {what}")
                with files.path(f"{name}.png") as path:
                    save_pixels(draw_pixels(figure), path)
                if boards:
                    _add_image(boards, name, draw_pixels(figure, BOARD_DPI), step)
    if profiled.snapshot is not None:
        with files.path("snapshot.pickle") as path:
            save_snapshot(profiled.snapshot, path)
    if profiled.lines is not None:
        files.write("lines.txt", profiled.lines)
    return headline


def _add_image(boards: list[Any], name: str, pixels: Any, step: int) -> None:
    for board in boards:
        board.add_image(f"{_TAG}/{name}", pixels[:, :, :3], step, dataformats="HWC")
