"""Replacing a method of one object so that nobody else notices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class PatchedMethod:
    """Stands in for one method of one object, until `restore`.

    Names, class and `state_dict` of the object stay as they are. A deep copy or a pickle of the
    object gets the method that was there before, bound to the copy: a closure in its place would
    not pickle, and a copy would silently run the weights of the original.

    Attributes:
        owner: The object.
        name: Name of its method.
        original: The method that was there before.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.original: Callable[..., Any] = getattr(owner, name)
        self._own = name in vars(owner)
        functools.update_wrapper(self, self.original, updated=())  # who inspects sees the original
        # Past `nn.Module.__setattr__`, which a subclass may have narrowed.
        object.__setattr__(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; a subclass decides how."""
        return self.original(*args, **kwargs)

    def restore(self) -> None:
        """Put the method back, unless somebody has replaced it since."""
        if vars(self.owner).get(self.name) is not self:
            return
        if self._own:
            object.__setattr__(self.owner, self.name, self.original)
        else:
            object.__delattr__(self.owner, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = copy.deepcopy(self.owner, memo)
        if self._own:
            return copy.deepcopy(self.original, memo)
        return getattr(type(owner), self.name).__get__(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        # When it is read back, the owner exists but has no attributes of its own yet: what is
        # found is the method of its class.
        return (_same, (self.original,)) if self._own else (getattr, (self.owner, self.name))


def _same(value: Any) -> Any:
    return value


def surround(
    owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """Run a method of one object within a context, each time anew.

    Several may surround the same method, and leave in any order.

    Args:
        owner: The object.
        name: Name of its method.
        context: Makes the context of one call.

    Returns:
        A function that ends it; calling it twice is harmless.
    """
    there = vars(owner).get(name)
    method = there if isinstance(there, _Surrounded) else _Surrounded(owner, name)
    method.contexts.append(context)

    def undo() -> None:
        if context in method.contexts:
            method.contexts.remove(context)
            if not method.contexts:
                method.restore()

    return undo


class _Surrounded(PatchedMethod):
    """A method that runs within contexts."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(owner, name)
        self.contexts: list[Callable[[], AbstractContextManager[Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            return self.original(*args, **kwargs)
