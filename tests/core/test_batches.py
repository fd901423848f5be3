from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from transformers import BatchEncoding

from lightning_memopt import split_batch
from lightning_memopt.core.batches import (
    count_elements,
    count_samples,
    repeat_samples,
    take_samples,
    tensors_of,
)


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
        (
            [torch.zeros(3, n, n) for n in range(6)],
            [{"boxes": torch.zeros(n, 4)} for n in range(6)],
        ),
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


@pytest.mark.parametrize(("k", "sizes"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7)])
def test_parts_are_as_equal_as_can_be_and_together_the_batch(k, sizes):
    x = torch.arange(14.0).reshape(7, 2)
    parts = split_batch(x, k)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), x)
    assert all(part.untyped_storage().data_ptr() == x.data_ptr() for part in parts)


def test_parts_have_the_types_of_the_batch():
    mean, words = torch.tensor(0.5), ["a", "b", "c", "d", "e", "f"]
    x = torch.arange(6.0)
    batch = {
        "pair": Pair(x, x),
        "fields": Fields(x),
        "list": [x, (x, None)],
        "encoding": BatchEncoding({"input_ids": x}),
        "mean": mean,
        "words": words,
    }
    first, second = split_batch(batch, 2)
    assert [type(value) for value in first.values()] == [type(value) for value in batch.values()]
    for part, expected in ((first, x[:3]), (second, x[3:])):
        found = [
            *part["pair"],
            part["fields"].x,
            part["list"][0],
            part["list"][1][0],
            part["encoding"]["input_ids"],
        ]
        assert all(torch.equal(tensor, expected) for tensor in found)
        assert part["mean"] is mean
        assert part["fields"].name == "no sample"
    assert (first["words"], second["words"]) == (words[:3], words[3:])
    assert len(batch["encoding"]["input_ids"]) == 6  # the batch is as it was


def test_lists_of_samples_are_cut_between_samples():
    images = [torch.full((3, n + 1, 4), float(n)) for n in range(3)]
    targets = [{"boxes": torch.zeros(n, 4)} for n in range(3)]
    first, second = split_batch((images, targets), 2)
    assert first[0] == images[:2]
    assert second[1] == targets[2:]


def test_packed_sequences_are_cut_between_sequences():
    sequences = [torch.arange(2.0 * n).reshape(n, 2) for n in (2, 5, 3)]
    parts = split_batch(pack_sequence(sequences, enforce_sorted=False), 2)
    found = [sequence for part in parts for sequence in unpack_sequence(part)]
    assert len(found) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, sequences, strict=True))


def test_what_cannot_be_cut_is_refused_with_its_type():
    with pytest.raises(TypeError, match=r"`batch`.*`object`.*split it with a function"):
        split_batch(object(), 2)
    with pytest.raises(ValueError, match="`k` must be from 1 to the 6 samples of the batch, got 7"):
        split_batch(X, 7)
    with pytest.raises(ValueError, match="got 0"):
        split_batch(X, 0)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_the_first_samples_are_taken(n):
    x, words = torch.arange(6.0), list("abcdef")
    taken = take_samples({"pair": Pair(x, x), "words": words, "mean": torch.tensor(0.5)}, n)
    assert type(taken["pair"]) is Pair
    assert torch.equal(taken["pair"].y, x[:n])
    assert taken["pair"].x.data_ptr() == x.data_ptr()
    assert taken["words"] == words[:n]
    assert taken["mean"] == 0.5


def test_samples_of_every_kind_are_taken():
    images = [torch.full((3, n + 1, 4), float(n)) for n in range(3)]
    targets = [{"boxes": torch.zeros(n, 4)} for n in range(3)]
    assert take_samples((images, targets), 2) == (images[:2], targets[:2])
    sequences = [torch.arange(2.0 * n).reshape(n, 2) for n in (2, 5, 3)]
    taken = unpack_sequence(take_samples(pack_sequence(sequences, enforce_sorted=False), 2))
    assert len(taken) == 2
    assert all(torch.equal(a, b) for a, b in zip(taken, sequences, strict=False))


def test_samples_that_are_not_there_are_not_taken():
    with pytest.raises(TypeError, match=r"`batch`.*`object`"):
        take_samples(object(), 2)
    with pytest.raises(ValueError, match="`n` must be from 1 to the 6 samples of the batch, got 7"):
        take_samples(X, 7)
    with pytest.raises(ValueError, match="got 0"):
        take_samples(X, 0)


def test_elements_of_a_nested_batch_are_counted():
    batch = {"x": torch.zeros(4, 3), "y": [torch.zeros(4), (torch.zeros(2, 2), "text")], "n": 3}
    assert count_elements(batch) == 20
    assert count_elements("text") == 0


@pytest.mark.parametrize("n", [1, 4, 15])
def test_samples_of_every_kind_are_repeated_in_memory_of_their_own(n):
    batch = {"x": X.clone(), "rest": [Pair(X + 1, Y), list("abcdef")], "mean": torch.tensor(0.5)}
    repeated = repeat_samples(batch, n)
    assert count_samples(repeated) == n
    assert isinstance(repeated["rest"][0], Pair)
    assert repeated["rest"][1] == list("abcdefabcdefabc")[:n]
    assert repeated["mean"] == 0.5
    mine = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch) if tensor.dim()}
    theirs = [tensor for tensor in tensors_of(repeated) if tensor.dim()]
    assert not mine & {tensor.untyped_storage().data_ptr() for tensor in theirs}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in theirs)


def test_what_holds_no_samples_is_not_repeated():
    with pytest.raises(TypeError):
        repeat_samples({"a": 3}, 2)
