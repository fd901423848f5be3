"""What to recompute in backward so that a step fits in a budget and takes least time.

A step is described by numbers alone: the calls of modules as a tree, and what autograd saved in
which order. A plan is a choice of segments: calls that follow each other, each given what the one
before returned. A storage is kept if any of its savers is outside of every chosen segment, or if it
is the input of one; the peak is what is kept and the largest segment while it is computed again.

Method: each byte is given a price, and for a price the best plan is found by a dynamic programme
over the tree; the price is bisected, for several bounds on the largest segment, and the best plan
is improved by exchanges. Checkpointing as an optimization problem with a budget: Jain et al.,
"Checkmate", https://arxiv.org/abs/1910.02653; the price per byte is Everett's, "Generalized
Lagrange Multiplier Method", Operations Research 11 (1963).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memopt.core.recompute_candidates import Problem
from lightning_memopt.core.recompute_choice import Choice
from lightning_memopt.core.recompute_prices import Prices
from lightning_memopt.core.recompute_search import Search
from lightning_memopt.core.step_profile import StepProfile

_PRICES = 1e-18, 1e3  # seconds for a byte, from nothing to anything
_BOUNDS = 12
_HALVINGS = 24


class BudgetError(ValueError):
    """No plan needs as little as the budget.

    Attributes:
        least: The smallest peak that a plan reaches, in bytes.
    """

    def __init__(self, budget: int, least: int) -> None:
        super().__init__(f"no plan needs {budget} bytes or less; the smallest peak is {least}")
        self.least = least


@dataclass(frozen=True)
class RecomputePlan:
    """What to recompute.

    Attributes:
        segments: For each segment the names of its modules, in order; see `checkpoint_segments`.
        kept: Bytes that forward keeps for backward.
        working_set: Bytes of the largest segment while it is computed again.
        seconds: What computing again takes in a step.
    """

    segments: tuple[tuple[str, ...], ...]
    kept: int
    working_set: int
    seconds: float

    @property
    def peak(self) -> int:
        """Bytes of activations at the peak."""
        return self.kept + self.working_set


def plan_recompute(profile: StepProfile, budget: int) -> RecomputePlan:
    """Return the plan that takes least time of those that need no more than a budget.

    Args:
        profile: A forward in numbers.
        budget: Bytes that activations may take.

    Returns:
        A plan; without segments where all fits.

    Raises:
        BudgetError: Nothing reaches the budget.

    Example:
        >>> from lightning_memopt.core.step_profile import Call, Save
        >>> calls = tuple(
        ...     Call(name, None, i, i + 1, i, i + 1, frozenset([i]), frozenset(), True, i > 0)
        ...     for i, name in enumerate("abcde")
        ... )
        >>> profile = StepProfile(calls, tuple(Save(i, i) for i in range(5)), (10,) * 5)
        >>> plan = plan_recompute(profile, 40)
        >>> plan.segments, plan.kept, plan.working_set, plan.seconds
        ((('a', 'b'), ('c', 'd')), 30, 10, 2.0)
    """
    problem = Problem(profile)
    plain = Choice(problem)
    if plain.peak <= budget:
        return _plan(problem, plain)
    search = Search(problem, budget)
    starts = list(_priced(problem, budget))
    for choice in sorted(starts, key=lambda each: (each.peak > budget, each.seconds)):
        search.improve(choice)
    search.refine()
    if search.best is None:
        raise BudgetError(budget, min(choice.peak for choice in [plain, *starts]))
    return _plan(problem, search.best)


def _plan(problem: Problem, choice: Choice) -> RecomputePlan:
    calls = problem.profile.calls
    chosen = sorted(problem.candidates[number].calls for number in choice.chosen)
    segments = tuple(tuple(calls[call].name for call in each) for each in chosen)
    return RecomputePlan(segments, choice.kept, choice.working_set, choice.seconds)


def _priced(problem: Problem, budget: int) -> Iterator[Choice]:
    """Yield for each bound on the working set what just fits, and what just doesn't."""
    prices = Prices(problem)
    sizes = sorted({candidate.working_set for candidate in problem.candidates})
    for largest in sizes[:: -max(1, -(-len(sizes) // _BOUNDS))]:
        low, high = _PRICES
        fits = Choice(problem, prices.best(high, largest))
        if fits.peak > budget:
            yield fits
            continue
        fails: Choice | None = None
        for _ in range(_HALVINGS):
            price = math.sqrt(low * high)
            choice = Choice(problem, prices.best(price, largest))
            if choice.peak <= budget:
                fits, high = choice, price
            else:
                fails, low = choice, price
        yield fits
        if fails is not None:
            yield fails
