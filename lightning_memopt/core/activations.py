"""What a forward has kept for backward, by module, read from the graph after the fact.

Nothing is recorded while training runs: the nodes of autograd's graph lead to the parameters that
they used, and so to the modules; what has no parameters (an activation function, a softmax) counts
to the module whose parameters were used last before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_memopt.core.autograd_graph import (
    graph_nodes,
    is_freed,
    keeps_tensors,
    number_of,
    saved_tensors,
)
from lightning_memopt.core.storages import storage_of

_MAX_ROWS = 16


@dataclass(frozen=True)
class Kept:
    """A storage that is kept for backward.

    Attributes:
        address: Where it begins.
        size: Its bytes.
        dtype: Type of the tensor that was saved.
        module: Name of the module that it counts to, `""` for none.
    """

    address: int
    size: int
    dtype: torch.dtype
    module: str


@dataclass(frozen=True)
class BackwardPosition:
    """How far a backward came.

    Attributes:
        operation: The node that was next, in PyTorch's name.
        module: Name of its module.
        inputs: Addresses of the storages that the operation kept.
    """

    operation: str
    module: str
    inputs: list[int]


class KeptForBackward:
    """All that the graphs behind some tensors keep.

    Only for graphs that are of no further use, see `saved_tensors`.

    Args:
        model: Modules are named as parts of it.
        tensors: Where graphs end.
        left_out: Addresses of storages that are something else, such as parameters.

    Attributes:
        storages: What is kept, each storage once.
        position: How far backward came, `None` if it hasn't begun.
    """

    def __init__(
        self, model: nn.Module, tensors: Iterable[Tensor], left_out: Collection[int]
    ) -> None:
        nodes = [node for node in graph_nodes(tensors) if not _is_leaf(node)]
        nodes.sort(key=number_of)
        modules = _modules_of(nodes, model)
        storages: dict[int, Kept] = {}
        self.position: BackwardPosition | None = None
        has_begun = False
        for node in nodes:
            module = modules[node]
            kept = list(saved_tensors(node))
            has_begun |= not kept and is_freed(node)
            if not kept:
                continue
            self.position = BackwardPosition(node.name(), module, [])
            for tensor in kept:
                storage = storage_of(tensor)
                if storage is not None and (address := storage.data_ptr()) not in left_out:
                    new = Kept(address, storage.nbytes(), tensor.dtype, module)
                    storages.setdefault(address, new)
                    self.position.inputs.append(address)
        self.storages = list(storages.values())
        if not has_begun:
            self.position = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages together."""
        return sum(kept.size for kept in self.storages)

    def by_module(self) -> list[tuple[str, int]]:
        """Return modules and their bytes, largest first.

        Modules are taken together as parts of larger ones, as far as it needs to be few rows.
        """
        sizes: dict[str, int] = defaultdict(int)
        for kept in self.storages:
            sizes[kept.module] += kept.size
        deepest = max((name.count(".") + 1 for name in sizes), default=1)
        for depth in range(deepest, 0, -1):
            rows: dict[str, int] = defaultdict(int)
            for name, size in sizes.items():
                rows[".".join(name.split(".")[:depth])] += size
            if len(rows) <= _MAX_ROWS:
                break
        return sorted(rows.items(), key=lambda row: -row[1])


def _is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def _modules_of(nodes: Iterable[Any], model: nn.Module) -> dict[Any, str]:
    """Return the module of each node; the nodes come in the order in which they were made."""
    names = {
        id(parameter): name
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
    }
    # Nodes between a parameter and the operation that uses it: a transpose, a cast.
    only_parameter: dict[Any, str] = {}
    modules: dict[Any, str] = {}
    last = ""
    for node in nodes:
        inputs = [following for following, _ in node.next_functions]
        owners = [
            names.get(id(each.variable)) if _is_leaf(each) else only_parameter.get(each)
            for each in inputs
            if each is not None
        ]
        found = [name for name in owners if name is not None]
        if found:
            last = found[0]
            if len(inputs) == 1 and not keeps_tensors(node):
                only_parameter[node] = last
        modules[node] = last
    return modules
