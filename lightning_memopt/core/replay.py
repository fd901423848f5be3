"""Running a block a second time so that it finds what the first run found and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_memopt.core.random_state import RandomState

Slot = tuple[nn.Module, str]
Known = dict[tuple[bool, ...], set[Slot]]

# A copy of so few bytes costs less than to find out that it was needed.
_SMALL_BYTES = 2**16
# Their output in training depends on no buffer, of a subclass with its own `forward` who knows.
_TRUSTED_FORWARDS = {_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward}


class _Seen(NamedTuple):
    """A buffer before the first run, and a copy where one may be needed."""

    tensor: Tensor | None
    version: int
    is_small: bool
    value: Tensor | None


class Replay:
    """One run of a block that may be repeated in backward.

    This restores random states, and each buffer that the block changes in forward (BatchNorm,
    spectral norm, moving averages, counters).
    The second run works on stand-ins, so the real buffers are touched once and their version
    counters stay as autograd saw them.

    Args:
        block: The module that runs.
        known: Large buffers that the block was seen to change, by which of its modules train. The
            first run in each such mode copies all of them to find out, and adds to it.
        device: Where random numbers are drawn; `None` leaves PyTorch's to PyTorch's checkpoint, and
            restores Python's and NumPy's.
    """

    def __init__(self, block: nn.Module, known: Known, device: torch.device | None = None) -> None:
        self._modules = list(block.modules())
        self._known = known
        self._modes = tuple(module.training for module in self._modules)
        self._is_new = self._modes not in known
        self._changing = known.get(self._modes, set())
        self._device = device
        self._starts: dict[Slot, Tensor | None] = {}
        self._statistics: list[Slot] = []
        self._lost: str | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the block for real and note what it changes."""
        self._random_state = RandomState(self._device)
        self._parameters = self._parameter_versions()
        before = {slot: self._look(slot) for slot in self._buffers()}
        yield
        for slot, seen in before.items():
            if seen.is_small or self._is_changed(slot, seen):
                self._starts[slot] = seen.value
                if seen.value is None and seen.tensor is not None:
                    self._lost = slot[1]
        self._known[self._modes] = self._changing
        norms = [module for module in self._modules if _is_running_statistics(module)]
        self._statistics = [(norm, name) for norm in norms for name in norm._buffers]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the block once more, from the same start."""
        if self._parameters != self._parameter_versions():
            raise RuntimeError("its parameters were changed in place since")
        if self._lost is not None:
            raise RuntimeError(f"its buffer `{self._lost}` changed, which it never did before")
        random_state = RandomState(self._device)
        slots = [*self._starts, *self._statistics]
        current = [(slot, slot[0]._buffers[slot[1]]) for slot in slots]
        stand_ins: dict[int, Tensor] = {}  # one for a buffer that several modules share
        try:
            self._random_state.put_back()
            for (module, name), tensor in current:
                start = self._starts.get((module, name), tensor)
                if start is None:
                    module._buffers[name] = None
                elif tensor is None:
                    module._buffers[name] = start.clone()
                else:
                    module._buffers[name] = stand_ins.setdefault(id(tensor), start.clone())
            yield
        finally:
            for (module, name), tensor in current:
                module._buffers[name] = tensor
            random_state.put_back()

    def _parameter_versions(self) -> list[int]:
        return versions_of(p for module in self._modules for p in module._parameters.values())

    def _buffers(self) -> list[Slot]:
        """List the buffers whose changes must be looked for."""
        return [
            (module, name)
            for module in self._modules
            if not _is_running_statistics(module)
            for name, tensor in module._buffers.items()
            if tensor is None or not tensor.is_inference()
        ]

    def _look(self, slot: Slot) -> _Seen:
        tensor = slot[0]._buffers[slot[1]]
        if tensor is None:
            return _Seen(None, 0, False, None)
        is_small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
        is_copied = is_small or self._is_new or slot in self._changing
        value = tensor.detach().clone() if is_copied else None
        return _Seen(tensor, tensor._version, is_small, value)

    def _is_changed(self, slot: Slot, seen: _Seen) -> bool:
        tensor = slot[0]._buffers.get(slot[1])
        if tensor is None or tensor is not seen.tensor or tensor._version != seen.version:
            self._changing.add(slot)
        elif self._is_new and seen.value is not None and tensor.layout is torch.strided:
            # Kernels such as that of `batch_norm` write without raising the version.
            self._changing |= set() if torch.equal(tensor, seen.value) else {slot}
        return slot in self._changing


def _is_running_statistics(module: nn.Module) -> bool:
    return (
        isinstance(module, _NormBase)
        and module.training
        and module.track_running_stats
        and type(module).forward in _TRUSTED_FORWARDS
    )


class Anew(AbstractContextManager[Any]):
    """A context that can be entered several times: each backward recomputes."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        context = self._make()
        value = context.__enter__()
        self._entered.append(context)
        return value

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def copy_containers(value: Any, change: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
    """Copy nested lists, tuples and dicts, but not what is in them.

    A DenseNet appends to the list that its layers got.

    Args:
        value: A tensor, a container or anything else.
        change: Returns what the copy has in place of a tensor.
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: copy_containers(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item, change) for item in value)
    return value


def is_key_value_cache(value: Any) -> bool:
    """Tell the caches of transformers, which a block fills when it runs."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def versions_of(values: Iterable[Any]) -> list[int]:
    """Return the version counters of the tensors among some values."""
    return [v._version for v in values if isinstance(v, Tensor) and not v.is_inference()]
