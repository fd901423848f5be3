"""Copies without memory are as their originals, and leave those alone."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_memopt.core.fake_copy import FakeCopies


class Tied(nn.Module):
    """Two layers with one weight, the other layer in `channels_last`, and a frozen buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("count", torch.tensor(1))


def test_a_module_keeps_shapes_strides_ties_and_what_is_frozen() -> None:
    original = Tied()
    made = FakeCopies().module(original)
    assert isinstance(made, Tied)
    assert made.head.weight is made.embedding.weight
    assert made.convolution.weight.stride() == original.convolution.weight.stride()
    for (name, copy), (_, mine) in zip(
        made.named_parameters(), original.named_parameters(), strict=True
    ):
        assert isinstance(copy, nn.Parameter), name
        assert (copy.shape, copy.dtype) == (mine.shape, mine.dtype)
        assert copy.requires_grad == mine.requires_grad
        assert isinstance(copy.data, FakeTensor)
        assert not isinstance(mine.data, FakeTensor)
    assert made.count.dtype == torch.int64


def test_a_type_is_given_to_numbers_with_a_point_alone() -> None:
    copies = FakeCopies(torch.bfloat16)
    assert copies.module(Tied()).head.weight.dtype == torch.bfloat16
    found = copies.batch({"x": torch.ones(2), "labels": [torch.ones(2, dtype=torch.long)]})
    assert found["x"].dtype == torch.bfloat16
    assert found["labels"][0].dtype == torch.int64


def test_an_optimizer_has_the_copies_groups_and_its_class() -> None:
    original = Tied()
    groups = [{"params": list(original.head.parameters()), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    optimizer.state[original.head.weight]["momentum_buffer"] = torch.ones(10, 4)
    copies = FakeCopies()
    model = copies.module(original)
    made = copies.optimizer(optimizer)
    assert isinstance(made, torch.optim.SGD)
    assert made.param_groups[0]["lr"] == 0.5
    assert made.param_groups[0]["params"][0] is model.head.weight
    assert not made.state
    assert len(optimizer.state) == 1


def test_packed_sequences_and_weights_on_meta_are_copied() -> None:
    copies = FakeCopies()
    packed = copies.batch(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))
    assert isinstance(packed, PackedSequence)
    assert isinstance(packed.data, FakeTensor)
    with torch.device("meta"):
        model = copies.module(nn.Linear(4, 4))
    assert model.weight.device.type == "cpu"
