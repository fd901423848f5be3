"""Hooks on modules that nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_memopt.core.patching import PatchedMethod

_COMPILED = "_torchdynamo_orig_callable"
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class ModuleHook:
    """A hook on a module; on a copy of the module it removes itself with the next call."""

    def __init__(self, call: Callable[[str, nn.Module], None], name: str) -> None:
        self._call, self._name = call, name

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Tell that the module begins, or has run."""
        if torch.compiler.is_compiling():
            return
        if self._call is _nothing:
            _remove_copies(module)
        else:
            self._call(self._name, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing, "")


def hookable_modules(
    model: nn.Module, prefix: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules below a model, each once, without those that a compiler runs."""
    seen = set() if seen is None else seen
    if any(_is_compiled(vars(model).get(name)) for name in ("forward", "training_step")):
        return
    for name, child in model.named_children():
        if id(child) in seen or getattr(child, "_compiled_call_impl", None) is not None:
            continue
        seen.add(id(child))
        # A script takes no hooks, and in evaluation one with hooks would compute in another way.
        is_fused = isinstance(child, _FUSED) and not child.training
        if not is_fused and not isinstance(child, torch.jit.ScriptModule):
            yield prefix + name, child
            yield from hookable_modules(child, f"{prefix}{name}.", seen)


def _is_compiled(method: Any) -> bool:
    while isinstance(method, PatchedMethod):
        method = method.original
    return hasattr(method, _COMPILED)


def _remove_copies(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, ModuleHook) and hook._call is _nothing:
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)


def _nothing(name: str, module: nn.Module) -> None:
    pass
