"""What an autograd graph holds, read from the graph itself: nothing is recorded beforehand."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

_SAVED = "_raw_saved_"
FREED = object()


def has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor has a graph, as far as it can be asked."""
    try:
        return tensor.grad_fn is not None
    except Exception:  # a view that was changed in place, or of a class that forbids it
        return False


def graph_nodes(tensors: Iterable[Tensor], limit: int | None = None) -> Iterator[Node]:
    """Yield each node of the graphs behind some tensors once, leaves included.

    Args:
        tensors: Tensors; those without a graph are passed over.
        limit: The most nodes to yield.
    """
    ready: list[Any] = [tensor.grad_fn for tensor in tensors if has_graph(tensor)]
    seen = set(ready)
    count = 0
    while ready and count != limit:
        node = ready.pop()
        count += 1
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ready.append(following)


def number_of(node: Any) -> int:
    """Return the number of a node: those of one thread are numbered as they are made."""
    return int(node._sequence_nr())


def saved_tensors(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that a node keeps for its backward.

    Only for graphs that nobody runs backward through any more: to see a saved tensor without
    unpacking it, which could compute or load it again, a pair of hooks that do nothing is left on
    it. What has hooks already, as under a checkpoint, and what backward has freed, is passed over.
    """
    for name in saved_names(type(node)):
        yield from _values_of(read_saved(node, name))


def _values_of(raw: Any) -> Iterator[Tensor]:
    if isinstance(raw, tuple | list):
        for each in raw:
            yield from _values_of(each)
    elif raw is not None and raw is not FREED:
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return _unlinked(tensor)

        try:
            raw.register_hooks(pack, _unlinked)
        except RuntimeError:  # no value, freed, or hooks of somebody else
            return
        yield from found


def _unlinked(tensor: Tensor) -> Tensor:
    # The tensor itself, where it is a node's own result, would hold the node that holds it.
    return tensor.detach()


def keeps_tensors(node: Node) -> bool:
    """Return whether a node of this kind keeps anything for its backward."""
    return bool(saved_names(type(node)))


def is_freed(node: Node) -> bool:
    """Return whether backward has been through a node, so that what it kept is gone.

    A node that keeps nothing is never freed. The same holds for its graph as for `saved_tensors`.
    """
    return any(_is_freed(read_saved(node, name)) for name in saved_names(type(node)))


@functools.lru_cache(maxsize=1024)
def saved_names(kind: type) -> tuple[str, ...]:
    """Return the names under which nodes of a kind keep what they keep."""
    return tuple(name for name in dir(kind) if name.startswith(_SAVED))


def read_saved(node: Any, name: str) -> Any:
    """Return what a node keeps under a name; `FREED` where the node won't say any more."""
    try:
        return getattr(node, name)
    except (AttributeError, RuntimeError):  # a function of Python, after backward
        return FREED


def _is_freed(raw: Any) -> bool:
    if raw is FREED:
        return True
    if isinstance(raw, tuple | list):
        return any(_is_freed(each) for each in raw)
    try:
        raw.register_hooks(_unlinked, _unlinked)
    except RuntimeError as error:
        return "has been freed" in str(error)
    return False
