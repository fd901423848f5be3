"""What the user's objects are made of, read without running the user's code."""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from queue import Queue
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

from torch import Tensor, nn

CONTAINERS = (list, tuple, dict, set, frozenset, deque)
PLAIN = (int, float, complex, str, bytes, type(None))
_OPENED = (Tensor, nn.Module, FunctionType, MethodType, functools.partial, Queue)
# A longer container is looked through only if a sample of it may hold tensors.
_LONG = 100
_SAMPLES = 16
_MAX_SAMPLED_DEPTH = 2
_MAX_KEY = 40
_MAX_BITS = 64
_UNNAMED = object()
# What these packages make is not searched, unless the user's class is derived from theirs.
_FOREIGN = sys.stdlib_module_names - {"__main__"} | {
    "lightning",
    "lightning_fabric",
    "lightning_memopt",
    "lightning_utilities",
    "numpy",
    "pytorch_lightning",
    "rich",
    "tensorboard",
    "torch",
    "torchmetrics",
    "torchvision",
}


def is_foreign(module: str | None) -> bool:
    """Return whether a Python module, by name, is of a package that is not searched."""
    return str(module).split(".")[0] in _FOREIGN


def attributes_of(owner: object) -> dict[str, Any]:
    """Return the attributes that an object itself holds, those in slots included."""
    found = dict(dict_of(owner) or {})
    for base in type(owner).__mro__:
        if not is_foreign(base.__module__):
            for name, slot in list(vars(base).items()):
                if type(slot) is MemberDescriptorType:
                    try:
                        found[name] = slot.__get__(owner)
                    except AttributeError:  # not set
                        continue
    return found


def dict_of(owner: object) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, if it has one."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except Exception:  # it has none, or a property of that name
        return None
    return found if type(found) is dict else None


def closed_over(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the variables that a function closes over, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for default in function.__defaults__ or ():
        yield "<default>", default


def elements_of(holder: object, limit: int) -> list[tuple[Any, Any]]:
    """Return what a container holds with key or index, or what an object's attributes hold.

    Args:
        holder: A container or an object.
        limit: The most elements to return.

    Returns:
        The first elements; none of a long container of numbers and texts, or of tuples of these.
    """
    limit = max(0, limit)
    base = _base_of(type(holder))
    if base is None:
        # To ask a million objects for `__dict__` would make a million dictionaries.
        values = (x for x in gc.get_referents(holder) if not issubclass(type(x), type))
        return [(_UNNAMED, value) for value in islice(values, limit)]
    try:
        if base.__len__(holder) > _LONG and all(map(_is_plain, _samples(base, holder))):
            return []
        if base is dict:
            return list(islice(dict.items(holder), limit))  # type: ignore[arg-type]
        return list(enumerate(islice(base.__iter__(holder), limit)))
    except RuntimeError:  # another thread changed it
        return []


def path_of(name: str, key: object) -> str:
    """Return the path of an element of a container, that of an object in it is the container's."""
    return name if key is _UNNAMED else f"{name}[{name_of_key(key)}]"


def name_of_key(key: object) -> str:
    """Return a short name for a key; that of its type, if only the user's code knows better."""
    if type(key) is int and key.bit_length() > _MAX_BITS:
        return "int"
    if type(key) in (str, int, bool, type(None)):
        return str(key)[:_MAX_KEY]
    return type(key).__name__


def _base_of(kind: type) -> Any:
    return next((base for base in CONTAINERS if issubclass(kind, base)), None)


def _samples(base: Any, container: Any) -> list[Any]:
    """Return some of the elements, the last ones among them where they can be had."""
    if base in (list, tuple):
        step = max(1, base.__len__(container) // _SAMPLES)
        spread = base.__getitem__(container, slice(None, None, step))
        return [*spread, *base.__getitem__(container, slice(-_SAMPLES // 4, None))]
    values = dict.values(container) if base is dict else base.__iter__(container)
    last = [] if base in (set, frozenset) else _from_the_end(base, container)
    return [*islice(values, _SAMPLES), *last]


def _from_the_end(base: Any, container: Any) -> list[Any]:
    backwards = reversed(dict.values(container)) if base is dict else base.__reversed__(container)
    return list(islice(backwards, _SAMPLES))


def _is_plain(value: object, depth: int = 1) -> bool:
    """Return whether no tensor is in a value, as far as a sample tells."""
    kind = type(value)
    base = _base_of(kind)
    if base is not None:
        return depth <= _MAX_SAMPLED_DEPTH and all(
            _is_plain(each, depth + 1) for each in _samples(base, value)
        )
    if issubclass(kind, PLAIN):
        return True
    return is_foreign(kind.__module__) and not issubclass(kind, _OPENED)
