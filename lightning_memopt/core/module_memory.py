"""Which module's forward takes memory, and which keeps how much of it for backward.

Every storage that autograd saves counts once, for the innermost module that runs when it is saved
first. Storages are watched by weak references, so that memory is freed as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.module_hooks import ModuleHook, hookable_modules
from lightning_memopt.core.module_rows import ForwardMemory, ModuleRow, RunningModules
from lightning_memopt.core.storages import WeakStorage, storage_of


class ModuleMemory:
    """Watches the forwards of a model.

    Modules that a compiler runs have no row: what they keep counts for the module around them. So
    do repetitions of checkpointed modules in backward: these have kept their inputs.

    Args:
        model: The model.
        device: Where memory is read.
        begun: Called when a forward begins.
        entered: Called with the name of each module that begins to run.
        left: Called with the name of each module that has run.

    Attributes:
        forwards: All forwards that are done.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        begun: Callable[[], None] | None = None,
        entered: Callable[[str], None] | None = None,
        left: Callable[[str], None] | None = None,
    ) -> None:
        self._model = model
        self._reader = memory_reader(device)
        self._begun, self._entered, self._left = begun, entered, left
        self.forwards: list[ForwardMemory] = []
        self._saved: dict[int, _Saved] = {}
        self._before: set[int] = set()
        self._now: RunningModules | None = None

    @property
    def largest(self) -> ForwardMemory | None:
        """The forward that kept most."""
        return max(self.forwards, key=lambda each: each.kept_bytes, default=None)

    def kept_addresses(self) -> list[int]:
        """Return where the storages lie that are kept for backward and are still there."""
        return [address for address, saved in self._saved.items() if not saved.storage.is_freed]

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Take down which storages are there before the forward."""
        storages = map(storage_of, tensors)
        self._before = {storage.data_ptr() for storage in storages if storage is not None}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs within; nothing stays on the modules."""
        self._left_out = {
            storage.data_ptr()
            for tensor in (*self._model.parameters(), *self._model.buffers())
            if (storage := storage_of(tensor)) is not None
        }
        self._saved.clear()
        with ExitStack() as hooks:
            for name, module in hookable_modules(self._model):
                before, after = ModuleHook(self._enter, name), ModuleHook(self._leave, name)
                for handle in (
                    module.register_forward_pre_hook(before, prepend=True),
                    module.register_forward_hook(after, always_call=True),
                ):
                    hooks.callback(handle.remove)
            hooks.enter_context(saved_tensors_hooks(self._pack, _same))
            self._begin()
            try:
                yield
            finally:
                self.end_forward()

    def end_forward(self) -> None:
        """End the forward at hand, if there is one: backward begins."""
        running, self._now = self._now, None
        if running is None:
            return
        running.close(self._allocated())
        kept = [saved for saved in self._saved.values() if not saved.storage.is_freed]
        forward = ForwardMemory(list(running.rows.values()), running.rows[""].forward_bytes)
        for saved in kept:
            if saved.rows and saved.rows[0] is forward.rows[0]:
                forward.kept_bytes += saved.size
                forward.kept_before_bytes += saved.size if saved.was_before else 0
                saved.rows[-1].own_kept_bytes += saved.size
                for row in set(saved.rows):
                    row.kept_bytes += saved.size
        if forward.kept_bytes or len(forward.rows) > 1:
            self.forwards.append(forward)

    def _begin(self) -> RunningModules:
        if self._now is None:
            if self._begun is not None:
                self._begun()
            self._now = RunningModules(type(self._model).__name__, self._allocated())
        return self._now

    def _enter(self, name: str, module: nn.Module) -> None:
        running = None if _is_in_backward() else self._begin()
        if self._entered is not None:
            self._entered(name)
        if running is not None:
            running.enter(name, type(module).__name__, self._allocated())

    def _leave(self, name: str, module: nn.Module) -> None:
        if self._now is not None and not _is_in_backward():
            self._now.leave(name, self._allocated())
        if self._left is not None:
            self._left(name)

    def _pack(self, tensor: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not _is_in_backward():
            self._note(tensor)
        # The tensor itself, where it is an output, would hold the node that holds it.
        return tensor.detach()

    def _note(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or (address := storage.data_ptr()) in self._left_out:
            return
        known = self._saved.get(address)
        if known is None or known.storage.is_freed:
            rows = self._begin().stack
            was_before = address in self._before
            reference = WeakStorage(storage)
            self._saved[address] = _Saved(reference, storage.nbytes(), rows, was_before)

    def _allocated(self) -> int:
        return self._reader.read().allocated


@dataclass(frozen=True)
class _Saved:
    """A storage that is kept: the modules that ran when it was saved, outermost first."""

    storage: WeakStorage
    size: int
    rows: tuple[ModuleRow, ...]
    was_before: bool


def _is_in_backward() -> bool:
    """Return whether backward runs, in which checkpointed modules are run again."""
    return bool(torch._C._current_graph_task_id() != -1)


def _same(tensor: Tensor) -> Tensor:
    return tensor
