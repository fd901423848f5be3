"""All tensors of the process, for when no attribute that can be named holds those that grew."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.core.autograd_graph import has_graph
from lightning_memopt.core.object_parts import dict_of, name_of_key
from lightning_memopt.core.storages import storage_of
from lightning_memopt.core.tensor_holders import TENSOR_BYTES

_MAX_NAMED = 3
_SAMPLES = 4
_Shape = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class TensorCensus:
    """The tensors and the containers of tensors that Python's garbage collector knows.

    Attributes:
        shapes: Number of tensors by shape and dtype.
        with_graph: Those that have a graph; dead once the tensor is gone.
        lengths: Length of each container of tensors by its `id`.
    """

    shapes: Counter[_Shape]
    with_graph: list[weakref.ref[Tensor]]
    lengths: dict[int, int]


@dataclass(frozen=True)
class CensusChange:
    """What two censuses differ in.

    Attributes:
        more_tensors: How many tensors more.
        shape: The shape of which most bytes came.
        dtype: Its dtype, as `"float32"`.
        old_with_graph: How many tensors that had a graph at the first census still have it.
        holders: Names of the containers that became longer, as far as they can be told.
    """

    more_tensors: int
    shape: tuple[int, ...]
    dtype: str
    old_with_graph: int
    holders: list[str]


def take_census() -> TensorCensus:
    """Count all tensors.

    Example:
        >>> import torch
        >>> kept = [torch.ones(7, 3) for _ in range(4)]
        >>> take_census().shapes[(7, 3), "float32"] >= 4
        True
    """
    shapes: Counter[_Shape] = Counter()
    with_graph, lengths = [], {}
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, Tensor):
            shape = _shape_of(thing)
            if shape is None:
                continue
            shapes[shape] += 1
            if has_graph(thing):
                with_graph.append(weakref.ref(thing))
        elif kind in (list, dict, deque) and _holds_tensors(thing):
            lengths[id(thing)] = len(thing)
    return TensorCensus(shapes, with_graph, lengths)


def compare_census(before: TensorCensus) -> CensusChange | None:
    """Count again, and say what there is more of.

    Returns:
        The difference, or `None` if there are no more tensors than before.
    """
    now = take_census()
    count = now.shapes.total() - before.shapes.total()
    if count <= 0:
        return None
    more = now.shapes - before.shapes
    shape, dtype = max(more, key=lambda each: more[each] * _bytes_of(each))
    old = sum(1 for ref in before.with_graph if (x := ref()) is not None and has_graph(x))
    longer = {key for key, size in now.lengths.items() if size > before.lengths.get(key, size)}
    return CensusChange(count, shape, dtype, old, list(_names_of(longer))[:_MAX_NAMED])


def _shape_of(tensor: Tensor) -> _Shape | None:
    """Return shape and dtype; `None` for what takes no memory or has no shape of numbers."""
    if storage_of(tensor) is None:
        return None
    try:
        return tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch.")
    except Exception:  # nested, say
        return None


def _bytes_of(shape: _Shape) -> int:
    sizes, dtype = shape
    return max(TENSOR_BYTES, math.prod(sizes) * int(getattr(torch, dtype).itemsize))


def _holds_tensors(container: Any, depth: int = 0) -> bool:
    """Tell by the element that came last, and by the first few of that one."""
    values = container.values() if type(container) is dict else container
    try:
        # What came last, of the container itself: a growing one may have begun with anything.
        some = list(islice(values if depth else reversed(values), _SAMPLES if depth else 1))
    except RuntimeError:  # another thread changed it
        return False
    return any(
        issubclass(type(value), Tensor)
        or (depth == 0 and type(value) in (list, tuple, dict) and _holds_tensors(value, 1))
        for value in some
    )


def _names_of(keys: set[int]) -> Iterator[str]:
    containers = [thing for thing in gc.get_objects() if id(thing) in keys]
    for container in containers[:_MAX_NAMED]:
        for owner in gc.get_referrers(container):
            name = _name_in(owner, container)
            if name is not None:
                yield name
                break


def _name_in(owner: Any, value: object) -> str | None:
    """Return the name that `owner` has for a value; `None` if it is no place of the user's."""
    kind = type(owner)
    if kind is CellType:
        for closure in gc.get_referrers(owner):
            for function in gc.get_referrers(closure) if type(closure) is tuple else ():
                if type(function) is FunctionType and function.__closure__ is closure:
                    names = function.__code__.co_freevars
                    variables = zip(names, function.__closure__ or (), strict=False)
                    name = next((name for name, cell in variables if cell is owner), "?")
                    return f"`{name}` in the closure of `{function.__qualname__}`"
        return None
    if kind is dict:
        name = next((name_of_key(key) for key, held in list(owner.items()) if held is value), "?")
        module_name = owner.get("__name__")
        module = sys.modules.get(module_name) if type(module_name) is str else None
        if module is not None and vars(module) is owner:
            return f"global `{name}` of {Path(getattr(module, '__file__', None) or '?').name}"
        for instance in gc.get_referrers(owner):
            if dict_of(instance) is owner:
                return f"`{type(instance).__name__}.{name}`"
        return None
    for name, held in list((dict_of(owner) or {}).items()):
        if held is value:
            return f"`{kind.__name__}.{name}`"
    return None
