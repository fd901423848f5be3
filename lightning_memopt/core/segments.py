"""Runs of consecutive modules that keep their first input alone, and compute the rest in backward.

Each module runs when the model calls it, so whoever else uses what lies between gets it as ever.
Only what autograd saves within them is exchanged for a promise to compute it again.

Source of the method: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.recomputing import EarlyStopError, explanation, recomputing
from lightning_memopt.core.replay import (
    Known,
    Replay,
    copy_containers,
    is_key_value_cache,
    tensors_in,
    versions_of,
)


def checkpoint_segments(
    model: nn.Module, segments: Iterable[Sequence[str]]
) -> Callable[[], None]:
    """Make segments of a model keep their first input, and recompute the rest in backward.

    A segment is a module, or several that run one after the other, each with the output of the one
    before as its only input. A recomputation ends with the last tensor that is needed: of an
    activation function and the linear layer behind it, the function alone runs again. Where a
    module of a segment is given something else, it runs as usual, with one warning.

    Names, types, `state_dict` keys, `deepcopy` and `pickle` of the model stay as they are. Outputs,
    gradients, buffers and random states are those of the plain model. Compiled code and forwards
    without gradients run as usual.

    Args:
        model: Any module.
        segments: For each segment the qualified names of its modules, in the order in which they
            run; no module is in two.

    Returns:
        A function that undoes it; calling it twice is harmless.

    Raises:
        ValueError: A name is no module of the model, or a module is in two segments.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> undo = checkpoint_segments(model, [["0", "1"]])
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> undo()
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: set[nn.Module] = set()
    with ExitStack() as undo:
        for names in segments:
            segment = _Segment(list(names))
            for position, name in enumerate(names):
                if name not in modules:
                    raise ValueError(f"`segments` must name modules of the model, got {name!r}.")
                if modules[name] in chosen:
                    raise ValueError(f"`segments` must share no module, but two hold {name!r}.")
                chosen.add(modules[name])
                undo.callback(_Member(modules[name], segment, position).restore)
        return undo.pop_all().close


class _Member(PatchedMethod):
    """Stands in for the `forward` of a module of a segment."""

    def __init__(self, module: nn.Module, segment: _Segment, position: int) -> None:
        super().__init__(module, "forward")
        self.segment, self.position = segment, position
        self.known: Known = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as part of a segment, where that is possible."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        frame = self.segment.frame_of(self, args, kwargs)
        if frame is None:
            return self.original(*args, **kwargs)
        output = frame.run(self, args, kwargs)
        self.segment.expect(frame, self.position + 1, output)
        return output


class _Segment:
    """Knows which run of its modules is at hand, and what the next of them must be given."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._next: tuple[int, weakref.ref[Tensor], int, _Frame] | None = None
        self._has_warned = False

    def frame_of(self, member: _Member, args: Any, kwargs: Any) -> _Frame | None:
        """Return what the run of a module is part of; `None` where it must run as usual."""
        expected, self._next = self._next, None
        if member.position == 0:
            if any(is_key_value_cache(value) for value in (*args, *kwargs.values())):
                return self._warn(0, "is given a key-value cache, which a repetition would fill")
            return _Frame(self.names, member.owner, args, kwargs)
        if expected is not None and not kwargs and len(args) == 1:
            position, output, version, frame = expected
            if position == member.position and args[0] is output() is not None:
                if args[0]._version == version:
                    return frame
        return self._warn(member.position, "is not given what the module before has returned")

    def expect(self, frame: _Frame, position: int, output: Any) -> None:
        """Expect the next module of the segment, for as long as the output is there."""
        if position < len(self.names) and isinstance(output, Tensor):
            alive = weakref.ref(output, self._forget)
            self._next = position, alive, output._version, frame

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._next is not None and self._next[1] is gone:
            self._next = None

    def _warn(self, position: int, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`{self.names[position]}` runs as if it were not checkpointed: it {reason}.",
                stacklevel=2,
            )


class _Slot:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "frame", "kind", "value")

    def __init__(self, frame: _Frame, tensor: Tensor) -> None:
        self.frame, self.kind = frame, _kind(tensor)
        self.value: Tensor | None = None


@dataclass(frozen=True)
class _Call:
    """A run of a module, to be repeated."""

    name: str
    forward: Callable[..., Any]
    replay: Replay
    autocast: tuple[torch.autocast, ...]


class _Frame:
    """One run of a segment: what it keeps, and how it is repeated."""

    def __init__(self, names: list[str], head: nn.Module, args: Any, kwargs: Any) -> None:
        self._names = names
        tensors = list(tensors_in((args, kwargs)))
        self._device = next((t.device for t in (*tensors, *head.parameters())), torch.device("cpu"))
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        places = iter(range(len(tensors)))
        self._inputs = copy_containers((args, kwargs), lambda _: _Place(next(places)))
        anchor = torch.empty(0, requires_grad=True)
        # As autograd saves them: others' hooks see them, and who changes them later is found out.
        self._kept: Any = _Keep.apply(anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._slots: list[weakref.ref[_Slot]] = []

    def run(self, member: _Member, args: Any, kwargs: Any) -> Any:
        """Run a module, of which nothing is kept."""
        name = self._names[member.position]
        replay = Replay(member.owner, member.known, self._device)
        inputs = list(tensors_in((args, kwargs))) if member.position == 0 else []
        before = versions_of(inputs)
        with saved_tensors_hooks(self._pack, _unpack), replay.first():
            output = member.original(*args, **kwargs)
        if versions_of(inputs) != before:
            raise RuntimeError(
                f"`{name}` changes its input in place, so it can't be recomputed in backward; "
                "leave it out, or let it begin with an operation that is not in place "
                "(`inplace=False`)."
            )
        self._calls.append(_Call(name, member.original, replay, _autocast(self._device)))
        return output

    def repeat(self) -> None:
        """Compute again what autograd still waits for."""
        slots = [reference() for reference in self._slots]
        last = max(number for number, slot in enumerate(slots) if slot is not None)
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
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
                    with recomputing(call.name), _all(call.autocast), call.replay.again():
                        args, kwargs = (call.forward(*args, **kwargs),), {}
        except EarlyStopError:
            return
        reason = f"it kept {len(slots)} tensors, and then {count}"
        raise CheckpointError(explanation(self._names[0], reason))

    def _again(self) -> Any:
        kept = zip(self._kept.saved_tensors, self._needs_grad, strict=True)
        tensors = [tensor.detach().requires_grad_(needs_grad) for tensor, needs_grad in kept]
        return _filled(self._inputs, tensors)

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot


def _unpack(slot: _Slot) -> Tensor:
    if slot.value is None:
        slot.frame.repeat()
    value, slot.value = slot.value, None  # a graph that is kept must not keep it
    assert value is not None
    return value
