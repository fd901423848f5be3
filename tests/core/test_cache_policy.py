import pytest

from lightning_memopt.core.cache_policy import FragmentationRule, complaint

MIN_CALLS = 5


@pytest.mark.parametrize(
    ("allocated", "met"), [(1000, False), (750, False), (749, True), (500, True), (0, True)]
)
def test_the_gap_must_be_above_the_share_of_reserved(allocated, met):
    assert FragmentationRule(above=0.25, min_gap=0, every=1).is_met(allocated, 1000, None) is met


@pytest.mark.parametrize(("allocated", "met"), [(900, False), (700, False), (699, True)])
def test_the_gap_must_be_above_the_size(allocated, met):
    assert FragmentationRule(above=0.0, min_gap=300, every=1).is_met(allocated, 1000, None) is met


@pytest.mark.parametrize(
    ("above", "min_gap", "met"),
    [(0.4, 400, True), (0.6, 400, False), (0.4, 600, False), (0.6, 600, False)],
)
def test_one_of_both_limits_is_not_enough(above, min_gap, met):
    assert FragmentationRule(above, min_gap, every=1).is_met(500, 1000, None) is met


@pytest.mark.parametrize(
    ("since", "met"), [(None, True), (0, False), (1, False), (2, False), (3, True), (4, True)]
)
def test_so_many_steps_lie_between_two_calls(since, met):
    rule = FragmentationRule(above=0.0, min_gap=0, every=3)
    assert rule.is_met(500, 1000, since) is met


@pytest.mark.parametrize(("allocated", "reserved"), [(0, 0), (1000, 1000), (1100, 1000)])
def test_without_a_gap_there_is_nothing_to_do(allocated, reserved):
    assert not FragmentationRule(above=0.0, min_gap=0, every=1).is_met(allocated, reserved, None)


def test_a_share_of_one_is_never_exceeded():
    assert not FragmentationRule(above=1.0, min_gap=0, every=1).is_met(0, 1000, None)


@pytest.mark.parametrize("seconds", [0.0, 50.0])
def test_calls_that_free_nothing_are_complained_of(seconds):
    said = complaint(MIN_CALLS, seconds, freed=0, elapsed_seconds=100.0)
    assert said is not None
    assert "nothing" in said


@pytest.mark.parametrize(("seconds", "bad"), [(0.0, False), (2.9, False), (3.1, True), (50, True)])
def test_calls_that_take_more_than_three_hundredths_of_the_time_are_complained_of(seconds, bad):
    said = complaint(100, seconds, freed=1, elapsed_seconds=100.0)
    assert (said is not None) is bad
    assert not bad or f"{seconds / 100:.1%}" in said


@pytest.mark.parametrize("calls", [0, 1, MIN_CALLS - 1])
def test_a_few_calls_do_not_tell(calls):
    assert complaint(calls, 99.0, freed=0, elapsed_seconds=100.0) is None
    assert complaint(MIN_CALLS, 99.0, freed=0, elapsed_seconds=100.0) is not None
