"""What a batch holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch, or `None` where it can't be told.

    It is the first dimension of the tensors, if they all agree; scalars don't count. Tensors are
    looked for in tuples, lists, mappings and dataclasses; a packed sequence counts its sequences,
    and a list of anything but tensors its items.

    Args:
        batch: A batch as a loader gives it.

    Returns:
        The number of samples, or `None`.

    Example:
        >>> import torch
        >>> count_samples({"x": torch.zeros(8, 3), "y": torch.zeros(8)})
        8
        >>> count_samples((torch.zeros(8, 3), torch.zeros(2, 5))) is None
        True
    """
    sizes = set(_sizes(batch))
    return sizes.pop() if len(sizes) == 1 else None


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, Tensor):
        if value.dim():
            yield len(value)
    elif isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _sizes(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _sizes(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, str | bytes | int | float) for item in value):
            yield len(value)
        else:
            for item in value:
                yield from _sizes(item)
