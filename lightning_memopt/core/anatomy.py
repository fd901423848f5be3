"""Where the bytes of a training step are."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memopt.core.caching_allocator import CachingAllocator, SimulatedOutOfMemoryError
from lightning_memopt.core.memory_trace import WORKSPACES, Lifetime, MemoryTrace
from lightning_memopt.core.run_memory import ACTIVATIONS, PARAMETERS

FROZEN = "frozen parameters"
TEMPORARIES = "temporaries"
ROUNDING = "allocator rounding"
UNTRACED = "libraries and others"
FORWARD, BACKWARD = "forward", "backward"

_MATRIX_PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "linear"])


@dataclass(frozen=True)
class Part:
    """Bytes of one use and type at the peak.

    Attributes:
        kind: What they are used for.
        dtype: Type of the tensors, in PyTorch's name without `torch.`; empty for what has none.
        size: Bytes.
    """

    kind: str
    dtype: str
    size: int


@dataclass(frozen=True)
class KeptPart:
    """Activations that a forward keeps for backward.

    Attributes:
        module: Name of the module that made them.
        operator: Operator that made them.
        dtype: Their type.
        size: Bytes, each storage once.
    """

    module: str
    operator: str
    dtype: str
    size: int


@dataclass(frozen=True)
class Anatomy:
    """Where the bytes of a training step are.

    Attributes:
        peak: Bytes allocated at the peak: the sum of `parts`.
        phase: Phase in which the step peaks: `"forward"`, `"backward"` or `"optimizer"`.
        parts: What is there at the peak, largest first.
        kept: What forward keeps for backward; more than is there at a peak later on.
        reserved: Bytes that the allocator has reserved, `None` where it is the system's.
        is_measured: Whether the peak was measured; else it is predicted.
    """

    peak: int
    phase: str
    parts: tuple[Part, ...]
    kept: tuple[KeptPart, ...]
    reserved: int | None
    is_measured: bool

    def size_of(self, kind: str) -> int:
        """Return the bytes of one use at the peak, all types together."""
        return sum(part.size for part in self.parts if part.kind == kind)

    @property
    def kept_bytes(self) -> int:
        """Bytes that forward keeps for backward."""
        return sum(part.size for part in self.kept)

    def kept_by(self, what: str) -> list[tuple[str, int]]:
        """Return what is kept by `"module"`, `"operator"` or `"dtype"`, largest first."""
        return _summed(self.kept, lambda part: str(getattr(part, what)))

    def as_dict(self) -> dict[str, Any]:
        """Return all of it in plain types; sizes are bytes."""
        return {
            "peak_bytes": self.peak,
            "phase": self.phase,
            "is_measured": self.is_measured,
            "reserved_bytes": self.reserved,
            "parts": [{"kind": p.kind, "dtype": p.dtype, "size_bytes": p.size} for p in self.parts],
            "kept_bytes": self.kept_bytes,
            **{
                f"kept_by_{what}": [{what: name, "size_bytes": n} for name, n in self.kept_by(what)]
                for what in ("module", "operator", "dtype")
            },
        }


def read_anatomy(
    trace: MemoryTrace,
    has_cache: bool,
    measured: int | None = None,
    reserved: int | None = None,
    library_bytes: int = 0,
) -> Anatomy:
    """Return the anatomy of the steps that were traced, at their peak.

    Args:
        trace: The trace; its phases are named as `run_step` names them.
        has_cache: Whether the device has PyTorch's caching allocator, which rounds up.
        measured: The peak that the device has counted; what was not traced is a part of its own.
        reserved: What it has counted as reserved.
        library_bytes: Bytes that the first matrix product of a forward and of a backward takes and
            never gives back.
    """
    replay = _Replay(trace, has_cache, library_bytes)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for lifetime in replay.at_peak:
        sizes[kind_of(lifetime), _name(lifetime)] += lifetime.size
    parts = [Part(kind, dtype, size) for (kind, dtype), size in sizes.items()]
    if replay.libraries_at_peak:
        parts.append(Part(UNTRACED, "", replay.libraries_at_peak))
    traced = sum(part.size for part in parts)
    # Another backend than PyTorch's own may round less.
    peak = replay.peak if measured is None else max(measured, traced)
    rounding = min(replay.peak, peak) - traced
    for kind, size in ((ROUNDING, rounding), (UNTRACED, peak - traced - rounding)):
        if size:
            parts.append(Part(kind, "", size))
    return Anatomy(
        peak=peak,
        phase=replay.phase_of_peak,
        parts=tuple(sorted(parts, key=lambda part: -part.size)),
        kept=tuple(_kept(replay.kept)),
        reserved=replay.reserved if reserved is None else reserved,
        is_measured=measured is not None,
    )


def fits(trace: MemoryTrace, limit: int, library_bytes: int) -> bool:
    """Return whether steps that were traced run where the allocator may reserve so much."""
    try:
        _Replay(trace, True, library_bytes, limit)
    except SimulatedOutOfMemoryError:
        return False
    return True


def kind_of(lifetime: Lifetime) -> str:
    """Return what a storage is used for."""
    if lifetime.kind == PARAMETERS and lifetime.is_frozen:
        return FROZEN
    return lifetime.kind or TEMPORARIES


class _System:
    """Memory without a cache: the system's."""

    allocated, peak_reserved = 0, None

    def allocate(self, size: int) -> int:
        self.allocated += size
        return size

    def free(self, size: int) -> None:
        self.allocated -= size


class _Replay:
    """The events of a trace once more, with the allocator's arithmetic."""

    def __init__(
        self, trace: MemoryTrace, has_cache: bool, library_bytes: int, limit: int | None = None
    ) -> None:
        self._trace, self._library_bytes = trace, library_bytes
        self._allocator: Any = CachingAllocator(limit) if has_cache else _System()
        self._with_library: set[str] = set()
        self.peak = self.libraries_at_peak = end = 0
        self.phase_of_peak = ""
        self.kept: list[Lifetime] = []
        for position, phase in self._replayed():
            if self._allocator.allocated > self.peak:
                self.peak, self.phase_of_peak, end = self._allocator.allocated, phase, position + 1
                self.libraries_at_peak = self._library_bytes * len(self._with_library)
        self.reserved: int | None = self._allocator.peak_reserved
        alive: set[int] = set()
        for event in trace.events[:end]:
            alive.add(event) if event > 0 else alive.discard(-event)
        self.at_peak = [trace.lifetimes[number - 1] for number in alive]

    def _replayed(self) -> Iterator[tuple[int, str]]:
        """Yield position and phase after each event."""
        phases = deque(self._trace.phases)
        blocks: dict[int, Any] = {}
        phase, newest, before_forward = "", 0, 0
        for position, event in enumerate(self._trace.events):
            while phases and phases[0][0] <= position:
                phase = phases.popleft()[1]
                if phase == FORWARD:
                    before_forward = newest
                elif phase == BACKWARD:
                    self._keep(number for number in blocks if number > before_forward)
            if event > 0:
                newest = event
                self._take_library(phase, self._trace.lifetimes[event - 1].operator)
                blocks[event] = self._allocator.allocate(self._trace.lifetimes[event - 1].size)
            else:
                self._allocator.free(blocks.pop(-event))
            yield position, phase

    def _take_library(self, phase: str, operator: str) -> None:
        is_first = phase in (FORWARD, BACKWARD) and phase not in self._with_library
        if is_first and operator in _MATRIX_PRODUCTS and self._library_bytes:
            self._with_library.add(phase)
            self._allocator.allocate(self._library_bytes)

    def _keep(self, numbers: Iterable[int]) -> None:
        """Take down what a forward has made and left, of the last forward alone."""
        found = [self._trace.lifetimes[number - 1] for number in numbers]
        self.kept = [each for each in found if each.kind in ("", ACTIVATIONS)]
        for lifetime in self.kept:
            lifetime.kind = ACTIVATIONS


def _kept(lifetimes: Iterable[Lifetime]) -> list[KeptPart]:
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    for each in lifetimes:
        sizes[each.module, each.operator, _name(each)] += each.size
    return [KeptPart(*names, size) for names, size in sizes.items()]


def _name(lifetime: Lifetime) -> str:
    return "" if lifetime.kind == WORKSPACES else str(lifetime.dtype).removeprefix("torch.")


def _summed(parts: Iterable[Any], name_of: Callable[[Any], str]) -> list[tuple[str, int]]:
    sizes: dict[str, int] = defaultdict(int)
    for part in parts:
        sizes[name_of(part)] += part.size
    return sorted(sizes.items(), key=lambda row: -row[1])
