"""Which module's forward takes memory, and which keeps how much of it for backward.

Every storage that autograd has saved when backward begins counts once, for the innermost module
that ran when it was saved first. Storages are watched by weak references, so that memory is freed
as ever.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_memopt.core.kept_tensors import (
    KeptTensor,
    can_read_kept,
    kept_tensors,
    next_number,
    running_checkpoint,
)
from lightning_memopt.core.memory import memory_reader
from lightning_memopt.core.module_hooks import ModuleHook, hookable_modules
from lightning_memopt.core.module_rows import ForwardMemory, ModuleRow, RunningModules
from lightning_memopt.core.storages import WeakStorage, storage_of

_Rows = tuple[ModuleRow, ...]


class ModuleMemory:
    """Watches the forwards of a model.

    Modules that a compiler runs have no row: what they keep counts for the module around them. So
    do repetitions of checkpointed modules in backward: these have kept their inputs. What goes
    wrong in watching never reaches the model: it is raised by the next `end_forward`.

    Args:
        model: The model.
        device: Where memory is read.
        begun: Called when a forward begins.
        entered: Called with the name of each module that begins to run.
        left: Called with the name of each module that has run.

    Attributes:
        forwards: All forwards that are done.
        has_growth: Whether it is known what forwards take. On a host it isn't: the profiler and
            Python allocate there as well.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        begun: Callable[[], None] | None = None,
        entered: Callable[[str], None] | None = None,
        left: Callable[[str], None] | None = None,
    ) -> None:
        self._model, self._device = model, device
        self._reader = memory_reader(device)
        self._begun, self._entered, self._left = begun, entered, left
        self.forwards: list[ForwardMemory] = []
        self.has_growth = device.type != "cpu"
        self._error: Exception | None = None
        self._kept: dict[int, tuple[WeakStorage, bool]] = {}
        self._before: set[int] = set()
        self._now: RunningModules | None = None
        # Which modules ran from which number of node on.
        self._spans: list[tuple[int, _Rows]] = []
        self._checkpoints: WeakKeyDictionary[Any, _Rows] = WeakKeyDictionary()

    @property
    def largest(self) -> ForwardMemory | None:
        """The forward that kept most."""
        return max(self.forwards, key=lambda each: each.kept_bytes, default=None)

    def kept_addresses(self) -> list[int]:
        """Return where the storages lie that forwards made, kept, and that are still there."""
        kept = self._kept.items()
        return [address for address, (x, was_before) in kept if not was_before and not x.is_freed]

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Take down which storages are there before the forward."""
        storages = map(storage_of, tensors)
        self._before = {storage.data_ptr() for storage in storages if storage is not None}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs within; nothing stays on the modules."""
        with ExitStack() as hooks:
            self._carefully(self._set_hooks, hooks)
            try:
                yield
            except BaseException:
                self._now = None  # it has no backward
                raise
            self._carefully(self._close)

    def end_forward(self, loss: Tensor | None = None) -> None:
        """End the forward at hand, if there is one.

        Args:
            loss: What backward begins from; `None` where no backward was seen.
        """
        self.raise_error()
        kept = [] if loss is None or not can_read_kept() else kept_tensors(loss)
        running, self._now = self._now, None
        if running is None and kept and kept[-1].number >= self._spans[-1][0]:
            running = RunningModules(type(self._model).__name__, self._allocated())
        if running is not None:
            grown = running.close(self._allocated())
            self.forwards.append(ForwardMemory(list(running.rows.values()), grown))
        # Without a new forward it is the second loss of the last one.
        if self.forwards:
            forward = self.forwards[-1]
            forward.has_backward |= loss is not None
            self._add(kept, forward)
            if running is not None and not forward.kept_bytes and len(forward.rows) == 1:
                self.forwards.pop()
        self._spans.append((next_number(), ()))

    def raise_error(self) -> None:
        """Raise what has gone wrong while the model ran."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def drop_last(self) -> None:
        """Forget the last forward: its backward has failed."""
        del self.forwards[-1:]

    def let_go(self) -> None:
        """Call nobody any more."""
        self._begun = self._entered = self._left = None

    def _set_hooks(self, hooks: ExitStack) -> None:
        if self._now is not None:
            self.end_forward()
        self._kept.clear()
        self._spans.clear()
        for name, module in hookable_modules(self._model):
            before = ModuleHook(self._enter, name)
            after = ModuleHook(self._leave, name)
            hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        self._begin()

    def _carefully(self, act: Callable[..., object], *args: Any) -> None:
        if self._error is None:
            try:
                act(*args)
            except Exception as error:
                self._error = error.with_traceback(None)

    def _begin(self) -> RunningModules:
        if self._now is None:
            if self._begun is not None:
                self._begun()
            self._now = RunningModules(type(self._model).__name__, self._allocated())
            self._spans.append((next_number(), self._now.stack))
        return self._now

    def _close(self) -> None:
        if self._now is not None:
            self._now.close(self._allocated())

    def _enter(self, name: str, module: nn.Module) -> None:
        self._carefully(self._do_enter, name, type(module).__name__)

    def _leave(self, name: str, module: nn.Module) -> None:
        self._carefully(self._do_leave, name)

    def _do_enter(self, name: str, type_name: str) -> None:
        running = None if _is_in_backward() else self._begin()
        if self._entered is not None:
            self._entered(name)
        if running is not None:
            hook = running_checkpoint()
            with suppress(TypeError):  # no weak reference to it
                self._checkpoints.setdefault(hook, running.stack)
            running.enter(name, type_name, self._allocated())
            self._spans.append((next_number(), running.stack))

    def _do_leave(self, name: str) -> None:
        if self._now is not None and not _is_in_backward():
            self._now.leave(name, self._allocated())
            self._spans.append((next_number(), self._now.stack))
        if self._left is not None:
            self._left(name)

    def _add(self, kept: list[KeptTensor], forward: ForwardMemory) -> None:
        models = (*self._model.parameters(), *self._model.buffers())
        left_out = {x.data_ptr() for x in map(storage_of, models) if x is not None}
        total: dict[int, int] = {}
        for each in kept:
            storage = storage_of(each.tensor)
            if storage is None or storage.device.type != self._device.type:
                continue
            address = storage.data_ptr()
            known = self._kept.get(address)
            if address in left_out or (address not in total and known and not known[0].is_freed):
                continue
            total[address] = storage.nbytes()
            if known is None or known[0].is_freed:
                was_before = address in self._before
                self._kept[address] = WeakStorage(storage), was_before
                forward.kept_before_bytes += storage.nbytes() if was_before else 0
                forward.count(self._rows_of(each), storage.nbytes())
        forward.kept_bytes += sum(total.values())

    def _rows_of(self, kept: KeptTensor) -> _Rows:
        if kept.checkpoint is not None:
            with suppress(TypeError):
                rows = self._checkpoints.get(kept.checkpoint)
                if rows is not None:
                    return rows
        position = bisect_right(self._spans, kept.number, key=lambda span: span[0])
        return self._spans[position - 1][1] if position else ()

    def _allocated(self) -> int:
        return self._reader.read().allocated if self.has_growth else 0


def _is_in_backward() -> bool:
    """Return whether backward runs, in which checkpointed modules are run again."""
    return bool(torch._C._current_graph_task_id() != -1)
