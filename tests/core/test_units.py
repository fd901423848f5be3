import pytest

from lightning_memopt.core.units import GIB, MIB, Size, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        (20 * GIB, 20 * GIB),
        ("1B", 1),
        ("1KiB", 1024),
        ("512MiB", 512 * MIB),
        ("20GiB", 20 * GIB),
        ("1TiB", 1024**4),
        ("1KB", 1000),
        ("1MB", 10**6),
        ("20GB", 20 * 10**9),
        ("1TB", 10**12),
        ("1.5GiB", 3 * GIB // 2),
    ],
)
def test_binary_and_decimal_units_give_exact_bytes(text, expected):
    assert parse_size(text).of(0) == expected


@pytest.mark.parametrize("text", ["2gib", "2GIB", " 2 GiB ", "2  giB"])
def test_case_and_spaces_do_not_matter(text):
    assert parse_size(text) == Size(2 * GIB, is_share=False)


@pytest.mark.parametrize(("text", "expected"), [("90%", 900), ("100%", 1000), ("0.5 %", 5)])
def test_a_share_is_taken_of_the_total(text, expected):
    assert parse_size(text).is_share
    assert parse_size(text).of(1000) == expected


def test_an_absolute_size_ignores_the_total():
    assert parse_size("1KiB").of(10) == parse_size("1KiB").of(10**12) == 1024


@pytest.mark.parametrize(
    "text",
    ["", "20", "GiB", "20 G", "20Gi", "20iB", "-1GiB", "1e3B", "1,5GiB", "nan%", "90%%", "ninety%"],
)
def test_a_text_that_is_no_size_is_refused_with_what_was_expected_and_given(text):
    with pytest.raises(ValueError, match=r'^`memory` must be .*"20GiB".*"90%"') as error:
        parse_size(text, "memory")
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [0, -1, "0GiB", "0%"])
def test_a_size_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match=r"^`memory` must be above zero, got ('0.*'|0|-1)\.$"):
        parse_size(value, "memory")


@pytest.mark.parametrize("value", ["100.1%", "200%"])
def test_a_share_above_all_is_refused(value):
    with pytest.raises(ValueError, match=r"^`memory` must be at most 100%, got '\d+.*%'"):
        parse_size(value, "memory")


@pytest.mark.parametrize("value", [0.9, True, None, [1], b"1GiB"])
def test_a_wrong_type_is_refused(value):
    with pytest.raises(TypeError, match=r"^`memory` must be bytes as an `int`.*got "):
        parse_size(value, "memory")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (MIB - 1, "1024.00 KiB"),
        (MIB, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (1024**4, "1.00 TiB"),
        (-2048, "-2.00 KiB"),
        (-5, "-5 B"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_fits(amount, text):
    assert format_bytes(amount) == text


@pytest.mark.parametrize("size", [1, 1023, 5 * MIB, 7 * GIB])
def test_what_is_written_can_be_read_again(size):
    assert parse_size(format_bytes(size)).of(0) == size
