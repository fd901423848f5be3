"""Whether a model runs code that `torch.compile` has compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

_COMPILED = "_torchdynamo_orig_callable"
_DISABLED = "_torchdynamo_disable"  # what is never compiled has the other mark too


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module, a method or a function beside a module's class is compiled."""
    modules = list(model.modules())
    classes = {each for module in modules for each in type(module).__mro__}
    files = {each.__module__ for each in classes}
    places = [
        *(vars(module) for module in modules),
        *(vars(each) for each in classes),
        *(vars(sys.modules[name]) for name in files if name in sys.modules),
    ]
    return any(
        "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in modules
    ) or any(_has_compiled(place.values()) for place in places)


def _has_compiled(values: Iterable[Any]) -> bool:
    return any(
        _COMPILED in getattr(value, "__dict__", ()) and not hasattr(value, _DISABLED)
        for value in list(values)
        if callable(value) and not isinstance(value, nn.Module | type)
    )
