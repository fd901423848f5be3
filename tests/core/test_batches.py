from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from lightning_memopt.core.batches import count_samples


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    name: str = "no sample"


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.zeros(6, 3), torch.zeros(6)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        [X, Y],
        (X, {"y": Y, "mean": torch.tensor(0.5)}),
        Pair(X, Y),
        Fields(X),
        {"x": {"deep": [X, (Y,)]}},
        BatchEncoding({"input_ids": X, "labels": Y}),
        [X, ["a", "b", "c", "d", "e", "f"]],
        pack_sequence([torch.zeros(n, 2) for n in (5, 4, 3, 2, 1, 1)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_samples_are_counted_in_whatever_holds_them(batch):
    assert count_samples(batch) == 6


@pytest.mark.parametrize(
    "batch",
    [object(), None, torch.tensor(1.0), [X, torch.zeros(2, 9)], [], {}],
    ids=["object", "None", "scalar", "disagreeing", "empty list", "empty dict"],
)
def test_what_cannot_be_told_is_none(batch):
    assert count_samples(batch) is None
