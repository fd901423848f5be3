"""What a step returned for the parts of a batch, joined into what it returns for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_memopt.core.batches import items_of, rebuild
from lightning_memopt.core.weights import Weight

Value = TypeVar("Value", float, Tensor)
Sizes = Sequence[int | None]


def join_outputs(outputs: Sequence[Any], sizes: Sizes, weights: Sequence[Weight]) -> Any:
    """Join what `training_step` returned for each part of a batch, without a wait for the device.

    What has one item a sample, tensors and lists, is put together in the order of the parts. Other
    floating point numbers and tensors are taken for means over the samples: their weighted mean is
    returned. A 0-d integer tensor is taken for a count: the sum is returned. So it is for Python
    integers that are the sizes of the parts or that differ; one that is the same for all parts,
    such as an index, is kept. Containers are joined item by item. All else, and what doesn't agree
    between the parts, is the last part's.

    A tensor or list without samples that happens to be as long as each part is put together too.

    Args:
        outputs: What was returned, by part.
        sizes: Number of samples of each part; `None` where it can't be told.
        weights: How much each part counts in a mean; tensors stay on their device.

    Returns:
        The joined output, of the same types; a Python float becomes a 0-d tensor where weights are
        tensors.

    Example:
        >>> import torch
        >>> parts = [{"loss": torch.tensor(1.0), "preds": torch.tensor([3, 4, 5])},
        ...          {"loss": torch.tensor(5.0), "preds": torch.tensor([6])}]
        >>> join_outputs(parts, sizes=[3, 1], weights=[3, 1])
        {'loss': tensor(2.), 'preds': tensor([3, 4, 5, 6])}
    """
    if len(outputs) == 1:
        return outputs[0]
    with torch.no_grad():
        return _join(outputs, sizes, weights)


def weighted_mean(values: Sequence[Value], weights: Sequence[Weight]) -> Value:
    """Return the weighted mean, without a wait for the device.

    A value without weight doesn't count, not even a NaN (the mean of no tokens, say). If none has
    weight, all count the same.

    Args:
        values: Numbers, or tensors of one shape.
        weights: Numbers, or 0-d tensors on the device of the values; none is negative.

    Returns:
        The mean, in the type of the values; a 0-d tensor where the weights are tensors.
    """
    first: Any = values[0]
    even = 1 / len(weights)
    total: Any = sum(weights)
    shares: list[Any]
    mean: Any
    if isinstance(total, Tensor):  # `torch.where` with a number would copy it to the device
        shares = [(weight / total).masked_fill(total == 0, even) for weight in weights]
        if isinstance(first, Tensor):  # a value that was moved to the host needs them there
            shares = [share.to(first.device) for share in shares]
        mean = sum(
            (value * share).masked_fill(share == 0, 0.0)
            for value, share in zip(values, shares, strict=True)
        )
    else:
        shares = [weight / total if total else even for weight in weights]
        # In double, so that the mean of what is the same in every part is that to the last bit.
        mean = sum(
            _in_double(value) * share for value, share in zip(values, shares, strict=True) if share
        )
    result: Value = mean.to(first.dtype) if isinstance(first, Tensor) else mean
    return result


def _in_double(value: Any) -> Any:
    has_doubles = isinstance(value, Tensor) and value.device.type != "mps"
    return value.double() if has_doubles and value.is_floating_point() else value


def _join(values: Sequence[Any], sizes: Sizes, weights: Sequence[Weight]) -> Any:
    last = values[-1]
    if any(type(value) is not type(last) for value in values):
        return last
    if isinstance(last, Tensor):
        return _join_tensors(values, sizes, weights)
    if isinstance(last, float):
        return weighted_mean(values, weights)
    if isinstance(last, int) and not isinstance(last, bool):
        is_count = list(values) == list(sizes) or any(value != last for value in values)
        return sum(values) if is_count else last
    if isinstance(last, list) and _are_per_sample(values, sizes):
        return rebuild(last, [(None, item) for value in values for item in value])
    return _join_containers(values, sizes, weights)


def _join_tensors(values: Sequence[Tensor], sizes: Sizes, weights: Sequence[Weight]) -> Tensor:
    last = values[-1]
    if any(value.dim() != last.dim() or value.device != last.device for value in values):
        return last
    if last.dim() and _are_per_sample(values, sizes):
        is_even = all(value.shape[1:] == last.shape[1:] for value in values)
        return torch.cat(list(values)) if is_even else last
    if any(value.shape != last.shape for value in values):
        return last
    if last.is_floating_point() or last.is_complex():
        return weighted_mean(values, weights)
    is_count = last.dim() == 0 and last.dtype is not torch.bool
    return torch.stack(list(values)).sum(0, dtype=last.dtype) if is_count else last


def _join_containers(values: Sequence[Any], sizes: Sizes, weights: Sequence[Weight]) -> Any:
    last = values[-1]
    items = [dict(items_of(value)) for value in values]
    if not items[-1] or any(part.keys() != items[-1].keys() for part in items):
        return last
    if isinstance(last, PackedSequence):  # a tuple whose items belong together
        return last
    return rebuild(
        last, [(key, _join([part[key] for part in items], sizes, weights)) for key in items[-1]]
    )


def _are_per_sample(values: Sequence[Any], sizes: Sizes) -> bool:
    return [len(value) for value in values] == list(sizes)
