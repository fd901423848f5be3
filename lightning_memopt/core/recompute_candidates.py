"""What could be recomputed of a step: every module, and every run of modules in a row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_memopt.core.step_profile import Call, StepProfile

_LONGEST = 16  # calls in a segment
ROOT = -1


@dataclass(frozen=True)
class Candidate:
    """A segment that could be recomputed.

    Attributes:
        calls: Numbers of its calls, in order.
        seconds: What computing it again takes; it ends with the last save.
        working_set: Bytes that are there once it has been computed again, its input left out.
        savers: How many of the saves of each storage are within it.
        inputs: Storages that it keeps.
        saves: Numbers of the saves within it.
    """

    calls: tuple[int, ...]
    seconds: float
    working_set: int
    savers: dict[int, int]
    inputs: frozenset[int]
    saves: frozenset[int]


class Problem:
    """All candidates of a step, and where its storages are saved.

    Args:
        profile: A forward in numbers.

    Attributes:
        profile: The same.
        candidates: What could be recomputed.
        savers: How many saves each storage has.
        children: Numbers of the calls directly within each call, in order; of all others within
            `ROOT`.
        home: For each storage the innermost call that holds all its saves.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self.children: dict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(profile.calls):
            self.children[ROOT if call.parent is None else call.parent].append(number)
        self.savers = Counter(s.storage for s in profile.saves if s.storage is not None)
        self.home = self._homes()
        self.candidates = [
            candidate
            for chain in self.children.values()
            for calls in _segments(chain, profile.calls)
            if (candidate := self._candidate(calls)) is not None
        ]

    def parent(self, candidate: Candidate) -> int:
        """Return the call that the calls of a candidate are directly within."""
        parent = self.profile.calls[candidate.calls[0]].parent
        return ROOT if parent is None else parent

    def covers(self, candidate: Candidate, storage: int) -> bool:
        """Return whether all saves of a storage are within a candidate."""
        return candidate.savers.get(storage, 0) == self.savers[storage]

    def _candidate(self, calls: list[int]) -> Candidate | None:
        profile = self.profile
        last = profile.calls[calls[-1]]
        saves = [n for c in calls for n in range(profile.calls[c].first, profile.calls[c].end)]
        if last.first == last.end:
            return None  # the one without the last call does as much
        inputs = profile.calls[calls[0]].inputs
        if any(profile.calls[call].changes & inputs for call in calls):
            return None  # what it would be computed from is gone
        seconds = sum(profile.calls[c].end_seconds - profile.calls[c].begin_seconds for c in calls)
        seconds -= last.end_seconds - profile.saves[last.end - 1].seconds
        storages = (profile.saves[number].storage for number in saves)
        savers = dict(Counter(storage for storage in storages if storage is not None))
        working_set = sum(profile.sizes[s] for s in savers if s not in inputs)
        made = Candidate(tuple(calls), seconds, working_set, savers, inputs, frozenset(saves))
        is_of_use = any(self.covers(made, s) and s not in inputs for s in savers)
        return made if is_of_use else None

    def _homes(self) -> dict[int, int]:
        calls = self.profile.calls
        innermost = [ROOT] * len(self.profile.saves)
        for number, call in enumerate(calls):
            innermost[call.first : call.end] = [number] * (call.end - call.first)
        homes: dict[int, int] = {}
        for save, number in zip(self.profile.saves, innermost, strict=True):
            if save.storage is None:
                continue
            around = list(_around(number, calls))
            if save.storage in homes:
                others = set(_around(homes[save.storage], calls))
                number = next(each for each in around if each in others)
            homes[save.storage] = number
        return homes


def _around(number: int, calls: tuple[Call, ...]) -> Iterator[int]:
    """Yield a call and those around it, the innermost first."""
    while number != ROOT:
        yield number
        parent = calls[number].parent
        number = ROOT if parent is None else parent
    yield ROOT


def _segments(chain: list[int], calls: tuple[Call, ...]) -> Iterable[list[int]]:
    """Yield the runs of calls in which each follows the one before."""
    for begin, number in enumerate(chain):
        if not calls[number].can_begin:
            continue
        segment = [number]
        yield list(segment)
        for follower in chain[begin + 1 : begin + _LONGEST]:
            if not calls[follower].follows:
                break
            segment.append(follower)
            yield list(segment)
