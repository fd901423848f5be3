from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch

from lightning_memopt.core.generators import held_by, same_randomness

CPU = torch.device("cpu")


def generators() -> SimpleNamespace:
    return SimpleNamespace(
        python=random.Random(0),
        torch=torch.Generator().manual_seed(0),
        old=numpy.random.RandomState(0),
        new=numpy.random.default_rng(0),
        system=random.SystemRandom(),  # has no state to keep
    )


def draws(own: SimpleNamespace) -> list[float]:
    return [
        random.random(),
        float(numpy.random.rand()),
        float(torch.rand(())),
        own.python.random(),
        float(torch.rand((), generator=own.torch)),
        float(own.old.rand()),
        float(own.new.random()),
    ]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda own: own,
        lambda own: [{"transforms": (SimpleNamespace(own=own),)}],
        lambda own: partial(print, own, sep=own.new),
        lambda own: SimpleNamespace(
            draw=own.python.random, again=own.new.random, more=own.old.rand, own=own.torch
        ),
    ],
    ids=["attribute", "nested", "partial", "bound methods"],
)
def test_generators_go_on_as_if_nothing_had_been_drawn(wrap):
    own = generators()
    with same_randomness(CPU, wrap(own)):
        first = draws(own)
        assert draws(own) != first
    assert draws(own) == first


def test_generators_are_put_back_after_an_error_too():
    own = generators()
    first = []

    def fail() -> None:
        with same_randomness(CPU, own):
            first.extend(draws(own))
            raise RuntimeError("data")

    with pytest.raises(RuntimeError, match="data"):
        fail()
    assert draws(own) == first


def test_the_nearest_comes_first_and_each_once():
    inner = SimpleNamespace(name="inner")
    outer = SimpleNamespace(inner=inner, again=[inner, "text"])
    outer.itself = outer
    found = list(held_by(outer))
    assert found[:2] == [outer, inner]
    assert sum(each is inner for each in found) == sum(each is outer for each in found) == 1
    assert "text" in found
    assert "inner" in found


def test_data_modules_and_classes_are_not_looked_into():
    long = [SimpleNamespace(held=i) for i in range(2000)]
    found = list(held_by(SimpleNamespace(long=long, module=random, kind=SimpleNamespace)))
    assert found[1:] == [long, random, SimpleNamespace]
    tree = [[object() for _ in range(200)] for _ in range(200)]
    assert len(list(held_by(tree))) == 10_000
