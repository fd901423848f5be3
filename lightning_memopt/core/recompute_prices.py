"""The best choice of segments if each byte that is kept has a price."""

from __future__ import annotations

from collections import defaultdict

from lightning_memopt.core.recompute_candidates import ROOT, Problem


class Prices:
    """A dynamic programme over the tree of calls.

    What it takes for granted: a storage of which savers are in several segments is kept, and what a
    segment has as its input is kept anyway if it is saved elsewhere.

    Args:
        problem: What could be recomputed.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        sizes = problem.profile.sizes
        self._own: dict[int, int] = defaultdict(int)
        for storage, home in problem.home.items():
            self._own[home] += sizes[storage]
        # By the last call of a segment: number, how many calls, seconds, working set, bytes.
        self._ending: dict[int, list[tuple[int, int, float, int, int]]] = defaultdict(list)
        for number, each in enumerate(problem.candidates):
            home = problem.parent(each)
            kept = sum(sizes[s] for s in each.inputs if problem.covers(each, s))
            for storage in each.savers:
                if problem.home[storage] == home and problem.covers(each, storage):
                    kept -= sizes[storage]
            entry = (number, len(each.calls), each.seconds, each.working_set, kept)
            self._ending[each.calls[-1]].append(entry)

    def best(self, price: float, largest: int) -> list[int]:
        """Return the candidates that cost least.

        Args:
            price: Seconds for each byte that is kept.
            largest: Bytes that no working set exceeds.
        """
        costs: dict[int, float] = {}
        chains: dict[int, list[int | None]] = {}
        for call in range(len(self._problem.profile.calls) - 1, ROOT - 1, -1):
            sums, ends = [0.0], list[int | None]()
            children = self._problem.children.get(call, [])
            for position, child in enumerate(children, 1):
                least, choice = sums[-1] + costs[child], None
                for number, length, seconds, working_set, kept in self._ending[child]:
                    if working_set <= largest:
                        cost = sums[position - length] + seconds + price * kept
                        if cost < least:
                            least, choice = cost, number
                sums.append(least)
                ends.append(choice)
            costs[call] = sums[-1] + price * self._own[call]
            chains[call] = ends
        return self._chosen(chains)

    def _chosen(self, chains: dict[int, list[int | None]]) -> list[int]:
        found, waiting = [], [ROOT]
        while waiting:
            call = waiting.pop()
            children = self._problem.children.get(call, [])
            position = len(children)
            while position:
                number = chains[call][position - 1]
                if number is None:
                    waiting.append(children[position - 1])
                    position -= 1
                else:
                    found.append(number)
                    position -= len(self._problem.candidates[number].calls)
        return found
