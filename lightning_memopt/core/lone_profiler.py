"""PyTorch's profiler, of which only one can run: never where it would meet another one.

A second session cancels the first one, without a word to the one who began it; ended all the same,
the first would end the second one's session, or write out a result that is not there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import profile


def is_profiler_running() -> bool:
    """Return whether a PyTorch profiler runs in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


class LoneProfiler:
    """Runs a profiler, unless another one does or is about to.

    Args:
        profiler: PyTorch's profiler, not started.

    Attributes:
        is_whole: Whether it ran from its start to its end; known after `stop`.
    """

    def __init__(self, profiler: profile) -> None:
        self._profiler = profiler
        self._is_on = self.is_whole = False
        self._before: list[Any] = []

    def start(self) -> None:
        """Start the profiler; nothing happens where there is another one."""
        if is_profiler_running() or any(map(_is_waiting, _living(profile))):
            return
        self._before = list(_unfinished())
        self._profiler.start()
        self._is_on = True

    def stop(self) -> None:
        """End the session, if it is still this one's; calling it twice is harmless."""
        if not self._is_on:
            return
        self._is_on = False
        known = {id(session) for session in (*self._before, self._profiler.profiler)}
        self._before.clear()
        if is_profiler_running() and all(id(session) in known for session in _unfinished()):
            self._profiler.stop()
            self.is_whole = bool(getattr(self._profiler.profiler, "kineto_results", None))

    def forget(self) -> None:
        """Drop the events, which by their cycles would stay until the collector comes."""
        session: Any = self._profiler.profiler
        for event in getattr(session, "_function_events", None) or ():
            event.cpu_parent, event.cpu_children = None, []
        self._profiler.profiler = None


def _is_waiting(profiler: Any) -> bool:
    """Return whether a profiler has a schedule and has begun: it will start by itself."""
    return getattr(profiler, "step_rec_fn", None) is not None


def _unfinished() -> Iterator[Any]:
    """Yield the sessions that have begun and have no result: one runs, others were cancelled."""
    for session in _living(torch.autograd.profiler.profile):
        if session.entered and session.kineto_results is None:
            yield session


def _living(kind: type) -> Iterator[Any]:
    # Not `isinstance`, which asks each object: some answer with a warning.
    return (each for each in gc.get_objects() if issubclass(type(each), kind))
