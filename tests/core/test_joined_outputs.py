from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import SequenceClassifierOutput

from lightning_memopt.core.joined_outputs import join_outputs, weighted_mean

SIZES, WEIGHTS = [3, 1], [3.0, 1.0]


class Pair(NamedTuple):
    loss: torch.Tensor
    preds: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Fields:
    loss: torch.Tensor
    names: list[str]


def join(*outputs: Any, sizes=SIZES, weights=WEIGHTS) -> Any:
    return join_outputs(outputs, sizes, weights)


def means(a: float = 1.0, b: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(a), torch.tensor(b)


def preds() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[1], [2], [3]]), torch.tensor([[4]])


def test_one_part_is_returned_itself():
    output = {"loss": torch.tensor(1.0, requires_grad=True)}
    assert join_outputs([output], [4], [4.0]) is output


@pytest.mark.parametrize("trailing", [(), (2,), (2, 3)])
def test_tensors_with_a_sample_an_item_are_put_together_in_order(trailing):
    whole = torch.randn(4, *trailing, requires_grad=True)
    joined = join(*whole.split(SIZES))
    assert torch.equal(joined, whole)
    assert not joined.requires_grad


def test_means_are_weighted():
    first, second = means()
    assert torch.equal(join(first, second), torch.tensor(2.0))
    assert join(1.0, 5.0) == 2.0
    class_means = torch.tensor([0.0, 4.0]), torch.tensor([8.0, 4.0])
    assert join(*class_means).tolist() == [2.0, 4.0]
    on_device = [torch.tensor(weight) for weight in WEIGHTS]
    assert join(first.half(), second.half(), weights=on_device).dtype is torch.float16


def test_integer_tensors_are_counts():
    joined = join(torch.tensor(3), torch.tensor(3))
    assert joined.item() == 6
    assert joined.dtype is torch.int64


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (7, 7, 7),  # an index
        (3, 1, 4),  # the sizes of the parts
        (2, 7, 9),  # a count
        (True, False, False),
        ("a", "b", "b"),
        (None, None, None),
        (None, 2.0, 2.0),
        (torch.Size([3, 2]), torch.Size([1, 2]), torch.Size([4, 2])),
    ],
)
def test_what_is_no_tensor_is_kept_counted_or_the_last(first, second, expected):
    joined = join(first, second)
    assert joined == expected
    assert type(joined) is type(expected)


def test_sizes_that_all_parts_share_are_added_up():
    assert join(2, 2, sizes=[2, 2]) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda loss, p: {"loss": loss, "deep": [p, (loss,)]},
        lambda loss, p: [loss, p, {"loss": loss}],
        lambda loss, p: (p, loss),
        Pair,
        lambda loss, p: Fields(loss, [str(n) for n in p.flatten().tolist()]),
        lambda loss, p: SequenceClassifierOutput(loss=loss, logits=p),
    ],
    ids=["dict", "list", "tuple", "named tuple", "dataclass", "ModelOutput"],
)
def test_containers_are_joined_item_by_item(make):
    parts = [make(*items) for items in zip(means(), preds(), strict=True)]
    expected = make(torch.tensor(2.0), torch.tensor([[1], [2], [3], [4]]))
    joined = join(*parts)
    assert type(joined) is type(expected)
    assert str(joined) == str(expected)
    again = [make(*items) for items in zip(means(), preds(), strict=True)]
    assert str(parts) == str(again)  # the parts are as they were


def test_lists_of_samples_are_put_together():
    boxes = [torch.zeros(n, 4) for n in range(4)]
    joined = join(boxes[:3], boxes[3:])
    assert all(a is b for a, b in zip(joined, boxes, strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1.0}, {"b": 1.0}),
        ([1.0, 2.0], [1.0]),
        (torch.zeros(2), torch.zeros(5)),
        (torch.zeros(3, 2), torch.zeros(1, 4)),
        (torch.zeros(2, 2).long(), torch.ones(2, 2).long()),
        (torch.tensor(True), torch.tensor(False)),
        (pack_sequence([torch.zeros(2)]), pack_sequence([torch.zeros(2)])),
        (object(), object()),
    ],
)
def test_what_does_not_agree_is_the_last_part_s(first, second):
    assert join(first, second) is second


def test_nothing_is_put_together_where_sizes_are_unknown():
    second = torch.tensor([9])
    assert join(torch.tensor([1, 2, 3]), second, sizes=[None, None]) is second


def test_weights_on_a_device_stay_there():
    meta = [torch.tensor(weight, device="meta") for weight in (3, 1)]
    values = [torch.zeros((), device="meta"), torch.zeros((), device="meta")]
    assert weighted_mean(values, meta).device.type == "meta"  # reading one would raise
    assert join_outputs(values, [3, 1], meta).dtype is torch.float32
    assert weighted_mean([1.0, 5.0], [torch.tensor(3), torch.tensor(1)]).item() == 2.0


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_part_without_weight_does_not_count(kind):
    values, weights = [torch.tensor(torch.nan), torch.tensor(5.0)], [kind(0.0), kind(2.0)]
    assert weighted_mean(values, weights).item() == 5.0
    assert weighted_mean(list(means()), [kind(0.0), kind(0.0)]).item() == 3.0
