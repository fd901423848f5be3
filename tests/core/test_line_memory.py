from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memopt.core.line_memory import find_function, has_line_memory, line_memory
from lightning_memopt.core.patching import PatchedMethod, surround
from tests.models import Block, Blocks


class FakeLineProfiler:
    """Does with the trace function what pytorch_memlab's does."""

    def __init__(self, *functions: Callable[..., Any], target_gpu: int) -> None:
        self.functions, self.target_gpu = functions, target_gpu

    def enable(self) -> None:
        sys.settrace(lambda *_: None)

    def print_stats(self, stream: Any) -> None:
        stream.write(f"{[f.__name__ for f in self.functions]} on {self.target_gpu}")


@pytest.fixture
def memlab(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("pytorch_memlab")
    module.LineProfiler = FakeLineProfiler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_memlab", module)


def trace(*_: Any) -> None:
    """Stand in for a debugger."""


@pytest.mark.usefixtures("memlab")
@pytest.mark.parametrize("is_raising", [False, True])
def test_a_debuggers_trace_function_is_put_back(is_raising: bool):
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyError), line_memory([trace], torch.device("cuda", 3)):
            during = sys.gettrace()
            if is_raising:
                raise KeyError
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert during is not trace
    assert after is trace


@pytest.mark.usefixtures("memlab")
def test_the_text_is_that_of_the_functions_on_the_device():
    with line_memory([trace, Blocks.loss], torch.device("cuda", 3)) as text:
        pass
    assert text() == "['trace', 'loss'] on 3"


FIGURES = ("active_bytes.all.peak", "reserved_bytes.all.peak", "active_bytes.all.allocated")


def test_pytorch_memlab_itself_tells_of_each_line(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("pytorch_memlab")
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    figures = dict.fromkeys(FIGURES, 2**20) | {"num_alloc_retries": 0, "num_ooms": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: figures)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    model = Blocks()
    undo = surround(model, "training_step", nullcontext)
    functions = [find_function(model, name) for name in ("training_step", "blocks.0.forward")]
    with line_memory(functions, torch.device("cuda", 0)) as text:
        model.training_step([torch.ones(4, 4), torch.ones(4, 1)], 0)
    undo()
    assert "## Blocks.training_step" in text()
    assert "return x + self.dropout" in text()
    assert "1.00M" in text()
    assert "mse_loss" not in text()


class Own(nn.Module):
    builtin = staticmethod(torch.neg)

    @functools.cache  # noqa: B019 - a wrapper that knows its function
    def cached(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("training_step", Blocks.training_step),
        ("blocks.1.forward", Block.forward),
        ("head.forward", nn.Linear.forward),
        ("nobody", None),
        ("head.nobody.forward", None),
        ("head.weight", None),
        ("n", None),
    ],
)
def test_a_dotted_name_finds_the_function(name: str, function: Any):
    assert find_function(Blocks(), name) is function


def test_behind_wrappers_the_users_function_is_found():
    model = Blocks()
    PatchedMethod(model.blocks[0], "forward")
    assert find_function(model, "blocks.0.forward") is Block.forward
    assert find_function(Own(), "cached") is Own.cached.__wrapped__
    assert find_function(Own(), "builtin") is None
    compiled: Any = lambda x: x  # noqa: E731
    compiled._torchdynamo_orig_callable = model.head.forward  # as `torch.compile` leaves it
    model.head.forward = compiled
    assert find_function(model, "head.forward") is nn.Linear.forward


def test_whether_the_package_can_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_memlab", ModuleType("pytorch_memlab"))
    assert has_line_memory()
    monkeypatch.setitem(sys.modules, "pytorch_memlab", None)  # an import fails
    assert not has_line_memory()
