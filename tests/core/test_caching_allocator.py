import random
from itertools import pairwise

import pytest

from lightning_memopt.core.caching_allocator import (
    Block,
    CachingAllocator,
    SimulatedOutOfMemoryError,
)
from lightning_memopt.core.units import MIB

DRAWS = {
    "small": lambda draw: draw.randint(1, MIB),
    "large": lambda draw: draw.randint(MIB + 1, 200 * MIB),
    "any": lambda draw: int(2 ** draw.uniform(0, 27.6)),
    "few": lambda draw: draw.choice([0, 1, 512, MIB, MIB + 1, 3 * MIB, 10 * MIB, 64 * MIB]),
    "edges": lambda draw: max(
        1, draw.choice([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB]) + draw.randint(-1, 1) * 512
    ),
}


def figures(allocator):
    return allocator.allocated, allocator.reserved


def peaks(allocator):
    return allocator.peak_allocated, allocator.peak_reserved


def segments(allocator, live):
    """Return the blocks of each segment, in their order."""
    pools = allocator._small, allocator._large
    blocks = [b for b in live if b.size] + [b for pool in pools for b in pool.blocks.values()]
    found = []
    for block in (each for each in blocks if each.before is None):
        found.append([block])
        while found[-1][-1].after is not None:
            found[-1].append(found[-1][-1].after)
    assert sum(map(len, found)) == len(blocks)
    return found


def follow(allocator, draw, size_of, steps):
    """Allocate and free at random, and yield the live blocks after each step."""
    live = []
    for _ in range(steps):
        kind = draw.random()
        if kind < 0.01:
            allocator.empty_cache()
        elif kind < 0.52 or not live:
            live.append(allocator.allocate(size_of(draw)))
        else:
            allocator.free(live.pop(draw.randrange(len(live))))
        yield live


class PlainAllocator:
    """The same rules written as plainly as can be: a list of [address, size, is_free] a segment."""

    def __init__(self):
        self.segments, self.top = [], 2 * MIB

    def allocate(self, size):
        size = (size + 511) // 512 * 512
        is_small = size <= MIB
        fits = [
            (block[1], block[0], index, blocks)
            for small, blocks in self.segments
            if small == is_small
            for index, block in enumerate(blocks)
            if block[2] and block[1] >= size
        ]
        if fits:
            *_, index, blocks = min(fits)
        else:
            total = 2 * MIB if is_small else 20 * MIB
            if size >= 10 * MIB:
                total = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            index, blocks = 0, [[self.top, total, True]]
            self.top += total
            self.segments.append((is_small, blocks))
        block = blocks[index]
        block[2] = False
        rest = block[1] - size
        if rest and (is_small or rest > MIB):
            block[1] = size
            blocks.insert(index + 1, [block[0] + size, rest, True])
        return block[0]

    def free(self, address):
        for _, blocks in self.segments:
            for block in blocks:
                if block[0] == address:
                    block[2] = True
            for index in range(len(blocks) - 2, -1, -1):
                if blocks[index][2] and blocks[index + 1][2]:
                    blocks[index][1] += blocks.pop(index + 1)[1]

    def empty_cache(self):
        self.segments = [each for each in self.segments if len(each[1]) > 1 or not each[1][0][2]]

    def figures(self):
        sizes = [(size, is_free) for _, blocks in self.segments for _, size, is_free in blocks]
        return sum(size for size, is_free in sizes if not is_free), sum(size for size, _ in sizes)


# Rounding and segments


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB - 511, MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # The rest of a segment is below a MiB, or just one: too little to be cut off.
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (200 * MIB - 1, 200 * MIB, 200 * MIB),
    ],
)
def test_a_first_request_takes_a_segment_of_its_class(size, allocated, reserved):
    allocator = CachingAllocator()
    block = allocator.allocate(size)
    assert figures(allocator) == (allocated, reserved)
    assert (block.size, block.requested, allocator.requested) == (allocated, size, size)
    allocator.free(block)
    assert (*figures(allocator), allocator.requested) == (0, reserved, 0)
    assert peaks(allocator) == (allocated, reserved)


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(2 * MIB))
    allocator.allocate(1)
    assert figures(allocator) == (512, 22 * MIB)
    allocator.allocate(MIB + 1)
    assert figures(allocator) == (MIB + 1024, 22 * MIB)


# Which block, and how much of it


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 12, 16)]
    address = blocks[-1].address
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(13 * MIB).address == address
    assert figures(allocator) == (13 * MIB, 58 * MIB)


def test_of_equal_blocks_the_lowest_address_is_taken():
    places = iter([80 * MIB, 40 * MIB, 60 * MIB])
    allocator = CachingAllocator(place=lambda size: next(places))
    blocks = [allocator.allocate(12 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)
    taken = [allocator.allocate(12 * MIB).address for _ in range(3)]
    assert taken == [40 * MIB, 60 * MIB, 80 * MIB]


def test_segments_lie_one_above_the_other_without_a_place():
    allocator = CachingAllocator()
    first, second = allocator.allocate(12 * MIB), allocator.allocate(30 * MIB)
    assert second.address == first.address + 12 * MIB


def test_a_small_block_is_split_down_to_512_bytes():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(size) for size in (MIB, MIB - 512, 1))
    assert [second.address, third.address] == [first.address + MIB, first.address + 2 * MIB - 512]
    assert figures(allocator) == (2 * MIB, 2 * MIB)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left():
    allocator = CachingAllocator()
    block = allocator.allocate(40 * MIB)
    allocator.free(block)
    block = allocator.allocate(39 * MIB)
    assert (block.size, allocator.allocated, allocator.requested) == (40 * MIB, 40 * MIB, 39 * MIB)
    allocator.free(block)
    assert allocator.allocated == 0
    block = allocator.allocate(39 * MIB - 1)
    assert block.size == 40 * MIB
    allocator.free(block)
    assert allocator.allocate(39 * MIB - 512).size == 39 * MIB - 512
    assert allocator.allocate(MIB + 1).size == MIB + 512  # all of what was left
    assert figures(allocator) == (40 * MIB, 40 * MIB)


def test_five_requests_share_twenty_mebibytes_and_the_sixth_does_not():
    allocator = CachingAllocator()
    for _ in range(5):
        allocator.allocate(4 * MIB)
    assert figures(allocator) == (20 * MIB, 20 * MIB)
    allocator.allocate(4 * MIB)
    assert figures(allocator) == (24 * MIB, 40 * MIB)


# Freeing


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_become_one(order):
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for index in order:
        allocator.free(blocks[index])
    assert allocator.allocate(12 * MIB).address == 2 * MIB
    assert figures(allocator) == (20 * MIB, 20 * MIB)


def test_what_is_apart_stays_apart():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for index in (0, 2, 4):
        allocator.free(blocks[index])
    allocator.allocate(8 * MIB)
    assert figures(allocator) == (16 * MIB, 40 * MIB)


def test_neighbours_in_another_segment_are_none():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(10 * MIB) for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(20 * MIB)
    assert figures(allocator) == (20 * MIB, 40 * MIB)


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match=r"`block` must be allocated, got Block\(address=0x200000"):
        allocator.free(block)
    assert figures(allocator) == (0, 2 * MIB)


def test_no_bytes_are_no_memory():
    allocator = CachingAllocator()
    block = allocator.allocate(0)
    assert isinstance(block, Block)
    assert (block.size, *figures(allocator), *peaks(allocator)) == (0, 0, 0, 0, 0)
    allocator.free(block)
    assert segments(allocator, []) == []
    allocator.allocate(1)
    assert figures(allocator) == (512, 2 * MIB)


# The cache, its limit and the peaks


def test_emptying_the_cache_releases_whole_segments_only():
    allocator = CachingAllocator()
    kept, *others = (allocator.allocate(size) for size in (1, MIB, 4 * MIB, 30 * MIB))
    for block in others:
        allocator.free(block)
    allocator.empty_cache()
    assert figures(allocator) == (512, 2 * MIB)
    allocator.free(kept)
    allocator.empty_cache()
    assert figures(allocator) == (0, 0)
    assert peaks(allocator) == (35 * MIB + 512, 52 * MIB)


def test_at_the_limit_the_cache_makes_room():
    allocator = CachingAllocator(limit=50 * MIB)
    kept = allocator.allocate(1)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(48 * MIB)
    assert figures(allocator) == (48 * MIB + 512, 50 * MIB)
    assert (allocator.retries, allocator.peak_reserved) == (1, 50 * MIB)
    assert not kept.is_free


def test_above_the_limit_nothing_is_allocated_and_the_cache_is_gone():
    allocator = CachingAllocator(limit=50 * MIB - 1)
    allocator.allocate(1)
    allocator.free(allocator.allocate(30 * MIB))
    with pytest.raises(
        SimulatedOutOfMemoryError,
        match=r"48\.00 MiB don't fit: 512 B are allocated and 2\.00 MiB reserved of at most 50\.00",
    ) as caught:
        allocator.allocate(48 * MIB)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.requested, error.allocated) == (48 * MIB, 512)
    assert (error.reserved, error.limit) == (2 * MIB, 50 * MIB - 1)
    assert (*figures(allocator), allocator.requested) == (512, 2 * MIB, 1)
    assert peaks(allocator) == (30 * MIB + 512, 32 * MIB)


def test_what_fits_a_cached_block_needs_no_room_below_the_limit():
    allocator = CachingAllocator(limit=20 * MIB)
    for _ in range(5):
        allocator.allocate(4 * MIB)
    assert figures(allocator) == (20 * MIB, 20 * MIB)
    assert allocator.retries == 0


def test_peaks_begin_anew():
    allocator = CachingAllocator()
    first = allocator.allocate(30 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.empty_cache()
    assert peaks(allocator) == (70 * MIB, 70 * MIB)
    allocator.reset_peaks()
    assert peaks(allocator) == (30 * MIB, 30 * MIB)
    allocator.free(first)
    assert peaks(allocator) == (30 * MIB, 30 * MIB)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(limit):
    with pytest.raises(ValueError, match="`limit` must be at least 1 byte or `None`"):
        CachingAllocator(limit)


def test_a_size_is_not_negative():
    with pytest.raises(ValueError, match="`size` must be at least 0 bytes, got -1"):
        CachingAllocator().allocate(-1)


# Random sequences


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", DRAWS)
def test_books_balance_after_every_step(name, seed):
    allocator, highest = CachingAllocator(), [0, 0]
    for live in follow(allocator, random.Random(seed), DRAWS[name], 800):
        found = segments(allocator, live)
        spans = sorted((blocks[0].address, blocks[-1]) for blocks in found)
        assert all(end.address + end.size <= start for (_, end), (start, _) in pairwise(spans))
        for blocks in found:
            assert all(a.address + a.size == b.address for a, b in pairwise(blocks))
            assert all(b.before is a for a, b in pairwise(blocks))
            assert not any(a.is_free and b.is_free for a, b in pairwise(blocks))
            assert sum(block.size for block in blocks) % (2 * MIB) == 0
        assert allocator.reserved == sum(block.size for blocks in found for block in blocks)
        assert allocator.allocated == sum(block.size for block in live)
        assert allocator.requested == sum(block.requested for block in live)
        highest = [max(pair) for pair in zip(highest, figures(allocator), strict=True)]
        assert peaks(allocator) == tuple(highest)
    assert highest[0] > 0
    for block in live:
        allocator.free(block)
    assert all(len(blocks) == 1 for blocks in segments(allocator, []))
    allocator.empty_cache()
    assert figures(allocator) == (0, 0)


@pytest.mark.parametrize("name", DRAWS)
def test_it_does_what_the_plain_allocator_does(name):
    draw = random.Random(7)
    allocator, plain, live = CachingAllocator(), PlainAllocator(), []
    for step in range(1500):
        kind = draw.random()
        if kind < 0.01:
            allocator.empty_cache()
            plain.empty_cache()
        elif kind < 0.52 or not live:
            live.append(allocator.allocate(DRAWS[name](draw) or 1))
            assert plain.allocate(live[-1].requested) == live[-1].address, step
        else:
            block = live.pop(draw.randrange(len(live)))
            plain.free(block.address)
            allocator.free(block)
        assert plain.figures() == figures(allocator), step


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_size_again_takes_no_more_and_the_same_place(name):
    allocator, draw = CachingAllocator(), random.Random(1)
    *_, live = follow(allocator, draw, DRAWS[name], 300)
    for size in [block.requested for block in live]:
        first = allocator.allocate(size)
        before, address = figures(allocator), first.address
        allocator.free(first)
        again = allocator.allocate(size)
        assert figures(allocator) == before
        assert again.address == address
        allocator.free(again)


def test_a_limit_that_is_never_reached_changes_nothing():
    runs = []
    for limit in (None, 2**50):
        allocator = CachingAllocator(limit)
        steps = follow(allocator, random.Random(3), DRAWS["any"], 1000)
        runs.append([(figures(allocator), peaks(allocator)) for _ in steps])
    assert runs[0] == runs[1]


def test_reserved_never_passes_the_limit():
    allocator, draw, live, failures = CachingAllocator(limit=300 * MIB), random.Random(5), [], 0
    for _ in range(2000):
        try:
            live.append(allocator.allocate(DRAWS["any"](draw)))
        except SimulatedOutOfMemoryError:
            failures += 1
            allocator.free(live.pop(draw.randrange(len(live))))
        assert allocator.peak_reserved <= 300 * MIB
    assert failures > 10
    assert allocator.retries > failures
