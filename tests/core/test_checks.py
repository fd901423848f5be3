import math
from pathlib import Path

import pytest

from lightning_memopt.core.checks import (
    check_bool,
    check_fraction,
    check_path,
    check_positive_int,
    check_steps,
    check_word,
)


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (check_positive_int, 1),
        (check_positive_int, 10**12),
        (check_bool, True),
        (check_bool, False),
        (check_fraction, 0),
        (check_fraction, 0.25),
        (check_fraction, 1),
    ],
)
def test_a_good_value_passes_and_nothing_is_returned(check, value):
    assert check("steps", value) is None


@pytest.mark.parametrize("value", [0, -1])
def test_an_integer_below_one_is_refused(value):
    with pytest.raises(ValueError, match=rf"^`steps` must be at least 1, got {value}\.$"):
        check_positive_int("steps", value)


@pytest.mark.parametrize("value", [1.0, "1", None, True, [1], math.inf])
def test_what_is_no_integer_is_refused_and_a_bool_is_none(value):
    with pytest.raises(TypeError, match=r"^`steps` must be an `int` of at least 1, got .+\.$"):
        check_positive_int("steps", value)


@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_only_true_and_false_are_bools(value):
    with pytest.raises(TypeError, match=r"^`hold` must be `True` or `False`, got .+\.$"):
        check_bool("hold", value)


@pytest.mark.parametrize("value", [-0.01, 1.01, 90, math.nan, math.inf])
def test_a_fraction_outside_zero_to_one_is_refused(value):
    with pytest.raises(ValueError, match=r"^`above` must be from 0 to 1, got .+\.$"):
        check_fraction("above", value)


@pytest.mark.parametrize("value", ["90%", True, None])
def test_a_fraction_that_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match=r"^`above` must be a number from 0 to 1, got .+\.$"):
        check_fraction("above", value)


@pytest.mark.parametrize("words", [["step", "epoch"], ("step", "epoch"), iter(["step", "epoch"])])
def test_a_known_word_passes(words):
    assert check_word("when", "epoch", words) is None


@pytest.mark.parametrize("value", ["Step", "", None, 3, ["step"]])
def test_an_unknown_word_is_refused_with_all_that_exist(value):
    with pytest.raises(ValueError, match=r"^`when` must be one of 'step', 'epoch', got ") as error:
        check_word("when", value, iter(["step", "epoch"]))
    assert repr(value) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [[0], (5, 6), [3, 3]])
def test_lists_and_tuples_of_steps_pass(value):
    assert check_steps("steps", value) is None


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (5, TypeError),
        ("5", TypeError),
        ([True], TypeError),
        ([], ValueError),
        ([1, -1], ValueError),
    ],
)
def test_what_is_no_list_of_steps_is_refused(value, error):
    with pytest.raises(error, match=r"^`steps[^\n]+ must [^\n]+, got [^\n]+\.$"):
        check_steps("steps", value)


@pytest.mark.parametrize("value", [None, "here", Path("there")])
def test_a_path_passes_and_none(value):
    assert check_path("dirpath", value) is None


@pytest.mark.parametrize(
    ("value", "error"),
    [("", ValueError), ("s3://a/b", ValueError), (3, TypeError), (["a"], TypeError)],
)
def test_what_is_no_path_is_refused(value, error):
    with pytest.raises(
        error, match=r"^`dirpath` must be a path( on this machine)? or `None`, got .+\.$"
    ):
        check_path("dirpath", value)
