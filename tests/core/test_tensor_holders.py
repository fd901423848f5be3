import sys

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.core import tensor_holders
from lightning_memopt.core.tensor_holders import (
    TENSOR_BYTES,
    bytes_at_hand,
    find_holders,
    grown_holders,
)

LOSSES: list[Tensor] = []


class Keeper:
    def __init__(self):
        self.outputs: list[Tensor] = []
        self.total: Tensor | float = 0.0
        self.still = [torch.ones(100)]
        self.weight = nn.Parameter(torch.ones(1000))


def grown(keeper, change, modules=()):
    before = find_holders({"keeper": keeper}, modules)
    change()
    return grown_holders(before, find_holders({"keeper": keeper}, modules))


def test_a_list_that_grew_is_told_exactly():
    keeper = Keeper()
    keeper.outputs.append(torch.ones(1000))
    (holder,) = grown(keeper, lambda: keeper.outputs.extend(torch.ones(3, 1000).unbind()))
    assert holder.name == "keeper.outputs"
    assert (holder.more_tensors, holder.now.tensors) == (3, 4)
    assert (holder.more_bytes, holder.now.bytes) == (12_000, 16_000)
    assert not holder.has_more_graph
    assert holder.now.kind == "list"


def test_small_tensors_count_as_what_they_take():
    keeper = Keeper()
    (holder,) = grown(keeper, lambda: keeper.outputs.extend(torch.ones(1) for _ in range(5)))
    assert holder.more_bytes == 5 * TENSOR_BYTES
    assert holder.now.bytes == 5 * 4


def test_a_sum_that_keeps_every_graph_is_found_though_it_is_one_tensor():
    keeper = Keeper()
    keeper.total = keeper.total + keeper.weight.sum()

    def go_on():
        for _ in range(10):
            keeper.total = keeper.total + keeper.weight.sum()

    (holder,) = grown(keeper, go_on)
    assert holder.name == "keeper.total"
    assert holder.now.kind == "Tensor"
    assert (holder.now.tensors, holder.more_tensors) == (1, 0)
    assert holder.has_more_graph
    assert holder.more_graph_nodes == 20  # a sum and an addition each


def test_a_value_that_is_replaced_has_not_grown():
    keeper = Keeper()
    keeper.total = keeper.weight.sum()
    assert grown(keeper, lambda: setattr(keeper, "total", keeper.weight.sum())) == []


def test_what_holds_more_graph_is_worst_then_what_holds_more_bytes():
    keeper = Keeper()
    keeper.small, keeper.large, keeper.losses = [], [], []

    def go_on():
        keeper.small.append(torch.ones(1000))
        keeper.large.append(torch.ones(2000))
        keeper.losses.append(keeper.weight.sum())

    names = [holder.name for holder in grown(keeper, go_on)]
    assert names == ["keeper.losses", "keeper.large", "keeper.small"]


def test_a_tensor_that_becomes_larger_is_found():
    keeper = Keeper()
    keeper.bank = torch.ones(100)
    (holder,) = grown(keeper, lambda: setattr(keeper, "bank", torch.ones(300)))
    assert (holder.name, holder.more_tensors, holder.more_bytes) == ("keeper.bank", 0, 800)


def test_a_global_list_is_named_with_its_file():
    try:
        (holder,) = grown(Keeper(), lambda: LOSSES.append(torch.ones(9)), [sys.modules[__name__]])
    finally:
        LOSSES.clear()
    assert holder.name == "LOSSES of test_tensor_holders.py"


def test_what_shrinks_or_stays_is_not_told():
    keeper = Keeper()
    keeper.outputs.extend(torch.ones(3, 5).unbind())
    assert grown(keeper, keeper.outputs.clear) == []
    assert grown(keeper, lambda: None) == []


@pytest.mark.parametrize("limit", [1, 10])
def test_a_graph_that_is_not_counted_to_its_end_counts_as_growing(limit, monkeypatch):
    monkeypatch.setattr(tensor_holders, "MAX_GRAPH_NODES", limit)
    keeper = Keeper()
    for _ in range(10):
        keeper.total = keeper.total + keeper.weight.sum()
    (holder,) = grown(keeper, lambda: None)
    assert holder.has_more_graph
    assert holder.now.graph_nodes == limit


def test_a_look_holds_on_to_no_tensor():
    keeper = Keeper()
    keeper.outputs.append(torch.ones(5))
    look = find_holders({"keeper": keeper})
    assert look["keeper.outputs"].bytes == 20
    assert not any(isinstance(value, Tensor) for x in look.values() for value in vars(x).values())


def test_a_root_that_can_not_be_searched_hides_no_other(monkeypatch):
    look_into = tensor_holders.TensorSearch.look_into

    def fail_at_one(self, name, root):
        if name == "odd":
            raise SystemError("an odd root")
        look_into(self, name, root)

    monkeypatch.setattr(tensor_holders.TensorSearch, "look_into", fail_at_one)
    assert set(find_holders({"odd": Keeper(), "keeper": Keeper()})) == {"keeper.still"}


def test_the_file_of_a_global_is_told_apart_from_its_name():
    LOSSES.append(torch.ones(1))
    try:
        found = find_holders({"x": Keeper()}, [sys.modules[__name__]])
    finally:
        LOSSES.clear()
    assert found["LOSSES of test_tensor_holders.py"].file == "test_tensor_holders.py"
    assert found["x.still"].file == ""


class Batch:
    def __init__(self, x):
        self.x = x


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("things", "size"),
    [
        (torch.ones(10), 40),
        ([torch.ones(10), (torch.ones(5), {"a": torch.ones(1), "n": 1, "s": "b"})], 64),
        (Batch([torch.ones(10)]), 40),
        ((Batch(torch.ones(10)), torch.ones(2)), 48),
        ([torch.ones(2, 2).to_sparse(), torch.ones(2)], 8),
        ([torch.ones(2, device="meta"), torch.ones(2)], 8),
        ([nn.UninitializedBuffer(), torch.ones(2)], 8),
        (torch.ones(10)[:2], 40),
        (None, 0),
    ],
)
def test_the_bytes_of_a_batch_are_those_of_its_storages(things, size):
    assert bytes_at_hand(things, CPU) == size


def test_what_two_share_is_at_hand_once():
    one = torch.ones(10)
    assert bytes_at_hand([one, one[2:], Batch(one)], CPU) == 40


def test_of_very_many_tensors_at_hand_some_are_counted():
    ones = [torch.ones(1) for _ in range(3000)]
    assert 0 < bytes_at_hand(ones, CPU) < 3000 * 4
