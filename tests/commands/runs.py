"""Event files with exact figures, and the command in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from lightning_memopt.__main__ import main
from lightning_memopt.core.event_file import EventFile, Point

START_S = 1_000_000.0


def write_run(folder: Path, points: Iterable[Point], hparams: str = "", **kwargs: Any) -> Path:
    """Write points into a new event file of a directory, and return the file."""
    before = set(folder.glob("events*"))
    writer = SummaryWriter(str(folder), **kwargs)
    EventFile(writer._get_file_writer()).write(points)
    writer.close()
    if hparams:
        (folder / "hparams.yaml").write_text(hparams)
    (file,) = set(folder.glob("events*")) - before
    return file


def memory_points(
    peaks_gib: Iterable[float], step_s: float = 0.5, allocated_gib: float = 1.0
) -> list[Point]:
    """Return a point a step."""
    return [
        (
            {
                "memory/allocated_gib": allocated_gib + step / 1024,
                "memory/reserved_gib": 2 * peak,
                "memory/peak_allocated_gib": peak,
            },
            step,
            START_S + step * step_s,
        )
        for step, peak in enumerate(peaks_gib)
    ]


def report_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run the command with `--json`, which has to succeed, and return its document."""
    status = main(["report", *map(str, arguments), "--json"])
    output = capsys.readouterr()
    assert status == 0, output.err
    document = json.loads(output.out)
    assert isinstance(document, dict)
    return document


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command, and return its status and what it wrote."""
    status = main(["report", *map(str, arguments)])
    return (status, *capsys.readouterr())
