"""The last steps of a run: their memory, and the batches that they were given."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lightning_memopt.core.batches import tensors_of
from lightning_memopt.core.growth import Growth, GrowthWatch

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]

_MAX_SHAPES = 6
# A growth that was judged so many steps ago may have ended since.
_MAX_AGE = 25
# The optimizer's state comes with the first.
_WARM_UP_STEPS = 2
# So many steps of nothing but growth tell, where memory doesn't last for the leak watch.
_FAST_STEPS = 10


@dataclass(frozen=True)
class StepRecord:
    """The memory of one step, in bytes.

    Attributes:
        step: Its number.
        allocated: In use at its end.
        peak: Its peak, or where there is none (a CPU) what was resident at its end.
    """

    step: int
    allocated: int
    peak: int


class RecentSteps:
    """Keeps the last steps of a training, and the shapes of the batches.

    Args:
        count: How many to keep.

    Attributes:
        steps: The steps, oldest first.
        elements: Its elements.
        kind: Its kind.
    """

    def __init__(self, count: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=count)
        self.elements: int | None = None
        self._shapes: Shapes = ()
        self.kind = ""
        self._before: dict[str, deque[tuple[Shapes, int]]] = {}
        self._count = count
        self._watch = GrowthWatch()
        self._growth: Growth | None = None
        self._ended = self._first = 0

    @property
    def batch(self) -> str:
        """Shapes of the batch at hand, `""` before the first."""
        return describe_shapes(self._shapes)

    def begin_batch(self, batch: Any, kind: str) -> None:
        """Take a new batch; those of one kind (training, validation) are compared.

        What can't be read is left out.
        """
        if self.elements is not None:
            earlier = self._before.setdefault(self.kind, deque(maxlen=self._count))
            earlier.append((self._shapes, self.elements))
        self.kind = kind
        try:
            tensors = tensors_of(batch)
            self._shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
            self.elements = sum(tensor.numel() for tensor in tensors)
        except Exception:  # the run is not to end by that
            self._shapes, self.elements = (), None

    def end_step(self, step: int, allocated: int, peak: int) -> None:
        """Take the memory of a step that has ended."""
        self.steps.append(StepRecord(step, allocated, peak))
        self._ended += 1
        if self._ended <= _WARM_UP_STEPS:
            self._first = allocated
        self._growth = self._watch.add(step, allocated) or self._growth

    def growth(self) -> tuple[int, float]:
        """Return the bytes that memory has grown by since the start, and in a step; or zeros.

        It is zero unless the growth was steady to the end, as the leak watch judges it, or memory
        has only grown in each of the last steps.
        """
        if not self.steps:
            return 0, 0.0
        last = self.steps[-1]
        if self._growth is not None and last.step - self._growth.until_step <= _MAX_AGE:
            rate = self._growth.bytes_per_step
        else:
            recent = list(self.steps)[-_FAST_STEPS:]
            rises = [after.allocated - before.allocated for before, after in pairwise(recent)]
            if len(recent) < _FAST_STEPS or min(rises) <= 0:
                return 0, 0.0
            rate = sum(rises) / len(rises)
        return max(0, last.allocated - self._first), rate

    def usual_batch(self) -> str:
        """Return the most frequent shapes among the batches before, `""` if there were none."""
        counts = Counter(shapes for shapes, _ in self._earlier())
        return describe_shapes(counts.most_common(1)[0][0]) if counts else ""

    def usual_elements(self) -> int | None:
        """Return the median elements of the batches before, `None` if there were none."""
        sizes = [elements for _, elements in self._earlier()]
        return int(statistics.median(sizes)) if sizes else None

    def largest_elements(self) -> int | None:
        """Return the most elements of a batch before, `None` if there were none."""
        return max((elements for _, elements in self._earlier()), default=None)

    def _earlier(self) -> deque[tuple[Shapes, int]]:
        return self._before.get(self.kind, deque())


def describe_shapes(shapes: Shapes) -> str:
    """Return shapes and types of tensors in a few words.

    Example:
        >>> import torch
        >>> describe_shapes(((torch.Size([4, 3]), torch.float32), (torch.Size([4]), torch.int64)))
        '[4, 3] float32, [4] int64'
    """
    counts = Counter(
        f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes
    )
    words = [shape if count == 1 else f"{count} x {shape}" for shape, count in counts.items()]
    return ", ".join(words[:_MAX_SHAPES]) + (", ..." if len(words) > _MAX_SHAPES else "")
