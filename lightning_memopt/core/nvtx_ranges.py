"""Named ranges that Nsight Systems shows, always closed again.

Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.nvtx.range_push.html.
"""

from __future__ import annotations

from typing import Any

import torch


class NvtxRanges:
    """Nested ranges of one thread of work."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._nvtx: Any = torch.cuda.nvtx

    def push(self, name: str) -> None:
        """Begin a range within the one at hand."""
        self._nvtx.range_push(name)
        self._open.append(name)

    def pop(self, name: str) -> None:
        """End the range of a name and those within it; nothing happens if it isn't open."""
        while name in self._open:
            self._nvtx.range_pop()
            if self._open.pop() == name:
                return

    def close(self) -> None:
        """End all ranges."""
        while self._open:
            self.pop(self._open[-1])
