from __future__ import annotations

import pytest

from lightning_memopt.core.largest_size import largest_size

CURVES = {
    "line": lambda n: 1000 + 7 * n,
    "steep": lambda n: 10 * n,
    "flat at first": lambda n: max(5000, 7 * n),
    "square": lambda n: 100 + n * n // 4,
    "stairs": lambda n: 1000 + 64 * (n // 8),
}


@pytest.mark.parametrize("size", [1, 2, 8, 100, 5000])
@pytest.mark.parametrize("limit", [500, 1008, 6000, 20_000, 200_000])
@pytest.mark.parametrize("name", CURVES)
def test_it_is_within_a_percent_of_brute_force_in_few_trials(name, limit, size):
    curve, tried = CURVES[name], []

    def try_size(n: int) -> tuple[int, bool]:
        assert n >= 1
        tried.append(n)
        return curve(n), curve(n) <= limit

    found = largest_size(try_size, limit, size, curve(size), curve(size) <= limit)
    best = next((n for n in range(200_000, 0, -1) if curve(n) <= limit), 0)
    assert found <= best
    assert best - found <= max(1, 0.01 * best)
    assert len(tried) <= 16
    assert len(set(tried)) == len(tried)


def test_what_fails_below_the_limit_is_searched_below_it():
    # An allocator in pieces refuses from 300 on, though the peak of 400 would still fit.
    found = largest_size(lambda n: (10 * n, n < 300), 4000, 10, 100, True)
    assert 296 <= found <= 299
