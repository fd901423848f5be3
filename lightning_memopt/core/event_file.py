"""Scalars into TensorBoard's event file at the least cost to the training thread.

TensorBoard's writer builds a message for each event, hands it to a thread that shares the
interpreter lock with training, and computes its checksum there byte by byte in Python. Here the
message of a set of keys is built once and only its numbers change, the checksum comes from a
library in C, and a bunch of events is handed over as one. What is in the file is the same to the
byte. The format is that of TFRecord, https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

_MASK_DELTA = 0xA282EAD8

Point = tuple[Mapping[str, float], int, float]


class EventFile:
    """Writes points through the file writer of a `SummaryWriter`, one event for all of a step.

    Args:
        file_writer: `torch.utils.tensorboard.writer.FileWriter`.
    """

    def __init__(self, file_writer: Any) -> None:
        self._events = file_writer.event_writer
        self._queue = _take_framed_records(self._events)
        self._templates: dict[tuple[str, ...], Any] = {}

    def write(self, points: Iterable[Point]) -> None:
        """Write points: values by tag, the step, and the time in seconds since the epoch."""
        events = (self._event(*point) for point in points)
        if self._queue is None:
            for event in events:
                self._events.add_event(event)  # which makes bytes of it at once
        else:
            records = b"".join(frame_record(event.SerializeToString()) for event in events)
            if (
                records
            ):  # TensorBoard's thread doesn't count what is empty, and waits for it at the end
                self._queue.write(_Framed(records))

    def _event(self, values: Mapping[str, float], step: int, walltime: float) -> Any:
        tags = tuple(values)
        event = self._templates.get(tags)
        if event is None:
            empty = [Summary.Value(tag=tag, simple_value=0.0) for tag in tags]
            event = self._templates[tags] = Event(summary=Summary(value=empty))
        event.step = step
        event.wall_time = walltime
        for slot, value in zip(event.summary.value, values.values(), strict=True):
            slot.simple_value = value
        return event


def frame_record(data: bytes) -> bytes:
    """Return one record: the length and the data, each followed by its checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


class _Framed(bytes):
    """Bytes that are records already."""


def masked_checksum(data: bytes) -> int:
    """Return the checksum of a record's length or data, masked as the format wants it."""
    checksum: int = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_checksum(data))


def _take_framed_records(event_writer: Any) -> Any:
    """Let a TensorBoard writer take records as they are, and return the queue they go into.

    Its order of events and its thread stay. `None` where this version of TensorBoard is built
    otherwise: it then writes as it always did.
    """
    queue = getattr(event_writer, "_async_writer", None)
    record_writer = getattr(queue, "_writer", None)
    file = getattr(record_writer, "_writer", None)
    if queue is None or record_writer is None or file is None:
        return None

    def write(data: bytes) -> None:
        file.write(bytes(data) if isinstance(data, _Framed) else frame_record(data))

    record_writer.write = write
    return queue
