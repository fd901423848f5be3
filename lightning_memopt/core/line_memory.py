"""Memory line by line, through pytorch_memlab.

Source: https://github.com/Stonesjtu/pytorch_memlab.
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PACKAGE = "pytorch_memlab"


def has_line_memory() -> bool:
    """Return whether pytorch_memlab is installed, with all that it needs."""
    previous = sys.gettrace()
    try:
        importlib.import_module(_PACKAGE)
    except ImportError:
        return False
    finally:
        sys.settrace(previous)
    return True


def find_function(owner: Any, name: str) -> Callable[..., Any] | None:
    """Return the Python function behind a method, `None` where there is none.

    Args:
        owner: An object.
        name: Dotted name of a method, as seen from the object.
    """
    for part in name.split("."):
        owner = getattr(owner, part, None)
    # A compiled method, and one that is patched, knows the one that it stands for.
    function = inspect.unwrap(getattr(owner, "_torchdynamo_orig_callable", owner))
    function = getattr(function, "__func__", function)
    return function if hasattr(function, "__code__") else None


@contextmanager
def line_memory(functions: Iterable[Callable[..., Any]], device: torch.device) -> Iterator[Any]:
    """Take down memory at every line of some functions; yields a function that returns the text.

    It empties the allocator's cache once and resets its peak at each line, and every Python call
    within is traced, which is slow. A debugger's trace function is put back.
    """
    previous = sys.gettrace()
    try:
        # The package sets up a profiler of its own when it is imported.
        module = importlib.import_module(_PACKAGE)
        lines = module.LineProfiler(*functions, target_gpu=device.index or 0)
        lines.enable()

        def text() -> str:
            stream = io.StringIO()
            lines.print_stats(stream=stream)
            return stream.getvalue()

        yield text
    finally:
        sys.settrace(previous)
