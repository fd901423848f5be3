from __future__ import annotations

import random

import numpy
import torch

from lightning_memopt.core.random_state import RandomState, host_random_states


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_every_generator_goes_on_from_where_it_was_each_time():
    state = RandomState(torch.device("cpu"))
    first = draws()
    assert draws() != first
    state.put_back()
    assert draws() == first
    state.put_back()
    assert draws() == first


def test_numpys_state_is_right_whatever_was_drawn():
    """It isn't read anew where nothing was drawn, though a kept normal number leaves no mark."""
    numpy.random.seed(3)
    for draw in (numpy.random.rand, numpy.random.randn, numpy.random.randn, lambda: None) * 3:
        draw()
        state, expected = host_random_states()[1], numpy.random.get_state()
        assert state[1].tolist() == expected[1].tolist()
        assert state[2:] == expected[2:]
    assert host_random_states()[1] is host_random_states()[1]
