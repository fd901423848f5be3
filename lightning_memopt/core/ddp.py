"""DistributedDataParallel before a forward, to go back to when no backward follows it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ForwardMark:
    """What a forward changes in `DistributedDataParallel`; nothing for any other module.

    A forward broadcasts the buffers if a synchronised backward came before it, and makes the
    reducer expect a backward. All ranks have to go back together.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._is_buffer_sync_due = self._ddp is not None and self._ddp.require_forward_param_sync

    def put_back(self) -> None:
        """Let the next forward do what the one that is thrown away did."""
        if self._ddp is None:
            return
        self._ddp.require_forward_param_sync = self._is_buffer_sync_due
        # Else the next backward would be reduced, even one that is not to be synchronised. PyTorch
        # has no public call for it.
        reducer: Any = self._ddp.reducer
        reducer._reset_state()
