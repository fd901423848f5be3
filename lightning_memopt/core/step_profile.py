"""A forward in numbers: the calls of modules as a tree, and what autograd saved in which order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A call of a module in forward.

    Attributes:
        name: Name of the module; each is called once.
        parent: Number of the call around it, which comes before it; `None` for none.
        first: Number of the first save within it.
        end: Number of the first save after it.
        begin_seconds: When it began.
        end_seconds: When it ended.
        inputs: Storages of its inputs.
        changes: Storages of inputs that it changes in place.
        can_begin: Whether a segment may begin with it.
        follows: Whether it was given what the call before it, of the same parent, returned, and
            nothing else.
    """

    name: str
    parent: int | None
    first: int
    end: int
    begin_seconds: float
    end_seconds: float
    inputs: frozenset[int]
    changes: frozenset[int]
    can_begin: bool
    follows: bool


@dataclass(frozen=True)
class Save:
    """A tensor that autograd saved.

    Attributes:
        storage: Its storage; `None` for what is there anyway, such as a parameter.
        seconds: When it was saved.
    """

    storage: int | None
    seconds: float


@dataclass(frozen=True)
class StepProfile:
    """A forward in numbers.

    Attributes:
        calls: The calls of modules, in the order in which they began.
        saves: What autograd saved, in that order.
        sizes: Bytes of each storage.
    """

    calls: tuple[Call, ...]
    saves: tuple[Save, ...]
    sizes: tuple[int, ...]
