"""What a model holds at one moment, kept so cheaply that every step can afford it."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

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
        self._held: list[tuple[Any, Any]] = [
            (value, value.copy())
            for _, attributes in (self._saved if deep else ())
            for value in attributes.values()
            if type(value) in _CONTAINERS
        ]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the attributes, buffers included and parameters not."""
        found = []
        for _, attributes in self._saved:
            for value in attributes.values():
                if isinstance(value, Tensor):
                    found.append(value)
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
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: dict[int, int] = {}
        self._small: tuple[list[Tensor], list[Tensor]] = ([], [])

    def keep(self, tensors: list[Tensor]) -> None:
        """Make the values of now those to put back."""
        with torch.no_grad():
            is_same = len(tensors) == len(self._tensors) and all(
                map(operator.is_, tensors, self._tensors)
            )
            if not is_same:
                self._start(tensors)
                return
            if self._small[0]:
                torch._foreach_copy_(*self._small)
            for i, version in self._versions.items():
                if tensors[i]._version != version:
                    self._copies[i] = tensors[i].detach().clone()
                    self._versions[i] = tensors[i]._version

    def put_back(self) -> None:
        """Write the values back."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(value)

    def _start(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._copies = [tensor.detach().clone() for tensor in tensors]
        small = [i for i, tensor in enumerate(tensors) if _is_small(tensor)]
        others = set(range(len(tensors))).difference(small)
        self._versions = {i: tensors[i]._version for i in others}
        self._small = [self._copies[i] for i in small], [tensors[i].detach() for i in small]


class Rewind:
    """What a training step changes in a model before its optimizer steps, to be put back.

    Kept are all buffers, the attributes of the model, of its metrics and of each module that is not
    PyTorch's own, and what the lists, dicts and sets of the model and the metrics hold: outputs
    that are collected, samples that are counted. The memory is that of the buffers once more.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._deep = [each for each in modules if each is module or isinstance(each, Metric)]
        deep = set(map(id, self._deep))  # metrics have an equality of their own
        self._flat = [
            each
            for each in modules
            if id(each) not in deep and not type(each).__module__.startswith("torch.")
        ]
        self._with_buffers = [each for each in modules if each._buffers]
        self._values = TensorValues()

    def mark(self) -> None:
        """Make now the moment to go back to."""
        self._attributes = Attributes(self._deep), Attributes(self._flat, deep=False)
        self._buffers = [(each, dict(each._buffers)) for each in self._with_buffers]
        tensors = self._attributes[0].tensors()
        for _, buffers in self._buffers:
            tensors += [tensor for tensor in buffers.values() if tensor is not None]
        self._values.keep(tensors)

    def put_back(self) -> None:
        """Go back to the moment of the last mark."""
        for attributes in self._attributes:
            attributes.put_back()
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        self._values.put_back()


def _is_small(tensor: Tensor) -> bool:
    # Kernels such as that of `batch_norm` write without raising the version.
    if tensor.layout is not torch.strided:
        return False
    return tensor.is_inference() or tensor.numel() * tensor.element_size() <= _SMALL_BYTES
