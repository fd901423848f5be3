import math
import random
from itertools import product

import pytest

from lightning_memopt.core.micro_batch_search import MicroBatchSearch, Trial, next_parts
from lightning_memopt.core.units import GIB, MIB

LIMIT = 20 * GIB
DEVICE = 1.1 * LIMIT
SAMPLES = [5, 8, 23, 60, 128, 250, 512, 1000, 1733, 4096]


# Models of memory: `room` samples would meet the limit, `own` is the share that the model takes.


def line(room, own):
    return lambda size: (own + (1 - own) * size / room) * LIMIT


def rounded(block):
    return lambda room, own: lambda size: math.ceil(line(room, own)(size) / block) * block


def noisy(share=0.0, amount=0):
    def peak(room, own, size):
        need = line(room, own)(size)
        noise = random.Random(f"{room} {own} {size}").uniform(-1, 1)
        return need + noise * (share * need + amount)

    return lambda room, own: lambda size: peak(room, own, size)


def bent(power):
    return lambda room, own: lambda size: (own + (1 - own) * (size / room) ** power) * LIMIT


def stepped(room, own):
    changes = {0.1: 0.02, 0.4: 0.05, 0.7: -0.03}  # workspaces that come, and one that goes
    return lambda size: (
        line(room, own)(size) + LIMIT * sum(changes[at] for at in changes if size >= at * room)
    )


def search(samples, limit, peak, runs):
    """Run a search to its end: `peak(size)` in bytes or `None`, `runs(size)` without an OOM."""
    found = MicroBatchSearch(samples, limit)
    while (size := found.next_size()) is not None:
        assert 1 <= size <= samples
        assert size not in sizes(found)
        need = peak(size) if runs(size) else None
        fits = runs(size) and (limit is None or need is None or need <= limit)
        found.add(Trial(size, None if need is None else int(need), 1.0, fits))
    return found


def search_model(samples, peak):
    return search(samples, LIMIT, peak, lambda size: peak(size) <= DEVICE)


def sizes(found):
    return [trial.size for trial in found.trials]


def even(samples, size):
    return math.ceil(samples / math.ceil(samples / size))


def largest_that_fits(samples, peak, margin=1.0):
    return max((size for size in range(1, samples + 1) if peak(size) * margin <= LIMIT), default=0)


def assert_results_ran(found):
    fitting = {trial.size for trial in found.trials if trial.fits}
    assert (found.largest is None) == (found.chosen is None) == found.is_minimum_failing
    if found.largest is not None:
        assert {found.largest, found.chosen, even(found.samples, found.largest)} <= fitting
        assert even(found.samples, found.chosen) == found.chosen <= found.largest


@pytest.mark.parametrize("own", [0.02, 0.25, 0.5])
@pytest.mark.parametrize(
    ("model", "margin"),
    [
        pytest.param(line, 1, id="line"),
        pytest.param(rounded(2 * MIB), 1, id="blocks of 2 MiB"),
        pytest.param(rounded(20 * MIB), 1, id="blocks of 20 MiB"),
        pytest.param(noisy(share=0.005), 1.005, id="noise of 0.5 %"),
        pytest.param(noisy(share=0.01), 1.01, id="noise of 1 %"),
        pytest.param(noisy(amount=40 * MIB), 1.002, id="noise of 40 MiB"),
    ],
)
def test_six_trials_find_97_percent_of_the_largest_size(model, margin, own):
    for samples, share in product(SAMPLES, (0.013, 0.04, 0.11, 0.3, 0.47, 0.68, 0.93, 1.2)):
        room = 1.3 + share * samples
        found = search_model(samples, model(room, own))
        # With a margin, as what fits by luck alone isn't missed.
        largest = largest_that_fits(samples, line(room, own), margin)
        assert largest > 0
        assert found.largest >= 0.97 * largest, (samples, room)
        assert len(found.trials) <= 6, (samples, room)
        assert_results_ran(found)


@pytest.mark.parametrize("own", [0.02, 0.25, 0.5, 0.7])
def test_six_trials_are_enough_where_no_memory_is_left_beyond_the_limit(own):
    for samples, share in product(SAMPLES, (0.013, 0.04, 0.11, 0.3, 0.68, 0.93)):
        peak = line(1.3 + share * samples, own)
        found = search(samples, LIMIT, peak, lambda size, peak=peak: peak(size) <= LIMIT)
        assert found.largest >= 0.97 * largest_that_fits(samples, peak)
        assert len(found.trials) <= 6, (samples, share)
        assert_results_ran(found)


@pytest.mark.parametrize("own", [0.02, 0.25, 0.5, 0.7])
def test_four_trials_are_enough_for_most_lines(own):
    cases = list(product((128, 250, 512, 1000, 4096), (0.04, 0.11, 0.3, 0.47, 0.68, 0.93)))
    counts = [len(search_model(n, line(share * n, own)).trials) for n, share in cases]
    assert sum(counts) / len(counts) <= 4
    assert max(counts) <= 5


@pytest.mark.parametrize(
    ("model", "margin", "most"),
    [
        pytest.param(stepped, 1, 8, id="steps"),
        pytest.param(bent(2), 1, 11, id="quadratic"),
        pytest.param(bent(0.85), 1, 6, id="concave"),
        pytest.param(noisy(share=0.02), 1.02, 8, id="noise of 2 %"),
    ],
)
def test_memory_far_from_a_line_costs_trials_not_samples(model, margin, most):
    for samples, share, own in product(SAMPLES, (0.04, 0.11, 0.3, 0.68, 0.93), (0.02, 0.5)):
        room = 1.3 + share * samples
        found = search_model(samples, model(room, own))
        largest = largest_that_fits(samples, (model if margin == 1 else line)(room, own), margin)
        assert largest > 0
        assert found.largest >= 0.97 * largest, (samples, room)
        assert len(found.trials) <= most, (samples, room)
        assert_results_ran(found)


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_few_samples_are_tried_at_once(samples):
    assert sizes(search_model(samples, line(100, 0.1))) == [samples]


@pytest.mark.parametrize(("samples", "first"), [(5, 2), (64, 2), (100, 3), (512, 16), (4096, 128)])
def test_a_search_begins_with_a_small_size_but_not_with_one_sample(samples, first):
    assert MicroBatchSearch(samples, LIMIT).next_size() == first


@pytest.mark.parametrize("samples", [5, 60, 512, 4096])
def test_a_batch_that_surely_fits_is_tried_at_once(samples):
    found = search_model(samples, line(1.2 * samples, 0))
    assert len(found.trials) == 2
    assert found.largest == found.chosen == samples


@pytest.mark.parametrize("samples", [60, 512, 4096])
def test_a_batch_that_two_sizes_say_fits_is_tried_next(samples):
    found = search_model(samples, line(1.01 * samples, 0.5))
    assert len(found.trials) == 3
    assert found.largest == found.chosen == samples


def test_sizes_are_halved_down_to_one_sample_that_does_not_fit():
    found = search_model(512, line(100, 1.2))
    assert sizes(found) == [16, 8, 4, 2, 1]
    assert found.is_minimum_failing
    assert found.largest is None
    assert found.chosen is None


def test_one_sample_that_fits_is_returned():
    found = search_model(512, line(1.5, 0.2))
    assert found.largest == found.chosen == 1
    assert not found.is_minimum_failing


def test_a_first_peak_near_the_limit_is_compared_with_a_smaller_size():
    assert sizes(search_model(512, line(19, 0.1))) == [16, 8, 19]


def test_a_line_that_just_misses_one_part_less_is_put_to_the_test():
    found = MicroBatchSearch(512, LIMIT)
    peak = line(255.8, 0.1)
    for size in (16, 128, 252):
        found.add(Trial(size, int(peak(size)), 1.0, fits=True))
    assert found.next_size() == 256


def test_two_sizes_close_together_are_better_than_one():
    found = MicroBatchSearch(1000, LIMIT)
    for size in (20, 24):
        found.add(Trial(size, int(line(26.5, 0.1)(size)), 1.0, fits=True))
    found.add(Trial(30, None, None, fits=False))
    assert found.next_size() == 26


def test_unknown_peaks_let_sizes_grow_fourfold():
    assert sizes(search(512, None, lambda size: None, lambda size: True)) == [16, 64, 256, 512]


def test_peaks_of_zero_let_the_batch_be_tried_at_once():
    assert sizes(search(512, LIMIT, lambda size: 0, lambda size: True)) == [16, 512]


SILENT_PEAKS = {
    "no limit": (None, lambda size: None),
    "unknown": (LIMIT, lambda size: None),
    "zero": (LIMIT, lambda size: 0),
    "constant": (LIMIT, lambda size: LIMIT // 3),
    "falling": (LIMIT, lambda size: LIMIT // 3 - size),
    "hardly growing": (LIMIT, lambda size: LIMIT // 3 + size),
}


@pytest.mark.parametrize(("limit", "peak"), SILENT_PEAKS.values(), ids=SILENT_PEAKS)
def test_where_peaks_say_nothing_the_exact_size_is_found(limit, peak):
    for samples in range(1, 41):
        for runs in range(samples + 1):
            found = search(samples, limit, peak, lambda size, runs=runs: size <= runs)
            assert (found.largest or 0) == runs
            assert len(found.trials) <= 12
            assert_results_ran(found)


@pytest.mark.parametrize(("limit", "peak"), SILENT_PEAKS.values(), ids=SILENT_PEAKS)
@pytest.mark.parametrize(
    ("samples", "runs", "chosen", "most"),
    [(16, 8, 8, 7), (64, 8, 8, 9), (512, 100, 86, 13), (512, 511, 256, 13), (64, 0, None, 2)],
)
def test_what_only_out_of_memory_bounds_takes_few_trials(limit, peak, samples, runs, chosen, most):
    found = search(samples, limit, peak, lambda size: size <= runs)
    assert (found.largest or 0) == runs
    assert found.chosen == chosen
    assert len(found.trials) <= most


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_sixteen_trials_are_the_most(limit):
    for runs in range(0, 100_000, 997):
        found = search(100_000, limit, lambda size: 0, lambda size, runs=runs: size <= runs)
        assert len(found.trials) <= 16
        assert (found.largest or 0) >= 0.97 * runs
        assert_results_ran(found)


def test_an_out_of_memory_error_below_the_limit_is_believed():
    for runs in range(1, 400):
        found = search(512, LIMIT, line(400, 0.2), lambda size, runs=runs: size <= runs)
        is_near = runs > 0.7 * 400  # so near to the limit that peaks may explain it
        assert runs >= found.largest >= (0.97 * runs if is_near else runs)
        assert len(found.trials) <= (9 if runs > 0.8 * 400 else 14)
        assert_results_ran(found)


def test_contradictory_results_end_the_search_with_a_size_that_ran():
    chance = random.Random(0)
    for _ in range(500):
        found = MicroBatchSearch(chance.randint(1, 3000), chance.choice([None, 100, 1000]))
        share = chance.random()
        while (size := found.next_size()) is not None:
            assert 1 <= size <= found.samples
            assert size not in sizes(found)
            peak = chance.choice([None, 0, size, chance.randint(0, 1500)])
            seconds = chance.choice([None, 0.0, chance.random()])
            found.add(Trial(size, peak, seconds, fits=chance.random() < share))
        assert len(found.trials) <= 30
        assert_results_ran(found)


def test_a_size_that_fails_speaks_against_all_larger_ones():
    found = MicroBatchSearch(10, None)
    found.add(Trial(8, None, 1.0, fits=True))
    found.add(Trial(5, None, None, fits=False))
    assert found.largest is None
    assert found.next_size() == 2


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        pytest.param({64: 1.0, 128: 2.0}, 64, id="as fast"),
        pytest.param({64: 1.0, 128: 1.97}, 64, id="nearly as fast"),
        pytest.param({64: 1.0, 128: 1.9}, 128, id="slower"),
        pytest.param({64: 1.0, 128: 2.5}, 64, id="faster"),
        pytest.param({32: 0.5, 128: 2.0}, 32, id="a quarter"),
        pytest.param({16: 0.01, 128: 2.0}, 128, id="too small to be timed"),
        pytest.param({64: None, 128: 2.0}, 128, id="smaller one untimed"),
        pytest.param({64: 1.0, 128: None}, 128, id="largest untimed"),
        pytest.param({64: 0.0, 128: 0.0}, 128, id="clock too coarse"),
        pytest.param({100: 0.5, 128: 2.0}, 128, id="not a size of even parts"),
        pytest.param({256: 1.0, 512: 2.5}, 512, id="the whole batch"),
    ],
)
def test_the_smallest_size_that_is_as_fast_is_chosen(times, chosen):
    found = MicroBatchSearch(512, None)
    for size, seconds in times.items():
        found.add(Trial(size, None, seconds, fits=True))
    found.add(Trial(513, None, 0.001, fits=False))
    assert found.chosen == chosen


def test_a_search_cut_short_chooses_what_ran():
    found = MicroBatchSearch(512, None)
    assert found.chosen is None
    found.add(Trial(100, None, 1.0, fits=True))
    assert found.chosen == 100


@pytest.mark.parametrize(
    ("samples", "parts", "expected"),
    [
        (12, 1, 2),
        (12, 2, 3),
        (12, 4, 6),
        (7, 1, 2),
        (7, 2, 4),
        (7, 4, 7),
        (15, 1, 2),
        (15, 2, 3),
        (512, 6, 8),
        (2, 1, 2),
        (1, 1, None),
        (7, 7, None),
        (7, 9, None),
    ],
)
def test_the_next_parts_are_a_divisor_or_twice_as_many(samples, parts, expected):
    assert next_parts(samples, parts) == expected


def test_parts_become_smaller_until_each_is_one_sample():
    for samples in range(1, 100):
        parts, following = 1, next_parts(samples, 1)
        while following is not None:
            assert parts < following <= min(2 * parts, samples)
            assert math.ceil(samples / following) < math.ceil(samples / parts)
            parts, following = following, next_parts(samples, following)
        assert parts == samples
