"""Reads TensorBoard's event files back, much faster than TensorBoard does where TensorFlow isn't.

Its own reader computes each checksum byte by byte in Python, and ends at a broken record without a
word. Here the checksum comes from a library in C, and what is broken is an error that says where.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from lightning_memopt.core.event_file import masked_checksum

_HEADER = struct.Struct("<QI")
FRAME_BYTES = _HEADER.size + 4  # what a record takes beside its data


class BrokenRecordError(Exception):
    """A record is cut off, or isn't what was written."""


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the data of each record of an open event file.

    Args:
        file: The file, opened for reading bytes, at its start.

    Raises:
        BrokenRecordError: At the first record that is cut off or damaged; nothing behind it can be
            trusted.
    """
    offset = 0
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise BrokenRecordError(f"ends in the middle of a record at byte {offset:,}")
        length, checksum = _HEADER.unpack(header)
        if masked_checksum(header[:8]) != checksum:
            raise BrokenRecordError(f"is damaged at byte {offset:,}")
        data, tail = file.read(length), file.read(4)
        if len(data) + len(tail) < length + 4:
            raise BrokenRecordError(f"ends in the middle of a record at byte {offset:,}")
        if masked_checksum(data) != int.from_bytes(tail, "little"):
            raise BrokenRecordError(f"is damaged at byte {offset:,}")
        yield data
        offset += length + FRAME_BYTES
