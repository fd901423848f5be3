"""Exchanges of segments that make a choice fit, or take less time."""

from __future__ import annotations

import math

from lightning_memopt.core.recompute_candidates import Problem
from lightning_memopt.core.recompute_choice import Choice

_MOST_WORK = 1_000_000  # about half a second


class Search:
    """Looks for a choice that is within a budget and takes little time, in the vicinity of others.

    Args:
        problem: What could be recomputed.
        budget: Bytes that it may take.

    Attributes:
        best: What was found; `None` before anything was within the budget.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        self._problem, self._budget = problem, budget
        self._work_left = _MOST_WORK
        self.best: Choice | None = None

    def improve(self, choice: Choice) -> None:
        """Look in the vicinity of a choice, which is changed."""
        if self.best is None or self._work_left > _MOST_WORK // 2:
            self._settle(choice)

    def refine(self) -> None:
        """Look further around the best, as far as the work may go."""
        number = since = 0
        count = len(self._problem.candidates)
        while self.best is not None and since < count and self._work_left > 0:
            trial = Choice(self._problem, self.best.chosen)
            if number in trial.chosen:
                trial.remove(number)
            else:
                trial.replace(number)
            since = 0 if self._settle(trial, number) else since + 1
            number = (number + 1) % count

    def _settle(self, choice: Choice, untouched: int | None = None) -> bool:
        """Make a choice fit and take less time, and return whether it is the best so far."""
        before = choice.work
        self._lower(choice, untouched)
        if choice.peak <= self._budget:
            self._exchange(choice)
        self._work_left -= choice.work - before
        if choice.peak > self._budget:
            return False
        if self.best is not None and choice.seconds >= self.best.seconds * (1 - 1e-9):
            return False
        self.best = choice
        return True

    def _lower(self, choice: Choice, untouched: int | None = None) -> None:
        """Choose more until the budget is reached, for each byte what costs least."""
        while choice.peak > self._budget:
            excess, seconds = choice.peak - self._budget, choice.seconds
            best, least = None, math.inf
            for number in range(len(self._problem.candidates)):
                if number in choice.chosen or number == untouched:
                    continue
                overlapping = choice.overlapping(number)
                if untouched in overlapping:
                    continue
                removed = choice.replace(number)
                saved = min(excess, excess + self._budget - choice.peak)
                cost = choice.seconds - seconds
                choice.put_back(number, removed)
                if saved > 0 and cost / saved < least:
                    best, least = number, cost / saved
            if best is None:
                return
            choice.replace(best)

    def _exchange(self, choice: Choice) -> None:
        """Exchange one for others as long as that takes less time."""
        has_changed = True
        while has_changed:
            has_changed = False
            for number in range(len(self._problem.candidates)):
                seconds = choice.seconds
                if number in choice.chosen:
                    choice.remove(number)
                    if choice.peak > self._budget:
                        choice.add(number)
                    else:
                        has_changed = True
                else:
                    removed = choice.replace(number)
                    if choice.peak > self._budget or choice.seconds >= seconds * (1 - 1e-9):
                        choice.put_back(number, removed)
                    else:
                        has_changed = True
