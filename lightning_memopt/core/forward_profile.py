"""Measuring a forward: which modules are called, what autograd saves in them, and when."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memopt.core.module_hooks import hookable_modules
from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.replay import is_key_value_cache, tensors_in, versions_of
from lightning_memopt.core.step_profile import Call, Save, StepProfile
from lightning_memopt.core.storages import WeakStorage, storage_of


def profile_forward(
    model: nn.Module, run: Callable[[], Any], device: torch.device, there: Iterable[Tensor] = ()
) -> StepProfile:
    """Run a forward twice and return it in numbers.

    What autograd would keep is let go at once: it takes no more memory than a forward without
    gradients. So there can be no backward. What the forward changes is for the caller to put back.

    Args:
        model: Its modules are watched.
        run: Runs a forward of it, with gradients.
        device: Where it runs.
        there: Tensors that are kept anyway, such as those of the batch; parameters and buffers are.

    Returns:
        Times of the second forward; its calls are those that both have. Modules that run several
        times in a forward are no calls of their own.

    Raises:
        RuntimeError: There was a backward within.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> profile = profile_forward(
        ...     model, lambda: model(torch.ones(2, 4)), torch.device("cpu"), []
        ... )
        >>> [call.name for call in profile.calls if call.follows]
        ['1']
    """
    there = [*there, *model.parameters(), *model.buffers()]
    forwards = []
    for _ in range(2):
        watch = _Watch(device, there)
        with ExitStack() as undo:
            for name, module in hookable_modules(model):
                undo.callback(_Watched(module, name, watch).restore)
            undo.enter_context(saved_tensors_hooks(watch.save, _refuse))
            run()
        forwards.append(watch)
    warm_up, measured = forwards
    rows = {(call.name, call.follows) for call in warm_up.calls}
    return measured.profile(rows)


def _refuse(packed: Any) -> Tensor:
    raise RuntimeError("a backward runs within the forward, so it can't be measured")


@dataclass
class _Call:
    """A call that may still run."""

    name: str
    parent: int | None
    first: int
    begin: int
    inputs: frozenset[int]
    can_begin: bool
    follows: bool
    changes: frozenset[int] = frozenset()
    end: int = 0
    after: int = 0


class _Watch:
    """What is seen of one forward."""

    def __init__(self, device: torch.device, there: list[Tensor]) -> None:
        self._clock = _Clock(device)
        storages = map(storage_of, there)
        self._there = {storage.data_ptr() for storage in storages if storage is not None}
        self._known: dict[int, tuple[WeakStorage, int]] = {}
        self._sizes: list[int] = []
        self._saves: list[tuple[int | None, int]] = []
        self._running: list[int] = []
        # What the last call directly within each call has returned.
        self._outputs: dict[int | None, tuple[weakref.ref[Tensor], int]] = {}
        self.calls: list[_Call] = []

    def save(self, tensor: Tensor) -> None:
        """Take down that autograd saves a tensor, and save nothing."""
        self._saves.append((self._number_of(tensor), self._clock.mark()))

    def enter(self, name: str, args: Any, kwargs: Any) -> int:
        """Take down that a call begins, and return its number."""
        parent = self._running[-1] if self._running else None
        output = self._outputs.pop(parent, None)
        follows = False
        if output is not None and len(args) == 1 and not kwargs:
            before = output[0]()
            follows = before is args[0] and before is not None and before._version == output[1]
        inputs = {self._number_of(tensor) for tensor in tensors_in((args, kwargs))}
        has_cache = any(is_key_value_cache(value) for value in (*args, *kwargs.values()))
        made = frozenset(number for number in inputs if number is not None)
        call = _Call(name, parent, len(self._saves), 0, made, not has_cache, follows)
        self.calls.append(call)
        self._running.append(len(self.calls) - 1)
        call.begin = self._clock.mark()
        return self._running[-1]

    def leave(self, number: int, output: Any, changed: Iterable[Tensor]) -> None:
        """Take down that a call ends, and which of its inputs it has changed in place."""
        call = self.calls[number]
        call.end, call.after = self._clock.mark(), len(self._saves)
        storages = {self._number_of(tensor) for tensor in changed}
        call.changes = frozenset(each for each in storages if each is not None)
        call.can_begin &= None not in storages  # a batch, which has no number
        self._running.pop()
        if isinstance(output, Tensor):
            self._outputs[call.parent] = weakref.ref(output), output._version

    def profile(self, rows: set[tuple[str, bool]]) -> StepProfile:
        """Return it in numbers, without calls that another forward has not."""
        seconds = self._clock.seconds()
        times = Counter(call.name for call in self.calls)
        places: dict[int | None, int | None] = {None: None}
        calls: list[Call] = []
        for number, call in enumerate(self.calls):
            parent = places[call.parent]
            places[number] = parent
            if times[call.name] > 1:
                continue
            places[number] = len(calls)
            calls.append(
                Call(
                    call.name,
                    parent,
                    call.first,
                    call.after,
                    seconds[call.begin],
                    seconds[call.end],
                    call.inputs,
                    call.changes,
                    call.can_begin,
                    call.follows and (call.name, True) in rows and self._is_row(number, times),
                )
            )
        saves = tuple(Save(storage, seconds[mark]) for storage, mark in self._saves)
        return StepProfile(tuple(calls), saves, tuple(self._sizes))

    def _is_row(self, number: int, times: Counter[str]) -> bool:
        """Return whether what ran before a call, within the same, is a call of its own."""
        parent = self.calls[number].parent
        before = [n for n in range(number) if self.calls[n].parent == parent]
        return bool(before) and times[self.calls[before[-1]].name] == 1

    def _number_of(self, tensor: Tensor) -> int | None:
        storage = storage_of(tensor)
        if storage is None or (address := storage.data_ptr()) in self._there:
            return None
        known = self._known.get(address)
        if known is None or known[0].is_freed:  # else another one where it was
            known = self._known[address] = WeakStorage(storage), len(self._sizes)
            self._sizes.append(storage.nbytes())
        return known[1]


class _Watched(PatchedMethod):
    """Stands in for the `forward` of a module."""

    def __init__(self, module: nn.Module, name: str, watch: _Watch) -> None:
        super().__init__(module, "forward")
        self._qualified_name, self._watch = name, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, and tell of it."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        given = [x for x in tensors_in((args, kwargs)) if not x.is_inference()]
        before = versions_of(given)
        number = self._watch.enter(self._qualified_name, args, kwargs)
        output = self.original(*args, **kwargs)
        changed = [x for x, version in zip(given, before, strict=True) if x._version != version]
        self._watch.leave(number, output, changed)
        return output


class _Clock:
    """Marks points in time on a device's queue or, on the CPU, in the program."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> int:
        """Mark this moment and return its number."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return len(self._marks) - 1

    def seconds(self) -> list[float]:
        """Return when each mark was reached, from the first on."""
        if not self._marks:
            return []
        first = self._marks[0]
        if self._device.type != "cuda":
            return [mark - first for mark in self._marks]
        torch.cuda.synchronize(self._device)
        return [first.elapsed_time(mark) / 1000 for mark in self._marks]
