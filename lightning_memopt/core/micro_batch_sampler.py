"""Large batches of indices, each given in several pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler


class MicroBatchSampler(Sampler[list[Any]]):
    """Gives each batch of a `BatchSampler` in consecutive pieces that are as even as can be.

    A whole batch has exactly `parts` pieces; a short last one has as many as it takes to keep each
    within `batch_size`, so that a window of `parts` batches never holds samples of two batches.

    Args:
        sampler: What gives the indices, one a sample.
        samples: Samples a batch.
        parts: Pieces a batch, from 1 to `samples`.
        drop_last: Whether a short last batch is left out.

    Raises:
        ValueError: There are more parts than samples.

    Attributes:
        batch_size: Samples of the largest piece.

    Example:
        >>> list(MicroBatchSampler(range(7), samples=5, parts=2, drop_last=False))
        [[0, 1, 2], [3, 4], [5, 6]]
    """

    def __init__(
        self, sampler: Sampler[Any] | Iterable[Any], samples: int, parts: int, drop_last: bool
    ) -> None:
        if not 1 <= parts <= samples:
            raise ValueError(f"`parts` must be from 1 to the {samples} samples, got {parts}.")
        self.sampler = sampler
        self.samples = samples
        self.parts = parts
        self.drop_last = drop_last
        self.batch_size = -(-samples // parts)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in BatchSampler(self.sampler, self.samples, self.drop_last):
            indices, pieces = iter(batch), self._pieces(len(batch))
            even, extra = divmod(len(batch), pieces)
            for i in range(pieces):
                yield list(islice(indices, even + (i < extra)))

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.samples)  # type: ignore[arg-type]
        return whole * self.parts + (0 if self.drop_last else self._pieces(rest))

    def _pieces(self, samples: int) -> int:
        return self.parts if samples == self.samples else -(-samples // self.batch_size)
