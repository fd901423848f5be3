"""Looking through the user's objects for tensors, without running any of the user's code."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

_MAX_VISITS = 200_000
_MAX_DEPTH = 4
_SAMPLES = 4
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PLAIN = (int, float, complex, str, bytes, type(None))
_HOOKS = {name for name in vars(nn.Module()) if name.endswith("_hooks")}
_OF_MODULES = set(vars(nn.Module())) - _HOOKS
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


class TensorTally:
    """The tensors found under one attribute.

    Attributes:
        kind: Name of the container's type; `"Tensor"` for a tensor by itself.
        is_bounded: Whether the container drops the oldest by itself.
        is_metric: Whether it is a state of a metric.
        tensors: Their number.
        storages: Bytes of each storage by its address.
        with_graph: Those with a graph.
    """

    def __init__(self, kind: str, is_bounded: bool = False, is_metric: bool = False) -> None:
        self.kind, self.is_bounded, self.is_metric = kind, is_bounded, is_metric
        self.tensors = 0
        self.storages: dict[int, int] = {}
        self.with_graph: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Count a tensor."""
        self.tensors += 1
        if tensor.grad_fn is not None:
            self.with_graph.append(tensor)
        try:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or without data
            return


class TensorSearch:
    """One look at objects, their attributes, and what those hold.

    Types are asked for by `type` and what was seen is told by `id`: `isinstance` and a hash may run
    the user's code.

    Args:
        skip: Types of objects that are not searched.

    Attributes:
        tallies: What was found, by the path of the attribute.
    """

    def __init__(self, skip: tuple[type, ...]) -> None:
        self._skip = skip
        self._seen: set[int] = set()
        self.tallies: dict[str, TensorTally] = {}
        self._visits_left = _MAX_VISITS

    def look_into_globals(self, module: ModuleType) -> None:
        """Search the globals of a module, its classes and its functions."""
        of_file = f" of {Path(getattr(module, '__file__', None) or module.__name__).name}"
        for name, value in list(vars(module).items()):
            if isinstance(value, type):
                self._look_into_class(value, module.__name__)
            elif not name.startswith("__"):
                self._look_at(name, value, 1, of_file=of_file)

    def look_into(self, name: str, owner: object, depth: int, of_file: str = "") -> None:
        """Search the attributes of an object."""
        if depth > _MAX_DEPTH or not self._is_new(owner):
            return
        kind = type(owner)
        is_module = issubclass(kind, nn.Module)
        for attribute, value in _attributes(owner).items():
            if is_module and attribute in _OF_MODULES:
                continue
            self._look_at(f"{name}.{attribute}", value, depth + 1, owner, of_file)
        if is_module:
            parts = _attributes(owner)
            for attribute, value in parts.get("_buffers", {}).items():
                self._look_at(f"{name}.{attribute}", value, depth + 1, owner, of_file)
            for attribute, value in parts.get("_modules", {}).items():  # at any depth
                self.look_into(f"{name}.{attribute}", value, min(depth, 1), of_file)
        for base in kind.__mro__:
            self._look_into_class(base, base.__module__)

    def _look_into_class(self, kind: type, module: str) -> None:
        if kind.__module__ != module or is_foreign(kind.__module__) or not self._is_new(kind):
            return
        for name, value in list(vars(kind).items()):
            is_held = issubclass(type(value), (*_CONTAINERS, FunctionType, Tensor))
            if is_held and not name.startswith("__"):
                self._look_at(f"{kind.__name__}.{name}", value, 1)

    def _look_at(
        self, name: str, value: object, depth: int, owner: object = None, of_file: str = ""
    ) -> None:
        """Search one attribute."""
        kind = type(value)
        if issubclass(kind, Tensor):
            tally = TensorTally("Tensor", is_metric=issubclass(type(owner), Metric))
            if not issubclass(kind, nn.Parameter):
                tally.add(value)  # type: ignore[arg-type]
        elif issubclass(kind, _CONTAINERS):
            is_bounded = issubclass(kind, deque) and value.maxlen is not None  # type: ignore[attr-defined]
            tally = TensorTally(kind.__name__, is_bounded, issubclass(type(owner), Metric))
            self._gather(name, value, tally, depth, of_file)
        else:
            self._follow(name, value, depth, of_file)
            return
        if tally.tensors:
            self.tallies.setdefault(name + of_file, tally)

    def _gather(
        self, name: str, container: object, tally: TensorTally, depth: int, of_file: str = ""
    ) -> None:
        """Add what a container holds, at any depth, to a tally."""
        if depth > 2 * _MAX_DEPTH or not self._is_new(container):
            return
        for key, value in _elements(container):
            self._visits_left -= 1
            if self._visits_left < 0:
                return
            kind = type(value)
            if issubclass(kind, Tensor):
                if not issubclass(kind, nn.Parameter):
                    tally.add(value)
            elif issubclass(kind, _CONTAINERS):
                self._gather(f"{name}[{key}]", value, tally, depth + 1, of_file)
            elif issubclass(kind, (nn.Module, FunctionType, MethodType, functools.partial)):
                self._follow(f"{name}[{key}]", value, depth, of_file)
            elif not issubclass(kind, _PLAIN) and self._is_followed(value):
                self._gather(name, _attributes(value), tally, depth + 1, of_file)

    def _follow(self, name: str, value: Any, depth: int, of_file: str) -> None:
        """Search what is no container: a function and what it closes over, or an object."""
        if depth > _MAX_DEPTH:
            return
        if issubclass(type(value), MethodType):
            value = value.__self__
        if issubclass(type(value), functools.partial):
            self._look_at(name, (value.func, value.args, value.keywords), depth, None, of_file)
        elif issubclass(type(value), FunctionType):
            if is_foreign(value.__module__) or not self._is_new(value):
                return
            for variable, content in _closed_over(value):
                self._look_at(f"{name}.{variable}", content, depth + 1, None, of_file)
        elif self._is_followed(value):
            self.look_into(name, value, depth, of_file)

    def _is_followed(self, value: object) -> bool:
        kind = type(value)
        if issubclass(kind, (*self._skip, type, ModuleType)):
            return False
        return issubclass(kind, nn.Module) or not is_foreign(kind.__module__)

    def _is_new(self, value: object) -> bool:
        if id(value) in self._seen or issubclass(type(value), self._skip):
            return False
        self._seen.add(id(value))
        return True


def is_foreign(module: str | None) -> bool:
    """Return whether a Python module, by name, is of a package that is not searched."""
    return str(module).split(".")[0] in _FOREIGN


def _attributes(owner: object) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(owner, "__dict__"))
    except AttributeError:
        return {}


def _closed_over(function: FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for default in function.__defaults__ or ():
        yield "<default>", default


def _elements(container: Any) -> list[tuple[Any, Any]]:
    """Return the elements with key or index; none of a long list of numbers or texts."""
    for base in _CONTAINERS:
        if issubclass(type(container), base):
            break
    if base is dict:
        return list(dict.items(container))
    values = list(base.__iter__(container))
    samples = values[:_SAMPLES] + values[-_SAMPLES:]
    if all(issubclass(type(value), _PLAIN) for value in samples):
        return []
    return list(enumerate(values))
