"""A choice of segments to recompute, what it keeps and what it costs, exactly."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_memopt.core.recompute_candidates import Candidate, Problem


class Choice:
    """Candidates that are chosen, of which no two overlap.

    Args:
        problem: Where they are from.
        chosen: Numbers of candidates.

    Attributes:
        chosen: The same.
        kept: Bytes that forward keeps.
        seconds: What computing them again takes.
        work: How often a storage was looked at, as a measure of the time that passed.
    """

    def __init__(self, problem: Problem, chosen: Iterable[int] = ()) -> None:
        self._problem = problem
        self._open = dict(problem.savers)
        self._inputs = dict.fromkeys(range(len(problem.profile.sizes)), 0)
        self._owner: dict[int, int] = {}
        self.chosen: set[int] = set()
        self.kept = sum(problem.profile.sizes[storage] for storage in self._open)
        self.seconds = 0.0
        self.work = 0
        for number in chosen:
            self.add(number)

    @property
    def working_set(self) -> int:
        """Bytes of the largest segment while it is computed again."""
        candidates = self._problem.candidates
        return max((candidates[number].working_set for number in self.chosen), default=0)

    @property
    def peak(self) -> int:
        """Bytes of activations at the peak."""
        return self.kept + self.working_set

    def overlapping(self, number: int) -> set[int]:
        """Return the chosen candidates that overlap with one."""
        saves = self._problem.candidates[number].saves
        return {self._owner[save] for save in saves if save in self._owner}

    def add(self, number: int) -> None:
        """Choose a candidate that overlaps with none."""
        candidate = self._problem.candidates[number]
        self.chosen.add(number)
        self.seconds += candidate.seconds
        self._owner.update(dict.fromkeys(candidate.saves, number))
        self._change(candidate, 1)

    def remove(self, number: int) -> None:
        """Choose a candidate no more."""
        candidate = self._problem.candidates[number]
        self.chosen.remove(number)
        self.seconds -= candidate.seconds
        for save in candidate.saves:
            del self._owner[save]
        self._change(candidate, -1)

    def replace(self, number: int) -> set[int]:
        """Choose a candidate in place of those that overlap with it, and return those."""
        removed = self.overlapping(number)
        for each in removed:
            self.remove(each)
        self.add(number)
        return removed

    def put_back(self, number: int, removed: set[int]) -> None:
        """Undo a replacement."""
        self.remove(number)
        for each in removed:
            self.add(each)

    def _change(self, candidate: Candidate, sign: int) -> None:
        sizes, is_open, inputs = self._problem.profile.sizes, self._open, self._inputs
        storages = candidate.savers.keys() | candidate.inputs
        self.work += len(storages)
        for storage in storages:
            before = is_open.get(storage, 0) > 0 or inputs[storage] > 0
            is_open[storage] = is_open.get(storage, 0) - sign * candidate.savers.get(storage, 0)
            inputs[storage] += sign * (storage in candidate.inputs)
            after = is_open[storage] > 0 or inputs[storage] > 0
            self.kept += sizes[storage] * (after - before)
