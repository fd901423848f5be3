from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lightning_memopt.core.profile_files import ProfileFiles, describe_peak, write_curve
from lightning_memopt.core.step_timeline import Mark, StepTimeline, build_timeline
from lightning_memopt.core.trace_events import MemoryEvent
from lightning_memopt.core.units import MIB


def timeline(has_totals: bool) -> StepTimeline:
    total = (4 * MIB, 5 * MIB) if has_totals else (None, 0)
    events = [MemoryEvent(1000, 10, 3 * MIB, *total)]
    marks = [Mark(0, "forward"), Mark(2000, "", {10: "activations"}), Mark(3000, "")]
    return build_timeline(events, marks, {10**9: (MIB, "parameters")}, MIB if has_totals else None)


def test_files_of_a_step_and_a_rank_have_one_stem(tmp_path: Path):
    files = ProfileFiles(tmp_path / "a" / "b", 5, 2)
    files.write("modules.txt", "text")
    with files.path("trace.json.gz") as path:
        path.write_bytes(b"x")
    assert [path.name for path in files.written] == [
        "step5-rank2-modules.txt",
        "step5-rank2-trace.json.gz",
    ]
    assert files.written[0].read_text() == "text\n"


def test_a_file_that_fails_to_be_written_is_removed(tmp_path: Path):
    files = ProfileFiles(tmp_path, 5, 2)
    files.write("modules.txt", "text")

    def fail() -> None:
        with files.path("timeline.csv") as path:
            path.write_text("half of")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == files.written == [tmp_path / "step5-rank2-modules.txt"]


@pytest.mark.parametrize(
    ("there", "stem"),
    [
        ([], "step5-rank2"),
        (["step5-rank2-modules.txt"], "step5-rank2-2"),
        (["step5-rank2-trace.json.gz", "step5-rank2-2-modules.txt"], "step5-rank2-3"),
        (["step5-rank2-2-modules.txt"], "step5-rank2"),
        (["step5-rank20-modules.txt", "step55-rank2-modules.txt", "notes.txt"], "step5-rank2"),
    ],
)
def test_a_stem_is_one_that_no_file_has(there: list[str], stem: str, tmp_path: Path):
    for name in there:
        (tmp_path / name).touch()
    files = ProfileFiles(tmp_path, 5, 2)
    assert files.stem == stem
    files.write("modules.txt", "new")
    assert all((tmp_path / name).read_text() == "" for name in there)


def test_the_peak_is_described_with_its_phase_and_parts():
    assert describe_peak(timeline(has_totals=False)) == (
        "peak 4.00 MiB in forward: activations 3.00 MiB (75%), parameters 1.00 MiB (25%)"
    )


@pytest.mark.parametrize("has_totals", [False, True])
def test_the_curve_has_a_row_for_each_change(has_totals: bool, tmp_path: Path):
    write_curve(timeline(has_totals), tmp_path / "timeline.csv")
    with (tmp_path / "timeline.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["time_ms"], row["phase"], row["total_bytes"]) for row in rows] == [
        ("0.0000", "forward", str(MIB)),
        ("1.0000", "forward", str(4 * MIB)),
        ("2.0000", "", str(4 * MIB)),
        ("3.0000", "", str(4 * MIB)),
    ]
    assert [row["activations_bytes"] for row in rows] == ["0", *[str(3 * MIB)] * 3]
    assert ("reserved_bytes" in rows[0]) is has_totals
