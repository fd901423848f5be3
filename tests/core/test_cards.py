from __future__ import annotations

import pytest

from lightning_memopt.core.cards import CONTEXT, find_card
from lightning_memopt.core.units import GIB, MIB


@pytest.mark.parametrize("name", ["h200", "H200", "a100-80gb", "A100_80GB", "rtx 4090"])
def test_cards_are_known_by_their_names(name):
    card = find_card(name)
    assert card.name == name.lower().replace("_", "-").replace(" ", "-")
    assert card.usable > 20 * GIB


def test_a_context_is_taken_off():
    assert find_card("h200").usable == 143_156 * MIB - CONTEXT
    assert find_card("24GiB").usable == 24 * GIB - CONTEXT
    assert find_card("24GiB").name == "24GiB"


def test_libraries_take_more_from_hopper_on():
    assert find_card("h100").library_bytes == find_card("cuda").library_bytes == 32 * MIB
    assert find_card("t4").library_bytes == find_card("8GiB").library_bytes == 8.125 * MIB


def test_any_gpu_has_no_limit():
    assert find_card("cuda").usable is None


@pytest.mark.parametrize("name", ["", "h2000", "mps", "-3GiB", "50%", "24 parrots"])
def test_what_is_no_card_is_told_in_a_line(name):
    with pytest.raises(ValueError, match="`device` must be `cuda`") as raised:
        find_card(name)
    assert "\n" not in str(raised.value)
    assert "h200" in str(raised.value)
