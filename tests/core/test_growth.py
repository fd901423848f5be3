import itertools
import random
import warnings

import pytest

from lightning_memopt.core.growth import Growth, GrowthWatch, MemoryGrowthWarning
from lightning_memopt.core.units import GIB, MIB

NOISE_STEPS = 100_000


def follow(curve, steps, every=1):
    """Return the growth found at each step of a curve, where there was one."""
    watch = GrowthWatch()
    found = ((step, watch.add(step, GIB + int(curve(step)))) for step in range(0, steps, every))
    return [(step, growth) for step, growth in found if growth is not None]


def memo(keys, seed):
    """Return the curve of a cache of `keys` entries that are asked for at random."""
    draw, seen = random.Random(seed), set()

    def curve(step):
        seen.add(draw.randrange(keys))
        return len(seen) * MIB

    return curve


# What is found


def test_a_steady_growth_is_found_after_fifty_steps_exactly():
    (step, growth), *_ = follow(lambda step: step * MIB, 200)
    assert step == 49
    assert growth == Growth(since_step=0, until_step=49, grown_bytes=49 * MIB)
    assert growth.steps == 49
    assert growth.bytes_per_step == MIB


@pytest.mark.parametrize(("rate", "is_found"), [(0.0101, True), (0.0099, False), (-1, False)])
def test_it_takes_a_mebibyte_per_hundred_steps(rate, is_found):
    assert bool(follow(lambda step: step * rate * MIB, 1000)) is is_found


@pytest.mark.parametrize("period", [1, 2, 5, 7, 10, 13, 20])
@pytest.mark.parametrize("phase", [0, 3])
def test_a_leak_once_in_several_steps_is_found_at_its_mean_rate(period, phase):
    (step, growth), *_ = follow(lambda step: (step + phase) // period * MIB, 150)
    assert 49 <= step < 120
    assert growth.bytes_per_step == pytest.approx(MIB / period, rel=0.12)


def test_slow_leaks_are_found_later():
    (step, growth), *_ = follow(lambda step: step // 200 * 4 * MIB, 10_000)
    assert 600 < step < 4000
    assert growth.bytes_per_step == pytest.approx(MIB / 50, rel=0.12)


@pytest.mark.parametrize("amplitude", [1, 20, 100])
def test_a_leak_under_variable_lengths_is_found(amplitude):
    draw = random.Random(0)
    (step, growth), *_ = follow(lambda step: (step + draw.random() * amplitude) * MIB, 300)
    assert 49 <= step < 200
    assert growth.bytes_per_step == pytest.approx(MIB, rel=0.25)


@pytest.mark.parametrize("start", [10, 1000, 12_345])
def test_a_leak_that_begins_late_is_found_as_soon(start):
    (step, growth), *_ = follow(lambda step: max(0, step - start) * MIB, start + 100)
    assert start + 40 <= step <= start + 60
    assert growth.since_step >= start - 10
    assert growth.bytes_per_step == pytest.approx(MIB, rel=0.1)


def test_a_jump_before_a_leak_does_not_hide_it():
    def curve(step):
        return max(0, step - 310) * MIB + 500 * MIB * (step > 290)

    (step, growth), *_ = follow(curve, 500)
    assert 350 < step < 370
    assert growth.bytes_per_step == pytest.approx(MIB, rel=0.1)


@pytest.mark.parametrize("every", [3, 10, 50])
def test_steps_that_are_seldom_read_need_as_many_readings(every):
    (step, growth), *_ = follow(lambda step: step * MIB, 100 * every, every)
    assert 50 <= step <= 20 * every
    assert growth.bytes_per_step == MIB


@pytest.mark.parametrize("jump", [0, 7, 27])
def test_a_leak_is_found_once_the_jump_of_a_warm_up_is_past(jump):
    (step, growth), *_ = follow(lambda step: step * MIB + 500 * MIB * (step > jump), 150)
    assert jump + 45 < step < jump + 65
    assert growth.since_step > jump
    assert growth.bytes_per_step == MIB


def test_a_jump_in_the_middle_of_a_leak_is_no_part_of_its_rate():
    (step, growth), *_ = follow(lambda step: step * MIB + 30 * MIB * (step > 35), 150)
    assert 75 < step < 100
    assert growth.bytes_per_step == MIB


def test_the_longest_steady_growth_is_told():
    found = dict(follow(lambda step: step * MIB, 400))
    assert found[399] == Growth(0, 399, 399 * MIB)


# What is left alone


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(lambda step: 0, id="flat"),
        pytest.param(lambda step: 500 * MIB * (step > 0), id="warm-up"),
        pytest.param(lambda step: 500 * MIB * (step > 75), id="a new validation set"),
        pytest.param(lambda step: 100 * MIB * (step**0.5 // 5), id="ever fewer jumps"),
        pytest.param(lambda step: min(step, 30) * MIB, id="a cache that is full"),
        pytest.param(
            lambda step: (min(step, 30) + min(max(step - 30, 0), 70) / 2) * MIB,
            id="a cache that fills at half the speed, then is full",
        ),
        pytest.param(lambda step: step % 30 * MIB, id="emptied each epoch"),
        pytest.param(lambda step: -step * MIB / 100, id="a fall"),
        pytest.param(lambda step: 100 * MIB * (1 - 0.97**step), id="a cache that settles"),
    ],
)
def test_what_is_no_leak_is_left_alone(curve):
    assert follow(curve, 600) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("keys", [10, 20, 30])
def test_a_cache_of_what_comes_at_random_is_left_alone_over_a_hundred_steps(keys, seed):
    found = follow(memo(keys, seed), 1000)
    assert [growth for _, growth in found if growth.steps >= 90] == []


@pytest.mark.parametrize("kind", ["uniform", "skewed", "few"])
def test_noise_is_left_alone_over_a_hundred_thousand_steps(kind):
    draw = random.Random(1)
    curves = {
        "uniform": lambda step: draw.random() * GIB,
        "skewed": lambda step: draw.lognormvariate(0, 1) * 100 * MIB,
        "few": lambda step: draw.choice([16, 32, 64, 128]) * MIB,
    }
    assert follow(curves[kind], NOISE_STEPS) == []


def test_a_fall_starts_anew():
    (step, growth), *_ = follow(lambda step: (step if step < 40 else step - 30) * MIB, 150)
    assert step == 89
    assert growth == Growth(40, 89, 49 * MIB)


# Suspicion


def test_half_of_the_evidence_is_suspicious_and_is_no_growth_yet():
    watch = GrowthWatch()
    states = []
    for step in range(50):
        watch.add(step, step * MIB)
        states.append((watch.is_suspicious, watch.growth is not None))
    first = states.index((True, False))
    assert first == 29
    assert states[-1] == (True, True)


def test_suspicion_ends_with_the_growth():
    watch = GrowthWatch()
    for step in range(200):
        watch.add(step, min(step, 40) * MIB)
    assert not watch.is_suspicious
    assert watch.growth is None


def test_noise_is_seldom_suspicious():
    watch, draw = GrowthWatch(), random.Random(0)
    states = []
    for step in range(20_000):
        watch.add(step, int(draw.random() * GIB))
        states.append(watch.is_suspicious)
    assert sum(b and not a for a, b in itertools.pairwise(states)) < 40


# A short curve


def last_judgement(points):
    watch = GrowthWatch()
    for step, allocated in points:
        watch.add(step, allocated)
    return watch.growth


@pytest.mark.parametrize("start", [0, 1, 101, 10_000])
def test_fifty_steps_are_enough_wherever_they_begin(start):
    growth = last_judgement((step, step * MIB) for step in range(start, start + 50))
    assert growth == Growth(start, start + 49, 49 * MIB)


def test_a_curve_may_end_between_two_judgements():
    assert last_judgement((step, step // 5 * MIB) for step in range(137)) is not None


@pytest.mark.parametrize("count", [0, 1, 2, 10, 49])
def test_fewer_steps_tell_nothing(count):
    assert last_judgement((step, step * MIB) for step in range(count)) is None


def test_a_growth_that_ended_is_not_told():
    assert last_judgement((step, min(step, 50) * MIB) for step in range(50)) is not None
    assert last_judgement((step, min(step, 50) * MIB) for step in range(80)) is None


def test_the_warning_has_a_filter_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=MemoryGrowthWarning)
        warnings.warn("grows", MemoryGrowthWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", UserWarning, stacklevel=1)
