"""The other ranks of a run, asked through the hosts so that nobody waits for a device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import distributed

STOPPED = (
    "Another rank has stopped, probably out of memory at a point from which ranks can't go back: "
    "see its output for the reason."
)


class Peers:
    """All ranks of a run; with one rank every answer is this rank's own.

    Made on all ranks at the same time.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._group: Any = distributed.new_group(backend="gloo") if trainer.world_size > 1 else None

    def least(self, value: int) -> int:
        """Return the least of all ranks' values.

        Raises:
            RuntimeError: Another rank has stopped.
        """
        if self._group is None:
            return value
        held = torch.tensor(value)
        try:
            distributed.all_reduce(held, distributed.ReduceOp.MIN, self._group)
        except RuntimeError as error:
            raise RuntimeError(STOPPED) from error
        return int(held)

    def all(self, value: bool) -> bool:
        """Return whether it is so on every rank.

        Raises:
            RuntimeError: Another rank has stopped.
        """
        return self.least(int(value)) == 1


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an exception says that another rank is gone."""
    if isinstance(error, distributed.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and "closed by peer" in str(error)
