"""Finds runs under directories, and reads their TensorBoard scalars into plain lists."""

from __future__ import annotations

import os
import re
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_memopt.commands._errors import CommandError
from lightning_memopt.core.event_reader import FRAME_BYTES, BrokenRecordError, read_records
from lightning_memopt.core.units import format_bytes

EVENT_FILE = "events.out.tfevents."
_PROGRESS_SECONDS = 3.0
_PROGRESS_BYTES = 2**20  # how much is read between two looks at the clock


@dataclass(frozen=True)
class Curve:
    """The points of one tag, in the order in which they were written."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    times: array[float] = field(default_factory=lambda: array("d"))  # seconds since the epoch

    def add(self, step: int, value: float, time_s: float) -> None:
        """Add a point."""
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time_s)

    def before(self, step: int) -> Curve:
        """Return the points before a step."""
        kept = Curve()
        for point in zip(self.steps, self.values, self.times, strict=True):
            if point[0] < step:
                kept.add(*point)
        return kept


@dataclass
class Run:
    """One directory with event files.

    Attributes:
        name: What tells it from the other runs.
        directory: Where it is.
        curves: Its scalars by tag.
        faults: What couldn't be read, a line for each file.
    """

    name: str
    directory: Path
    curves: dict[str, Curve] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def has_memory(self) -> bool:
        """Whether `MemoryMonitor` logged to it."""
        return any(tag.startswith(("memory/", "memory_")) for tag in self.curves)


def find_runs(directories: Iterable[Path]) -> list[Run]:
    """Find the runs under directories, in the order of these, `version_2` before `version_10`.

    Raises:
        CommandError: A directory doesn't exist, or has no event file under it.
    """
    found: list[Path] = []
    tops = [Path(os.path.abspath(directory)) for directory in directories]
    for top in tops:
        if not top.exists():
            raise CommandError(f"there is no directory `{top}`")
        if not top.is_dir():
            raise CommandError(f"`{top}` is a file; give the directory that it is in")
        under = [Path(where) for where, _, names in os.walk(top) if any(map(_is_event_file, names))]
        if not under:
            raise CommandError(
                f"no TensorBoard event file ({EVENT_FILE}*) under `{top}`; "
                "a run with `TensorBoardLogger` writes one"
            )
        found += sorted(under, key=_natural_order)
    unique: dict[Path, Path] = {}
    for path in found:
        unique.setdefault(path.resolve(), path)
    root = Path(os.path.commonpath(tops))
    return [Run(_name(path, root), path) for path in unique.values()]


def read_runs(runs: Iterable[Run]) -> None:
    """Read what the event files of runs hold; progress goes to stderr where it takes long."""
    files = [(run, path) for run in runs for path in _event_files(run.directory)]
    progress = _Progress(sum(_size(path) for _, path in files))
    for run, path in files:
        try:
            _read_file(path, run.curves, progress)
        except BrokenRecordError as error:
            run.faults.append(f"{path} {error}; what comes after that is left out")
        except OSError as error:
            run.faults.append(f"{path} can't be read: {error.strerror}; it is left out")


def _read_file(path: Path, curves: dict[str, Curve], progress: _Progress) -> None:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    event: Any = Event()
    with path.open("rb") as file:
        for record in read_records(file):
            try:
                event.ParseFromString(record)
            except DecodeError as error:
                raise BrokenRecordError("holds something else than events") from error
            progress.add(len(record) + FRAME_BYTES)
            step, time_s = event.step, event.wall_time
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curve = curves.get(value.tag)
                    if curve is None:
                        curve = curves[value.tag] = Curve()
                    curve.add(step, value.simple_value, time_s)
            # A writer with `purge_step` takes back what was written from this step on.
            if event.session_log.status == SessionLog.START:
                for tag in list(curves):
                    curves[tag] = curves[tag].before(step)


class _Progress:
    """Says on stderr how much is read, every few seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._unseen = total, 0, 0
        self._start = self._said = time.monotonic()

    def add(self, size: int) -> None:
        self._unseen += size
        if self._unseen < _PROGRESS_BYTES:
            return
        self._done, self._unseen = self._done + self._unseen, 0
        now = time.monotonic()
        if now - self._said >= _PROGRESS_SECONDS:
            self._said = now
            left = (now - self._start) * (self._total / self._done - 1)
            share = min(self._done / self._total, 1)
            print(
                f"read {share:.0%} of {format_bytes(self._total)} of events, "
                f"about {max(left, 0):.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _is_event_file(name: str) -> bool:
    # The profiler leaves an empty file of this kind, for TensorBoard to find its traces.
    return name.startswith(EVENT_FILE) and not name.endswith(".profile-empty")


def _event_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if _is_event_file(path.name))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # which reading will meet again, and say
        return 0


def _natural_order(path: Path) -> list[list[tuple[bool, int, str]]]:
    return [
        [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
        for parts in (re.findall(r"[0-9]+|[^0-9]+", name) for name in path.parts)
    ]


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path != root else path.name or str(path)
