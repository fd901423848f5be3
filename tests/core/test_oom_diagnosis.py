from dataclasses import replace

import pytest

from lightning_memopt.core.oom_diagnosis import Failure, advice_on, likely_kind
from lightning_memopt.core.units import GIB

STEADY = Failure(
    phase="forward",
    requested=2 * GIB,
    limit=80 * GIB,
    total=80 * GIB,
    allocated=78 * GIB,
    reserved=79 * GIB,
    others=GIB,
    free=0,
    activations=60 * GIB,
    float32_activations=40 * GIB,
    in_blocks=48 * GIB,
    largest_block=4 * GIB,
    parameters=5 * GIB,
)
SINGLE = replace(STEADY, requested=100 * GIB)
FRAGMENTED = replace(STEADY, allocated=70 * GIB, requested=3 * GIB)
UNUSUAL = replace(STEADY, batch=1500, usual_batch=1000, largest_batch=1100)
GROWN = replace(STEADY, grown=10 * GIB, growth_rate=0.1 * GIB)
CROWDED = replace(STEADY, allocated=20 * GIB, reserved=21 * GIB, others=59 * GIB)


def actions(failure):
    return [advice.action.split("`")[1] for advice in advice_on(failure) if "`" in advice.action]


@pytest.mark.parametrize(
    ("failure", "kind", "figure"),
    [
        (STEADY, "steady need too large", "78.00 GiB in use and 2.00 GiB asked for, of 80.00 GiB"),
        (SINGLE, "single request larger than the device", "100.00 GiB were asked for at once"),
        (FRAGMENTED, "fragmentation", "9.00 GiB are cached and unused"),
        (UNUSUAL, "an unusually large batch", "1,500 elements, the median before it 1,000"),
        (GROWN, "growth over time", "10.00 GiB were added steadily, 10.00 GiB in 100 steps"),
        (CROWDED, "another process", "others hold 59.00 GiB of the device's 80.00 GiB"),
    ],
)
def test_each_kind_is_told_by_its_figures(failure, kind, figure):
    found, reason = likely_kind(failure)
    assert found == kind
    assert figure in reason


@pytest.mark.parametrize(
    "failure",
    [
        replace(SINGLE, requested=80 * GIB),
        replace(FRAGMENTED, requested=10 * GIB),
        replace(FRAGMENTED, allocated=73 * GIB),  # so much is always cached
        replace(UNUSUAL, batch=1150),  # within what was usual
        replace(UNUSUAL, batch=1400, largest_batch=1400),  # no larger than one before it
        replace(GROWN, grown=GIB),  # less than was asked for
        replace(CROWDED, others=3.9 * GIB, total=80 * GIB),  # a driver's own
        replace(CROWDED, others=3 * GIB, reserved=77 * GIB, allocated=76 * GIB),
        replace(CROWDED, free=3 * GIB, others=56 * GIB),  # there was enough beside the others
        replace(CROWDED, limit=21 * GIB),  # its own share, not the others
    ],
)
def test_what_is_short_of_a_kind_is_a_steady_need(failure):
    assert likely_kind(failure)[0] == "steady need too large"


def test_a_request_counts_against_the_own_share_of_a_device():
    assert likely_kind(replace(STEADY, limit=GIB))[0] == "single request larger than the device"


def test_nothing_is_known_but_what_is_in_use():
    unknown = Failure("forward", None, None, None, GIB, GIB, 0, None)
    assert likely_kind(unknown) == ("steady need too large", "1.00 GiB in use and 0 B asked for")
    assert advice_on(unknown) == []


def test_advice_goes_from_cheap_to_dear_with_what_each_would_save():
    advice = advice_on(STEADY)
    assert actions(STEADY) == [
        "AutomaticMixedPrecision()",
        "AutoAccumulation()",
        "GradientCheckpointing()",
    ]
    # Half of what is in float32; all but the half of two parts; all blocks but one at a time.
    assert [each.saves for each in advice] == [20 * GIB, 30 * GIB, 44 * GIB]


def test_a_batch_is_cut_in_as_many_parts_as_make_room():
    # 78 + 47 of 80: 45 have to go, three quarters of 60.
    needy = replace(STEADY, requested=47 * GIB)
    (advice,) = (each for each in advice_on(needy) if "AutoAccumulation" in each.action)
    assert "in 4 parts" in advice.action
    assert advice.saves == 45 * GIB


def test_where_no_number_of_parts_is_enough_two_are_a_start():
    hopeless = replace(STEADY, activations=GIB)
    (advice,) = (each for each in advice_on(hopeless) if "AutoAccumulation" in each.action)
    assert "in 2 parts" in advice.action


def test_growth_of_a_tenth_of_what_is_in_use_is_enough():
    assert likely_kind(replace(GROWN, grown=8 * GIB, requested=20 * GIB))[0] == "growth over time"
    assert likely_kind(replace(GROWN, grown=7 * GIB, requested=20 * GIB))[0] != "growth over time"


def test_what_is_in_use_already_is_not_advised():
    in_use = frozenset({"AutoAccumulation", "GradientCheckpointing"})
    assert actions(replace(STEADY, in_use=in_use, is_half=True)) == []


def test_what_is_free_comes_first():
    assert actions(FRAGMENTED)[0].startswith("PYTORCH_CUDA_ALLOC_CONF")
    assert actions(FRAGMENTED)[1] == "EmptyCache()"
    assert actions(replace(FRAGMENTED, is_expandable=True))[0] == "EmptyCache()"
    assert advice_on(CROWDED)[0].saves == 59 * GIB
    assert advice_on(GROWN)[0].saves == 10 * GIB


def test_an_optimizers_step_gets_advice_of_its_own():
    failure = replace(STEADY, phase="optimizer step", activations=0, float32_activations=0)
    assert advice_on(failure)[0].saves == 5 * GIB
    assert "foreach=False" in advice_on(failure)[0].action
    assert "AutoAccumulation()" not in actions(failure)


@pytest.mark.parametrize("phase", ["validation", "test", "predict"])
def test_an_evaluation_needs_a_smaller_batch_of_its_own(phase):
    (advice,) = advice_on(replace(STEADY, phase=phase, evaluated=10 * GIB))
    assert advice.action == f"halve the batch size of the {phase} loader"
    assert advice.saves == 5 * GIB


def test_a_single_request_may_be_of_the_batch():
    (advice,) = (each for each in advice_on(SINGLE) if "AutoAccumulation" in each.action)
    assert "if that request grows with the batch" in advice.action
