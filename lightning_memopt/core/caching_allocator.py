"""PyTorch's CUDA caching allocator as arithmetic: which requests reserve how much, without a GPU.

The native backend with default settings, on one stream. The rules are those of PyTorch's
`c10/cuda/CUDACachingAllocator.cpp`, the same from 2.6 on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from lightning_memopt.core.units import MIB, format_bytes

_ALIGNMENT, _SEGMENT_ALIGNMENT = 512, 2 * MIB
_MAX_SMALL, _MIN_OWN_SEGMENT = MIB, 10 * MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
# One integer for size and address compares faster than a pair.
_ADDRESS_BITS = 64
_ADDRESS_MASK = 2**_ADDRESS_BITS - 1


class SimulatedOutOfMemoryError(MemoryError):
    """A request did not fit below the limit of a simulated allocator.

    Args:
        requested: Bytes that were asked for.
        allocated: Bytes of live blocks then.
        reserved: Bytes that the allocator held then, with its cache emptied.
        limit: Bytes that it may hold.

    Example:
        >>> SimulatedOutOfMemoryError(2**30, 2**29, 2**29, 2**30).requested
        1073741824
    """

    def __init__(self, requested: int, allocated: int, reserved: int, limit: int) -> None:
        super().__init__(
            f"{format_bytes(requested)} don't fit: {format_bytes(allocated)} are allocated and "
            f"{format_bytes(reserved)} reserved of at most {format_bytes(limit)}."
        )
        self.requested, self.allocated, self.reserved = requested, allocated, reserved
        self.limit = limit


class Block:
    """A piece of a segment: allocated, or free and kept for later.

    Attributes:
        address: Where it begins.
        size: Its bytes, which is what `torch.cuda.memory_allocated` counts.
        requested: Bytes that were asked for.
        is_free: Whether nothing has it.
        before, after: Its neighbours in the segment.
        pool: Where it goes when it is freed.
    """

    __slots__ = ("address", "after", "before", "is_free", "pool", "requested", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.requested, self.is_free = 0, False
        self.before: Block | None = None
        self.after: Block | None = None

    def __repr__(self) -> str:
        return f"Block(address={self.address:#x}, size={self.size}, is_free={self.is_free})"


class _Pool:
    """The free blocks of the segments for small requests, or of those for large ones."""

    __slots__ = ("blocks", "keys", "min_remainder")

    def __init__(self, min_remainder: int) -> None:
        self.min_remainder = min_remainder
        self.keys: list[int] = []  # by size, then by address
        self.blocks: dict[int, Block] = {}  # by address

    def add(self, block: Block) -> None:
        insort(self.keys, block.size << _ADDRESS_BITS | block.address)
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        keys = self.keys
        del keys[bisect_left(keys, block.size << _ADDRESS_BITS | block.address)]
        del self.blocks[block.address]

    def release(self) -> int:
        """Drop the free blocks that are whole segments, and return their bytes."""
        whole = [b for b in self.blocks.values() if b.before is None and b.after is None]
        for block in whole:
            self.remove(block)
        return sum(block.size for block in whole)


class CachingAllocator:
    """Predicts what PyTorch allocates and reserves on a CUDA device for a sequence of requests.

    You gain the peaks of `torch.cuda.memory_allocated` and `memory_reserved`, with rounding,
    caching and fragmentation, from sizes alone, for a few microseconds a request. It does not know
    `PYTORCH_CUDA_ALLOC_CONF`, several streams, graphs' private pools, nor what is allocated
    outside of PyTorch. Among free blocks of one size PyTorch takes the lowest address, and the
    driver chooses where a segment goes: here it is above the one before unless `place` knows.

    Args:
        limit: Bytes that may be reserved, as `torch.cuda.set_per_process_memory_fraction` limits
            them; `None` for no limit. Higher leaves more in the cache.
        place: Takes the bytes of a new segment and returns its address, from a recorded trace say.

    Attributes:
        limit: As given.
        allocated: Bytes of live blocks now.
        reserved: Bytes of all segments now.
        requested: Bytes of live blocks before rounding.
        peak_allocated, peak_reserved: The most that each was.
        retries: How often the cache was emptied because of the limit.

    Raises:
        ValueError: `limit` is below one.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(3_000_000)
        >>> allocator.allocated, allocator.reserved
        (3000320, 20971520)
        >>> allocator.free(block)
        >>> allocator.allocated, allocator.reserved
        (0, 20971520)
        >>> allocator.empty_cache()
        >>> allocator.reserved, allocator.peak_allocated, allocator.peak_reserved
        (0, 3000320, 20971520)
    """

    def __init__(self, limit: int | None = None, place: Callable[[int], int] | None = None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"`limit` must be at least 1 byte or `None`, got {limit}.")
        self.limit = limit
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = self.retries = 0
        self._place, self._top = place, _SEGMENT_ALIGNMENT
        self._small = _Pool(min_remainder=_ALIGNMENT)
        self._large = _Pool(min_remainder=_MAX_SMALL + 1)

    def allocate(self, size: int) -> Block:
        """Take the smallest free block that is large enough, or else reserve a segment.

        Args:
            size: Bytes. For 0 nothing is allocated, and the block is empty.

        Returns:
            The block, to be given to `free`.

        Raises:
            ValueError: `size` is below zero.
            SimulatedOutOfMemoryError: A segment is needed and passes the limit, with all segments
                released that are free as a whole. They stay released, as in PyTorch.
        """
        if size < 1:
            if size < 0:
                raise ValueError(f"`size` must be at least 0 bytes, got {size}.")
            return Block(0, 0, self._small)
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        pool = self._small if rounded <= _MAX_SMALL else self._large
        keys = pool.keys
        at = bisect_left(keys, rounded << _ADDRESS_BITS)
        if at < len(keys):
            block = pool.blocks.pop(keys.pop(at) & _ADDRESS_MASK)
        else:
            block = self._reserve(rounded, size, pool)
        if block.size - rounded >= pool.min_remainder:
            block = self._split(block, rounded)
        block.is_free = False
        block.requested = size
        self.requested += size
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, joined with its free neighbours.

        Args:
            block: What `allocate` returned.

        Raises:
            ValueError: `block` is free already.
        """
        if block.is_free:
            raise ValueError(f"`block` must be allocated, got {block!r}; free each block once.")
        block.is_free = True
        self.allocated -= block.size
        self.requested -= block.requested
        if not block.size:
            return
        pool, before, after = block.pool, block.before, block.after
        if before is not None and before.is_free:
            pool.remove(before)
            block.address = before.address
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            pool.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        pool.add(block)

    def empty_cache(self) -> None:
        """Release the segments that are free as a whole, as `torch.cuda.empty_cache` does."""
        self.reserved -= self._large.release() + self._small.release()

    def reset_peaks(self) -> None:
        """Begin the peaks anew, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _reserve(self, rounded: int, size: int, pool: _Pool) -> Block:
        if rounded <= _MAX_SMALL:
            segment = _SMALL_SEGMENT
        elif rounded < _MIN_OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-rounded // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT
        if self.limit is not None and self.reserved + segment > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + segment > self.limit:
                raise SimulatedOutOfMemoryError(size, self.allocated, self.reserved, self.limit)
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._top += segment
        address = self._top - segment if self._place is None else self._place(segment)
        return Block(address, segment, pool)

    def _split(self, block: Block, size: int) -> Block:
        """Cut the first bytes off a free block and return them; the rest goes to the pool."""
        first = Block(block.address, size, block.pool)
        first.before, first.after = block.before, block
        if first.before is not None:
            first.before.after = first
        block.before = first
        block.address += size
        block.size -= size
        block.is_free = True
        block.pool.add(block)
        return first
