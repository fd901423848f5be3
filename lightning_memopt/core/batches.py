"""What a batch holds, and a batch cut into smaller ones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch, or `None` where it can't be told.

    It is the first dimension of the tensors, if they all agree; scalars don't count. Tensors are
    looked for in tuples, lists, mappings and dataclasses; a packed sequence counts its sequences,
    and a list of numbers or strings its items. Where tensors disagree, lists and tuples within the
    batch are taken for samples, as detection models have them: `([image, ...], [target, ...])`, and
    so is a list of mappings.

    Args:
        batch: A batch as a loader gives it.

    Returns:
        The number of samples, or `None`.

    Example:
        >>> import torch
        >>> count_samples({"x": torch.zeros(8, 3), "y": torch.zeros(8)})
        8
        >>> count_samples(([torch.zeros(3, 9, 9)] * 4, [{"boxes": torch.zeros(2, 4)}] * 4))
        4
        >>> count_samples((torch.zeros(8, 3), torch.zeros(2, 5))) is None
        True
    """
    layout = _layout(batch)
    return None if layout is None else layout[0]


def split_batch(batch: Any, k: int) -> list[Any]:
    """Cut a batch into `k` batches of the same types along its batch dimension.

    Tensors are views of the batch's. What has no batch dimension (scalars, strings, `None`) is in
    each part. The first parts have one sample more where `k` doesn't divide the number of samples.

    Args:
        batch: A batch as a loader gives it; see `count_samples` for what is understood.
        k: Number of parts.

    Returns:
        The parts, in order; their samples put together are the batch's.

    Raises:
        TypeError: The samples can't be told.
        ValueError: There are fewer samples than parts.

    Example:
        >>> import torch
        >>> [len(part["x"]) for part in split_batch({"x": torch.zeros(5, 3)}, 2)]
        [3, 2]
    """
    samples, lists_hold_samples = _samples(batch)
    if not 1 <= k <= samples:
        raise ValueError(f"`k` must be from 1 to the {samples} samples of the batch, got {k}.")
    part, extra = divmod(samples, k)
    ends = [(i + 1) * part + min(i + 1, extra) for i in range(k)]
    return [
        _choose(batch, itemgetter(slice(start, end)), lists_hold_samples)
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def take_samples(batch: Any, n: int) -> Any:
    """Return the first `n` samples of a batch, in a batch of the same types.

    Args:
        batch: A batch as a loader gives it; see `split_batch`.
        n: Number of samples.

    Returns:
        The smaller batch; tensors are views of the batch's.

    Raises:
        TypeError: The samples can't be told.
        ValueError: There are fewer than `n` samples, or `n` is less than 1.

    Example:
        >>> import torch
        >>> take_samples({"x": torch.arange(5)}, 2)
        {'x': tensor([0, 1])}
    """
    samples, lists_hold_samples = _samples(batch)
    if not 1 <= n <= samples:
        raise ValueError(f"`n` must be from 1 to the {samples} samples of the batch, got {n}.")
    return _choose(batch, itemgetter(slice(n)), lists_hold_samples)


def repeat_samples(batch: Any, n: int) -> Any:
    """Return a batch of `n` samples, in memory of its own, by repeating or dropping samples.

    Args:
        batch: A batch as a loader gives it; see `split_batch`.
        n: Number of samples, at least one.

    Returns:
        A batch of the same types.

    Raises:
        TypeError: The samples can't be told.

    Example:
        >>> import torch
        >>> repeat_samples({"x": torch.arange(2)}, 5)
        {'x': tensor([0, 1, 0, 1, 0])}
    """
    _, lists_hold_samples = _samples(batch)
    return _choose(batch, lambda samples: _repeated(samples, n), lists_hold_samples)


def count_elements(batch: Any) -> int:
    """Return the number of elements of all tensors in a batch, as a measure of its size.

    Example:
        >>> import torch
        >>> count_elements({"x": torch.zeros(4, 3), "y": [torch.zeros(4)]})
        16
    """
    return sum(tensor.numel() for tensor in tensors_of(batch))


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for _, item in items_of(batch) for tensor in tensors_of(item)]


def copy_structure(batch: Any) -> Any:
    """Return a batch of the same tensors, of which items can be taken away."""
    if isinstance(batch, PackedSequence):
        return batch
    items = [(key, copy_structure(item)) for key, item in items_of(batch)]
    return rebuild(batch, items) if items else batch


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a container holds, by key, field or position; nothing for what is none."""
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return enumerate(value) if isinstance(value, list | tuple) else ()


def rebuild(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a container like `value` that holds other items."""
    if isinstance(value, tuple):
        make: Callable[..., Any] = type(value)
        parts = [item for _, item in items]
        return make(*parts) if hasattr(value, "_fields") else make(parts)
    if isinstance(value, list):
        return type(value)(item for _, item in items)
    part = copy.copy(value)
    if isinstance(value, Mapping):
        if hasattr(value, "data") and isinstance(value.data, dict):  # UserDict shares it on copy
            part.data = dict(items)
        else:
            for key, item in items:
                part[key] = item
    else:
        for name, item in items:
            object.__setattr__(part, name, item)  # frozen dataclasses too
    return part


def _samples(batch: Any) -> tuple[int, bool]:
    layout = _layout(batch)
    if layout is None:
        raise TypeError(
            f"`batch` must hold tensors that agree in their first dimension, got a "
            f"`{type(batch).__name__}` whose samples can't be told: split it with a function of "
            "your own."
        )
    return layout


def _layout(batch: Any) -> tuple[int, bool] | None:
    """Return the number of samples, and whether lists hold one sample an item."""
    for lists_hold_samples in (False, True):
        sizes = set(_sizes(batch, lists_hold_samples))
        if len(sizes) == 1:
            return sizes.pop(), lists_hold_samples
    return None


def _sizes(value: Any, lists_hold_samples: bool, depth: int = 0) -> Iterator[int]:
    if isinstance(value, Tensor):
        if value.dim():
            yield len(value)
    elif isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
    elif _holds_samples(value, lists_hold_samples, depth):
        yield len(value)
    else:
        for _, item in items_of(value):
            yield from _sizes(item, lists_hold_samples, depth + 1)


def _choose(
    value: Any, choose: Callable[[Any], Any], lists_hold_samples: bool, depth: int = 0
) -> Any:
    """Return a batch of the samples that are chosen of each tensor and list of them."""
    if isinstance(value, Tensor):
        return choose(value) if value.dim() else value
    if isinstance(value, PackedSequence):
        padded, lengths = map(choose, pad_packed_sequence(value, batch_first=True))
        return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    if _holds_samples(value, lists_hold_samples, depth):
        return choose(value)
    items = [(k, _choose(x, choose, lists_hold_samples, depth + 1)) for k, x in items_of(value)]
    return rebuild(value, items) if items else value


def _repeated(samples: Any, n: int) -> Any:
    if not isinstance(samples, Tensor):
        return (samples * -(-n // len(samples)))[:n]
    samples = samples[:n].clone()
    while len(samples) < n:
        samples = torch.cat([samples, samples[: n - len(samples)]])
    return samples


def _holds_samples(value: Any, lists_hold_samples: bool, depth: int) -> bool:
    """Tell a list of samples from a container of what the samples consist of."""
    if type(value) not in (list, tuple) or not value:
        return False
    if all(isinstance(item, str | bytes | int | float) for item in value):
        return True
    return lists_hold_samples and (depth > 0 or all(isinstance(x, Mapping) for x in value))
