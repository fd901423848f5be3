from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_memopt.commands import _runs
from lightning_memopt.commands._errors import CommandError
from lightning_memopt.commands._run_figures import steps_per_second
from lightning_memopt.commands._runs import Curve, Run, find_runs, read_runs
from tests.commands.runs import START_S, memory_points, write_run


def read(folder: Path) -> Run:
    (run,) = find_runs([folder])
    read_runs([run])
    return run


def test_every_scalar_is_what_tensorboards_own_reader_has(tmp_path):
    write_run(tmp_path, memory_points([4, 8, 6]))
    write_run(tmp_path, memory_points([1, 2]), filename_suffix=".more")
    with SummaryWriter(str(tmp_path), filename_suffix=".others") as writer:
        writer.add_text("page", "text", 3)
        writer.add_histogram("weights", torch.arange(10.0), 3)
        writer.add_scalar("loss", 0.1, 3, walltime=START_S)
    theirs = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    own = read(tmp_path)
    assert set(own.curves) == set(theirs.Tags()["scalars"])
    assert len(own.curves["memory/allocated_gib"].steps) == 5
    for tag, curve in own.curves.items():
        points = [(x.step, x.value, x.wall_time) for x in theirs.Scalars(tag)]
        assert list(zip(curve.steps, curve.values, curve.times, strict=True)) == points


def test_what_a_writer_takes_back_is_left_out(tmp_path):
    write_run(tmp_path, memory_points([1, 2, 9]))
    write_run(tmp_path, memory_points([1, 2, 3])[2:], purge_step=2, filename_suffix=".resumed")
    assert list(read(tmp_path).curves["memory/peak_allocated_gib"].values) == [1, 2, 3]


def test_the_empty_files_of_the_profiler_are_no_runs(tmp_path):
    (tmp_path / "events.out.tfevents.1.host.profile-empty").touch()
    with pytest.raises(CommandError, match="no TensorBoard event file"):
        find_runs([tmp_path])


def test_progress_is_said_when_reading_takes_long(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, memory_points([1.0] * 100))
    read(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_runs, "_PROGRESS_SECONDS", 0)
    monkeypatch.setattr(_runs, "_PROGRESS_BYTES", 5000)
    read(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert lines[0].startswith("read ")
    assert " of events, about 0 s left" in lines[0]


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(0, 0), (1, 0.25), (2, 0.5), (3, 0.75)], 4),
        ([(0, 0), (1, 0.25), (2, 60), (3, 60.25), (4, 60.5), (5, 600), (6, 600.25)], 4),  # pauses
        ([(0, 0), (50, 12.5), (100, 25)], 4),  # a point every 50 steps
        ([(0, 0), (1, 0.25), (2, 0.5), (1, 90), (2, 90.25), (3, 90.5)], 4),  # resumed
        ([(0, 0)], None),
        ([(0, 0), (1, 0)], None),
        ([(3, 0), (3, 5)], None),
    ],
)
def test_steps_per_second_are_the_usual_ones(points, rate):
    curve = Curve()
    for step, time_s in points:
        curve.add(step, 1.0, START_S + time_s)
    run = Run("run", Path(), {"memory/allocated_gib": curve})
    assert steps_per_second(run) == rate
