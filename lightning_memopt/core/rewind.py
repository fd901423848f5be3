"""What a model holds at one moment, kept so cheaply that every step can afford it."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Parameters, modules and hooks; buffers are looked at, as a step may bind others.
_OF_EVERY_MODULE = set(vars(nn.Module())) - {"_buffers"}
_CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict}
# A copy of so few bytes costs less than to find out that it was needed.
_SMALL_BYTES = 2**16


class Attributes:
    """The attributes of some objects, and what their lists, dicts and sets hold.

    Args:
        objects: Objects with a `__dict__`; other objects that they refer to are not looked into.
        deep: Whether to look into containers too.
    """

    def __init__(self, objects: Iterable[Any], deep: bool = True) -> None:
        self._saved = [(each, dict(vars(each))) for each in objects]
        self._held: list[tuple[Any, Any]] = []
        for _, attributes in self._saved if deep else ():
            for name, value in attributes.items():
                if type(value) in _CONTAINERS and name not in _OF_EVERY_MODULE:
                    self._hold(value)

    def _hold(self, container: Any) -> None:
        self._held.append((container, container.copy()))
        items = container.values() if isinstance(container, dict) else container
        for item in items:
            if type(item) in _CONTAINERS:
                self._hold(item)

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the attributes, buffers included and parameters not."""
        found = []
        for _, attributes in self._saved:
            found += [value for value in attributes.values() if isinstance(value, Tensor)]
        return found

    def put_back(self) -> None:
        """Give every object the attributes it had, and every container its items."""
        for each, attributes in self._saved:
            now = vars(each)
            now.clear()
            now.update(attributes)
        for container, items in self._held:
            container.clear()
            if isinstance(container, dict | set):
                container.update(items)
            else:
                container.extend(items)


class TensorValues:
    """The values of tensors, which may be changed in place.

    Small tensors are copied in one go; a large one only when it was changed since the last time.
    """

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: dict[int, int] = {}
        self._small: tuple[list[Tensor], list[Tensor]] = ([], [])

    def keep(self, tensors: list[Tensor]) -> None:
        """Make the values of now those to put back.

        A tensor that can't be written to holds what it holds.
        """
        if len(tensors) != len(self._given) or not all(map(operator.is_, tensors, self._given)):
            self._given = tensors
            self._start([tensor for tensor in tensors if is_writable(tensor)])
        with torch.no_grad():
            if self._small[0]:
                torch._foreach_copy_(*self._small)
            for i, version in self._versions.items():
                if self._tensors[i]._version != version:
                    self._copies[i] = self._tensors[i].detach().clone()
                    self._versions[i] = self._tensors[i]._version

    def put_back(self) -> None:
        """Write the values back."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(value)

    def _start(self, tensors: list[Tensor]) -> None:
        known = {id(tensor): i for i, tensor in enumerate(self._tensors)}
        before, versions = self._copies, self._versions
        small = [i for i, tensor in enumerate(tensors) if _is_small(tensor)]
        self._copies, self._versions = [], dict.fromkeys(range(len(tensors)), -1)
        for i, tensor in enumerate(tensors):
            old = known.get(id(tensor), -1)
            if old in versions:
                self._versions[i] = versions[old]
                self._copies.append(before[old])
            else:
                self._copies.append(torch.empty_like(tensor.detach()))
        for i in small:
            del self._versions[i]
        self._tensors = tensors
        self._small = [self._copies[i] for i in small], [tensors[i].detach() for i in small]


class Rewind:
    """What a training step changes in a model before its optimizer steps, to be put back.

    Kept are all buffers, the attributes of each module that is not PyTorch's own, and what lists,
    dicts and sets among them hold, nested ones too: outputs that are collected, samples that are
    counted. The memory is that of the buffers once more.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        # What PyTorch's own modules change in a step are buffers.
        self._modules = [
            each
            for each in modules
            if each is module or not type(each).__module__.startswith("torch.")
        ]
        self._with_buffers = [each for each in modules if each._buffers]
        self._values = TensorValues()

    def mark(self) -> None:
        """Make now the moment to go back to."""
        self._attributes = Attributes(self._modules)
        self._buffers = [(each, dict(each._buffers)) for each in self._with_buffers]
        tensors = self._attributes.tensors()
        for _, buffers in self._buffers:
            tensors += [tensor for tensor in buffers.values() if tensor is not None]
        self._values.keep(tensors)

    def put_back(self) -> None:
        """Go back to the moment of the last mark."""
        self._attributes.put_back()
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        self._values.put_back()


def weight_versions(parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the counters of in-place changes; some tensors have none."""
    return [0 if is_lazy(p) or p.is_inference() else p._version for p in parameters]


def is_writable(tensor: Tensor) -> bool:
    """Return whether values can be copied into a tensor."""
    if tensor.is_inference():
        return False
    if tensor.layout is not torch.strided:
        return True
    # An expanded tensor has several elements in one place.
    return not any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _is_small(tensor: Tensor) -> bool:
    # Kernels such as that of `batch_norm` write without raising the version.
    if tensor.layout is not torch.strided:
        return False
    return tensor.numel() * tensor.element_size() <= _SMALL_BYTES
