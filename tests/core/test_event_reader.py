from __future__ import annotations

import io

import pytest

from lightning_memopt.core.event_file import frame_record
from lightning_memopt.core.event_reader import FRAME_BYTES, BrokenRecordError, read_records

RECORDS = [b"first", b"", bytes(range(256))]
FILE = b"".join(map(frame_record, RECORDS))
ENDS = [sum(len(data) + FRAME_BYTES for data in RECORDS[:count]) for count in range(4)]


def read_until_broken(content: bytes) -> tuple[list[bytes], str]:
    found = []
    try:
        for record in read_records(io.BytesIO(content)):
            found.append(record)
    except BrokenRecordError as error:
        return found, str(error)
    return found, ""


def test_records_come_back_as_they_were_written():
    assert list(read_records(io.BytesIO(FILE))) == RECORDS


def test_an_empty_file_has_no_records():
    assert list(read_records(io.BytesIO(b""))) == []


def test_a_file_cut_anywhere_gives_its_whole_records_and_says_where_it_ends():
    for size in range(len(FILE)):
        whole = max(count for count in range(4) if ENDS[count] <= size)
        found, said = read_until_broken(FILE[:size])
        assert found == RECORDS[:whole]
        wanted = f"ends in the middle of a record at byte {ENDS[whole]}"
        assert said == ("" if size == ENDS[whole] else wanted)


def test_any_damaged_byte_is_found_in_its_record():
    for position in range(len(FILE)):
        content = bytearray(FILE)
        content[position] ^= 1
        found, said = read_until_broken(bytes(content))
        record = max(count for count in range(3) if ENDS[count] <= position)
        assert found == RECORDS[:record]
        assert said == f"is damaged at byte {ENDS[record]}"


def test_a_broken_record_is_an_error():
    with pytest.raises(BrokenRecordError, match="is damaged at byte 0"):
        list(read_records(io.BytesIO(b"this is no event file")))
