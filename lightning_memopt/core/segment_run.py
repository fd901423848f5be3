"""One run of consecutive modules that keeps its input alone, and how it is repeated in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memopt.core.recomputing import EarlyStopError, recomputing
from lightning_memopt.core.replay import Known, Replay, copy_containers

_STAND_IN = torch.empty(0)
_Autocast = tuple[str, bool, torch.dtype, bool]


class _Slot:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "kind", "run", "value")

    def __init__(self, run: SegmentRun, tensor: Tensor) -> None:
        self.run, self.kind = run, _kind(tensor)
        self.value: Tensor | None = None


@dataclass(frozen=True)
class _Call:
    """A run of a module, to be repeated."""

    name: str
    forward: Callable[..., Any]
    replay: Replay
    autocast: list[_Autocast]
    end: int  # of what it keeps, in all that the segment keeps


class SegmentRun:
    """One run of modules, one after the other: what it keeps, and how it is repeated.

    Args:
        head: The first module.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, head: nn.Module, args: Any, kwargs: Any) -> None:
        given: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            given.append(tensor)
            return _STAND_IN

        self._inputs = copy_containers((args, kwargs), keep)
        # Attention looks whether it was given one tensor three times.
        tensors = list({id(tensor): tensor for tensor in given}.values())
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._places = [places[id(tensor)] for tensor in given]
        self._given = [(weakref.ref(x), x._version) for x in tensors if not x.is_inference()]
        self._device = next((t.device for t in (*tensors, *head.parameters())), torch.device("cpu"))
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        anchor = torch.empty(0, requires_grad=True)
        # As autograd saves them: others' hooks see them, and who changes them later is found out.
        self._kept: Any = _Keep.apply(anchor, *tensors).grad_fn
        self._calls: list[_Call] = []
        self._slots: list[weakref.ref[_Slot]] = []

    def run(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        known: Known,
        inputs: tuple[Any, Any],
    ) -> Any:
        """Run a module, of which nothing is kept.

        Args:
            name: Its name, for errors.
            module: The module.
            forward: Runs it.
            known: See `Replay`.
            inputs: Its arguments and keyword arguments.

        Raises:
            RuntimeError: The first module changes its input in place.
        """
        args, kwargs = inputs
        replay = Replay(module, known, self._device)
        settings = _autocast_settings(self._device)
        with saved_tensors_hooks(self._pack, _unpack), replay.first():
            output = forward(*args, **kwargs)
        given = ((reference(), version) for reference, version in self._given)
        if any(x is not None and x._version != version for x, version in given):
            raise RuntimeError(
                f"`{name}` changes its input in place, so it can't be recomputed in backward; "
                "leave it out, or let it begin with an operation that is not in place "
                "(`inplace=False`)."
            )
        self._calls.append(_Call(name, forward, replay, settings, len(self._slots)))
        return output

    def repeat(self) -> None:
        """Compute again what autograd still waits for."""
        slots = [reference() for reference in self._slots]
        last = max(number for number, slot in enumerate(slots) if slot is not None)
        count = end = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            if count == end:
                raise RuntimeError("it keeps more tensors")
            slot = slots[count]
            if slot is not None:
                if slot.kind != _kind(tensor):
                    raise RuntimeError(f"it kept {slot.kind}, and then {_kind(tensor)}")
                slot.value = tensor.detach()
            if count == last:
                raise EarlyStopError
            count += 1
            return tensor.detach()

        args, kwargs = self._again()
        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
                for call in self._calls:
                    end = call.end
                    with recomputing(call.name):
                        with _autocast(call.autocast), call.replay.again():
                            args, kwargs = (call.forward(*args, **kwargs),), {}
                        if count < end:
                            raise RuntimeError("it keeps fewer tensors")
        except EarlyStopError:
            return

    def _again(self) -> Any:
        kept = zip(self._kept.saved_tensors, self._needs_grad, strict=True)
        tensors = [tensor.detach().requires_grad_(needs_grad) for tensor, needs_grad in kept]
        places = iter(self._places)
        return copy_containers(self._inputs, lambda _: tensors[next(places)])

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot


def _unpack(slot: _Slot) -> Tensor:
    if slot.value is None:
        slot.run.repeat()
    value, slot.value = slot.value, None  # a graph that is kept must not keep it
    assert value is not None
    return value


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


class _Keep(torch.autograd.Function):
    """Keeps tensors as a node of the graph would that needs them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Keep them."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Never be called: nothing is computed from what forward returns."""
        raise AssertionError("nothing was kept for backward to begin here")


def _autocast_settings(device: torch.device) -> list[_Autocast]:
    cache = torch.is_autocast_cache_enabled()
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
        for kind in {device.type, "cpu"}
    ]


@contextmanager
def _autocast(settings: list[_Autocast]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, is_on, dtype, has_cache in settings:
            stack.enter_context(torch.autocast(kind, dtype, is_on, has_cache))
        yield
