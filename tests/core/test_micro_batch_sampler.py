from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from lightning_memopt.core.micro_batch_sampler import MicroBatchSampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4, 5, 7, 9, 10, 13])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_pieces_make_up_the_large_batches(n, parts, drop_last):
    sampler = MicroBatchSampler(range(n), 5, parts, drop_last)
    pieces = iter(list(sampler))
    for batch in BatchSampler(range(n), 5, drop_last):
        found = []
        sizes = []
        while len(found) < len(batch):
            piece = next(pieces)
            found += piece
            sizes.append(len(piece))
        assert found == batch
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= sampler.batch_size
        assert len(sizes) == parts if len(batch) == 5 else len(sizes) <= parts
    assert next(pieces, None) is None
    assert len(sampler) == len(list(sampler))


def test_the_first_pieces_have_one_sample_more():
    sampler = MicroBatchSampler(range(12), 5, 2, drop_last=False)
    assert list(sampler) == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9], [10, 11]]
    assert sampler.batch_size == 3


def test_a_short_last_batch_is_cut_no_smaller_than_it_must():
    sampler = MicroBatchSampler(range(18), 10, 5, drop_last=False)
    assert [len(piece) for piece in sampler] == [2] * 5 + [2] * 4
    sampler = MicroBatchSampler(range(23), 16, 2, drop_last=False)
    assert [len(piece) for piece in sampler] == [8, 8, 7]


def test_every_pass_takes_the_samplers_next_order():
    torch.manual_seed(0)
    large = BatchSampler(RandomSampler(range(9)), 4, False)
    expected = [[index for batch in large for index in batch] for _ in range(2)]
    torch.manual_seed(0)
    sampler = MicroBatchSampler(RandomSampler(range(9)), 4, 3, False)
    assert [[index for piece in sampler for index in piece] for _ in range(2)] == expected
    assert expected[0] != expected[1]


def test_indices_can_be_anything_and_a_loader_takes_the_sampler():
    sampler = MicroBatchSampler([("a", 1), ("b", 2), ("c", 3)], 2, 2, drop_last=False)
    assert list(sampler) == [[("a", 1)], [("b", 2)], [("c", 3)]]
    loader = DataLoader(range(7), batch_sampler=MicroBatchSampler(range(7), 4, 2, drop_last=True))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert len(loader) == 2


def test_a_sampler_without_a_length_is_cut_too():
    sampler = MicroBatchSampler((i for i in range(5)), 4, 2, drop_last=False)
    with pytest.raises(TypeError, match="no len"):
        len(sampler)
    assert list(sampler) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("parts", [0, 5])
def test_more_parts_than_samples_are_refused(parts):
    with pytest.raises(ValueError, match=f"`parts` must be from 1 to the 4 samples, got {parts}"):
        MicroBatchSampler(range(9), 4, parts, drop_last=False)
