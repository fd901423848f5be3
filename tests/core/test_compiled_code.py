from __future__ import annotations

import torch
from torch import nn

from lightning_memopt.core.compiled_code import is_compiled


class WithMethod(nn.Linear):
    compiled = torch.compile(nn.Linear.forward, backend="eager")


class WithDisabledMethod(nn.Linear):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class FromBeside(nn.Linear):
    """Its file has no compiled function; a test puts one there."""


def test_plain_modules_are_not_compiled():
    assert not is_compiled(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1)))
    assert not is_compiled(WithDisabledMethod(2, 2))


def test_a_module_in_it_or_in_place_may_be_compiled():
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
    in_place = nn.Sequential(nn.Linear(2, 2))
    in_place[0].compile(backend="eager")
    assert is_compiled(in_place)


def test_a_method_or_an_attribute_may_be_compiled():
    assert is_compiled(WithMethod(2, 2))
    module = nn.Linear(2, 2)
    module.function = torch.compile(torch.sin, backend="eager")
    assert is_compiled(module)


def test_a_function_beside_the_class_may_be_compiled(monkeypatch):
    assert not is_compiled(FromBeside(2, 2))
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    monkeypatch.setitem(globals(), "compiled", compiled)
    assert is_compiled(FromBeside(2, 2))
