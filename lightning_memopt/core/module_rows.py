"""Rows of memory by module, and the modules that run at a moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class ModuleRow:
    """What one module did in one forward of the model; the root is the whole step around it.

    Attributes:
        name: Qualified name, that of its first place for a shared module; empty for the root.
        type_name: Name of its class.
        calls: How often it ran.
        forward_bytes: How much allocated memory grew while it ran, its children included.
        own_forward_bytes: The same without its children.
        kept_bytes: Storages that it keeps for backward, its children included.
        own_kept_bytes: The same without its children.
    """

    name: str
    type_name: str
    calls: int = 0
    forward_bytes: int = 0
    own_forward_bytes: int = 0
    kept_bytes: int = 0
    own_kept_bytes: int = 0


@dataclass
class ForwardMemory:
    """One forward, up to its backward.

    Attributes:
        rows: The modules that ran, the root first.
        grown_bytes: How much allocated memory grew, as the device counts it.
        kept_bytes: All storages that are kept for backward; parameters and buffers left out.
        kept_before_bytes: Those of them that were there before, such as the batch.
        has_backward: Whether a backward was seen, so that it is known what was kept.
    """

    rows: list[ModuleRow]
    grown_bytes: int = 0
    kept_bytes: int = 0
    kept_before_bytes: int = 0
    has_backward: bool = False

    def count(self, rows: tuple[ModuleRow, ...], size: int) -> None:
        """Count a storage for the modules that ran, outermost first; else for the root."""
        if not rows or rows[0] is not self.rows[0]:
            rows = (self.rows[0],)
        rows[-1].own_kept_bytes += size
        for row in set(rows):
            row.kept_bytes += size

    @property
    def explained(self) -> float:
        """What is kept and new, as a share of what memory grew by."""
        new = self.kept_bytes - self.kept_before_bytes
        return new / self.grown_bytes if self.grown_bytes > 0 else 0.0


class RunningModules:
    """The modules that run at this moment, the root first.

    Args:
        type_name: Class of the root.
        allocated: Bytes allocated when it begins.

    Attributes:
        rows: A row for each module that has run, by its name.
        stack: The rows of those that run, outermost first.
    """

    def __init__(self, type_name: str, allocated: int) -> None:
        root = ModuleRow("", type_name, calls=1)
        self.rows = {"": root}
        self.stack: tuple[ModuleRow, ...] = (root,)
        # For each that runs: what was allocated when it began, and what its children took since.
        self._begun = [[allocated, 0]]

    def enter(self, name: str, type_name: str, allocated: int) -> None:
        """Begin a module."""
        row = self.rows.setdefault(name, ModuleRow(name, type_name))
        row.calls += 1
        self.stack = (*self.stack, row)
        self._begun.append([allocated, 0])

    def leave(self, name: str, allocated: int) -> None:
        """End a module; nothing happens if it doesn't run."""
        # One that raised may have left others open.
        if name in {row.name for row in self.stack[1:]}:
            while self._pop(allocated) != name:
                pass

    def close(self, allocated: int) -> int:
        """End all modules, and return how much memory grew."""
        while self.stack:
            self._pop(allocated)
        return self.rows[""].forward_bytes

    def _pop(self, allocated: int) -> str:
        row, self.stack = self.stack[-1], self.stack[:-1]
        before, of_children = self._begun.pop()
        if row not in self.stack:  # one that calls itself has it all from its outermost call
            row.forward_bytes += allocated - before
        row.own_forward_bytes += allocated - before - of_children
        if self._begun:
            self._begun[-1][1] += allocated - before
        return row.name
