from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from lightning_memopt.core.event_file import EventFile, frame_record

POINTS = [({"memory/a": 1.5, "memory/b": -2.0}, step, 1000.0 + step) for step in range(250)]


class Bytes(list):
    """A file that keeps what is written."""

    write = list.append


def events(folder: Path) -> list:
    (file,) = folder.glob("events.*")
    return list(EventFileLoader(str(file)).Load())


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 5])
def test_a_record_is_tensorboards_own_to_the_byte(data):
    stock = Bytes()
    RecordWriter(stock).write(data)
    assert b"".join(stock) == frame_record(data)


def test_all_values_of_a_step_are_one_event(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    EventFile(writer._get_file_writer()).write(POINTS)
    writer.close()
    written = events(tmp_path)[1:]  # after the version of the format
    assert [(event.step, event.wall_time) for event in written] == [
        (step, walltime) for _, step, walltime in POINTS
    ]
    assert all([v.tag for v in event.summary.value] == list(POINTS[0][0]) for event in written)


def test_no_points_write_nothing_and_the_writer_still_closes(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    queue = EventFile(writer._get_file_writer())._queue
    given = []
    queue.write = given.append
    EventFile(writer._get_file_writer()).write([])
    del queue.write
    assert given == []
    writer.close()
    assert len(events(tmp_path)) == 1  # the version of the format


def test_what_others_write_keeps_its_place(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("before", 1, 0)
    file = EventFile(writer._get_file_writer())
    file.write(POINTS[:2])
    writer.add_scalar("between", 2, 0)
    file.write(POINTS[2:3])
    writer.close()
    tags = [event.summary.value[0].tag for event in events(tmp_path)[1:]]
    assert tags == ["before", "memory/a", "memory/a", "between", "memory/a"]


def test_this_tensorboard_takes_bunches(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    assert EventFile(writer._get_file_writer())._queue is not None
    writer.close()


def test_another_tensorboard_writes_as_it_always_did(tmp_path):
    class Other:
        def __init__(self, event_writer):
            self.add_event = event_writer.add_event

    writer = SummaryWriter(str(tmp_path))
    file_writer = writer._get_file_writer()
    stock = file_writer.event_writer
    file_writer.event_writer = Other(stock)
    EventFile(file_writer).write(POINTS)
    file_writer.event_writer = stock
    writer.close()
    assert len(events(tmp_path)) == 1 + len(POINTS)
