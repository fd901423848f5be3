"""What a step's memory is made of at every moment, from the memory events of a PyTorch trace.

Which address belongs to what is known at the marks. As an address is used again and again, a label
counts for the block that is live at its mark, and for all of that block's life.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lightning_memopt.core.trace_events import MemoryEvent

CATEGORIES = ("parameters", "optimizer state", "gradients", "activations", "other")
OTHER = CATEGORIES[-1]

_US_PER_MS = 1000.0


@dataclass(frozen=True)
class Mark:
    """A moment of the step, and what was known then.

    Attributes:
        time_us: When, on the trace's clock.
        phase: What begins here; empty for nothing of interest.
        labels: Category by address.
        gone: Addresses of the baseline whose memory has been freed by now.
    """

    time_us: float
    phase: str
    labels: Mapping[int, str] = field(default_factory=dict)
    gone: Collection[int] = ()


@dataclass
class Block:
    """A piece of memory, from its allocation to its free.

    Attributes:
        address: Where it begins.
        size: Bytes.
        begin_ms: When it was allocated; zero for what was there at the start.
        end_ms: When it was freed; the end of the step for what outlives it.
        category: What it is used for.
    """

    address: int
    size: int
    begin_ms: float
    end_ms: float
    category: str = OTHER


@dataclass(frozen=True)
class StepTimeline:
    """Memory of one step over its time.

    Attributes:
        times_ms: When memory changed, in milliseconds since the step began.
        bytes_of: Bytes at these times by category; the sum of all is `total`.
        total: Bytes allocated at these times.
        reserved: Bytes reserved at these times; empty where the trace can't tell.
        phases: Name, begin and end of each phase, in milliseconds.
        blocks: All blocks that lived in the step.
        end_ms: How long the step took.
    """

    times_ms: list[float]
    bytes_of: dict[str, list[int]]
    total: list[int]
    reserved: list[int]
    phases: list[tuple[str, float, float]]
    blocks: list[Block]
    end_ms: float

    @property
    def peak(self) -> int:
        """Position of the highest total."""
        return self.total.index(max(self.total))

    def phase_at(self, time_ms: float) -> str:
        """Return the name of the phase at a time, empty between two."""
        return next((name for name, begin, end in self.phases if begin <= time_ms < end), "")


def build_timeline(
    events: Iterable[MemoryEvent],
    marks: list[Mark],
    baseline: Mapping[int, tuple[int, str]],
    total: int | None = None,
) -> StepTimeline:
    """Put events and marks together.

    Args:
        events: Allocations and frees, in order; those outside of the marks are passed over.
        marks: The step's moments in order; the first begins the step and the last ends it.
        baseline: Bytes and category by address of what is known to be there at the start.
        total: Bytes allocated at the start as the device counts them; `None` where only what is
            known counts. What is counted and not known is `"other"`.

    Returns:
        The timeline; at every time its categories add up to the total.
    """
    start, end = marks[0].time_us, marks[-1].time_us
    within = [event for event in events if start <= event.time_us <= end]
    end_ms = (end - start) / _US_PER_MS
    lives = _Lives(baseline, end_ms)
    # Of the same time, the mark comes first: it knows what was there before.
    moments: list[Mark | MemoryEvent] = [*marks, *within]
    moments.sort(key=lambda each: (each.time_us, not isinstance(each, Mark)))
    for index, each in enumerate(moments):
        lives.now, lives.index = (each.time_us - start) / _US_PER_MS, index
        if isinstance(each, Mark):
            lives.learn(each)
        else:
            lives.follow(each)
    # Labels are complete only now, so that sums are made in a second pass.
    sums = dict.fromkeys(CATEGORIES, 0)
    for block in lives.baseline:
        sums[block.category] += block.size
    reserved = next((event.reserved for event in within), 0)
    times: list[float] = []
    rows: list[tuple[dict[str, int], int, int]] = []
    for index, each in enumerate(moments):
        for sign, block in lives.changes.get(index, ()):
            sums[block.category] += sign * block.size
        if isinstance(each, MemoryEvent) and each.total is not None:
            total, reserved = each.total, each.reserved
        row = dict(sums)
        if total is not None:
            row[OTHER] += total - sum(sums.values())
        times.append((each.time_us - start) / _US_PER_MS)
        rows.append((row, sum(row.values()), reserved))
    return StepTimeline(
        times_ms=times,
        bytes_of={name: [row[name] for row, _, _ in rows] for name in CATEGORIES},
        total=[each for _, each, _ in rows],
        reserved=[each for _, _, each in rows] if reserved else [],
        phases=_phases(marks, start),
        blocks=lives.all,
        end_ms=end_ms,
    )


class _Lives:
    """The blocks that are live while events and marks are gone through."""

    def __init__(self, baseline: Mapping[int, tuple[int, str]], end_ms: float) -> None:
        self.now, self.index, self._end_ms = 0.0, 0, end_ms
        self.changes: dict[int, list[tuple[int, Block]]] = {}
        self._live = {
            address: Block(address, size, 0.0, end_ms, category)
            for address, (size, category) in baseline.items()
        }
        self._known = dict(self._live)
        self._starts = sorted(baseline)
        self.baseline = list(self._live.values())
        self.all = list(self._live.values())

    def follow(self, event: MemoryEvent) -> None:
        if event.size > 0:
            # On a host nobody reports the free of what was allocated while nobody recorded: that
            # its place is used again tells.
            for address in self._overlapped(event.address, event.size):
                self._free_known(address)
        self._free(event.address)
        if event.size > 0:
            block = Block(event.address, event.size, self.now, self._end_ms)
            self._live[event.address] = block
            self.all.append(block)
            self.changes.setdefault(self.index, []).append((1, block))

    def learn(self, mark: Mark) -> None:
        for address in mark.gone:
            self._free_known(address)
        for address, category in mark.labels.items():
            block = self._live.get(address)
            if block is not None and _rank(category) < _rank(block.category):
                block.category = category

    def _free(self, address: int) -> None:
        block = self._live.pop(address, None)
        if block is not None:
            block.end_ms = self.now
            self.changes.setdefault(self.index, []).append((-1, block))

    def _free_known(self, address: int) -> None:
        if address in self._live and self._live[address] is self._known.get(address):
            self._free(address)

    def _overlapped(self, address: int, size: int) -> list[int]:
        first = bisect_left(self._starts, address)
        last = bisect_left(self._starts, address + size)
        before = self._starts[max(0, first - 1) : first]
        reaching = [each for each in before if each + self._known[each].size > address]
        return [*reaching, *self._starts[first:last]]


def _rank(category: str) -> int:
    return CATEGORIES.index(category)


def _phases(marks: list[Mark], start: float) -> list[tuple[str, float, float]]:
    times = [replace(mark, time_us=(mark.time_us - start) / _US_PER_MS) for mark in marks]
    return [
        (mark.phase, mark.time_us, following.time_us)
        for mark, following in pairwise(times)
        if mark.phase
    ]
