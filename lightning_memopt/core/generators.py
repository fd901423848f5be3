"""Random generators that objects of the user hold, such as a data set that augments."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import torch

from lightning_memopt.core.random_state import RandomState

_MAX_OBJECTS, _MAX_ITEMS = 10_000, 1_000


@contextmanager
def same_randomness(device: torch.device, *objects: Any) -> Iterator[None]:
    """Make every generator go on afterwards as if nothing had been drawn within.

    Args:
        device: The device whose generator is looked at beside those of PyTorch, Python and NumPy.
        objects: Objects whose own generators are put back too, as far as `held_by` finds them.
    """
    state = RandomState(device)
    undo = [put_back for each in held_by(*objects) if (put_back := keep(each)) is not None]
    try:
        yield
    finally:
        state.put_back()
        for put_back in undo:
            put_back()


def held_by(*objects: Any) -> Iterator[Any]:
    """Yield objects and what they hold, nearest first.

    Attributes, lists, tuples, dicts, partials and bound methods are looked into; long containers,
    which hold data, modules and classes are not.
    """
    queue, seen = deque(objects), set[int]()
    while queue and len(seen) < _MAX_OBJECTS:
        each = queue.popleft()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            if len(queue) < _MAX_OBJECTS:
                queue.extend(_held(each))


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, ModuleType | type):
        return ()
    if isinstance(value, list | tuple | dict):
        if len(value) > _MAX_ITEMS:
            return ()
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType | BuiltinMethodType):
        return (value.__self__,)
    return getattr(value, "__dict__", {}).values()


def keep(value: Any) -> Callable[[], Any] | None:
    """Return a function that puts the state of a generator back, `None` for what is none."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    numpy: Any = sys.modules.get("numpy")  # who has not imported it holds none of its generators
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
