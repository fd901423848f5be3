"""Runs of consecutive modules that keep their first input alone, and compute the rest in backward.

Each module runs when the model calls it, so whoever else uses what lies between gets it as ever.
Only what autograd saves within them is exchanged for a promise to compute it again.

Source of the method: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.replay import Known, is_key_value_cache
from lightning_memopt.core.segment_run import SegmentRun


def checkpoint_segments(model: nn.Module, segments: Iterable[Sequence[str]]) -> Callable[[], None]:
    """Make segments of a model keep their first input, and recompute the rest in backward.

    A segment is a module, or several that run one after the other, each with the output of the one
    before as its only input. A recomputation ends with the last tensor that is needed: of an
    activation function and the linear layer behind it, the function alone runs again. Where a
    module of a segment is given something else, it runs as usual, with one warning.

    Names, types, `state_dict` keys, `deepcopy` and `pickle` of the model stay as they are. Outputs,
    gradients, buffers and random states are those of the plain model. Compiled code and forwards
    without gradients run as usual.

    Args:
        model: Any module.
        segments: For each segment the qualified names of its modules, in the order in which they
            run; no module is in two.

    Returns:
        A function that undoes it; calling it twice is harmless.

    Raises:
        ValueError: A name is no module of the model, or a module is in two segments.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> undo = checkpoint_segments(model, [["0", "1"]])
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> undo()
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: set[nn.Module] = set()
    with ExitStack() as undo:
        for names in segments:
            segment = _Segment(list(names))
            for position, name in enumerate(names):
                if name not in modules:
                    raise ValueError(f"`segments` must name modules of the model, got {name!r}.")
                if modules[name] in chosen:
                    raise ValueError(f"`segments` must share no module, but two hold {name!r}.")
                chosen.add(modules[name])
                undo.callback(_Member(modules[name], segment, position).restore)
        return undo.pop_all().close


class _Member(PatchedMethod):
    """Stands in for the `forward` of a module of a segment."""

    def __init__(self, module: nn.Module, segment: _Segment, position: int) -> None:
        super().__init__(module, "forward")
        self.segment, self.position = segment, position
        self.known: Known = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run as part of a segment, where that is possible."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        run = self.segment.run_of(self, args, kwargs)
        if run is None:
            return self.original(*args, **kwargs)
        name = self.segment.names[self.position]
        output = run.run(name, self.owner, self.original, self.known, (args, kwargs))
        self.segment.expect(run, self.position + 1, output)
        return output


class _Segment:
    """Knows which run of its modules is at hand, and what the next of them must be given."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self._next: tuple[int, weakref.ref[Tensor], int, SegmentRun] | None = None
        self._has_warned = False

    def run_of(self, member: _Member, args: Any, kwargs: Any) -> SegmentRun | None:
        """Return what the run of a module is part of; `None` where it must run as usual."""
        expected, self._next = self._next, None
        if member.position == 0:
            if any(is_key_value_cache(value) for value in (*args, *kwargs.values())):
                self._warn(0, "is given a key-value cache, which a repetition would fill")
                return None
            return SegmentRun(member.owner, args, kwargs)
        if expected is not None and not kwargs and len(args) == 1:
            position, output, version, run = expected
            is_output = args[0] is output() and position == member.position
            if is_output and args[0]._version == version:
                return run
        self._warn(member.position, "is not given what the module before has returned")
        return None

    def expect(self, run: SegmentRun, position: int, output: Any) -> None:
        """Expect the next module of the segment, for as long as the output is there."""
        if position < len(self.names) and isinstance(output, Tensor):
            alive = weakref.ref(output, self._forget)
            self._next = position, alive, output._version, run

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._next is not None and self._next[1] is gone:
            self._next = None

    def _warn(self, position: int, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`{self.names[position]}` runs as if it were not checkpointed: it {reason}.",
                stacklevel=2,
            )
