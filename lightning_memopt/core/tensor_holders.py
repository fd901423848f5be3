"""Which attributes hold how many tensors: two looks tell what grew in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.core.autograd_graph import graph_nodes
from lightning_memopt.core.object_parts import PLAIN
from lightning_memopt.core.tensor_search import TensorSearch, TensorTally

MAX_GRAPH_NODES = 50_000
# What a tensor takes however small it is: the least block of CUDA's allocator, and about what its
# objects take on a CPU.
TENSOR_BYTES = 512
_MAX_VISITS_AT_HAND = 1000


@dataclass(frozen=True)
class Holding:
    """The tensors that one attribute holds, in a container or by itself.

    Attributes:
        kind: Name of the container's type; `"Tensor"` for a tensor by itself.
        tensors: Their number.
        bytes: Size of their distinct storages.
        with_graph: How many of them have a graph.
        graph_nodes: Nodes of those graphs, counted to `MAX_GRAPH_NODES`.
        is_bounded: Whether the container drops the oldest by itself.
        is_metric: Whether it is a state of a metric.
        file: Name of the file whose global it is in, or nothing.
    """

    kind: str
    tensors: int = 0
    bytes: int = 0
    with_graph: int = 0
    graph_nodes: int = 0
    is_bounded: bool = False
    is_metric: bool = False
    file: str = ""


@dataclass(frozen=True)
class GrownHolder:
    """An attribute that holds more than before.

    Attributes:
        name: Its path, as `"model.losses"`, or `"losses of train.py"` for a global.
        now: What it holds now.
        more_tensors: How many tensors more.
        more_bytes: How many bytes more, small tensors counted as what they take at least.
        more_graph_nodes: How many nodes of graphs more.
    """

    name: str
    now: Holding
    more_tensors: int
    more_bytes: int
    more_graph_nodes: int

    @property
    def has_more_graph(self) -> bool:
        """Whether more graph is held, so that all that the graph keeps is held too."""
        return self.more_graph_nodes > 0


def find_holders(
    roots: Mapping[str, object],
    modules: Iterable[ModuleType] = (),
    skip: tuple[type, ...] = (),
) -> dict[str, Holding]:
    """Look through objects for the attributes that hold tensors.

    Objects of the user's classes, modules, functions with what they close over, hooks and
    containers are followed; properties are not called, parameters are left out. What two attributes
    share counts for the first. What can't be read is passed over, and the rest of a root that is
    too large.

    Args:
        roots: Objects by the name their attributes' paths begin with.
        modules: Python modules whose globals, classes and functions are searched.
        skip: Types of objects that are not searched.

    Returns:
        What is held, by the path of the attribute.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> model.kept = [model.weight.sum(), model.weight.sum()]
        >>> find_holders({"model": model})["model.kept"].with_graph
        2
    """
    search = TensorSearch(skip)
    for name, root in roots.items():
        with suppress(Exception):  # one odd object hides no other root
            search.look_into(name, root)
    for module in modules:
        with suppress(Exception):
            search.look_into_globals(module)
    return {name: _holding(tally) for name, tally in search.tallies.items()}


def bytes_at_hand(things: Any, device: torch.device) -> int:
    """Return the bytes of the storages that a batch, or what a step returned, has on a device.

    Args:
        things: Tensors in containers or objects; of very many the first are counted.
        device: The device.

    Example:
        >>> import torch
        >>> bytes_at_hand({"x": torch.zeros(8), "n": 1}, torch.device("cpu"))
        32
    """
    sizes: dict[int, int] = {}
    waiting, odd = [things], []
    for _ in range(_MAX_VISITS_AT_HAND):
        if not waiting:
            break
        value = waiting.pop()
        kind = type(value)
        try:  # plain ones by themselves: this is done every step, a search takes four times as long
            if kind is Tensor:
                if value.device == device:
                    storage = value.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
            elif kind is list or kind is tuple:
                waiting.extend(value[:_MAX_VISITS_AT_HAND])
            elif kind is dict:
                waiting.extend(islice(value.values(), _MAX_VISITS_AT_HAND))
            elif not issubclass(kind, PLAIN):
                odd.append(value)
        except Exception:  # sparse, for one
            continue
    if odd:
        with suppress(Exception):
            found = TensorSearch((), _MAX_VISITS_AT_HAND).count(odd).storages
            sizes |= {place: size for (on, place), size in found.items() if on == device}
    return sum(sizes.values())


def _holding(tally: TensorTally) -> Holding:
    return Holding(
        tally.kind,
        tally.tensors,
        sum(tally.storages.values()),
        len(tally.with_graph),
        sum(1 for _ in graph_nodes(tally.with_graph, MAX_GRAPH_NODES)),
        tally.is_bounded,
        tally.is_metric,
        tally.file,
    )


def grown_holders(before: Mapping[str, Holding], now: Mapping[str, Holding]) -> list[GrownHolder]:
    """Compare two looks.

    Returns:
        What holds more tensors, bytes or graph than before, the worst first: what holds more graph
        holds more than its tensors show.
    """
    grown = []
    for name, holding in now.items():
        old = before.get(name, Holding(holding.kind))
        tensors = holding.tensors - old.tensors
        size = max(holding.bytes - old.bytes, tensors * TENSOR_BYTES)
        nodes = holding.graph_nodes - old.graph_nodes
        if nodes == 0 and holding.graph_nodes >= MAX_GRAPH_NODES:
            nodes = 1  # there may be any number
        if tensors > 0 or size > 0 or nodes > 0:
            grown.append(GrownHolder(name, holding, tensors, size, nodes))
    return sorted(grown, key=lambda x: (x.has_more_graph, x.more_bytes), reverse=True)
