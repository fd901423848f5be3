"""Every storage that operators make, from birth to death: of real tensors and of fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lightning_memopt.core.module_hooks import ModuleHook, hookable_modules

WORKSPACES = "workspaces"

_Extra = Callable[[Any, tuple[Any, ...], list[Tensor]], int]


@dataclass(eq=False)
class Lifetime:
    """A storage, and what is known of it.

    Attributes:
        size: Its bytes.
        dtype: Type of the tensor that it was made for.
        operator: The operator that made it, without its overload; empty for what was there before.
        module: Name of the innermost module that ran.
        phase: Name of the phase in which it was made.
        kind: What it is used for, once that is known.
        is_frozen: Whether it is a parameter that isn't trained.
    """

    size: int
    dtype: torch.dtype
    operator: str = ""
    module: str = ""
    phase: str = ""
    kind: str = ""
    is_frozen: bool = False


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is allocated and freed while it is entered; memory is freed as ever.

    The operators run as they would without it. Memory that they take and give back within
    themselves is not seen: `extra` can tell of it.

    Args:
        device: Type of the device; storages elsewhere are left out.
        extra: Given an operator, its arguments and its results, the bytes that it takes and gives
            back within itself.

    Attributes:
        lifetimes: All storages, in order of birth.
        events: A number each: `n` for the birth of the storage `n - 1`, `-n` for its death.
        phases: Where phases begin: position in `events`, and name.
    """

    def __init__(self, device: str, extra: _Extra | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._extra = device, extra
        self.lifetimes: list[Lifetime] = []
        self.events: list[int] = []
        self.phases: list[tuple[int, str]] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._modules: list[str] = []
        self._phase = ""

    def begin_phase(self, name: str) -> None:
        """Begin a phase."""
        self._phase = name
        self.phases.append((len(self.events), name))

    def label(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what tensors are used for; those not seen yet are taken down."""
        for tensor in tensors:
            number = self._number(tensor, "")
            if number is not None:
                lifetime = self.lifetimes[number]
                lifetime.kind = kind
                is_weight = isinstance(tensor, nn.Parameter)
                lifetime.is_frozen = is_weight and not tensor.requires_grad

    def leave(self) -> None:
        """Leave the trace, also where another mode was entered after it and is still there."""
        modes: list[Any] = list(_get_current_dispatch_mode_stack())
        position = next((i for i, mode in enumerate(modes) if mode is self), len(modes))
        for mode in reversed(modes[position:]):
            mode.__exit__(None, None, None)
        for mode in modes[position + 1 :]:
            mode.__enter__()

    def stop(self) -> None:
        """Take down no more deaths."""
        self._live.clear()

    @contextmanager
    def naming_modules(self, model: nn.Module) -> Iterator[None]:
        """Know within which module an operator runs; nothing stays on the modules."""
        with ExitStack() as hooks:
            for name, module in hookable_modules(model):
                before, after = ModuleHook(self._enter, name), ModuleHook(self._leave, name)
                hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                hooks.callback(module.register_forward_hook(after, always_call=True).remove)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and take down what it has made."""
        results = func(*args, **(kwargs or {}))
        operator = func.overloadpacket.__name__
        made = [
            tensor for tensor in _tensors(results) if self._number(tensor, operator) is not None
        ]
        if self._extra is not None:
            size = self._extra(func, args, made)
            if size:
                self._add(Lifetime(size, torch.uint8, operator, *self._place(), WORKSPACES))
                self.events.append(-len(self.lifetimes))
        return results

    def _number(self, tensor: Tensor, operator: str) -> int | None:
        """Return the number of a tensor's storage; `None` where it has none on the device."""
        if tensor.device.type != self._device:
            return None
        try:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
        except Exception:  # sparse, uninitialized, or of a class that forbids it in its own way
            return None
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known[0]
        if not size:
            return None
        number = len(self.lifetimes)
        self._add(Lifetime(size, tensor.dtype, operator, *self._place()))
        live, events = self._live, self.events

        def died(_: Any) -> None:
            if live.get(key, (None,))[0] == number:
                del live[key]
                events.append(-1 - number)

        live[key] = number, weakref.ref(storage, died)
        return number

    def _place(self) -> tuple[str, str]:
        return self._modules[-1] if self._modules else "", self._phase

    def _add(self, lifetime: Lifetime) -> None:
        self.lifetimes.append(lifetime)
        self.events.append(len(self.lifetimes))

    def _enter(self, name: str, module: nn.Module) -> None:
        self._modules.append(name)

    def _leave(self, name: str, module: nn.Module) -> None:
        while self._modules and self._modules.pop() != name:
            pass


def is_in_dispatch_mode() -> bool:
    """Return whether another mode sees the operators of this thread."""
    return bool(_get_current_dispatch_mode_stack())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
