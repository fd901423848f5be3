"""How the anatomy of a fit's first steps is shown: printed, and in TensorBoard."""

from __future__ import annotations

import io
from contextlib import suppress

import lightning.pytorch as pl
from rich.console import Console

from lightning_memopt.callbacks._lightning import logged_step
from lightning_memopt.callbacks._output import add_page, tensorboard_writers
from lightning_memopt.core.anatomy import Anatomy
from lightning_memopt.core.anatomy_pictures import draw_anatomy
from lightning_memopt.core.anatomy_tables import advice_table, anatomy_tables
from lightning_memopt.core.model_advice import Advice
from lightning_memopt.core.timeline_pictures import BOARD_DPI, draw_pixels, has_pictures

_TAG = "memory/anatomy"
_WIDTH = 110


def show_anatomy(
    trainer: pl.Trainer, anatomy: Anatomy, advice: list[Advice], verbose: bool
) -> None:
    """Print an anatomy, and show it in TensorBoard as text and, with matplotlib, as bars.

    Args:
        trainer: The Trainer, on rank 0.
        anatomy: What to show.
        advice: What would save most of it.
        verbose: Whether to print it.
    """
    tables = [anatomy_tables(anatomy)]
    if advice:
        tables.append(advice_table(advice, anatomy.peak))
    if verbose:
        console = Console()
        console.print("MemoryMonitor: where the memory of a step is")
        console.print(*tables, sep="")
    step = logged_step(trainer)
    writers = tensorboard_writers(trainer)
    if not writers:
        return
    page = io.StringIO()
    Console(file=page, width=_WIDTH).print(*tables, sep="")
    add_page(writers, _TAG, page.getvalue(), step)
    with suppress(ImportError):  # a broken matplotlib, or none
        if has_pictures():
            pixels = draw_pixels(draw_anatomy(anatomy), BOARD_DPI)
            for writer in writers:
                writer.add_image(_TAG, pixels, step, dataformats="HWC")
