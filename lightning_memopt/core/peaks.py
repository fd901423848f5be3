"""The one owner of the peak counter: many observers, one counter, and no peak lost to a reset.

A device has a single peak counter for the whole process, and reading the peak of a phase means to
reset it. `PeakCounter` is shared by all observers of a device: before each reset the peak so far is
folded into every open span. A reset by somebody else is folded in the same way where it goes
through PyTorch's functions, and is noticed otherwise when the counter has fallen; either way the
spans that were open are marked.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from lightning_memopt.core.memory import MemoryReader, MemoryReading, memory_reader
from lightning_memopt.core.units import MIB

_RESET_NAMES = ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
_RESIDENT_LAG = 64 * MIB
_counters: dict[torch.device, PeakCounter] = {}
_watchers = 0
_unwatch = ExitStack()


class PeakSpan:
    """A stretch of time and its peak in bytes.

    Attributes:
        peak: The highest allocated bytes seen so far.
        interrupted: Whether somebody else reset the counter meanwhile, so that `peak` may be low.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.interrupted = False


class PeakCounter:
    """The peak counter of one device, shared by everyone who measures a peak.

    Attributes:
        reader: Reads the device.
        is_resetting: Whether the reset that runs now is this counter's own.
    """

    def __init__(self, device: torch.device) -> None:
        self.reader: MemoryReader = memory_reader(device)
        self._counts_allocated = device.type != "cpu"
        self._spans: list[weakref.ref[PeakSpan]] = []
        self._least = 0
        self.is_resetting = False

    def open(self) -> PeakSpan:
        """Start a span now. It ends when the caller lets go of it."""
        self.restart()
        span = PeakSpan()
        self._spans.append(weakref.ref(span, self._spans.remove))
        return span

    def lap(self, span: PeakSpan) -> tuple[int, MemoryReading]:
        """Return a span's peak and the figures of now, and start the span anew."""
        reading = self.restart()
        peak, span.peak = span.peak, 0
        return peak, reading

    def fold(self) -> MemoryReading:
        """Read the device and bring every open span up to date."""
        reading = self.reader.read()
        # Without a counter the samples are all there is: a lower bound.
        sample = reading.allocated if self._counts_allocated else reading.reserved
        peak = sample if reading.peak is None else reading.peak
        # Linux adds up resident memory from counters that lag: there a small fall means nothing.
        lag = 0 if self._counts_allocated else _RESIDENT_LAG
        fell = reading.peak is not None and reading.peak < self._least - lag
        for span in self._open_spans():
            span.peak = max(span.peak, peak)
            span.interrupted |= fell
        self._least = peak
        return reading

    def restart(self) -> MemoryReading:
        """Bring every open span up to date, then start the device's counter anew."""
        reading = self.fold()
        self.is_resetting = True
        try:
            self.reader.reset_peak()
        finally:
            self.is_resetting = False
        # A CPU's counter is of resident memory, of which `allocated` is no lower bound.
        self._least = reading.allocated if self._counts_allocated else 0
        return reading

    def on_foreign_reset(self) -> None:
        """Take what the counter holds before somebody else resets it."""
        self.fold()
        for span in self._open_spans():
            span.interrupted = True
        self._least = 0

    def _open_spans(self) -> list[PeakSpan]:
        references = tuple(self._spans)  # the garbage collector may end a span at any time
        return [span for reference in references if (span := reference()) is not None]


def peak_counter(device: torch.device) -> PeakCounter:
    """Return the counter of `device`: the same object for every caller in this process."""
    if device.type == "cpu":
        device = torch.device("cpu")  # "cpu:0" is the same memory
    elif device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    if device not in _counters:
        _counters[device] = PeakCounter(device)
    return _counters[device]


@contextmanager
def watched_resets() -> Iterator[None]:
    """Fold all peaks into the open spans whenever PyTorch's own functions reset the counter."""
    global _watchers, _unwatch
    if _watchers == 0:
        _unwatch = ExitStack()
        for module in _modules_with_resets():
            for name in _RESET_NAMES:
                if hasattr(module, name):
                    _watch(module, name, _unwatch)
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1
        if _watchers == 0:
            _unwatch.close()


def _modules_with_resets() -> list[ModuleType]:
    modules = []
    for owner in (torch.cuda, torch.xpu, torch.accelerator):
        modules += [owner, getattr(owner, "memory", None)]
    return [module for module in modules if isinstance(module, ModuleType)]


def _watch(module: ModuleType, name: str, undo: ExitStack) -> None:
    original: Callable[..., Any] = getattr(module, name)

    @functools.wraps(original)
    def reset(*args: Any, **kwargs: Any) -> Any:
        if not any(counter.is_resetting for counter in _counters.values()):
            for device, counter in _counters.items():
                if device.type != "cpu":
                    counter.on_foreign_reset()
        return original(*args, **kwargs)

    def put_back() -> None:
        if getattr(module, name) is reset:  # else somebody has put theirs on top
            setattr(module, name, original)

    setattr(module, name, reset)
    undo.callback(put_back)
