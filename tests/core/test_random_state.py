from __future__ import annotations

import random

import numpy
import torch

from lightning_memopt.core.random_state import RandomState


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
