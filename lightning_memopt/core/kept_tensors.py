"""What a live autograd graph keeps for its backward, read from the graph: nothing is changed.

No hook is set on saved tensors: hooks of the user would be switched off by it, `torch.func` would
refuse to run, and PyTorch would no longer see that a saved tensor was changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lightning_memopt.core.autograd_graph import graph_nodes, number_of, read_saved, saved_names
from lightning_memopt.core.replay import tensors_in

_Value: Any = torch._C._autograd.SavedTensor


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that a node keeps.

    Attributes:
        tensor: What is kept, as hooks of the user have packed it.
        number: That of the node; nodes of one thread are numbered as they are made.
        checkpoint: The hook of the checkpoint whose input it is, `None` for what a node keeps
            itself.
    """

    tensor: Tensor
    number: int
    checkpoint: Any = None


def can_read_kept() -> bool:
    """Return whether this PyTorch lets a graph be read without a change."""
    return hasattr(_Value, "data") and hasattr(_Value, "unpack_hook")


def next_number() -> int:
    """Return the number that the next node of this thread will have."""
    make: Any = torch.autograd
    return int(make._get_sequence_nr())


def running_checkpoint() -> Any:
    """Return the hook that unpacks what is saved at this moment, `None` without one."""
    read = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = read(True) if read is not None else None
    return None if hooks is None else hooks[1]


def kept_tensors(loss: Tensor) -> list[KeptTensor]:
    """Return what the backward of a loss will need, in the order in which it was saved.

    Where a checkpoint will compute again, these are the checkpoint's inputs.
    """
    nodes = [(number_of(node), node) for node in graph_nodes([loss])]
    found: list[KeptTensor] = []
    seen: set[int] = set()
    for number, node in sorted(nodes, key=lambda each: each[0]):
        for name in saved_names(type(node)):
            found.extend(_tensors_of(read_saved(node, name), number, None, seen))
    return found


# Not a function within the other one: it would be in a cycle that holds the tensors.
def _tensors_of(value: Any, number: int, checkpoint: Any, seen: set[int]) -> Iterator[KeptTensor]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_of(each, number, checkpoint, seen)
    elif isinstance(value, _Value):
        for tensor in tensors_in(value.data):  # none, where backward has freed it
            yield KeptTensor(tensor, number, checkpoint)
        hook = value.unpack_hook
        if hook is not None and id(hook) not in seen:
            seen.add(id(hook))
            yield from _tensors_of(list(_inputs_behind(hook)), number, hook, seen)


def _inputs_behind(hook: Any, depth: int = 2) -> Iterator[Any]:
    """Yield what PyTorch's checkpoint has saved of its inputs, found through its hook."""
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            frame = cell.cell_contents
        except ValueError:  # not filled
            continue
        if type(frame).__name__ == "_CheckpointFrame":
            yield from getattr(frame, "saved_args", ())
            saver = getattr(frame, "input_saver", None)  # of an older PyTorch
            if saver is not None:  # a tensor whose node has kept them
                yield read_saved(saver.grad_fn, "_raw_saved_tensors")
        elif isinstance(frame, FunctionType) and depth:
            yield from _inputs_behind(frame, depth - 1)
