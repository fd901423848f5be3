"""Looking through the user's objects for tensors, without running the user's code."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from queue import Queue
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memopt.core.autograd_graph import has_graph
from lightning_memopt.core.object_parts import (
    CONTAINERS,
    PLAIN,
    attributes_of,
    closed_over,
    elements_of,
    is_foreign,
    path_of,
)
from lightning_memopt.core.storages import storage_of

_MAX_VISITS = 200_000
_MAX_DEPTH = 4
_HELD = (*CONTAINERS, Queue)
_HOOKS = {name for name in vars(nn.Module()) if name.endswith("_hooks")}
_OF_MODULES = set(vars(nn.Module())) - _HOOKS


class TensorTally:
    """The tensors found under one attribute.

    Attributes:
        kind: Name of the container's type; `"Tensor"` for a tensor by itself.
        is_bounded: Whether the container drops the oldest by itself.
        is_metric: Whether it is a state of a metric.
        file: Name of the file whose global it is in, or nothing.
        tensors: Their number.
        storages: Bytes of each storage by its device and address.
        with_graph: Those with a graph.
    """

    def __init__(
        self, kind: str, is_bounded: bool = False, is_metric: bool = False, file: str = ""
    ) -> None:
        self.kind, self.is_bounded, self.is_metric = kind, is_bounded, is_metric
        self.file = file
        self.tensors = 0
        self.storages: dict[tuple[torch.device, int], int] = {}
        self.with_graph: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Count a tensor."""
        self.tensors += 1
        if has_graph(tensor):
            self.with_graph.append(tensor)
        storage = storage_of(tensor)
        if storage is not None:
            self.storages[storage.device, storage.data_ptr()] = storage.nbytes()

    def merge(self, other: TensorTally) -> None:
        """Count what goes by the same name."""
        self.tensors += other.tensors
        self.storages |= other.storages
        self.with_graph += other.with_graph


class TensorSearch:
    """One look at objects, their attributes, and what those hold.

    Types are asked for by `type` and what was seen is told by `id`: `isinstance` and a hash may run
    the user's code. (Of a tensor's subclass `__torch_function__` may run.) What is seen must live
    as long as the search: an `id` is used again.

    Args:
        skip: Types of objects that are not searched.
        max_visits: The most elements of containers and objects to look at for one root.

    Attributes:
        tallies: What was found, by the path of the attribute.
    """

    def __init__(self, skip: tuple[type, ...], max_visits: int = _MAX_VISITS) -> None:
        self._skip = skip
        self._seen: set[int] = set()
        self.tallies: dict[str, TensorTally] = {}
        self._max_visits = self._visits_left = max_visits

    def count(self, container: object) -> TensorTally:
        """Count what a container holds, under no name."""
        tally = TensorTally(type(container).__name__)
        self._gather("", container, tally, 0)
        return tally

    def look_into_globals(self, module: ModuleType) -> None:
        """Search the globals of a module, its classes and its functions."""
        self._visits_left = self._max_visits
        file = Path(getattr(module, "__file__", None) or module.__name__).name
        for name, value in list(vars(module).items()):
            if isinstance(value, type):
                self._look_into_class(value, module.__name__)
            elif not name.startswith("__"):
                self._look_at(name, value, 1, file=file)

    def look_into(self, name: str, root: object) -> None:
        """Search the attributes of an object."""
        self._visits_left = self._max_visits
        self._look_into(name, root, 0)

    def _look_into(self, name: str, owner: object, depth: int, file: str = "") -> None:
        if depth > _MAX_DEPTH or not self._is_new(owner):
            return
        kind = type(owner)
        parts = attributes_of(owner)
        is_module = issubclass(kind, nn.Module)
        for attribute, value in parts.items():
            if is_module and attribute in _OF_MODULES:
                continue
            self._look_at(f"{name}.{attribute}", value, depth + 1, owner, file)
        if is_module:
            for attribute, value in parts.get("_buffers", {}).items():
                self._look_at(f"{name}.{attribute}", value, depth + 1, owner, file)
            for attribute, value in parts.get("_modules", {}).items():  # at any depth
                self._look_into(f"{name}.{attribute}", value, min(depth, 1), file)
        for base in kind.__mro__:
            self._look_into_class(base, base.__module__)

    def _look_into_class(self, kind: type, module: str) -> None:
        if kind.__module__ != module or is_foreign(kind.__module__) or not self._is_new(kind):
            return
        for name, value in list(vars(kind).items()):
            is_held = issubclass(type(value), (*_HELD, FunctionType, Tensor))
            if is_held and not name.startswith("__"):
                self._look_at(f"{kind.__name__}.{name}", value, 1)

    def _look_at(
        self, name: str, value: object, depth: int, owner: object = None, file: str = ""
    ) -> None:
        """Search one attribute."""
        kind = type(value)
        is_metric = issubclass(type(owner), Metric)
        if issubclass(kind, Tensor):
            tally = TensorTally("Tensor", False, is_metric, file)
            if not issubclass(kind, nn.Parameter):
                tally.add(value)  # type: ignore[arg-type]
        elif issubclass(kind, _HELD):
            is_bounded = issubclass(kind, deque) and value.maxlen is not None  # type: ignore[attr-defined]
            tally = TensorTally(kind.__name__, is_bounded, is_metric, file)
            self._gather(name, value, tally, depth, file)
        else:
            self._follow(name, value, depth, file)
            return
        if tally.tensors:
            path = f"{name} of {file}" if file else name
            if self.tallies.setdefault(path, tally) is not tally:
                self.tallies[path].merge(tally)

    def _gather(
        self, name: str, holder: object, tally: TensorTally, depth: int, file: str = ""
    ) -> None:
        """Add what a container or an object in one holds, at any depth, to a tally."""
        if depth > 2 * _MAX_DEPTH or not self._is_new(holder):
            return
        for key, value in elements_of(holder, self._visits_left):
            self._visits_left -= 1
            if self._visits_left < 0:
                return
            kind = type(value)
            if issubclass(kind, Tensor):
                if not issubclass(kind, nn.Parameter):
                    tally.add(value)
            elif issubclass(kind, _HELD):
                self._gather(path_of(name, key), value, tally, depth + 1, file)
            elif issubclass(kind, (nn.Module, FunctionType, MethodType, functools.partial)):
                self._follow(path_of(name, key), value, depth, file)
            elif not issubclass(kind, PLAIN) and self._is_followed(value):
                self._gather(name, value, tally, depth + 1, file)

    def _follow(self, name: str, value: Any, depth: int, file: str) -> None:
        """Search what is no container: a function and what it closes over, or an object."""
        if depth > _MAX_DEPTH:
            return
        if issubclass(type(value), MethodType):
            value = value.__self__
        if issubclass(type(value), functools.partial):
            if self._is_new(value):
                for part in (value.func, value.args, value.keywords):
                    self._look_at(name, part, depth, None, file)
        elif issubclass(type(value), FunctionType):
            if is_foreign(value.__module__) or not self._is_new(value):
                return
            for variable, content in closed_over(value):
                self._look_at(f"{name}.{variable}", content, depth + 1, None, file)
        elif self._is_followed(value):
            self._look_into(name, value, depth, file)

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
