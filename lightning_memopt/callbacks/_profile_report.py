"""What is written of a profiled step: files by every rank, TensorBoard by the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_memopt.callbacks._output import add_page, tensorboard_writers
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


def write_report(trainer: pl.Trainer, profiled: ProfiledStep, folder: Path, step: int) -> str:
    """Write all that is known of a step.

    Args:
        trainer: The Trainer.
        profiled: The step, finished.
        folder: Where files go.
        step: Its number.

    Returns:
        What the step's peak was, and which files there are, in one line.
    """
    device = trainer.strategy.root_device
    is_host = device.type == "cpu"
    files = ProfileFiles(folder, step, trainer.global_rank)
    boards = tensorboard_writers(trainer)
    files.write("modules.txt", modules_table(profiled.modules))
    add_page(boards, f"{_TAG}/modules", modules_table(profiled.modules, _SHOWN_ROWS), step)
    headline = "no timeline"
    if profiled.operators is not None:
        files.write("operators.txt", operators_table(profiled.operators, is_host))
        shown = operators_table(profiled.operators, is_host, _SHOWN_ROWS)
        add_page(boards, f"{_TAG}/operators", shown, step)
        trace = files.path("trace.json.gz")
        profiled.operators.export_chrome_trace(str(trace))
        timeline = profiled.timeline(trace)
        if timeline is not None:
            headline = describe_peak(timeline)
            write_curve(timeline, files.path("timeline.csv"))
            title = f"Step {step} on {device}, rank {trainer.global_rank}"
            for name, (what, draw) in _PICTURES.items() if has_pictures() else ():
                figure = draw(timeline, f"{title}: {what}")
                save_pixels(draw_pixels(figure), files.path(f"{name}.png"))
                if boards:
                    _add_image(boards, name, draw_pixels(figure, BOARD_DPI), step)
    if profiled.snapshot is not None:
        save_snapshot(profiled.snapshot, files.path("snapshot.pickle"))
    if profiled.lines is not None:
        files.write("lines.txt", profiled.lines)
    names = ", ".join(path.name.removeprefix(f"{files.stem}-") for path in files.written)
    return f"{headline}; written to {folder / files.stem}-*: {names}"


def _add_image(boards: list[Any], name: str, pixels: Any, step: int) -> None:
    for board in boards:
        board.add_image(f"{_TAG}/{name}", pixels[:, :, :3], step, dataformats="HWC")
